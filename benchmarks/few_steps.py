"""A distilled pipeline from a text to a picture, text encoders and VAE included: eager, the denoiser recorded, every component
recorded (`every`), and with compiled blocks beside. One row a family and mode.

Few steps leave the text encoders and the VAE a large share of the call. Figures to reach on one H200: Z-Image-Turbo, 8 steps,
1.8x; FLUX.1-schnell, 4 steps, 1.5x.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch

import diffgraph
from benchmarks import _cli
from benchmarks._calls import difference, is_finite, relative_difference
from benchmarks._measure import MIB, release, seconds
from benchmarks._replay import accelerated, missed
from benchmarks._results import Row
from diffgraph import CaptureShape

#: What makes the family's pipeline the distilled one, where that is built at full size, and how it is called.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "z_image": ({}, {"num_inference_steps": 8, "guidance_scale": 0.0}),
    "flux": ({"schnell": True}, {"num_inference_steps": 4, "max_sequence_length": 256}),
}
PROMPT = "a red cat asleep on a chair beside the window, in the rain"
#: Options of each mode, components yet to be named; `None`: not accelerated.
MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "denoiser": {},
    "every": {"components": ...},
    "every+compile": {"components": ..., "compile_blocks": True},
}
WARM_UP = 3  # calls: run eager, recorded, verified
COLUMNS = {
    "family": "family",
    "shape": "shape",
    "steps": "steps",
    "mode": "mode",
    "s": "s",
    "x eager": "ratio",
    "first calls s": "first_s",
    "segments": "segments",
    "pool MiB": "pool_mib",
    "rel. diff": "relative_diff",
    "bit-equal": "equal",
    "": "note",
}


class Case:
    """One family's pipeline at one size."""

    def __init__(self, pipe: Any, family: str, options: argparse.Namespace) -> None:
        self.pipe, self.options = pipe, options
        self.given = FAMILIES[family][1]
        self.device = torch.device(pipe.device)
        self.about = {"what": "few steps", "family": family, "shape": str(options.shape)}
        self.about |= {"dtype": str(pipe.transformer.dtype)[6:], "steps": self.given["num_inference_steps"]}

    def draw(self, seed: int = 0) -> torch.Tensor:
        size = {"height": self.options.shape.height, "width": self.options.shape.width}
        return self.pipe(PROMPT, **size, **self.given, generator=torch.Generator().manual_seed(seed), output_type="pt")[0]

    def rows(self) -> Iterator[Row]:
        expected = self.draw(1)
        for mode in ("eager", *(mode for mode in self.options.modes if mode != "eager")):
            options = _options(self.pipe, mode)
            with accelerated(self.pipe, options):
                row = {**self.about, "mode": mode, **dict.fromkeys(("submit_ms", "segments", "capture_s", "pool_mib", "note"))}
                row["first_s"] = sum(seconds(self.draw, self.device) for _ in range(WARM_UP))
                before = None if options is None else diffgraph.report(self.pipe)
                row["s"] = median(seconds(self.draw, self.device) for _ in range(self.options.repeats))
                found = self.draw(1)
                row |= {"ms": row["s"] * 1e3, **difference(found, expected)}
                row |= {"relative_diff": relative_difference(found, expected)}
                if before is not None:
                    row |= _recorded(before, diffgraph.report(self.pipe))
            if mode == "eager":
                eager_s = row["s"]
            if not is_finite(expected):
                row["note"] = "the picture is not finite"
            yield row | {"ratio": eager_s / row["s"]}
            release()


def _options(pipe: Any, mode: str) -> dict[str, Any] | None:
    options = MODES[mode]
    if options is None or "components" not in options:
        return options
    return {**options, "components": tuple(name for name, part in pipe.components.items() if isinstance(part, torch.nn.Module))}


def _recorded(before: diffgraph.Report, report: diffgraph.Report) -> Row:
    notes = [why] if (why := missed(before, report)) else []
    notes += sorted({f"{s.label.partition(':')[0]} not compiled: {s.uncompiled}" for s in report.signatures if s.uncompiled})
    recorded = {"segments": sum(s.segments for s in report.signatures), "pool_mib": report.memory_bytes / MIB}
    return {**recorded, "note": "; ".join(notes) or None}


def build(family: str, options: argparse.Namespace) -> Any:
    more = {"text": True, **FAMILIES[family][0]} if options.size == "full" else {}
    return _cli.build(family, options, **more)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _cli.parser(__doc__)
    parser.add_argument("--families", type=_cli.some_of(tuple(FAMILIES)), default=list(FAMILIES))
    parser.add_argument("--shape", type=CaptureShape.parse, default=CaptureShape(512, 512), help="of the picture")
    parser.add_argument("--modes", type=_cli.some_of(tuple(MODES)), default=list(MODES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no family after that time")
    options = parser.parse_args(argv)
    return _cli.measure(options, family_rows, COLUMNS)[1]


def family_rows(family: str, options: argparse.Namespace) -> Iterator[list[Row]]:
    for row in Case(build(family, options), family, options).rows():
        yield [row]


if __name__ == "__main__":
    sys.exit(main())
