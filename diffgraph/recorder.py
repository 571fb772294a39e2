"""The open capture: what runs inside a `with` becomes the segments and breaks of a sequence.

Rules that are kept here (DESIGN of capture):
- a break ends the segment, which is replayed at once, so the break sees real data and a capture is a true forward;
- a break's result is copied to a buffer that is allocated while the *next* segment records, so the pool reuses it;
- of what segments and breaks read, only what this sequence's segments produced may be held without owning it.
"""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from diffgraph.errors import CaptureError
from diffgraph.recordable import why_not_recordable
from diffgraph.sequence import Binding, Break, Buffer, GraphSequence, HostTensor, HostValue, SameMemory
from diffgraph.tree import flatten, map_leaves, unflatten

F = TypeVar("F", bound=Callable[..., Any])

_open = threading.local()


def open_recorder() -> Recorder | None:
    """The capture that this thread has open, if any."""
    return getattr(_open, "recorder", None)


@contextmanager
def breakable_graph(sequence: GraphSequence) -> Iterator[None]:
    """Record what runs inside the `with` into `sequence`, which must be empty.

    The code runs for real: the tensors it makes hold their values when the `with` ends, and `sequence.replay()` refreshes them
    from whatever the tensors it read hold then. Calls of functions marked by `eager_on_graph`, and ops that cannot be recorded,
    become breaks. When the code raises, the sequence stays empty and everything is usable again.

    Raises `CaptureError` when the sequence is not empty, or a capture is open in this thread already.
    """
    with record(sequence):
        yield


@contextmanager
def record(
    sequence: GraphSequence,
    *,
    weights: Iterable[torch.Tensor] = (),
    inputs: Iterable[torch.Tensor] = (),
    whole: bool = False,
) -> Iterator[Recorder]:
    """As `breakable_graph`, for those who guard addresses themselves.

    `weights` are not kept alive; writes to `inputs` are noted in `recorder.written`; `whole` allows no break at all.
    """
    if sequence.steps:
        raise CaptureError("the sequence already holds a recording; call its reset() first, or use a new one")
    if open_recorder() is not None or _foreign_capture():
        raise CaptureError("a capture is open already in this thread; graphs cannot be opened inside one another")
    recorder = Recorder(sequence, weights, inputs, whole)
    sequence.inference = torch.is_inference_mode_enabled()
    with sequence.pool.recording(), torch.no_grad():
        rng = sequence.pool.rng_state()
        _open.recorder = recorder
        try:
            recorder.begin()
            with recorder:
                yield recorder
            recorder.finish()
        except BaseException:
            recorder.abort()
            sequence.pool.set_rng_state(rng)
            raise
        finally:
            _open.recorder = None


def eager_on_graph(fn: F) -> F:
    """Mark a function as a break: eager while a capture is open and at each replay, plain otherwise.

    Its arguments and results may be nested tuples, lists, dicts and dataclasses of tensors, `None` and plain values. Values that
    are not tensors are part of the recording: a replay in which one differs raises `HostValueChanged`.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorder = open_recorder()
        if recorder is None or recorder.in_break:
            return fn(*args, **kwargs)
        return recorder.run_break(getattr(fn, "__qualname__", repr(fn)), fn, args, kwargs)

    return wrapper  # type: ignore[return-value]


def _foreign_capture() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Recorder(TorchDispatchMode):
    """Sees every op of the capturing thread; keeps the open segment and what was born in the sequence so far."""

    def __init__(
        self, sequence: GraphSequence, weights: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor], whole: bool
    ) -> None:
        super().__init__()
        self.sequence = sequence
        self.pool = sequence.pool
        self.whole = whole
        self.in_break = False
        self.written: list[str] = []  # ops that wrote to an input
        self.failure: BaseException | None = None
        self._segment: Any = None
        self._weights = {_storage(t) for tensor in weights for t in _plain(tensor)}
        self._inputs = {_storage(t) for t in inputs}
        # A weak reference keeps a storage's identity from being given to another one.
        self._born: dict[int, StorageWeakRef] = {}
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []  # boundary buffer, the break's result

    # -- life of a segment

    def begin(self) -> None:
        self._segment = self.pool.open_segment()

    def finish(self) -> None:
        if self.failure is not None:
            raise CaptureError(f"a break raised {self.failure!r} during capture") from self.failure
        self._close()

    def abort(self) -> None:
        self._pending.clear()
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.abort()
        self.sequence.reset()

    def _close(self) -> None:
        """End the open segment, hand it the results it waits for, and let it run."""
        segment, self._segment = self._segment, None
        try:
            segment.end()
        except BaseException:
            segment.reset()
            raise
        self.sequence.steps.append(segment)
        if not self.pool.runs_while_recording:
            for buffer, result in self._pending:
                buffer.copy_(result)
            self._pending.clear()
            segment.replay()

    # -- ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note_writes(func, args, kwargs)
        if self._segment is None or self.in_break:
            return func(*args, **kwargs)
        why = why_not_recordable(func, args, kwargs, self.pool.device)
        if why is not None:
            return self.run_break(f"{func} ({why})", func, args, kwargs)
        result = self._segment.run(func, args, kwargs)
        self._note_lifetimes(args, kwargs, result)
        return result

    def _note_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        schema = getattr(func, "_schema", None)  # higher-order operators have none
        if not self._inputs or schema is None or not schema.is_mutable:
            return
        for i, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                if any(_storage(t) in self._inputs for t in _tensors(value)):
                    self.written.append(str(func))

    def _note_lifetimes(self, args: Any, kwargs: Any, result: Any) -> None:
        read = _tensors((args, kwargs))
        for tensor in read:
            self._hold(tensor)
        known = {_storage(t) for t in read}
        for tensor in _tensors(result):
            if _storage(tensor) not in known:
                self._bear(tensor)

    def _bear(self, tensor: torch.Tensor) -> None:
        for plain in _plain(tensor):
            if plain.device.type == self.pool.device.type:  # a host tensor is no memory of the pool
                reference = StorageWeakRef(plain.untyped_storage())
                self._born[reference.cdata] = reference

    def is_born(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) in self._born

    def _hold(self, tensor: torch.Tensor) -> None:
        key = _storage(tensor)
        if key not in self._born and key not in self._weights:
            self.sequence.held.setdefault(key, tensor)

    def escaped(self) -> bool:
        """Whether memory born in this capture is still owned by somebody when the forward's result is gone.

        The tape owns everything itself, and reuses nothing, so nothing can escape from it.
        """
        if self.pool.runs_while_recording:
            return False
        if all(reference.expired() for reference in self._born.values()):
            return False
        gc.collect()  # a reference cycle is no owner
        return not all(reference.expired() for reference in self._born.values())

    # -- breaks

    def run_break(self, name: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Close the segment, run `fn` on real data, open the next segment, and return what that segment will read."""
        if self.failure is not None:
            return fn(*args, **kwargs)
        if self.whole:
            raise CaptureError(f"one whole graph was asked for, and {name} cannot be part of it")
        self._close()
        self.in_break = True
        try:
            result = fn(*args, **kwargs)
            step = Break(name, fn, *map_leaves(self._break_input, (args, kwargs)))
            self.sequence.steps.append(step)
            self._segment = self.pool.open_segment()
            given = {_storage(t) for t in _tensors((args, kwargs))}
            leaves, spec = flatten(result)
            bound = [self._bind(leaf, given) for leaf in leaves]
        except BaseException as error:
            # If the forward swallows it, the path taken from here on is not one to replay: finish eagerly.
            self.failure = error
            raise
        finally:
            self.in_break = False
        step.bind(spec, [binding for binding, _ in bound])
        return unflatten(spec, [leaf for _, leaf in bound])

    def _break_input(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and _has_plain_memory(leaf) and self.is_born(leaf):
            return self.pool.alias(leaf)
        return leaf

    def _bind(self, leaf: Any, given: set[int]) -> tuple[Binding, Any]:
        """How a result is bound, and what the forward gets in its place."""
        if not isinstance(leaf, torch.Tensor):
            return HostValue(leaf), leaf
        if leaf.device.type != self.pool.device.type:
            return HostTensor(leaf), leaf
        if not _has_plain_memory(leaf):
            raise CaptureError(f"a break returned a {type(leaf).__name__}; accepted: plain dense tensors")
        if _storage(leaf) in given:
            return SameMemory(leaf), leaf
        buffer = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        self._bear(buffer)
        if self.pool.runs_while_recording:
            buffer.copy_(leaf)
        else:
            self._pending.append((buffer, leaf))
        return Buffer(self.pool.alias(buffer)), buffer


def _tensors(obj: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(obj)[0] if isinstance(leaf, torch.Tensor)]


def _plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a tensor subclass (a quantised weight, say) is made of; a plain tensor is its own."""
    if hasattr(tensor, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]  # type: ignore[operator]
        return [plain for name in names for plain in _plain(getattr(tensor, name))]
    return [tensor]


def _has_plain_memory(tensor: torch.Tensor) -> bool:
    plain_type = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain_type and tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _storage(tensor: torch.Tensor) -> int:
    """Identity of a tensor's memory; of the tensor itself where it has none of its own (sparse, subclass)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)
