"""What a replay costs beside its graphs: the runner's own work on the host, and what the breaks add on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

import diffgraph
from benchmarks._calls import DenoiserCall
from benchmarks._measure import MIB, call_ms, host_ms
from diffgraph.engine.sequence import Break, Buffer
from diffgraph.guards import Fingerprint
from diffgraph.recording.capture import Recording
from diffgraph.recording.signature import Call


@contextmanager
def accelerated(pipe: Any, options: dict[str, Any] | None) -> Iterator[None]:
    """Inside, the pipeline is accelerated with these options; `None`: it is not."""
    if options is None:
        yield
        return
    diffgraph.accelerate_pipeline(pipe, **options)
    try:
        yield
    finally:
        diffgraph.restore_pipeline(pipe)


def missed(before: diffgraph.Report, after: diffgraph.Report) -> str | None:
    """How many calls between two reports were no replays, and why, in words; `None`: all were."""
    calls = after.eager + after.captures - before.eager - before.captures
    return f"{calls} timed calls were not replays: {after.reasons}" if calls else None


def runner_work(call: DenoiserCall) -> dict[str, Any]:
    """Column `runner_ms`, host time that the runner adds to each replayed call, and its parts."""
    runner, recording = _recorded(call)
    device = call.device
    leaves = Call.of(call.args, call.kwargs, device).leaves
    fingerprint = Fingerprint(call.module)
    parts = {
        "signature": host_ms(lambda: runner.table.entries.get(Call.of(call.args, call.kwargs, device).signature), device),
        "guards": host_ms(fingerprint.change, device),
        "copies": host_ms(lambda: recording.inputs.copy_from(leaves), device),
        "clones": host_ms(lambda: recording.outputs(leaves), device),
    }
    return {"runner_ms": sum(parts.values()), "runner_parts_ms": parts}


def boundaries(call: DenoiserCall) -> dict[str, Any]:
    """The breaks by name, and the boundary buffers that each replay copies to: number, size, and time on the device."""
    _, recording = _recorded(call)
    breaks = [step for step in recording.sequence.steps if isinstance(step, Break)]
    buffers = [b.tensor for step in breaks for b in step.bindings if isinstance(b, Buffer)]
    return {
        "break_names": dict(Counter(step.name for step in breaks)),
        "boundary_buffers": len(buffers),
        "boundary_mib": sum(b.nbytes for b in buffers) / MIB,
        "boundary_copy_ms": _copy_ms(buffers, call.device),
    }


def _copy_ms(buffers: list[torch.Tensor], device: torch.device) -> float:
    """Time of copies like theirs, without the gaps between launches: on a GPU, as one graph.

    One pair of tensors a layout, because a real copy finds what the break has just written in the cache.
    """
    if not buffers:
        return 0.0
    layouts = [(b.shape, b.stride(), b.dtype) for b in buffers]
    pairs = {x: [torch.empty_strided(*x[:2], dtype=x[2], device=device) for _ in range(2)] for x in set(layouts)}

    def copies() -> None:
        for layout in layouts:
            target, source = pairs[layout]
            target.copy_(source)

    if device.type != "cuda":
        return median(call_ms(copies, 5, device))
    copies()  # what loads on first use must not load during capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copies()
    return median(call_ms(graph.replay, 20, device))


def _recorded(call: DenoiserCall) -> tuple[Any, Recording]:
    runner: Any = call.module._compiled_call_impl
    return runner, next(entry.recording for entry in runner.table.entries.values() if entry.recording is not None)
