"""Capture at start-up: run the shapes through the pipeline itself, so that what is recorded is what real calls will ask for."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tqdm.auto import tqdm

from diffgraph.errors import CaptureWarning, ShapeError
from diffgraph.reasons import Reason
from diffgraph.routing.memory import free_memory
from diffgraph.routing.runner import Runner
from diffgraph.shapes.capture_shape import CaptureShape
from diffgraph.shapes.prompt_arguments import PROMPTS, Batch, batches, prompt_arguments, recorded_length

#: Enough for the two denoisers of a pipeline that switches between them midway, and the fewest that every scheduler takes.
STEPS = 2
_MIB = 2**20


def capture_shapes(pipe: Any, runners: Sequence[Runner], shapes: Sequence[CaptureShape]) -> None:
    """Record every shape, largest first, so that the smaller ones fit into the memory of the larger.

    Raises `ShapeError` with the pipeline's own words for a shape that it refuses. The pipeline, its scheduler and torch's random
    numbers are afterwards as they were.
    """
    with ExitStack() as stack:
        for runner in runners:
            stack.enter_context(runner.insistence.begun())
        stack.enter_context(untouched(pipe))
        bar = stack.enter_context(tqdm(sorted(shapes, key=lambda s: s.size, reverse=True), desc="diffgraph capture"))
        for shape in bar:
            bar.set_postfix_str(f"{shape}, {free_memory(_device(pipe)) / _MIB:.0f} MiB free")
            for runner in runners:
                runner.insistence.ask_for_every_bucket(shape.prompt_length is None and not PROMPTS & set(shape.inputs))
            _run(pipe, shape, decode=any(runner.name.endswith(".decoder") for runner in runners))
            if all(runner.options.capture == "startup" and not runner.has_buckets for runner in runners):
                _warn_of_one_length(pipe, shape)
            for runner in runners:
                runner.shapes = list(dict.fromkeys([*runner.shapes, shape]))
    missing = [(e.label, e.refused or e.lost or Reason.UNSEEN_SIGNATURE) for runner in runners for e in runner.missing()]
    for label, reason in missing:
        warnings.warn(f"diffgraph: asked for at start-up and not recorded: {label} ({reason})", CaptureWarning, stacklevel=4)


def one_length(pipe: Any, shape: CaptureShape) -> int | None:
    """Of a shape that names no prompt length, where each prompt has its own: the one that a call at this shape has."""
    accepted = inspect.signature(type(pipe).__call__).parameters
    return recorded_length(pipe, shape, _beside_the_prompt(pipe, shape, accepted))


def _warn_of_one_length(pipe: Any, shape: CaptureShape) -> None:
    """Where each prompt has its own length, a shape that names none records one length of many."""
    length = one_length(pipe, shape)
    if length is not None:
        text = (
            f"diffgraph: {type(pipe).__name__}'s prompts vary in length, and {shape} names none: recorded for {length} tokens "
            f"alone. Name lengths ('{shape}@prompt={length}'), or add capture='on_demand' to record others as they come"
        )
        warnings.warn(text, CaptureWarning, stacklevel=5)


def _device(pipe: Any) -> torch.device:
    return torch.device(getattr(pipe, "_execution_device", None) or pipe.device)


def _run(pipe: Any, shape: CaptureShape, decode: bool) -> None:
    try:
        with torch.no_grad():
            for batch in batches(shape, inspect.signature(type(pipe).__call__).parameters):
                pipe(**call_arguments(pipe, shape, batch, decode=decode))
    except (ShapeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ShapeError(f"{type(pipe).__name__} refuses the capture shape {shape}: {error}") from error


def call_arguments(pipe: Any, shape: CaptureShape, batch: Batch = Batch.ALIKE, *, decode: bool = False) -> dict[str, Any]:
    """Keyword arguments for one short call of the pipeline at this shape, without decoding the picture unless told to.

    What the shape does not say is left to the pipeline's own defaults, as a real call would. Raises `ShapeError` for a field that
    the pipeline's call has no argument for.
    """
    accepted = inspect.signature(type(pipe).__call__).parameters
    wanted = _beside_the_prompt(pipe, shape, accepted, decode)
    wanted.update(prompt_arguments(pipe, shape, accepted, wanted, batch))
    wanted.update(_inputs(shape))
    if "generator" in accepted:
        wanted.setdefault("generator", torch.Generator().manual_seed(0))
    return wanted


def _beside_the_prompt(pipe: Any, shape: CaptureShape, accepted: Mapping[str, Any], decode: bool = False) -> dict[str, Any]:
    wanted: dict[str, Any] = {"num_inference_steps": _steps(shape, accepted)}
    if shape.inputs and not {"height", "width"} & accepted.keys():
        pass  # a pipeline that takes its size from the picture that it is given
    else:
        wanted.update(height=shape.height, width=shape.width)
    if shape.num_frames is not None:
        wanted["num_frames"] = shape.num_frames
    wanted.update(_inputs(shape))
    unknown = [name for name in wanted if name not in accepted]
    if unknown:
        names = ", ".join(name for name in accepted if name != "self")
        raise ShapeError(f"{type(pipe).__name__} takes no {', '.join(unknown)}, as capture shape {shape} asks; accepted: {names}")
    if "output_type" in accepted and not decode:
        wanted.setdefault("output_type", "latent")  # skips the VAE
    return wanted


def _inputs(shape: CaptureShape) -> dict[str, Any]:
    """What the shape gives. Some pipelines write into lists that they are given, and any call advances a generator."""
    return {name: _own(value) for name, value in shape.inputs.items()}


def _own(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return copy.copy(value) if isinstance(value, (list, dict)) else value


def _steps(shape: CaptureShape, accepted: Mapping[str, Any]) -> int:
    """`STEPS`, or more where the pipeline starts from a picture, leaves out steps accordingly, and would have none left."""
    strength = shape.inputs.get("strength", accepted["strength"].default if "strength" in accepted else 1.0)
    usable = isinstance(strength, (int, float)) and 0 < strength < 1
    return max(STEPS, math.ceil(1 / strength)) if usable else STEPS


@contextmanager
def untouched(pipe: Any) -> Iterator[None]:
    """Give the pipeline back as it was: a call leaves its scheduler, its progress bar and its private fields changed."""
    before = dict(vars(pipe))
    scheduler, device = before.get("scheduler"), _device(pipe)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            if scheduler is not None:
                vars(pipe)["scheduler"] = copy.deepcopy(scheduler)
            vars(pipe)["_progress_bar_config"] = {**before.get("_progress_bar_config", {}), "disable": True}
            yield
        finally:
            before.pop("_all_hooks", None)  # re-installed by every call of an offloaded pipeline
            for name in vars(pipe).keys() - before.keys() - {"_all_hooks"}:
                del vars(pipe)[name]
            vars(pipe).update(before)
