"""Text encoders and the VAE, recorded beside the denoiser."""

from __future__ import annotations

import pytest
import torch

import diffgraph
import pipelines
from diffgraph.values.compare import same_bits
from tests._toys import some_slow


def build(family):
    pipe = pipelines.build(family)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def everything(pipe):
    return tuple(name for name, part in pipe.components.items() if isinstance(part, torch.nn.Module))


def picture(pipe, prompt="a red cat", **options):
    generator = torch.Generator().manual_seed(0)
    given = {"height": 64, "width": 64, "num_inference_steps": 3, "output_type": "pt", **options}
    return pipe(prompt, generator=generator, **given)[0]


#: The fewest that have a motion; a VAE that decodes Wan's usual 81 takes most of a test.
FRAMES = {"wan": {"num_frames": 5}}


@pytest.mark.parametrize("family", some_slow(pipelines.FAMILIES, "wan", "sdxl"))
def test_pictures_are_eagers_with_every_component_recorded(family):
    pipe = build(family)
    prompts = ["a red cat", "a blue cat"] * 3
    frames = FRAMES.get(family, {})
    want = [picture(pipe, prompt, **frames) for prompt in prompts]
    diffgraph.accelerate_pipeline(pipe, components=everything(pipe), prompt_buckets=None, poison=True)
    for prompt, expected in zip(prompts, want, strict=True):
        assert same_bits(picture(pipe, prompt, **frames), expected)
    replayed = {s.label.partition(":")[0] for s in diffgraph.report(pipe).signatures if s.replays}
    assert "vae.decoder" in replayed and any(name.startswith("text_encoder") for name in replayed)
    diffgraph.restore_pipeline(pipe)
    assert not any("_compiled_call_impl" in vars(m) for name in everything(pipe) for m in getattr(pipe, name).modules())


def test_at_start_up_the_picture_is_decoded_too():
    pipe = build("flux")
    want = picture(pipe)
    diffgraph.accelerate_pipeline(pipe, capture_shapes="64x64", components=everything(pipe))
    assert same_bits(picture(pipe), want)
    report = diffgraph.report(pipe)
    assert report.unseen == {} and all(s.captured for s in report.signatures)


def test_a_vae_alone_can_be_recorded():
    pipe = build("sd3")
    want = picture(pipe)
    diffgraph.accelerate_pipeline(pipe, components="vae")
    for _ in range(4):
        assert same_bits(picture(pipe), want)
    assert {s.label.partition(":")[0] for s in diffgraph.report(pipe).signatures} == {"vae.decoder"}


@pytest.mark.parametrize("names", [("transformer", "tokenizer"), ("tokenizer",), "scheduler", ("transformer", "unet_3")])
def test_what_is_no_module_of_the_pipeline_is_refused_by_name(names):
    pipe = build("flux")
    with pytest.raises(diffgraph.OptionError, match=r"is no module of this FluxPipeline; accepted: .*transformer"):
        diffgraph.accelerate_pipeline(pipe, components=names)
    assert "_compiled_call_impl" not in vars(pipe.transformer)
