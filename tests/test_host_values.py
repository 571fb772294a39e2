"""What the host reads during a forward: one recording each for a few values, and eager where they keep changing."""

import gc
import weakref

import pytest
import torch
from _toys import accelerated, call, calls, route_of

import diffgraph
from diffgraph.routing.entry import MAX_VALUES
from diffgraph.routing.installed import runners


class Trimmed(torch.nn.Module):
    """As Lumina 2 does: the prompt's true length is read from its mask, and its rows are cut to it."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x, mask):
        return self.linear(x)[:, : int(mask.sum())].softmax(1)


def inputs(length, seed=0):
    x = torch.randn(1, 16, 8, generator=torch.Generator().manual_seed(seed))
    return x, (torch.arange(16) < length)[None]


@pytest.fixture
def module():
    torch.manual_seed(0)
    return accelerated(Trimmed())


def test_two_lengths_that_alternate_both_replay(module):
    routes = [call(module, *inputs(length, seed)) for seed in range(6) for length in (5, 9)]
    assert routes == ["unseen_signature", "capture", "capture", *["replay"] * 9]
    assert diffgraph.report(module).captures == 2


def test_the_likelier_one_is_tried_first(module, monkeypatch):
    for seed in range(6):
        for length in (5, 9):
            call(module, *inputs(length, seed))
    tried = []
    replay = diffgraph.GraphSequence.replay
    monkeypatch.setattr(diffgraph.GraphSequence, "replay", lambda self: (tried.append(self), replay(self))[1])
    assert [call(module, *inputs(length)) for length in (5, 9, 5, 9)] == ["replay"] * 4
    assert len(tried) == 4  # none of them in vain


def test_every_value_of_a_few_has_its_recording_and_its_row(module):
    lengths = range(3, 3 + MAX_VALUES)
    for seed in range(4):
        for length in lengths:
            call(module, *inputs(length, seed))
    assert [call(module, *inputs(length)) for length in lengths] == ["replay"] * MAX_VALUES
    report = diffgraph.report(module)
    assert report.captures == MAX_VALUES and len({s.label for s in report.signatures}) == MAX_VALUES
    assert all(s.captured for s in report.signatures)


def test_a_value_that_comes_later_takes_the_place_of_the_one_used_longest_ago(module):
    for length in (2, 4, 6, 8, 10, 12):  # prompts, one after the other, of twelve steps each
        routes = calls(module, 12, *inputs(length))
        assert set(routes[3:]) == {"replay"}
    assert sum(s.captured for s in diffgraph.report(module).signatures) == MAX_VALUES
    assert call(module, *inputs(12)) == call(module, *inputs(6)) == "replay"
    assert call(module, *inputs(2)) == "capture"


def test_a_value_that_is_another_one_at_each_call_goes_eager_and_is_looked_at_ever_more_rarely():
    m = accelerated(ByValue(), verify=False)
    routes = [call(m, torch.full((2, 4), float(n))) for n in range(400)]
    assert routes.count("capture") <= 12
    assert routes[-60:].count("host_value_changed") >= 55
    assert calls(m, 600, torch.full((2, 4), 7.0))[-1] == "replay"  # and is seen to have settled


class ByValue(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * x.sum().item()


def test_recordings_that_never_replayed_give_their_memory_back_when_the_signature_goes_eager():
    m = accelerated(ByValue())
    for n in range(MAX_VALUES + 2):
        call(m, torch.full((2, 4), float(n)))
    report = diffgraph.report(m)
    assert report.memory_bytes == 0 and [s.reason for s in report.signatures] == ["host_value_changed"]


def test_start_up_capture_keeps_its_recordings_whatever_the_host_reads(module):
    diffgraph.restore_pipeline(module)
    accelerated(module, capture="startup")
    ((_, runner),) = runners(module)
    with runner.insistence.begun(), torch.no_grad():  # as `diffgraph.capture` does with a pipeline
        for length in (5, 9):
            module(*inputs(length))
    assert diffgraph.report(module).captures == 2
    assert set(calls(module, 20, *inputs(7))) == {"host_value_changed"}
    routes = [call(module, *inputs(length)) for _ in range(50) for length in (5, 9)]
    assert routes[-1] == "replay" and "capture" not in routes


def test_new_weights_drop_all_of_them(module):
    for seed in range(4):
        for length in (5, 9):
            call(module, *inputs(length, seed))
    module.linear = torch.nn.Linear(8, 8)
    assert call(module, *inputs(5)) == "weights_changed"
    assert sum(s.captured for s in diffgraph.report(module).signatures) == 0
    routes = [call(module, *inputs(length, seed)) for seed in range(4) for length in (5, 9)]
    assert routes[-4:] == ["replay"] * 4


def test_a_replay_that_is_given_up_keeps_no_input_alive(module):
    for length in (5, 5, 5, 9):
        call(module, *inputs(length))
    gc.collect()
    gc.disable()
    try:
        given = [*inputs(7)]
        alive = weakref.ref(given[0])
        with torch.no_grad():
            assert route_of(module, lambda: module(*given))[1] == "capture"
        given.clear()
        assert alive() is None
    finally:
        gc.enable()


def test_restoring_leaves_nothing_of_any_of_them(module):
    for length in (5, 5, 5, 9, 9):
        call(module, *inputs(length))
    diffgraph.restore_pipeline(module)
    assert "_compiled_call_impl" not in vars(module)


# -- values that keep changing


class Routed(torch.nn.Module):
    """As a mixture of experts: how many rows go where is read on the host, and is another number each time."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x):
        rows = x.flatten(0, -2)
        chosen = (rows.sum(-1) * 10).long() % 3
        order, counts = chosen.argsort(stable=True), chosen.bincount(minlength=3).tolist()
        parts = [expert(part) for expert, part in zip(self.experts, rows[order].split(counts), strict=True)]
        return torch.zeros_like(rows).index_copy(0, order, torch.cat(parts)).view_as(x)


class Mixture(torch.nn.Module):
    def __init__(self, layers=3):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(8, 8), Routed()) for _ in range(layers)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_modules_whose_reads_keep_changing_run_eagerly_and_the_rest_replays():
    torch.manual_seed(0)
    m = accelerated(Mixture())
    xs = torch.randn(40, 2, 16, 8)
    routes = [call(m, x) for x in xs]
    assert set(routes[-30:]) == {"replay"} and routes.count("capture") <= MAX_VALUES + 1
    (row,) = [s for s in diffgraph.report(m).signatures if s.captured]
    assert row.breaks == 3  # one a layer, all at once
    assert "forward" not in vars(m.layers[0][1])


def test_a_module_that_hands_the_value_on_does_not_help_and_the_signature_rests():
    class Length(torch.nn.Module):
        def forward(self, x):
            return int(x.sum())

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.length = torch.nn.Linear(4, 4), Length()

        def forward(self, x):
            return self.linear(x) * self.length(x)

    m = accelerated(Scaled())
    routes = [call(m, torch.full((2, 4), float(n))) for n in range(200)]
    assert routes.count("capture") <= 16
    assert routes[-50:].count("host_value_changed") >= 45
