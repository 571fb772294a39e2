"""Will it help my model, and what will it cost? Runs a few denoiser calls, eager and recorded, and says.

Idle share: time of an eager denoiser call in which the GPU waits for the host, which is what recording takes away. Expected: from
the profile of the eager call alone; measured: by recording it. Exit code 1: nothing could be recorded, or a replay differed.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from diffgraph.cli import models
from diffgraph.cli.screen import MIB, console, print_json, table, working
from diffgraph.cli.shape_options import add_measuring, measured_shapes

NO_GPU = (
    "No GPU here: breaks, host reads, refused state and whether it can be recorded are as they would be on one; times, idle "
    "share, launches and graph memory are not known (memory below is that of the CPU's tape, which reuses nothing)."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    add_measuring(parser, repeats="timed calls, eager and recorded each", json="everything that was found, as JSON")
    parser.add_argument("--prompt", help="the prompt to try with (default: one of the library's)")


def run(options: argparse.Namespace) -> int:
    from diffgraph.cli.diagnosis import DIFFERENT

    shapes = measured_shapes(options)
    screen = None if options.json else console()
    with working(f"loading {options.model}"):
        model = models.load(options)
    found = examine(model, shapes or [model.default_shape()], options.prompt, options.repeats)
    if screen is None:
        print_json(found)
    else:
        _show(found, screen)
    is_right = all(d["same"] != DIFFERENT for d in found["calls"])
    return 0 if is_right and any(d["recorded"] for d in found["calls"]) else 1


def examine(model: models.Model, shapes: Any, prompt: str | None, repeats: int) -> dict[str, Any]:
    """Everything, as plain data."""
    import torch

    from diffgraph.cli.advice import verdict
    from diffgraph.cli.calls import denoiser_calls
    from diffgraph.cli.diagnosis import diagnose
    from diffgraph.guards.refusals import refusal
    from diffgraph.routing.components import denoisers
    from diffgraph.routing.memory import total_memory
    from diffgraph.routing.startup import one_length
    from diffgraph.values.tensors import weights_device

    modules = denoisers(model.pipe)
    refused = {name: reason for name, m in modules.items() if (reason := refusal(m)) is not None}
    by_shape = {}
    for s in shapes:
        with working(f"eager and recorded, {s}"):
            by_shape[str(s)] = [diagnose(call, str(s), repeats) for call in denoiser_calls(model, s, prompt)]
    device = next(map(weights_device, modules.values()), torch.device("cpu"))
    vary = one_length(model.pipe, shapes[0]) is not None
    every_length = not vary or _has_buckets(modules.values())
    sentence, line = verdict(by_shape, every_length)
    return {
        "model": model.name,
        "pipeline": type(model.pipe).__name__,
        "parameters": sum(p.numel() for m in modules.values() for p in m.parameters()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "device_memory_bytes": total_memory(device),
        "limits": NO_GPU if device.type != "cuda" else None,
        "refused": {name: {"reason": str(reason), "meaning": reason.meaning} for name, reason in refused.items()},
        "prompts_vary_in_length": vary,
        "calls": [asdict(d) for found in by_shape.values() for d in found],
        "verdict": sentence,
        "recommended": line,
    }


def _has_buckets(denoisers: Any) -> bool:
    from diffgraph.families import rule_of

    return all(rule_of(module) is not None for module in denoisers)


def _show(found: dict[str, Any], screen: Any) -> None:
    say = screen.print
    billions = found["parameters"] / 1e9
    size = f"{billions:.1f}B" if billions >= 0.1 else f"{found['parameters'] / 1e6:.2f}M"
    say(f"{found['pipeline']} ({found['model']}), denoiser of {size} parameters, on {found['device']}", markup=False)
    if found["limits"]:
        say(found["limits"], markup=False)
    for name, why in found["refused"].items():
        say(f"{name} is refused in its present state: {why['reason']} ({why['meaning']})", markup=False)
    if found["prompts_vary_in_length"]:
        say("Prompts vary in length, so a signature stands for one length, or one bucket of lengths.", markup=False)
    say(_costs(found["calls"]))
    if any(d["eager_ms"] is not None for d in found["calls"]):
        say(_times(found["calls"]))
    breaks = [(d["shape"], b) for d in found["calls"] for b in d["breaks"]]
    rows = [(shape, b["count"], b["name"], b["why"], b["reads_host"], b["where"]) for shape, b in breaks]
    say(table("Where recording stops", ("shape", "breaks", "at", "because", "read by the host", "in"), rows))
    for d in found["calls"]:
        for reason, meaning in d["reasons"].items():
            say(f"{d['shape']}: ran eager because {reason} ({meaning})", markup=False)
    say(f"Verdict: {found['verdict']}", markup=False)
    if found["recommended"]:
        say(found["recommended"], markup=False)


def _costs(calls: list[dict[str, Any]]) -> Any:
    columns = (
        *("shape", "denoiser", "calls", "ops", "launches", "recorded", "segments", "breaks", "memory MiB", "recordings"),
        "as eager",
    )
    return table(
        "A denoising step",
        columns,
        [
            (
                d["shape"],
                d["denoiser"],
                f"{d['calls_a_step']:g}",
                d["ops"],
                d["launches"],
                d["recorded"],
                d["segments"],
                sum(b["count"] for b in d["breaks"]),
                d["memory_bytes"] / MIB,
                d["recordings"] if d["recorded"] else None,
                d["same"],
            )
            for d in calls
        ],
    )


_KINDS = ("expected", "measured")


def _times(calls: list[dict[str, Any]]) -> Any:
    columns = ("shape", "eager ms", "GPU busy ms", "idle %", *(f"{of} {what}" for of in _KINDS for what in ("ms", "speed-up")))
    names = ("shape", "eager_ms", "busy_ms", "idle", "expected_ms", "expected_speed_up", "measured_ms", "measured_speed_up")
    rows = [[100 * d[n] if n == "idle" and d[n] is not None else d[n] for n in names] for d in calls]
    return table("One denoiser call", columns, rows)
