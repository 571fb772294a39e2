"""The options of `accelerate_pipeline` and `accelerate_module`, checked once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from diffgraph.compiling.pieces import Backend
from diffgraph.errors import OptionError, OptionTypeError

BACKENDS = ("breakable", "full", "eager")
_COMPILE = ("backend", "mode", "options", "dynamic")
CAPTURES = ("auto", "startup", "on_demand")
COLLECTIVES = ("record", "break")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B)\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Options:
    """See `accelerate_pipeline`."""

    backend: str = "breakable"
    capture: str = "auto"
    breaks: str | tuple[str, ...] = "auto"
    max_graphs: int | None = None
    memory_limit: int | float | None = None  # bytes, or a fraction of the device's memory
    verify: bool = True
    poison: bool = False
    prompt_buckets: str | tuple[int, ...] | None = "auto"
    collectives: str = "record"
    compile_blocks: Mapping[str, Any] | None = None  # keyword arguments of `torch.compile`
    training: bool = False  # see `accelerate_module`


def checked(
    *,
    backend: Any,
    capture: Any,
    has_shapes: bool,
    compile_blocks: Any,
    prompt_buckets: Any,
    breaks: Any,
    max_graphs: Any,
    memory_limit: Any,
    verify: Any,
    poison: Any,
    collectives: Any,
    unknown: dict[str, Any],
    training: Any = False,
) -> Options:
    """Options, or an `OptionError`/`OptionTypeError` that says what was given and what is accepted."""
    if unknown:
        accepted = (
            "capture_shapes and components (for a pipeline), training (for a module), backend, capture, breaks, max_graphs, "
            "memory_limit, verify, poison, prompt_buckets, compile_blocks, collectives"
        )
        raise OptionTypeError(f"unknown option {', '.join(map(repr, unknown))}; accepted: {accepted}")
    _one_of("backend", backend, BACKENDS)
    _one_of("capture", capture, CAPTURES)
    _one_of("collectives", collectives, COLLECTIVES)
    _true_or_false("verify", verify)
    _true_or_false("poison", poison)
    _true_or_false("training", training)
    if backend == "full" and breaks != "auto":
        raise OptionError("backend='full' records one graph without breaks; accepted with it: breaks='auto'")
    if backend == "full" and collectives == "break":
        raise OptionError("backend='full' records one graph without breaks; accepted with it: collectives='record'")
    if capture == "auto":
        capture = "startup" if has_shapes else "on_demand"
    if training:
        _for_training(
            backend=(backend, "breakable"),
            capture=(capture, "on_demand"),
            breaks=(breaks, "auto"),
            collectives=(collectives, "record"),
            compile_blocks=(compile_blocks, False),
        )
    return Options(
        backend=backend,
        capture=capture,
        breaks=_breaks(breaks),
        max_graphs=_count(max_graphs),
        memory_limit=_memory(memory_limit),
        verify=verify,
        poison=poison,
        prompt_buckets=_buckets(prompt_buckets),
        collectives=collectives,
        compile_blocks=_compile(compile_blocks, backend),
        training=training,
    )


def _for_training(**options: tuple[Any, Any]) -> None:
    """Of each, what was given, and what the recording of a forward with its backward can do."""
    for name, (given, accepted) in options.items():
        if given != accepted:
            raise OptionError(
                f"training=True records forward and backward on demand, each as it is; accepted with it: {name}={accepted!r}; "
                f"given: {given!r}"
            )


def _one_of(name: str, value: Any, accepted: tuple[str, ...]) -> None:
    if value not in accepted:
        raise OptionError(f"{name} is {value!r}; accepted: {', '.join(map(repr, accepted))}")


def _true_or_false(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise OptionTypeError(f"{name} is {value!r}; accepted: True or False")


def _buckets(value: Any) -> str | tuple[int, ...] | None:
    accepted = "accepted: 'auto', None (exact lengths), or rows of text in a list that rises, as in [64, 128, 256]"
    if value is None or (isinstance(value, str) and value == "auto"):
        return value
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise OptionTypeError(f"prompt_buckets is {value!r}; {accepted}")
    if any(isinstance(size, bool) or not isinstance(size, int) for size in value):
        raise OptionTypeError(f"prompt_buckets is {value!r}; {accepted}")
    if not value or min(value) < 1 or any(a >= b for a, b in pairwise(value)):
        raise OptionError(f"prompt_buckets is {value!r}; {accepted}")
    return tuple(value)


def _compile(value: Any, backend: str) -> Mapping[str, Any] | None:
    accepted = f"accepted: True, False, or a dict with some of {', '.join(_COMPILE)} as torch.compile takes them"
    if value is False:
        return None
    if value is not True and not isinstance(value, Mapping):
        raise OptionTypeError(f"compile_blocks is {value!r}; {accepted}")
    given = {} if value is True else dict(value)
    if not set(given) <= set(_COMPILE):
        raise OptionError(f"compile_blocks is {value!r}; {accepted}")
    if given.get("dynamic") not in (None, True, False):
        raise OptionError(f"compile_blocks is {value!r}; accepted as its dynamic: None, True, False")
    if backend == "eager":
        raise OptionError("backend='eager' records nothing, so nothing is compiled; accepted with it: compile_blocks=False")
    if given.get("mode") is not None and given.get("options") is not None:
        raise OptionError(f"compile_blocks is {value!r}; accepted: either mode or options")
    Backend(given)
    return given


def _count(value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionTypeError(f"max_graphs is {value!r}; accepted: a whole number, at least 1")
    if value < 1:
        raise OptionError(f"max_graphs is {value}; accepted: a whole number, at least 1")
    return value


def _breaks(value: Any) -> str | tuple[str, ...]:
    accepted = "accepted: 'auto', 'attention', or names of submodules and functions"
    if isinstance(value, str):
        if value not in ("auto", "attention"):
            raise OptionError(f"breaks is {value!r}; {accepted} in a list")
        return value
    if not isinstance(value, Sequence) or not all(isinstance(name, str) for name in value):
        raise OptionTypeError(f"breaks is {value!r}; {accepted}")
    return tuple(value)


def _memory(value: Any) -> int | float | None:
    accepted = "accepted: None, bytes (an int), text as in '4GiB', or a fraction of the device's memory (0 < float <= 1)"
    if value is None:
        return None
    if isinstance(value, str):
        found = _BYTES.fullmatch(value)
        if not found:
            raise OptionError(f"memory_limit is {value!r}; {accepted}")
        value = int(float(found[1]) * _UNITS[found[2].upper()])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionTypeError(f"memory_limit is {value!r}; {accepted}")
    if not value > 0 or (isinstance(value, float) and value > 1):
        raise OptionError(f"memory_limit is {value!r}; {accepted}")
    return value
