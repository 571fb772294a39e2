"""What a device must offer so that a sequence can record on it."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


class Segment(ABC):
    """One captured graph: open from construction until `end` or `abort`, replayable after `end`."""

    #: How many of its ops other ranks wait for.
    collectives = 0

    @abstractmethod
    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one op while the segment is open and return what it returns."""

    @abstractmethod
    def end(self) -> None: ...

    @abstractmethod
    def abort(self) -> None:
        """End an open segment that will not be used; leaves stream, allocator and generators usable."""

    @abstractmethod
    def replay(self) -> None: ...

    @abstractmethod
    def reset(self) -> None:
        """Release what the segment holds."""


class Pool(ABC):
    """The memory that sequences share, and the turn-taking that sharing demands.

    Sequences of one pool write the same memory, so they take turns: `turn` orders both the host (a lock) and the device.
    """

    #: True where an op that is recorded also runs at once (the tape); False where it is only recorded (CUDA).
    runs_while_recording: bool
    poison = False  # whether dead intermediates are filled with NaN before a replay

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.RLock()
        self.in_turn = False
        self.segments: weakref.WeakSet[Segment] = weakref.WeakSet()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Exclusive use of the pool's memory, ordered after whoever used it last."""
        with self.lock:
            outer, self.in_turn = self.in_turn, True
            try:
                with self._ordered():
                    yield
            finally:
                self.in_turn = outer

    @abstractmethod
    def _ordered(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def recording(self) -> AbstractContextManager[None]:
        """What must hold around the recording of a whole sequence."""

    @abstractmethod
    def open_segment(self) -> Segment: ...

    @abstractmethod
    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor over the same memory that does not keep the pool from reusing it."""

    @abstractmethod
    def bytes(self) -> int:
        """Memory that the pool holds now, in bytes."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until the device is done with the pool, so that its memory may be released."""

    def finishes(self, within_s: float) -> bool:
        """Wait until the device is done with what the current stream was given; False when that takes longer."""
        return True

    @abstractmethod
    def rng_state(self) -> Any:
        """State of every default generator that a forward on this device may draw from."""

    @abstractmethod
    def set_rng_state(self, state: Any) -> None: ...

    @abstractmethod
    def timed(self, fn: Callable[[], Any]) -> tuple[Any, float | None]:
        """What `fn` returns, and how long the device took, in ms, idling included; `None` where time says nothing."""

    @abstractmethod
    def drew(self, before: Any) -> bool:
        """Whether random numbers were drawn since the state `before`."""

    @abstractmethod
    def replayable_rng(self, before: Any) -> bool:
        """Whether all random numbers drawn since the state `before` come from generators that a replay draws from too."""
