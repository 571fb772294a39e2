"""Who may stay in memory: pools that all signatures share, a limit a device, and which recording goes first."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Protocol

import torch

from diffgraph.devices import Pool, new_pool
from diffgraph.options import Options

if TYPE_CHECKING:
    from diffgraph.reasons import Reason
    from diffgraph.routing.entry import Entry

#: Recordings a device, where the user sets no number; more, where as many were asked for at start-up.
MAX_GRAPHS = 32


class Evictable(Protocol):
    @property
    def is_in_use(self) -> bool:
        """Whether to evict it now would give nothing back."""
        ...

    def evict(self) -> None: ...


class Memory:
    """The pools of one accelerated pipeline, and its budget. The pools of a device share a lock, under which all is called but
    `lock`, `pool`, `drop` and `bytes`."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.asked_for = 0  # recordings made because the user named them
        self._pools: dict[tuple[torch.device, int], Pool] = {}
        self._locks: dict[torch.device, threading.RLock] = {}
        self._lru: dict[torch.device, OrderedDict[Evictable, None]] = {}

    def lock(self, device: torch.device) -> threading.RLock:
        return self._locks.setdefault(device, threading.RLock())

    def pool(self, device: torch.device, lane: int = 0) -> Pool:
        """`lane`: which of those whose memory is in use at the same time, where there are several."""
        pool = self._pools.get((device, lane))
        if pool is None:
            pool = new_pool(device, poison=self._options.poison)
            pool.lock = self.lock(device)
            self._lru.setdefault(pool.device, OrderedDict())
            pool = self._pools.setdefault((device, lane), pool)
        return pool

    def admit(self, entry: Evictable, pool: Pool) -> bool:
        """Take in a new recording, evicting the least recently used until the budget holds. False: it does not fit even alone."""
        recordings = self._lru[pool.device]
        recordings[entry] = None
        most = self._options.max_graphs or max(MAX_GRAPHS, self.asked_for)
        while len(recordings) > most and self._evict_oldest(recordings):
            pass
        limit = self._limit(pool.device)
        if limit is None or self.bytes(pool.device) <= limit:
            return True
        alone = len(recordings) == 1
        # A CUDA pool gives its memory back with its last graph only, so this may end with none: the next capture starts afresh.
        while self.bytes(pool.device) > limit and self._evict_oldest(recordings):
            pass
        return entry in recordings or not alone

    def touch(self, entry: Evictable, pool: Pool) -> None:
        if entry in self._lru[pool.device]:
            self._lru[pool.device].move_to_end(entry)

    def forget(self, entry: Evictable, pool: Pool) -> None:
        self._lru[pool.device].pop(entry, None)

    def drop(self, entry: Entry, *, lost: Reason | None = None, refused: Reason | None = None) -> None:
        """Give up an entry's recording, if it has one, and say why (`lost`), or that it is not to be tried again (`refused`)."""
        recording = entry.recording
        if recording is not None:
            with recording.pool.lock:
                if entry.recording is recording:
                    self.forget(entry, recording.pool)
                    entry.release()
        entry.lost = lost
        entry.refused = refused or entry.refused

    def bytes(self, device: torch.device | None = None) -> int:
        """That the pools hold now, on `device` or on all."""
        return sum(pool.bytes() for pool in list(self._pools.values()) if device in (None, pool.device))

    def _evict_oldest(self, recordings: OrderedDict[Evictable, None]) -> bool:
        oldest = next((entry for entry in recordings if not entry.is_in_use), None)
        if oldest is None:
            return False
        del recordings[oldest]
        oldest.evict()
        return True

    def _limit(self, device: torch.device) -> int | None:
        limit = self._options.memory_limit
        return int(limit * total_memory(device)) if isinstance(limit, float) else limit


def total_memory(device: torch.device) -> int:
    """Memory of the device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_memory(device: torch.device) -> int:
    """Memory of the device that nobody uses, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
