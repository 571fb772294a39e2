"""A short seed of the soak (`benchmarks.soak`): whatever happens, each call gives what eager gives, and nothing is left."""

from collections import Counter

import pytest

import diffgraph
from benchmarks import soak
from benchmarks._soak import faults, memory
from benchmarks._soak.acts import ACTS
from diffgraph.guards import Fingerprint

FEW = ("qwen_image", "pixart")
COUNTED = {"calls", "replays", "captures", "evictions", "faults", "mismatches", "escapes", "flat", "seconds", "seed", "reasons"}


#: More faults than in a long run, where they are rare, as in life.
SHORT = [act._replace(weight=5 * act.weight) if act.name in ("out_of_memory", "exception") else act for act in ACTS]


def only(*names):
    return [act for act in ACTS if act.name in names]


@pytest.fixture(scope="module")
def short():
    """Two seeds, one after the other."""
    return [soak.Soak(seed, families=FEW, epoch=15, acts=SHORT).run(steps=30) for seed in (0, 1)]


def test_no_call_of_a_few_steps_differs_from_eager_and_nothing_of_ours_is_left():
    run = soak.Soak(2, families=FEW, epoch=5, acts=SHORT).run(steps=10)
    assert run.tally.failures == [] and run.tally.not_finite + run.tally.raised == 0
    assert min(run.tally.calls, run.tally.replays, run.tally.captures) > 5
    assert len(run.left) == 3 and not any(left.ours for left in run.left)


@pytest.mark.slow
def test_no_call_of_a_short_soak_differs_from_eager_and_no_error_escapes(short):
    assert [run.tally.failures for run in short] == [[], []]
    assert sum(run.tally.not_finite + run.tally.raised for run in short) == 0


@pytest.mark.slow
def test_nothing_of_ours_is_left_after_it_and_no_tensor_more(short):
    for run in short:
        assert len(run.left) == 3
        assert not any(left.ours for left in run.left)
        assert run.left[-1].tensor_bytes <= run.left[0].tensor_bytes + memory.GROWTH_OF_TENSORS


@pytest.mark.slow
def test_it_went_all_the_ways_that_a_call_can_go(short):
    tallies = [run.tally for run in short]
    acts, struck, reasons = (sum((getattr(t, n) for t in tallies), Counter()) for n in ("acts", "faults", "reasons"))
    assert sum(t.calls for t in tallies) > 300
    for count in ("replays", "captures", "eager", "evictions"):
        assert sum(getattr(t, count) for t in tallies) >= 10, count
    assert {name.split()[1] for name in struck} == {faults.CAPTURE, faults.REPLAY, faults.EAGER}
    assert {name.split()[0] for name in struck} >= {"OutOfMemoryError"}
    assert len(acts) > 15
    assert reasons.keys() >= {"unseen_signature", "out_of_memory", "capture_failed"}


@pytest.mark.slow
def test_a_step_depends_on_the_seed_and_on_those_since_the_last_drop():
    acts = only("loop", "weight_replaced")

    def counts(**span):
        tally = soak.Soak(3, families=("pixart",), epoch=2, acts=acts).run(**span).tally
        return Counter(tally.acts, calls=tally.calls, replays=tally.replays, captures=tally.captures)

    assert counts(steps=4) == counts(steps=2) + counts(start=2, steps=4)


def test_blind_guards_are_found_out(monkeypatch, capsys):
    monkeypatch.setattr(Fingerprint, "change", lambda _: None)
    run = soak.Soak(2, families=("pixart",), acts=only("many_shapes", "weight_replaced", "processors_set")).run(steps=12)
    assert run.tally.mismatches > 0 and not run.ok
    assert "again: python -m benchmarks.soak --seed 2" in capsys.readouterr().err


@pytest.mark.slow
def test_an_error_that_escapes_is_found_out(monkeypatch):
    def careless(*_):
        raise RuntimeError("not caught")

    monkeypatch.setattr(diffgraph.routing.runner.Runner, "note_replay", careless)
    run = soak.Soak(families=("pixart",), acts=only("loop")).run(steps=4)
    assert run.tally.escapes > 0 and not run.ok


@pytest.mark.slow
def test_what_is_never_given_back_is_found_out(monkeypatch):
    kept = []
    monkeypatch.setattr(diffgraph.routing.runner.Runner, "release", lambda self: kept.extend(self.table.entries.values()))
    run = soak.Soak(families=("pixart",), acts=only("loop")).run(steps=4)
    assert "Recording" in run.left[-1].ours and not run.ok
    for entry in kept:
        entry.evict()


@pytest.mark.slow
def test_a_limit_that_is_not_kept_is_found_out(monkeypatch):
    monkeypatch.setattr("diffgraph.routing.memory.Memory.admit", lambda *_: True)
    run = soak.Soak(families=("pixart",), acts=only("many_shapes")).run(steps=4)
    assert any("max_graphs is" in line or "the limit is" in line for line in run.tally.failures)


def test_it_runs_from_the_command_line_and_writes_its_row(tmp_path, capsys):
    out = tmp_path / "soak.json"
    assert soak.main(["--steps", "3", "--device", "cpu", "--families", "pixart", "--out", str(out)]) == 0
    row = soak.Results(str(out), "cpu").rows[0]
    assert row.keys() >= COUNTED
    assert (row["what"], row["shape"], row["mode"], row["steps"]) == ("soak", "mixed", "breakable", 3)
    assert "mismatches" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_soak_on_a_gpu():
    run = soak.Soak(0, device="cuda").run(seconds=20)
    assert run.tally.failures == []
    assert run.ok, run.row()
    assert run.tally.replays > 100 and run.tally.captures > 20 and run.tally.evictions > 0
