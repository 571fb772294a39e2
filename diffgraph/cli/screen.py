"""What commands print: tables with rich, numbers as people read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from diffgraph.cli.errors import UsageError

MIB = 2**20


def console() -> Any:
    """Where to print. A pipe or a file has no width, so its lines are left whole."""
    try:
        from rich.console import Console
    except ImportError:
        raise UsageError("tables need rich: pip install 'diffgraph[cli]', or use --json") from None
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=200, soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Any:
    """A column whose name ends in a unit or a count stands right."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column.split()[-1] in _NUMBERS else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(number(cell)) for cell in row))  # Text: what stands in brackets is no markup
    return made


_NUMBERS = {"ms", "MiB", "segments", "breaks", "launches", "ops", "speed-up", "%", "calls", "frames", "batch", "tokens"}


def number(cell: Any) -> str:
    if cell is None:
        return "–"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)


def print_json(data: Any) -> None:
    print(json.dumps(data, indent=1, default=str))
