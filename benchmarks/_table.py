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
    return "\n".join(
        "  ".join(cell.ljust(w) if to_left else cell.rjust(w) for cell, w, to_left in zip(line, widths, left, strict=True)).rstrip()
        for line in cells
    )


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return "0" if value == 0 else f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)
