"""Plain values, as code that is given them tells them apart."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch

_BY_VALUE = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)
_EXACTLY = frozenset(_BY_VALUE)


def same_value(a: Any, b: Any) -> bool:
    """Whether code that was given `a` would do as with `b`: NaN equals itself, 0.0 is not -0.0, and 1 is not True."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, complex):
        return same_value(a.real, b.real) and same_value(a.imag, b.imag)
    if isinstance(a, float):
        return (a == b and math.copysign(1, a) == math.copysign(1, b)) or (math.isnan(a) and math.isnan(b))
    try:
        return bool(a == b)
    except (ValueError, RuntimeError):  # an array
        return False


def is_constant(leaf: Any) -> bool:
    """Whether a leaf that is no tensor says by its value all that there is to it."""
    return type(leaf) in _EXACTLY or isinstance(leaf, (Enum, type)) or (isinstance(leaf, _BY_VALUE) and not has_more(leaf))


def has_more(obj: Any) -> bool:
    """Whether an object of a class derived from a built-in one holds more than that does."""
    return bool(getattr(obj, "__dict__", None)) or any(vars(kind).get("__slots__") for kind in type(obj).__mro__)
