"""`compile_blocks` on CUDA: compiled kernels inside of graphs. `make test-gpu` runs it."""

from __future__ import annotations

import pytest
import torch
import torchao.quantization as ao
from torch._dynamo.utils import counters

import diffgraph
import pipelines
from benchmarks._calls import DenoiserCall
from benchmarks._weights import block_linears
from diffgraph.compiling import pieces
from diffgraph.engine.layout import Layout
from diffgraph.values.compare import close, same_bits

pytestmark = pytest.mark.gpu

FAMILIES = ("qwen_image", "flux", "z_image", "sd3", "pixart", "wan", "sana", "sdxl")


@pytest.fixture(autouse=True)
def slow_is_fine(monkeypatch):
    if not torch.cuda.is_available():
        pytest.fail("the gpu tests need a CUDA device")
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.setattr("diffgraph.recording.verification.MAX_SLOWER", float("inf"))


def call_of(family, shape="64x64", prepare=lambda module: None):
    pipe = pipelines.build(family, "tiny").to("cuda", torch.bfloat16)
    pipe.set_progress_bar_config(disable=True)
    call = DenoiserCall.of(pipe, family, shape)
    prepare(call.module.eval())
    return call


@torch.no_grad()
def steps(call, seeds=range(4)):
    """Calls with new inputs, each close to eager; the last one's result and inputs."""
    for seed in seeds:
        new = call.with_new_inputs(seed)
        found = new()
        with diffgraph.paused(call.module):
            assert close(found, new())
    return found, new


def row_of(call):
    return diffgraph.report(call.module).signatures[-1]


def recording_of(call):
    (entry,) = call.module._compiled_call_impl.table.entries.values()
    return entry.recording


@pytest.mark.parametrize("family", FAMILIES)
def test_replays_are_close_to_eager_and_have_the_bits_of_the_compiled_forward(family):
    call = call_of(family)
    diffgraph.accelerate_module(call.module, compile_blocks=True)
    found, _ = steps(call)
    report = diffgraph.report(call.module)
    assert report.replays == 2 and report.captures == 1, report
    assert row_of(call).uncompiled is None and row_of(call).compiles > 0
    with torch.no_grad():
        assert same_bits(found, recording_of(call).unrecorded(call.module, call.module._call_impl))


def test_no_compiled_code_is_called_at_replay_and_its_kernels_are_fewer(monkeypatch):
    call = call_of("flux")
    kernels = {}
    for compiled in (False, True):
        diffgraph.accelerate_module(call.module, compile_blocks=compiled)
        steps(call)
        segments, breaks = row_of(call).segments, row_of(call).breaks
        with monkeypatch.context() as patched:
            patched.setattr(pieces.Piece, "run", None)
            entered = pieces.Tally.entered
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile, torch.no_grad():
                call()
            assert pieces.Tally.entered == entered
        kernels[compiled] = (segments, breaks), sum(event.count for event in profile.key_averages())
        assert diffgraph.report(call.module).replays == 3
        diffgraph.restore_pipeline(call.module)
    assert kernels[True][0] == kernels[False][0], "as many segments, around the same breaks"
    assert kernels[True][1] < kernels[False][1]


def test_nothing_that_a_replay_reads_is_given_to_others():
    call = call_of("sd3")
    diffgraph.accelerate_module(call.module, compile_blocks=True)
    found, new = steps(call)
    torch.cuda.synchronize()
    for size in (1, 2**10, 2**14, 2**18, 2**20, 2**24):  # whatever is free is written over
        spoilt = [torch.full((size,), float("nan"), device="cuda") for _ in range(64 if size < 2**20 else 4)]
        del spoilt
    with torch.no_grad():
        assert same_bits(new(), found)


def test_memory_is_given_back():
    call = call_of("pixart")
    steps_without = torch.cuda.memory_allocated()
    diffgraph.accelerate_module(call.module, compile_blocks=True)
    steps(call)
    assert diffgraph.report(call.module).memory_bytes > 0
    diffgraph.restore_pipeline(call.module)
    torch._dynamo.reset()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= steps_without + 2**24  # cuBLAS' workspaces


def test_a_second_size_and_a_third_compile_once_between_them():
    call = call_of("flux")
    pipe_calls = [call, *(resized(call, rows) for rows in (48, 24, 12))]
    diffgraph.accelerate_module(call.module, compile_blocks=True)
    for one in pipe_calls:
        steps(one)
    compiles = [row.compiles for row in diffgraph.report(call.module).signatures]
    assert compiles[0] == 2 and compiles[1] == 2 and compiles[2:] == [0, 0]


def resized(call, rows):
    """The same call with fewer rows of text."""
    kwargs = dict(call.kwargs)
    kwargs["encoder_hidden_states"] = kwargs["encoder_hidden_states"][:, :rows].contiguous()
    kwargs["txt_ids"] = kwargs["txt_ids"][:rows].contiguous()
    return DenoiserCall(call.module, call.args, kwargs)


def test_compiled_code_that_cannot_be_recorded_is_left_out_and_all_goes_on():
    def synchronizes(graph, _):
        def run(*args):
            torch.cuda.current_stream().synchronize()  # not while a graph records
            return graph(*args)

        return run

    call = call_of("pixart")
    diffgraph.accelerate_module(call.module, compile_blocks={"backend": synchronizes})
    steps(call)
    assert "captur" in row_of(call).uncompiled and diffgraph.report(call.module).replays == 2
    assert torch.isfinite(torch.randn(8, device="cuda")).all()


@pytest.mark.parametrize("config", ["fp8", "int8"])
def test_quantised_weights(config):
    made = {
        "fp8": lambda: ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()),
        "int8": ao.Int8WeightOnlyConfig,
    }[config]()

    def prepare(module):
        names = set(block_linears(module))
        ao.quantize_(module, made, filter_fn=lambda m, name: isinstance(m, torch.nn.Linear) and name in names)

    call = call_of("z_image", prepare=prepare)
    diffgraph.accelerate_module(call.module, compile_blocks=True)
    swapped = counters["inductor"]["woq_matcher_count"]
    steps(call)
    assert row_of(call).uncompiled is None and row_of(call).compiles > 0
    assert diffgraph.report(call.module).captures == 1
    if config == "int8":
        assert counters["inductor"]["woq_matcher_count"] == swapped, "by a kernel for few rows"


@pytest.mark.parametrize("together", ["rows", "heads"])
@pytest.mark.parametrize("channels", [64, 128])
def test_fast_attention_returns_its_results_as_its_query_lies(together, channels):
    """So no copies are made for the compiled code that comes next."""
    q = torch.randn(2, 8, 1024, channels, device="cuda", dtype=torch.bfloat16)
    if together == "heads":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert Layout.expected((q, q, q), {}).holds(torch.nn.functional.scaled_dot_product_attention(q, q, q))


def test_a_lora_is_compiled_with_its_blocks():
    call = call_of("flux")
    diffgraph.accelerate_module(call.module, compile_blocks=True)
    steps(call)
    from benchmarks._weights import add_lora

    add_lora(call.module, "a")
    steps(call)
    call.module.set_adapters(["a"], [0.5])
    steps(call)
    report = diffgraph.report(call.module)
    assert report.captures == 3 and row_of(call).compiles == 2, report
