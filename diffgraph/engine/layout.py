"""How the results of a break lie in memory, where compiled code comes next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from diffgraph.values.tensors import tensors_in

#: Of a function that is a break: the name of an attribute.
BREAK = "_diffgraph_break"


class Layout:
    """How the results of a break lie in memory: pieces are compiled for what Dynamo, without data, was told of them.

    `heads_together`: [..., heads, rows, channels] with all heads of a row side by side in memory; else contiguous. What lies
    otherwise at run time is copied.
    """

    def __init__(self, heads_together: bool) -> None:
        self._heads_together = heads_together

    @classmethod
    def expected(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Layout:
        """Of PyTorch's own attention, which is given these. Fast kernels return what lies as their query does
        (`at::empty_like(query)`, in cuDNN's and in flash attention), and a query that `torch.cat` has made is contiguous.

        SD3.5's are. That all heads lie together was expected of them, too, at first: 24 copies a call, 0.3 ms on an H200.
        """
        query = args[0] if args else kwargs["query"]
        return cls(heads_together=not query.is_contiguous())

    @classmethod
    def seen_in(cls, results: Any) -> Layout:
        """That of results which were brought into one by `of`."""
        return cls(heads_together=not all(tensor.is_contiguous() for tensor in tensors_in(results)))

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._in_order(tensor).is_contiguous()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.holds(tensor) else self._in_order(self._in_order(tensor).contiguous())

    def _in_order(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(-2, -3) if self._heads_together and tensor.dim() >= 4 else tensor
