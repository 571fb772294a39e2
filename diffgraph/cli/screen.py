"""What commands print: tables with rich, numbers as people read them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
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


def working(text: str) -> Any:
    """A line on the terminal that says what takes so long; nothing where nobody watches."""
    try:
        from rich.console import Console
    except ImportError:
        return nullcontext()
    screen = Console(stderr=True)
    return screen.status(text, spinner="dots") if screen.is_terminal else nullcontext()


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> Any:
    """A column whose name ends in a unit or a count stands right; one in which nothing stands is left out."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    rows = list(rows)
    kept = [i for i in range(len(columns)) if not rows or any(row[i] is not None for row in rows)]
    for column in (columns[i] for i in kept):
        made.add_column(column, justify="right" if column.split()[-1] in _NUMBERS else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(number(row[i])) for i in kept))  # Text: what stands in brackets is no markup
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
