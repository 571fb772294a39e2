"""Options that the benchmarks share, and the pipeline that they ask for."""

from __future__ import annotations

import argparse
from typing import Any

import torch

import pipelines
from benchmarks._weights import QUANTIZED, add_lora, quantize
from diffgraph.components import denoisers

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


def families(text: str) -> list[str]:
    """Type of `--families`."""
    unknown = [name for name in words(text) if name not in pipelines.FAMILIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; accepted: {', '.join(pipelines.FAMILIES)}")
    return words(text)


def build(family: str, options: argparse.Namespace) -> Any:
    """The pipeline, on the device, without progress bars."""
    given = {"dtype": getattr(torch, options.dtype)} if options.dtype else {}
    if options.size == "full":
        pipe = pipelines.build(family, "full", device=options.device, **given)
    else:
        pipe = pipelines.build(family).to(options.device, **given)
    pipe.set_progress_bar_config(disable=True)
    for module in denoisers(pipe).values():
        if options.quantize:
            quantize(module, options.quantize)
        for i in range(options.loras):
            add_lora(module, f"lora{i}")
    return pipe
