"""What an operator sees: the log, metrics, a profiler's trace, and an explanation of a call before it is made."""

from __future__ import annotations

import logging
import re
import time

import pytest
import torch
from _toys import Net

import diffgraph
import pipelines
from diffgraph.devices import new_pool
from diffgraph.engine import ranges
from diffgraph.engine.sequence import GraphSequence


def net(**options):
    return diffgraph.accelerate_module(Net().eval(), **options)


def run(module, rows=4, times=1, **kwargs):
    with torch.no_grad():
        for _ in range(times):
            module(torch.ones(1, rows, 8), **kwargs)


@pytest.fixture
def flux():
    pipe = pipelines.build("flux", "tiny")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, **call):
    given = dict(prompt="a red cat", height=64, width=64, num_inference_steps=4, output_type="latent") | call
    return pipe(generator=torch.Generator().manual_seed(0), **given)[0]


# -- the log


def test_each_change_of_route_is_logged_once(caplog):
    module = net()
    with caplog.at_level(logging.INFO, "diffgraph"):
        run(module, times=6)
        with diffgraph.paused(module):
            run(module, times=3)
        run(module, times=3)
    assert [record.getMessage() for record in caplog.records] == [
        "Net: x=[1x4x8]: eager (unseen_signature)",
        "Net: x=[1x4x8]: capture, was eager (unseen_signature)",
        "Net: x=[1x4x8]: replay, was capture",
        "Net: eager (paused)",
    ]
    assert {record.name for record in caplog.records} == {"diffgraph"}


def test_signatures_that_alternate_are_told_once_each(caplog):
    module = net()
    with caplog.at_level(logging.INFO, "diffgraph"):
        for _ in range(6):
            run(module, rows=4)
            run(module, rows=6)
    assert len(caplog.records) == 6


# -- metrics


def test_a_report_is_a_table_a_dict_and_prometheus_text():
    module = net()
    run(module, times=5)
    report = diffgraph.report(module)
    assert "captures 1, replays 3, eager 1" in str(report)
    assert report.to_dict()["replays"] == 3
    text = report.to_prometheus(model='a "b"\n')
    assert 'diffgraph_calls_total{model="a \\"b\\"\\n",route="replay"} 3\n' in text
    assert 'diffgraph_eager_calls_total{model="a \\"b\\"\\n",reason="unseen_signature"} 1\n' in text
    assert 'signature="Net: x=[1x4x8]"} 3\n' in text
    line = re.compile(r'(# (HELP|TYPE) \w+ .+|\w+(\{\w+="(\\.|[^"\\])*"(,\w+="(\\.|[^"\\])*")*\})? [0-9.e+-]+)')
    assert all(line.fullmatch(row) for row in text.splitlines())


def test_no_two_samples_of_the_metrics_are_the_same():
    module = net()
    run(module, times=3)
    with torch.autocast("cpu", torch.bfloat16):  # another signature of the same label
        run(module, times=3)
    rows = [row.rpartition(" ")[0] for row in diffgraph.report(module).to_prometheus().splitlines() if row[0] != "#"]
    assert len(diffgraph.report(module).signatures) == 2 and len(rows) == len(set(rows))


# -- a profiler's trace


def test_a_trace_reads_like_the_design():
    module = net()
    run(module, times=4)
    with torch.profiler.profile() as profile:
        run(module)
    names = [event.name for event in sorted(profile.events(), key=lambda event: event.time_range.start)]
    ours = [name for name in names if name.startswith(("segment ", "break ", "Net: "))]
    assert ours == ["Net: x=[1x4x8]", "segment 0", "break 1: attention", "segment 2"]


def test_a_capture_is_seen_in_a_trace_and_changes_nothing():
    module = net()
    with torch.profiler.profile() as profile:
        run(module, times=4)
    assert "capture" in [event.name for event in profile.events()]
    assert (diffgraph.report(module).captures, diffgraph.report(module).replays) == (1, 2)


def test_ranges_cost_nothing_that_counts_while_nobody_profiles():
    assert not ranges.wanted()
    start = time.perf_counter()
    for _ in range(10_000):
        ranges.named("a signature", int)
    assert (time.perf_counter() - start) / 10_000 < 20e-6  # a hundredth of what a call may cost, and seen to take 0.2e-6


def test_a_tool_that_listens_to_nvtx_is_told_too(monkeypatch):
    told = []
    monkeypatch.setattr(ranges, "_LISTENED_TO", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("/"))
    with pytest.raises(ZeroDivisionError):
        ranges.named("break 1: f{x} %s", lambda: ranges.named("inside", lambda: 1 / 0))
    assert told == ["break 1: f{x} %s", "inside", "/", "/"]


def test_a_sequence_of_ones_own_has_ranges_too():
    sequence = GraphSequence(new_pool("cpu"))
    x = torch.ones(2)
    with diffgraph.breakable_graph(sequence):
        y = x + 1
    x.fill_(3)
    with torch.profiler.profile() as profile:
        sequence.replay()
    assert y.tolist() == [4, 4]
    assert "segment 0" in [event.name for event in profile.events()]


# -- explain


def test_what_is_foreseen_for_a_module_is_what_happens():
    module = net()
    x = torch.ones(1, 4, 8)
    foreseen, happened = [], []
    for pause in (False, False, False, True, False):
        before = diffgraph.report(module)
        with torch.no_grad():
            if pause:
                with diffgraph.paused(module):
                    foreseen.append(diffgraph.explain(module, x).calls[0])
                    module(x)
            else:
                foreseen.append(diffgraph.explain(module, x).calls[0])
                module(x)
        after = diffgraph.report(module)
        route = "capture" if after.captures > before.captures else "replay" if after.replays > before.replays else "eager"
        reasons = [r for r, n in after.reasons.items() if n > before.reasons.get(r, 0)]
        happened.append((route, reasons[0] if reasons else None))
    assert [(call.route, call.reason) for call in foreseen] == happened
    assert [route for route, _ in happened] == ["eager", "capture", "replay", "eager", "replay"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.layer.weight.__setattr__("data", m.layer.weight.data.clone()), "weights_changed"),
        (lambda m: m.layer.register_forward_hook(lambda *_: None), "hooks_changed"),
    ],
    ids=["weights", "hooks"],
)
def test_a_change_of_state_is_foreseen(change, reason):
    module = net()
    run(module, times=3)
    change(module)
    with torch.no_grad():
        found = diffgraph.explain(module, torch.ones(1, 4, 8)).calls[0]
        before = diffgraph.report(module)
        module(torch.ones(1, 4, 8))
    after = diffgraph.report(module)
    assert (found.route, found.reason) == ("eager", reason)
    assert after.reasons[reason] == before.reasons.get(reason, 0) + 1


def test_the_field_that_differs_from_the_nearest_recording_is_named():
    module = net()
    run(module, times=3)
    run(module, rows=6, times=3, scale=2.0)
    with torch.no_grad():
        found = diffgraph.explain(module, torch.ones(1, 6, 8), scale=3.0).calls[0]
    assert found.nearest == "Net: x=[1x6x8] scale=2"
    assert [tuple(d) for d in found.differences] == [("scale", "2.0", "3.0")]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = diffgraph.explain(module, torch.ones(1, 4, 8)).calls[0]
    assert [d.field for d in found.differences] == ["autocast"]
    with torch.no_grad():
        found = diffgraph.explain(module, x=torch.ones(1, 4, 8)).calls[0]
    assert [d.field for d in found.differences] == ["arguments"]


def test_explaining_a_pipeline_call_runs_nothing_of_the_denoiser_and_leaves_everything_as_it_was(flux):
    diffgraph.accelerate_pipeline(flux, capture_shapes="64x64")
    wanted, before = draw(flux), diffgraph.report(flux)
    ran = []
    block = flux.transformer.transformer_blocks[0]
    forward = type(block).forward
    type(block).forward = lambda self, *a, **k: ran.append(1) or forward(self, *a, **k)
    try:
        generator = torch.Generator().manual_seed(7)
        state = generator.get_state()
        found = diffgraph.explain(flux, "a red cat", height=96, width=64, generator=generator)
    finally:
        type(block).forward = forward
    assert not ran and torch.equal(generator.get_state(), state)
    (call,) = found.calls
    assert (call.route, call.reason, found.complete) == ("eager", "unseen_signature", False)
    assert "hidden_states: recorded [1x16x" in str(found) and "given [1x24x" in str(found)
    known = diffgraph.explain(flux, "a red cat", height=64, width=64)
    assert [c.route for c in known.calls] == ["replay"] and known.complete
    assert diffgraph.report(flux).to_dict() == before.to_dict()
    assert torch.equal(draw(flux), wanted)


def test_every_kind_of_call_is_explained_where_recordings_can_go_on():
    pipe = pipelines.build("qwen_image", "tiny")
    pipe.set_progress_bar_config(disable=True)
    call = dict(height=64, width=64, negative_prompt="a b c d e f g h i", true_cfg_scale=4.0)
    diffgraph.accelerate_pipeline(pipe, prompt_buckets=None)
    draw(pipe, **call)
    found = diffgraph.explain(pipe, "a red cat", **call)
    assert [c.route for c in found.calls] == ["replay", "replay"] and found.complete
    assert found.to_dict()["calls"][0]["differences"] == []


def test_text_encoders_run_and_are_not_counted(flux):
    diffgraph.accelerate_pipeline(flux, components=("transformer", "text_encoder", "text_encoder_2"))
    draw(flux)
    before = diffgraph.report(flux)
    found = diffgraph.explain(flux, "a red cat", height=64, width=64)
    assert [c.route for c in found.calls] == ["replay"] and found.calls[0].label.startswith("transformer: ")
    assert diffgraph.report(flux).to_dict() == before.to_dict()
    diffgraph.restore_pipeline(flux)
    diffgraph.accelerate_pipeline(flux, components="text_encoder")
    with pytest.raises(diffgraph.OptionError, match="no denoiser of this FluxPipeline is accelerated"):
        diffgraph.explain(flux, "a red cat")


def test_explain_needs_something_accelerated(flux):
    with pytest.raises(diffgraph.NotAcceleratedError):
        diffgraph.explain(flux, "a red cat")
    diffgraph.accelerate_pipeline(flux)
    with pytest.raises(TypeError):
        diffgraph.explain(flux, "a red cat", no_such_argument=1)
    assert draw(flux) is not None
