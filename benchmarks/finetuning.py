"""One fine-tuning step of a LoRA: eager, recorded whole, and with the module's forward and backward recorded alone (`module`).

One row a family, shape and mode; and one more on whether `--curve` steps give eager's loss curve, to the bit, with kernels that
add in a fixed order. Figures to reach on one H200, LoRA of rank 16 on attention, batch 1: SD3.5-medium 512x512 2.2x, Wan-1.3B
480x832x1 3x, Z-Image 512x512 1.8x; `module` within 15 % of `recorded`.
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
from benchmarks._results import Row
from pipelines import finetune

MODES = ("eager", "recorded", "module")
FAMILIES = ("sd3", "wan", "z_image")
WARM_UP = 5  # eager, eager, captured, verified, replayed
COLUMNS = {
    "what": "what",
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
    "steps": "steps",
    "replays": "replays",
    "max |loss diff|": "max_abs_diff",
    "bit-equal": "equal",
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
        dtype = str(trainer.denoiser.dtype)[6:]
        self.about = {"what": "finetuning", "family": family, "shape": shape, "dtype": dtype, "rank": options.rank}

    def rows(self, modes: Sequence[str]) -> list[Row]:
        timed = self._timed(modes) if self.options.repeats else []
        return timed + (self._curves(modes) if self.options.curve else [])

    def _timed(self, modes: Sequence[str]) -> list[Row]:
        measured = ("ms", "submit_ms", "segments", "breaks", "capture_s", "pool_mib", "peak_mib", "max_abs_diff", "equal", "note")
        rows: dict[str, Row] = {mode: {**self.about, "mode": mode, **dict.fromkeys(measured)} for mode in modes}
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
        return list(rows.values())

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

    def _curves(self, modes: Sequence[str]) -> list[Row]:
        """Losses beside those of a second eager run: where that has other bits, kernels are none of a fixed order."""
        was = torch.get_deterministic_debug_mode()
        torch.use_deterministic_algorithms(True)
        try:
            eager, _ = self._curve("eager")
            return [self._beside(eager, mode, *self._curve(mode)) for mode in modes]
        finally:
            torch.set_deterministic_debug_mode(was)

    def _beside(self, eager: torch.Tensor, mode: str, curve: torch.Tensor, replays: int) -> Row:
        row = {**self.about, "what": "finetuning curve", "mode": mode, "steps": len(curve), "replays": replays, "note": None}
        row |= dict.fromkeys(("ms", "submit_ms", "segments", "capture_s", "pool_mib"))
        row |= {"max_abs_diff": (curve - eager).abs().max().item(), "equal": torch.equal(curve, eager)}
        if not curve.isfinite().all():
            row |= {"max_abs_diff": None, "note": "losses are not finite"}
        return row

    def _curve(self, mode: str) -> tuple[torch.Tensor, int]:
        """The losses, and how many steps were replays."""
        with self._recorded(mode) as (step, report):
            return torch.stack([step() for _ in range(self.options.curve)]).cpu(), report().replays if report else 0


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
    parser.add_argument("--repeats", type=int, default=20, help="timed steps a mode, at least; 0: none")
    parser.add_argument("--curve", type=int, default=100, help="steps whose losses are compared; 0: none")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no family after that time")
    options = parser.parse_args(argv)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that cuBLAS can be deterministic; read once
    return _cli.measure(options, family_rows, COLUMNS)[1]


if __name__ == "__main__":
    sys.exit(main())
