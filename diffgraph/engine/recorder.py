"""The open capture: what runs inside a `with` becomes the segments and breaks of a sequence.

Rules that are kept here:
- a break ends the segment, which is replayed at once, so the break sees real data and a capture is a true forward;
- a break's result is copied to a buffer that is allocated while the *next* segment records, so the pool reuses it;
- of what segments and breaks read, only what this sequence's segments produced may be held without owning it.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from diffgraph.devices.collectives import completed, is_collective, is_waiting, is_wrapping, waited
from diffgraph.engine.current import RECORDING, foreign_capture, open_recorder, opened
from diffgraph.engine.generators import HostGenerator, settings_seen
from diffgraph.engine.host_reads import host_reads_seen
from diffgraph.engine.places import calling_line
from diffgraph.engine.recordable import (
    draws,
    on_host_alone,
    size_depends_on_data,
    why_never_recordable,
    why_not_recordable,
    written_by,
)
from diffgraph.engine.sequence import Binding, Break, Buffer, GraphSequence, HostTensor, HostValue, SameMemory
from diffgraph.engine.untraced import untraced
from diffgraph.engine.write_log import WriteLog, WritesNoted
from diffgraph.errors import CaptureError, OpNotRecordable, OptionTypeError
from diffgraph.values.ambient import Ambient
from diffgraph.values.tensors import (
    describe,
    has_plain_memory,
    is_made_of_others,
    plain_parts,
    storage_of,
    tensors_in,
    tensors_within,
)
from diffgraph.values.tree import flatten, map_leaves, unflatten

if TYPE_CHECKING:
    from diffgraph.parallel.ranks import Ranks

F = TypeVar("F", bound=Callable[..., Any])


class Rules(NamedTuple):
    """What may be recorded, and together with whom.

    `whole`: no break at all. `break_ops` become breaks. `ranks` record the same forward at the same time; what they say to one
    another is recorded, or a break each (`break_at_collectives`).
    """

    whole: bool = False
    break_ops: Collection[Any] = ()
    ranks: Ranks | None = None
    break_at_collectives: bool = False


_ANY = Rules()


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
    rules: Rules = _ANY,
    log: WriteLog | None = None,
    elsewhere: WriteLog | None = None,
    after: Recorder | None = None,
) -> Iterator[Recorder]:
    """As `breakable_graph`, for those who guard addresses themselves.

    `weights` are not kept alive; writes to `inputs` are noted in `recorder.written`, and writes to what is neither of these, but
    outlives the forward, in `elsewhere`; an op that fails to be recorded raises `OpNotRecordable`. `log`: gradients are recorded
    as well, what is written for good is noted there, and nothing may be brought to the host, since a replay that then stops could
    not be undone. `after`: the recording that always replays before this one, in the same pool: what it bore is borne for this
    one too.
    """
    if not isinstance(sequence, GraphSequence):
        raise OptionTypeError(f"{sequence!r} is no GraphSequence; accepted: `with breakable_graph(GraphSequence()):`")
    if open_recorder() is not None or foreign_capture():
        raise CaptureError("a capture is open already in this thread; graphs cannot be opened inside one another")
    recorder = Recorder(sequence, weights, inputs, rules, log, elsewhere)
    if after is not None:
        recorder.continue_after(after)
    state = precision() if log is None else _with_gradients(sequence.pool.device)
    with sequence.pool.turn(), RECORDING, sequence.pool.recording(), state, settings_seen():
        if sequence.steps:
            raise CaptureError("the sequence already holds a recording; call its reset() first, or use a new one")
        sequence.ambient = Ambient.now(sequence.pool.device.type)
        rng = sequence.pool.rng_state()
        opened.recorder = recorder
        try:
            recorder.begin()
            with recorder, host_reads_seen(sequence.pool.device):
                yield recorder
            recorder.finish()
        except BaseException:
            try:
                recorder.abort()
            finally:
                sequence.pool.set_rng_state(rng)
            raise
        finally:
            opened.recorder = None


def eager_on_graph(fn: F) -> F:
    """Mark a function as a break: eager while a capture is open and at each replay, plain otherwise (for Dynamo a graph break).

    Its arguments and results may be nested tuples, lists, dicts and dataclasses of tensors, `None` and plain values. Values that
    are not tensors are part of the recording: a replay in which one differs raises `HostValueChanged`.
    """

    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        recorder = open_recorder()
        if recorder is None or recorder.in_break:
            return fn(*args, **kwargs)
        return recorder.run_break(getattr(fn, "__qualname__", repr(fn)), fn, args, kwargs)

    return untraced(wrapper)  # type: ignore[return-value]


@contextmanager
def precision() -> Iterator[None]:
    """The thread's state in which a forward is recorded.

    No gradients, but never inference mode: there a dispatch mode sees `linear` whole, and running it below autograd takes
    another path than eager does (`matmul` folds by `requires_grad`), with other bits. And autocast keeps no weights that it has
    cast until its block ends: memory of the pool, held by somebody else.
    """
    with torch.inference_mode(False), torch.no_grad(), autocast_cache(False):
        yield


@contextmanager
def _with_gradients(device: torch.device) -> Iterator[None]:
    """The thread's state in which a training step is recorded. Its own autocast ends in it, and the cache with it; and where a
    weight is used twice, the cache changes the bits."""
    cache = autocast_cache(False) if torch.is_autocast_enabled(device.type) else nullcontext()
    with in_one_thread(), cache:
        yield


@contextmanager
def in_one_thread() -> Iterator[None]:
    """With gradients, whose backward runs in this thread: the one that has the capture open, and where breaks are known."""
    with torch.inference_mode(False), torch.autograd.set_multithreading_enabled(False):
        yield


@contextmanager
def autocast_cache(enabled: bool) -> Iterator[None]:
    was = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was)


class Recorder(TorchDispatchMode):
    """Sees every op of the capturing thread; keeps the open segment and what was born in the sequence so far."""

    supports_higher_order_operators = True

    def __init__(
        self,
        sequence: GraphSequence,
        weights: Iterable[torch.Tensor],
        inputs: Iterable[torch.Tensor],
        rules: Rules,
        log: WriteLog | None = None,
        elsewhere: WriteLog | None = None,
    ) -> None:
        super().__init__()
        self._rules, self._ranks = rules, rules.ranks
        self._log, self._elsewhere = log, elsewhere
        self._gpu_generator_set = self._host_generator_set = False  # by what is recorded
        self._generator = HostGenerator()  # as the last op that drew has left it
        self._collectives = 0  # since the last step was closed
        self._under_way: dict[int, torch.Tensor] = {}  # by storage: what collectives make, and nobody has waited for
        self.sequence = sequence
        self.pool = sequence.pool
        self.in_break = False
        self.written: list[str] = []  # ops that wrote to an input
        self.failure: BaseException | None = None
        self._segment: Any = None
        self._weights = {storage_of(t) for tensor in weights for t in plain_parts(tensor)}
        self.weights_read: set[int] = set()  # by storage
        self._input_tensors = list(inputs)
        self._inputs = {storage_of(t) for t in self._input_tensors}
        # A weak reference keeps a storage's identity from being given to another one.
        self._born: dict[int, StorageWeakRef] = {}
        self._made_on_host: dict[int, StorageWeakRef] = {}
        self._pending: list[tuple[torch.Tensor, Binding, torch.Tensor]] = []  # boundary buffer, its binding, the break's result

    def note_setting(self, *, of_the_host: bool) -> None:
        """A generator is set by what is recorded."""
        if of_the_host:
            self._host_generator_set = True
        else:
            self._gpu_generator_set = True

    def _host_generator_was_set(self) -> bool:
        """And not set back. While a picture is drawn other threads draw from it as well; a training step has it to itself."""
        return (self._log is not None or self._host_generator_set) and self._generator.was_set()

    def continue_after(self, other: Recorder) -> None:
        self._born = dict(other._born)

    # -- life of a segment

    def begin(self) -> None:
        self._segment = self.pool.open_segment()

    def finish(self) -> None:
        if self.failure is not None:
            raise CaptureError(f"a break raised {self.failure!r} during capture") from self.failure
        if self._host_generator_was_set():
            raise CaptureError("it sets the host's generator, which a replay would not do")
        self._close(is_last=True)

    def abort(self) -> None:
        self._pending.clear()
        with suppress(Exception):  # the failure that brought us here may have put an end to them
            self._join()
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.abort()
        self.sequence.reset()
        if self._elsewhere is not None:
            with suppress(RuntimeError):  # its memory may have another size by now
                self._elsewhere.undo()  # eager will do it again

    def _close(self, *, is_last: bool = False) -> None:
        """End the open segment, hand it the results it waits for, and let it run."""
        self._join()
        segment, self._segment = self._segment, None
        segment.collectives = self._issued()
        try:
            segment.end()
            if self._ranks is not None and segment.collectives and not self.pool.runs_while_recording:
                self._ranks.before(f"segment {self.sequence.segments}")
        except BaseException:
            segment.reset()
            raise
        self.sequence.steps.append(segment)
        if not self.pool.runs_while_recording:
            with self.left():  # no op of the forward follows
                for _, binding, result in self._pending:
                    binding.accept(result, "")
                self._pending.clear()
                log = self._elsewhere if self._log is None else self._log
                if log is not None and (log.is_for_undoing or not is_last):
                    log.before_running()  # before `end` they would be recorded: copies of what the segment has written
                segment.replay()

    def _issued(self) -> int:
        """Collectives since the last step was closed, counted for the sequence as well."""
        issued, self._collectives = self._collectives, 0
        self.sequence.collectives += issued
        return issued

    def _join(self) -> None:
        """Wait for what is under way: no graph may end before that."""
        under_way, self._under_way = self._under_way, {}
        for tensor in under_way.values():
            waited(tensor)

    # -- ops

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_made_of_others, types)):
            return NotImplemented  # a quantised weight, say: what it does with the tensors that it is made of comes by here
        kwargs = kwargs or {}
        if func is torch.ops.aten.lift_fresh.default:  # what Python has made of numbers; a replay makes it anew
            func = torch.ops.aten.clone.default
        if isinstance(func, torch._ops.HigherOrderOperator):
            with self:  # the ops that it is made of are recorded
                return func.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        self._note_writes(func, args, kwargs)
        collective = is_collective(func)
        if collective:
            self._collectives += 1
            if self._ranks is not None:
                self._ranks.before(func.name())
        is_seen = is_wrapping(func) or getattr(func, "namespace", "") == "profiler"
        if self._segment is None or self.in_break or is_seen:
            return func(*args, **kwargs)
        leaves = flatten((args, kwargs))[0]
        why_not = why_never_recordable(func, leaves)
        if why_not is not None:
            raise CaptureError(f"{func} cannot be replayed: {why_not}")
        if draws(func, args, kwargs):
            if self._gpu_generator_set or self._host_generator_was_set():
                why = "a generator was set before it (gradient checkpointing, which draws the same dropout twice, does that)"
                raise CaptureError(f"{func} cannot be replayed: {why}")
            result = self._run(func, args, kwargs, leaves, collective)
            self._generator.look()
            return result
        return self._run(func, args, kwargs, leaves, collective)

    def _run(self, func: Any, args: Any, kwargs: Any, leaves: list[Any], collective: bool) -> Any:
        """On the host, as a break, or in the segment."""
        if on_host_alone(leaves, self.pool.device):
            return self._run_on_host(func, args, kwargs)
        why = why_not_recordable(func, args, leaves, self.pool.device)
        if why is None and func in self._rules.break_ops:
            why = "recording it failed"
        if collective and self._rules.break_at_collectives:
            self._collectives -= 1  # of the break, that is
            return self.run_break(func.name(), completed(func), args, kwargs)
        if why is not None:
            return self.run_break(f"{func} ({why})", func, args, kwargs)
        result = self._run_recorded(func, args, kwargs)
        self._note_lifetimes(tensors_in(leaves), result)
        if collective and not self.pool.runs_while_recording:
            self._under_way.update((storage_of(tensor), tensor) for tensor in tensors_in(result))
        elif is_waiting(func):
            self._under_way.pop(storage_of(args[0]), None)
        return result

    def _run_recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            return self._segment.run(func, args, kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if self.pool.runs_while_recording or self._rules.whole:  # then eager would have failed, too; or nothing can be done
                raise
            raise OpNotRecordable(func, error) from error

    def run_piece(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run compiled code, outside of this mode, as one op: what it does inside needs no look, and its memory no owner."""
        if self._segment is None or self.in_break:
            return fn(*args)
        with self._writes_noted("compiled code"):
            result = self._segment.run(fn, args, {})
        self._note_lifetimes(tensors_in(args), result)
        self.sequence.code.append(fn)
        return result

    def _run_on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An op on host tensors alone runs now and never again: what it makes is a constant, and what it changes must be one."""
        if any(storage_of(t) not in self._made_on_host for t in written_by(func, args, kwargs)):
            raise CaptureError(f"{func} writes to a host tensor that outlives the forward, which a replay would not do")
        result = func(*args, **kwargs)
        known = {storage_of(t) for t in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if storage_of(tensor) not in known:
                self._made_on_host[storage_of(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return result

    def _note_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        written = [t for t in written_by(func, args, kwargs) if not self.is_born(t)]
        if not written:
            return
        if any(storage_of(t) in self._inputs for t in written):
            self.written.append(str(func))
        log = self._log
        if log is None and self._elsewhere is not None and not self.in_break:  # which has memory of its own
            log, known = self._elsewhere, (self._inputs, self._weights, self._made_on_host)
            written = [t for t in written if not any(storage_of(t) in memory for memory in known)]
        if log is not None:
            log.note(written, runs_now=self.pool.runs_while_recording)

    def _note_lifetimes(self, read: list[torch.Tensor], result: Any) -> None:
        for tensor in read:
            self._hold(tensor)
        known = {storage_of(t) for t in read}
        for tensor in tensors_in(result):
            if storage_of(tensor) not in known:
                self._bear(tensor)

    def _bear(self, tensor: torch.Tensor) -> None:
        for plain in plain_parts(tensor):
            # A host tensor is no memory of the pool, and a sparse one is held for as long as it is read.
            if plain.device.type == self.pool.device.type and plain.layout == torch.strided:
                reference = StorageWeakRef(plain.untyped_storage())
                self._born[reference.cdata] = reference

    def is_born(self, tensor: torch.Tensor) -> bool:
        return storage_of(tensor) in self._born

    def _hold(self, tensor: torch.Tensor) -> None:
        for plain in plain_parts(tensor):
            key = storage_of(plain)
            if key in self._weights:
                self.weights_read.add(key)
            elif key not in self._born and key not in self.sequence.held:
                if self._log is not None and key not in self._inputs:
                    _check_is_known(tensor)
                # The memory, that is: `parameter.data = other` gives the parameter another.
                self.sequence.held[key] = plain.detach() if plain.layout == torch.strided else plain

    def escaped(self) -> bool:
        """Whether memory born in this capture is still owned by somebody when the forward's result is gone.

        The tape owns everything itself, and reuses nothing, so nothing can escape from it.
        """
        if self.pool.runs_while_recording:
            return False
        if all(reference.expired() for reference in self._born.values()):
            return False
        gc.collect()  # a reference cycle is no owner
        breaks = [step for step in self.sequence.steps if isinstance(step, Break)]
        ours = {storage_of(t) for step in breaks for t in tensors_within((step.args, step.kwargs))}  # in a block mask, say
        return not all(reference.expired() for key, reference in self._born.items() if key not in ours)

    # -- breaks

    def run_break(self, name: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Close the segment, run `fn` on real data, open the next segment, and return what that segment will read."""
        if self.failure is not None:
            return fn(*args, **kwargs)
        given, given_spec = flatten((args, kwargs))
        self.weights_read |= self._weights & {storage_of(t) for t in tensors_in(given)}
        try:
            if self._rules.whole:
                raise CaptureError(f"one whole graph was asked for, and {name} cannot be part of it")
            self._close()
            step = Break(name, fn, *map_leaves(self._break_input, (args, kwargs)))
            step.where = calling_line()
            ambient = Ambient.now(self.pool.device.type)
            step.ambient = ambient if ambient != self.sequence.ambient else None
            with self._inside_break(name, fn):
                result = fn(*args, **kwargs)
                self._generator.look()  # a replay runs it, too
                step.collectives = self._issued()
                left, left_spec = flatten((args, kwargs))
                if left_spec != given_spec or not all(map(operator.is_, left, given)):
                    raise CaptureError(f"{name} changed a container it was given, which a replay cannot do for the caller")
                self.sequence.steps.append(step)
                self._segment = self.pool.open_segment()
                leaves, spec = flatten(result)
                if self._log is not None:
                    check_for_training(name, fn, leaves, self.pool.device)
                bindings, leaves = self._bind(leaves, {storage_of(t) for t in tensors_in(given)})
        except BaseException as error:
            # If the forward swallows it, the path taken from here on is not one to replay: finish eagerly.
            self.failure = error
            raise
        step.bind(spec, bindings)
        if size_depends_on_data(fn) or any(isinstance(binding, (HostValue, HostTensor)) for binding in bindings):
            step.reader = _reader()
        return unflatten(spec, leaves)

    @contextmanager
    def _inside_break(self, name: str, fn: Any) -> Iterator[None]:
        """Out of the way of what a break calls: it runs as if no capture were open (and may compile, which a mode prevents; yet
        in training, what it writes must be known). An op's writes are noted already."""
        noted: Any = nullcontext()
        if self._log is not None and not isinstance(fn, torch._ops.OpOverload):
            noted = WritesNoted(self._log, self.is_born)
        self.in_break = True
        try:
            # With other ranks we see the collectives of a break, too.
            with self._writes_noted(name), self.left() if self._ranks is None else nullcontext(), noted:
                yield
        finally:
            self.in_break = False

    @contextmanager
    def left(self) -> Iterator[None]:
        """Inside, this mode sees no op, and Dynamo no mode: its guards look at flags that popping the mode would leave."""
        if _python_dispatch._get_current_dispatch_mode() is not self:
            yield
            return
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    @contextmanager
    def _writes_noted(self, name: str) -> Iterator[None]:
        """Where the ops that may write to an input are not seen one by one."""
        versions = [t._version for t in self._input_tensors]
        yield
        if versions != [t._version for t in self._input_tensors]:
            self.written.append(name)

    def _break_input(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and has_plain_memory(leaf):
            if self.is_born(leaf):
                return self.pool.alias(leaf)
            if storage_of(leaf) in self._made_on_host:
                return leaf.detach().clone()  # its present content: the forward may fill it anew (a staging buffer)
            if type(leaf) is torch.Tensor:
                return leaf.detach()  # the forward may give it another shape (`t_`)
        return leaf

    def _bind(self, leaves: list[Any], given: set[int]) -> tuple[list[Binding], list[Any]]:
        """How each leaf of a result is bound, and what the forward gets in its place."""
        bindings: list[Binding] = []
        replaced = list(leaves)
        fresh: dict[int, list[int]] = {}  # by storage: where in the leaves its views are
        for i, leaf in enumerate(leaves):
            binding: Any = None
            if not isinstance(leaf, torch.Tensor):
                binding = HostValue(leaf)
            elif leaf.device.type != self.pool.device.type:
                binding = HostTensor(leaf)
            elif not has_plain_memory(leaf):
                raise CaptureError(f"a break returned a {describe(leaf)}; accepted: plain dense tensors")
            elif storage_of(leaf) in given:
                binding = SameMemory(leaf)
            else:
                fresh.setdefault(storage_of(leaf), []).append(i)
            bindings.append(binding)
        for places in fresh.values():
            views = [leaves[i] for i in places]
            for i, result, buffer in zip(places, views, _buffers_for(views), strict=True):
                self._bear(buffer)
                bindings[i], replaced[i] = Buffer(self.pool.alias(buffer)), buffer
                if self.pool.runs_while_recording:
                    bindings[i].accept(result, "")
                else:
                    self._pending.append((buffer, bindings[i], result))
        return bindings, replaced


def check_for_training(name: str, fn: Any, leaves: list[Any], device: torch.device) -> None:
    """What a break may not hand to a training step."""
    where = calling_line() or "a line that is not known"
    if size_depends_on_data(fn):
        raise CaptureError(f"{name} gives a size that depends on values ({where}), and a replay could not go back")
    for leaf in leaves:
        if leaf is None:  # an op that writes in place may return nothing
            continue
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != device.type:
            raise CaptureError(f"{name} brings a value to the host ({where}), from where a replay could not go back")
        if leaf.requires_grad:
            raise CaptureError(f"{name} is a break ({where}), through which no gradient flows")


def _check_is_known(tensor: torch.Tensor) -> None:
    """A training step's weights must be guarded, and the gradients that it makes found."""
    if isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf):
        size = "x".join(map(str, tensor.shape))
        raise CaptureError(f"the step reads a parameter [{size}] of a module that it was not told of; accepted: all in model=")


def _reader() -> weakref.ref[torch.nn.Module] | None:
    """The innermost module whose forward is running.

    Found on the stack: hooks that follow the calls would be seen by other threads. Asking a frame for its variables keeps them
    alive for as long as it runs, so no frame is asked but the one that is found.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "forward" and isinstance(found := frame.f_locals.get("self"), torch.nn.Module):
            return weakref.ref(found)
        frame = frame.f_back
    return None


def _buffers_for(views: list[torch.Tensor]) -> list[torch.Tensor]:
    """New memory for views of one memory: same shapes, strides and dtypes, and overlapping as they do."""
    with torch.inference_mode(False):  # or it could not be written outside inference mode
        if len(views) == 1:
            (t,) = views
            return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)]
        starts = [int(t.storage_offset()) * t.element_size() for t in views]
        start = min(starts) // _ALIGNMENT * _ALIGNMENT
        end = max(first + _extent(t) * t.element_size() for first, t in zip(starts, views, strict=True))
        size = -(-(end - start) // _ALIGNMENT) * _ALIGNMENT
        memory = torch.empty(size, dtype=torch.uint8, device=views[0].device)
        return [
            memory.view(t.dtype).as_strided(t.shape, t.stride(), (first - start) // t.element_size())
            for first, t in zip(starts, views, strict=True)
        ]


_ALIGNMENT = 16  # of the widest dtype


def _extent(tensor: torch.Tensor) -> int:
    """From the first to the last element, in elements."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((int(n) - 1) * int(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
