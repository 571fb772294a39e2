"""Whether dicts were written to: every write is seen, and nothing else is taken for one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffgraph.guards import Fingerprint, writes
from diffgraph.guards.writes import Writes
from diffgraph.reasons import Reason

WRITES = {
    "an item is set": lambda d: d.__setitem__("a", object()),
    "an item is added": lambda d: d.__setitem__(object(), 1),
    "an item is deleted": lambda d: d.pop("a"),
    "the dict is updated": lambda d: d.update(a=object()),
    "the dict is cleared": lambda d: d.clear(),
    "an item is popped": lambda d: d.popitem(),
    "a default is set": lambda d: d.setdefault(object(), 1),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_write_is_seen_when(write):
    d = {"a": 1}
    watched = Writes([{}, d])
    before = watched.count()
    assert watched.count() == before
    write(d)
    after = watched.count()
    assert after != before
    assert watched.count() == after


@given(st.lists(st.booleans(), max_size=20))
def test_two_watchers_do_not_disturb_each_other(asked_first):
    a, b = Writes([{}]), Writes([{}])
    counts = a.count(), b.count()
    for first in asked_first:
        assert a.count() == counts[0] if first else b.count() == counts[1]


def test_an_attribute_set_on_a_module_is_seen():
    module = torch.nn.Linear(2, 2)
    watched = Writes([module.__dict__, module._parameters])
    for _ in range(100):
        before = watched.count()
        module.scale = object()
        assert watched.count() != before
    before = watched.count()
    module.weight = torch.nn.Parameter(torch.zeros(2, 2))
    assert watched.count() != before


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)
        self.scale = 1.0
        self.options = {"shift": 1.0}
        self.steps = [1, 2]


CHANGES = {
    "a number": (lambda m: setattr(m.part, "scale", 2.0), Reason.ATTRIBUTES_CHANGED),
    "a number in a dict": (lambda m: m.part.options.update(shift=2.0), Reason.ATTRIBUTES_CHANGED),
    "a number in a list": (lambda m: m.part.steps.append(3), Reason.ATTRIBUTES_CHANGED),
    "an attribute more": (lambda m: setattr(m.part.inner, "forward", abs), Reason.HOOKS_CHANGED),
    "a weight in place of another": (lambda m: setattr(m.part.inner, "weight", _fresh()), Reason.WEIGHTS_CHANGED),
    "a weight's memory": (lambda m: setattr(m.part.inner.weight, "data", torch.zeros(2, 2)), Reason.WEIGHTS_CHANGED),
    "a weight gone": (lambda m: setattr(m.part.inner, "bias", None), Reason.WEIGHTS_CHANGED),
    "another module": (lambda m: setattr(m.part, "inner", torch.nn.Linear(2, 2)), Reason.WEIGHTS_CHANGED),
}


def _fresh() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(2, 2))


@pytest.mark.parametrize("writes_are_seen", [True, False])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_fingerprint_sees(change, writes_are_seen, monkeypatch):
    if not writes_are_seen:
        monkeypatch.setattr(writes, "_are_seen", lambda: False)
    act, reason = change
    root = torch.nn.Module()
    root.part = Scaled()
    fingerprint = Fingerprint(root)
    assert fingerprint.change() is None
    root.part.scale = 0.5 + 0.5  # equal, but another object
    assert fingerprint.change() is None
    act(root)
    assert fingerprint.change() is reason


def test_what_takes_an_equal_containers_place_is_watched_in_turn():
    root = torch.nn.Module()
    root.part = Scaled()
    fingerprint = Fingerprint(root)
    assert fingerprint.change() is None
    root.part.options = {"shift": 1.0}
    assert fingerprint.change() is None
    root.part.options["shift"] = 2.0
    assert fingerprint.change() is Reason.ATTRIBUTES_CHANGED
