"""Who may stay in memory: one pool a device for all signatures, a limit, and which recording goes first."""

from __future__ import annotations

import os
from collections import OrderedDict
from typing import Protocol

import torch

from diffgraph.devices import Pool, new_pool
from diffgraph.options import Options

#: Recordings a device, where the user sets no number; more, where as many were asked for at start-up.
MAX_GRAPHS = 32


class Evictable(Protocol):
    def evict(self) -> None: ...


class Memory:
    """The pools of one accelerated pipeline, and its budget. Every method but `pool` is called under that pool's lock."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.asked_for = 0  # recordings made because the user named them
        self._pools: dict[torch.device, Pool] = {}
        self._lru: dict[Pool, OrderedDict[Evictable, None]] = {}

    def pool(self, device: torch.device) -> Pool:
        pool = self._pools.get(device)
        if pool is None:
            pool = self._pools.setdefault(device, new_pool(device, poison=self._options.poison))
            self._lru.setdefault(pool, OrderedDict())
        return pool

    def admit(self, entry: Evictable, pool: Pool) -> bool:
        """Take in a new recording, evicting the least recently used until the budget holds. False: it does not fit even alone."""
        recordings = self._lru[pool]
        recordings[entry] = None
        while len(recordings) > (self._options.max_graphs or max(MAX_GRAPHS, self.asked_for)):
            self._evict_oldest(pool)
        limit = self._limit(pool.device)
        if limit is None or pool.bytes() <= limit:
            return True
        alone = len(recordings) == 1
        # A CUDA pool gives its memory back with its last graph only, so this may end with none: the next capture starts afresh.
        while recordings and pool.bytes() > limit:
            self._evict_oldest(pool)
        return entry in recordings or not alone

    def touch(self, entry: Evictable, pool: Pool) -> None:
        if entry in self._lru[pool]:
            self._lru[pool].move_to_end(entry)

    def forget(self, entry: Evictable, pool: Pool) -> None:
        self._lru[pool].pop(entry, None)

    def bytes(self) -> int:
        return sum(pool.bytes() for pool in list(self._pools.values()))

    def _evict_oldest(self, pool: Pool) -> None:
        entry, _ = self._lru[pool].popitem(last=False)
        entry.evict()

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
