"""Weights that are made of others (quantised ones): where the memory lies that a graph reads, and whether it still does.

A tensor subclass keeps what it is made of (the integers, their scales, how they are packed) in its `__dict__`, or in objects
that it owns. The weight is looked up in its module's table each time, and its `__dict__` with it: `Module.to` puts other tensors
under the very same weight (`torch.utils.swap_tensors`), and refuses to where somebody holds the weight by a weak reference.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from operator import attrgetter, getitem
from typing import Any

import torch

from diffgraph.guards.writes import versions
from diffgraph.values.tensors import is_made_of_others, is_mark

Table = dict[str, Any]

_TABLE_OF: Callable[[Any], Table] = attrgetter("__dict__")
_ADDRESS_OF: Callable[[Any], int] = torch.Tensor.data_ptr
_DEPTH = 4  # of tensors and objects inside a weight


def addresses(tensors: Iterable[Any]) -> list[int]:
    """Where tensors lie. Raises `TypeError` or `RuntimeError` for what is no tensor with memory of its own."""
    with torch._C.DisableTorchFunctionSubclass():  # every parameter is asked for an override else
        return list(map(_ADDRESS_OF, tensors))


def has_own_memory(tensor: torch.Tensor) -> bool:
    """Not so a wrapper around other tensors, whose own address means nothing."""
    return tensor.layout == torch.strided and not is_made_of_others(type(tensor))


class ComposedWeights:
    """Weights that are no plain memory, by their tables and names there; `moved()` compares them with then."""

    def __init__(self, slots: list[tuple[dict[str, Any], str]]) -> None:
        self._tables = [table for table, _ in slots]
        self._names = [name for _, name in slots]
        weights = self._weights()
        self._types = list(map(type, weights))
        self._opaque = [(i, w) for i, w in enumerate(weights) if w.layout != torch.strided]  # sparse: compared by identity
        owned = list({id(part): part for weight in weights for part in _parts(weight.__dict__, _DEPTH)}.values())
        plain = [part for part in owned if isinstance(part, torch.Tensor) and has_own_memory(part)]
        self._plain = list(map(weakref.ref, plain))
        self._addresses = addresses(plain)
        self._owners = [weakref.ref(part) for part in owned if hasattr(part, "__dict__") and part.__dict__]
        tables = self._owned_tables(weights)
        self._contents = list(map(_contents, tables))
        self._versions = versions(tables)

    def _weights(self) -> list[Any]:
        return list(map(getitem, self._tables, self._names))

    def _owned_tables(self, weights: list[Any]) -> list[Table]:
        owners = [owner() for owner in self._owners]
        return list(map(_TABLE_OF, weights + owners))

    def moved(self) -> bool:
        """Whether any is another tensor than then, or is made of others, or of others' memory.

        Raises `KeyError`, `TypeError`, `AttributeError` or `RuntimeError` where a part is gone.
        """
        if not self._tables:
            return False
        weights = self._weights()
        if list(map(type, weights)) != self._types or any(weights[i] is not weight for i, weight in self._opaque):
            return True
        tables = self._owned_tables(weights)
        now = versions(tables)
        if now is None or now != self._versions:
            if list(map(_contents, tables)) != self._contents:
                return True
            self._versions = now
        return addresses([part() for part in self._plain]) != self._addresses

    def parts(self) -> list[torch.Tensor]:
        """The tensors with memory of their own inside the weights."""
        return [tensor for part in self._plain if (tensor := part()) is not None]


def _parts(table: Table, depth: int) -> Iterator[Any]:
    """The tensors and objects that a tensor or an object owns, and theirs."""
    if depth == 0:
        return
    for value in table.values():
        if _is_part(value):
            yield value
            yield from _parts(value.__dict__, depth - 1)


def _is_part(value: Any) -> bool:
    """A tensor, or an object with a state of its own."""
    if isinstance(value, torch.Tensor):
        return True
    others = (torch.nn.Module, type, Enum)
    return hasattr(value, "__dict__") and not isinstance(value, others) and type(value).__weakrefoffset__ != 0


def _contents(table: Table) -> list[tuple[str, Any]]:
    """What a table holds; parts stand for themselves by their identity, for as long as the weak references to them live. What the
    compiler notes on a weight says nothing of it."""
    items = [(key, value) for key, value in table.items() if not is_mark(key)]
    return [(key, id(value) if _is_part(value) else value) for key, value in items]
