"""One denoiser call, eager, breakable and as one whole graph, compiled or not: times, memory, whether the bits are equal."""

from __future__ import annotations

import argparse
from typing import Any

from diffgraph.cli import models
from diffgraph.cli.errors import UsageError
from diffgraph.cli.screen import MIB, console, print_json, table, working
from diffgraph.cli.shape_options import add_measuring, measured_shapes

BACKENDS = ("breakable", "full")
COMPILED = "+compile"
COLUMNS = (
    *("shape", "denoiser", "backend", "eager ms", "ms", "speed-up", "segments", "breaks", "memory MiB", "bit-equal"),
    "eager because",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    add_measuring(parser, repeats="timed calls of each", json="rows as JSON")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="those to compare with eager")
    parser.add_argument("--compile-blocks", action="store_true", help="and each with the model's blocks compiled")


def run(options: argparse.Namespace) -> int:
    backends = [name.strip() for name in options.backends.split(",") if name.strip()]
    if not backends or any(name not in BACKENDS for name in backends):
        raise UsageError(f"--backends is {options.backends!r}; accepted: {', '.join(BACKENDS)}")
    shapes = measured_shapes(options)
    if options.compile_blocks:
        backends += [f"{name}{COMPILED}" for name in backends]
    screen = None if options.json else console()
    with working(f"loading {options.model}"):
        model = models.load(options)
    rows = []
    for shape in shapes or [model.default_shape()]:
        with working(f"eager, {', '.join(backends)}: {shape}"):
            rows += measure(model, shape, backends, options.repeats)
    if screen is None:
        print_json(rows)
    else:
        screen.print(table(f"{type(model.pipe).__name__}: one denoiser call", COLUMNS, [list(row.values()) for row in rows]))
        if model.pipe.device.type == "cpu":
            screen.print("On a CPU nothing waits for Python: no speed-up is to be expected.")
    return 0 if all(row["equal"] is not False for row in rows) else 1


def measure(model: models.Model, shape: Any, backends: list[str], repeats: int) -> list[dict[str, Any]]:
    """A row a kind of call and backend. Each is timed in turn with eager, so that drift favours neither."""
    from statistics import median

    from diffgraph.cli.calls import denoiser_calls

    rows = []
    for call in denoiser_calls(model, shape):
        for backend in backends:
            eager, replayed, found = _timed(call, backend, repeats)
            times = {"eager_ms": median(eager), "ms": None, "ratio": None}
            if replayed:
                times |= {"ms": median(replayed), "ratio": median(eager) / median(replayed)}
            rows.append({"shape": str(shape), "denoiser": call.name, "backend": backend, **times, **found})
    return rows


_MEASURED = ("segments", "breaks", "memory_mib", "equal", "reasons")


def _timed(call: Any, backend: str, repeats: int) -> tuple[list[float], list[float], dict[str, Any]]:
    import warnings

    import torch

    import diffgraph
    from diffgraph.cli.calls import settle
    from diffgraph.cli.clock import call_ms
    from diffgraph.values.compare import close, same_bits

    eager: list[float] = []
    replayed: list[float] = []
    found: dict[str, Any] = dict.fromkeys(_MEASURED)
    name, compiled = backend.removesuffix(COMPILED), backend.endswith(COMPILED)
    options: dict[str, Any] = {"backend": name, "compile_blocks": compiled, "prompt_buckets": None}
    diffgraph.accelerate_module(call.module, **options, verify=False)  # whatever it gains
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", diffgraph.CaptureWarning)  # told in the row
            before = settle(call)
            for _ in range(2):
                with diffgraph.paused(call.module):
                    eager += call_ms(call, repeats, call.device)[1:]
                replayed += call_ms(call, repeats, call.device)[1:]
            report = diffgraph.report(call.module)
            if report.replays - before.replays == 2 * repeats:
                output = call()
                with diffgraph.paused(call.module):
                    expected = call()
                found["equal"] = same_bits(output, expected) or (compiled and close(output, expected) and "close")
                (row,) = [s for s in report.signatures if s.captured]
                found["reasons"] = row.uncompiled and f"not compiled: {row.uncompiled}"
                found |= {"segments": row.segments, "breaks": row.breaks, "memory_mib": report.memory_bytes / MIB}
            else:
                replayed = []
                found["reasons"] = ", ".join(r for r in report.reasons if r not in ("unseen_signature", "paused"))
    finally:
        diffgraph.restore_pipeline(call.module)
    return eager, replayed, found
