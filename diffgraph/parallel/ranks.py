"""The processes that run one forward together: they take one route.

What is assumed: each rank makes the same calls in the same order, from one thread (diffusers' context parallelism needs no less).

A rank replays without asking anybody. Whatever else it wants to do with a call, it does as all do: the ranks *meet* at a call,
each says what it would do and what it has recorded; all do the least of it, and keep what all have. The others learn of a meeting
from a thread that looks every few milliseconds; where some rank is ahead, the meeting is at the call that it has yet to make, and
until then who is behind replays, or runs eager where that goes together with the others' replays. While something is recorded, or
replayed for the first time, the ranks also speak before each collective, so that one that fails takes the others with it instead
of leaving them to wait.

Speaking goes through the key-value store that torch.distributed was set up with, on the host: no stream, no further group.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffgraph.devices import Pool
from diffgraph.devices.collectives import is_collective
from diffgraph.errors import OtherRankFailed, RankError
from diffgraph.reasons import Reason
from diffgraph.values.tensors import is_made_of_others

#: Seconds that a rank waits for the others, before it raises `RankError`; and, once all have launched it, for the GPU to be
#: done with a capture or a first replay.
TIMEOUT_S = 120.0
_LOOK_S = 0.02  # between two looks for a meeting that another rank has called


class Intent(IntEnum):
    """What a rank would do with a call, from the least to the most."""

    EAGER = 0
    WARM_UP = 1
    CAPTURE = 2
    VERIFY = 3
    REPLAY = 4


def parallel_config(module: torch.nn.Module) -> Any:
    """diffusers' configuration of a denoiser that several ranks compute together; `None` where one does."""
    return getattr(module, "_parallel_config", None)


def ranks_of(module: torch.nn.Module) -> Ranks | None:
    """Those that compute this module's forward together; `None` when it is this process alone, or they share weights and not the
    sequence (tensor parallelism, which is not recorded)."""
    config = getattr(parallel_config(module), "context_parallel_config", None)
    if config is None:
        return None
    group, *parts = (m.get_group() for m in (config._flattened_mesh, config._ring_mesh, config._ulysses_mesh))
    ranks = _known.get(group)
    if ranks is None:
        dist, c10d = torch.distributed, torch.distributed.distributed_c10d
        members = dist.get_process_group_ranks(group)
        name = f"diffgraph/{group.group_name}/{'-'.join(map(str, members))}"
        store = c10d.PrefixStore(name, c10d._get_default_store())
        ranks = _known[group] = Ranks(dist.get_rank(), members, store, [group, *parts])
        threading.Thread(target=_listen, args=(weakref.ref(ranks),), name="diffgraph ranks", daemon=True).start()
    return ranks


class Holder(Protocol):
    """Of recordings, each known by a key that is the same on all ranks."""

    def recorded(self) -> dict[str, bool]:
        """What it has recorded, and whether it trusts that."""
        ...

    def keep(self, common: dict[str, bool]) -> None:
        """Drop whatever is not among these, and trust none more than they say."""
        ...


class Ranks:
    """One process' part in the agreement of those that are `members`; `name` is its own among them."""

    def __init__(self, name: int, members: list[int], store: Any, groups: list[Any]) -> None:
        self._name, self._names = name, members
        self._rank, self._store = members.index(name), store
        self._groups = [weakref.ref(group) for group in {id(group): group for group in groups}.values()]
        self.calls = 0  # forwards begun
        self.is_deciding = False  # which route the present one takes
        self.last_collective = "none yet"
        self.failures: list[str] = []  # by rank, of what was last given up together
        self._turn = 0  # times that all have spoken
        self._meeting = 0  # meetings that have been held
        self._announced = False  # that we know of the next one, and at which call we can be there
        self._held_at: int | None = None
        self._holders: list[Callable[[], Holder | None]] = []
        self._stay = False  # the last meeting found no agreement to replay, so the next call has one, too
        self._what = ""
        self._lock = threading.Lock()

    # -- meetings: which route a call takes

    def begin(self) -> None:
        """A call starts: each rank's n-th is every rank's n-th."""
        with self._lock:
            self.calls += 1
            self.is_deciding = True

    def goes_alone(self) -> bool:
        """Whether no rank has called a meeting, so that this one may decide for itself; then it has."""
        with self._lock:
            self.is_deciding = self._announced or self._stay
        return not self.is_deciding

    def least(self, intent: Intent, key: str, label: str) -> Intent | None:
        """The least that any rank would do with this call; `None` when some rank is past it, so that nothing can be agreed.

        `key` tells the call's signature from others, on all ranks alike; `label` is for people. Recordings that some rank has not
        are dropped on all.
        """
        self._what = f"the meeting about {label}"
        with self._speaking():
            self._announce(self._meeting)
            if self._held_at is None:
                self._held_at = max(map(int, self._collect(f"meeting {self._meeting}")))
        if self.calls < self._held_at:
            self.is_deciding = False
            return None
        said = self._exchange(key, [int(intent), self._recorded()])
        with self._speaking():  # all have come to this meeting, so nobody asks about the one before it
            self._store.delete_key(f"meeting {self._meeting - 1}/{self._rank}")
            if self._rank == 0:
                self._store.delete_key(f"meeting {self._meeting - 1}")
        routes = {route for _, (route, _) in said}
        with self._lock:
            self._meeting += 1
            self._announced, self._held_at, self.is_deciding = False, None, False
            self._stay = routes != {int(Intent.REPLAY)}
        self._keep([recorded for _, (_, recorded) in said])
        keys = {place for place, (route, _) in said if route != Intent.EAGER}
        return Intent(min(routes)) if len(keys) == 1 else Intent.EAGER

    def join(self, holder: Holder) -> None:
        """From now on, what it has recorded is agreed upon. Each rank's n-th holder is every rank's n-th."""
        self._holders.append(weakref.ref(holder))

    def _recorded(self) -> dict[str, bool]:
        holders = [(i, holder()) for i, holder in enumerate(self._holders)]
        return {f"{i} {k}": trusted for i, h in holders if h is not None for k, trusted in h.recorded().items()}

    def _keep(self, said: list[dict[str, bool]]) -> None:
        common = {key: all(recorded[key] for recorded in said) for key in said[0] if all(key in other for other in said)}
        for i, reference in enumerate(self._holders):
            holder, start = reference(), f"{i} "
            if holder is not None:
                holder.keep({key[len(start) :]: trusted for key, trusted in common.items() if key.startswith(start)})

    def _announce(self, meeting: int) -> None:
        """Say at which call this rank can be at the meeting: the first that it has not yet decided about."""
        with self._lock:
            if not self._announced and meeting == self._meeting:
                self._store.set(f"meeting {meeting}/{self._rank}", str(self.calls + (not self.is_deciding)))
                self._store.set(f"meeting {meeting}", "called")
                self._announced = True

    def listen(self) -> None:
        """Answer a meeting that another rank has called, on behalf of a thread that may be waiting for the GPU."""
        meeting = self._meeting
        if not self._announced and self._store.check([f"meeting {meeting}"]):
            self._announce(meeting)

    # -- steps: what is begun together is ended together

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """What is inside runs on all ranks. One that fails says so before the next collective, and the others raise
        `OtherRankFailed` there."""
        self._what, self.last_collective = what, "none yet"
        try:
            yield
            self.before("the end")
        except RankError:
            raise
        except BaseException as error:
            text = ""
            if not isinstance(error, OtherRankFailed):
                text = f"{type(error).__name__}: {error}"
                self._exchange("failed", None)
            self.failures = [place for place, _ in self._exchange(text, None)]
            raise

    def before(self, name: str) -> None:
        """All ranks are about to do this; raises `OtherRankFailed` when one is not."""
        said = [place for place, _ in self._exchange(name, None)]
        for rank, place in enumerate(said):
            if place != name:
                raise OtherRankFailed(f"rank {self._names[rank]} {place} where this one came to {name}")
        self.last_collective = name

    def parted(self, what: str) -> RankError:
        return RankError(f"{self._me()}: {what}; {self._last()}")

    def wait_for(self, pool: Pool) -> None:
        """Until the device is done with what this step has launched."""
        if not pool.finishes(TIMEOUT_S):
            raise RankError(f"{self._me()}: {self._what} did not end within {TIMEOUT_S:g} s; {self._last()}")

    def verdict(self, reason: Reason | None) -> Reason | None:
        """The reason of the first rank that has one."""
        said = [place for place, _ in self._exchange(reason.value if reason else "", None)]
        return next((Reason(text) for text in said if text), None)  # type: ignore[call-arg]

    def largest(self, value: float | None) -> float | None:
        return None if value is None else max(found for _, found in self._exchange("", value))

    def watching(self) -> TorchDispatchMode:
        """Inside, ranks speak before each collective that is run op by op."""
        return _Watching(self)

    # -- speaking

    def issued(self) -> int:
        """How many collectives this rank has issued, outside of graphs."""
        groups = (group() for group in self._groups)
        return sum(group._get_sequence_number_for_group() for group in groups if group is not None)

    def _exchange(self, place: str, value: Any) -> list[tuple[str, Any]]:
        """What each rank says at this point, which all come to."""
        turn, self._turn = self._turn, self._turn + 1
        with self._speaking():
            self._store.set(f"turn {turn}/{self._rank}", json.dumps([place, value]))
            said = [json.loads(answer) for answer in self._collect(f"turn {turn}", place)]
            if turn > 1:  # all have come to the last turn, so they have read the one before it
                self._store.delete_key(f"turn {turn - 2}/{self._rank}")
        return [(place, value) for place, value in said]

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        try:
            yield
        except torch.distributed.DistError as error:
            raise RankError(f"{self._me()} cannot reach the others any more ({error}): {self._what}; {self._last()}") from error

    def _collect(self, key: str, place: str = "") -> list[bytes]:
        keys = [f"{key}/{rank}" for rank in range(len(self._names))]
        pause, deadline = 1e-4, time.monotonic() + TIMEOUT_S
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                late = [self._names[r] for r, k in enumerate(keys) if not self._store.check([k])]
                where = f", before {place}" if place else ""
                raise RankError(
                    f"{self._me()} has waited {TIMEOUT_S:g} s for rank {', '.join(map(str, late))}: "
                    f"{self._what}{where}; {self._last()}"
                )
            time.sleep(pause)
            pause = min(pause + 5e-5, 5e-3)
        return self._store.multi_get(keys)

    def _me(self) -> str:
        return f"rank {self._name}"

    def _last(self) -> str:
        return f"the last collective that all came to: {self.last_collective}"


class _Watching(TorchDispatchMode):
    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_made_of_others, types)):
            return NotImplemented
        if is_collective(func):
            self._ranks.before(func.name())
        return func(*args, **(kwargs or {}))


_known: weakref.WeakKeyDictionary[Any, Ranks] = weakref.WeakKeyDictionary()


def _listen(reference: weakref.ref[Ranks]) -> None:
    while True:
        ranks = reference()
        if ranks is None or not torch.distributed.is_initialized():
            return
        try:
            ranks.listen()
        except RuntimeError:  # the store is gone, and the other ranks with it
            return
        del ranks
        time.sleep(_LOOK_S)
