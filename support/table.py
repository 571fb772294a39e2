"""SUPPORT.md: one row a case, in the order of the classes' names."""

from __future__ import annotations

from collections.abc import Iterable

import diffusers

from diffgraph.families import RULES
from support.cases import Case, all_cases, classes
from support.check import Found, check

TO_BE_FILLED = "to be filled"

_HEAD = """# What replays

Every transformer, U-Net and ControlNet class of diffusers {version}, in a tiny configuration with random weights: called with
other inputs each time, each result compared with eager to the bit.
Written by `make support`; `tests/test_support.py` runs it all again and compares.

{summary}

- **breaks**: what runs eagerly between the recorded segments, on the CPU device. On CUDA, copies between host and device too.
- **host reads**: values (or sizes, which depend on values) that Python sees during the forward. They are compared at each replay.
- **prompt**: how many tokens its pipelines give; "masked": with an attention mask.
- **buckets**: whether prompts of several lengths share a recording; "exact": each length has a recording of its own.
- **guidance**: how its pipelines guide: a second call of the denoiser, a doubled batch, or a number that is embedded.

| class | breaks | host reads | prompt | buckets | guidance | verdict |
|---|---|---|---|---|---|---|
"""


def rows(cases: Iterable[Case] | None = None) -> dict[str, str]:
    """A row for each case, by its label, and for each class that has none."""
    cases = all_cases() if cases is None else cases
    made = {case.label: row(case, check(case)) for case in cases}
    covered = {case.cls for case in all_cases()}
    made |= {name: f"| {name} | | | | | | {TO_BE_FILLED} |" for name in classes() if name not in covered}
    return dict(sorted(made.items(), key=lambda item: item[0].lower()))


def text(made: dict[str, str]) -> str:
    return _HEAD.format(version=diffusers.__version__, summary=summary(made)) + "\n".join(made.values()) + "\n"


def summary(made: dict[str, str]) -> str:
    """How many classes replay, counted by the best of each one's rows."""
    best: dict[str, int] = {}
    for label, line in made.items():
        cls = label.partition(",")[0]
        rank = 0 if TO_BE_FILLED in line else 2 if verdict_of(line).startswith("replays") else 1
        best[cls] = max(best.get(cls, 0), rank)
    counts = [sum(rank == wanted for rank in best.values()) for wanted in (2, 1, 0)]
    return f"{len(best)} classes: **{counts[0]} replay**, {counts[1]} run eager with a reason, {counts[2]} are to be filled."


def verdict_of(line: str) -> str:
    return line.rsplit("|", 2)[1].strip()


def row(case: Case, found: Found) -> str:
    name = f"{case.cls}<br>{case.special}" if case.special else case.cls
    seen = _names(found.breaks), _names(found.host_reads)
    cells = name, *seen, case.prompt, buckets(case, found), case.cfg, verdict(case, found)
    return "| " + " | ".join(cells) + " |"


def buckets(case: Case, found: Found) -> str:
    """How prompts of several lengths share the recording, where it was made for that."""
    return RULES[case.cls].about if found.buckets else "exact" if case.prompt.startswith("any") else ""


def verdict(case: Case, found: Found) -> str:
    if not found.replays:
        said = f"eager: `{found.routes[-1]}`"
    elif not found.alternating:
        said = "replays"
    elif not case.changes:
        raise ValueError(f"{case.label} picks what the host sees, and does not say what changes")
    elif set(found.alternating) == {"replay"}:
        said = f"replays, also while this changes: {case.changes}"
    elif found.alternating[-2:] == ["replay", "replay"]:
        said = f"replays, a recording for each: {case.changes}"
    else:
        said = f"replays; eager (`{found.alternating[-1]}`) while this changes: {case.changes}"
    return f"{said}. {case.note}" if case.note else said


def _names(kinds: Iterable[str]) -> str:
    return ", ".join(kind if kind in ("attention",) else f"`{kind}`" for kind in sorted(kinds))
