"""Values read once and compared later: whole tables, single slots, and containers with all that is in them."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import getitem, is_
from typing import Any, NamedTuple

import torch

from diffgraph.guards.composed import has_own_memory
from diffgraph.guards.objects import is_object
from diffgraph.values.constants import same_value

_CONTAINER_LIMIT = 256  # a longer list is compared by identity, to bound the cost of a call
_CONTAINER_TYPES = (list, tuple, set, dict, deque, bytearray)
_SETS = (set,)
DEPTH = 4  # of containers and objects below a module's attributes


class _Then:
    """What was read once, to be compared with what is read now."""

    then: list[Any]

    def now(self) -> list[Any]:
        raise NotImplementedError

    def changed(self) -> bool:
        now = self.now()
        return not _are_the_same(now, self.then) and not (len(now) == len(self.then) and all(map(is_alike, now, self.then)))

    def are_the_same(self) -> bool:
        """Whether they are the very objects, not only equal ones."""
        return _are_the_same(self.now(), self.then)


class Values(_Then):
    """All values of some tables, one after the other, and where they are `named`, their names."""

    def __init__(self, tables: list[Any], named: bool = False) -> None:
        self.tables = tables
        self._named = tables if named else []
        self.then = self.now()
        self._lengths = list(map(len, tables))

    def now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self.tables)), *chain.from_iterable(self._named)]

    def rows(self) -> list[list[Any]]:
        values = iter(self.then)
        return [[next(values) for _ in range(length)] for length in self._lengths]


class Slots(_Then):
    """The values that stand under some names in some tables."""

    def __init__(self, slots: Sequence[tuple[Any, str]]) -> None:
        self.tables = [table for table, _ in slots]
        self.keys = [key for _, key in slots]
        self.then = self.now()

    def now(self) -> list[Any]:
        return list(map(getitem, self.tables, self.keys))


class Contents(Slots):
    """The containers that stand under some names in some tables, with all that is in them, as deep as `DEPTH`.

    As long as each holds the very items that it held, one after the other, nothing is compared.
    """

    def __init__(self, slots: Sequence[tuple[Any, str]]) -> None:
        self._inner: tuple[list[Any], list[Any]] = ([], [])
        super().__init__(slots)
        self._note()

    def _note(self) -> None:
        found = {id(c): c for container in Slots.now(self) for c in _containers_in(container, DEPTH)}.values()
        read = [c for c in found if not is_generator(c)]
        self._draws = len(read) < len(found)
        self._inner = [c for c in read if not isinstance(c, dict)], [c for c in read if isinstance(c, dict)]
        self._copies = [copied(container, DEPTH) for container in Slots.now(self)]
        self.then = self.now()

    def now(self) -> list[Any]:
        lists, dicts = self._inner
        values = chain.from_iterable(map(dict.values, dicts))
        return [*super().now(), *chain.from_iterable(lists), *chain.from_iterable(dicts), *values]

    def changed(self) -> bool:
        if self.are_the_same() and not self._draws:  # what a generator draws replaces no item
            return False
        if not all(map(is_alike, Slots.now(self), self._copies)):
            return True
        self._note()  # of equal ones in their place
        return False

    def copies(self) -> Iterable[tuple[Any, str, Any]]:
        return zip(self.tables, self.keys, self._copies, strict=True)


class _Copy(NamedTuple):
    """Of a container: a change of its contents shows."""

    kind: type
    keys: list[Any]
    values: Any


def _are_the_same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


def is_alike(now: Any, then: Any) -> bool:
    """Whether code that is given `now` does as with `then`, which may be a copy: not so with 1 and 1.0, with dicts in another
    order, or with two objects whose attributes may differ, whatever they say of themselves."""
    if now is then:
        return True
    if isinstance(then, _Copy):
        if type(now) is not then.kind or (type(now) in _SETS and now != then.values):
            return False
        keys, values = items_of(now)
        if type(now) in _SETS:
            return True
        same_size = len(keys) == len(then.keys) and len(values) == len(then.values)
        return same_size and all(map(is_alike, keys, then.keys)) and all(map(is_alike, values, then.values))
    if type(now) is not type(then) or isinstance(now, (torch.Tensor, torch.nn.Module)) or is_object(now):
        return False
    if is_container(now):
        return is_alike(now, copied(then, DEPTH))
    return same_value(now, then)


def is_container(value: Any) -> bool:
    """Whose contents are compared. Not those of diffusers' configuration: its items are attributes, too, and saving it takes one
    of them out."""
    if type(value).__module__ == "diffusers.configuration_utils":
        return False
    return (
        isinstance(value, partial)
        or is_generator(value)
        or (isinstance(value, _CONTAINER_TYPES) and len(value) <= _CONTAINER_LIMIT)
    )


def is_generator(value: Any) -> bool:
    """Of random numbers: what it will draw next is its contents."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, random.Random) or (
        numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))
    )


def _state_of(generator: Any) -> str:
    if isinstance(generator, random.Random):
        return repr(generator.getstate())
    return str(generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state())


def items_of(container: Any) -> tuple[list[Any], Any]:
    """What a container holds, by which keys."""
    if is_generator(container):
        return [], [_state_of(container)]
    if isinstance(container, partial):
        return [], [container.func, container.args, container.keywords]
    if isinstance(container, dict):
        return list(dict.keys(container)), list(dict.values(container))
    return [], list(container)


def _containers_in(value: Any, depth: int) -> Iterator[Any]:
    """The containers that `value` is or holds, which can be read one item after the other, and the generators."""
    if is_container(value) and depth > 0:
        if not isinstance(value, partial):
            yield value
        for item in items_of(value)[1]:
            yield from _containers_in(item, depth - 1)


def copied(value: Any, depth: int) -> Any:
    """A container is copied, so that a change of its contents shows."""
    if not is_container(value) or depth == 0:
        return value
    keys, values = items_of(value)
    if type(value) in _SETS:
        return _Copy(type(value), [], set(value))
    return _Copy(type(value), keys, [copied(item, depth - 1) for item in values])


def is_flat(container: Any) -> bool:
    """Whether writes to this one dict are all that can change what it holds."""
    return type(container) is dict and not any(is_container(v) or isinstance(v, torch.nn.Module) for v in container.values())


def tensors_among(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own that an attribute is or holds, as deep as its contents are compared."""
    if isinstance(value, torch.Tensor):
        if has_own_memory(value):
            yield value
    elif is_container(value) and depth > 0:
        for item in items_of(value)[1]:
            yield from tensors_among(item, depth - 1)
