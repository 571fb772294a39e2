"""Whether dicts were written to, without looking into them.

CPython counts the writes to a dict for its own caches, and torch hands that count out for Dynamo's guards: up to Python 3.11 each
dict carries the number of its last write (PEP 509); from 3.12 on a dict can be watched (`PyDict_Watch`), and torch numbers the
writes to all watched dicts together. Then one number tells whether any of thousands of dicts was written to.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

_dynamo = getattr(torch._C, "_dynamo", None)
_dict_version: Callable[[Any], int] | None = getattr(getattr(_dynamo, "guards", None), "dict_version", None)
_WATCHED = sys.version_info >= (3, 12)


class Writes:
    """The writes to some dicts: `count()` gives another value after a write to any of them. It may do so without one.

    Of those that are `sized`, it need not see a write that leaves the size as it was.
    """

    def __init__(self, dicts: list[dict[Any, Any]], sized: list[dict[Any, Any]] | None = None) -> None:
        self._dicts = dicts
        self._sized = sized or []
        if _are_seen():
            _watch(dicts)
            _watch(self._sized)

    def count(self) -> Any:
        if not _are_seen():
            return object()  # equal to nothing
        # Where each dict is asked, its size costs half of its version.
        return _count(self._dicts) if _WATCHED else (_count(self._dicts), list(map(len, self._sized)))


def versions(dicts: list[dict[Any, Any]]) -> list[int] | None:
    """One number a dict: another one after each write to it, and another one for each dict. `None` where writes are not seen."""
    return list(map(_dict_version, dicts)) if _are_seen() else None  # type: ignore[arg-type]


_lock = threading.Lock()
_asked = 0


def _watch(dicts: list[dict[Any, Any]]) -> None:
    if _WATCHED:
        for d in dicts:
            _dict_version(d)  # type: ignore[misc]


def _count(dicts: list[dict[Any, Any]]) -> Any:
    global _asked
    if not _WATCHED:
        return list(map(_dict_version, dicts))  # type: ignore[arg-type]
    with _lock:
        _asked += 1  # a dict that is new to the count takes the next number
        return _dict_version({}) - _asked  # type: ignore[misc]


@cache
def _are_seen() -> bool:
    """Whether writes are seen at all, tried once on this very interpreter and torch: nobody promises these interfaces."""
    return _dict_version is not None and _sees_each_kind_of_write()


class _Holder:
    pass


def _sees_each_kind_of_write() -> bool:
    holder = _Holder()
    holder.value = object()  # type: ignore[attr-defined]
    table, plain = holder.__dict__, {"value": object()}
    dicts = [table, plain]
    _watch(dicts)
    # Often enough for the interpreter to take its specialised instructions.
    for step in (_set_attribute, _set_item) * 64 + (_add_item, _delete_item, _update, _pop, _clear):
        before = _count(dicts)
        if before != _count(dicts):
            return False
        step(holder, plain)
        if before == _count(dicts):
            return False
    return True


def _set_attribute(holder: Any, _: Any) -> None:
    holder.value = object()


def _set_item(_: Any, plain: Any) -> None:
    plain["value"] = object()


def _add_item(_: Any, plain: Any) -> None:
    plain["more"] = 1


def _delete_item(_: Any, plain: Any) -> None:
    del plain["more"]


def _update(_: Any, plain: Any) -> None:
    plain.update(value=object(), more=2)


def _pop(_: Any, plain: Any) -> None:
    plain.pop("more")


def _clear(_: Any, plain: Any) -> None:
    plain.clear()
