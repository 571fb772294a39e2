"""Errors that are injected, once and inside a `with` only: where they strike, and what was under way when they did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import diffgraph.recording.side_effects
import diffgraph.recording.verification
from diffgraph.devices.base import Pool, Segment
from diffgraph.engine.current import open_recorder
from diffgraph.recording.capture import Recording
from diffgraph.recording.static_inputs import StaticInputs

CAPTURE, REPLAY, EAGER = "capture", "replay", "eager"


class Interrupted(BaseException):
    """As `KeyboardInterrupt`, which no library may keep for itself."""


@dataclass
class Fault:
    error: BaseException
    nth: int
    ours: bool  # the place belongs to diffgraph, so nothing that goes wrong there is the caller's business
    where: str | None = None  # `None`: it has not struck

    @property
    def may_surface(self) -> bool:
        """Whether the caller may see it, as without diffgraph: it struck in a plain forward, or is meant for the caller."""
        return not isinstance(self.error, Exception) or (self.where == EAGER and not self.ours)


def places(device: str) -> dict[str, tuple[Any, str, bool]]:
    """Where a fault can strike: an object, the name of its function, and whether it is ours."""
    segment = _segment_class(device)
    return {
        "attention": (torch.nn.functional, "scaled_dot_product_attention", False),
        "layer norm": (torch.nn.functional, "layer_norm", False),
        "a recorded op": (segment, "run", True),
        "a replayed segment": (segment, "replay", True),
        "static inputs": (StaticInputs, "copy_from", True),
        "outputs": (Recording, "outputs", True),
        "the comparison of arguments": (diffgraph.recording.side_effects, "same_bits", True),
        "the comparison with eager": (diffgraph.recording.verification, "same_bits", True),
    }


def errors(place: str) -> tuple[BaseException, ...]:
    """Of what kinds a fault there may be. Comparing can only run out of memory."""
    memory = torch.OutOfMemoryError("out of memory (injected)")
    if place.startswith("the comparison"):
        return (memory,)
    return memory, RuntimeError("a fault (injected)"), Interrupted("stop (injected)")


@contextmanager
def injected(device: str, place: str, fault: Fault, pool: Pool) -> Iterator[None]:
    """Inside, the `nth` call of the place raises `fault.error` and notes what was under way; every other one is as it was."""
    holder, name, _ = places(device)[place]
    real = holder.__dict__[name]
    seen = 0

    def fragile(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == fault.nth and fault.where is None:
            fault.where = CAPTURE if open_recorder() is not None else REPLAY if pool.in_turn else EAGER
            raise fault.error
        return real(*args, **kwargs)

    setattr(holder, name, fragile)
    try:
        yield
    finally:
        setattr(holder, name, real)


def _segment_class(device: str) -> type[Segment]:
    if device == "cpu":
        from diffgraph.devices.cpu import TapeSegment

        return TapeSegment
    from diffgraph.devices.cuda import CudaSegment

    return CudaSegment
