"""Segments and breaks in order: a sequence replays as one forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from diffgraph.devices import Pool, Segment, known_device, new_pool
from diffgraph.engine import ranges
from diffgraph.errors import HostValueChanged, OptionError, OptionTypeError, ReplayError
from diffgraph.values.ambient import Ambient
from diffgraph.values.constants import same_value
from diffgraph.values.tensors import same_tensor_bits
from diffgraph.values.tree import LEAF, Spec, flatten


class GraphSequence:
    """What `breakable_graph` records and `replay` runs again.

    Args:
        pool: memory to share with another sequence, as its `.pool`; sequences of one pool replay one at a time, and what one
            leaves in its tensors is overwritten by the next. Default: a pool of its own.
        device: where to record; default the pool's device, else the current GPU, else the CPU.
        poison: (CPU device) fill every intermediate with NaN before each replay, so that a fault of lifetime shows.

    Example:
        >>> x = torch.zeros(4)
        >>> seq = diffgraph.GraphSequence(device="cpu")
        >>> with diffgraph.breakable_graph(seq):
        ...     y = x * 2 + 1
        >>> _ = x.fill_(3)
        >>> seq.replay()
        >>> y.tolist()
        [7.0, 7.0, 7.0, 7.0]
    """

    def __init__(self, pool: Pool | None = None, *, device: torch.device | str | None = None, poison: bool = False) -> None:
        if pool is not None and not isinstance(pool, Pool):
            raise OptionTypeError(f"pool is {pool!r}; accepted: None or the `.pool` of another GraphSequence")
        if pool is None:
            pool = new_pool(device, poison=poison)
        elif device is not None and not _lies_on(known_device(device), pool.device):
            raise OptionTypeError(f"the pool is on {pool.device}, the sequence was asked for on {device}")
        elif poison and not pool.poison:
            raise OptionError("poison=True, and the pool does not poison; accepted: the pool of a sequence that does")
        self.pool = pool
        self.steps: list[Segment | Break] = []
        self.ambient = Ambient.now(self.pool.device.type)  # in which it was recorded
        self.collectives = 0  # of all steps
        self.failed_halfway: str | None = None  # the step in which the last replay failed, where other ranks wait for the rest
        self.code: list[Any] = []  # compiled, with the constants and kernels that segments use
        self.held: dict[int, torch.Tensor] = {}  # by storage: read by a segment, and neither born in one nor a weight

    @property
    def segments(self) -> int:
        return sum(isinstance(step, Segment) for step in self.steps)

    @property
    def breaks(self) -> int:
        return sum(isinstance(step, Break) for step in self.steps)

    def replay(self, before: Callable[[str], None] | None = None) -> None:
        """Run everything again, on the current stream, reading and writing the tensors that were there when it was recorded.

        Raises `HostValueChanged` when a break hands Python another value than the one the rest was recorded with, and whatever
        a break raises. The tensors then hold the remains of an unfinished forward; the sequence itself can replay again.
        Inference mode and autocast are those of the recording, whatever they are around the replay. `before` is called with the
        name of each step that other ranks take part in, before it.
        """
        if not self.steps:
            raise ReplayError("nothing is recorded in this sequence: use `with breakable_graph(sequence)` first")
        with self.pool.turn(), self.ambient.precision(), torch.no_grad():
            if self.pool.poison:
                self._poison()
            if ranges.wanted() or before is not None:
                self._replay_named(before)
                return
            step = None
            try:
                for step in self.steps:
                    step.replay()
            except BaseException:
                self._note_failure(step)
                raise

    def _replay_named(self, before: Callable[[str], None] | None) -> None:
        """The same, for a profiler to read, or other ranks to follow."""
        for i, step in enumerate(self.steps):
            name = _name(i, step)
            if before is not None and step.collectives:
                before(name)
            ranges.named(name, step.replay)

    def _note_failure(self, failed: Segment | Break | None) -> None:
        until = next(i for i, step in enumerate(self.steps) if step is failed)
        if any(step.collectives for step in self.steps[: until + 1]):
            self.failed_halfway = _name(until, failed)

    @torch.inference_mode()  # or what was made in it could not be written
    def _poison(self) -> None:
        for step in self.steps:
            step.poison()  # type: ignore[union-attr]  # only the CPU device has a pool that poisons

    def reset(self) -> None:
        """Forget what was recorded and give its memory back."""
        if self.steps:
            self.pool.settle()
        for step in self.steps:
            step.reset()
        self.steps, self.code, self.collectives = [], [], 0
        self.held = {}


def _name(i: int, step: Any) -> str:
    return f"break {i}: {step.name}" if isinstance(step, Break) else f"segment {i}"


class Break:
    """A call that runs eagerly between two segments.

    What it returned is bound when it is recorded: a tensor to a boundary buffer that the next segment reads, anything else to
    its value, which every replay must give again.
    """

    def __init__(self, name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.name = name
        self.collectives = 0  # that other ranks take part in
        self.fn = fn
        self.args = args
        self.kwargs = kwargs
        self.reader: weakref.ref[torch.nn.Module] | None = None  # whose forward Python gets the result in, when it reads it
        self.where: str | None = None  # the line of source that called it
        self.ambient: Ambient | None = None  # where the forward had set it otherwise than the rest of the sequence
        self.spec: Spec = None
        self.bindings: list[Binding] = []

    @property
    def reads_host(self) -> bool:
        """Whether Python gets a value, or a size that depends on values, from it."""
        return self.reader is not None or any(isinstance(b, (HostValue, HostTensor)) for b in self.bindings)

    def bind(self, spec: Spec, bindings: list[Binding]) -> None:
        self.spec, self.bindings = spec, bindings

    def replay(self) -> None:
        try:
            self._replay()
        except HostValueChanged as changed:
            changed.reader = None if self.reader is None else self.reader()
            raise

    def _replay(self) -> None:
        if self.ambient is None:
            result = self.fn(*self.args, **self.kwargs)
        else:
            with self.ambient.restored():
                result = self.fn(*self.args, **self.kwargs)
        if self.spec == LEAF and type(result) is torch.Tensor:  # attention: the path that is taken hundreds of times a step
            self.bindings[0].accept(result, self.name)
            return
        leaves, spec = flatten(result)
        if spec != self.spec:
            raise HostValueChanged(f"{self.name} returned another structure than when it was recorded")
        for binding, leaf in zip(self.bindings, leaves, strict=True):
            binding.accept(leaf, self.name)

    def poison(self) -> None:
        for binding in self.bindings:
            if isinstance(binding, Buffer):
                binding.poison()

    def reset(self) -> None:
        self.args, self.kwargs, self.bindings = (), {}, []


class Binding:
    """How one leaf of a break's result reaches the next segment."""

    def accept(self, leaf: Any, name: str) -> None:
        raise NotImplementedError


class Buffer(Binding):
    """A tensor, copied to a fixed address in the pool."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._repeated = [d for d, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[d] > 1]
        self._memory = self._once(tensor)

    def _once(self, tensor: torch.Tensor) -> torch.Tensor:
        """Without the repetition of an expanded tensor, whose memory could not be written otherwise."""
        for d in self._repeated:
            tensor = tensor.narrow(d, 0, 1)
        return tensor

    def accept(self, leaf: Any, name: str) -> None:
        t = self.tensor
        if not isinstance(leaf, torch.Tensor) or leaf.shape != t.shape or leaf.dtype != t.dtype:
            given = f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else repr(leaf)
            raise HostValueChanged(f"{name} returned {given}; recorded with {tuple(t.shape)} {t.dtype}")
        if self._repeated:
            if any(leaf.stride(d) for d in self._repeated):
                raise HostValueChanged(f"{name} returned an expanded tensor when it was recorded, and now one that is not")
            leaf = self._once(leaf)
        self._memory.copy_(leaf)

    def poison(self) -> None:
        if self.tensor.is_floating_point() or self.tensor.is_complex():
            self._memory.fill_(float("nan"))


class SameMemory(Binding):
    """A tensor over memory that the break was given: already at a fixed address."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.place = _place(tensor)

    def accept(self, leaf: Any, name: str) -> None:
        if not isinstance(leaf, torch.Tensor) or _place(leaf) != self.place:
            raise HostValueChanged(f"{name} returned its own input when it was recorded, and another tensor now")


class HostTensor(Binding):
    """A tensor that the break brought to the host, where Python may have read it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.value = _arrived(tensor).clone()

    def accept(self, leaf: Any, name: str) -> None:
        if not isinstance(leaf, torch.Tensor) or not same_tensor_bits(_arrived(leaf), self.value):
            raise HostValueChanged(f"{name} brought other values to the host than when it was recorded")


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    """A copy into pinned memory need not wait (`non_blocking=True`); whoever reads it must."""
    if tensor.is_pinned():
        torch.cuda.current_stream().synchronize()
    return tensor


class HostValue(Binding):
    """A value that Python has seen: the rest of the recording was chosen by it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def accept(self, leaf: Any, name: str) -> None:
        if not same_value(leaf, self.value):
            raise HostValueChanged(f"{name} gave {leaf!r}; recorded with {self.value!r}")


def _lies_on(asked: torch.device, device: torch.device) -> bool:
    return asked.type == device.type and (asked.index is None or device.index is None or asked.index == device.index)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
