"""What `doctor` finds out about one kind of denoiser call: profile it, record it, time both, and read the recording."""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from statistics import median

import torch

import diffgraph
from diffgraph.cli.calls import DenoiserCall, settle
from diffgraph.cli.clock import call_ms, submit_ms
from diffgraph.cli.forecast import Forecast, forecast
from diffgraph.cli.profile import gap_us, profiled
from diffgraph.engine.sequence import Break
from diffgraph.prompts.buckets import is_short
from diffgraph.reasons import Reason
from diffgraph.recording.signature import Call
from diffgraph.recording.verification import is_close
from diffgraph.routing.installed import accelerated
from diffgraph.values.compare import same_bits

SAME, CLOSE, DIFFERENT = "to the bit", "but for rounding (a padded prompt)", "NOT AS EAGER"
_EXPECTED = {Reason.UNSEEN_SIGNATURE, Reason.PAUSED}


@dataclass(frozen=True)
class BreakFound:
    """`count` breaks that are alike. `reads_host`: Python gets a value from it, which each replay compares."""

    name: str
    why: str
    where: str | None
    reads_host: bool
    count: int


@dataclass
class Diagnosis:
    """One kind of call. Times in ms; those that only a GPU can tell are `None` without one. `same`: as eager, `SAME`, `CLOSE` or
    `DIFFERENT`. `recordings`: that start-up capture makes of it, one a prompt bucket; they share the memory of the largest."""

    shape: str
    denoiser: str
    calls_a_step: float
    ops: int
    launches: int | None = None
    eager_ms: float | None = None
    busy_ms: float | None = None
    idle: float | None = None
    expected_ms: float | None = None
    expected_speed_up: float | None = None
    recorded: bool = False
    recordings: int = 1
    reasons: dict[str, str] = field(default_factory=dict)
    segments: int = 0
    breaks: list[BreakFound] = field(default_factory=list)
    memory_bytes: int = 0
    same: str | None = None
    measured_ms: float | None = None
    measured_speed_up: float | None = None


def diagnose(call: DenoiserCall, shape: str, repeats: int) -> Diagnosis:
    """The call's module is accelerated meanwhile, on its own, and restored."""
    profile = profiled(call, call.device)
    found = Diagnosis(shape, call.name, call.times, profile.ops, profile.launches, busy_ms=profile.busy_ms)
    diffgraph.accelerate_module(call.module, verify=False)  # `_compare` does, and what does not gain is to be measured as well
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", diffgraph.CaptureWarning)  # told in the report's reasons
            _record(call, found)
            if found.recorded:
                found.same = _compare(call)
            if call.device.type == "cuda":
                _time(call, found, repeats)
    finally:
        diffgraph.restore_pipeline(call.module)
    return found


def _record(call: DenoiserCall, found: Diagnosis) -> None:
    report = settle(call)
    found.reasons = {r: Reason(r).meaning for r in report.reasons if r not in _EXPECTED}
    runner = accelerated(call.module)[0]
    entry = next((e for e in runner.table.all_entries() if e.recording is not None), None)
    if entry is None or entry.recording is None:
        return
    buckets = runner.state.conditions.prompts
    if buckets is not None:
        found.recordings = max(1, sum(1 for _ in buckets.every(call.args, call.kwargs)))
    found.recorded, found.segments, found.memory_bytes = True, entry.recording.segments, entry.memory_bytes
    steps = [step for step in entry.recording.sequence.steps if isinstance(step, Break)]
    alike = Counter((*_told(step.name), step.where, step.reads_host) for step in steps)
    found.breaks = [BreakFound(*key, count) for key, count in alike.items()]


def _compare(call: DenoiserCall) -> str:
    replayed = call()
    with diffgraph.paused(call.module):
        eager = call()
    if same_bits(replayed, eager):
        return SAME
    (runner,) = accelerated(call.module)
    prompt = Call.padded(call.args, call.kwargs, call.device, runner.state.conditions.prompts).prompt
    return CLOSE if is_short(prompt) and is_close(replayed, eager, call.module) else DIFFERENT


def _told(name: str) -> tuple[str, str]:
    """What a break is, and why it is one, from the name that it was recorded under."""
    if name.startswith("attention"):
        return name, "attention stays eager by choice"
    op, _, why = name.partition(" (")
    return op, why.removesuffix(")") or "this part decides by the prompt's true length, or was named in breaks="


def _time(call: DenoiserCall, found: Diagnosis, repeats: int) -> None:
    """Eager and recorded in turn, so that drift favours neither."""
    eager: list[float] = []
    replayed: list[float] = []
    submits: list[float] = []
    before = diffgraph.report(call.module).replays
    for _ in range(2):
        with diffgraph.paused(call.module):
            eager += call_ms(call, repeats, call.device)[1:]
            submits += submit_ms(call, 3, call.device)
        if found.recorded:
            replayed += call_ms(call, repeats, call.device)[1:]
    found.eager_ms = median(eager)
    if found.busy_ms is not None and found.launches is not None:
        breaks = sum(b.count for b in found.breaks)
        expected: Forecast = forecast(found.eager_ms, median(submits), found.busy_ms, found.launches, breaks, gap_us(call.device))
        found.idle, found.expected_ms, found.expected_speed_up = expected.idle, expected.ms, expected.speed_up
    if found.recorded and diffgraph.report(call.module).replays - before == 2 * repeats:  # or they are no times of replays
        found.measured_ms = median(replayed)
        found.measured_speed_up = found.eager_ms / found.measured_ms
