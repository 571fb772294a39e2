"""Rows as a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """`columns`: heading to key. Text to the left, numbers to the right, nothing for what was not measured."""
    values = [[row.get(key) for key in columns.values()] for row in rows]
    cells = [list(columns), *[[_text(value) for value in line] for line in values]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    left = [all(value is None or isinstance(value, str) for value in column) for column in zip(*values, strict=True)]
    justify = [str.ljust if is_text else str.rjust for is_text in left]
    lines = ["  ".join(to(cell, w) for to, cell, w in zip(justify, line, widths, strict=True)) for line in cells]
    return "\n".join(map(str.rstrip, lines))


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
