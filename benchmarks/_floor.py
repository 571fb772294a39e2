"""What no way of running a denoiser can beat: its FLOPs, attention's among them, at the rate of a large matrix product of the
type that its weights have, or its weights read once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks._calls import DenoiserCall
from benchmarks._measure import call_ms
from diffgraph.values.tensors import plain_parts


@torch.no_grad()
def floor(call: DenoiserCall) -> dict[str, Any]:
    """Columns: FLOPs and bytes of one call, the rates measured here, and the time that the dearer of both takes at least."""
    with FlopCounterMode(display=False) as counter:
        call()
    weights = [part for p in call.module.parameters() for part in plain_parts(p)]
    found = {"tflops": counter.get_total_flops() / 1e12, "weights_gb": sum(part.nbytes for part in weights) / 1e9}
    rates = {"tflops_a_s": matrix_rate(call.device, multiplied(weights)), "gb_a_s": bandwidth(call.device)}
    floor_ms = max(found["tflops"] / rates["tflops_a_s"], found["weights_gb"] / rates["gb_a_s"]) * 1e3
    return {**found, **rates, "floor_ms": floor_ms}


def multiplied(weights: Sequence[torch.Tensor]) -> torch.dtype:
    """The floating type that most weights have: integers are turned into one first, and a few tables may be kept in float32."""
    numbers = Counter[torch.dtype]()
    for part in weights:
        if part.is_floating_point():
            numbers[part.dtype] += part.numel()
    return numbers.most_common(1)[0][0]


@cache
def matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of one large matrix product; of 8-bit floats with a scale for each row and column."""
    n = 8192 if device.type == "cuda" else 512
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    if dtype.itemsize == 1:
        scales = torch.ones(n, 1, device=device)
        options = {"scale_a": scales, "scale_b": scales.t(), "out_dtype": torch.bfloat16, "use_fast_accum": True}
        ms = call_ms(lambda: torch._scaled_mm(a, b.t(), **options), 20, device)
    else:
        ms = call_ms(lambda: a @ b, 20, device)
    return 2 * n**3 / 1e12 / (median(ms) / 1e3)


@cache
def bandwidth(device: torch.device) -> float:
    """GB/s of a large copy, read and write together."""
    source = torch.ones(2**30 if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / 1e9 / (median(call_ms(lambda: target.copy_(source), 20, device)) / 1e3)
