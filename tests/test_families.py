"""Every family, tiny, through its real pipeline call: the pictures of eager, to the bit."""

import inspect

import numpy as np
import pytest
import torch
from diffusers import FluxImg2ImgPipeline

import diffgraph
import pipelines
from tests._toys import some_slow

# Prompts that have one length in every tokenizer of `pipelines`.
PROMPTS = ("a red cat", "a red day", "a red ear")
SIZES = ((64, 64), (64, 96))


def build(family, **kwargs):
    pipe = pipelines.build(family, "tiny", **kwargs)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(pipe, prompt, height, width, seed=0, **kwargs):
    """The picture (or video) of one call with the pipeline's own defaults, as an array."""
    if "num_frames" in inspect.signature(type(pipe).__call__).parameters:
        kwargs.setdefault("num_frames", 5)
    generator = torch.Generator().manual_seed(seed)
    call = dict(height=height, width=width, num_inference_steps=4, output_type="np", generator=generator, **kwargs)
    return np.asarray(pipe(prompt, **call)[0])


def traces(pipe):
    """What undoing must bring back."""
    modules = {name: m for name, m in pipe.components.items() if isinstance(m, torch.nn.Module)}
    return {
        "pipe": set(vars(pipe)),
        "types": {name: type(value) for name, value in pipe.components.items()},
        "attributes": {name: set(vars(sub)) for name, m in modules.items() for sub in m.modules()},
        "signatures": {name: (inspect.signature(m.forward), m.forward.__name__) for name, m in modules.items()},
        "keys": {name: list(m.state_dict()) for name, m in modules.items()},
    }


#: What takes longest goes to `make test-slow`; test_components draws with it, too.
DRAWN = some_slow(pipelines.FAMILIES, "sana")


@pytest.mark.parametrize("family", DRAWN)
def test_pictures_are_those_of_eager(family):
    pipe = build(family)
    cases = [(prompt, *size, seed) for size in SIZES for seed, prompt in enumerate(PROMPTS)]
    expected = [picture(pipe, *case) for case in cases]
    assert not np.array_equal(expected[0], expected[1])
    before = traces(pipe)
    assert diffgraph.accelerate_pipeline(pipe, poison=True) is pipe
    for case, want in zip(cases, expected, strict=True):
        assert np.array_equal(picture(pipe, *case), want)
    report = diffgraph.report(pipe)
    assert report.captures == len(report.signatures) == len(SIZES)
    assert report.replays > 0
    assert report.reasons == {"unseen_signature": report.captures}
    assert all(s.captured and s.breaks > 0 for s in report.signatures)
    diffgraph.restore_pipeline(pipe)
    assert traces(pipe) == before
    assert np.array_equal(picture(pipe, *cases[0]), expected[0])


@pytest.mark.parametrize("backend", ["full", "eager"])
@pytest.mark.parametrize("family", ["qwen_image", "sdxl"])
def test_the_other_backends_give_the_same_pictures(family, backend):
    pipe = build(family)
    want = [picture(pipe, "a red cat", 64, 64, seed) for seed in (0, 1)]
    diffgraph.accelerate_pipeline(pipe, backend=backend)
    assert all(np.array_equal(picture(pipe, "a red cat", 64, 64, seed), want[seed]) for seed in (0, 1))
    report = diffgraph.report(pipe)
    assert report.replays == 6
    assert report.signatures[0].breaks == 0


def test_guidance_in_two_calls_a_step_with_prompts_of_two_lengths():
    pipe = build("qwen_image")
    calls = [dict(prompt=p, height=64, width=64, negative_prompt="bad", true_cfg_scale=3.0) for p in PROMPTS]
    want = [picture(pipe, **call) for call in calls]
    diffgraph.accelerate_pipeline(pipe, poison=True, prompt_buckets=None)
    for call, expected in zip(calls, want, strict=True):
        assert np.array_equal(picture(pipe, **call), expected)
    report = diffgraph.report(pipe)
    assert (report.captures, report.replays, report.eager) == (2, 3 * 8 - 4, 2)


def test_both_denoisers_of_a_two_denoiser_pipeline():
    pipe = build("wan", denoisers=2)
    want = [picture(pipe, prompt, 64, 64) for prompt in PROMPTS]
    diffgraph.accelerate_pipeline(pipe, poison=True)
    for prompt, expected in zip(PROMPTS, want, strict=True):
        assert np.array_equal(picture(pipe, prompt, 64, 64), expected)
    names = {s.label.split(":")[0] for s in diffgraph.report(pipe).signatures if s.captured}
    assert names == {"transformer", "transformer_2"}


@pytest.mark.parametrize("family", some_slow(pipelines.FAMILIES, "sana", "sdxl"))
def test_the_first_real_call_after_start_up_capture_replays(family):
    pipe = build(family)
    want = picture(pipe, "a red cat", 64, 96)
    before, rng = traces(pipe), torch.get_rng_state()
    frames = "x5" if family == "wan" else ""
    prompt = {"qwen_image": "@prompt=12", "z_image": "@prompt=28"}.get(family, "")
    diffgraph.accelerate_pipeline(pipe, capture_shapes=[f"64x64{frames}{prompt}", f"64x96{frames}{prompt}"])
    assert torch.equal(torch.get_rng_state(), rng)
    at_start = diffgraph.report(pipe)
    assert at_start.captures == 2
    assert np.array_equal(picture(pipe, "a red cat", 64, 96), want)
    report = diffgraph.report(pipe)
    assert (report.captures, report.eager) == (at_start.captures, at_start.eager)
    assert report.replays >= at_start.replays + 4
    picture(pipe, "a red cat", 96, 128)
    report = diffgraph.report(pipe)
    assert report.captures == 2  # an unseen signature is eager, never a capture
    assert report.reasons["unseen_signature"] > 0 and "unseen_signature" not in at_start.reasons
    diffgraph.restore_pipeline(pipe)
    after = traces(pipe)
    for what in ("pipe", "types", "attributes", "signatures", "keys"):
        assert after[what] == before[what]


def test_start_up_capture_lasts_where_the_pipeline_ends_its_call_with_a_hook_registry():
    base = build("flux")
    pipe = FluxImg2ImgPipeline(**base.components)
    pipe.set_progress_bar_config(disable=True)
    image = np.zeros((64, 64, 3), np.float32)

    def latents():
        call = dict(image=image, height=64, width=64, strength=1.0, num_inference_steps=4, output_type="latent")
        return pipe("a red cat", generator=torch.Generator().manual_seed(0), **call)[0]

    want = latents()
    shape = diffgraph.CaptureShape(64, 64, inputs={"image": image, "strength": 1.0})
    diffgraph.accelerate_pipeline(pipe, capture_shapes=shape)
    before = diffgraph.report(pipe)
    for _ in range(3):
        assert torch.equal(latents(), want)
    assert diffgraph.report(pipe).eager == before.eager
