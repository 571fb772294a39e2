"""Nested containers: from an object to its leaves and back.

A *spec* is a hashable description of the containers; two objects with equal specs have leaves that correspond one to one.
Containers are `dict`, `OrderedDict`, `list`, `tuple`, named tuples and dataclasses (diffusers' and transformers' outputs are
dataclasses). Everything else, `None` and `torch.Size` included, is a leaf. `torch.utils._pytree` does nearly this, but takes an
unregistered dataclass for a leaf and cannot stop at a limit.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

LEAF = "*"
Spec = Hashable


class TooManyLeaves(Exception):
    """The object has more leaves than the limit that was given."""


def flatten(obj: Any, limit: int | None = None) -> tuple[list[Any], Spec]:
    """The leaves of `obj`, depth first, and its spec. Raises `TooManyLeaves` as soon as there are more than `limit`."""
    leaves: list[Any] = []
    return leaves, _flatten(obj, leaves, float("inf") if limit is None else limit)


def _flatten(obj: Any, leaves: list[Any], limit: float) -> Spec:
    parts = _parts(obj)
    if parts is None:
        if len(leaves) >= limit:
            raise TooManyLeaves
        leaves.append(obj)
        return LEAF
    kind, names, values = parts
    if len(values) > limit:
        raise TooManyLeaves
    return (kind, names, tuple([_flatten(value, leaves, limit) for value in values]))


def _parts(obj: Any) -> tuple[type, tuple[Any, ...], Any] | None:
    """Type, names and values of a container; `None` for a leaf."""
    kind = type(obj)
    if kind is list or kind is tuple:
        return kind, (), obj
    if kind is dict or kind is OrderedDict:
        return kind, tuple(obj), obj.values()
    if isinstance(obj, tuple) and hasattr(kind, "_fields"):
        return kind, (), obj
    if hasattr(kind, "__dataclass_fields__"):
        names = tuple(f.name for f in dataclasses.fields(kind))
        return kind, names, [getattr(obj, name) for name in names]
    return None


def unflatten(spec: Spec, leaves: list[Any]) -> Any:
    """The object with this spec and these leaves; containers are made anew."""
    return _unflatten(spec, iter(leaves))


def _unflatten(spec: Any, leaves: Any) -> Any:
    if spec == LEAF:
        return next(leaves)
    kind, names, children = spec
    values = [_unflatten(child, leaves) for child in children]
    if kind is list:
        return values
    if kind is tuple:
        return tuple(values)
    if kind is dict or kind is OrderedDict:
        return kind(zip(names, values, strict=True))
    if hasattr(kind, "_fields"):
        return kind(*values)
    return _make_dataclass(kind, dict(zip(names, values, strict=True)))


def _make_dataclass(kind: type, values: dict[str, Any]) -> Any:
    fields = {f.name: f for f in dataclasses.fields(kind)}
    made = kind(**{name: value for name, value in values.items() if fields[name].init})
    for name, value in values.items():
        if not fields[name].init:
            object.__setattr__(made, name, value)
    return made


def map_leaves(fn: Callable[[Any], Any], obj: Any) -> Any:
    """`obj` with `fn` applied to each leaf."""
    leaves, spec = flatten(obj)
    return unflatten(spec, [fn(leaf) for leaf in leaves])
