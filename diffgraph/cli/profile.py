"""How busy the GPU is in one eager call: from the kernels' own times, which the profiler leaves as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffgraph.cli.clock import call_ms

_CUDA = torch._C._autograd.DeviceType.CUDA  # type: ignore[attr-defined]
_CALLS = 3
_CHAIN = 256  # kernels, one behind the other, to see how far apart a graph launches them


@dataclass(frozen=True)
class Profile:
    """Of one eager call. `busy_ms`: in which at least one kernel or copy ran; `launches`: kernels and copies. `None` without a
    GPU. `ops`: what the host dispatches, on any device."""

    ops: int
    launches: int | None = None
    busy_ms: float | None = None


def profiled(call: Callable[[], Any], device: torch.device) -> Profile:
    with torch.no_grad():
        with _Ops() as ops:
            call()
        if device.type != "cuda":
            return Profile(ops.count)
        found = kernels(call, _CALLS)
    return Profile(ops.count, round(len(found) / _CALLS), busy_us((k.start, k.end) for k in found) / _CALLS / 1e3)


def busy_us(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of time spans."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def gap_us(device: torch.device) -> float:
    """From the end of one small kernel to the start of the next that waits for it, inside a graph, on this GPU."""
    x = torch.zeros(1, device=device)
    x.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CHAIN):
            x.add_(1)
    for _ in range(3):
        graph.replay()
    a_kernel = median(k.end - k.start for k in kernels(lambda: x.add_(1), _CHAIN))
    return max(0.0, median(call_ms(graph.replay, 10, device)) * 1e3 / _CHAIN - a_kernel)


class Kernel(NamedTuple):
    """What ran on the GPU, and from when to when, in us."""

    name: str
    start: float
    end: float


def kernels(call: Callable[[], Any], times: int) -> list[Kernel]:
    """All that ran on the GPU in so many calls, after one that is not looked at. Without the host's side, which would slow the
    host down."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            call()
        torch.cuda.synchronize()
    events: Any = profile.events()
    on_gpu = [e for e in events if e.device_type == _CUDA and not e.is_user_annotation]
    return [Kernel(e.name, e.time_range.start, e.time_range.end) for e in on_gpu]


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))
