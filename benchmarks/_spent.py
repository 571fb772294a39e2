"""What a call's time on the GPU is spent on, by kind of kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diffgraph.cli.profile import kernels

CALLS = 3
#: Parts of the names of kernels, of cuBLAS, CUTLASS, cuDNN, PyTorch and Inductor's templates. The first kind that has one.
KINDS = {
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "matrix": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "triton_tem", "splitk"),
}


def spent(call: Callable[[], Any], ms: float) -> dict[str, float]:
    """Of a call that takes `ms`: how long each kind ran (`attention_ms`, `matrix_ms`, `other_ms`), or none (`idle_ms`), and how
    many `kernels` there were, copies too.

    What ran at the same time as something else counts twice. The profiler may slow what the host does afterwards: measure first.
    """
    found = dict.fromkeys((*KINDS, "other"), 0.0)
    ran = list(kernels(call, CALLS))
    for kernel in ran:
        found[kind(kernel.name)] += (kernel.end - kernel.start) / CALLS / 1e3
    idle_ms = max(0.0, ms - sum(found.values()))
    return {**{f"{name}_ms": took for name, took in found.items()}, "idle_ms": idle_ms, "kernels": round(len(ran) / CALLS)}


def kind(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")
