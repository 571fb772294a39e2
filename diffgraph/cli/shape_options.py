"""Capture shapes as options: a list of texts or a file, and the products of their fields."""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any

from diffgraph.cli.errors import UsageError
from diffgraph.errors import ShapeError
from diffgraph.shapes.capture_shape import CaptureShape, load_shapes

_FILES = (".json", ".yaml", ".yml")


def add_measuring(parser: argparse.ArgumentParser, repeats: str, json: str) -> None:
    """Of the commands that time a model at some shapes: `--shapes`, `--repeats` and `--json`, with what the last two mean."""
    parser.add_argument("--shapes", metavar="SHAPES", help="512x512,768x512@batch=2 or a file (default: the model's usual one)")
    parser.add_argument("--repeats", type=int, default=10, help=repeats)
    parser.add_argument("--json", action="store_true", help=json)


def measured_shapes(options: argparse.Namespace) -> list[CaptureShape] | None:
    """What `--shapes` names; `None` for the model's usual one. Raises `UsageError` for that or for too few `--repeats`."""
    if options.repeats < 2:
        raise UsageError(f"--repeats is {options.repeats}; accepted: at least 2")
    return shapes_of([options.shapes]) if options.shapes is not None else None


def shapes_of(texts: list[str]) -> list[CaptureShape]:
    """The unique shapes that texts name, largest first; a text that ends like a file is read."""
    found: list[CaptureShape] = []
    for text in texts:
        found += load_shapes(text) if text.lower().endswith(_FILES) else [CaptureShape.parse(part) for part in split(text)]
    return load_shapes(found)


def split(text: str) -> list[str]:
    """`512x512@batch=2,cfg=off,64x64` is two shapes: a comma that an option follows does not end one."""
    parts: list[str] = []
    for part in filter(None, map(str.strip, text.replace(";", ",").split(","))):
        if "=" in part and "@" not in part and parts:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    if not parts:
        raise ShapeError(f"no capture shape in {text!r}; accepted as in '512x512' or '512x512,768x512@cfg=off'")
    return parts


def add_products(parser: argparse.ArgumentParser) -> None:
    """`--batch 1 2 --cfg on off --prompt 64 128`: each shape, with every combination of these."""
    parser.add_argument("--batch", nargs="+", metavar="N", default=[], help="each shape for each of these batch sizes")
    parser.add_argument("--cfg", nargs="+", metavar="CFG", default=[], help="and for each of these: on, off or a scale")
    parser.add_argument("--prompt", nargs="+", metavar="TOKENS", default=[], help="and for each of these prompt lengths")


def multiplied(shapes: list[CaptureShape], options: argparse.Namespace) -> list[CaptureShape]:
    """What is given on the command line takes the place of a shape's own."""
    fields = [(_FIELDS[name], [_value(name, text) for text in getattr(options, name)]) for name in _FIELDS]
    wanted = {field: values for field, values in fields if values}
    given = [dict(zip(wanted, values, strict=True)) for values in product(*wanted.values())]
    return load_shapes([CaptureShape(**{**shape.to_dict(), **new}) for shape in shapes for new in given])


_FIELDS = {"prompt": "prompt_length", "cfg": "guidance", "batch": "batch"}


def _value(name: str, text: str) -> Any:
    """As a shape's own text would give it."""
    try:
        return getattr(CaptureShape.parse(f"8x8@{name}={text}"), _FIELDS[name])
    except ShapeError:
        accepted = "on, off or a guidance scale" if name == "cfg" else "a whole number of at least 1"
        raise UsageError(f"--{name} is {text!r}; accepted: {accepted}") from None
