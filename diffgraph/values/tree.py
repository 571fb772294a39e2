"""Nested containers: from an object to its leaves and back.

A *spec* is a hashable description of the containers; two objects with equal specs have leaves that correspond one to one.
Containers are `dict`, `OrderedDict`, `list`, `tuple`, named tuples (`torch.return_types` too) and dataclasses (diffusers' and
transformers' outputs are dataclasses). Everything else, `None` and `torch.Size` included, is a leaf. `torch.utils._pytree` does
nearly this, but takes an unregistered dataclass for a leaf and cannot stop at a limit. A container that holds more than it would
be made anew with, an attribute beside its fields, say, is a leaf, too.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from diffgraph.values.constants import has_more

LEAF = "*"
Spec = Hashable
_BUILT_IN = (list, tuple, dict, OrderedDict)


class _Key(NamedTuple):
    """A dict's key that is no plain text: 1 is not True."""

    kind: type
    value: Any


class TooManyLeaves(Exception):
    """The object has more leaves and containers than the limit that was given."""


def flatten(obj: Any, limit: int | None = None, *, objects: bool = False) -> tuple[list[Any], Spec]:
    """The leaves of `obj`, depth first, and its spec. `objects`: take apart diffusers' own plain objects (key-value caches), too.

    Raises `TooManyLeaves` as soon as leaves and containers together are more than `limit`.
    """
    leaves: list[Any] = []
    return leaves, _flatten(obj, leaves, None if limit is None else [limit], objects)


def _flatten(obj: Any, leaves: list[Any], room: list[int] | None, objects: bool) -> Spec:
    if room is not None:
        room[0] -= 1
        if room[0] < 0 or (type(obj) in _BUILT_IN and len(obj) > room[0]):
            raise TooManyLeaves
    parts = _parts(obj) or (_parts_of_object(obj) if objects else None)
    if parts is None:
        leaves.append(obj)
        return LEAF
    kind, names, values = parts
    names = tuple([name if type(name) is str else _Key(type(name), name) for name in names])
    return (kind, names, tuple([_flatten(value, leaves, room, objects) for value in values]))


def _parts(obj: Any) -> tuple[type, tuple[Any, ...], Any] | None:
    """Type, names and values of a container; `None` for a leaf."""
    kind = type(obj)
    if kind is list or kind is tuple:
        return kind, (), obj
    if kind is dict or (kind is OrderedDict and not vars(obj)):
        return kind, tuple(obj), obj.values()
    if isinstance(obj, tuple) and (hasattr(kind, "_fields") or hasattr(kind, "n_sequence_fields")):
        return (kind, (), obj) if not has_more(obj) else None
    if hasattr(kind, "__dataclass_fields__"):
        names = tuple(f.name for f in dataclasses.fields(kind) if hasattr(obj, f.name))  # type: ignore[arg-type]
        items: Any = obj if isinstance(obj, dict) else ()  # diffusers' outputs are dicts, too
        is_known = set(names).issuperset((*getattr(obj, "__dict__", ()), *items))
        return (kind, names, [getattr(obj, name) for name in names]) if is_known else None
    return None


def _parts_of_object(obj: Any) -> tuple[type, tuple[Any, ...], Any] | None:
    return (type(obj), tuple(vars(obj)), vars(obj).values()) if _holds_all_in_attributes(type(obj)) else None


def containers(obj: Any) -> dict[tuple[Any, ...], Any]:
    """The containers inside `obj`, diffusers' plain objects too, by the names and positions that lead to them."""
    found: dict[tuple[Any, ...], Any] = {}
    parts = _parts(obj) or _parts_of_object(obj)
    for name, value in zip(parts[1] or range(len(parts[2])), parts[2], strict=True) if parts is not None else ():
        if _parts(value) is not None or _parts_of_object(value) is not None:
            found[name,] = value
            found |= {(name, *path): inner for path, inner in containers(value).items()}
    return found


@functools.cache
def _holds_all_in_attributes(kind: type) -> bool:
    """Whether an object of this class is diffusers' (or a cache of transformers') and no more than its attributes, so that one
    with equal ones is as good."""
    known = kind.__module__.partition(".")[0] == "diffusers" or kind.__module__ == "transformers.cache_utils"
    if not known or not kind.__dictoffset__ or kind.__new__ is not object.__new__:
        return False
    return not any("__call__" in vars(base) or vars(base).get("__slots__") for base in kind.__mro__[:-1])


def key_of(name: Any) -> Any:
    """A dict's key, of the name that stands for it in a spec."""
    return name.value if type(name) is _Key else name


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
        return kind(zip(map(key_of, names), values, strict=True))
    if hasattr(kind, "_fields"):
        return kind(*values)
    if hasattr(kind, "n_sequence_fields"):
        return kind(values)
    if not hasattr(kind, "__dataclass_fields__"):
        made = object.__new__(kind)
        vars(made).update(zip(names, values, strict=True))
        return made
    return _make_dataclass(kind, dict(zip(names, values, strict=True)))


def _make_dataclass(kind: type, values: dict[str, Any]) -> Any:
    taken = {f.name for f in dataclasses.fields(kind) if f.init}
    made = kind(**{name: value for name, value in values.items() if name in taken})
    for name, value in values.items():  # those it does not take, and those that `__post_init__` computed once more
        object.__setattr__(made, name, value)
    return made


def map_leaves(fn: Callable[[Any], Any], obj: Any, *, objects: bool = False) -> Any:
    """`obj` with `fn` applied to each leaf."""
    leaves, spec = flatten(obj, objects=objects)
    return unflatten(spec, [fn(leaf) for leaf in leaves])
