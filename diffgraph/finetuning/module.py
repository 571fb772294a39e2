"""Calls of a module under gradients: the way of `Runner`, with a backward to come."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch

from diffgraph.devices import SUPPORTED
from diffgraph.engine.current import RECORDING, foreign_capture, intercepted, open_recorder
from diffgraph.errors import CaptureWarning
from diffgraph.finetuning.pair import Pair, as_new_leaves
from diffgraph.finetuning.state import TrainingState
from diffgraph.finetuning.verification import has_fixed_order, is_close
from diffgraph.options import Options
from diffgraph.reasons import Reason, Refused
from diffgraph.recording.side_effects import drawn_in_python
from diffgraph.recording.signature import Call
from diffgraph.recording.static_inputs import StaticInputs
from diffgraph.routing.entry import MAX_ESCAPES, Entry
from diffgraph.routing.memory import Memory
from diffgraph.routing.routes import Route, Routes
from diffgraph.routing.table import Table
from diffgraph.values.compare import same_bits
from diffgraph.values.tensors import tensors_in, weights_device
from diffgraph.values.tree import unflatten

logger = logging.getLogger("diffgraph")

#: Forwards that may wait for their backwards; each has what it saved in a pool of its own.
MAX_IN_FLIGHT = 8


class GradientRunner:
    """Stands in for a module's call while gradients are recorded."""

    def __init__(self, name: str, positional: tuple[str, ...], options: Options, memory: Memory) -> None:
        self.routes = Routes(f"{name} (training)")
        self.table = Table(f"{name} (training)", positional)
        self.memory = memory
        self._options = options
        self._state: TrainingState | None = None
        self._latest: weakref.WeakValueDictionary[int, Pair] = weakref.WeakValueDictionary()  # that took off, by lane

    def __call__(self, module: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, is_paused: bool) -> Any:
        if open_recorder() is not None or foreign_capture():
            self.routes.note(Route.EAGER, Reason.NESTED_CAPTURE)  # and without our lock: it comes before `RECORDING`
            return forward(*args, **kwargs)
        with self.memory.lock(weights_device(module)):  # eager calls too: the parameters of one in a capture are stand-ins
            try:
                return self._recorded(module, forward, args, kwargs, is_paused)
            except Refused as refused:
                self.routes.note(Route.EAGER, refused.reason, refused.detail)
            return forward(*args, **kwargs)

    def release(self) -> None:
        """Drop everything that is recorded, and all that is known."""
        with nullcontext() if self._state is None else self.memory.lock(self._state.device):
            for entry in self.table.clear():
                self.memory.drop(entry)
            self._state = None

    def _recorded(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any, is_paused: bool) -> Any:
        if is_paused:
            raise Refused(Reason.PAUSED)
        if intercepted():
            raise Refused(Reason.NESTED_CAPTURE)
        state = self._checked_state(module)
        call = Call.of(args, kwargs, state.device)
        call = call._replace(signature=call.signature._replace(lane=self._free_lane()))
        entry = self.table.entries.get(call.signature) or self._new_entry(call)
        self.routes.log.at(entry.label)
        if entry.refused is not None:
            raise Refused(entry.refused)
        if entry.recording is None and entry.seen < entry.wait:
            return self._warm_up(entry, state, forward, args, kwargs)
        route = Route.REPLAY if entry.recording is not None else Route.CAPTURE
        pair = entry.recording or self._capture(entry, state, module, forward, call)
        assert isinstance(pair, Pair)
        if route is Route.REPLAY and self._options.verify and not entry.trusted:
            return self._verify(entry, pair, call, module, forward, args, kwargs)
        self.memory.touch(entry, pair.pool)
        output = pair.call(call)
        self._latest[call.signature.lane] = pair
        entry.replays += route is Route.REPLAY
        entry.recent_replays += 1
        self.routes.note(route)
        state.lasts()
        return output

    def _free_lane(self) -> int:
        """The first lane, from 1 on, in which nothing flies; what flies keeps what it saved in the lane's pool, whatever its
        signature. Raises `Refused` when there is none."""
        flying = {lane for lane, pair in self._latest.items() if pair.in_flight}
        free = next((lane for lane in range(1, MAX_IN_FLIGHT + 1) if lane not in flying), None)
        if free is None:
            raise Refused(Reason.IN_FLIGHT)
        return free

    def _new_entry(self, call: Call) -> Entry:
        entry, lane = self.table.add(call), call.signature.lane
        entry.label += f" (in flight {lane})" if lane > 1 else ""
        # Another lane's forward is as good a warm-up, and fails alike.
        wanted = call.signature._replace(lane=1)
        alike = [e for s, e in self.table.entries.items() if s._replace(lane=1) == wanted and e is not entry]
        entry.seen = int(any(e.seen for e in alike))
        entry.refused = next((e.refused for e in alike if e.refused is not None), None)
        return entry

    def _checked_state(self, module: torch.nn.Module) -> TrainingState:
        state = self._state
        if state is None:
            state = self._state = TrainingState([module], [])
        elif (change := state.look()) is not None:
            logger.info("training: recordings dropped: %s", change)
            for entry in self.table.all_entries():
                self.memory.drop(entry, lost=change)
                entry.seen = 0
                entry.refused = entry.refusal(change)
        if state.refusal is not None:
            raise Refused(state.refusal)
        if not state.gradients.parameters:
            raise Refused(Reason.GRAD_ENABLED, "no parameter wants gradients")
        if state.device.type not in SUPPORTED:
            raise Refused(Reason.UNSUPPORTED_INPUT, f"weights on {state.device}")
        return state

    # -- the routes

    def _warm_up(self, entry: Entry, state: TrainingState, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.routes.note(Route.EAGER, entry.lost or Reason.UNSEEN_SIGNATURE)
        pool = self.memory.pool(state.device)
        rng, drawn = pool.rng_state(), drawn_in_python()
        output = forward(*args, **kwargs)
        if not pool.replayable_rng(rng):
            self.memory.drop(entry, refused=Reason.SIDE_EFFECTS)
        elif state.change() is None and drawn_in_python() == drawn:
            entry.seen += 1
        else:
            state.take()
            entry.escapes += 1
            if entry.escapes > MAX_ESCAPES:
                self.memory.drop(entry, refused=Reason.SIDE_EFFECTS)
        return output

    def _capture(
        self, entry: Entry, state: TrainingState, module: torch.nn.Module, forward: Callable[..., Any], call: Call
    ) -> Pair:
        pool = self.memory.pool(state.device, call.signature.lane)
        before = pool.bytes()
        try:
            with torch.no_grad():
                inputs = StaticInputs(call)
            pair = Pair(inputs, pool, state.gradients.parameters)
            pair.record(forward, module)
        except torch.OutOfMemoryError:
            self.memory.drop(entry, refused=Reason.OUT_OF_MEMORY)
            raise Refused(Reason.OUT_OF_MEMORY) from None
        except Exception as error:
            self.memory.drop(entry, refused=Reason.CAPTURE_FAILED)
            warnings.warn(f"diffgraph: {entry.label} runs eager: {error}", CaptureWarning, stacklevel=6)
            raise Refused(Reason.CAPTURE_FAILED, str(error)) from error
        if pair.escaped or state.change() is not None:
            pair.release()
            self.memory.drop(entry, refused=Reason.SIDE_EFFECTS)
            raise Refused(Reason.SIDE_EFFECTS)
        entry.recording, entry.lost = pair, None
        entry.memory_bytes = pool.bytes() - before
        if not self.memory.admit(entry, pool):
            entry.refused = Reason.OUT_OF_MEMORY
        if entry.recording is None:  # others that are in flight leave it no room
            raise Refused(entry.refused or Reason.EVICTED)
        return pair

    def _verify(
        self, entry: Entry, pair: Pair, call: Call, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Both are compared and undone. What is returned is eager's, also where memory runs out."""
        is_same: bool | None = None
        with suppress(torch.OutOfMemoryError):
            is_same = _is_like_eager(pair, call, module, forward)
        output = forward(*args, **kwargs)
        if is_same:
            entry.trusted = True
            entry.replays += 1
            self.routes.note(Route.REPLAY)
            return output
        reason = Reason.OUT_OF_MEMORY if is_same is None else Reason.VERIFY_FAILED
        self.routes.note(Route.EAGER, reason)
        self.memory.drop(entry, refused=reason)
        if is_same is False:
            warnings.warn(f"diffgraph: {entry.label} runs eager: its replay differed from eager", CaptureWarning, stacklevel=6)
        return output


def _is_like_eager(pair: Pair, call: Call, module: torch.nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether a replay gives what eager gives from the same state, with the outputs for gradients. Nothing is left of either."""
    before, rng = pair.log.contents(), pair.pool.rng_state()

    def undo() -> None:
        pair.log.restore(before)
        pair.pool.set_rng_state(rng)

    try:
        with torch.no_grad():
            tensors = _fresh(pair.run(call), call)
            incoming = pair.of_wanting(tensors)
            gradients = pair.run_backward(incoming)
    finally:
        undo()
    alone = _without_history(call)
    args, kwargs = unflatten(alone.spec, alone.leaves)
    try:
        with RECORDING, as_new_leaves(module, pair.parameters) as leaves:
            wanted = _fresh(forward(*args, **kwargs), alone)
            wanting = [t for t in wanted if t.requires_grad]
            found = torch.autograd.grad(wanting, [*pair.wanting_inputs(alone), *leaves], incoming, allow_unused=True)
    finally:
        undo()
    return (same_bits if has_fixed_order(pair.pool) else is_close)((tensors, gradients), (wanted, list(found)))


def _without_history(call: Call) -> Call:
    """The same on tensors that nothing has led to: the gradients of one forward would run on through those before it."""
    made = {id(t): t.detach().requires_grad_(t.requires_grad) for t in call.leaves if isinstance(t, torch.Tensor)}
    return call._replace(leaves=[made.get(id(leaf), leaf) for leaf in call.leaves])


def _fresh(output: Any, call: Call) -> list[torch.Tensor]:
    """The distinct tensors among an output that are not the caller's own."""
    given = set(map(id, call.leaves))
    return list({id(t): t for t in tensors_in(output) if id(t) not in given}.values())
