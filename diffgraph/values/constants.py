"""Plain values, as code that is given them tells them apart."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import torch

_BY_VALUE = (
    bool,
    int,
    str,
    bytes,
    type(None),
    Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)


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
    return isinstance(leaf, (*_BY_VALUE, float, complex, torch.Size, type))
