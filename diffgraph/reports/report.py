"""What happened so far: counts, reasons, and one row a signature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from diffgraph.reports import prometheus
from diffgraph.shapes.capture_shape import CaptureShape

if TYPE_CHECKING:
    from diffgraph.finetuning.module import GradientRunner
    from diffgraph.finetuning.step import TrainingStep
    from diffgraph.routing.runner import Runner

_MIB = 2**20
_COMPILED_LATER = "was compiled after it was accelerated, so its calls are not recorded: restore, compile, then accelerate"


@dataclass(frozen=True)
class SignatureReport:
    """One signature. `memory_bytes` is what its capture added to the pool; `reason`: why it has no recording.

    With `compile_blocks`: how often its capture had to compile (`compiles`; 0: what an earlier one has compiled fits it; `None`:
    not compiled), how many seconds that took, and why its blocks were recorded as they are (`uncompiled`).
    """

    label: str
    captured: bool
    segments: int
    breaks: int
    replays: int
    memory_bytes: int
    reason: str | None = None
    compiles: int | None = None
    compile_seconds: float = 0.0
    uncompiled: str | None = None


@dataclass(frozen=True)
class Report:
    """Routes of all calls so far (`captures`, `replays`, `eager`), the eager ones by reason code, and the signatures.

    `memory_bytes` is what the pools hold now; signatures share it, so theirs need not add up to it. `unseen`: calls that start-up
    capture had not foreseen, by what they looked like; `bypassed`: denoisers that were compiled after they were accelerated, and
    whose calls pass us by. `print(report)` is a table; `to_dict()` is ready for JSON.
    """

    captures: int
    replays: int
    eager: int
    reasons: dict[str, int]
    signatures: list[SignatureReport] = field(default_factory=list)
    memory_bytes: int = 0
    unseen: dict[str, int] = field(default_factory=dict)
    bypassed: list[str] = field(default_factory=list)
    _shapes: tuple[CaptureShape, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, runners: Sequence[Runner | GradientRunner | TrainingStep], bypassed: Sequence[str] = ()) -> Report:
        routes: Counter[str] = sum((r.routes.taken for r in runners), Counter())
        reasons: Counter[str] = sum((r.routes.reasons for r in runners), Counter())
        entries = [entry for r in runners for entry in r.table.all_entries()]
        rows = [_signature(entry) for entry in entries if entry.recording is not None or entry is entry.values.first]
        memory = sum(m.bytes() for m in {id(r.memory): r.memory for r in runners}.values())
        unseen: Counter[str] = sum((r.table.unseen for r in runners), Counter())
        counts = routes["capture"], routes["replay"], routes["eager"], dict(reasons.most_common())
        met = [entry.shape for entry in entries] + [shape for r in runners for shape in r.table.unseen_shapes]
        shapes = [shape for shape in met if shape is not None]
        return cls(*counts, rows, memory, dict(unseen.most_common()), list(bypassed), tuple(dict.fromkeys(shapes)))

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        del found["_shapes"]
        return found

    def to_prometheus(self, **labels: str) -> str:
        """Metrics for Prometheus to scrape; `labels` go on each, as in `to_prometheus(pipeline="base")`."""
        return prometheus.text(self, labels)

    def to_shapes(self) -> list[CaptureShape]:
        """What the pipeline was really asked for so far, largest first, as `capture_shapes` takes it; `save_shapes` writes it to
        a file. Calls whose shape no text can say (other pictures as input, prompts of one's own) are told by size alone."""
        return sorted(self._shapes, key=lambda shape: shape.size, reverse=True)

    def __str__(self) -> str:
        lines = [
            f"captures {self.captures}, replays {self.replays}, eager {self.eager}, "
            f"graph memory {self.memory_bytes / _MIB:.1f} MiB"
        ]
        lines += [f"  eager because {reason}: {count}" for reason, count in self.reasons.items()]
        if self.signatures:
            lines.append(f"  {'segments':>8} {'breaks':>6} {'replays':>7} {'MiB':>7}  signature")
        for s in self.signatures:
            state = _compiled(s) if s.captured else f"  ({s.reason or 'not captured'})"
            lines.append(f"  {s.segments:>8} {s.breaks:>6} {s.replays:>7} {s.memory_bytes / _MIB:>7.1f}  {s.label}{state}")
        lines += [f"  {name} {_COMPILED_LATER}" for name in self.bypassed]
        lines += [f"  not recorded, {count} calls: {label}" for label, count in self.unseen.items()]
        return "\n".join(lines)


def _signature(entry: Any) -> SignatureReport:
    recording = entry.recording
    reason = entry.refused or entry.lost
    compilation = recording.compilation if recording is not None else None
    return SignatureReport(
        label=entry.label,
        captured=recording is not None,
        segments=recording.segments if recording is not None else 0,
        breaks=recording.breaks if recording is not None else 0,
        replays=entry.replays,
        memory_bytes=entry.memory_bytes,
        reason=str(reason) if reason is not None and recording is None else None,
        compiles=compilation.compiles if compilation is not None else None,
        compile_seconds=compilation.seconds if compilation is not None else 0.0,
        uncompiled=recording.uncompiled if recording is not None else None,
    )


def _compiled(s: SignatureReport) -> str:
    if s.uncompiled is not None:
        return f"  (not compiled: {s.uncompiled})"
    return "" if s.compiles is None else f"  (compiles: {s.compiles}, {s.compile_seconds:.1f} s)"
