"""What a segment is: a CUDA graph on a GPU, a tape on a CPU."""

from __future__ import annotations

import torch

from diffgraph.devices.base import Pool, Segment
from diffgraph.errors import OptionError

SUPPORTED = ("cpu", "cuda")

__all__ = ["SUPPORTED", "Pool", "Segment", "known_device", "new_pool"]


def known_device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise OptionError(f"device is {device!r}; accepted: {', '.join(SUPPORTED)}") from None


def new_pool(device: torch.device | str | None = None, *, poison: bool = False) -> Pool:
    """An empty pool for `device` (default: the current GPU, else the CPU)."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = known_device(device)
    if device.type == "cpu":
        from diffgraph.devices.cpu import CpuPool

        return CpuPool(device, poison=poison)
    if device.type == "cuda":
        if poison:
            raise OptionError(f"poison=True is for the CPU device, which keeps dead memory apart; given {device}")
        if not torch.cuda.is_available():
            raise OptionError(f"device is {device}, and this torch sees no GPU; accepted here: cpu")
        from diffgraph.devices.cuda import CudaPool

        return CudaPool(device)
    raise OptionError(f"no graphs on device {device}; accepted: {', '.join(SUPPORTED)}")
