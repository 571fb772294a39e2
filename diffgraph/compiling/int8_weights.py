"""Products with int8 weights, compiled as they run eager on any device: weights are widened, then multiplied by the fast kernels.

Inductor swaps such a product for `aten._weight_int8pack_mm`, made for a few rows of a language model: one reduction an element
on CUDA (pytorch#159325). 1,536 × 3,072 by 3,072 × 12,288 takes it 127 ms on an H200, widened first 0.37 ms.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def kept_as_they_are() -> Any:
    """A pass over Inductor's graphs before it looks for such products (`post_grad_custom_pre_pass`): int8 is widened by way of
    float32, exactly and in one kernel, where a direct conversion is what it looks for. One object: what one `Backend` has had
    compiled serves all that are equal to it."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class KeptAsTheyAre(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            convert = torch.ops.prims.convert_element_type.default
            for node in graph.find_nodes(op="call_function", target=convert):
                weight, dtype = node.args
                if weight.meta["val"].dtype == torch.int8 and dtype.is_floating_point:
                    with graph.inserting_before(node):
                        wide = graph.call_function(convert, (weight, torch.float32))
                    wide.meta["val"] = weight.meta["val"].to(torch.float32)
                    node.args = (wide, dtype)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return KeptAsTheyAre()
