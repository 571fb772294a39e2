"""Named ranges in a profiler's trace: a signature, and in it its segments and breaks, so that the trace reads like the design.

With no profiler running they cost one look at a flag. torch's profiler shows them as `record_function` ranges (and passes them on
as NVTX inside `torch.autograd.profiler.emit_nvtx`); Nsight, which starts the process itself, is told by NVTX.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")

#: How a tool that listens to NVTX puts itself into a process (NVIDIA's NVTX documentation, "injection libraries").
_LISTENED_TO = any(name in os.environ for name in ("NVTX_INJECTION64_PATH", "NVTX_INJECTION32_PATH"))
_profiler = torch.autograd.profiler


def wanted() -> bool:
    """Whether anybody would see a range."""
    return _profiler._is_profiler_enabled or _LISTENED_TO


def named(name: str, fn: Callable[..., T], *args: Any) -> T:
    """`fn(*args)`, in a range of this name if anybody would see it."""
    if not wanted():
        return fn(*args)
    with opened(name):
        return fn(*args)


@contextmanager
def opened(name: str) -> Iterator[None]:
    """A range of this name around what is inside, for whoever listens."""
    with ExitStack() as stack:
        if _profiler._is_profiler_enabled:
            stack.enter_context(torch.profiler.record_function(name))
        if _LISTENED_TO and torch.cuda.is_available():
            torch.cuda.nvtx.range_push(name)  # not `nvtx.range`, for which a brace in the name is a field to fill in
            stack.callback(torch.cuda.nvtx.range_pop)
        yield
