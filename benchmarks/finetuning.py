"""One fine-tuning step of a LoRA: eager, recorded whole, and with the module's forward and backward recorded alone (`module`).

One row a family, shape and mode, and whether `--curve` steps give eager's loss curve, to the bit, with kernels that add in a
fixed order. Figures to reach on one H200, LoRA of rank 16 on attention, batch 1: SD3.5-medium 512x512 2.2x, Wan-1.3B 480x832x1
3x, Z-Image 512x512 1.8x; `module` within 15 % of `recorded`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

import diffgraph
import pipelines
from benchmarks import _cli
from benchmarks._measure import MIB, call_ms, release, seconds, submit_ms
from benchmarks._results import Results, Row
from pipelines import finetune

MODES = ("eager", "recorded", "module")
FAMILIES = ("sd3", "wan", "z_image")
WARM_UP = 5  # eager, eager, captured, verified, replayed
COLUMNS = {
    "family": "family",
    "shape": "shape",
    "mode": "mode",
    "ms": "ms",
    "x eager": "ratio",
    "submit ms": "submit_ms",
    "segments": "segments",
    "breaks": "breaks",
    "capture s": "capture_s",
    "pool MiB": "pool_mib",
    "peak MiB": "peak_mib",
    "max |loss diff|": "max_abs_diff",
    "curve equal": "equal",
    "": "note",
}


class Case:
    """One family at one shape. Modes are visited forth and back (A B C C B A), so that drift favours none of them."""

    def __init__(
        self, trainer: finetune.Trainer, batch: finetune.Batch, family: str, shape: str, options: argparse.Namespace
    ) -> None:
        self.trainer, self.batch, self.options = trainer, batch, options
        self.device = trainer.parameters[0].device
        self.start = [p.detach().clone() for p in trainer.parameters]
        dtype = str(next(trainer.denoiser.parameters()).dtype)[6:]
        self.about = {"what": "finetuning", "family": family, "shape": shape, "dtype": dtype, "rank": options.rank}

    def rows(self, modes: Sequence[str]) -> list[Row]:
        rows = {mode: self._blank(mode) for mode in modes}
        times: dict[str, tuple[list[float], list[float]]] = {mode: ([], []) for mode in modes}
        for mode in (*modes, *reversed(modes)):
            with self._recorded(mode) as (step, report):
                self._time(rows[mode], times[mode], step, report)
        for mode, (calls, submits) in times.items():
            if calls:
                rows[mode] |= {"ms": median(calls), "submit_ms": median(submits), "repeats": len(calls)}
        eager = rows.get("eager", {}).get("ms")
        for row in rows.values():
            row["ratio"] = eager / row["ms"] if eager and row["ms"] else None
        self._compare_curves(rows)
        return list(rows.values())

    def _blank(self, mode: str) -> Row:
        measured = ("ms", "submit_ms", "segments", "breaks", "capture_s", "pool_mib", "peak_mib", "max_abs_diff", "equal", "note")
        return {**self.about, "mode": mode, **dict.fromkeys(measured)}

    @contextmanager
    def _recorded(self, mode: str) -> Iterator[tuple[Callable[[], Any], Callable[[], diffgraph.Report] | None]]:
        """A step of a fresh optimizer from the first weights on, and how to ask for its report."""
        self.trainer = finetune.start_over(self.trainer, self.start)
        denoiser, latents, conditions = self.trainer.denoiser, *self.batch
        torch.manual_seed(0)
        try:
            if mode == "recorded":
                step = diffgraph.record_training_step(self.trainer.step, optimizer=self.trainer.optimizer, model=denoiser)
                try:
                    yield lambda: step(latents, conditions), lambda: diffgraph.report(step)
                finally:
                    step.close()
            elif mode == "module":
                diffgraph.accelerate_module(denoiser, training=True)
                try:
                    yield lambda: self.trainer.step(latents, conditions), lambda: diffgraph.report(denoiser)
                finally:
                    diffgraph.restore_pipeline(denoiser)
            else:
                yield lambda: self.trainer.step(latents, conditions), None
        finally:
            release()

    def _time(
        self,
        row: Row,
        times: tuple[list[float], list[float]],
        step: Callable[[], Any],
        report: Callable[[], diffgraph.Report] | None,
    ) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        took = []
        for _ in range(WARM_UP):
            before = report().captures if report else 0
            took.append((seconds(step, self.device), bool(report) and report().captures > before))
        before = report().replays if report else 0
        repeats = -(-self.options.repeats // 2)
        calls, submits = call_ms(step, repeats, self.device), submit_ms(step, repeats, self.device)
        if report is not None:
            found = report()
            missed = 2 * repeats - (found.replays - before)
            if missed:  # then they are no times of this mode
                row["note"] = f"{missed} of {2 * repeats} steps were not replays: {found.reasons}"
                return
            captured = next((signature for signature in found.signatures if signature.captured), None)
            assert captured is not None
            row |= {"segments": captured.segments, "breaks": captured.breaks, "pool_mib": found.memory_bytes / MIB}
            row["capture_s"] = next((s for s, was_captured in took if was_captured), None)
        if self.device.type == "cuda":
            row["peak_mib"] = torch.cuda.max_memory_reserved(self.device) / MIB
        times[0].extend(calls)
        times[1].extend(submits)

    def _compare_curves(self, rows: dict[str, Row]) -> None:
        was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            curves = {mode: self._curve(mode) for mode in rows}
        finally:
            torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        for mode, curve in curves.items():
            if "eager" in curves:
                difference = (curve - curves["eager"]).abs().max().item()
                rows[mode] |= {"max_abs_diff": difference, "equal": torch.equal(curve, curves["eager"]), "steps": len(curve)}
            if not curve.isfinite().all():
                rows[mode]["note"] = "losses are not finite"

    def _curve(self, mode: str) -> torch.Tensor:
        with self._recorded(mode) as (step, _):
            return torch.stack([step() for _ in range(self.options.curve)]).cpu()


def family_rows(family: str, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of each shape, as soon as they are measured."""
    pipe = _cli.build(family, options)
    shapes = options.shapes or default_shapes(family, options)
    batches = [finetune.first_batch(pipe, family, shape) for shape in shapes]
    parameters = finetune.add_lora(pipe.transformer, options.rank)
    if options.checkpointing:
        pipe.transformer.enable_gradient_checkpointing()
    trainer = finetune.Trainer(pipe.transformer.train(), family, parameters)
    for shape, batch in zip(shapes, batches, strict=True):
        yield Case(trainer, batch, family, shape, options).rows(options.modes)


def default_shapes(family: str, options: argparse.Namespace) -> Sequence[str]:
    if options.size == "full":
        return pipelines.module(family).SHAPES[:1]
    return ["32x32x1" if family == "wan" else "32x32"]


def main(argv: Sequence[str] | None = None) -> int:
    parser = _cli.parser(__doc__)
    parser.add_argument("--families", type=_cli.some_of(tuple(finetune.FLOWS)), default=list(FAMILIES))
    parser.add_argument("--shapes", type=_cli.words, help="512x512,480x832x17,... (default: the family's smallest)")
    parser.add_argument("--modes", type=_cli.some_of(MODES), default=list(MODES))
    parser.add_argument("--rank", type=int, default=finetune.RANK, help="of the LoRA")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps a mode, at least")
    parser.add_argument("--curve", type=int, default=100, help="steps whose losses are compared")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no family after that time")
    options = parser.parse_args(argv)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that cuBLAS can be deterministic; read once
    results = Results(options.out, options.device)
    rows, failed = _cli.measure_families(options, family_rows, results)
    if rows:
        print(results.table(rows, COLUMNS))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
