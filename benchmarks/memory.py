"""Several sizes recorded in one pool, largest first, against the largest alone. One row a size, in that order."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

import diffgraph
import pipelines
from benchmarks import _cli
from benchmarks._calls import DenoiserCall, difference
from benchmarks._measure import MIB, release
from benchmarks._results import Results, Row
from benchmarks.denoiser import capture_seconds, replays, worst
from diffgraph import CaptureShape

COLUMNS = {
    "family": "family",
    "shape": "shape",
    "mode": "mode",
    "segments": "segments",
    "capture s": "capture_s",
    "pool MiB so far": "pool_mib",
    "x largest alone": "over_largest",
    "max |diff|": "max_abs_diff",
    "bit-equal": "equal",
}


@torch.no_grad()
def rows_of(pipe: Any, family: str, shapes: Sequence[str]) -> list[Row]:
    """The largest is recorded first, into a pool of its own until the second comes: its row is the largest alone."""
    calls = {shape: DenoiserCall.of(pipe, family, shape) for shape in largest_first(shapes)}
    new = {shape: call.with_new_inputs(seed=1) for shape, call in calls.items()}
    expected = {shape: call() for shape, call in new.items()}
    release()
    diffgraph.accelerate_pipeline(pipe, verify=False, prompt_buckets=None)
    try:
        rows = {shape: _captured(pipe, family, shape, call) for shape, call in calls.items()}
        largest = next(iter(rows.values()))["pool_mib"]
        for row in rows.values():
            row["over_largest"] = row["pool_mib"] / largest if largest else None
        before = replays(pipe)
        for shape in (*rows, *reversed(rows)):  # each after a larger and after a smaller one
            rows[shape] |= worst(rows[shape], [difference(new[shape](), expected[shape])])
        assert replays(pipe) - before == 2 * len(rows), f"not all were replays: {diffgraph.report(pipe)}"
    finally:
        diffgraph.restore_pipeline(pipe)
    return list(rows.values())


def _captured(pipe: Any, family: str, shape: str, call: DenoiserCall) -> Row:
    capture_s = capture_seconds(pipe, call)
    report = diffgraph.report(pipe)
    assert report.signatures[-1].captured, f"{shape} was not captured: {report}"
    row = {"what": "memory", "family": family, "shape": shape, "mode": "breakable", "ms": None, "submit_ms": None}
    row |= {"segments": report.signatures[-1].segments, "capture_s": capture_s, "pool_mib": report.memory_bytes / MIB}
    return row | {"max_abs_diff": None, "equal": None}


def largest_first(shapes: Sequence[str]) -> list[str]:
    return sorted(dict.fromkeys(shapes), key=lambda shape: CaptureShape.parse(shape).size, reverse=True)


def sizes(text: str) -> list[str]:
    """Type of `--sizes`: a square by its side, or any shape."""
    return [f"{word}x{word}" if word.isdigit() else word for word in _cli.words(text)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = _cli.parser(__doc__)
    parser.add_argument("--family", choices=pipelines.FAMILIES, default="qwen_image")
    parser.add_argument("--sizes", type=sizes, default="256,384,512,640,768,896,1024")
    options = parser.parse_args(argv)
    results = Results(options.out, options.device)
    rows = rows_of(_cli.build(options.family, options), options.family, options.sizes)
    results.add(rows)
    print(results.table(rows, COLUMNS))
    first, last = rows[0], rows[-1]
    together, alone = (f"{row['pool_mib']:.0f} MiB" for row in (last, first))
    print(f"{len(rows)} sizes in one pool: {together}; {first['shape']} alone: {alone}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
