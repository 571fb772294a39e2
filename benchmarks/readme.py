"""The tables of the README, from the committed results: `python -m benchmarks.readme` puts them in their places."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import _peer_tables
from benchmarks._names import NAMES
from diffgraph.reasons import Reason

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200.json"
PEERS = RESULTS.with_name("h200-peers.json")
CHART = "docs/pictures/peers.svg"
SOAK = RESULTS.with_name("soak-cpu.json")
PARALLEL = RESULTS.with_name("h200-parallel.json")  # of `benchmarks.parallel`, once it has been measured
ANOTHER_RUN = RESULTS.with_name("h200-another-run.json")  # the same kind of machine, with a host of another speed
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
    return _peer_tables.tables(_peers(), CHART if (ROOT / CHART).exists() else None) if PEERS.exists() else ""


def peers_in_detail() -> str:
    """What comes later, and where the time goes; nothing where none was measured."""
    return _peer_tables.details(_peers()["rows"]) if PEERS.exists() else ""


def _peers() -> dict[str, Any]:
    return json.loads(PEERS.read_text(encoding="utf-8"))


def few_steps() -> str:
    """Distilled pipelines from a text to a picture, measured."""
    data, rows = read(RESULTS)
    found = {key[1:]: row for key, row in rows.items() if key[0] == "few steps"}
    modes = {
        "eager": "eager",
        "denoiser": "the denoiser recorded",
        "every": "every component recorded",
        "every+compile": "and compiled, where that works",
    }
    lines = [
        f"From a text to a picture on {data['machine']}, text encoders and VAE of published size with random weights, bf16. The "
        "first three calls run eager, record and verify; the last column says how long they took together.",
        "",
        "| pipeline | | s | | eager's bits | pool MiB | first three calls s |",
        "|---|---|--:|--:|---|--:|--:|",
    ]
    for (family, shape, mode), row in found.items():
        cells = [f"{FEW_STEPS[family]}, {row['steps']} steps, {shape.replace('x', '×')}", modes[mode], f"{row['s']:.3f}"]
        pool = "" if row["pool_mib"] is None else f"{row['pool_mib']:.0f}"
        cells += [f"**{row['ratio']:.2f}x**", "yes" if row["equal"] else "rounds"] if mode != "eager" else ["", ""]
        cells += [pool, f"{row['first_s']:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    notes = [f"- {FEW_STEPS[f]}, {modes[m]}: {row['note']}." for (f, _, m), row in found.items() if row["note"]]
    return "\n".join([*lines, *([""] if notes else []), *notes]) if found else ""


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


_PAGES = ("README.md", *(f"docs/{name}.md" for name in ("results", "parallel", "fine-tuning", "command-line")))
PAGES = tuple(ROOT / name for name in _PAGES)

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
