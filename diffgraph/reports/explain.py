"""What would happen to a call, and which field keeps it from a recording. Nothing of the denoiser runs to find out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from diffgraph.errors import OptionError, OptionTypeError
from diffgraph.finetuning.step import refuse_step
from diffgraph.reasons import Reason, Refused
from diffgraph.recording.capture import Recording
from diffgraph.recording.signature import Call
from diffgraph.reports.differences import Difference, nearest
from diffgraph.routing.components import DENOISERS
from diffgraph.routing.installed import accelerated
from diffgraph.routing.routes import Route
from diffgraph.routing.runner import Runner, unforeseen
from diffgraph.routing.startup import untouched
from diffgraph.routing.state import Conditions
from diffgraph.values.tree import flatten

_CALLBACKS = ("callback_on_step_end", "callback")


@dataclass(frozen=True)
class CallExplanation:
    """One kind of denoiser call. `route`: `replay`, `capture` or `eager`, this one with a `reason` code; `nearest`: the captured
    signature that is most like this one, where it has no recording of its own, and `differences` to it, field by field."""

    label: str
    route: str
    reason: str | None = None
    then: str | None = None
    nearest: str | None = None
    differences: list[Difference] = field(default_factory=list)

    def __str__(self) -> str:
        why = f" because {self.reason} ({Reason(self.reason).meaning})" if self.reason else ""
        lines = [f"{self.route}{why}{f'; {self.then}' if self.then else ''}", f"  {self.label}"]
        if self.nearest:
            lines.append(f"  nearest captured: {self.nearest}")
            lines += [f"    {d.field}: recorded {d.recorded}, given {d.given}" for d in self.differences]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """The calls that a pipeline would make to its denoisers, each kind once. `complete`: whether those are all; where a signature
    is not recorded, what follows depends on a result that nobody has."""

    calls: list[CallExplanation]
    complete: bool

    def to_dict(self) -> dict[str, Any]:
        return {
            "complete": self.complete,
            "calls": [{**asdict(c), "differences": [d._asdict() for d in c.differences]} for c in self.calls],
        }

    def __str__(self) -> str:
        rest = [] if self.complete else ["(what follows is not known: the denoiser was not run)"]
        return "\n".join([*map(str, self.calls), *rest])


class _Enough(BaseException):
    """Ends the pipeline's call. No `Exception`: a pipeline could take it for a failure of its own."""


def explain(pipe: Any, *args: Any, **call: Any) -> Explanation:
    """What would happen now to `pipe(*args, **call)`: per kind of denoiser call the route, and what keeps it from replaying.

    The pipeline's call runs up to its denoiser, text encoders included, and nothing of the denoiser; what is recorded goes on
    with what its recording last returned. Pipeline, scheduler, generators and report stay as they are; like any call of the
    pipeline, it is not for two threads at a time. For one module, accelerated on its own or with its pipeline,
    `explain(module, *args, **kwargs)` under `torch.no_grad()`.

    A replay is foreseen, not promised: values that the host reads inside the forward show when it runs. Raises
    `NotAcceleratedError`, `OptionError` where no denoiser is accelerated, and whatever the pipeline's call raises for these
    arguments.

    Example:
        >>> print(diffgraph.explain(pipe, "a red cat", height=768, width=512))
        eager because unseen_signature (nothing is recorded for this signature (yet, or by choice of `capture`))
          transformer: encoder_hidden_states=[1x16x3584] hidden_states=[1x1536x64] timestep=[1]
          nearest captured: transformer: encoder_hidden_states=[1x16x3584] hidden_states=[1x1024x64] timestep=[1]
            hidden_states: recorded [1x1024x64] bfloat16, given [1x1536x64] bfloat16
            img_shapes[0][0][1]: recorded 32, given 48
        (what follows is not known: the denoiser was not run)
    """
    refuse_step(pipe)
    runners = accelerated(pipe)
    if isinstance(pipe, torch.nn.Module):
        return Explanation([_foreseen(runners[0], pipe, args, call)[0]], complete=True)
    if not callable(pipe):
        raise OptionTypeError(f"{type(pipe).__name__} cannot be called; accepted: an accelerated pipeline or module")
    for name in _CALLBACKS:
        call.pop(name, None)
    if "output_type" in inspect.signature(type(pipe).__call__).parameters:
        call["output_type"] = "latent"  # nothing is decoded
    denoisers = [runner for runner in runners if runner.name in DENOISERS]
    if not denoisers:
        raise OptionError(f"no denoiser of this {type(pipe).__name__} is accelerated, and explain tells of denoisers alone")
    probe = _Probe(len(denoisers))
    with ExitStack() as stack:
        stack.enter_context(untouched(pipe))
        stack.enter_context(_as_they_were([*args, *call.values()]))
        for runner in runners:
            stack.enter_context(runner.probed(probe if runner in denoisers else Runner.plainly))
        stack.enter_context(suppress(_Enough))
        pipe(*args, **call)
    return Explanation(list(probe.found.values()), probe.complete)


class _Probe:
    """Stands where the denoisers' calls arrive."""

    def __init__(self, denoisers: int) -> None:
        self.found: dict[tuple[int, str], CallExplanation] = {}
        self.complete = True
        self._denoisers = denoisers
        self._repeating: set[int] = set()  # denoisers that are in their second step

    def __call__(self, runner: Runner, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        explained, recording, call = _foreseen(runner, module, args, kwargs)
        key = id(runner), explained.label
        if key in self.found:
            self._repeating.add(id(runner))
        self.found.setdefault(key, explained)
        if len(self._repeating) == self._denoisers:
            raise _Enough
        if recording is None or call is None:
            self.complete = False
            raise _Enough
        with recording.pool.turn():
            return recording.outputs(call.leaves)


def _foreseen(
    runner: Runner, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[CallExplanation, Recording | None, Call | None]:
    """What `Runner` would do with this call, changing nothing; the recording that it would replay, and the call as recorded."""
    call: Call | None = None
    try:
        runner.check_surroundings()
        change, found = runner.pending_change(), Conditions.of(module, runner.options, runner.positional)
        if found.refusal is not None:
            raise Refused(found.refusal)
        call = Call.padded(args, kwargs, found.device, found.prompts)
        if call.signature not in runner.table.entries:
            return _first_of_its_kind(runner, call, unforeseen(found.prompts, args, kwargs)), None, call
        return *_route(runner, call, change), call
    except Refused as refused:
        label = runner.name if call is None else runner.table.label(call.signature)
        text = f"{label} ({refused.detail})" if refused.detail else label
        return _near(runner, call, CallExplanation(text, "eager", str(refused.reason))), None, call


def _first_of_its_kind(runner: Runner, call: Call, unforeseen: Reason) -> CallExplanation:
    if not runner.may_capture():
        raise Refused(unforeseen)
    runner.table.check_room(call.signature)
    then = "its next call is recorded, and those after that replay"
    return _near(runner, call, CallExplanation(runner.table.label(call.signature), "eager", str(Reason.UNSEEN_SIGNATURE), then))


def _route(runner: Runner, call: Call, change: Reason | None) -> tuple[CallExplanation, Recording | None]:
    """Of a call of a known signature. `change`: what has changed since its recordings were made."""
    label, entry = runner.table.label(call.signature), runner.table.entries[call.signature]
    if entry.values.is_resting:
        raise Refused(Reason.HOST_VALUE_CHANGED)
    known = [] if change is not None else entry.values.recorded()
    if known:
        trusted = known[0].is_trusted(call.prompt) or not runner.options.verify
        then = None if trusted else "it is the first, so it is compared with eager"
        return CallExplanation(label, "replay", then=then), known[0].recording
    if runner.route(entry, change) is Route.CAPTURE:
        return CallExplanation(label, "capture", then="the calls after it replay"), None
    lost = change or entry.lost or Reason.UNSEEN_SIGNATURE
    return CallExplanation(label, "eager", str(lost), "a later call is recorded"), None


def _near(runner: Runner, call: Call | None, explained: CallExplanation) -> CallExplanation:
    """With the nearest captured signature."""
    if call is None:
        return explained
    others = [s for s, entry in list(runner.table.entries.items()) if s != call.signature and entry.values.recorded()]
    found = nearest(call.signature, others, runner.positional)
    if found is None:
        return explained
    label = runner.table.label(found[0])
    return CallExplanation(explained.label, explained.route, explained.reason, explained.then, label, found[1])


@contextmanager
def _as_they_were(values: list[Any]) -> Iterator[None]:
    """Give generators among the arguments back as they were."""
    generators = [leaf for leaf in flatten(values)[0] if isinstance(leaf, torch.Generator)]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
