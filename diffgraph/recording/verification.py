"""May a replay be trusted: does it give what eager gives, and is it no slower?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diffgraph.recording.capture import Forward, Recording, settled
from diffgraph.recording.signature import Call
from diffgraph.values.compare import close, same_bits
from diffgraph.values.tensors import weights_device
from diffgraph.values.tree import map_leaves

#: A replay may take this much of eager's time before its signature is demoted; less is noise.
MAX_SLOWER = 1.03


def is_same(replayed: Any, output: Any, recording: Recording, module: torch.nn.Module, forward: Forward, call: Call) -> bool:
    """Whether a replay of `call` gave eager's `output`, to the bit. Where a prompt is padded, a matrix product of another shape
    may take another kernel, and compiled blocks round otherwise: then close to it, and equal to the bit to what the forward that
    was recorded, padded and compiled, gives unrecorded."""
    output = map_leaves(settled, output, objects=True)
    if same_bits(replayed, output):
        return True
    rounds = recording.compilation is not None or (call.prompt is not None and call.prompt.is_padded)
    return rounds and is_close(replayed, output, module) and same_bits(replayed, recording.unrecorded(module, forward))


def is_close(a: Any, b: Any, module: torch.nn.Module) -> bool:
    """Whether two outputs differ by no more than rounding does in the coarsest dtype that `module` computes in."""
    device = weights_device(module).type
    dtypes = {t.dtype for t in module.parameters() if t.is_floating_point() and t.itemsize > 1}
    if torch.is_autocast_enabled(device):
        dtypes.add(torch.get_autocast_dtype(device))
    if any(map(_rounds_activations, module.parameters())):
        dtypes.add(torch.float8_e4m3fn)
    return close(a, b, max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0))


def _rounds_activations(weight: torch.nn.Parameter) -> bool:
    """Whether its layer rounds what it multiplies to 8 bits, by torchao's names for how. Measured on one H200, compiled: 0.067
    (FLUX.1) and 0.081 (Z-Image) in dynamic fp8, 0.016 and 0.019 in bf16."""
    return any(getattr(weight, name, None) is not None for name in ("act_quant_kwargs", "activation_quantization"))


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
