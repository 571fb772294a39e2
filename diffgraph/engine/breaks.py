"""Where recording must stop by the caller's choice: attention, named submodules, named functions.

(Ops that *cannot* be recorded need no choice: the recorder finds them, see `recordable`.) The patches below exist only inside
their `with` and act only for the thread that has a capture open; a replay calls the function that is live then.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from diffgraph.engine.current import RECORDING, open_recorder
from diffgraph.engine.layout import BREAK, Layout
from diffgraph.engine.padding import current as padding_now
from diffgraph.engine.padding import left_out, without_padding
from diffgraph.engine.sequence import Break, GraphSequence
from diffgraph.engine.stand_ins import Place, put_in
from diffgraph.engine.untraced import untraced
from diffgraph.errors import CaptureError, OptionError
from diffgraph.values.tensors import map_tensors, tensors_in

#: diffusers' names of the attention that is PyTorch's own.
_NATIVE = frozenset({"native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math"})


@contextmanager
def placed(
    module: torch.nn.Module,
    breaks: str | Sequence[str],
    more: Sequence[str] = (),
    *,
    in_graph: bool = False,
    is_parallel: bool = False,
) -> Iterator[None]:
    """Inside, every chosen call, and that of the submodules named by `more`, is a break of the capture that the calling thread
    has open. `in_graph`: to Dynamo, attention is a node of its graph (see `pieces`). `is_parallel`: other ranks take part in the
    forward, and each break costs the host more than it saves."""
    with RECORDING, ExitStack() as stack:
        if breaks in ("auto", "attention"):
            stack.enter_context(_attention(in_graph, is_parallel and breaks == "auto"))
        else:
            for name in breaks:
                stack.enter_context(_attention(in_graph) if name == "attention" else _named(module, name))
        for name in more:
            stack.enter_context(_named(module, name))
        yield


def check(module: torch.nn.Module, breaks: str | Sequence[str]) -> None:
    """Raise `OptionError` unless every name is "attention", a submodule of `module` or an importable function."""
    if not isinstance(breaks, str):
        for name in breaks:
            if name != "attention":
                _resolve(module, name)


def unused(breaks: str | Sequence[str], sequence: GraphSequence) -> list[str]:
    """The names among `breaks` that the recorded forward never called."""
    if isinstance(breaks, str):
        return []
    called = {step.name.partition(" (")[0] for step in sequence.steps if isinstance(step, Break)}
    return [name for name in breaks if name not in called]


def _break(
    name: str,
    live: Callable[[], Callable[..., Any]],
    original: Callable[..., Any],
    rows: int | None,
    unless_unmasked: bool = False,
) -> Callable[..., Any]:
    """A stand-in for `original`: a break while this thread records, plain otherwise. `live` finds the function at replay.

    `rows`: the dimension along which padded rows of a prompt are to be left out, if any are. `unless_unmasked`: no break where
    no mask is given.
    """

    def at_replay(*args: Any, **kwargs: Any) -> Any:
        return live()(*args, **kwargs)

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        recorder, padding = open_recorder(), padding_now()
        is_recorded = unless_unmasked and not _is_masked(args, kwargs)
        if recorder is not None and not recorder.in_break and not is_recorded:
            fn = at_replay if padding is None or rows is None else without_padding(at_replay, padding, rows)
            return recorder.run_break(name, fn, args, kwargs)
        if recorder is None and padding is not None and rows is not None:
            with left_out(None):  # one door leads to the other
                return without_padding(original, padding, rows)(*args, **kwargs)
        return original(*args, **kwargs)

    return untraced(stand_in)


def _is_masked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (args[3] if len(args) > 3 else kwargs.get("attn_mask")) is not None


@functools.lru_cache(maxsize=64)  # the very same for each capture, which compiled code is valid for
def _node(
    name: str, live: Callable[[], Callable[..., Any]], original: Callable[..., Any], rows: int | None
) -> Callable[..., Any]:
    """The same as one opaque node of Dynamo's graph, in which `pieces` finds it. (It does not `wraps`: the graph would call it by
    the original's name.)"""
    from torch._subclasses.fake_tensor import FakeTensor

    stand_in = _break(name, live, original, rows)

    def node(*args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(t, FakeTensor) for t in tensors_in((args, kwargs))):
            return stand_in(*args, **kwargs)
        if open_recorder() is not None:
            raise CaptureError("what was compiled for this forward does not fit it when it is recorded")
        layout = Layout.expected(args, kwargs) if rows == -2 else Layout(heads_together=False)
        return map_tensors(layout.of, original(*args, **kwargs))

    setattr(node, BREAK, True)
    torch.compiler.allow_in_graph(node)
    return node


@contextmanager
def _attention(in_graph: bool = False, unless_unmasked: bool = False) -> Iterator[None]:
    """The two doors through which every diffusers model reaches attention.

    diffusers' registry is patched and not `dispatch_attention_fn`, which 49 of its modules imported by name. One door calls the
    other; the second is then inside a break, so it runs plainly. `unless_unmasked`: PyTorch's own attention without a mask is no
    break, since it is safe to record.
    """
    make = _node if in_graph else _break
    with ExitStack() as stack:
        functional = torch.nn.functional.__dict__
        own = partial(_break, unless_unmasked=True) if unless_unmasked else make
        stack.enter_context(_replaced(functional, _SDPA, "attention", _live_sdpa, rows=-2, make=own))
        registry = _registry()
        for backend in list(registry):
            kind = str(getattr(backend, "value", backend))
            how = own if kind in _NATIVE else make
            stack.enter_context(_replaced(registry, backend, f"attention ({kind})", _live_backend(backend), rows=1, make=how))
        yield


_SDPA = "scaled_dot_product_attention"


def _live_sdpa() -> Callable[..., Any]:
    return getattr(torch.nn.functional, _SDPA)


@functools.cache
def _live_backend(backend: Any) -> Callable[[], Callable[..., Any]]:
    return partial(_registry().__getitem__, backend)


def _registry() -> dict[Any, Callable[..., Any]]:
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")  # not imported: no model uses it
    return dispatch._AttentionBackendRegistry._backends if dispatch is not None else {}


@contextmanager
def _named(module: torch.nn.Module, name: str) -> Iterator[None]:
    holder, attribute = _resolve(module, name)
    with _replaced(holder.__dict__, attribute, name, lambda: getattr(holder, attribute)):
        yield


def _resolve(module: torch.nn.Module, name: str) -> tuple[Any, str]:
    """The object that holds what is named, and the attribute: a submodule's forward, or a Python module's function."""
    if name in dict(module.named_modules()) and name:
        if isinstance(module.get_submodule(name), (torch.nn.ModuleList, torch.nn.ModuleDict)):
            raise OptionError(f"breaks names {name!r}, a container that is never called; name what it holds, as in '{name}.0'")
        return module.get_submodule(name), "forward"
    path, _, attribute = name.rpartition(".")
    try:
        holder = importlib.import_module(path) if path else None
    except (ImportError, TypeError):  # TypeError: of a relative name
        holder = None
    if holder is not None and callable(getattr(holder, attribute, None)):
        return holder, attribute
    raise OptionError(
        f"breaks names {name!r}, which is neither a submodule of {type(module).__name__} nor a function 'package.module.name'"
    )


@contextmanager
def _replaced(
    where: dict[Any, Any],
    key: Any,
    name: str,
    live: Callable[[], Callable[..., Any]],
    rows: int | None = None,
    make: Callable[..., Callable[..., Any]] = _break,
) -> Iterator[None]:
    with put_in(where, key, make(name, live, live(), rows)) as place:
        _PLACED.append(place)
        try:
            yield
        finally:
            _PLACED.remove(place)


_PLACED: list[Place] = []  # under the lock `RECORDING`


@contextmanager
def lifted() -> Iterator[None]:
    """Inside, the functions and modules are as they are without a capture: code that was compiled for these runs as it was."""
    placed = [(place, place.where[place.key]) for place in _PLACED]
    for place, _ in reversed(placed):
        place.put_back()
    try:
        yield
    finally:
        for place, stand_in in placed:
            place.put(stand_in)
