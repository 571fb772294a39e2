"""Which names code reads, and which attributes by them, as its bytecode says: from Python 3.10 on, whose opcodes differ."""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

#: Superinstructions of 3.13 and after begin alike (`LOAD_FAST_BORROW_LOAD_FAST_BORROW`); what they load last is on top.
_LOADS = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_NAME", "LOAD_FAST", "STORE_FAST_LOAD_FAST")

Path = tuple[str, tuple[str, ...]]


def _all_of(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions and comprehensions inside."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _all_of(constant)


def names_in(code: CodeType) -> Iterator[str]:
    for part in _all_of(code):
        yield from part.co_names


def globals_in(code: CodeType) -> Iterator[str]:
    """Names that code takes from its module, and no attributes that are called alike."""
    for part in _all_of(code):
        yield from (str(i.argval) for i in dis.get_instructions(part) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))


def paths_in(code: CodeType) -> Iterator[Path]:
    """Attributes that code reads, by the name that it reads them from: `("args", ("weight",))` for `args.weight`."""
    for part in _all_of(code):
        yield from paths_of(dis.get_instructions(part))


def paths_of(instructions: Iterable[Any]) -> Iterator[Path]:
    root, path = "", ()
    for instruction in instructions:
        name, argument = instruction.opname, instruction.argval
        if name in ("EXTENDED_ARG", "CACHE"):  # parts of another
            continue
        if name in ("LOAD_ATTR", "LOAD_METHOD") and root:
            path = (*path, str(argument))
            yield root, path
        elif name.startswith(_LOADS):
            root, path = str(argument[-1] if isinstance(argument, tuple) else argument), ()
        else:
            root, path = "", ()
