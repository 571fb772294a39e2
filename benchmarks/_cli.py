"""Options that the benchmarks share, and the pipeline that they ask for."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import pipelines


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    gpu = torch.cuda.is_available()
    made.add_argument("--size", choices=("full", "tiny"), default="full" if gpu else "tiny", help="published size or tiny")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if gpu else "cpu")
    made.add_argument("--dtype", help="bfloat16, float32, ... (default: bfloat16 on a GPU, else float32)")
    made.add_argument("--out", metavar="FILE.json", help="write the rows there; rows of earlier runs are kept or replaced")
    return made


def words(text: str) -> list[str]:
    """Type of a comma-separated option."""
    return [word.strip() for word in text.split(",") if word.strip()]


def families(text: str) -> list[str]:
    """Type of `--families`."""
    unknown = [name for name in words(text) if name not in pipelines.FAMILIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; accepted: {', '.join(pipelines.FAMILIES)}")
    return words(text)


def build(family: str, options: argparse.Namespace) -> Any:
    """The pipeline, on the device, without progress bars."""
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    if options.size == "full":
        pipe = pipelines.build(family, "full", device=options.device, dtype=dtype)
    else:
        pipe = pipelines.build(family).to(options.device, dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe
