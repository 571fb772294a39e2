"""From findings to one line to paste, and a verdict in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from diffgraph.cli.diagnosis import DIFFERENT, Diagnosis

#: Less than this gained is not worth a line in anybody's server.
WORTH = 1.05


def speed_up(found: Sequence[Diagnosis]) -> float | None:
    """Of a shape's denoising steps: all its calls, as often as a step makes them. `None` where it was not measured."""
    eager = sum((d.eager_ms or 0) * d.calls_a_step for d in found)
    recorded = sum((d.measured_ms or d.eager_ms or 0) * d.calls_a_step for d in found)
    return eager / recorded if any(d.measured_ms for d in found) and recorded else None


def recommended(shapes: Sequence[str], every_length: bool) -> str:
    """`every_length`: whether a shape records all the prompt lengths that may come."""
    listed = ", ".join(f'"{shape}"' for shape in shapes)
    rest = "" if every_length else ', capture="on_demand"'
    return f"pipe = diffgraph.accelerate_pipeline(pipe, capture_shapes=[{listed}]{rest})"


def verdict(by_shape: dict[str, list[Diagnosis]], every_length: bool) -> tuple[str, str | None]:
    """A sentence, and the line to paste, if there is anything to gain."""
    wrong = [shape for shape, found in by_shape.items() if any(d.same == DIFFERENT for d in found)]
    if wrong:
        return f"a replay differed from eager at {', '.join(wrong)}: it would run eager (verify_failed); please report it", None
    recordable = [shape for shape, found in by_shape.items() if any(d.recorded for d in found)]
    if not recordable:
        reasons = sorted({reason for found in by_shape.values() for d in found for reason in d.reasons})
        return f"nothing could be recorded ({', '.join(reasons) or 'no reason given'}): it would run eager", None
    gains = {shape: gain for shape in recordable if (gain := speed_up(by_shape[shape])) is not None}
    if not gains:
        told = "it can be recorded; what that gains, only a GPU can tell: run doctor where the model is to run"
        return told, recommended(recordable, every_length)
    worth = {shape: gain for shape, gain in gains.items() if gain >= WORTH}
    rest = {shape: gain for shape, gain in gains.items() if gain < WORTH}
    if not worth:
        return f"not worth it: the GPU is busy anyway ({_listed(rest)})", None
    told = f"it helps: {_listed(worth)}" + (f"; not worth it: {_listed(rest)}, where the GPU is busy anyway" if rest else "")
    return told, recommended(list(worth), every_length)


def _listed(gains: dict[str, float]) -> str:
    return ", ".join(f"{gain:.2f}x at {shape}" for shape, gain in gains.items())
