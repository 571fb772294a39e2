"""What a recorded call should take, from the eager call's profile: a rule that the measurement afterwards can contradict."""

from __future__ import annotations

from dataclasses import dataclass

#: Host time of a break with the launch of the segment behind it, in eager launches; measured on one H200: 1.4 (Qwen-Image) to
#: 3.6 (PixArt).
LAUNCHES_A_BREAK = 3
#: Of the runner's own work, and a break's gap on the GPU beside those between kernels; measured on one H200.
RUNNER_MS = 0.5
BREAK_US = 8.0


@dataclass(frozen=True)
class Forecast:
    """`idle`: share of an eager call in which the GPU waits for the host; `ms`: what a recorded call should take."""

    idle: float
    ms: float
    speed_up: float


def forecast(eager_ms: float, submit_ms: float, busy_ms: float, launches: int, breaks: int, gap_us: float) -> Forecast:
    """Eager, the host submits `launches` in `submit_ms`; recorded, the GPU starts each `gap_us` after the one before it."""
    on_gpu = busy_ms + launches * gap_us / 1e3 + breaks * BREAK_US / 1e3
    on_host = RUNNER_MS + breaks * LAUNCHES_A_BREAK * submit_ms / max(launches, 1)
    ms = max(on_gpu, on_host)
    return Forecast(idle=max(0.0, 1 - busy_ms / eager_ms), ms=ms, speed_up=max(1.0, eager_ms / ms))
