"""Static inputs: fixed addresses that a recording reads, filled from each call's live tensors."""

from __future__ import annotations

import operator
from typing import Any

import torch

from diffgraph.recording.signature import Call, layout
from diffgraph.values.tensors import once
from diffgraph.values.tree import Spec, flatten, unflatten


class StaticInputs:
    """One buffer per distinct tensor among a call's leaves: a tensor that is given twice stays one tensor."""

    def __init__(self, call: Call) -> None:
        self._spec: Spec = call.spec
        self._at: list[int] = []  # where in the leaves each buffer's tensor stands
        self.tensors: list[torch.Tensor] = []
        self._expanded: list[int] = []  # which of them repeat their memory, as the caller's do
        self._leaves: list[Any] = list(call.leaves)
        by_id: dict[int, torch.Tensor] = {}
        with torch.inference_mode(False):  # or they could not be written outside inference mode
            for i, leaf in enumerate(call.leaves):
                if isinstance(leaf, torch.Tensor):
                    if id(leaf) not in by_id:
                        by_id[id(leaf)] = _buffer_for(leaf)
                        self._at.append(i)
                        self.tensors.append(by_id[id(leaf)])
                    self._leaves[i] = by_id[id(leaf)]
            self._memory = list(map(once, self.tensors))
            self._expanded = [n for n, (a, b) in enumerate(zip(self.tensors, self._memory, strict=True)) if a is not b]
        self.copy_from(call.leaves)

    def copy_from(self, leaves: list[Any]) -> None:
        if self.tensors:
            live = [leaves[i] for i in self._at]
            for n in self._expanded:
                live[n] = once(live[n])
            torch._foreach_copy_(self._memory, live)  # pyright: ignore[reportPrivateImportUsage]

    @property
    def positions(self) -> list[int]:
        """Where in a call's leaves its distinct tensors stand."""
        return self._at

    def copy_back(self, leaves: list[Any]) -> None:
        """Give a call's own tensors what a forward wrote to the static ones."""
        for i, tensor in zip(self._at, self.tensors, strict=True):
            leaves[i].copy_(tensor)

    def position(self, leaf: Any) -> int | None:
        """Where in a call's leaves this very static input stands; `None` for anything else."""
        return next((at for at, tensor in zip(self._at, self.tensors, strict=True) if tensor is leaf), None)

    def changed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Spec] | None:
        """What the containers of `call` hold now, flattened, when a forward has changed them."""
        leaves, spec = flatten((args, kwargs), objects=True)
        same = spec == self._spec and all(map(operator.is_, leaves, self._leaves))
        return None if same else (leaves, spec)

    def call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments over the static buffers, in containers of their own."""
        return unflatten(self._spec, self._leaves)


def _buffer_for(tensor: torch.Tensor) -> torch.Tensor:
    strides = layout(tensor)
    if isinstance(strides, str):  # contiguous
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    else:
        made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    if type(tensor) is torch.nn.Parameter:  # a forward may ask
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
