"""Lists that a forward takes items out of (diffusers' UNets pop an adapter's features off the list that they are given).

That is a change of the caller's own list, on which its next call may rely: so each call makes it, recorded or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

#: Of each list, in order: which of its items are left.
Left = tuple[tuple[int, ...], ...]


class Lists:
    """The lists that a call gives as arguments, and what they hold now."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        values = chain(args, (kwargs[name] for name in sorted(kwargs)))
        self._held = [(value, list(value)) for value in values if type(value) is list]
        if len({id(value) for value, _ in self._held}) < len(self._held):  # one list given twice: not told apart here
            self._held = []

    def left(self) -> Left:
        """Which items are left since; `()` where all are, or where more has been done to a list than to take items out."""
        if all(len(value) == len(items) for value, items in self._held):
            return ()
        found = [_left(items, value) for value, items in self._held]
        return tuple(left for left in found if left is not None) if None not in found else ()

    def take(self, left: Left) -> None:
        """Take out what a forward would have taken."""
        for (value, items), kept in zip(self._held, left, strict=False):
            value[:] = [items[i] for i in kept]

    def put_back(self) -> None:
        for value, items in self._held:
            value[:] = items

    @contextmanager
    def as_given(self) -> Iterator[None]:
        """Inside, what was taken out is there."""
        left = self.left()
        if left:
            self.put_back()
        yield
        self.take(left)


def _left(before: list[Any], after: list[Any]) -> tuple[int, ...] | None:
    places = iter(enumerate(before))
    found = tuple(next((i for i, item in places if item is kept), -1) for kept in after)
    return None if -1 in found else found
