"""The way of a training step: signature, table look-up, guards, then replay, capture or eager."""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from diffgraph.devices import SUPPORTED
from diffgraph.engine.current import foreign_capture, intercepted, open_recorder
from diffgraph.engine.ranges import named
from diffgraph.errors import CaptureWarning, NotAcceleratedError, OptionError, OptionTypeError, ReplayError
from diffgraph.finetuning import optimizers as optimizers_of
from diffgraph.finetuning.reads import Reads, change
from diffgraph.finetuning.state import TrainingState
from diffgraph.finetuning.step_recording import StepRecording, capture_step, detached, run_eagerly
from diffgraph.finetuning.undo import undone
from diffgraph.finetuning.verification import replay_and_compare
from diffgraph.finetuning.watch import Watch
from diffgraph.options import Options, checked
from diffgraph.reasons import Reason, Refused
from diffgraph.recording.side_effects import drawn_in_python
from diffgraph.recording.signature import MAX_LEAVES, Call, describe_leaf
from diffgraph.routing.entry import Entry
from diffgraph.routing.memory import Memory
from diffgraph.routing.pause import Pause
from diffgraph.routing.routes import Route, Routes
from diffgraph.routing.table import Table

logger = logging.getLogger("diffgraph")

#: Eager steps that may each leave something changed (state that is made, a cache that fills) before a signature is given up.
MAX_UNSTEADY = 3


def record_training_step(
    step_fn: Callable[..., Any],
    *sample_batch: Any,
    optimizer: Any = (),
    model: Any = (),
    max_graphs: int | None = None,
    memory_limit: int | float | str | None = None,
    verify: bool = True,
    poison: bool = False,
    **unknown: Any,
) -> TrainingStep:
    """A training step that is recorded once per batch signature, and replayed: forward, loss, backward, clipping, optimizer.

    Call what it returns with each batch, in place of `step_fn`. The first call of a signature runs eagerly and serves as warm-up,
    the next is recorded (and *is* that step), the rest replay; each gives, to the bit, what `step_fn` gives, and leaves
    parameters, gradients, the optimizer's state and random numbers as `step_fn` would. What cannot be recorded runs eagerly, and
    `diffgraph.report(step)` says why.

    Learning-rate schedulers, `EMAModel.step`, logging and evaluation go between the steps, not into `step_fn`: of its Python, a
    replay runs nothing. For gradient accumulation, give it a flag: `step(batch, accumulate=True)` is a signature of its own.

    Args:
        step_fn: one step: from a batch to whatever is to be returned (tensors, plain values, or containers of them).
        sample_batch: arguments as `step_fn` takes them, to warm up with at once. That step is undone: parameters, gradients, the
            optimizer's state and random numbers are as before, and it counts as the first call of its signature.
        optimizer: the one that `step_fn` steps, or several. Its rate must be a tensor (`lr=torch.tensor(1e-4)`), and its step
            must not read on the host: `capturable=True` on CUDA, `fused=True` on the CPU device.
        model: the module that is trained, or several: all whose forward `step_fn` runs.
        max_graphs, memory_limit: as in `accelerate_pipeline`.
        verify: run each recording's first replay and eager from the same state, compare all that they leave, and keep eager's.
            To the bit; on a GPU without `torch.use_deterministic_algorithms(True)`, but for the noise of eager's own kernels.
        poison: (CPU device) as in `GraphSequence`.

    Raises:
        OptionError, OptionTypeError: for what is not accepted; nothing is changed then.

    Example:
        >>> optimizer = torch.optim.AdamW(lora, lr=torch.tensor(1e-4), capturable=True)
        >>> def train(latents, prompt):
        ...     loss = loss_of(transformer, latents, prompt)
        ...     loss.backward()
        ...     torch.nn.utils.clip_grad_norm_(lora, 1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss
        >>> step = diffgraph.record_training_step(train, optimizer=optimizer, model=transformer)
        >>> for latents, prompt in batches:
        ...     loss = step(latents, prompt)
        ...     scheduler.step()
    """
    if not callable(step_fn) or isinstance(step_fn, torch.nn.Module):
        raise OptionTypeError(
            f"step_fn is of type {type(step_fn).__name__}; accepted: a function that makes one training step of a batch"
        )
    if unknown:
        accepted = "optimizer, model, max_graphs, memory_limit, verify, poison"
        raise OptionTypeError(f"unknown option {', '.join(map(repr, unknown))}; accepted: {accepted}")
    options = checked(
        backend="breakable",
        capture="on_demand",
        has_shapes=False,
        compile_blocks=False,
        prompt_buckets=None,
        breaks="auto",
        collectives="record",
        max_graphs=max_graphs,
        memory_limit=memory_limit,
        verify=verify,
        poison=poison,
        unknown={},
    )
    modules = _modules(model)
    step = TrainingStep(step_fn, modules, optimizers_of.checked(optimizer), options)
    if sample_batch:
        step.warm_up_and_undo(sample_batch)
    return step


class TrainingStep:
    """What `record_training_step` returns: call it with each batch. `close()` gives back what it holds."""

    def __init__(
        self,
        step_fn: Callable[..., Any],
        modules: list[torch.nn.Module],
        optimizers: list[torch.optim.Optimizer],
        options: Options,
    ) -> None:
        self.name = getattr(step_fn, "__name__", "step")
        self.options = options
        self.memory = Memory(options)
        self.routes = Routes(self.name)
        self.table = Table(self.name, _parameter_names(step_fn))
        self._step_fn, self._modules, self._optimizers = step_fn, modules, optimizers
        self._reads = Reads(step_fn)
        self.pause = Pause()
        self._unfit: str | None = None  # why the optimizers cannot be recorded any more
        self._just_changed: Reason | None = None  # since the last step
        self._moves = 0  # warm-ups in a row that changed a value which is part of the signature
        problem = self._problem()
        if problem is not None:
            raise OptionError(problem[1])
        self._state = TrainingState(modules, optimizers)
        if not self._state.gradients.parameters:
            raise OptionError("no parameter of the model wants gradients; accepted: a model with some that are to be trained")

    def __call__(self, *batch: Any, **options: Any) -> Any:
        try:
            return self._recorded(batch, options)
        except Refused as refused:
            self.routes.note(Route.EAGER, refused.reason, refused.detail)
        return detached(self._step_fn(*batch, **options))

    def close(self) -> None:
        """Give back the memory of all recordings. Later calls start afresh, with an eager step."""
        for entry in self.table.clear():
            self.memory.drop(entry)

    # -- deciding

    def _recorded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_surroundings()
        self._check_state()
        call = self._call(args, kwargs)
        entry = self._entry(call, kwargs)
        self.routes.log.at(entry.label)
        if entry.refused is not None:
            raise Refused(entry.refused)
        pool = self.memory.pool(self._state.device)
        with pool.lock:
            if pool.in_turn:
                raise Refused(Reason.NESTED_CAPTURE)
            if entry.recording is not None:
                return self._replay(entry, call, args, kwargs)
            if entry.seen > 0:
                return self._capture(entry, call)
            return self._warm_up(entry, args, kwargs)

    def _check_surroundings(self) -> None:
        if self.pause.is_on:
            raise Refused(Reason.PAUSED)
        if open_recorder() is not None or foreign_capture() or intercepted():
            raise Refused(Reason.NESTED_CAPTURE)
        if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
            raise Refused(Reason.UNSUPPORTED_INPUT, "no gradients are recorded around the call")
        if torch.is_autocast_enabled(self._state.device.type):  # its cache outlives the step, and changes the bits
            raise Refused(Reason.UNSUPPORTED_INPUT, "autocast is on around the call; accepted: autocast inside the step")

    def _check_state(self) -> None:
        """Drops every recording when what it relies on has changed; raises `Refused` when nothing can be relied on."""
        problem = self._problem()
        if problem is not None:
            self._drop_all(problem[0])
            raise Refused(*problem)
        found = self._state.look()
        if found is None and self._reads.replaced() is not None:
            found = Reason.ATTRIBUTES_CHANGED
        self._just_changed = found
        if found is not None:
            self._drop_all(found)
            self._unfit = _why_unfit(self._optimizers)
            logger.info("%s: recordings dropped: %s", self.name, found)
        if self._unfit is not None:
            raise Refused(Reason.OPTIMIZER_CHANGED, self._unfit)
        if self._state.refusal is not None:
            raise Refused(self._state.refusal)
        if not self._state.gradients.parameters:
            raise Refused(Reason.TRAINABLE_CHANGED, "no parameter wants gradients")
        if self._state.device.type not in SUPPORTED:
            raise Refused(Reason.UNSUPPORTED_INPUT, f"weights on {self._state.device}")

    def _entry(self, call: Call, kwargs: dict[str, Any]) -> Entry:
        entry = self.table.entries.get(call.signature)
        if entry is None:
            entry = self.table.add(call)
            flags = [f"{name}={value}" for name, value in kwargs.items() if isinstance(value, bool)]
            entry.label = " ".join([entry.label, *flags, *["(gradients there)"] * any(self._state.gradients.there())])
        return entry

    def _problem(self) -> tuple[Reason, str] | None:
        """What the step function uses and cannot be recorded with."""
        known = set(map(id, self._optimizers))
        for name, value in self._reads.objects().items():
            used, short = optimizers_of.unwrapped(value), name.rpartition(".")[2]
            if isinstance(used, torch.optim.Optimizer) and id(used) not in known:
                text = f"the step function reads {short!r}, an optimizer that it was not recorded with"
                return Reason.OPTIMIZER_CHANGED, f"{text}; accepted: it in optimizer="
            if isinstance(value, torch.nn.Module) and (parallel := _parallel(value)) is not None:
                return Reason.MULTI_DEVICE, parallel
            if isinstance(value, torch.nn.Module) and not self._knows(value):
                text = f"the step function reads {short!r}, a module that it was not recorded with"
                return Reason.UNSUPPORTED_INPUT, f"{text}; accepted: it in model="
        return None

    def _knows(self, module: torch.nn.Module) -> bool:
        """Whether it is guarded: given as model=, or part of one that was."""
        parts = chain.from_iterable(given.modules() for given in self._modules)
        return any(module is known for known in chain(self._modules, parts))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        call = Call.of(args, kwargs, self._state.device)
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in call.leaves):
            raise Refused(Reason.UNSUPPORTED_INPUT, "a tensor of the batch wants gradients")
        signature = call.signature
        values = self._reads.values()
        if len(values) > MAX_LEAVES:
            raise Refused(Reason.UNSUPPORTED_INPUT, f"more than {MAX_LEAVES} values in the lists and dicts that the step reads")
        reads = [describe_leaf(0, value, self._state.device, {}) for value in values]
        more = (self._state.gradients.there(), _accumulates())
        return call._replace(signature=signature._replace(leaves=(*signature.leaves, *reads), mode=(*signature.mode, *more)))

    # -- the three routes

    def _warm_up(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The eager step before a recording: state is made, caches fill, kernels are chosen, side effects show."""
        pool = self.memory.pool(self._state.device)
        before, values, rng, drawn = self._reads.contents(), self._reads.values(), pool.rng_state(), drawn_in_python()
        moves = Reason.SIDE_EFFECTS if self._moves >= MAX_UNSTEADY else None
        self.routes.note(Route.EAGER, moves or entry.lost or self._just_changed or Reason.UNSEEN_SIGNATURE)
        with Watch(self._state.device) as watch:
            output = run_eagerly(self._step_fn, args, kwargs)
        try:
            self._state.gradients.make_homes()
        except Refused as refused:  # the step is made, and eager would be a second one
            self._refuse(entry, refused.reason, refused.detail)
            return output
        except torch.OutOfMemoryError:
            self.memory.drop(entry, refused=Reason.OUT_OF_MEMORY)
            return output
        changed, has_moved = self._changed(before), self._reads.values() != values
        self._moves = self._moves + 1 if has_moved else 0
        iterator = self._reads.iterator()
        if not pool.replayable_rng(rng) or drawn_in_python() != drawn:
            self._refuse(entry, Reason.SIDE_EFFECTS, "it draws random numbers on the host; draw them on the device")
        elif iterator is not None:
            self._refuse(entry, Reason.SIDE_EFFECTS, f"it reads the iterator {iterator}, from which a replay would take nothing")
        elif changed is None and not has_moved and watch.why_not is not None:
            self._refuse(entry, Reason.CAPTURE_FAILED, watch.why_not)
        elif changed is None and not has_moved:
            entry.seen += 1
        else:
            entry.escapes += 1
            if max(entry.escapes, self._moves) >= MAX_UNSTEADY:
                changed = changed or self._reads.moved(values) or "a value that it reads"
                self._refuse(entry, Reason.SIDE_EFFECTS, f"it changes {changed}, which a replay would not do")
        return output

    def _changed(self, before: list[Any]) -> str | None:
        """What a step has changed in Python, in words; recordings that relied on it are dropped."""
        found = self._state.change()
        if found is not None:
            self._drop_all(found)
            self._state.take()
            return found.meaning
        return change(before)

    def _capture(self, entry: Entry, call: Call) -> Any:
        pool = self.memory.pool(self._state.device)
        held, before, rng, drawn = pool.bytes(), self._reads.contents(), pool.rng_state(), drawn_in_python()
        try:
            recording, output = capture_step(self._step_fn, call, pool, self._modules, self._state.gradients, self._optimizers)
        except torch.OutOfMemoryError:
            self.memory.drop(entry, refused=Reason.OUT_OF_MEMORY)
            raise Refused(Reason.OUT_OF_MEMORY) from None
        except ReplayError:  # it ran, and eager would be a second step
            raise
        except Exception as error:
            self._refuse(entry, Reason.CAPTURE_FAILED, str(error))
            raise Refused(Reason.CAPTURE_FAILED, str(error)) from error
        self.routes.note(Route.CAPTURE)
        changed = self._changed(before)
        if recording.wrote_inputs:
            recording.inputs.copy_back(call.leaves)
            changed = "its batch"
        elif not pool.replayable_rng(rng) or drawn_in_python() != drawn:
            changed = "a generator of the host's"
        elif recording.escaped:
            changed = "what something outside holds: a tensor that it made"
        if changed is not None:  # the step itself is right
            recording.release()
            self._refuse(entry, Reason.SIDE_EFFECTS, f"it changes {changed}, which a replay would not do")
            return output
        entry.recording, entry.lost = recording, None
        entry.memory_bytes = pool.bytes() - held
        if not self.memory.admit(entry, pool):
            entry.refused = Reason.OUT_OF_MEMORY
        return output

    def _replay(self, entry: Entry, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recording = entry.recording
        assert isinstance(recording, StepRecording)
        if self.options.verify and not entry.trusted:
            return self._verify(entry, recording, call, args, kwargs)
        output = named(entry.label, recording.run, call)
        self._note_replay(entry, recording)
        return output

    def _verify(self, entry: Entry, recording: StepRecording, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output, same = replay_and_compare(
            recording, call, self._state.gradients, lambda: run_eagerly(self._step_fn, args, kwargs)
        )
        entry.trusted = same is True
        if entry.trusted:
            self._note_replay(entry, recording)
        elif same is None:
            self.routes.note(Route.EAGER, Reason.OUT_OF_MEMORY, "of the copies that verify=True makes")
            self.memory.drop(entry, refused=Reason.OUT_OF_MEMORY)
        else:
            self.routes.note(Route.EAGER, Reason.VERIFY_FAILED)
            self._refuse(entry, Reason.VERIFY_FAILED, "its replay differed from eager")
        return output

    def _note_replay(self, entry: Entry, recording: StepRecording) -> None:
        self.memory.touch(entry, recording.pool)
        entry.replays += 1
        entry.recent_replays += 1
        self.routes.note(Route.REPLAY)
        self._state.lasts()

    # -- giving up

    def _refuse(self, entry: Entry, reason: Reason, why: str) -> None:
        self.memory.drop(entry, refused=reason)
        warnings.warn(f"diffgraph: {entry.label} runs eager: {why}", CaptureWarning, stacklevel=5)

    def _drop_all(self, reason: Reason) -> None:
        for entry in self.table.all_entries():
            self.memory.drop(entry, lost=reason if entry.recording is not None else entry.lost)
            entry.seen = 0
            if entry.refused in (Reason.CAPTURE_FAILED, Reason.OUT_OF_MEMORY):
                entry.refused = None  # worth another try

    # -- with a sample

    def warm_up_and_undo(self, batch: tuple[Any, ...]) -> None:
        """One eager step of which nothing is left. It is the warm-up, unless it made state, which the next would make again."""
        try:
            call = self._call(batch, {})
        except Refused as refused:
            raise OptionError(f"the sample batch cannot be part of a recording: {refused}") from None
        before = self._reads.contents()
        with undone(self._state.gradients, self._optimizers, self.memory.pool(self._state.device)):
            with Watch(self._state.device) as watch:
                run_eagerly(self._step_fn, batch, {})
            try:
                self._state.gradients.make_homes()  # where it leaves any: a place is kept
            except Refused as refused:
                raise OptionError(f"the step cannot be recorded: {refused}") from None
            changed = self._state.change()
        left = change(before)
        if left is not None:
            raise OptionError(f"the step changes {left}, which a replay would not do; accepted: one that changes tensors alone")
        self._entry(call, {}).seen = int(changed is None and watch.why_not is None)


def _modules(given: Any) -> list[torch.nn.Module]:
    modules = list(given) if isinstance(given, (list, tuple)) else [given]
    if not modules:
        raise OptionError("no model is given; accepted: model=a torch.nn.Module, or several in a list: all that the step runs")
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            given_type = type(module).__name__
            raise OptionTypeError(f"model is of type {given_type}; accepted: a torch.nn.Module, or several in a list")
        if (problem := _parallel(module)) is not None:
            raise OptionError(problem)
    return modules


def _why_unfit(optimizers: list[torch.optim.Optimizer]) -> str | None:
    """A checkpoint may bring settings that could not have been recorded with."""
    try:
        optimizers_of.checked(optimizers)
    except OptionError as error:
        warnings.warn(f"diffgraph: training steps run eager: {error}", CaptureWarning, stacklevel=6)
        return str(error)
    return None


def _parallel(module: torch.nn.Module) -> str | None:
    """Why a module wrapped for several GPUs cannot be part of a recording."""
    name = type(module).__name__
    if not type(module).__module__.startswith("torch.distributed") and not isinstance(
        module, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    ):
        return None
    return (
        f"the model is wrapped in {name}, whose hooks exchange gradients while backward runs, which a replay would not do; "
        "accepted: the module inside it, its gradients averaged between a step that accumulates and one of the optimizer"
    )


def _parameter_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return ()


def _accumulates() -> bool | None:
    """Whether accelerate is between two optimizer steps, which its wrappers ask of a state that all share."""
    module = sys.modules.get("accelerate.state")
    shared = module.GradientState._shared_state if module is not None else {}
    return shared.get("sync_gradients")


def refuse_step(given: Any) -> None:
    """Raises `NotAcceleratedError` for a training step, where a pipeline or a module is wanted."""
    if isinstance(given, TrainingStep):
        raise NotAcceleratedError(
            "a TrainingStep records at its own calls; accepted: `step.close()` gives back what it holds, after which it records "
            "anew, `diffgraph.report(step)` and `diffgraph.paused(step)`"
        )
