"""What reads a CPU tensor's memory without an op: `tolist`, `numpy`. On a GPU a tensor is brought to the host first, by an op."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _python_dispatch

from diffgraph.current import open_recorder
from diffgraph.tensors import bits_of

_NAMES = ("tolist", "numpy")  # `__array__` calls numpy


@contextmanager
def host_reads_seen(device: torch.device) -> Iterator[None]:
    """Inside, such a read is a break of the capture that the calling thread has open on the CPU.

    Patches, as a `TorchFunctionMode` makes torch's fused layers take another path. Not for two threads at a time.
    """
    if device.type != "cpu":
        yield
        return
    found = {name: vars(torch.Tensor).get(name) for name in _NAMES}
    for name in _NAMES:
        setattr(torch.Tensor, name, _stand_in(getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name, own in found.items():
            if own is None:
                delattr(torch.Tensor, name)  # it is inherited
            else:
                setattr(torch.Tensor, name, own)


def _stand_in(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        recorder = open_recorder()
        # Not in the stack: an op's own implementation reads, or `repr` does.
        seen = recorder is not None and not recorder.in_break
        if seen and recorder in _python_dispatch._get_current_dispatch_mode_stack():
            recorder.run_break(f"Tensor.{original.__name__}", _content, (tensor,), {})
        return original(tensor, *args, **kwargs)

    return read


def _content(tensor: torch.Tensor) -> bytes:
    return bits_of(tensor).numpy().tobytes()
