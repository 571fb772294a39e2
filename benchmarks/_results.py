"""Rows in a JSON file, beside the machine and the versions they were measured with."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import diffusers
import torch

import diffgraph
from benchmarks import _table

Row = dict[str, Any]
_KEY = ("what", "family", "shape", "mode", "loras", "quantized")


class Results:
    """`add` writes the file each time, so that a run that is cut short leaves what it has measured.

    Rows of an existing file stay, unless one of the same what, family, shape and mode is added. Figures of two machines
    do not belong under one name: such a file is refused, before anything is measured.
    """

    def __init__(self, path: str | None, device: str, machine: str | None = None) -> None:
        self.path = Path(path) if path else None
        self.head = {"machine": machine or _machine(device), "versions": _versions(device)}
        self.rows: list[Row] = []
        if self.path is not None and self.path.exists():
            data = json.loads(self.path.read_text(encoding="utf-8"))
            found = {name: data.get(name) for name in self.head}
            if found != self.head:
                raise SystemExit(f"{self.path} was measured with {found}, this is {self.head}; give another --out")
            self.rows = data["rows"]

    def table(self, rows: list[Row], columns: dict[str, str]) -> str:
        """For people: these rows, under the machine and the versions."""
        return f"{self.head['machine']}, {self.head['versions']}\n{_table.table(rows, columns)}"

    def add(self, rows: list[Row]) -> None:
        new = {_key(row) for row in rows}
        self.rows = [row for row in self.rows if _key(row) not in new] + rows
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**self.head, "rows": self.rows}, indent=1, allow_nan=False)
        self.path.write_text(text + "\n", encoding="utf-8")


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) or None for name in _KEY)


def _machine(device: str) -> str:
    return f"one {torch.cuda.get_device_name()}" if device == "cuda" else "CPU"


def _versions(device: str) -> dict[str, str | None]:
    return {
        "diffgraph": diffgraph.__version__,
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "cuda": torch.version.cuda if device == "cuda" else None,
        "python": platform.python_version(),
    }
