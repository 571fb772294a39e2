"""A list or dict that a step reads: a recording relies on its plain contents' values, and on the others being the same ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from operator import is_
from typing import Any

from diffgraph.values.constants import is_constant

CONTAINERS = (list, tuple, set, dict, deque)
_DEPTH = 4


class Held:
    """As long as each container holds the very items that it held, one after the other, nothing is described anew."""

    def __init__(self, name: str, container: Any) -> None:
        self.name, self.container = name, container
        self.plain: list[Any] = []  # with kinds, sizes and keys: whatever Python may have gone by
        self.objects: list[Any] = []
        self.replaced = False  # one of the objects, since somebody cleared it
        self._describe()

    def look(self) -> None:
        if all(map(_are_the_same, map(_items, self._containers), self._items)):
            return
        then = self.objects
        self._describe()
        self.replaced |= not all(map(is_, then, self.objects))  # more of them is a matter of size

    def _describe(self) -> None:
        self._containers = list(_containers_in(self.container, _DEPTH))
        self._items = list(map(_items, self._containers))
        self.plain, self.objects = [], []
        for container, items in zip(self._containers, self._items, strict=True):
            self.plain += [type(container), len(container)]
            for item in items:
                if not isinstance(item, CONTAINERS):
                    (self.plain if is_constant(item) else self.objects).append(item)


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _containers_in(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, CONTAINERS) and depth > 0:
        yield value
        for item in _items(value):
            yield from _containers_in(item, depth - 1)


def _are_the_same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))
