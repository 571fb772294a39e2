"""What a step function reads by name beside its arguments, and what it leaves changed there: a replay runs none of its Python.

Its closure, its module's globals, its own object's attributes, and those of the functions of the same module that it calls. Plain
values are part of the signature, and so are those that its lists and dicts hold. Other objects must stay the same ones, and a
call must leave their attributes as they were.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from diffgraph.finetuning.bytecode import globals_in, names_in, paths_in
from diffgraph.finetuning.held import CONTAINERS, Held
from diffgraph.guards.contents import copied, is_alike, is_container, items_of
from diffgraph.values.constants import is_constant, same_value

_DEPTH = 4
_ABSENT = object()
#: Whose state is compared elsewhere, or which have none that Python could change.
_NOT_FOLLOWED = (torch.nn.Module, torch.Tensor, torch.optim.Optimizer, torch.utils.data.DataLoader)
_CHECKED = (torch.nn.Module, torch.optim.Optimizer)
_CODE = (FunctionType, MethodType, ModuleType, type, functools.partial)

Get = Callable[[], Any]


class Seen(NamedTuple):
    """An object's attributes, or a container, as it was."""

    name: str
    live: Any
    copy: Any


class Reads:
    def __init__(self, fn: Callable[..., Any]) -> None:
        self._names: dict[str, Get] = {}
        self._paths: dict[str, tuple[Get, tuple[str, ...]]] = {}  # `args.weight`: from a name to an attribute's attribute
        self._owners: list[Any] = []
        self._held: dict[int, Held] = {}
        self._follow(fn, set())
        self._then = self.objects()

    def values(self) -> list[Any]:
        """The plain ones, and what containers hold of them."""
        return [value for _, value in self._plain()]

    def moved(self, then: list[Any]) -> str | None:
        """The name of a value that is another one than `then`, when `values` were these."""
        now = zip(self._plain(), then, strict=False)
        return next((name for (name, value), before in now if not same_value(value, before)), None)

    def _plain(self) -> list[tuple[str, Any]]:
        found = [(name, value) for name, value in self._found() if is_constant(value)]
        return found + [(held.name, value) for held in self._look() for value in held.plain]

    def objects(self) -> dict[str, Any]:
        found = {name: value for name, value in self._found() if not is_constant(value)}
        for held in self._look():
            inner = enumerate(held.objects)
            found.update((f"{held.name}[{i}]", value) for i, value in inner if isinstance(value, _CHECKED))
        return found

    def iterator(self) -> str | None:
        """The name of an iterator: what it will give next, nobody can see."""
        return next((name for name, value in self._found() if hasattr(type(value), "__next__")), None)

    def replaced(self) -> str | None:
        """The name of an object that is another one than when last looked at."""
        now = self.objects()
        changed = [name for name, then in self._then.items() if now.get(name) is not then]
        for held in self._held.values():
            changed += [held.name] * held.replaced
            held.replaced = False
        self._then = now
        return next(iter(changed), None)

    def _found(self) -> Iterator[tuple[str, Any]]:
        """What stands now under each name, and at the end of each path from one."""
        yield from ((name, get()) for name, get in self._names.items())
        reached = ((name, _reached(get(), path)) for name, (get, path) in self._paths.items())
        yield from ((name, value) for name, value in reached if value is not _ABSENT)

    def _look(self) -> list[Held]:
        containers = {id(value): (name, value) for name, value in self._found() if isinstance(value, CONTAINERS)}
        known = {id(held.container): held for held in self._held.values()}
        for held in known.values():
            held.look()
        self._held = {key: known.get(key) or Held(*found) for key, found in containers.items()}
        return list(self._held.values())

    def contents(self) -> list[Seen]:
        """What there is for a call to change."""
        found: dict[int, Seen] = {}
        for name, value in ((name, get()) for name, get in self._names.items()):
            _note(name, value, found, _DEPTH)
        for owner in self._owners:
            _note(type(owner).__name__, owner, found, _DEPTH)
        return list(found.values())

    # -- finding names

    def _follow(self, fn: Any, seen: set[int]) -> None:
        if id(fn) in seen:
            return
        seen.add(id(fn))
        if isinstance(fn, functools.partial):
            for i, value in enumerate([*fn.args, *fn.keywords.values()]):
                self._add(f"partial[{i}]", functools.partial(_itself, value), fn, seen)
            self._follow(fn.func, seen)
        elif isinstance(fn, MethodType):
            self._follow_method(fn.__self__, fn.__func__, seen)
        elif isinstance(fn, FunctionType):
            self._follow_function(fn, seen)
        elif not isinstance(fn, _CODE) and not isinstance(fn, torch.nn.Module) and hasattr(type(fn), "__call__"):  # noqa: B004
            self._follow_method(fn, type(fn).__call__, seen)

    def _follow_method(self, owner: Any, fn: Any, seen: set[int]) -> None:
        if not isinstance(fn, FunctionType):
            return
        for name in names_in(fn.__code__):
            if name in getattr(owner, "__dict__", {}):
                self._add(f"self.{name}", functools.partial(_attribute, owner, name), fn, seen)
            else:
                method = _of_class(type(owner), name)
                if isinstance(method, FunctionType) and id(method) not in seen:
                    seen.add(id(method))
                    self._follow_method(owner, method, seen)
        self._add_paths({fn.__code__.co_varnames[0]: functools.partial(_itself, owner)}, fn.__code__)
        if not any(owner is known for known in self._owners):
            self._owners.append(owner)
        self._follow_function(fn, seen)

    def _follow_function(self, fn: FunctionType, seen: set[int]) -> None:
        cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        free: dict[str, Get] = {name: functools.partial(_content, cell) for name, cell in cells}
        known = [name for name in globals_in(fn.__code__) if name in fn.__globals__]
        shared: dict[str, Get] = {name: functools.partial(fn.__globals__.get, name, _ABSENT) for name in known}
        for name, get in free.items():
            self._add(name, get, fn, seen)
        for name, get in shared.items():
            self._add(f"{fn.__module__}.{name}", get, fn, seen)
        parameters = inspect.signature(fn, follow_wrapped=False).parameters.values()
        given: dict[str, Get] = {p.name: functools.partial(_itself, p.default) for p in parameters if p.default is not p.empty}
        self._add_paths({**given, **shared, **free}, fn.__code__)
        for name, get in given.items():
            self._add(f"{fn.__qualname__}.{name}", get, fn, seen)

    def _add_paths(self, roots: dict[str, Get], code: CodeType) -> None:
        for root, path in paths_in(code):
            if root in roots:
                self._paths.setdefault(".".join([code.co_name, root, *path]), (roots[root], path))

    def _add(self, name: str, get: Get, reader: Any, seen: set[int]) -> None:
        value = get()
        if isinstance(value, (ModuleType, type)):
            return
        self._names.setdefault(name, get)
        ours = isinstance(value, (FunctionType, MethodType)) and value.__module__ == getattr(reader, "__module__", None)
        if ours or isinstance(value, functools.partial):
            self._follow(value, seen)


def change(before: list[Seen]) -> str | None:
    """What a call has changed, in words."""
    for name, live, copy in before:
        if not is_alike(live, copy):
            keys = live if isinstance(live, dict) else {}
            then = dict(zip(copy.keys, copy.values, strict=False))
            changed = next((key for key in keys if not is_alike(keys[key], then.get(key, _ABSENT))), None)
            return name if changed is None else f"{name}.{changed}"
    return None


def _note(name: str, value: Any, found: dict[int, Seen], depth: int) -> None:
    if depth == 0 or id(value) in found or isinstance(value, (*_NOT_FOLLOWED, *_CODE)) or is_constant(value):
        return
    if is_container(value):
        if depth == _DEPTH:
            found[id(value)] = Seen(name, value, copied(value, _DEPTH))
        inner = list(items_of(value)[1])
    elif isinstance(table := getattr(value, "__dict__", None), dict):
        found[id(value)] = Seen(type(value).__name__, table, copied(table, _DEPTH))
        inner = list(table.values())
    else:
        return
    for item in inner:
        _note(name, item, found, depth - 1)


def _reached(value: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        if isinstance(value, _NOT_FOLLOWED):
            return _ABSENT
        if isinstance(value, (ModuleType, type)):  # a namespace: of what it holds, plain values are read
            value = _of_class(value, name) if isinstance(value, type) else vars(value).get(name, _ABSENT)
            return value if is_constant(value) else _ABSENT
        value = _attribute(value, name)
    return value


def _itself(value: Any) -> Any:
    return value


def _attribute(owner: Any, name: str) -> Any:
    """Of an object, or plainly of its class; nothing that runs code."""
    table = getattr(owner, "__dict__", None)
    if isinstance(table, dict) and name in table:
        return table[name]
    found = _of_class(type(owner), name)
    if isinstance(found, MemberDescriptorType):
        return getattr(owner, name, _ABSENT)
    return found if is_constant(found) else _ABSENT


def _of_class(kind: type, name: str) -> Any:
    """What it or a class above it holds, without asking descriptors."""
    return next((vars(c)[name] for c in kind.__mro__ if name in vars(c)), _ABSENT)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _ABSENT
