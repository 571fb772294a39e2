"""Options that the benchmarks share, the pipeline that they ask for, and the way through the families."""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from time import monotonic
from typing import Any

import torch

import pipelines
from benchmarks._measure import release
from benchmarks._results import Results, Row
from benchmarks._weights import QUANTIZED, add_lora, quantize
from diffgraph.routing.components import denoisers

FamilyRows = Callable[[str, argparse.Namespace], Iterator[list[Row]]]
DTYPES = ("bfloat16", "float16", "float32")


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    gpu = torch.cuda.is_available()
    made.add_argument("--size", choices=("full", "tiny"), default="full" if gpu else "tiny")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    made.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 for full, float32 for tiny")
    made.add_argument("--loras", type=int, default=0, help="unfused LoRAs of rank 16 on every linear layer of the blocks")
    made.add_argument("--quantize", choices=list(QUANTIZED), help="torchao weights")
    made.add_argument("--out", metavar="FILE.json", help="write rows there; those of earlier runs are kept or replaced")
    return made


def words(text: str) -> list[str]:
    """Type of a comma-separated option."""
    return [word.strip() for word in text.split(",") if word.strip()]


def some_of(accepted: Sequence[str]) -> Callable[[str], list[str]]:
    """Type of a comma-separated option that takes some of these words."""

    def read(text: str) -> list[str]:
        unknown = [word for word in words(text) if word not in accepted]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; accepted: {', '.join(accepted)}")
        return words(text)

    return read


families = some_of(pipelines.FAMILIES)


def measure_families(options: argparse.Namespace, family_rows: FamilyRows, results: Results) -> tuple[list[Row], list[str]]:
    """Rows of all `--families`, saved as soon as they are there, and the families that failed; none begins after `--budget`."""
    start, failed, rows = monotonic(), [], []
    for family in options.families:
        if options.budget is not None and monotonic() - start > options.budget:
            print(f"time is up: {family} and what follows is not measured", file=sys.stderr)
            break
        try:
            for measured in family_rows(family, options):
                results.add(measured)
                rows += measured
        except Exception:  # the next family may still be measured in the time that a GPU is lent for
            traceback.print_exc()
            failed.append(family)
        release()
        print(f"{family}: done after {monotonic() - start:.0f} s", file=sys.stderr)
    return rows, failed


def measure(options: argparse.Namespace, family_rows: FamilyRows, columns: dict[str, str]) -> tuple[list[Row], int]:
    """`measure_families` into `--out`, and the table; the rows, and the exit status."""
    results = Results(options.out, options.device)
    rows, failed = measure_families(options, family_rows, results)
    if rows:
        print(results.table(rows, columns))
    return rows, 1 if failed else 0


def build(family: str, options: argparse.Namespace, **more: Any) -> Any:
    """The pipeline, on the device, without progress bars; `more` is for what builds it in full."""
    given = {"dtype": getattr(torch, options.dtype)} if options.dtype else {}
    if options.size == "full":
        pipe = pipelines.build(family, "full", device=options.device, **given, **more)
    else:
        pipe = pipelines.build(family).to(options.device, **given)
    pipe.set_progress_bar_config(disable=True)
    for module in denoisers(pipe).values():
        if options.quantize:
            quantize(module, options.quantize)
        for i in range(options.loras):
            add_lora(module, f"lora{i}")
    return pipe
