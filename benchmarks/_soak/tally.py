"""What a soak counts, and what it holds against the library."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import diffgraph
from benchmarks._calls import difference, is_finite
from diffgraph.routing.memory import Memory
from diffgraph.values.compare import close, same_bits

PAUSED = "paused"  # the oracle's own calls


@dataclass
class Outcome:
    """What a call gave: a value, or the error that reached the caller."""

    value: Any = None
    error: BaseException | None = None

    @classmethod
    def of(cls, call: Callable[[], Any]) -> Outcome:
        try:
            return cls(call())
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            return cls(error=error.with_traceback(None))  # which would keep the tensors of its frames alive


@dataclass
class Tally:
    calls: int = 0
    raised: int = 0  # calls in which eager raises too
    not_finite: int = 0  # calls whose result is NaN or infinite: their comparison says little
    mismatches: int = 0
    escapes: int = 0
    unforeseen: int = 0  # other faults: a limit that is not kept, a warning that nobody asked for, a trace that is left
    evictions: int = 0
    captures: int = 0
    replays: int = 0
    eager: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)  # those injected, by what was under way
    failures: list[str] = field(default_factory=list)
    now: str = ""  # the step and its act

    @property
    def failed(self) -> bool:
        return bool(self.mismatches or self.escapes or self.unforeseen)

    def judge(self, found: Outcome, wanted: Outcome, what: str, *, rounds: bool = False) -> None:
        """One call beside what eager gives: to the bit, or where it `rounds` otherwise, closely."""
        same = close if rounds else same_bits
        self.calls += 1
        if found.error is not None:
            if wanted.error is not None and type(wanted.error) is type(found.error):
                self.raised += 1
            else:
                self.note_escape(found.error, what)
        elif wanted.error is not None:
            self.mismatches += 1
            self._fail("MISMATCH", what, f"eager raises {wanted.error!r}")
        elif not same(found.value, wanted.value):
            self.mismatches += 1
            same_kind = type(found.value) is type(wanted.value)
            self._fail("MISMATCH", what, str(difference(found.value, wanted.value)) if same_kind else "another container")
        elif not is_finite(wanted.value):
            self.not_finite += 1

    def note_escape(self, error: BaseException, what: str) -> None:
        self.escapes += 1
        self._fail("ESCAPE", what, repr(error))

    def note_unforeseen(self, what: str) -> None:
        self.unforeseen += 1
        self._fail("UNFORESEEN", what, "")

    def absorb(self, pipe: Any) -> None:
        """The routes of a pipeline that is about to be restored."""
        report = diffgraph.report(pipe)
        self.captures += report.captures
        self.replays += report.replays
        self.reasons.update({reason: n for reason, n in report.reasons.items() if reason != PAUSED})
        self.eager += report.eager - report.reasons.get(PAUSED, 0)

    @contextmanager
    def counting_evictions(self) -> Iterator[None]:
        evict = Memory._evict_oldest

        def counted(memory: Memory, recordings: Any) -> bool:
            evicted = evict(memory, recordings)
            self.evictions += evicted
            return evicted

        Memory._evict_oldest = counted
        try:
            yield
        finally:
            Memory._evict_oldest = evict

    def _fail(self, kind: str, what: str, detail: str) -> None:
        self.failures.append(f"{kind} {self.now}: {what} {detail}".rstrip())


def no_grad(call: Callable[[], Any]) -> Callable[[], Any]:
    """For threads, whose gradient mode is their own."""

    def run() -> Any:
        with torch.no_grad():
            return call()

    return run
