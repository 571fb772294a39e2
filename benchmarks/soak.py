"""Minutes of everything that may happen to an accelerated pipeline, at random: `python -m benchmarks.soak --seconds 600`.

Every call is compared with eager, to the bit. A run fails on a *mismatch* (another result than eager's), an *escape* (an error
that eager would not raise), anything *unforeseen* (a limit not kept, a trace left, a warning that nothing calls for), and when
memory is not flat: everything is dropped at every 50th step, and what is left then at the end may not be more than at a quarter
of the run (`_soak.memory` says how much more). A step depends on the seed, its number and those since the last drop, so a failure
comes with the command that makes it again; threads excepted, whose timing is their own.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch

from benchmarks import _cli
from benchmarks._results import Results, Row
from benchmarks._soak import memory
from benchmarks._soak.acts import ACTS, Act, World, is_unforeseen
from benchmarks._soak.subject import FAMILIES, Subject, variants
from benchmarks._soak.tally import Tally
from diffgraph.routing import startup

EPOCH = 50
COLUMNS = {
    "seconds": "seconds",
    "seed": "seed",
    "steps": "steps",
    "calls": "calls",
    "replays": "replays",
    "captures": "captures",
    "eager": "eager",
    "evictions": "evictions",
    "faults": "faults",
    "mismatches": "mismatches",
    "escapes": "escapes",
    "unforeseen": "unforeseen",
    "MiB at 1/4": "quarter_mib",
    "at the end": "end_mib",
    "flat": "flat",
}


@dataclass
class Soak:
    """A run; `run` fills the tally and the series of what was left at each drop."""

    seed: int = 0
    device: str = "cpu"
    families: Sequence[str] = FAMILIES
    threads: int = 3
    backend: str = "breakable"
    epoch: int = EPOCH
    acts: Sequence[Act] = ACTS
    tally: Tally = field(default_factory=Tally)
    left: list[memory.Left] = field(default_factory=list)
    seconds: float = 0.0
    step: int = 0

    def run(self, *, seconds: float | None = None, steps: int | None = None, start: int = 0) -> Soak:
        """For `seconds`, or exactly the steps from `start` (at which an epoch begins) up to `steps`."""
        for family in self.families:
            variants(family, self.device)  # what is kept for the whole run is there before memory is first looked at
        begun = perf_counter()
        subjects: list[Subject] = []
        self.step = start
        with self.tally.counting_evictions(), warnings.catch_warnings(record=True) as caught, _quiet():
            warnings.simplefilter("always")
            while self.step < steps if steps is not None else perf_counter() - begun < (seconds or 0):
                if not subjects:
                    subjects = self._new_subjects()
                self._take_step(subjects, caught)
                self.step += 1
                if self.step % self.epoch == 0:
                    self._drop(subjects)
            self._drop(subjects)
        self.seconds = perf_counter() - begun
        return self

    def _new_subjects(self) -> list[Subject]:
        return [Subject(family, self.device, self.tally, self._random(family), self.backend) for family in self.families]

    def _take_step(self, subjects: list[Subject], caught: list[Any]) -> None:
        rng = self._random(self.step)
        subject = rng.choice(subjects)
        possible = [act for act in self.acts if act.when(subject)]
        act = rng.choices(possible, [act.weight for act in possible])[0]
        self.tally.now = f"step {self.step} {act.name}"
        self.tally.acts[act.name] += 1
        known = len(self.tally.failures)
        try:
            act.run(World(subjects, self.threads, self.tally), subject, rng)
            for other in subjects:
                other.check_limits()
        except Exception as error:
            self.tally.note_escape(error, f"{subject.family}: {traceback.format_exc(limit=-6)}")
            for other in subjects:
                other.accelerate_if_not(rng)
        for warning in caught:
            if is_unforeseen(act, warning):
                self.tally.note_unforeseen(f"{subject.family}: {warning.message}")
        caught.clear()
        for line in self.tally.failures[known:]:
            print(f"{line}\n    again: {self.again()}", file=sys.stderr, flush=True)

    def _drop(self, subjects: list[Subject]) -> None:
        while subjects:
            _end(subjects.pop())
        self.left.append(memory.Left.now(self.step, self.device))

    def _random(self, what: Any) -> random.Random:
        return random.Random(f"{self.seed}:{self.step}:{what}")

    def again(self) -> str:
        start = self.step - self.step % self.epoch
        options = f"--seed {self.seed} --device {self.device} --threads {self.threads} --families {','.join(self.families)}"
        return f"python -m benchmarks.soak {options} --start {start} --steps {self.step + 1}"

    @property
    def ok(self) -> bool:
        return not self.tally.failed and memory.is_flat(self.left, self.device)[0]

    def row(self) -> Row:
        flat, quarter, end = memory.is_flat(self.left, self.device)
        tally = self.tally
        return {
            "what": "soak",
            "family": ",".join(self.families),
            "shape": "mixed",
            "mode": self.backend,
            "seconds": round(self.seconds, 1),
            "seed": self.seed,
            "steps": self.step,
            "threads": self.threads,
            "calls": tally.calls,
            "replays": tally.replays,
            "captures": tally.captures,
            "eager": tally.eager,
            "evictions": tally.evictions,
            "reasons": dict(tally.reasons.most_common()),
            "acts": dict(tally.acts.most_common()),
            "faults": sum(tally.faults.values()),
            "faults_by_kind": dict(tally.faults.most_common()),
            "raised_as_eager": tally.raised,
            "not_finite": tally.not_finite,
            "mismatches": tally.mismatches,
            "escapes": tally.escapes,
            "unforeseen": tally.unforeseen,
            "quarter_mib": round(quarter.mib, 1),
            "end_mib": round(end.mib, 1),
            "tensors": [quarter.tensors, end.tensors],
            "ours_left": sorted({name for left in self.left for name in left.ours}),
            "flat": flat,
            "memory_mib": [[left.step, round(left.mib, 1)] for left in self.left[:: max(len(self.left) // 20, 1)]],
        }


def _end(subject: Subject) -> None:
    subject.restore()
    if subject.moved is not None:  # hooks of an offload reach the family's shared components
        subject.moved()
    subject.clear_caches()


@contextmanager
def _quiet() -> Iterator[None]:
    """diffusers and the runner log what the acts provoke, and start-up draws bars; a line for each would hide a failure."""
    loggers = [logging.getLogger(name) for name in ("diffusers", "diffgraph", "accelerate", "peft")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    bar = startup.tqdm
    startup.tqdm = partial(bar, disable=True)  # type: ignore[assignment]
    try:
        yield
    finally:
        startup.tqdm = bar
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--steps", type=int, help="instead of seconds: up to this step")
    parser.add_argument("--start", type=int, default=0, help="the first step, of a run that is made again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=("breakable", "full", "eager"), default="breakable")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--families", type=_cli.families, default=list(FAMILIES))
    parser.add_argument("--out", metavar="FILE.json", help="write the row there")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)  # for models as small as these, several only wait for each other
    results = Results(options.out, options.device)
    soak = Soak(options.seed, options.device, options.families, options.threads, options.backend)
    soak.run(seconds=options.seconds, steps=options.steps, start=options.start)
    row = soak.row()
    results.add([row])
    print(results.table([row], COLUMNS))
    print(f"eager because: {row['reasons']}\nfaults: {row['faults_by_kind']}")
    for line in soak.tally.failures:
        print(line)
    if not row["flat"]:
        print(f"memory is not flat: {row['memory_mib']}, tensors {row['tensors']}, left of ours: {row['ours_left']}")
    return 0 if soak.ok else 1


if __name__ == "__main__":
    sys.exit(main())
