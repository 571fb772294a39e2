"""What a call's time on the GPU is spent on, by kind of kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CALLS = 3
#: Parts of the names of kernels, of cuBLAS, CUTLASS, cuDNN, PyTorch and Inductor's templates. The first kind that has one.
KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "matrix": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "triton_tem", "splitk"),
}


def spent(call: Callable[[], Any], ms: float) -> dict[str, float]:
    """Of a call that takes `ms`: how long each kind ran (`attention_ms`, `matrix_ms`, `other_ms`), or none (`idle_ms`).

    What ran at the same time as something else counts twice. The profiler may slow what the host does afterwards: measure first.
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    events: Any = profile.events()
    on_gpu = torch._C._autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    found = dict.fromkeys((*KINDS, "other"), 0.0)
    for event in events:
        if event.device_type == on_gpu and not event.is_user_annotation:
            found[kind(event.name)] += (event.time_range.end - event.time_range.start) / CALLS / 1e3
    return {f"{name}_ms": took for name, took in found.items()} | {"idle_ms": max(0.0, ms - sum(found.values()))}


def kind(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
