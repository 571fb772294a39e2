"""The calls that a pipeline makes to its denoisers: each kind once, as it was made, to be made again and timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from diffgraph.cli.models import Model
from diffgraph.errors import ShapeError
from diffgraph.pipeline import report
from diffgraph.reasons import Refused
from diffgraph.recording.signature import Call
from diffgraph.reports.report import Report
from diffgraph.routing.components import DENOISERS, denoisers
from diffgraph.routing.startup import STEPS
from diffgraph.shapes.capture_shape import CaptureShape
from diffgraph.values.tensors import map_tensors, weights_device


@dataclass
class DenoiserCall:
    """`times`: calls of this kind in one denoising step, 0.5 where two denoisers share the steps."""

    name: str
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    times: float = 0.0

    def __call__(self) -> Any:
        return self.module(*self.args, **self.kwargs)

    @property
    def device(self) -> torch.device:
        return weights_device(self.module)


def denoiser_calls(model: Model, shape: CaptureShape, prompt: str | None = None) -> list[DenoiserCall]:
    """What a short call of the pipeline at this shape asks of its denoisers. Raises `ShapeError` in the pipeline's own words."""
    found: dict[Any, DenoiserCall] = {}
    modules = denoisers(model.pipe)
    names = {id(m): name for name, m in modules.items()}

    def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        key = id(module), _kind(module, args, kwargs)
        if key not in found:
            own = map_tensors(torch.clone, (args, kwargs))  # pipelines reuse what they pass
            found[key] = DenoiserCall(names[id(module)], module, *own)
        found[key].times += 1 / STEPS

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in modules.values()]
    try:
        with torch.no_grad():
            draw(model, shape, prompt, steps=STEPS, output_type="latent")
    finally:
        for hook in hooks:
            hook.remove()
    if not found:
        raise ShapeError(f"{type(model.pipe).__name__} called no denoiser; looked for {', '.join(DENOISERS)}")
    return list(found.values())


def draw(model: Model, shape: CaptureShape, prompt: str | None = None, *, steps: int, seed: int = 0, **more: Any) -> Any:
    """One call of the pipeline. What it refuses is a `ShapeError` in its own words."""
    given = model.arguments(shape, prompt) | {"generator": torch.Generator().manual_seed(seed), "num_inference_steps": steps}
    try:
        return model.pipe(**given, **more)
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        raise ShapeError(f"{type(model.pipe).__name__} refuses {shape}: {error}") from error


def _kind(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    try:
        return Call.of(args, kwargs, weights_device(module)).signature
    except Refused as refused:  # then all such calls are of one kind: that which runs eager
        return str(refused)


def settle(call: DenoiserCall) -> Report:
    """Make the call until it replays, or seems not to; a model whose caches are still filling takes more than two."""
    for _ in range(8):
        call()
        if report(call.module).replays:
            break
    return report(call.module)


class _Reached(BaseException):
    """The pipeline's call came to a denoiser. No `Exception`: a pipeline could take it for a failure of its own."""


def would_call(model: Model, shape: CaptureShape) -> None:
    """Run the pipeline at this shape up to its denoiser. Raises `ShapeError` where it refuses the shape."""

    def stop(*_: Any) -> None:
        raise _Reached

    hooks = [module.register_forward_pre_hook(stop) for module in denoisers(model.pipe).values()]
    try:
        draw(model, shape, steps=STEPS)
    except _Reached:
        pass
    finally:
        for hook in hooks:
            hook.remove()
