"""An object's own state: its `__dict__`, its `__slots__`, and what its classes hold."""

from __future__ import annotations

import weakref
from enum import Enum
from functools import cache, partial
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch

_BASES = frozenset({object, torch.nn.Module})
_HEAP_TYPE = 1 << 9  # of `__flags__`: a class written in Python, so one that can be changed
_ABSENT = object()


def is_object(value: Any) -> bool:
    """An object with a state of its own; not a tensor, a module, a class or a function. It may be a container, too."""
    others = (torch.Tensor, torch.nn.Module, type, FunctionType, MethodType, ModuleType, partial, Enum)
    return not isinstance(value, others) and (hasattr(value, "__dict__") or bool(slots_of(type(value))))


def classes_of(kind: type) -> list[type]:
    """Those whose attributes an object of this class has, and which can be changed."""
    return [c for c in kind.__mro__ if c not in _BASES and c.__flags__ & _HEAP_TYPE]


@cache
def slots_of(kind: type) -> tuple[str, ...]:
    return tuple(name for c in classes_of(kind) for name, value in vars(c).items() if type(value) is MemberDescriptorType)


class SlotTable:
    """What an object holds in `__slots__`, read as if it were in its `__dict__`; no writes to it are seen."""

    def __init__(self, owner: Any) -> None:
        # Modules are known weakly, as the root is; not every object with slots can be.
        self._owner = weakref.ref(owner) if isinstance(owner, torch.nn.Module) else partial(_itself, owner)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner(), name, _ABSENT)

    get = __getitem__


class ThreadTable:
    """What a `threading.local` holds for the thread that asks, under one name, `NAME`."""

    NAME = "what this thread holds"

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, _: str) -> dict[str, Any]:
        return dict(vars(self._owner))

    def get(self, name: str) -> dict[str, Any]:
        return self[name]


def _itself(owner: Any) -> Any:
    return owner
