"""One wish, drawn eager and accelerated, in the order A B B A: what drifts (a clock that slows, a neighbour) hits both alike."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

import diffgraph
from demo.asking import Ask
from demo.errors import NotPossible
from demo.measures import Distance, distance
from demo.models import Model
from diffgraph.reasons import Reason
from diffgraph.shapes.prompt_arguments import SCALES, per_prompt_argument

#: How far it is, 0 to 1, and what is being done.
Tell = Callable[[float, str], None]
WARM_UP_STEPS = 2  # the fewest that every scheduler takes; enough for each recording's first replay, which is checked
ROUNDS, ENOUGH = 3, 2.0  # A B B A so often at the most, and no more once they have taken so many seconds
_TELL_EVERY = 0.2  # seconds: a busier bar would be in the times


class Route(NamedTuple):
    """What became of a call's denoiser forwards: `replayed` ones, and eager ones by reason."""

    replayed: int
    reasons: dict[str, int]

    @property
    def eager(self) -> int:
        return sum(self.reasons.values())


@dataclass
class Run:
    """One call of the pipeline. `pictures`: [pictures, height, width, 3], or with frames [pictures, frames, height, width, 3]."""

    pictures: np.ndarray
    seconds: float
    step_ms: float


@dataclass
class Comparison:
    """What came of a wish; while `complete` is false, some of its runs are still to come."""

    ask: Ask
    eager: list[Run] = field(default_factory=list)
    accelerated: list[Run] = field(default_factory=list)
    route: Route | None = None
    differences: list[str] = field(default_factory=list)  # to the nearest recording, where there was none for this wish
    complete: bool = False

    @property
    def distance(self) -> Distance:
        """The largest of any accelerated run to the first eager one."""
        return max(
            (distance(self.eager[0].pictures, run.pictures) for run in self.accelerated), key=lambda d: (not d.equal, d.largest)
        )

    @property
    def repeats(self) -> bool:
        """Whether eager gives the same picture twice. Where it does not, nobody can be equal to it."""
        return all(distance(self.eager[0].pictures, run.pictures).equal for run in self.eager)

    @property
    def speed_up(self) -> float:
        return median(self.eager, "seconds") / median(self.accelerated, "seconds")

    @property
    def is_clear(self) -> bool:
        """Whether every run of one kind was faster than every run of the other: else it may be the machine's own noise."""
        eager, ours = ([run.seconds for run in runs] for runs in (self.eager, self.accelerated))
        return max(ours) < min(eager) or max(eager) < min(ours)


def median(runs: list[Run], what: str) -> float:
    return float(np.median([getattr(run, what) for run in runs]))


def compare(model: Model, ask: Ask, tell: Tell) -> Iterator[Comparison]:
    """Yields the same comparison whenever there is more to see: the eager picture, both, and all there is. Nobody else may use
    the pipeline meanwhile."""
    pipe, found = model.pipe, Comparison(ask)
    eager: Callable[[], AbstractContextManager[None]] = lambda: diffgraph.paused(pipe)  # noqa: E731
    ours = eager if ask.paused else nullcontext
    few = min(WARM_UP_STEPS, ask.steps)
    total = 2 * few + 4 * ask.steps
    done = 0

    def run(way: Callable[[], Any], steps: int, name: str) -> Run:
        nonlocal done
        begun = done
        done += steps
        with way():
            return _run(model, ask, steps, lambda step: tell(min((begun + step) / total, 1.0), f"{name}: step {step} of {steps}"))

    run(eager, few, "Warming up, eager")
    run(ours, few, "Warming up, accelerated")
    found.eager.append(run(eager, ask.steps, "Eager"))
    yield found
    before = diffgraph.report(pipe)
    found.accelerated.append(run(ours, ask.steps, "Accelerated"))
    found.route = _route(before, diffgraph.report(pipe))
    yield found
    found.accelerated.append(run(ours, ask.steps, "Accelerated, once more"))
    found.eager.append(run(eager, ask.steps, "Eager, once more"))
    for _ in range(ROUNDS - 1):  # what takes no time is measured more often
        if sum(r.seconds for r in found.eager + found.accelerated) < ENOUGH:
            for way, runs in ((eager, found.eager), (ours, found.accelerated), (ours, found.accelerated), (eager, found.eager)):
                runs.append(run(way, ask.steps, "Timing again"))
    if found.route.reasons.get(Reason.UNSEEN_SIGNATURE.value) and not ask.paused:
        found.differences = _differences(model, ask)
    tell(1.0, "Comparing")
    found.complete = True
    yield found


def arguments(model: Model, ask: Ask, steps: int) -> dict[str, Any]:
    """Of the pipeline's call, by the names that this pipeline has for them."""
    accepted, shape = model.accepted, ask.shape
    wanted: dict[str, Any] = {
        "prompt": ask.prompt,
        "height": shape.height,
        "width": shape.width,
        "num_inference_steps": steps,
        "generator": torch.Generator("cpu").manual_seed(ask.seed),  # the same noise on every device
        "output_type": "np",
    }
    if model.makes_video:
        wanted["num_frames"] = shape.num_frames
    scale = next((name for name in SCALES if name in accepted), None)
    if scale is not None:
        wanted[scale] = ask.guidance
    if "negative_prompt" in accepted and (ask.negative or (scale == "true_cfg_scale" and ask.guidance > 1)):
        wanted["negative_prompt"] = ask.negative or " "  # without one, true CFG is off
    if ask.images > 1:
        name = per_prompt_argument(accepted)
        if name is None:
            raise NotPossible(f"A {type(model.pipe).__name__} draws one picture at a time.")
        wanted[name] = ask.images
    return wanted


def _run(model: Model, ask: Ask, steps: int, tell: Callable[[int], None]) -> Run:
    clock = _Clock(model.device, steps, tell)
    given = arguments(model, ask, steps)
    if "callback_on_step_end" in model.accepted:
        given["callback_on_step_end"] = clock.step_ended
    clock.start()
    output = model.pipe(**given)
    seconds = clock.stop()
    pictures = output.frames if model.makes_video else output.images
    return Run(np.asarray(pictures), seconds, clock.step_ms())


class _Clock:
    """Of a call, and of the steps in it. The GPU is waited for at the first step's end and the last's, and nowhere between."""

    def __init__(self, device: torch.device, steps: int, tell: Callable[[int], None]) -> None:
        self._device, self._steps, self._tell = device, steps, tell
        self._ends: list[tuple[int, float]] = []
        self._told = self._begun = self._ended = 0.0

    def start(self) -> None:
        self._tell(0)
        self._begun = self._told = self._now()

    def stop(self) -> float:
        self._ended = self._now()
        return self._ended - self._begun

    def step_ended(self, pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if index == 0 or index >= self._steps - 1:
            self._ends.append((index, self._now()))
        if time.perf_counter() - self._told > _TELL_EVERY:
            self._told = time.perf_counter()
            self._tell(index + 1)
        return {}

    def step_ms(self) -> float:
        """A step after the first; of a call of one step, or of one that tells of none, its share of the whole."""
        (first, begun), (last, ended) = (self._ends[0], self._ends[-1]) if self._ends else ((0, 0.0), (0, 0.0))
        if last > first:
            return (ended - begun) / (last - first) * 1e3
        return (self._ended - self._begun) / self._steps * 1e3

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _route(before: diffgraph.Report, after: diffgraph.Report) -> Route:
    return Route(after.replays - before.replays, dict(Counter(after.reasons) - Counter(before.reasons)))


def _differences(model: Model, ask: Ask) -> list[str]:
    """Which fields keep the call from the nearest recording."""
    call = arguments(model, ask, ask.steps)
    unseen = [c for c in diffgraph.explain(model.pipe, **call).calls if c.nearest]
    return list(dict.fromkeys(f"{d.field}: recorded {d.recorded}, asked for {d.given}" for c in unseen for d in c.differences))
