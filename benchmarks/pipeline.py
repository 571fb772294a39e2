"""The whole pipeline call, eager and accelerated: prompt embeddings in, picture out. One row a family and mode."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import mean
from typing import Any

import torch

import diffgraph
from benchmarks import _cli
from benchmarks._calls import difference, inputs, is_finite
from benchmarks._measure import MIB, release, seconds
from benchmarks._replay import missed
from benchmarks._results import Results, Row

SHORT = 2  # steps: of each signature, the first call is warm-up and the second is recorded
COLUMNS = {
    "family": "family",
    "shape": "shape",
    "steps": "steps",
    "mode": "mode",
    "s": "s",
    "x eager": "ratio",
    "ms a step": "step_ms",
    "denoising s": "denoising_s",
    "first call s": "first_s",
    "segments": "segments",
    "pool MiB": "pool_mib",
    "peak MiB": "peak_mib",
    "max |diff|": "max_abs_diff",
    "bit-equal": "equal",
    "": "note",
}


class Case:
    """One family at one shape, in the order eager, breakable, breakable, eager, so that drift favours neither."""

    def __init__(self, pipe: Any, family: str, shape: str, steps: int) -> None:
        self.pipe = pipe
        self.family, self.shape, self.steps = family, shape, steps
        self.device = torch.device(pipe.device)

    def draw(self, steps: int, output_type: str, seed: int = 0) -> Any:
        given = inputs(self.pipe, self.family, self.shape, seed=seed)
        return self.pipe(**given, num_inference_steps=steps, output_type=output_type)[0]

    def rows(self) -> list[Row]:
        eager, expected = self._first("eager")
        times = {"eager": [self._whole()], "breakable": []}
        diffgraph.accelerate_pipeline(self.pipe)
        try:
            breakable, found = self._first("breakable")
            before = diffgraph.report(self.pipe)
            times["breakable"] = [self._whole(), self._whole()]
            breakable |= self._recorded(before) | difference(found, expected)
        finally:
            diffgraph.restore_pipeline(self.pipe)
        times["eager"].append(self._whole())
        for row in (eager, breakable):
            s = mean(times[row["mode"]])
            row |= {"s": s, "ms": s * 1e3, "step_ms": s * 1e3 / self.steps, "ratio": mean(times["eager"]) / s}
            row |= {"each_s": times[row["mode"]]}
        return [eager, breakable]

    def _first(self, mode: str) -> tuple[Row, Any]:
        """First calls of a mode, short ones and then one that gives latents, and the most memory that they took."""
        release()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        first_s = seconds(lambda: self.draw(SHORT, "pt"), self.device)
        self.draw(SHORT, "pt")  # the first replays, which are compared with eager
        latents: list[Any] = []
        denoising_s = seconds(lambda: latents.append(self.draw(self.steps, "latent", seed=1)), self.device)
        row = dict.fromkeys(("submit_ms", "segments", "capture_s", "pool_mib", "max_abs_diff", "equal"))
        row |= {"what": "pipeline", "family": self.family, "shape": self.shape, "mode": mode, "steps": self.steps}
        row |= {"first_s": first_s, "denoising_s": denoising_s, "peak_mib": None}
        if self.device.type == "cuda":
            row["peak_mib"] = torch.cuda.max_memory_reserved(self.device) / MIB
        row["note"] = None if is_finite(latents[0]) else "latents are not finite"
        return row, latents[0]

    def _whole(self) -> float:
        return seconds(lambda: self.draw(self.steps, "pt"), self.device)

    def _recorded(self, before: diffgraph.Report) -> Row:
        report = diffgraph.report(self.pipe)
        why = missed(before, report)
        return ({"note": why} if why else {}) | {
            "segments": sum(s.segments for s in report.signatures),
            "signatures": len(report.signatures),
            "pool_mib": report.memory_bytes / MIB,
            "routes": {"replay": report.replays, "capture": report.captures, "eager": report.eager},
        }


def family_rows(family: str, options: argparse.Namespace) -> list[Row]:
    return Case(_cli.build(family, options), family, options.shape, options.steps).rows()


def main(argv: Sequence[str] | None = None) -> int:
    parser = _cli.parser(__doc__)
    parser.add_argument("--families", type=_cli.families, default=["qwen_image"])
    parser.add_argument("--shape", default="512x512")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args(argv)
    results, rows = Results(options.out, options.device), []
    for family in options.families:
        measured = family_rows(family, options)
        results.add(measured)
        rows += measured
        release()
    print(results.table(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
