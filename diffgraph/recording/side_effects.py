"""What a forward does to its caller's arguments: seen by comparing them before and after it ran eagerly."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from diffgraph.reasons import Reason
from diffgraph.values.compare import same_bits
from diffgraph.values.containers import can_follow, same_containers
from diffgraph.values.tensors import tensors_in
from diffgraph.values.tree import containers, flatten, unflatten


class Before:
    """A call's arguments before its forward. Raises `torch.OutOfMemoryError`: tensors that count no writes are copied."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leaves, self._spec = flatten((args, kwargs), objects=True)
        self._contents = _contents(self._leaves)
        self._containers = containers((args, kwargs))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As they were, in containers of their own."""
        return unflatten(self._spec, self._leaves)

    def forbids(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_padded: bool) -> Reason | None:
        """Why these, the same arguments after the forward, are not as they were, or cannot be shown to be, nor changed in a way
        that a replay can repeat. `is_padded`: a recording is given others in their place, and would hand on what is theirs."""
        leaves, spec = flatten((args, kwargs), objects=True)
        changed = spec != self._spec or any(a is not b for a, b in zip(leaves, self._leaves, strict=True))
        followed = can_follow(self._spec, spec) and same_containers(self._containers, containers((args, kwargs)))
        if not followed or (is_padded and changed):
            return Reason.SIDE_EFFECTS
        try:
            return None if same_bits(self._contents, _contents(self._leaves)) else Reason.SIDE_EFFECTS
        except torch.OutOfMemoryError:
            return Reason.OUT_OF_MEMORY


def drawn_in_python() -> tuple[Any, Any]:
    """The states of Python's generator and of NumPy's: what a forward decides by them, a replay would not decide again."""
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else str(numpy.random.get_state())


def _contents(leaves: list[Any]) -> list[Any]:
    """What shows whether tensors are written: their version, or what they hold where they have none."""
    return [t.clone() if t.is_inference() else t._version for t in tensors_in(leaves)]
