"""May a replay be trusted: does it give what eager gives, and is it no slower?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diffgraph.capture import Forward, Recording, padded_forward, settled
from diffgraph.compare import close, same_bits
from diffgraph.signature import Call
from diffgraph.tree import map_leaves

#: A replay may take this much of eager's time before its signature is demoted; less is noise.
MAX_SLOWER = 1.03


def is_same(replayed: Any, output: Any, module: torch.nn.Module, forward: Forward, call: Call) -> bool:
    """Whether a replay of `call` gave eager's `output`, to the bit. Where a prompt is padded, a matrix product of another shape
    may take another kernel: then close to it, and equal to the bit to what the padded forward gives unrecorded."""
    output = map_leaves(settled, output, objects=True)
    if same_bits(replayed, output):
        return True
    if call.prompt is None or not call.prompt.is_padded or not close(replayed, output):
        return False
    return same_bits(replayed, padded_forward(module, forward, call))


def is_slower(recording: Recording, timed: Callable[[], Any], replay_ms: float | None, eager_ms: float | None) -> bool:
    """Whether the fastest of three replays is slower than eager: the first launch of a graph is, often. `replay_ms` is the first
    one's time; either is `None` where there is no clock. `timed` replays once more, and returns the result and the time."""
    for _ in range(2):
        if replay_ms is None or eager_ms is None or replay_ms <= MAX_SLOWER * eager_ms or recording.draws:
            return False
        _, again = timed()
        recording.left = None
        replay_ms = replay_ms if again is None else min(replay_ms, again)
    return replay_ms is not None and eager_ms is not None and replay_ms > MAX_SLOWER * eager_ms
