"""What `benchmarks.peers` has measured, as tables: for the README, and in detail."""

from __future__ import annotations

from math import isclose
from typing import TYPE_CHECKING, Any

from benchmarks._names import MODES, MORE_MODES, NAMES, NOT_READY

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks._results import Row

#: What is to be gained over eager at the least: by family, shape, LoRAs, quantisation and mode.
AIMS = {
    ("qwen_image", "512x512", 0, None, "breakable+compile"): 2.5,
    ("z_image", "512x512", 0, None, "breakable+compile"): 1.8,
    ("flux", "512x512", 0, None, "breakable+compile"): 1.8,
    ("qwen_image", "512x512", 1, None, "breakable"): 3.0,
    ("wan", "480x832x1", 1, None, "breakable"): 3.0,
    ("flux", "512x512", 1, None, "breakable"): 2.0,
    ("z_image", "512x512", 1, None, "breakable"): 2.0,
    ("flux", "512x512", 0, "fp8", "breakable"): 3.0,
    ("z_image", "512x512", 0, "fp8", "breakable"): 3.0,
}
#: A relative difference to eager that makes another picture.
FAR = 0.25
_AS_MUCH = "as much as"
_SPENT = {"matrix": "matrix products", "attention": "attention", "other": "other kernels", "idle": "GPU idle"}


def aim_of(row: Row) -> tuple[Any, ...]:
    """A row's key in `AIMS`."""
    return row["family"], row["shape"], row.get("loras") or 0, row.get("quantized"), row["mode"]


def fastest(rows: list[Row], kind: Callable[[str], bool]) -> Row | None:
    """Of the modes of that kind that were measured."""
    return min((r for r in rows if kind(r["mode"]) and r["ms"]), key=lambda r: r["ms"], default=None)


def is_peer(mode: str) -> bool:
    """Whether it is one of torch.compile's."""
    return mode.startswith("torch.compile")


def is_compiled(mode: str) -> bool:
    """Whether it is `compile_blocks`."""
    return "+compile" in mode


def tables(data: dict[str, Any], chart: str | None) -> str:
    """A table for plain weights, with LoRAs and for each quantisation; below each, where it falls short."""
    lines = [
        f"{data['machine'].replace('one', 'One')}, torch {data['versions']['torch']}, published sizes with random weights: ms "
        "of one denoiser call, in brackets seconds to build it (–: not measured; bold: the fastest; ≠: results far from eager's; "
        '°: of another run). `full` is `backend="full"`, `+compile` `compile_blocks=True`, `torch.compile:regional` diffusers\' '
        "`compile_repeated_blocks()`. Hosts are other ones than in the table above, some faster, some slower: compare within a "
        "row. Floor: FLOPs at the rate of one large matrix product, or the weights read once. `python -m benchmarks.peers` "
        "measures it; what a second size, prompt length or LoRA costs, and where the time goes: [results](docs/results.md).",
    ]
    by_weights = _by_weights(data["rows"])
    for with_what, rows in by_weights.items():
        lines += ["", *([f"With {with_what}:", ""] if with_what else []), *_table(rows)]
        told = [*_missed(rows), *_whole_calls(rows), *_beside_plain(rows, by_weights.get("", []))]
        lines += ["", *told] if told else []
        if chart and not with_what:
            lines += ["", f"![Milliseconds a call and seconds to build of each mode]({chart})"]
    return "\n".join(lines)


def details(rows: list[Row]) -> str:
    """What the next size, prompt length and LoRA cost, and by kind of kernel, where the time of a call goes."""
    later, loras, spent, counted = [], [], [], any("kernels" in row for row in rows)
    for with_what, found in _by_weights(rows).items():
        eager = {_place(row): row for row in found if row["mode"] == "eager"}
        for row in found:
            name = [f"{NAMES[row['family']]}{with_what and f', {with_what}'}", f"`{row['mode']}`"]
            if row.get("size_s") is not None:
                before = eager.get(_place(row), row)
                other_run = " °" * (not _is_of_one_run(row, before))
                gain = "" if row is before else f"**{before['size_ms'] / row['size_ms']:.2f}x**{other_run}"
                size = [row["size_shape"].replace("x", "×"), _cell(row["size_s"]), _cell(row["size_ms"]), gain]
                later.append([*name, *size, _cell(row.get("prompt_s")), _cell(row.get("prompt_ms"))])
            if row.get("lora_s") is not None and row["mode"] != "eager":
                loras.append([*name, _cell(row["lora_s"]), _cell(row["lora_ms"])])
            if row.get("idle_ms") is not None:
                kinds = [_cell(row[f"{key}_ms"]) for key in _SPENT]
                spent.append([*name, _cell(row["ms"]), *kinds, *([str(row.get("kernels", "–"))] if counted else [])])
    what = "seconds lost when it first comes, and ms of a call from then on (°: beside eager calls of another run)"
    lines = [f"A second size and prompt length: {what}.", ""]
    lines += _lines(["model", "mode", "second size", "s", "ms", "", "second prompt s", "ms"], later)
    lines += ["", "Another LoRA, likewise:", "", *_lines(["model", "mode", "s", "ms"], loras)]
    lines += ["", "Where the time goes, ms of one call by kind of kernel:", ""]
    return "\n".join([*lines, *_lines(["model", "mode", "a call", *_SPENT.values(), *["kernels"] * counted], spent)])


def _lines(head: list[str], rows: list[list[str]]) -> list[str]:
    texts = sum(name in ("model", "mode", "second size") for name in head)
    under = "---|" * texts + "--:|" * (len(head) - texts)
    return [f"| {' | '.join(head)} |", f"|{under}", *(f"| {' | '.join(cells)} |" for cells in rows)]


def _by_weights(rows: list[Row]) -> dict[str, list[Row]]:
    """By what is done to the weights, plain ones first, models in the order of `NAMES`."""
    made: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: list(NAMES).index(row["family"])):
        loras, quantized = row.get("loras") or 0, row.get("quantized")
        with_what = [f"{loras} unfused LoRA{'s' * (loras > 1)}"] * bool(loras) + [f"torchao {quantized}"] * bool(quantized)
        made.setdefault(" and ".join(with_what), []).append(row)
    return dict(sorted(made.items()))


def _table(rows: list[Row]) -> list[str]:
    modes = [mode for mode in (*MODES, *MORE_MODES) if any(row["mode"] == mode for row in rows)]
    lines = [f"| model | shape | {' | '.join(f'`{mode}`' for mode in modes)} | floor |", f"|---|---|{'--:|' * len(modes)}--:|"]
    for place in dict.fromkeys(map(_place, rows)):
        own = {row["mode"]: row for row in rows if _place(row) == place}
        best = fastest([*own.values()], lambda _: True)
        cells = [_peer(own.get(mode), own.get("eager"), best) for mode in modes]
        cells.append(_cell(next(iter(own.values()))["floor_ms"]) or "–")
        lines.append(f"| {NAMES[place[0]]} | {place[1].replace('x', '×')} | {' | '.join(cells)} |")
    return lines


def _peer(row: Row | None, eager: Row | None, best: Row | None) -> str:
    if row is None:
        return "–"
    if not row["ms"]:
        note = row["note"] or ""
        return f"> {note.removeprefix(NOT_READY)} to build" if note.startswith(NOT_READY) else "failed"
    ms = f"**{_cell(row['ms'])}**" if best and _cell(row["ms"]) == _cell(best["ms"]) else _cell(row["ms"])
    marks = " ≠" * is_far(row) + " °" * (not _is_of_one_run(row, eager))
    return f"{ms}{marks}" if row["mode"] == "eager" else f"{ms} ({_cell(row['build_s'])}){marks}"


def is_far(row: Row) -> bool:
    """Whether its results are far from eager's."""
    return (row.get("relative_diff") or 0.0) > FAR


def _is_of_one_run(row: Row, eager: Row | None) -> bool:
    return eager is None or row["ratio"] is None or isclose(row["ratio"] * row["ms"], eager["ms"], rel_tol=1e-6)


def _missed(rows: list[Row]) -> list[str]:
    """Where a mode is not what it is called, its results are far from eager's, less was gained than was to be, or torch.compile
    is faster."""
    lines = []
    for row in rows:
        name, aim = f"- {NAMES[row['family']]}, `{row['mode']}`:", AIMS.get(aim_of(row))
        if row["note"] and not row["note"].startswith(NOT_READY):
            lines.append(f"{name} {row['note']}.")
        if is_far(row):
            apart = f"relative difference {row['relative_diff']:.2f}"
            lines.append(f"{name} results far from eager's, {apart} ([why](docs/together.md#torchcompile)).")
        if aim and row["ratio"] and row["ratio"] < aim:
            eager_ms = row["ratio"] * row["ms"]
            lines.append(
                f"{name} {row['ratio']:.2f}x on this host, whose eager call took {eager_ms:.1f} ms; {aim:g}x was the aim."
            )
        if row["mode"] == "breakable+compile" and row["ms"]:
            lines += _beside_the_fastest(row, [r for r in rows if _place(r) == _place(row)])
    return lines


def _beside_the_fastest(row: Row, place: list[Row]) -> list[str]:
    """Where the fastest mode of torch.compile takes less than `row`: by how much, where the time goes, and the other way."""
    best, other = fastest(place, is_peer), fastest(place, lambda mode: mode == "full+compile")
    if best is None or best["ms"] >= row["ms"]:
        return []
    spent = [f"{kind} {_cell(row[f'{key}_ms'])}" for key, kind in _SPENT.items() if row.get(f"{key}_ms") is not None]
    told = ", ".join([f"{_cell(row['ms'])} ms", *spent])
    line = f"- {NAMES[row['family']]}: `{best['mode']}` takes {_less(best, row)} `{row['mode']}` (of its {told})"
    if other is not None and best["ms"] <= other["ms"]:
        left = ": [what is left](docs/together.md#torchcompile)" if _less(best, other) != _AS_MUCH else ""
        line += f", and {_less(best, other)} `{other['mode']}`{left}"
    elif other is not None:
        line += f"; `{other['mode']}` {_less(other, best)} that"
    return [f"{line}."]


def _less(row: Row, than: Row) -> str:
    less = f"{1 - row['ms'] / than['ms']:.0%}"
    return _AS_MUCH if less == "0%" else f"{less} less than"


def _whole_calls(rows: list[Row]) -> list[str]:
    """Whole pipeline calls, where they were timed too."""
    eager = {_place(r): r["pipeline_s"] for r in rows if r["mode"] == "eager" and r.get("pipeline_s")}
    lines = []
    for place, s in eager.items():
        found = [r for r in rows if _place(r) == place and r.get("pipeline_s") and r["mode"] != "eager"]
        told = [f"`{r['mode']}` {r['pipeline_s']:.2f} s (**{s / r['pipeline_s']:.2f}x**)" for r in found]
        steps = f", {found[0]['pipeline_steps']} steps" if found and found[0].get("pipeline_steps") else ""
        where = f"{NAMES[place[0]]} {place[1].replace('x', '×')}{steps}"
        host = "Eager's depends on how fast the host's Python was just then."
        lines.append(f"- The whole pipeline, one call, {where}: eager {s:.2f} s, {', '.join(told)}. {host}")
    return lines


def _beside_plain(rows: list[Row], plain: list[Row]) -> list[str]:
    """Whether quantised weights save time, or memory alone."""
    bf16 = {(_place(r), r["mode"]): r["ms"] for r in plain}
    told: dict[str, list[str]] = {}
    for r in rows:
        if r.get("quantized") and r["ms"] and r["mode"] != "eager" and bf16.get((_place(r), r["mode"])):
            beside = f"{NAMES[r['family']]} {_cell(r['ms'])} ms, {_cell(bf16[_place(r), r['mode']])} in bf16"
            told.setdefault(r["mode"], []).append(beside)
    return [f"- `{mode}`, beside plain weights: {'; '.join(texts)}." for mode, texts in told.items()]


def _place(row: Row) -> tuple[str, str]:
    return row["family"], row["shape"]


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
