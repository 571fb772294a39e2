"""Which ops a graph cannot record, from the ops' own tags and from the devices they join."""

from __future__ import annotations

from typing import Any

import torch

from diffgraph.tree import flatten

_aten = torch.ops.aten
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
_MASKS = (torch.bool, torch.uint8)


def why_not_recordable(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> str | None:
    """The reason why this op must be a break on `device`; `None` when it can be recorded."""
    leaves = flatten((args, kwargs))[0]
    if device.type != "cpu":
        kinds = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        kinds |= {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}
        if kinds == {"cpu"}:
            return None  # on the host alone: it runs now, and what reaches the device from it is a crossing
        if len(kinds) > 1:
            return f"it joins {' and '.join(sorted(kinds))}"
    if func in _INDEXING:
        # Tagged as of dynamic shape, but that is so for masks alone; assignment by mask is not tagged and waits for the host.
        return (
            "it indexes by a mask"
            if any(isinstance(x, torch.Tensor) and x.dtype in _MASKS for x in flatten(args[1])[0])
            else None
        )
    if torch.Tag.data_dependent_output in func.tags:
        return "its result is read by the host"
    if torch.Tag.dynamic_output_shape in func.tags:
        return "the shape of its result depends on data"
    return None
