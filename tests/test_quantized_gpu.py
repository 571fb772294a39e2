"""Quantised weights on CUDA: the kernels that a CPU has not. `make test-gpu` runs it."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torchao.quantization as ao
from torch import nn

import diffgraph
import pipelines
from benchmarks._weights import block_linears
from diffgraph.values.compare import same_bits

pytestmark = pytest.mark.gpu

TORCHAO = {
    "fp8, activations too, by row": lambda: ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()),
    "fp8, activations too, by tensor": lambda: ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerTensor()),
    "int8": ao.Int8WeightOnlyConfig,
    "int8, activations too": ao.Int8DynamicActivationInt8WeightConfig,
    "int4": lambda: ao.Int4WeightOnlyConfig(group_size=32, int4_packing_format="tile_packed_to_4d"),
}
FAMILIES = ("flux", "z_image")


@pytest.fixture(autouse=True)
def slow_is_fine(monkeypatch):
    if not torch.cuda.is_available():
        pytest.fail("the gpu tests need a CUDA device")
    torch.manual_seed(0)
    monkeypatch.setattr("diffgraph.recording.verification.MAX_SLOWER", float("inf"))


def quantized_pipe(family, quantise):
    """Its blocks' widths are multiples of 16, as the kernels ask; those of Flux are made so wide here."""
    pipe = pipelines.build(family, "tiny")
    pipe.set_progress_bar_config(disable=True)
    if family == "flux":
        config = {**pipe.transformer.config, "num_attention_heads": 4}
        pipe.transformer = type(pipe.transformer).from_config(config)
    pipe.to("cuda", torch.bfloat16)
    quantise(pipe.transformer)
    return pipe


def by_torchao(config):
    def act(module):
        names = set(block_linears(module))
        ao.quantize_(module, config(), filter_fn=lambda layer, name: isinstance(layer, nn.Linear) and name in names)

    return act


def by_bitsandbytes(kind):
    def act(module):
        import bitsandbytes as bnb

        for name in block_linears(module):
            layer = module.get_submodule(name)
            sizes = layer.in_features, layer.out_features, layer.bias is not None
            made = (
                bnb.nn.Linear4bit(*sizes, compute_dtype=torch.bfloat16, quant_type="nf4")
                if kind == "4 bits"
                else bnb.nn.Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0 if "outliers" in kind else 0.0)
            )
            made.load_state_dict({key: value.cpu() for key, value in layer.state_dict().items()})
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, made.to("cuda").eval())

    return act


def latents(pipe, prompt="a red cat", width=64, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    call = dict(height=64, width=width, num_inference_steps=5, generator=generator, output_type="latent")
    with torch.no_grad():
        return pipe(prompt, **call)[0].clone()


CASES = [("a red cat", 64, 0), ("a red cat", 96, 1), ("a red cat", 64, 2)]


def pictures_stay(pipe):
    wanted = [latents(pipe, *case) for case in CASES]
    diffgraph.accelerate_pipeline(pipe)
    found = [latents(pipe, *case) for case in CASES]
    assert same_bits(found, wanted)
    return diffgraph.report(pipe)


@pytest.mark.parametrize("kind", TORCHAO)
@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_of_torchao_weights_stay(family, kind):
    report = pictures_stay(quantized_pipe(family, by_torchao(TORCHAO[kind])))
    assert report.replays > 0
    assert not {"verify_failed", "capture_failed"} & set(report.reasons)


@pytest.mark.parametrize("kind", [kind for kind in TORCHAO if kind != "int4"])  # packed for this GPU
def test_torchao_weights_that_went_to_the_cpu_and_back_are_read_where_they_are(kind):
    pipe = quantized_pipe("flux", by_torchao(TORCHAO[kind]))
    pictures_stay(pipe)
    wanted = latents(pipe)
    pipe.transformer.to("cpu")
    hog = [torch.full((256, 256), float("nan"), device="cuda") for _ in range(64)]
    pipe.transformer.to("cuda")
    assert same_bits(latents(pipe), wanted)
    assert diffgraph.report(pipe).reasons["weights_changed"] == 1
    del hog


@pytest.mark.parametrize("kind", ["int8", "fp8, activations too, by row"])
def test_torchao_scales_changed_in_place_are_read_by_the_same_recording(kind):
    pipe = quantized_pipe("flux", by_torchao(TORCHAO[kind]))
    pictures_stay(pipe)
    before, captures = latents(pipe), diffgraph.report(pipe).captures
    layer = pipe.transformer.get_submodule(block_linears(pipe.transformer)[0])
    with torch.no_grad():
        layer.weight.scale.mul_(2)
    after = latents(pipe)
    assert diffgraph.report(pipe).captures == captures
    assert not same_bits(before, after)
    with diffgraph.paused(pipe):
        assert same_bits(latents(pipe), after)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed here")
@pytest.mark.parametrize("kind", ["4 bits", "8 bits", "8 bits with outliers"])
def test_pictures_of_bitsandbytes_weights_stay(kind):
    report = pictures_stay(quantized_pipe("flux", by_bitsandbytes(kind)))
    if "outliers" in kind:
        assert (report.captures, set(report.reasons)) == (0, {"side_effects"})
    else:
        assert report.replays > 0
