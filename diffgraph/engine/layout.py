"""How the results of a break lie in memory, where compiled code comes next."""

from __future__ import annotations

import torch

#: Of a function that is a break: the name of an attribute, a `Layout`.
LAYOUT = "_diffgraph_layout"


class Layout:
    """How the results of a break lie in memory: pieces are compiled for what Dynamo, without data, was told of them.

    `heads_first`: [..., heads, rows, channels] with all heads of a row side by side, as fast kernels return it; else contiguous.
    """

    def __init__(self, heads_first: bool) -> None:
        self._heads_first = heads_first

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._in_order(tensor).is_contiguous()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.holds(tensor) else self._in_order(self._in_order(tensor).contiguous())

    def _in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(-2, -3) if self._heads_first and tensor.dim() >= 4 else tensor
