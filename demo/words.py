"""What the page says, as HTML: everything that came from outside is escaped here."""

from __future__ import annotations

import math
from html import escape

from demo.comparing import Comparison, Route, median
from demo.models import Model
from demo.studio import State
from diffgraph.reasons import Reason

MIB = 2**20
TITLE = "diffgraph: the same picture, without waiting for Python"
INTRODUCTION = """
<div class="intro">
<h1>The same picture, without waiting for Python</h1>
<p>A diffusion model draws in small steps, and Python starts hundreds of small programs on the GPU for each of them.
<b>diffgraph</b> records one step and plays it back for the others. Press <b>Draw</b>: this page draws your picture as always
(<i>eager</i>) and with diffgraph (<i>accelerated</i>), compares the two to the last bit, and times both.</p>
{about}
</div>
"""
ON_A_CPU = (
    "This page runs on a CPU, which does not wait for Python as a GPU does: what is recorded, replayed and equal is as on a GPU; "
    "the times are not."
)
HOW = """
- **Recorded** means: for this size and prompt length, one pass through the model (its *denoiser*) was captured as a graph in
  *segments*. The dynamic parts between them, attention first of all, still run as they are; they are the *breaks*.
- **Eager** is PyTorch as usual. What has not been recorded runs eager, slower but just as right, and the page says why. To see
  it, choose the size that is marked *not recorded*, then record it below and draw again.
- **Prompt rows**: prompts of similar length share a recording, a *bucket*. A longer prompt than the largest runs eager.
- **CFG** (guidance above 1): each step asks the model twice, with the prompt and with the negative prompt. Guidance of 1 is off.
- **Times** are medians of two to six runs each, in the order eager, accelerated, accelerated, eager, after a warm-up of both.
"""


def introduction(model: Model) -> str:
    notes = [f"<p class='about'>{escape(model.about)}</p>"]
    if model.device.type == "cpu":
        notes.append(f"<p class='about'>{escape(ON_A_CPU)}</p>")
    return INTRODUCTION.format(about="\n".join(notes))


def waiting() -> str:
    return "<div class='card idle'>Nothing drawn yet. Choose an example or write a prompt, then press <b>Draw</b>.</div>"


def problem(text: str) -> str:
    return f"<div class='card problem' role='alert'>{escape(text)}</div>"


def done(text: str) -> str:
    return f"<div class='card done' role='status'>{escape(text)}</div>"


def result(found: Comparison) -> str:
    if not found.accelerated:
        return "<div class='card idle'>Eager is drawn; accelerated comes next.</div>"
    if not found.complete:
        return "<div class='card idle'>Both are drawn; they are drawn again, to time them fairly.</div>"
    assert found.route is not None
    parts = [verdict(found), bars(found), f"<p class='route'>{route(found.route)}</p>"]
    if found.differences:
        parts.append("<details><summary>What differs from the nearest recording</summary><ul>")
        parts += [f"<li><code>{escape(line)}</code></li>" for line in found.differences]
        parts.append("</ul></details>")
    return f"<div class='card result'>{''.join(parts)}</div>"


def verdict(found: Comparison) -> str:
    apart = found.distance
    if apart.equal and found.repeats:
        badge, text = "equal", "bit-equal"
        more = "every bit of the accelerated picture is eager's"
    elif not found.repeats:
        badge, text = "unsure", "eager differs from itself"
        more = "two eager runs gave different pictures, so there is nothing to be equal to; " + _apart(apart)
    elif apart.same_when_shown:
        badge, text = "close", "equal on the screen"
        more = "a prompt padded to its bucket may be rounded otherwise; " + _apart(apart)
    else:
        badge, text = "close", "not bit-equal"
        more = _apart(apart)
    return f"<p class='verdict'><span class='badge {badge}'>{text}</span> {escape(more)}</p>"


def _apart(apart) -> str:
    if math.isnan(apart.largest):
        return "the two cannot be compared"
    return f"largest difference {apart.largest:.2g} of 1, PSNR {apart.psnr:.1f} dB"


def bars(found: Comparison) -> str:
    """Whole times as bars, with ms a step beside them, and what one is of the other."""
    rows = []
    longest = max(median(found.eager, "seconds"), median(found.accelerated, "seconds"))
    for name, runs in (("eager", found.eager), ("accelerated", found.accelerated)):
        seconds = median(runs, "seconds")
        rows.append(
            f"<tr><th>{name}</th><td class='bar'><span class='{name}' style='width:{100 * seconds / longest:.1f}%'></span></td>"
            f"<td>{time_text(seconds)}</td><td>{median(runs, 'step_ms'):.1f} ms a step</td></tr>"
        )
    noise = "" if found.is_clear else "; runs of one kind vary by more than the two differ, so take it for noise"
    speed = (
        f"<b>{found.speed_up:.2f}×</b> as fast, as measured "
        f"({found.ask.steps} steps, seed {found.ask.seed}; median of {len(found.eager)} runs each{noise})"
    )
    return f"<table class='times'>{''.join(rows)}</table><p class='speed'>{speed}</p>"


def time_text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def route(found: Route) -> str:
    text = f"Calls of the denoiser in one accelerated run: <b>replayed {found.replayed}, eager {found.eager}</b>."
    for code, count in found.reasons.items():
        text += f"<br>{count} eager because <code>{escape(code)}</code>: {escape(Reason(code).meaning)}."
    if Reason.UNSEEN_SIGNATURE.value in found.reasons:
        text += " Record it below (the field is filled in), then draw again."
    return text


def table(state: State, model: Model) -> str:
    """Which signatures there are, those that were hit most first."""
    rows = sorted(state.rows, key=lambda row: -row.signature.replays)
    cells = "".join(_cells(row, model) for row in rows)
    head = "<tr><th>size</th><th>prompt rows</th><th>CFG</th><th>segments</th><th>breaks</th><th>MiB</th><th>hits</th></tr>"
    counts = f"{state.captures} recordings made, {state.replays} forwards replayed, {state.eager} eager since the start or reset."
    return f"<p class='counts'>{counts}</p><div class='scroll'><table class='signatures'>{head}{cells}</table></div>"


def _cells(row, model: Model) -> str:
    shape, signature = row.shape, row.signature
    size = (
        "?"
        if shape is None
        else f"{shape.height} × {shape.width}" + ("" if shape.num_frames is None else f" × {shape.num_frames}")
    )
    if shape is not None and shape.batch > 1:
        size += f", {shape.batch} pictures"
    if "true_cfg_scale" in model.accepted:
        cfg = "on and off"  # two calls a step, or one, of the same recording
    else:
        guidance = None if shape is None else shape.guidance
        cfg = "default" if guidance is None else "on" if guidance else "off"
    numbers = (signature.segments, signature.breaks, f"{signature.memory_bytes / MIB:.1f}", signature.replays)
    if not signature.captured:
        numbers = (f"not recorded: {signature.reason or 'not yet'}", "", "", signature.replays)
    cells = (size, row.bucket or "fixed", cfg, *numbers)
    return f"<tr title='{escape(signature.label)}'>" + "".join(f"<td>{escape(str(c))}</td>" for c in cells) + "</tr>"


def gauge(state: State, model: Model) -> str:
    """Of the device's memory: what recordings hold, what else is used, what is free."""
    ours = 100 * state.graph_memory / state.total
    others = max(0.0, 100 * (1 - state.free / state.total) - ours)
    where = "GPU" if model.device.type == "cuda" else "computer"
    text = (
        f"Recordings hold <b>{state.graph_memory / MIB:.1f} MiB</b> of this {where}'s {state.total / 2**30:.0f} GiB "
        f"({state.free / 2**30:.1f} GiB free). They share one pool, so the column MiB need not add up to it."
    )
    bar = f"<span class='ours' style='width:max({ours:.3f}%,3px)'></span><span class='others' style='width:{others:.1f}%'></span>"
    return f"<div class='gauge' role='img' aria-label='memory'>{bar}</div><p class='counts'>{text}</p>"
