"""The tables of the README, from the committed results: `python -m benchmarks.readme` puts them in their places."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.peers import MODES, MORE_MODES
from diffgraph.reasons import Reason

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
PEERS = RESULTS.with_name("h200-peers.json")
CHART = "docs/pictures/peers.svg"
SOAK = RESULTS.with_name("soak-cpu.json")
PARALLEL = RESULTS.with_name("h200-parallel.json")  # of `benchmarks.parallel`, once it has been measured
ANOTHER_RUN = RESULTS.with_name("h200-another-run.json")  # the same kind of machine, with a host of another speed
NAMES = {
    "qwen_image": "Qwen-Image 20.4B",
    "flux": "FLUX.1 11.9B",
    "z_image": "Z-Image 6.2B",
    "sd3": "SD3.5-medium 2.2B",
    "pixart": "PixArt 0.6B",
    "sana": "SANA 1.6B",
    "wan": "Wan2.1 1.3B",
    "sdxl": "SDXL 2.6B",
}


#: What recording alone, and with compiled blocks, is to gain over eager at the least, by family, LoRAs, quantisation and mode.
AIMS = {
    ("qwen_image", 0, None, "breakable+compile"): 2.5,
    ("z_image", 0, None, "breakable+compile"): 1.8,
    ("flux", 0, None, "breakable+compile"): 1.8,
    ("qwen_image", 1, None, "breakable"): 3.0,
    ("wan", 1, None, "breakable"): 3.0,
    ("flux", 1, None, "breakable"): 2.0,
    ("z_image", 1, None, "breakable"): 2.0,
    ("flux", 0, "fp8", "breakable"): 3.0,
    ("z_image", 0, "fp8", "breakable"): 3.0,
}
FEW_STEPS = {"z_image": "Z-Image-Turbo", "flux": "FLUX.1-schnell"}

#: What stands where figures will, once they are measured.
NOT_YET = {
    "peers": "`compile_blocks` beside `torch.compile` in its modes: not measured yet (`python -m benchmarks.peers`).",
    "peers in detail": "Not measured yet.",
    "few steps": "Few-step pipelines from a text to a picture: not measured yet (`python -m benchmarks.few_steps`).",
    "parallel": "Not measured on GPUs yet: what is told here was tried with two processes on the CPU device.",
    "finetuning": "Not measured on a GPU yet: what is told here was tried on the CPU device.",
    "prompts": "Not measured yet.",
    "reliability": "Not measured yet.",
    "doctor": "Not compared on a GPU yet.",
}


def filled(text: str) -> str:
    """The README's text with what stands between each pair of markers made anew."""
    blocks = {
        "benchmarks": measured,
        "peers": peers,
        "peers in detail": peers_in_detail,
        "few steps": few_steps,
        "prompts": prompts,
        "reliability": reliability,
        "reasons": reasons,
        "parallel": parallel,
        "finetuning": finetuning,
        "doctor": doctor,
    }
    for name, make in blocks.items():
        made = make() or NOT_YET[name]
        block = f"<!-- {name} -->\n{made}\n<!-- end of {name} -->"
        text = re.sub(rf"<!-- {name} -->(.*?<!-- end of {name} -->)?", lambda _, b=block: b, text, count=1, flags=re.DOTALL)
    return text


def reasons() -> str:
    return "\n".join(["| reason | meaning |", "|---|---|", *(f"| `{r}` | {r.meaning} |" for r in Reason)])


def prompts() -> str:
    """What buckets cost and change, measured."""
    data, every = read(RESULTS)
    rows = sorted((r for r in every.values() if r["what"] == "prompt"), key=lambda r: r["length"])
    if not rows:
        return ""
    exact = [r for r in rows if r["equal"]]
    others = ", ".join(f"{r['length']} ({r['difference']:.3f})" for r in rows if not r["equal"])
    return (
        f"Measured on {data['machine']}, Qwen-Image in bf16 at 512×512, prompts of {rows[0]['length']} to {rows[-1]['length']} "
        f"rows: a bucket costs {_span(r['cost'] for r in rows)} % of a call over the exact length. {len(exact)} of {len(rows)} "
        f"lengths have eager's bits; the relative difference of the others: {others or 'none'}. (Padded under a mask, as "
        f"pipelines pad, eager itself moves by {_span((r['masked'] for r in rows if r['masked']), 3)}.)"
    ) + _whole_prompts(list(every.values()))


def _whole_prompts(rows: list[dict[str, Any]]) -> str:
    """How close whole calls come, measured."""
    whole = sorted((r for r in rows if r["what"] == "prompt, whole call"), key=lambda r: r["length"])
    if not whole:
        return ""
    apart = [r for r in whole if not r["latents_equal"]]
    same = ", ".join(str(r["length"]) for r in whole if r not in apart)
    others = "".join(f"; {r['length']}: PSNR {r['psnr']:.1f} dB (eager's own, masked: {r['masked_psnr']:.1f})" for r in apart)
    steps = whole[0]["steps"]
    return f" The final latents of whole calls, {steps} steps with true CFG: eager's bits with prompts of {same}{others}."


def finetuning() -> str:
    """Training steps, measured; nothing where none were."""
    data, rows = read(RESULTS)
    found = {(family, shape, mode): row for (what, family, shape, mode), row in rows.items() if what == "finetuning"}
    curves = [row for row in rows.values() if row["what"] == "finetuning curve" and row["mode"] != "eager"]
    lines = [
        f"Measured on {data['machine']}, torch {data['versions']['torch']}: one training step of a LoRA of rank 16 on the "
        "attention of bf16 models, batch 1, fused AdamW. Last column: both beside eager under deterministic kernels. "
        "Eager's time depends on the host's Python, which differs by a factor of two between hosts.",
        "",
        "| model | shape | eager ms | the step recorded ms | | the module recorded ms | | pool MiB | loss curve |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for (family, shape, mode), eager in found.items():
        if mode == "eager":
            step, module = (found[family, shape, mode] for mode in ("recorded", "module"))
            drawn = [row for row in curves if (row["family"], row["shape"]) == (family, shape)]
            same = "to the bit" if all(row["equal"] for row in drawn) else "NOT equal"
            curve = f"{drawn[0]['steps']} steps, {same}" if drawn else "–"
            lines.append(
                f"| {NAMES[family]} | {shape.replace('x', '×')} | {eager['ms']:.1f} | "
                f"{step['ms']:.1f} | **{step['ratio']:.2f}x** | "
                f"{module['ms']:.1f} | {module['ratio']:.2f}x | {step['pool_mib']:.0f} | {curve} |"
            )
    return "\n".join(lines) if found else ""


def doctor() -> str:
    """What `diffgraph doctor` foretold, beside what it then measured."""
    data, rows = read(RESULTS)
    found = [row for row in rows.values() if row["what"] == "doctor"]
    lines = [
        f"What it foretold from a profile of the eager call, and then measured, on {data['machine']}:",
        "",
        "| model | shape | eager ms | expected | measured | verdict |",
        "|---|---|--:|--:|--:|---|",
    ]
    for r in found:
        shape, expected, gained = r["shape"].replace("x", "×"), r["expected_ratio"], r["ratio"]
        cells = NAMES[r["family"]], shape, f"{r['eager_ms']:.1f}", f"{expected:.2f}x", f"{gained:.2f}x", r["verdict"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if found else ""


def reliability() -> str:
    """What the soak has found, in sentences."""
    data = json.loads(SOAK.read_text(encoding="utf-8"))
    (row,), versions = data["rows"], data["versions"]
    count = {name: f"{row[name]:,}" for name in ("steps", "calls", "replays", "captures", "eager", "evictions", "faults")}
    flat = "flat" if row["flat"] else "NOT FLAT"
    return (
        f"CPU device, two cores, torch {versions['torch']}, diffusers {versions['diffusers']}: {row['seconds']:.0f} s, "
        f"seed {row['seed']}, tiny {', '.join(row['family'].split(','))}, {row['threads']} threads. {count['steps']} acts "
        f"of {len(row['acts'])} kinds, {count['calls']} calls compared with eager: **{row['mismatches']} differ, "
        f"{row['escapes']} errors escape**, {row['unforeseen']} limits broken or warnings uncalled for. "
        f"{count['replays']} replays, {count['captures']} captures, {count['evictions']} evictions, {count['eager']} eager "
        f"calls for {len(row['reasons'])} reasons; {count['faults']} injected faults struck. Memory once everything is dropped: "
        f"{row['quarter_mib']:.0f} MiB at a quarter of the run, {row['end_mib']:.0f} MiB at its end ({flat}); of diffgraph's own "
        f"objects {len(row['ours_left']) or 'none'} left."
    )


def measured() -> str:
    data, rows = read(RESULTS)
    _, another = read(ANOTHER_RUN)
    versions = data["versions"]
    lines = [
        f"{data['machine'].replace('one', 'One')}, torch {versions['torch']}, diffusers {versions['diffusers']}, bf16, "
        "published sizes with random weights; one denoiser call; a row's figures are medians of one run. What is gained depends "
        "on how fast the host's Python is, which varied: the last column is from another, later run on a faster host, where "
        "FLUX.1 keeps the GPU busy at 512². Every output is equal to eager's, to the bit.",
        "",
        "| model | shape | eager ms | breakable ms | | one whole graph ms | submit ms, eager → breakable | segments | pool MiB "
        "| another run |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for (what, family, shape, mode), row in sorted(rows.items(), key=_place):
        if what == "denoiser" and mode == "breakable":
            eager, full = rows[what, family, shape, "eager"], rows.get((what, family, shape, "full"), {})
            whole = f"{full['ms']:.1f}" if full.get("ms") else "–"
            there = [another.get((what, family, shape, m)) for m in ("eager", "breakable")]
            again = f"{there[0]['ms']:.1f} → {there[1]['ms']:.1f}: {there[0]['ms'] / there[1]['ms']:.2f}x" if all(there) else ""
            lines.append(
                f"| {NAMES[family]} | {shape.replace('x', '×')} | {eager['ms']:.1f} | {row['ms']:.1f} | "
                f"**{eager['ms'] / row['ms']:.2f}x** | {whole} | {eager['submit_ms']:.1f} → {row['submit_ms']:.1f} | "
                f"{row['segments']} | {row['pool_mib']:.0f} | {again} |"
            )
    for (what, family, shape, mode), row in rows.items():
        if what == "pipeline" and mode == "breakable":
            eager = rows[what, family, shape, "eager"]
            lines += [
                "",
                f"A whole pipeline call, {NAMES[family]}, {shape.replace('x', '×')}, {row['steps']} steps, true CFG, prompt "
                f"embeddings given, VAE decode included: eager {eager['ms'] / 1e3:.2f} s, accelerated {row['ms'] / 1e3:.2f} s "
                f"(**{eager['ms'] / row['ms']:.2f}x**); the first call of two steps, with its captures, {row['first_s']:.1f} s.",
            ]
    return "\n".join([*lines, "", *spent(list(rows.values()))])


def _place(item: tuple[tuple[str, ...], Any]) -> tuple[bool, int]:
    """In the table: large pictures last, where a model has a row of small ones; else models in the order of `NAMES`."""
    (_, family, shape, _), _ = item
    return shape == "1024x1024" and family != "sana", list(NAMES).index(family)


def _rank_order(key: tuple[str, ...]) -> tuple[Any, ...]:
    what, family, shape, mode = key
    return list(NAMES).index(family), list(map(int, shape.split("x"))), what, mode.partition(" ")[0], "eager" not in mode


def parallel() -> str:
    """What several GPUs gain over one, eager and recorded."""
    if not PARALLEL.exists():
        return ""
    data, rows = read(PARALLEL)
    versions = data["versions"]
    alone = {(r["what"], r["family"], r["shape"]): r for r in rows.values() if r.get("gpus") == 1 and r["mode"].endswith("eager")}
    lines = [
        f"{data['machine']}, torch {versions['torch']}, diffusers {versions['diffusers']}, bf16, published sizes with random "
        "weights. Last column: times as fast as one GPU's eager call.",
        "",
        "| model | shape | what | | ms | |",
        "|---|---|---|---|--:|--:|",
    ]
    for (what, family, shape, mode), row in sorted(rows.items(), key=lambda item: _rank_order(item[0])):
        eager = alone.get((what, family, shape))
        if what == "parallel soak" or eager is None:
            continue
        whole = f"pipeline, {row['steps']} steps" if what == "parallel pipeline" else "one denoiser call"
        gain = f"{row['ms']:.1f} | **{eager['ms'] / row['ms']:.2f}x**" if row["ms"] else "given up, not faster | "
        lines.append(f"| {NAMES[family]} | {shape.replace('x', '×')} | {whole} | {mode} | {gain} |")
    soaked = [r for r in rows.values() if r["what"] == "parallel soak"]
    soaks = [f"- {r['mode']}, {r['shape'].replace('x', '×')}: {r['note']}." for r in soaked]
    return "\n".join([*lines, "", *soaks]).rstrip()


def peers() -> str:
    """Each way of running a denoiser: its time, and its seconds to build; nothing where none was measured."""
    if not PEERS.exists():
        return ""
    data = json.loads(PEERS.read_text(encoding="utf-8"))
    lines = [
        f"{data['machine'].replace('one', 'One')}, torch {data['versions']['torch']}, published sizes with random weights: ms "
        "of one denoiser call, in brackets seconds to build it (–: not measured). Hosts are other ones than in the table above, "
        "and some were faster: compare within a row. Floor: FLOPs at the rate of one large matrix product, or the weights "
        "read once. `python -m benchmarks.peers` measures it; [where the time goes](docs/results.md).",
    ]
    for with_what, found in _peer_tables(data["rows"]):
        lines += ["", *([f"With {with_what}:", ""] if with_what else []), *_peers(found)]
        told = [*_later(found), *_missed(found), *_whole_calls(found)]
        lines += ["", *told] if told else []
    if (ROOT / CHART).exists():
        lines += ["", f"![Milliseconds a call and seconds to build of each mode]({CHART})"]
    return "\n".join(lines)


def peers_in_detail() -> str:
    """What comes later, and by kind of kernel; nothing where none was measured."""
    if not PEERS.exists():
        return ""
    lines = []
    for with_what, found in _peer_tables(json.loads(PEERS.read_text(encoding="utf-8"))["rows"]):
        told = [*_later_of_each(found), *_where_time_goes(found)]
        lines += ["", *([f"With {with_what}:", ""] if with_what else []), *told] if told else []
    return "\n".join(lines).strip()


def _peer_tables(rows: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """By what is done to the weights."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: list(NAMES).index(row["family"])):
        loras, quantized = row.get("loras") or 0, row.get("quantized")
        with_what = [f"{loras} unfused LoRA{'s' * (loras > 1)}"] * bool(loras) + [f"torchao {quantized}"] * bool(quantized)
        tables.setdefault(" and ".join(with_what), []).append(row)
    return sorted(tables.items())


def _peers(found: list[dict[str, Any]]) -> list[str]:
    modes = [mode for mode in (*MODES, *MORE_MODES) if any(row["mode"] == mode for row in found)]
    lines = [f"| model | shape | {' | '.join(f'`{mode}`' for mode in modes)} | floor |", f"|---|---|{'--:|' * len(modes)}--:|"]
    for family, shape in dict.fromkeys((row["family"], row["shape"]) for row in found):
        own = {row["mode"]: row for row in found if (row["family"], row["shape"]) == (family, shape)}
        fastest = min((row["ms"] for row in own.values() if row["ms"]), default=None)
        cells = [_peer(own.get(mode), fastest) for mode in modes]
        floor_ms = next(iter(own.values()))["floor_ms"]
        cells.append("–" if floor_ms is None else f"{floor_ms:.1f}")
        lines.append(f"| {NAMES[family]} | {shape.replace('x', '×')} | {' | '.join(cells)} |")
    return lines


def _later(found: list[dict[str, Any]]) -> list[str]:
    """Between which seconds a second size, a second prompt length and a switch of LoRAs cost when they first come."""
    modes = [mode for mode in (*MODES, *MORE_MODES) if mode != "eager"]
    lines = []
    for what, keys in (
        ("A second size or prompt length costs, when it first comes,", ("size_s", "prompt_s")),
        ("Another LoRA costs", ("lora_s",)),
    ):
        seconds = {
            mode: [r[key] for r in found for key in keys if r["mode"] == mode and r.get(key) is not None] for mode in modes
        }
        told = [f"`{mode}` {_span(s)} s" for mode, s in seconds.items() if s]
        lines += [f"- {what} {', '.join(told)}."] if told else []
    return lines


def _later_of_each(found: list[dict[str, Any]]) -> list[str]:
    lines = []
    for family, shape in dict.fromkeys((row["family"], row["shape"]) for row in found):
        own = [row for row in found if (row["family"], row["shape"]) == (family, shape) and row["mode"] != "eager"]
        told = [f"`{r['mode']}` {r['size_s']:.1f}{_and(r.get('prompt_s'))} s" for r in own if r.get("size_s") is not None]
        lines += (
            [f"- {NAMES[family]}: a second size and prompt length cost, when they first come, {', '.join(told)}."] if told else []
        )
    return lines


def _and(s: float | None) -> str:
    return "" if s is None else f" and {s:.1f}"


def _where_time_goes(found: list[dict[str, Any]]) -> list[str]:
    """By kind of kernel, of the modes that were profiled."""
    return [f"- {NAMES[row['family']]}, `{row['mode']}`: of {_spent(row)}." for row in found if row.get("idle_ms") is not None]


def _spent(row: dict[str, Any]) -> str:
    """The time of a call, and of what kind its kernels are, where it was profiled."""
    parts = (("matrix products", "matrix"), ("attention", "attention"), ("other kernels", "other"), ("idle", "idle"))
    told = [f"{name} {row[f'{key}_ms']:.1f}" for name, key in parts if row.get(f"{key}_ms") is not None]
    return ", ".join([f"{row['ms']:.1f} ms", *told])


def _missed(found: list[dict[str, Any]]) -> list[str]:
    """Where less was gained than was to be, or a mode of torch.compile is faster."""
    lines = []
    for row in (row for row in found if row["ms"]):
        own = [r for r in found if (r["family"], r["shape"]) == (row["family"], row["shape"]) and r["ms"]]
        name, aim = f"- {NAMES[row['family']]}, `{row['mode']}`:", AIMS.get(aim_of(row))
        if aim and row["ratio"] < aim:
            eager = next(r for r in own if r["mode"] == "eager")
            lines.append(
                f"{name} {row['ratio']:.2f}x, short of the {aim:g}x aimed at; eager took {eager['ms']:.1f} ms on this host."
            )
        compiled = [r for r in own if r["mode"].startswith("torch.compile")]
        best = min(compiled, key=lambda r: r["ms"], default=row)
        if row["mode"] == "breakable+compile" and best["ms"] < row["ms"]:
            lines.append(f"{name} {row['ms'] / best['ms'] - 1:.0%} behind `{best['mode']}`; of {_spent(row)}.")
    return lines


def aim_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """A row's key in `AIMS`."""
    return row["family"], row.get("loras") or 0, row.get("quantized"), row["mode"]


def _whole_calls(found: list[dict[str, Any]]) -> list[str]:
    """Whole pipeline calls, where they were timed too."""
    eager = {(r["family"], r["shape"]): r["pipeline_s"] for r in found if r["mode"] == "eager" and r.get("pipeline_s")}
    lines = []
    for place, s in eager.items():
        rows = [r for r in found if (r["family"], r["shape"]) == place and r.get("pipeline_s") and r["mode"] != "eager"]
        told = [f"`{r['mode']}` {r['pipeline_s']:.2f} s (**{s / r['pipeline_s']:.2f}x**)" for r in rows]
        steps = f", {rows[0]['pipeline_steps']} steps" if rows and rows[0].get("pipeline_steps") else ""
        where = f"{NAMES[place[0]]} {place[1].replace('x', '×')}{steps}"
        lines.append(f"- The whole pipeline, one call, {where}: eager {s:.2f} s, {', '.join(told)}.")
    return lines


def few_steps() -> str:
    """Distilled pipelines from a text to a picture, measured."""
    data, rows = read(RESULTS)
    found = {key[1:]: row for key, row in rows.items() if key[0] == "few steps"}
    modes = {"denoiser": "the denoiser recorded", "every": "every component", "every+compile": "every component, compiled"}
    lines = [
        f"From a text to a picture on {data['machine']}, text encoders and VAE of published size with random weights, bf16: "
        "seconds, in brackets the gain over eager, and whether the picture has eager's bits.",
        "",
        f"| pipeline | steps | shape | eager | {' | '.join(modes.values())} |",
        f"|---|--:|---|--:|{'--:|' * len(modes)}",
    ]
    for family, shape in dict.fromkeys(key[:2] for key in found):
        eager = found[family, shape, "eager"]
        cells = [_few(found.get((family, shape, mode))) for mode in modes]
        place = f"{FEW_STEPS[family]} | {eager['steps']} | {shape.replace('x', '×')}"
        lines.append(f"| {place} | {eager['s']:.3f} | {' | '.join(cells)} |")
    notes = [f"- {FEW_STEPS[f]}, {modes[m]}: {row['note']}." for (f, _, m), row in found.items() if row["note"]]
    return "\n".join([*lines, *([""] if notes else []), *notes]) if found else ""


def _few(row: dict[str, Any] | None) -> str:
    return "–" if row is None else f"{row['s']:.3f} ({row['ratio']:.2f}x, {'equal' if row['equal'] else 'rounds'})"


def _peer(row: dict[str, Any] | None, fastest: float | None) -> str:
    if row is None or not row["ms"]:
        return "–"
    ms = f"**{row['ms']:.1f}**" if row["ms"] == fastest else f"{row['ms']:.1f}"
    return ms if row["mode"] == "eager" else f"{ms} ({row['build_s']:.1f})"


def read(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], dict[str, Any]]]:
    """A results file, and its rows by what, family, shape and mode."""
    data = json.loads(path.read_text(encoding="utf-8"))
    plain = [r for r in data["rows"] if not r.get("loras") and not r.get("quantized")]
    return data, {(r["what"], r["family"], r["shape"], r["mode"]): r for r in plain}


def spent(rows: list[dict[str, Any]]) -> list[str]:
    """What breaks, memory and the runner itself cost, in sentences."""
    breakable = [r for r in rows if r["what"] == "denoiser" and r["mode"] == "breakable"]
    over = [r for r in breakable if r.get("over_full_ms") is not None]
    runner, again = (read(path)[1]["denoiser", "qwen_image", "512x512", "breakable"] for path in (RESULTS, ANOTHER_RUN))
    memory = [r["pool_mib"] for r in rows if r["what"] == "memory"]
    others = [r["runner_ms"] for r in read(ANOTHER_RUN)[1].values() if r["what"] == "denoiser" and r["mode"] == "breakable"]
    lines = [
        f"- Breaks cost {_span(r['over_full_ms'] for r in over)} ms a call over one whole graph "
        f"({_span(100 * r['over_full_ms'] / (r['ms'] - r['over_full_ms']) for r in over)} %): copies of the breaks' results to "
        f"their boundary buffers ({_span((r['boundary_copy_ms'] for r in over), 2)} ms), and launch gaps around each break. The "
        "pool of a breakable recording is as large as that of a whole graph.",
        f"- The runner's own work (signature, guards, copies) is {_span(r['runner_ms'] for r in breakable)} ms of CPU a call in "
        f"these rows ({_span(others)} ms in the other run; Qwen-Image, 1,933 parameters, at 512²: {runner['runner_ms']:.2f} and "
        f"{again['runner_ms']:.2f} ms), while the GPU is busy with what was launched before.",
    ]
    if memory:
        lines.append(
            f"- Signatures share one pool: {len(memory)} Qwen-Image sizes from 256² to 1024² take {max(memory):.0f} MiB "
            f"together, the largest alone {min(memory):.0f} MiB."
        )
    return lines


def _span(values: Iterable[float], digits: int = 1) -> str:
    found = sorted(round(value, digits) + 0.0 for value in values)  # not -0.0
    return f"{found[0]:.{digits}f}–{found[-1]:.{digits}f}"


_NAMES = ("README.md", *(f"docs/{name}.md" for name in ("results", "parallel", "fine-tuning", "command-line")))
PAGES = tuple(ROOT / name for name in _NAMES)

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
