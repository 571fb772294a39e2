"""What is left when everything was dropped: memory, and objects of ours."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks._measure import MIB
from diffgraph.devices.base import Pool, Segment
from diffgraph.engine.sequence import Break, GraphSequence
from diffgraph.guards import Fingerprint
from diffgraph.recording.capture import Recording
from diffgraph.routing.entry import Entry
from diffgraph.routing.runner import Runner

#: How far memory may grow from the first quarter of a run to its end. On a GPU it is what tensors hold; a process' resident
#: memory moves by itself (arenas, libraries that load on first use).
GROWTH_MIB = {"cuda": 1.0, "cpu": 32.0}
#: Tensors alive, likewise: schedulers keep the latents that they saw last, and those are of one shape or another.
GROWTH_OF_TENSORS = 2**16


@dataclass(frozen=True)
class Left:
    step: int
    mib: float  # allocated on the GPU, or resident on the CPU
    tensors: int  # alive
    tensor_bytes: int
    ours: tuple[str, ...]  # objects of ours that are still alive, by class

    @classmethod
    def now(cls, step: int, device: str) -> Left:
        """To be called when nothing is accelerated."""
        gc.collect()
        objects = gc.get_objects()
        tensors = [o for o in objects if issubclass(type(o), torch.Tensor)]
        alive = tuple(sorted(type(o).__qualname__ for o in objects if not _HOLDERS.isdisjoint(type(o).__mro__)))
        memory = [storage for t in tensors if (storage := _storage(t)) is not None]
        size = sum({storage._cdata: storage.nbytes() for storage in memory}.values())
        count = len(tensors)
        del objects, tensors, memory
        return cls(step, _mib(device), count, size, alive)


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    if tensor.layout != torch.strided or tensor.is_meta:
        return None
    try:
        return tensor.untyped_storage()
    except NotImplementedError:  # functorch's, which others may have left behind
        return None


_HOLDERS = frozenset({Runner, Entry, Recording, GraphSequence, Break, Segment, Pool, Fingerprint})


def is_flat(series: list[Left], device: str) -> tuple[bool, Left, Left]:
    """Whether the last measurement is no higher than the one at a quarter of the run, but for `GROWTH_MIB`; tensors alive
    are no more, but for `GROWTH_OF_TENSORS`; and nothing of ours was ever left. The quarter and the end come along."""
    quarter = next(left for left in series if left.step >= series[-1].step / 4)
    end = series[-1]
    flat = end.mib <= quarter.mib + GROWTH_MIB[device] and end.tensor_bytes <= quarter.tensor_bytes + GROWTH_OF_TENSORS
    return flat and not any(left.ours for left in series), quarter, end


def _mib(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated() / MIB
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps what was freed
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB if statm.exists() else 0.0
