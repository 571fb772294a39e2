"""The way of a call: signature, table look-up, guards, then the route that `visit` takes: replay, capture or eager."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from diffgraph.compiling.blocks import BlockCompiler
from diffgraph.compiling.users import as_piece, is_compiled
from diffgraph.engine.current import foreign_capture, intercepted, open_recorder
from diffgraph.errors import HostValueChanged
from diffgraph.options import Options
from diffgraph.parallel.ranks import Intent, Ranks, parallel_config, ranks_of
from diffgraph.prompts.buckets import PromptBuckets
from diffgraph.reasons import Reason, Refused
from diffgraph.recording.capture import Recording
from diffgraph.recording.signature import Call
from diffgraph.routing.entry import MAX_ESCAPES, PAYS_AFTER, Entry
from diffgraph.routing.insistence import Insistence
from diffgraph.routing.memory import Memory
from diffgraph.routing.pause import Pause
from diffgraph.routing.routes import Route, Routes
from diffgraph.routing.state import State
from diffgraph.routing.table import Table
from diffgraph.routing.visit import Visit
from diffgraph.shapes.capture_shape import CaptureShape
from diffgraph.shapes.traffic import asked_shape
from diffgraph.values.tensors import weights_device

if TYPE_CHECKING:
    from diffgraph.finetuning.module import GradientRunner

logger = logging.getLogger("diffgraph")

#: So many recordings may not pay before new signatures are made to wait.
FREE_CAPTURES = 16


class Runner:
    """Stands in for a module's call. Knows the module weakly, so that it does not keep its weights alive."""

    def __init__(self, name: str, module: torch.nn.Module, options: Options, memory: Memory) -> None:
        self.name = name
        self.options = options
        self.memory = memory
        self.routes = Routes(name)
        self.insistence = Insistence()
        # What the recordings hold would otherwise keep the weights until the garbage collector finds the cycle.
        self._module = weakref.ref(module, partial(_release, weakref.ref(self)))
        self.wrapped = module.__dict__.get("_compiled_call_impl")  # the user's own `module.compile()`
        self.positional = tuple(inspect.signature(type(module).forward).parameters)[1:]
        self.table = Table(name, self.positional)
        self.state = State(options, self.positional)
        self.break_ops: set[Any] = set()  # which failed to be recorded
        self.training: GradientRunner | None = None  # takes the calls under gradients
        self._parallel_config: Any = None
        self._ranks: Ranks | None = None
        self.compiler = None if options.compile_blocks is None else BlockCompiler(options.compile_blocks)
        self.pause = Pause()
        self._paid = 0  # recordings that have
        self._thread = threading.local()
        self.has_buckets = False  # prompts of many lengths share recordings, as far as the calls made to record have shown
        self.shapes: list[CaptureShape] = []  # recorded through a pipeline so far
        self._state_lock = threading.RLock()

    # -- the door

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None  # its own call brought us here
        if torch.compiler.is_compiling():  # Dynamo would trace us
            return self._forward(module)(*args, **kwargs)
        if self.training is not None and torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return self.training(module, self._forward(module), args, kwargs, self.pause.is_on)
        probe = getattr(self._thread, "probe", None)
        if probe is not None:
            return probe(self, module, args, kwargs)
        try:
            if self.insistence.wants_every_bucket:
                self._record_every_bucket(module, args, kwargs)
            return self.routed(module, args, kwargs)
        except Refused as refused:
            ranks = self._ranks_of(module)
            if ranks is not None and ranks.is_deciding and ranks.least(Intent.EAGER, "", self.name) is None:
                self._check_apart(ranks, module, str(refused))
            self.routes.note(Route.EAGER, refused.reason, refused.detail)
        return self.eager(module, args, kwargs)

    def eager(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ranks = self._ranks_of(module)
        issued = None if ranks is None else ranks.issued()
        try:
            return self._forward(module)(*args, **kwargs)
        except torch.OutOfMemoryError:
            # Eager alone might have fitted: give back what is ours, and try once more.
            if not any(entry.recording for entry in self.table.all_entries()):
                raise
            if ranks is not None and ranks.issued() != issued:
                raise  # the other ranks wait for the rest, and not for all of it once more
        self.release()
        torch.cuda.empty_cache()
        return self._forward(module)(*args, **kwargs)

    def _forward(self, module: torch.nn.Module) -> Any:
        return self.wrapped if self.wrapped is not None else module._call_impl

    def run_forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward for recordings to keep: one bound to the module would keep its weights alive."""
        module = self._module()
        assert module is not None
        forward = self._forward(module)
        if is_compiled(module):
            forward = as_piece(forward)
        return forward(*args, **kwargs)

    def routed(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ranks = self._ranks_of(module)
        if ranks is not None:
            ranks.begin()
        self.check_surroundings()  # first of all: inside an open capture nothing may be dropped either
        with self._state_lock:
            device, prompts = self._check_state(module)
        call = Call.padded(args, kwargs, device, prompts)
        pool = self.memory.pool(device)
        with pool.lock:
            if pool.in_turn:  # a break of another recording of this pool called us
                raise Refused(Reason.NESTED_CAPTURE)
            entry = self._entry(call, prompts, args, kwargs)
            self.routes.log.at(entry.label)
            if not entry.is_met and not self.insistence.is_on:
                entry.is_met, entry.shape = True, asked_shape(call.prompt)
            if self.insistence.is_on:
                self.memory.asked_for += entry.met == 0
                entry.met = self.insistence.number
                for known in entry.values.recorded():
                    if known.insistence != self.insistence.number:
                        self.memory.drop(known)
            if entry.values.resting():
                raise Refused(Reason.HOST_VALUE_CHANGED)
            visit = Visit(self, module, args, kwargs, call, entry, pool, ranks)
            changed: HostValueChanged | None = None
            wish = None if ranks is None else self._agree(ranks, visit)
            if wish is not None and wish >= Intent.VERIFY:
                return self._replay_together(visit, wish)
            for known in entry.values.recorded():
                try:
                    return visit._replace(entry=known).replay()
                except HostValueChanged as error:
                    changed = error.with_traceback(None)  # whose frames would keep the inputs alive
            if changed is not None:
                visit = visit._replace(entry=self._entry_for_other_values(module, entry, changed))
            is_due = self.route(entry) is Route.CAPTURE if wish is None else wish is Intent.CAPTURE
            if changed is not None or is_due:
                return visit.capture()
        return visit.warm_up()

    # -- with other ranks

    def _ranks_of(self, module: torch.nn.Module) -> Ranks | None:
        config = parallel_config(module)
        if config is not self._parallel_config:
            self._parallel_config, self._ranks = config, ranks_of(module)
            if self._ranks is not None:
                self._ranks.join(self)
        return self._ranks

    def recorded(self) -> dict[str, bool]:
        """The signatures that are recorded, and whether their recordings are trusted."""
        return {s.key(): e.trusted for s, e in self.table.entries.items() if e.recording is not None}

    def keep(self, common: dict[str, bool]) -> None:
        """Drop the recordings that are not among these, and trust none that these do not."""
        for signature, entry in list(self.table.entries.items()):
            if entry.recording is None:
                continue
            if signature.key() in common:
                entry.trusted &= common[signature.key()]
            else:
                self.memory.drop(entry, lost=Reason.OTHER_RANK)

    def _agree(self, ranks: Ranks, visit: Visit) -> Intent:
        """What all ranks do with this call: the least that any of them would. Raises `Refused` where that is nothing."""
        entry, recording = visit.entry, visit.entry.recording
        if recording is None:
            wish = Intent.CAPTURE if self.route(entry) is Route.CAPTURE else Intent.WARM_UP
        else:
            is_trusted = not self.options.verify or entry.is_trusted(visit.call.prompt)
            wish = Intent.REPLAY if is_trusted else Intent.VERIFY
        if wish is Intent.REPLAY and ranks.goes_alone():
            return wish
        agreed = ranks.least(wish, visit.call.signature.key(), entry.label)
        if agreed is None and wish is not Intent.REPLAY:
            self._check_apart(ranks, visit.module, str(entry.lost or Reason.UNSEEN_SIGNATURE))
            agreed = Intent.EAGER
        if agreed is None:
            return wish
        if agreed is Intent.EAGER:
            raise Refused(Reason.OTHER_RANK)
        if agreed < Intent.VERIFY and recording is not None:
            self.memory.drop(entry, lost=Reason.OTHER_RANK)
        entry.trusted &= agreed is not Intent.VERIFY
        return agreed

    def _check_apart(self, ranks: Ranks, module: torch.nn.Module, why: str) -> None:
        """Some rank has begun this call as a replay, and this one cannot. Eager issues the same collectives, but where replays
        are graphs NCCL wants each of them to be part of a graph on all ranks, or on none."""
        if self.options.collectives == "record" and weights_device(module).type != "cpu":
            raise ranks.parted(f"{self.name} cannot replay a call that another rank has begun to replay: {why}")

    def _replay_together(self, visit: Visit, agreed: Intent) -> Any:
        try:
            return visit.replay()
        except Refused as refused:
            if agreed is Intent.REPLAY and visit.ranks is not None:  # where it is verified, all ranks have given up
                self._check_apart(visit.ranks, visit.module, str(refused))
            raise
        except HostValueChanged as changed:
            self.memory.drop(visit.entry, lost=Reason.HOST_VALUE_CHANGED)
            raise Refused(Reason.HOST_VALUE_CHANGED, str(changed)) from None

    def _record_every_bucket(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make calls like this one with prompts as long as each bucket, so that they are recorded."""
        with self._state_lock:
            device, prompts = self._check_state(module)
        padded = None if prompts is None else prompts.padded(args, kwargs)
        if prompts is None or padded is None:
            return
        step = self.insistence.step(Call.of(padded.args, padded.kwargs, device).signature)
        for resized in prompts.every(args, kwargs) if step <= 2 else ():
            self.has_buckets = True
            entry = self.table.entries.get(Call.of(resized.args, resized.kwargs, device).signature)
            missing = entry is None or entry.met != self.insistence.number
            # The pipeline's second step, of other values, verifies what the first has recorded.
            if missing or (step == 2 and entry is not None and entry.recording is not None and not entry.trusted):
                try:
                    self.routed(module, resized.args, resized.kwargs)
                except Refused:
                    pass
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:  # longer than the forward accepts: no call will come with such a prompt
                    self._give_up(Call.of(resized.args, resized.kwargs, device), error)

    def _give_up(self, call: Call, error: Exception) -> None:
        """Not to be recorded: the forward raises for a prompt that nobody asked for."""
        logger.info("%s: the forward raises %r", self.table.label(call.signature), error)
        entry = self.table.entries.get(call.signature)
        if entry is not None:
            self.memory.drop(entry, refused=Reason.CAPTURE_FAILED)

    # -- deciding

    def check_surroundings(self) -> None:
        """Raises `Refused` where no call of this thread may be recorded or replayed, whatever it is given."""
        if self.pause.is_on:
            raise Refused(Reason.PAUSED)
        if torch.is_grad_enabled():
            raise Refused(Reason.GRAD_ENABLED)
        if open_recorder() is not None or foreign_capture() or intercepted():
            raise Refused(Reason.NESTED_CAPTURE)

    def _check_state(self, module: torch.nn.Module) -> tuple[torch.device, PromptBuckets | None]:
        """The device of the weights, and how prompts are padded. Drops every recording when what it relies on has changed; raises
        `Refused` when nothing can be relied on."""
        state = self.state
        if state.is_resting:
            if state.rest():
                self._drop_all(state.last_change)
            raise Refused(state.last_change)
        change = state.look(module)
        if change is not None:
            self._drop_all(state.last_change)
            logger.info("%s: recordings dropped: %s", self.name, change)
        found = state.conditions
        if found.refusal is not None:
            raise Refused(found.refusal)
        return found.device, found.prompts

    def _drop_all(self, reason: Reason) -> None:
        for entry in self.table.all_entries():
            self.memory.drop(entry, lost=reason if entry.recording is not None else entry.lost or entry.refused)
            entry.seen = 0
            entry.refused = entry.refusal(reason)

    def _entry(self, call: Call, prompts: PromptBuckets | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """What is known of this call's signature; raises `Refused` when it is new and not to be recorded."""
        entry = self.table.entries.get(call.signature)
        if entry is not None:
            return entry
        if not self.may_capture():
            self.routes.log.at(self.table.note_unseen(call))
            raise Refused(unforeseen(prompts, args, kwargs))
        return self.table.add(call)

    def may_capture(self) -> bool:
        return self.options.capture == "on_demand" or self.insistence.is_on

    def route(self, entry: Entry, change: Reason | None = None) -> Route:
        """Whether a call that nothing recorded fits is recorded, or runs eagerly to be recorded later; raises `Refused` where it
        never will be. `change`: of state, which is seen and not yet acted upon."""
        refused = entry.refusal(change)
        if refused is not None:
            raise Refused(refused)
        if not self.may_capture():
            raise Refused(change or entry.lost or Reason.UNSEEN_SIGNATURE)
        return Route.CAPTURE if change is None and entry.seen >= self._wait(entry) else Route.EAGER

    def _entry_for_other_values(self, module: torch.nn.Module, entry: Entry, changed: HostValueChanged) -> Entry:
        """Where to record a call whose host values no recording of its signature fits; raises `Refused` when it is not to be."""
        values, known = entry.values, entry.values.recorded()
        worth = values.missed()
        if not self.may_capture():
            raise Refused(Reason.HOST_VALUE_CHANGED, str(changed))
        readers = [reader for e in known if e.recording for reader in e.recording.readers()]
        if not worth and values.widen(_like(changed.reader, readers, module)):
            worth = True
            for recorded in known:
                self.memory.drop(recorded)
        elif not worth:
            for recorded in known:
                if recorded.recent_replays == 0:
                    self.memory.drop(recorded, lost=Reason.HOST_VALUE_CHANGED)
        room = values.room() if worth else None
        if room is None:
            raise Refused(Reason.HOST_VALUE_CHANGED, str(changed))
        self.memory.drop(room)
        return room

    def _wait(self, entry: Entry) -> int:
        """Eager calls of its signature before the one that is recorded."""
        return 1 if self.insistence.is_on else max(entry.wait, self._patience())

    def _patience(self) -> int:
        """Eager calls that a new signature is to wait: more where most do not come again (a prompt length each time)."""
        unpaid = self.routes.taken[Route.CAPTURE.value] - 2 * self._paid - FREE_CAPTURES
        return 1 if unpaid <= 0 else 2 ** min(unpaid // 4 + 1, 10)

    # -- the three routes

    def changed_state(self, module: torch.nn.Module, entry: Entry) -> bool:
        """Whether the forward itself, while it ran eagerly, changed what recordings rely on: a cache that fills, which is over by
        the next call, or state, which is not. What others have recorded may rely on what was there before."""
        change = self.state.change()
        if change is None:
            return False
        self.state.take(module)
        for other in self.table.all_entries():
            if other.recording is None:
                continue
            # Most likely a cache that fills: then nothing need be recorded again, only compared.
            if self.options.verify and change is Reason.ATTRIBUTES_CHANGED and other is not entry:
                other.trusted, other.trusted_padded, other.doubted = False, False, True
            else:
                self.memory.drop(other, lost=change)
        self.note_escape(entry)
        return True

    def note_escape(self, entry: Entry) -> None:
        entry.escapes += 1
        if entry.escapes > MAX_ESCAPES:
            self.memory.drop(entry, refused=Reason.SIDE_EFFECTS)

    def note_replay(self, entry: Entry, recording: Recording) -> None:
        self.state.lasts()
        entry.values.fitted(entry)
        self.memory.touch(entry, recording.pool)
        entry.replays += 1
        entry.recent_replays += 1
        self._paid += entry.recent_replays == PAYS_AFTER
        self.routes.note(Route.REPLAY)

    # -- for the door and the report

    def __bool__(self) -> bool:
        # peft takes a true `_compiled_call_impl` for torch.compile's and then refuses to prepare LoRA hot-swapping.
        return False

    def release(self) -> None:
        """Drop everything that is recorded, and all that is known. Takes no lock of ours while it waits for a pool's."""
        self.state.fingerprint = None
        if self.training is not None:
            self.training.release()
        for entry in self.table.clear():
            self.memory.drop(entry)

    def forgive(self) -> None:
        """Forget refusals and waits: what was refused may be tried again."""
        self.state.forgive()
        if self.compiler is not None:
            self.compiler.forgive()
        for entry in self.table.all_entries():
            entry.refused, entry.lost, entry.unpaid, entry.escapes = None, None, 0, 0
            entry.values.forgive()

    def plainly(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forward, neither recorded nor counted."""
        return self._forward(module)(*args, **kwargs)

    def pending_change(self) -> Reason | None:
        """What has changed since recordings were made, and is not acted upon before the next call."""
        with self._state_lock:
            return self.state.last_change if self.state.is_resting else self.state.change()

    @contextmanager
    def probed(self, probe: Callable[[Runner, torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]) -> Iterator[None]:
        """Inside, this thread's calls go to `probe` and not to the denoiser."""
        self._thread.probe = probe
        try:
            yield
        finally:
            self._thread.probe = None

    def missing(self) -> list[Entry]:
        """What the latest `diffgraph.capture` has met and not recorded."""
        return [e for e in self.table.entries.values() if e.met == self.insistence.number and not e.values.recorded()]


def _release(runner: weakref.ref[Runner], _: Any) -> None:
    found = runner()
    if found is not None and not sys.is_finalizing():
        found.release()


def unforeseen(prompts: PromptBuckets | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reason:
    """Why nothing is recorded for a call of a new signature where only start-up records."""
    too_long = prompts is not None and prompts.too_long(args, kwargs)
    return Reason.PROMPT_TOO_LONG if too_long else Reason.UNSEEN_SIGNATURE


def _like(reader: torch.nn.Module | None, readers: list[torch.nn.Module], module: torch.nn.Module) -> list[str]:
    """The names of the submodules that read on the host what `reader` does: those of its class. None for `module` itself."""
    if reader is None:
        return []
    wanted = {id(found) for found in (reader, *readers) if type(found) is type(reader)}
    return [name for name, submodule in module.named_modules() if name and id(submodule) in wanted]
