"""Equal to the bit: what "not a pixel changes" is measured by."""

from __future__ import annotations

from typing import Any

import torch

from diffgraph.values.constants import same_value
from diffgraph.values.tensors import same_tensor_bits
from diffgraph.values.tree import flatten

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two outputs have the same containers and the same bits, NaN's included."""
    a_leaves, a_spec = flatten(a, objects=True)
    b_leaves, b_spec = flatten(b, objects=True)
    return a_spec == b_spec and all(map(_same_leaf, a_leaves, b_leaves))


def close(a: Any, b: Any, precision: float = 0.0, *, tolerance: float | None = None) -> bool:
    """Whether two outputs are the same but for the rounding of other kernels: tensors within half the root of their dtype's
    precision, relative, in the 2-norm (bf16: 0.044; float32: 1.7e-4), or of `precision`, if that is coarser. Measured on one
    H200, Qwen-Image in bf16, random weights: another GEMM shape alone makes 0.017. `tolerance` stands in for that half root."""
    a_leaves, a_spec = flatten(a, objects=True)
    b_leaves, b_spec = flatten(b, objects=True)
    return a_spec == b_spec and all(_close_leaf(x, y, precision, tolerance) for x, y in zip(a_leaves, b_leaves, strict=True))


def _close_leaf(a: Any, b: Any, least: float, tolerance: float | None) -> bool:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and a.is_floating_point()):
        return _same_leaf(a, b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if tolerance is None:
        tolerance = 0.5 * max(torch.finfo(a.dtype).eps, least) ** 0.5
    precise = torch.float64 if a.device.type == "cpu" else torch.float32
    distance = torch.linalg.vector_norm(a.to(precise) - b.to(precise))
    return bool(distance <= tolerance * torch.linalg.vector_norm(b.to(precise)))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        # What has no plain memory is not compared but taken for different: sparse tensors, subclasses.
        plain = a.layout == b.layout == torch.strided and type(a) in _PLAIN and type(b) in _PLAIN
        return plain and a.device == b.device and same_tensor_bits(a, b)
    return same_value(a, b)
