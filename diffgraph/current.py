"""Which capture is open where: ours in this thread, or somebody else's on the current stream."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from diffgraph.recorder import Recorder

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
