"""Equal to the bit: what "not a pixel changes" is measured by."""

from __future__ import annotations

from typing import Any

import torch

from diffgraph.tensors import same_tensor_bits
from diffgraph.tree import flatten

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two outputs have the same containers and the same bits, NaN's included."""
    a_leaves, a_spec = flatten(a, objects=True)
    b_leaves, b_spec = flatten(b, objects=True)
    return a_spec == b_spec and all(map(_same_leaf, a_leaves, b_leaves))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        # What has no plain memory is not compared but taken for different: sparse tensors, subclasses.
        plain = a.layout == b.layout == torch.strided and type(a) in _PLAIN and type(b) in _PLAIN
        return plain and a.device == b.device and same_tensor_bits(a, b)
    return a is b or (type(a) is type(b) and a == b)
