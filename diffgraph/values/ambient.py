"""Thread state that decides what an op does. A forward may set it around a break, and a replay has left that `with` long ago."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import NamedTuple

import torch

_cuda = torch.backends.cuda


class Ambient(NamedTuple):
    device_type: str
    inference: bool
    autocast: torch.dtype | None
    attention: tuple[bool, ...]  # the kernels that `scaled_dot_product_attention` may choose from

    @classmethod
    def now(cls, device_type: str) -> Ambient:
        return cls(device_type, torch.is_inference_mode_enabled(), _autocast(device_type), attention_kernels())

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Inside, inference mode and autocast are as they were."""
        with torch.inference_mode(self.inference):
            if _autocast(self.device_type) == self.autocast:
                yield
            else:
                enabled = self.autocast is not None
                with torch.autocast(self.device_type, dtype=self.autocast, enabled=enabled, cache_enabled=False):
                    yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, all is as it was."""
        live = attention_kernels()
        _set_attention_kernels(self.attention)
        try:
            with self.precision():
                yield
        finally:
            _set_attention_kernels(live)


def _autocast(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def attention_kernels() -> tuple[bool, ...]:
    return (
        _cuda.flash_sdp_enabled(),
        _cuda.mem_efficient_sdp_enabled(),
        _cuda.math_sdp_enabled(),
        _cuda.cudnn_sdp_enabled(),
    )


def attention_order(device: torch.device) -> tuple[int, ...]:
    """Which kernels `scaled_dot_product_attention` tries first."""
    if device.type == "cuda":
        _first_attention(device)
    return tuple(torch._C._get_sdp_priority_order())


@cache
def _first_attention(device: torch.device) -> None:
    """PyTorch sets the order at a process' first attention on a GPU (`priority_order` in ATen's cuda/sdp_utils.cpp): without this
    a first call would have another signature than all others."""
    rows = torch.zeros(1, 1, 8, 64, device=device, dtype=torch.float16)
    with torch.no_grad(), suppress(RuntimeError):  # of the kernels that are switched on, none may take these rows
        torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)


def _set_attention_kernels(enabled: tuple[bool, ...]) -> None:
    flash, mem_efficient, math, cudnn = enabled
    _cuda.enable_flash_sdp(flash)
    _cuda.enable_mem_efficient_sdp(mem_efficient)
    _cuda.enable_math_sdp(math)
    _cuda.enable_cudnn_sdp(cudnn)
