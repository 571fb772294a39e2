"""Write, check or expand a file of capture shapes.

diffgraph shapes write shapes.json 512x512 1024x1024 --batch 1 2     each shape with each batch size
diffgraph shapes check shapes.json --model owner/name                 would the pipeline take them?
diffgraph shapes expand shapes.json                                   what would be recorded, largest first
"""

from __future__ import annotations

import argparse

from diffgraph.cli import models
from diffgraph.cli.errors import UsageError
from diffgraph.cli.screen import console, print_json, table
from diffgraph.cli.shape_options import add_products, multiplied, shapes_of
from diffgraph.errors import ShapeError
from diffgraph.shapes.capture_shape import CaptureShape, load_shapes, save_shapes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    write = actions.add_parser("write", help="write shapes to a .json or .yaml file")
    write.add_argument("file", metavar="FILE")
    write.add_argument("shapes", nargs="+", metavar="SHAPE", help="512x512, 480x832x81, 512x512@cfg=off, or another file")
    write.add_argument("--force", action="store_true", help="overwrite FILE")
    add_products(write)
    check = actions.add_parser("check", help="is the file well-formed, and does a pipeline take its shapes?")
    check.add_argument("file", metavar="FILE")
    check.add_argument("--model", metavar="MODEL", help="ask this pipeline; its denoiser does not run")
    check.add_argument("--tiny", action="store_true", help="MODEL is a family's tiny pipeline")
    check.set_defaults(device=None, dtype=None)
    expand = actions.add_parser("expand", help="what would be recorded, largest first")
    expand.add_argument("shapes", nargs="+", metavar="FILE_OR_SHAPE")
    expand.add_argument("--json", action="store_true")
    add_products(expand)


def run(options: argparse.Namespace) -> int:
    return {"write": _write, "check": _check, "expand": _expand}[options.action](options)


def _write(options: argparse.Namespace) -> int:
    from pathlib import Path

    if Path(options.file).exists() and not options.force:
        raise UsageError(f"{options.file} exists; --force overwrites it")
    shapes = multiplied(shapes_of(options.shapes), options)
    try:
        save_shapes(shapes, options.file)
    except OSError as error:
        raise UsageError(f"{options.file} cannot be written: {error.strerror}") from None
    print(f"{options.file}: {len(shapes)} shapes, {shapes[0]} the largest")
    return 0


def _check(options: argparse.Namespace) -> int:
    shapes = load_shapes(options.file) if options.file.lower().endswith((".json", ".yaml", ".yml")) else None
    if shapes is None:
        raise UsageError(f"{options.file}: a file of capture shapes ends in .json, .yaml or .yml")
    if options.model is None:
        print(f"{options.file}: {len(shapes)} shapes, well-formed; --model asks a pipeline whether it takes them")
        return 0
    model = models.load(options)
    refused = [why for shape in shapes if (why := _refused(model, shape)) is not None]
    print(*refused, sep="\n", end="\n" if refused else "")
    print(f"{options.file}: {type(model.pipe).__name__} takes {len(shapes) - len(refused)} of {len(shapes)} shapes")
    return 1 if refused else 0


def _refused(model: models.Model, shape: CaptureShape) -> str | None:
    from diffgraph.cli.calls import would_call

    try:
        would_call(model, shape)
    except ShapeError as error:
        return str(error)
    return None


def _expand(options: argparse.Namespace) -> int:
    shapes = multiplied(shapes_of(options.shapes), options)
    if options.json:
        print_json([shape.to_dict() for shape in shapes])
        return 0
    columns = ("shape", "height", "width", "frames", "prompt tokens", "cfg", "batch")
    rows = [(str(s), s.height, s.width, s.num_frames, s.prompt_length, s.guidance, s.batch) for s in shapes]
    console().print(table(f"{len(shapes)} shapes, in the order of recording (–: the pipeline's default)", columns, rows))
    return 0
