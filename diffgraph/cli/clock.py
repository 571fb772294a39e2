"""Clocks. A GPU works behind the host's back, so each of them says what it waits for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(fn: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one call, its work on the device included."""
    synchronize(device)
    start = perf_counter()
    fn()
    synchronize(device)
    return perf_counter() - start


def call_ms(fn: Callable[[], Any], repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of each of `repeats` calls made one behind the other, as a denoising loop makes them.

    On a GPU, from one event to the next: whichever is slower, the host that submits or the device that works.
    """
    if device.type != "cuda":
        return [seconds(fn, device) * 1e3 for _ in range(repeats)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize(device)
    marks[0].record()
    for mark in marks[1:]:
        fn()
        mark.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) for start, end in pairwise(marks)]


def submit_ms(fn: Callable[[], Any], repeats: int, device: torch.device) -> list[float]:
    """Milliseconds of host time until a call returns, with nothing queued before it."""
    times = []
    for _ in range(repeats):
        synchronize(device)
        start = perf_counter()
        fn()
        times.append((perf_counter() - start) * 1e3)
    synchronize(device)
    return times
