"""The one pipeline that all visitors share: whose turn it is, what is recorded in it, and for which size."""

from __future__ import annotations

import contextvars
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import diffgraph
from demo.asking import Ask
from demo.comparing import Comparison, Tell, compare
from demo.models import Model
from diffgraph import CaptureShape
from diffgraph.reports.report import SignatureReport
from diffgraph.routing.installed import accelerated
from diffgraph.routing.memory import free_memory, total_memory

_LOOK_EVERY = 0.2  # seconds between two looks at how far a capture is
_PROMPT_ROWS = re.compile(r"encoder_hidden_states=\[\d+x(\d+)x")


@dataclass(frozen=True)
class Row:
    """A signature, in a visitor's words. `shape`: what was asked for when it was recorded; `bucket`: rows of its prompt."""

    shape: CaptureShape | None
    bucket: int | None
    signature: SignatureReport


@dataclass(frozen=True)
class State:
    """What is recorded now. Memory in bytes: of the recordings, and of the device, all of it and what nobody uses."""

    rows: list[Row]
    graph_memory: int
    free: int
    total: int
    captures: int
    replays: int
    eager: int


class Studio:
    """Accelerates the model's pipeline and records its first shapes. One act at a time; others wait for their turn."""

    def __init__(self, model: Model, tell: Tell = lambda share, text: None) -> None:
        self.model = model
        self._turn = threading.RLock()
        self._recorded_for: dict[tuple[str, int], CaptureShape] = {}  # by a signature's label, and which one of that label
        self._asked: dict[CaptureShape, None] = {}
        self._accelerate()
        self.capture(model.start, tell)

    # -- the acts

    def compare(self, ask: Ask, tell: Tell) -> Iterator[Comparison]:
        """Yields as `comparing.compare`. The turn is given back at each: who closes the page midway does not hold it, and Gradio
        goes on in whichever thread is free."""
        stages = compare(self.model, ask, tell)
        while True:
            with self._turn:
                found = next(stages, None)
            if found is None:
                return
            yield found

    def capture(self, shapes: list[CaptureShape], tell: Tell) -> list[Row]:
        """Record these shapes, and return what could not be. Raises `ShapeError` for one that the pipeline refuses."""
        with self._turn:
            for i, shape in enumerate(shapes):
                known = self._occurrences()

                def looked(count: int, i: int = i, shape: CaptureShape = shape) -> None:
                    many = self._expected(shape)
                    tell((i + min(count / many, 0.95)) / len(shapes), f"Recording {shape}: {count} of about {max(many, count)}")

                with self._watched(looked):
                    diffgraph.capture(self.model.pipe, shape)
                self._asked[shape] = None
                for found in self._occurrences().keys() - known.keys():
                    self._recorded_for[found] = shape
            tell(1.0, "Recorded")
            return [row for row in self.state().rows if row.shape in shapes and not row.signature.captured]

    def reset(self, tell: Tell) -> None:
        """Forget everything, counts too, and record the first shapes again."""
        with self._turn:
            diffgraph.restore_pipeline(self.model.pipe)
            self._recorded_for.clear()
            self._asked.clear()
            self._accelerate()
            self.capture(self.model.start, tell)

    def close(self) -> None:
        with self._turn:
            diffgraph.restore_pipeline(self.model.pipe)

    # -- what there is to see

    def state(self) -> State:
        with self._turn:
            report = diffgraph.report(self.model.pipe)
            rows = [
                Row(self._recorded_for.get(found), _prompt_rows(signature.label), signature)
                for found, signature in self._occurrences(report).items()
            ]
        device = self.model.device
        counts = report.captures, report.replays, report.eager
        return State(rows, report.memory_bytes, free_memory(device), total_memory(device), *counts)

    def sizes(self) -> list[tuple[str, bool]]:
        """The sizes to choose from, and whether a single picture of each is recorded. One is deliberately not, at first."""
        recorded = {_size(s): None for s in sorted(self._asked, key=lambda s: s.size) if s.batch == 1 and s.guidance is not False}
        found = [(size, True) for size in recorded]
        return found if self.model.stranger in recorded else [*found, (self.model.stranger, False)]

    # -- within

    def _accelerate(self) -> None:
        diffgraph.accelerate_pipeline(self.model.pipe, capture="startup", prompt_buckets=self.model.buckets)

    def _occurrences(self, report: diffgraph.Report | None = None) -> dict[tuple[str, int], SignatureReport]:
        """Signatures by label and, since 64x96 and 96x64 may have the same, which one of that label."""
        seen: Counter[str] = Counter()
        found = {}
        for signature in (report or diffgraph.report(self.model.pipe)).signatures:
            found[signature.label, seen[signature.label]] = signature
            seen[signature.label] += 1
        return found

    def _expected(self, shape: CaptureShape) -> int:
        """How many recordings a shape makes, more or less: one, or one a bucket, as the shapes before it did."""
        before = Counter(self._recorded_for.values())
        named = shape.prompt_length is not None
        return max((n for s, n in before.items() if (s.prompt_length is not None) == named and s.batch == shape.batch), default=7)

    @contextmanager
    def _watched(self, looked: Callable[[int], None]) -> Iterator[None]:
        """Tell how many recordings were made, from another thread: `diffgraph.capture` returns only when it is done."""
        runners, over = accelerated(self.model.pipe), threading.Event()
        count = lambda: sum(runner.routes.taken["capture"] for runner in runners)  # noqa: E731
        begun = count()
        context = contextvars.copy_context()  # in which the page knows whose bar it is

        def watch() -> None:
            while True:
                context.run(looked, count() - begun)
                if over.wait(_LOOK_EVERY):
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


def _prompt_rows(label: str) -> int | None:
    found = _PROMPT_ROWS.search(label)
    return int(found[1]) if found else None


def _size(shape: CaptureShape) -> str:
    return str(CaptureShape(shape.height, shape.width, num_frames=shape.num_frames))
