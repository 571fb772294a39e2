"""One case tried: eager, capture, replays with other inputs, each compared with eager to the bit."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

import diffgraph
from diffgraph.engine.recordable import size_depends_on_data
from diffgraph.engine.sequence import Break, HostTensor, HostValue
from diffgraph.routing.installed import runners
from diffgraph.values.compare import close, same_bits
from support.cases import Case, Draw

#: Calls before the second replay in a row: eager, capture, and some more where a model's own caches fill first.
PATIENCE = 8
#: And calls with host-visible data that alternate.
ALTERNATING = 12


@dataclass
class Found:
    """What became of a case: the routes of its calls, in order, and the recording."""

    routes: list[str] = field(default_factory=list)
    alternating: list[str] = field(default_factory=list)  # where host-visible data changed from call to call
    breaks: Counter[str] = field(default_factory=Counter)
    host_reads: Counter[str] = field(default_factory=Counter)
    segments: int = 0
    buckets: bool = False  # prompts of other lengths would share the recording
    detail: str = ""  # what the library said of a failed capture

    @property
    def replays(self) -> bool:
        return self.routes[-2:] == ["replay", "replay"]


class Wrong(AssertionError):
    """A result that is not eager's, or inputs that show nothing."""


def check(case: Case, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Found:
    """Raises `Wrong` where a call gave anything but eager's bits."""
    module = case.build().to(device)
    if dtype is not torch.float32:
        module.to(dtype)
    diffgraph.accelerate_module(module, poison=device == "cpu")
    found = Found()
    seeds = iter(range(1000))
    outputs: list[Any] = []

    def call(other: bool) -> str:
        draw = Draw(next(seeds), other, device, dtype)
        route, output = _call(module, case, draw)
        outputs.append(output)
        return route

    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        while len(found.routes) < PATIENCE and not found.replays:
            found.routes.append(call(other=False))
        _describe(module, found)
        draw = Draw(0)
        case.inputs(draw)
        if found.replays and draw.picked:
            found.alternating = [call(other=i % 2 == 0) for i in range(ALTERNATING)]
    if all(same_bits(outputs[0], output) for output in outputs[1:]):
        raise Wrong(f"{case.label}: the outputs do not depend on the inputs, so equal bits show nothing")
    said = [str(w.message) for w in caught if issubclass(w.category, UserWarning) and "runs eager" in str(w.message)]
    found.detail = said[0] if said else ""
    diffgraph.restore_pipeline(module)
    return found


def _call(module: torch.nn.Module, case: Case, draw: Draw) -> tuple[str, Any]:
    seed = draw._generator.initial_seed()
    kwargs = case.inputs(draw)
    before = diffgraph.report(module)
    output = _seeded(module, kwargs)
    after = diffgraph.report(module)
    again = case.inputs(Draw(seed, draw._other, draw.device, draw.dtype))  # a forward may have changed the first
    with diffgraph.paused(module):
        wanted = _seeded(module, again)
    routes = Counter(after.reasons) - Counter(before.reasons)
    routes["replay"] += after.replays - before.replays
    routes["capture"] += after.captures - before.captures
    (route,) = (+routes).elements()
    # A padded prompt may take another kernel of a matrix product, with other last bits.
    if not same_bits(output, wanted) and not (_padded(module) and close(output, wanted)):
        raise Wrong(f"{case.label}: {route} gave other bits than eager")
    if not same_bits(kwargs, again):
        raise Wrong(f"{case.label}: {route} left other inputs than eager")
    return route, wanted


def _seeded(module: torch.nn.Module, kwargs: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return module(**kwargs)


def _padded(module: torch.nn.Module) -> bool:
    recordings = [entry.recording for _, runner in runners(module) for entry in runner.table.all_entries()]
    return any(recording is not None and recording.padding is not None for recording in recordings)


def _describe(module: torch.nn.Module, found: Found) -> None:
    """What the recording is made of."""
    for _, runner in runners(module):
        for recording in filter(None, (entry.recording for entry in runner.table.all_entries())):
            found.segments, found.buckets = recording.segments, recording.padding is not None
            for step in recording.sequence.steps:
                if isinstance(step, Break):
                    found.breaks[_name(step)] += 1
                    if any(isinstance(binding, (HostValue, HostTensor)) for binding in step.bindings):
                        found.host_reads[_name(step)] += 1
                    elif size_depends_on_data(step.fn):
                        found.host_reads[f"{_name(step)}, its size"] += 1


def _name(step: Break) -> str:
    name = step.name.partition(" (")[0].rpartition("<locals>.")[2]
    return name.removeprefix("aten.").removesuffix(".default").removesuffix(".Tensor")
