"""What is under way around a call: a capture, ours in this thread or somebody else's on the current stream; a mode."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch.nn.utils import parametrize
from torch.utils._device import DeviceContext

if TYPE_CHECKING:
    from diffgraph.engine.recorder import Recorder

#: One recording at a time in this process: the patches that place breaks are global while they last, and so are the garbage
#: collector, cuBLAS' workspaces and the generators. Taken after the pool's lock.
RECORDING = threading.RLock()

opened = threading.local()


def open_recorder() -> Recorder | None:
    """The capture that this thread has open, if any."""
    return getattr(opened, "recorder", None)


def foreign_capture() -> bool:
    """Whether the current stream is being captured (by us, or with `torch.cuda.graph`)."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def intercepted() -> bool:
    """Whether somebody sees, and may change, what torch is asked to do: a replay would pass them by."""
    transform = torch._C._functorch.peek_interpreter_stack()  # type: ignore[attr-defined]  # of `torch.func`
    if torch._C._len_torch_dispatch_stack() > 0 or transform is not None:
        return True
    if parametrize._cache_enabled:  # a recording would read what others have computed of weights, or leave it what it computed
        return True
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)  # type: ignore[attr-defined]
    if torch.autograd.forward_ad._current_level >= 0 or hooks is not None:
        return True
    modes = torch.overrides._get_current_function_mode_stack() if torch._C._len_torch_function_stack() > 0 else []
    return any(type(mode) is not DeviceContext for mode in modes)
