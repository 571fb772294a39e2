"""A report as text that Prometheus scrapes (the text exposition format, version 0.0.4)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffgraph.reports.report import Report

Sample = tuple[Mapping[str, str], float]


def text(report: Report, labels: Mapping[str, str] | None = None) -> str:
    """`labels` go on every sample, say to tell several pipelines of one server apart."""
    routes = {"replay": report.replays, "capture": report.captures, "eager": report.eager}
    rows: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for s in report.signatures:  # signatures that differ in a dtype or a mode alone have one label
        measured = {"replays": s.replays, "bytes": s.memory_bytes, "segments": s.segments, "breaks": s.breaks, "on": s.captured}
        for name, value in measured.items():
            rows[name][s.label] += value

    def by_signature(name: str) -> list[Sample]:
        return [({"signature": label}, value) for label, value in rows[name].items()]

    metrics = [
        ("calls_total", "counter", "Denoiser calls by route.", [({"route": r}, n) for r, n in routes.items()]),
        ("eager_calls_total", "counter", "Eager calls by reason.", [({"reason": r}, n) for r, n in report.reasons.items()]),
        ("graph_memory_bytes", "gauge", "Memory that recordings hold.", [({}, report.memory_bytes)]),
        ("unseen_signatures", "gauge", "Signatures that start-up capture did not foresee.", [({}, len(report.unseen))]),
        ("signature_recordings", "gauge", "Recordings of a signature: 0 where it runs eager.", by_signature("on")),
        ("signature_replays_total", "counter", "Replays of a signature.", by_signature("replays")),
        ("signature_memory_bytes", "gauge", "Memory that a signature's capture added.", by_signature("bytes")),
        ("signature_segments", "gauge", "Segments of a signature's recording.", by_signature("segments")),
        ("signature_breaks", "gauge", "Breaks of a signature's recording.", by_signature("breaks")),
    ]
    return "".join(_metric(f"diffgraph_{name}", kind, told, samples, labels or {}) for name, kind, told, samples in metrics)


def _metric(name: str, kind: str, told: str, samples: Iterable[Sample], labels: Mapping[str, str]) -> str:
    lines = [f"# HELP {name} {told}", f"# TYPE {name} {kind}"]
    lines += [f"{name}{_labels({**labels, **own})} {value:.16g}" for own, value in samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
