"""Our own code while a forward is compiled: Dynamo is to call it, not to trace it.

What `torch.compiler.disable` does, without importing Dynamo, which takes seconds and which most users never need. A denoiser that
was compiled before it was accelerated is recorded with its compiled code; what the recorder does meanwhile is no part of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def untraced(fn: F) -> F:
    """Mark `fn`: it is not inlined where compiled code calls it, and neither its frame nor those below it are compiled."""
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    action = getattr(frames, "_FrameAction", None)
    if action is not None:  # nobody promises this interface; without it there is noise, and nothing wrong
        strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP)  # type: ignore[union-attr]
        frames.set_code_exec_strategy(fn.__code__, strategy)  # type: ignore[union-attr]
    return fn
