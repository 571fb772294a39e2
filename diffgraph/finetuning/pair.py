"""A module's forward and its backward, two sequences over the same memory, joined by an `autograd.Function`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from diffgraph.devices import Pool
from diffgraph.engine.current import RECORDING
from diffgraph.engine.ranges import opened
from diffgraph.engine.recorder import Recorder, record
from diffgraph.engine.sequence import GraphSequence
from diffgraph.engine.write_log import WriteLog
from diffgraph.errors import CaptureError, ReplayError
from diffgraph.recording.capture import Recording, check_outputs, settled
from diffgraph.recording.signature import Call
from diffgraph.recording.static_inputs import StaticInputs
from diffgraph.values.tensors import has_plain_memory, storage_of
from diffgraph.values.tree import flatten, map_leaves, unflatten


class Flight:
    """A forward whose backward is yet to come; it ends when autograd lets go of it, too."""


class Pair(Recording):
    """A recorded forward that wants gradients, and the backward that gives them.

    What the forward saves lies in the pool, so until its backward has run, nothing else may run in that pool.
    """

    def __init__(self, inputs: StaticInputs, pool: Pool, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(inputs, GraphSequence(pool))
        self.backward = GraphSequence(pool)
        self.log = WriteLog(is_for_undoing=True)
        self.parameters = list(parameters)
        self.read: list[torch.Tensor] = []  # of the module's parameters and buffers, those that backward reads
        self.incoming: list[torch.Tensor] = []  # gradients of those outputs that want them
        self.outgoing: list[torch.Tensor | None] = []  # of the inputs that want them, and of the parameters
        self._reach: list[set[int]] = []  # which of `outgoing` each of `incoming` leads to
        self._wanting: list[bool] = []  # which of the distinct tensors among the outputs do
        self._flight: weakref.ref[Flight] | None = None
        self._is_given_up = False

    @property
    def segments(self) -> int:
        return self.sequence.segments + self.backward.segments

    @property
    def breaks(self) -> int:
        return self.sequence.breaks + self.backward.breaks

    @property
    def in_flight(self) -> bool:
        return self._flight is not None and self._flight() is not None

    def call(self, call: Call) -> Any:
        """What the module would return, with a graph behind it whose backward is the recorded one."""
        made: list[Any] = []
        tensors = _Joined.apply(self, call, made, *self.wanting_inputs(call), *self.parameters)
        leaves, spec = made
        fresh = iter(tensors)
        given = set(map(id, call.leaves))
        by_id: dict[int, Any] = {}
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in given and id(leaf) not in by_id:
                by_id[id(leaf)] = next(fresh)
        return unflatten(spec, [by_id.get(id(leaf), leaf) for leaf in leaves])

    def take_off(self) -> Flight:
        flight = Flight()
        self._flight = weakref.ref(flight)
        return flight

    def land(self) -> None:
        with self.pool.lock:  # it may come in a thread of autograd's
            self._flight = None
            if self._is_given_up:
                self.release()

    @torch.no_grad()
    def run_backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the inputs that want them and of the parameters, as tensors of their own: where those outputs that have
        gradients lead."""
        reached = set().union(*[reach for reach, g in zip(self._reach, gradients, strict=True) if g is not None])
        if not reached:
            return [None] * len(self.outgoing)
        with self.pool.turn():
            for place, gradient in zip(self.incoming, gradients, strict=True):
                place.zero_() if gradient is None else place.copy_(gradient)
            self.backward.replay()
            outgoing = [g if at in reached else None for at, g in enumerate(self.outgoing)]
            found = [g for g in outgoing if g is not None]
            made = [torch.empty_like(g) for g in found]
            if found:
                torch._foreach_copy_(made, found)  # pyright: ignore[reportPrivateImportUsage]
        copies = iter(made)
        return [None if g is None else next(copies) for g in outgoing]

    def of_wanting(self, tensors: Sequence[Any]) -> list[Any]:
        """Of the distinct tensors among an output, those that want gradients."""
        return [t for t, wants in zip(tensors, self._wanting, strict=True) if wants]

    def of_others(self, tensors: Sequence[Any]) -> list[Any]:
        return [t for t, wants in zip(tensors, self._wanting, strict=True) if not wants]

    def wanting_inputs(self, call: Call) -> list[torch.Tensor]:
        distinct = (call.leaves[at] for at in self.inputs.positions)
        return [leaf for leaf in distinct if leaf.requires_grad]

    def release(self) -> None:
        with self.pool.lock:
            if self.in_flight:  # once it has landed
                self._is_given_up = True
                return
            super().release()
            self.backward.reset()
            self.incoming, self.outgoing, self.log = [], [], WriteLog()

    # -- recording

    def record(self, forward: Callable[..., Any], module: torch.nn.Module) -> None:
        """Record both. They run meanwhile, and are undone: what they write, and what they draw."""
        rng = self.pool.rng_state()
        try:
            with self.pool.turn(), opened("capture"):
                recorder = self._record(forward, module)
                self.escaped = recorder.escaped()
        except BaseException:
            self.release()
            raise
        finally:
            self.log.undo()
            self.pool.set_rng_state(rng)

    def _record(self, forward: Callable[..., Any], module: torch.nn.Module) -> Recorder:
        args, kwargs = self.inputs.call()
        inputs = [t for t in self.inputs.tensors if t.requires_grad]
        weights = list(chain(module.parameters(), module.buffers()))
        given: dict[str, Any] = {"weights": weights, "inputs": self.inputs.tensors, "log": self.log}
        with RECORDING, as_new_leaves(module, self.parameters) as leaves:
            with record(self.sequence, **given) as first:
                output = map_leaves(settled, forward(*args, **kwargs), objects=True)
                check_outputs(output)
                if self.inputs.changed(args, kwargs) is not None or first.written:
                    raise CaptureError("the forward changes its arguments")
            tensors = self._distinct_outputs(output)
            self._wanting = [t.requires_grad for t in tensors]
            wanting = self.of_wanting(tensors)
            if not wanting:
                raise CaptureError("no output wants gradients")
            self.incoming = [torch.zeros_like(t) for t in wanting]
            self._reach = [_reached(t, [*inputs, *leaves]) for t in wanting]
            with record(self.backward, after=first, **given) as second:
                found = torch.autograd.grad(wanting, [*inputs, *leaves], self.incoming, allow_unused=True)
        if any(g is not None and not has_plain_memory(g) for g in found):
            raise CaptureError("a gradient is no plain dense tensor")
        self.read = [t for t in chain(module.parameters(), module.buffers()) if storage_of(t) in second.weights_read]
        self.set_outputs(map_leaves(self._without_graph, output, objects=True), None, first.is_born)
        self.outgoing = [self.pool.alias(g) if g is not None and second.is_born(g) else g for g in found]
        return second

    def _without_graph(self, leaf: Any) -> Any:
        kept = not isinstance(leaf, torch.Tensor) or self.inputs.position(leaf) is not None
        return leaf if kept else leaf.detach()

    def _distinct_outputs(self, output: Any) -> list[torch.Tensor]:
        found = {id(leaf): leaf for leaf in flatten(output, objects=True)[0] if isinstance(leaf, torch.Tensor)}
        return [t for t in found.values() if self.inputs.position(t) is None]


@contextmanager
def as_new_leaves(module: torch.nn.Module, parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Inside, each parameter has a stand-in over the same memory. What autograd knows of the parameters themselves (on which
    stream to accumulate, as the last step's loss or DDP's hooks keep it alive) would bring another stream into a capture.

    All threads see the stand-ins. So it is for one recording at a time (`RECORDING`; modules may share parameters), and while the
    module's own calls wait. Who else lists the parameters of a module in another thread meanwhile gets the stand-ins."""
    made = {id(p): torch.nn.Parameter(p.detach()) for p in parameters}
    tables = [m._parameters for m in module.modules()]
    places = [(table, name, p) for table in tables for name, p in table.items() if p is not None and id(p) in made]
    for table, name, p in places:
        table[name] = made[id(p)]
    try:
        yield list(made.values())
    finally:
        for table, name, p in places:
            table[name] = p


class _Joined(torch.autograd.Function):
    """Forward and backward replay. The optimizer, DDP's hooks and whoever else waits for gradients get them from autograd."""

    @staticmethod
    def forward(ctx: Any, pair: Pair, call: Call, made: list[Any], *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.pair, ctx.flight = pair, pair.take_off()
        ctx.set_materialize_grads(False)  # an output that the loss does not use gives `None`, not zeros
        ctx.versions = _versions(pair)
        leaves, spec = flatten(pair.run(call), objects=True)
        made += [leaves, spec]
        given = set(map(id, call.leaves))
        found = {id(t): t for t in leaves if isinstance(t, torch.Tensor) and id(t) not in given}
        tensors = tuple(found.values())
        ctx.mark_non_differentiable(*pair.of_others(tensors))
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        pair, flight = ctx.pair, ctx.flight
        if torch.is_grad_enabled():
            raise ReplayError(
                "create_graph=True asks for gradients of gradients, and a recorded backward has no graph behind it; accepted: "
                "`with diffgraph.paused(module)` around a forward whose gradients are to have gradients"
            )
        if flight is None:
            raise ReplayError(
                "backward through a recorded forward runs once, since it reuses what the forward saved; accepted: "
                "`with diffgraph.paused(module)` around a forward with several backwards"
            )
        if ctx.versions != _versions(pair):
            raise ReplayError("a parameter or buffer was changed in place between a recorded forward and its backward")
        ctx.flight = None
        try:
            return None, None, None, *pair.run_backward(pair.of_wanting(gradients))
        finally:
            pair.land()


def _reached(output: torch.Tensor, targets: Sequence[torch.Tensor]) -> set[int]:
    """Which of the targets the graph behind an output leads to."""
    seen, waiting = set(), [get_gradient_edge(output).node]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return {at for at, target in enumerate(targets) if get_gradient_edge(target).node in seen}


def _versions(pair: Pair) -> int:
    return sum(t._version for t in pair.read)
