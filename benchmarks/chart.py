"""The chart of a results file of `benchmarks.peers`: `python -m benchmarks.chart RESULTS.json CHART.svg`.

A bar a mode, its time on the left and its seconds to build on the right; the line under a family's bars is its floor. ≠ stands
where results are far from eager's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks._names import MODES, MORE_MODES, NAMES
from benchmarks._peer_tables import is_far

_COLOURS = {"eager": "#9aa0a6", "torch.compile": "#e8a33d", "full": "#7fb3d5", "breakable": "#3d7ea6", "compiled": "#1b4965"}


def draw(rows: list[dict[str, Any]], title: str) -> Any:
    """A matplotlib figure of the peers' rows that were measured, family by family."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "peers"  # the same file for the same rows
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: list(NAMES).index(row["family"])):
        if row["what"] == "peers" and row["ms"]:
            groups.setdefault(_name(row), []).append(row)
    if not groups:
        raise SystemExit("nothing of benchmarks.peers in there")
    order = [*MODES, *MORE_MODES]
    figure = Figure(figsize=(11, 0.6 + sum(0.26 * len(group) + 0.55 for group in groups.values())), layout="constrained")
    axes = figure.subplots(len(groups), 2, squeeze=False, gridspec_kw={"height_ratios": [len(g) + 1.5 for g in groups.values()]})
    for (name, group), (times, builds) in zip(groups.items(), axes, strict=True):
        group.sort(key=lambda row: order.index(row["mode"]))
        labels = [row["mode"] + " ≠" * is_far(row) for row in group]
        colours = [_colour(row["mode"]) for row in group]
        for place, key, unit in ((times, "ms", "ms a call"), (builds, "build_s", "s to build")):
            bars = place.barh(labels, [row[key] or 0.0 for row in group], color=colours)
            place.bar_label(bars, fmt="%.1f", padding=3, fontsize=8)
            place.invert_yaxis()
            place.margins(x=0.15)
            place.set_xlabel(unit, fontsize=8)
            place.tick_params(labelsize=8)
            place.spines[["top", "right"]].set_visible(False)
        if (floor_ms := group[0]["floor_ms"]) is not None:
            times.axvline(floor_ms, color="#c0392b", linewidth=1, linestyle="--")
            name += f" (dashed: floor, {floor_ms:.1f} ms)"
        times.set_title(name, fontsize=9, loc="left")
        builds.set_yticklabels([])
    figure.suptitle(title, fontsize=9)
    return figure


def _name(row: dict[str, Any]) -> str:
    more = [f"{row['loras']} LoRA{'s' * (row['loras'] > 1)}"] if row.get("loras") else []
    more += [row["quantized"]] if row.get("quantized") else []
    return ", ".join([f"{NAMES[row['family']]} {row['shape']}", *more])


def _colour(mode: str) -> str:
    kind = mode.partition(":")[0]
    return _COLOURS["compiled"] if "+" in kind else _COLOURS[kind]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("chart", type=Path, help=".svg or .png")
    parser.add_argument("--plain", action="store_true", help="leave out what has LoRAs or quantised weights")
    options = parser.parse_args(argv)
    data = json.loads(options.results.read_text(encoding="utf-8"))
    versions = data["versions"]
    what = "One denoiser call (≠: results far from eager's)"
    title = f"{what}; {data['machine']}, torch {versions['torch']}, diffusers {versions['diffusers']}"
    rows = [row for row in data["rows"] if not (options.plain and (row.get("loras") or row.get("quantized")))]
    figure = draw(rows, title)
    figure.savefig(options.chart, metadata={"Date": None} if options.chart.suffix == ".svg" else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
