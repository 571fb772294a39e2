"""Plain values, as code that is given them tells them apart."""

from __future__ import annotations

import math
from typing import Any


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
