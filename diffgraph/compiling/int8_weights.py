"""Products with int8 weights, compiled as they run eager on any device: weights are widened, then multiplied by the fast kernels.

Inductor swaps such a product for `aten._weight_int8pack_mm`, made for a few rows of a language model: one reduction an element
on CUDA (pytorch#159325). 1,536 × 3,072 by 3,072 × 12,288 takes it 127 ms on an H200, widened first 0.37 ms.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

PASS = "post_grad_custom_pre_pass"


def with_int8_kept(compile: Callable[..., Any]) -> Callable[..., Any]:
    """The same wrapper of `torch.compile`'s, which leaves such products as they are; unless it is not Inductor's, or the user has
    a pass in that place, among its options or in `torch._inductor.config`."""
    options = getattr(compile, "config", None)
    if options is None or PASS in options:
        return compile
    from torch._inductor import config

    if getattr(config, PASS) is not None:
        return compile
    kept = copy.copy(compile)
    kept.config = {**options, PASS: _widening()}  # type: ignore[attr-defined]
    return kept


@functools.cache
def _widening() -> Any:
    """A pass over Inductor's graphs before it looks for such products: int8 is widened by way of float32, exactly and in one
    kernel, where a direct conversion is what it looks for."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    convert = torch.ops.prims.convert_element_type.default

    class Widening(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            for node in graph.find_nodes(op="call_function", target=convert):
                weight = node.args[0]
                value, made = weight.meta.get("val"), node.meta.get("val")
                if getattr(value, "dtype", None) == torch.int8 and made is not None and made.is_floating_point():
                    with graph.inserting_before(node):
                        wide = graph.call_function(convert, (weight, torch.float32))
                    wide.meta["val"] = value.to(torch.float32)
                    node.replace_input_with(weight, wide)

        def uuid(self) -> Any:
            return "diffgraph.int8_weights, 1"  # to be counted up when the pass does otherwise: what was compiled is kept by it

    return Widening()
