"""The clocks that the benchmarks share with the command line, and what only they need."""

from __future__ import annotations

import gc
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from diffgraph.cli.clock import call_ms, seconds, submit_ms, synchronize

__all__ = ["MIB", "call_ms", "host_ms", "release", "seconds", "submit_ms", "synchronize"]

MIB = 2**20


def host_ms(fn: Callable[[], Any], device: torch.device, repeats: int = 200) -> float:
    """Median host time of something short."""
    return median(submit_ms(fn, repeats, device))


def release() -> None:
    """Give back the memory of what is no longer referenced: the next model may need all of it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
