"""Something else in a table for a while: a stand-in among a module's attributes, a registry's entries, a package's functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_ABSENT = object()


@dataclass(eq=False)
class Place:
    """Where a stand-in stands now, and what was there before."""

    where: dict[Any, Any]
    key: Any
    original: Any

    def put(self, value: Any) -> None:
        self.where[self.key] = value

    def put_back(self) -> None:
        if self.original is _ABSENT:
            del self.where[self.key]
        else:
            self.put(self.original)


@contextmanager
def put_in(where: dict[Any, Any], key: Any, value: Any) -> Iterator[Place]:
    """Inside, `where[key]` is `value`."""
    place = Place(where, key, where.get(key, _ABSENT))
    place.put(value)
    try:
        yield place
    finally:
        place.put_back()
