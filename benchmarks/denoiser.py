"""One denoiser call: eager, as a breakable graph, and as one whole graph. One row a family, shape and mode."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

import diffgraph
import pipelines
from benchmarks import _cli
from benchmarks._calls import DenoiserCall, difference, is_finite
from benchmarks._measure import MIB, call_ms, release, seconds, submit_ms
from benchmarks._replay import boundaries, runner_work
from benchmarks._results import Row
from diffgraph import Reason

MODES = ("eager", "breakable", "full")
WARM_UP = 3
COLUMNS = {
    "family": "family",
    "shape": "shape",
    "mode": "mode",
    "ms": "ms",
    "x eager": "ratio",
    "submit ms": "submit_ms",
    "runner ms": "runner_ms",
    "segments": "segments",
    "breaks": "breaks",
    "capture s": "capture_s",
    "pool MiB": "pool_mib",
    "max |diff|": "max_abs_diff",
    "bit-equal": "equal",
    "": "note",
}


class Case:
    """One family at one shape. Modes are visited forth and back (A B C C B A), so that drift favours none of them."""

    def __init__(self, pipe: Any, family: str, shape: str, repeats: int, **about: Any) -> None:
        self.pipe = pipe
        self.repeats = -(-repeats // 2)  # a visit
        self.call = DenoiserCall.of(pipe, family, shape)
        self.new = [self.call.with_new_inputs(seed) for seed in (1, 2)]  # two, of which neither may overwrite the other
        self.expected = [call() for call in self.new]
        self.about = {"what": "denoiser", "family": family, "shape": shape, "dtype": str(self.call.module.dtype)[6:], **about}

    def rows(self, modes: Sequence[str]) -> list[Row]:
        rows: dict[str, Row] = {mode: self._blank(mode) for mode in modes}
        times: dict[str, tuple[list[float], list[float]]] = {mode: ([], []) for mode in modes}
        for mode in (*modes, *reversed(modes)):
            if mode == "eager":
                self._time(rows[mode], times[mode])
            else:
                self._visit(rows[mode], times[mode])
        for mode, (calls, submits) in times.items():
            if calls:
                rows[mode] |= {"ms": median(calls), "submit_ms": median(submits), "repeats": len(calls)}
        _compare(rows)
        return list(rows.values())

    def _blank(self, mode: str) -> Row:
        measured = ("ms", "submit_ms", "segments", "breaks", "capture_s", "pool_mib", "max_abs_diff", "equal")
        note = None if all(map(is_finite, self.expected)) else "eager output is not finite"
        return {**self.about, "mode": mode, **dict.fromkeys(measured), "note": note}

    def _visit(self, row: Row, times: tuple[list[float], list[float]]) -> None:
        """Accelerate (a fresh pool), capture, time, restore."""
        diffgraph.accelerate_pipeline(self.pipe, backend=row["mode"], verify=False, prompt_buckets=None)
        try:
            capture_s = capture_seconds(self.pipe, self.call)
            report = diffgraph.report(self.pipe)
            if capture_s is None:
                row["note"] = ", ".join(reason for reason in report.reasons if reason != Reason.UNSEEN_SIGNATURE)
                return
            self._time(row, times)
            if times[0] and row["capture_s"] is None:
                row |= {"capture_s": capture_s, "pool_mib": report.memory_bytes / MIB}
                row |= {"segments": report.signatures[0].segments, "breaks": report.signatures[0].breaks}
                row |= runner_work(self.call) | boundaries(self.call)
        finally:
            diffgraph.restore_pipeline(self.pipe)
            release()

    def _time(self, row: Row, times: tuple[list[float], list[float]]) -> None:
        before = replays(self.pipe) if row["mode"] != "eager" else 0
        found = [call() for call in self.new]
        row |= worst(row, [difference(a, b) for a, b in zip(found, self.expected, strict=True)])
        for _ in range(WARM_UP):
            self.call()
        calls = call_ms(self.call, self.repeats, self.call.device)
        submits = submit_ms(self.call, self.repeats, self.call.device)
        if row["mode"] != "eager":
            wanted = len(self.new) + WARM_UP + 2 * self.repeats
            missed = wanted - (replays(self.pipe) - before)
            if missed:  # then they are no times of this mode
                row["note"] = f"{missed} of {wanted} calls were not replays: {diffgraph.report(self.pipe).reasons}"
                return
        times[0].extend(calls)
        times[1].extend(submits)


def capture_seconds(pipe: Any, call: DenoiserCall) -> float | None:
    """Make a call of a new signature until it is recorded; how long that last one took. `None` when it stays eager."""
    for _ in range(8):  # a model whose caches are still filling takes more than two
        took = seconds(call, call.device)
        signatures = diffgraph.report(pipe).signatures
        if signatures and signatures[-1].captured:
            return took
    return None


def replays(pipe: Any) -> int:
    return diffgraph.report(pipe).replays


def worst(row: Row, differences: list[Row]) -> Row:
    """Columns for the largest of all differences, those of an earlier visit included."""
    if row["equal"] is not None:
        differences = [*differences, row]
    largest = [d["max_abs_diff"] for d in differences]
    return {"max_abs_diff": None if None in largest else max(largest), "equal": all(d["equal"] for d in differences)}


def _compare(rows: dict[str, Row]) -> None:
    """How many times faster than eager; and for breakable, what it takes beyond one whole graph, and on what."""
    ms = {mode: row["ms"] for mode, row in rows.items() if row["ms"]}
    for mode in ms:
        if "eager" in ms:
            rows[mode]["ratio"] = ms["eager"] / ms[mode]
    if "breakable" in ms and "full" in ms:
        row = rows["breakable"]
        row["over_full_ms"] = ms["breakable"] - ms["full"]
        if row["breaks"]:
            row["gap_us_a_break"] = (row["over_full_ms"] - row["boundary_copy_ms"]) / row["breaks"] * 1e3


def explain(row: Row) -> str:
    """A breakable row's difference to one whole graph, in words."""
    over = row["over_full_ms"]
    return (
        f"{row['family']} {row['shape']}: breakable takes {over:+.2f} ms ({over / (row['ms'] - over):+.1%}) over one "
        f"whole graph. {row['boundary_buffers']} boundary copies of {row['boundary_mib']:.1f} MiB in all take "
        f"{row['boundary_copy_ms']:.2f} ms; the rest, {row['gap_us_a_break']:.1f} us at each of {row['breaks']} breaks, "
        "is launch gaps."
    )


@torch.no_grad()
def family_rows(family: str, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of each shape, as soon as they are measured."""
    pipe = _cli.build(family, options)
    for shape in options.shapes or default_shapes(family, options):
        about = {"loras": options.loras, "quantized": options.quantize}
        yield Case(pipe, family, shape, options.repeats, **about).rows(options.modes)


def default_shapes(family: str, options: argparse.Namespace) -> Sequence[str]:
    """The smallest published one, where the host is the bottleneck."""
    return pipelines.module(family).SHAPES[:1] if options.size == "full" else ["64x64"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = _cli.parser(__doc__)
    parser.add_argument("--families", type=_cli.families, default=list(pipelines.FAMILIES))
    parser.add_argument("--shapes", type=_cli.words, help="512x512,480x832x17,... (default: the family's smallest)")
    parser.add_argument("--modes", type=_cli.some_of(MODES), default=list(MODES))
    parser.add_argument("--repeats", type=int, default=15, help="timed calls a mode, at least")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no family after that time")
    options = parser.parse_args(argv)
    rows, status = _cli.measure(options, family_rows, COLUMNS)
    if options.device == "cuda":  # a tape has no launches
        print(*[explain(row) for row in rows if "gap_us_a_break" in row], sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
