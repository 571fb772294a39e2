"""Calls of a module under gradients: the way of `Runner`, with a backward to come."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch

from diffgraph.compare import same_bits
from diffgraph.current import foreign_capture, intercepted, open_recorder
from diffgraph.devices import SUPPORTED
from diffgraph.entry import Entry
from diffgraph.errors import CaptureWarning
from diffgraph.finetuning.pair import Pair
from diffgraph.finetuning.state import TrainingState
from diffgraph.finetuning.verification import is_close
from diffgraph.memory import Memory
from diffgraph.options import Options
from diffgraph.reasons import Reason
from diffgraph.routes import Route, Routes
from diffgraph.signature import Call, Refused
from diffgraph.static_inputs import StaticInputs
from diffgraph.table import Table
from diffgraph.tensors import tensors_in

logger = logging.getLogger("diffgraph")

#: Forwards that may wait for their backwards; each has what it saved in a pool of its own.
MAX_IN_FLIGHT = 8


class Lanes:
    """Pools by how many forwards are in flight: the first of them in the first, whatever their signatures."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._memories: list[Memory] = []
        self._flying: list[Pair | None] = []

    def free(self) -> int:
        """The first lane in which nothing flies. Raises `Refused` when there is none."""
        for i, pair in enumerate(self._flying):
            if pair is None or not pair.in_flight:
                return i
        if len(self._flying) == MAX_IN_FLIGHT:
            raise Refused(Reason.IN_FLIGHT)
        self._memories.append(Memory(self._options))
        self._flying.append(None)
        return len(self._flying) - 1

    def memory(self, lane: int) -> Memory:
        return self._memories[lane]

    def take(self, lane: int, pair: Pair) -> None:
        self._flying[lane] = pair

    def bytes(self) -> int:
        return sum(memory.bytes() for memory in self._memories)


class GradientRunner:
    """Stands in for a module's call while gradients are recorded."""

    def __init__(self, name: str, positional: tuple[str, ...], options: Options) -> None:
        self.routes = Routes(f"{name} (training)")
        self.table = Table(f"{name} (training)", positional)
        self.memory = Lanes(options)
        self._options = options
        self._state: TrainingState | None = None

    def __call__(self, module: torch.nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any, is_paused: bool) -> Any:
        try:
            return self._recorded(module, forward, args, kwargs, is_paused)
        except Refused as refused:
            self.routes.note(Route.EAGER, refused.reason, refused.detail)
        return forward(*args, **kwargs)

    def release(self) -> None:
        for entry in self.table.clear():
            self._drop(entry)
        self._state = None

    def _recorded(self, module: Any, forward: Callable[..., Any], args: Any, kwargs: Any, is_paused: bool) -> Any:
        if is_paused:
            raise Refused(Reason.PAUSED)
        if open_recorder() is not None or foreign_capture() or intercepted():
            raise Refused(Reason.NESTED_CAPTURE)
        state = self._checked_state(module)
        lane = self.memory.free()
        call = Call.of(args, kwargs, state.device)
        call = call._replace(signature=call.signature._replace(mode=(*call.signature.mode, lane)))
        entry = self.table.entries.get(call.signature)
        if entry is None:
            entry = self.table.add(call)
            entry.label += f" (in flight {lane + 1})" if lane else ""
            # Another lane's forward is as good a warm-up, and fails alike.
            alike = [e for s, e in self.table.entries.items() if _like(s, call) and e is not entry]
            entry.seen = int(any(e.seen for e in alike))
            entry.refused = next((e.refused for e in alike if e.refused is not None), None)
        self.routes.log.at(entry.label)
        if entry.refused is not None:
            raise Refused(entry.refused)
        if entry.recording is None and entry.seen == 0:
            return self._warm_up(entry, state, forward, args, kwargs)
        route = Route.REPLAY if entry.recording is not None else Route.CAPTURE
        pair = entry.recording or self._capture(entry, state, module, forward, call, lane)
        assert isinstance(pair, Pair)
        if route is Route.REPLAY and self._options.verify and not entry.trusted:
            return self._verify(entry, pair, call, forward, args, kwargs)
        self.memory.memory(lane).touch(entry, pair.pool)
        output = pair.call(call)
        self.memory.take(lane, pair)
        entry.replays += route is Route.REPLAY
        entry.recent_replays += 1
        self.routes.note(route)
        state.lasts()
        return output

    def _checked_state(self, module: torch.nn.Module) -> TrainingState:
        state = self._state
        if state is None:
            state = self._state = TrainingState([module], [])
        elif (change := state.look()) is not None:
            logger.info("training: recordings dropped: %s", change)
            for entry in self.table.all_entries():
                self._drop(entry, lost=change)
                entry.seen = 0
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
        pool = self.memory.memory(0).pool(state.device)
        rng = pool.rng_state()
        output = forward(*args, **kwargs)
        if not pool.replayable_rng(rng):
            self._drop(entry, refused=Reason.SIDE_EFFECTS)
        elif state.change() is None:
            entry.seen += 1
        else:
            state.take()
            entry.escapes += 1
            if entry.escapes > 2:
                self._drop(entry, refused=Reason.SIDE_EFFECTS)
        return output

    def _capture(
        self, entry: Entry, state: TrainingState, module: torch.nn.Module, forward: Callable[..., Any], call: Call, lane: int
    ) -> Pair:
        memory = self.memory.memory(lane)
        pool = memory.pool(state.device)
        before = pool.bytes()
        try:
            with torch.no_grad():
                inputs = StaticInputs(call)
            pair = Pair(inputs, memory, pool, state.gradients.parameters)
            pair.record(forward, module)
        except torch.OutOfMemoryError:
            self._drop(entry, refused=Reason.OUT_OF_MEMORY)
            raise Refused(Reason.OUT_OF_MEMORY) from None
        except Exception as error:
            self._drop(entry, refused=Reason.CAPTURE_FAILED)
            warnings.warn(f"diffgraph: {entry.label} runs eager: {error}", CaptureWarning, stacklevel=6)
            raise Refused(Reason.CAPTURE_FAILED, str(error)) from error
        if pair.escaped or state.change() is not None:
            pair.release()
            self._drop(entry, refused=Reason.SIDE_EFFECTS)
            raise Refused(Reason.SIDE_EFFECTS)
        entry.recording, entry.lost = pair, None
        entry.memory_bytes = pool.bytes() - before
        if not memory.admit(entry, pool):
            entry.refused = Reason.OUT_OF_MEMORY
            raise Refused(Reason.OUT_OF_MEMORY)
        return pair

    def _verify(self, entry: Entry, pair: Pair, call: Call, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Both, with the outputs for gradients, from the same state; eager's outcome is kept."""
        before, rng = pair.log.contents(), pair.pool.rng_state()
        with torch.no_grad():
            replayed = pair.run(call)
            incoming = pair.of_wanting(_fresh(replayed, call))
            gradients = pair.run_backward(incoming)
        pair.log.restore(before)
        pair.pool.set_rng_state(rng)
        output = forward(*args, **kwargs)
        wanting = [t for t in _fresh(output, call) if t.requires_grad]
        tensors = [*[t for t in pair._distinct(call) if t.requires_grad], *pair.parameters]
        wanted = torch.autograd.grad(wanting, tensors, incoming, allow_unused=True, retain_graph=True)
        found, expected = (_fresh(replayed, call), gradients), (_fresh(output, call), list(wanted))
        exact = pair.pool.runs_while_recording or torch.are_deterministic_algorithms_enabled()
        entry.trusted = same_bits(found, expected) if exact else is_close(found, expected)
        if entry.trusted:
            entry.replays += 1
            self.routes.note(Route.REPLAY)
        else:
            self.routes.note(Route.EAGER, Reason.VERIFY_FAILED)
            self._drop(entry, refused=Reason.VERIFY_FAILED)
            warnings.warn(f"diffgraph: {entry.label} runs eager: its replay differed from eager", CaptureWarning, stacklevel=6)
        return output

    def _drop(self, entry: Entry, *, lost: Reason | None = None, refused: Reason | None = None) -> None:
        if entry.recording is not None:
            if isinstance(entry.recording, Pair):
                entry.recording.memory.forget(entry, entry.recording.pool)
            entry.release()
        entry.lost, entry.refused = lost, refused or entry.refused


def _like(signature: Any, call: Call) -> bool:
    return signature._replace(mode=signature.mode[:-1]) == call.signature._replace(mode=call.signature.mode[:-1])


def _fresh(output: Any, call: Call) -> list[torch.Tensor]:
    """The distinct tensors among an output that are not the caller's own."""
    given = set(map(id, call.leaves))
    return list({id(t): t for t in tensors_in(output) if id(t) not in given}.values())
