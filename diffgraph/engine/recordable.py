"""Which ops a graph cannot record, from the ops' own tags and from the devices they join."""

from __future__ import annotations

from typing import Any

import torch

from diffgraph.devices.collectives import is_awaited_in_python
from diffgraph.values.tensors import tensors_in

_aten = torch.ops.aten
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._index_put_impl_.default}
#: Which write to their running mean and variance, and whose schema does not say so.
_BATCH_NORMS = {_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default}
_MASKS = (torch.bool, torch.uint8)


# `leaves` are those of an op's arguments, positional and by keyword.


def why_never_recordable(func: Any, leaves: list[Any]) -> str | None:
    """The reason why an op can be part of no recording, not even as a break; `None` when there is none."""
    if is_awaited_in_python(func):
        return "it is a collective that its caller waits for, which a replay would not"
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        return "it draws from a generator of its own, which is not registered with the graph"
    return None


def on_host_alone(leaves: list[Any], device: torch.device) -> bool:
    """Whether all that an op names lies on the host, while recording is for another device."""
    return device.type != "cpu" and _kinds(leaves) == {"cpu"}


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The arguments that this op writes to, by its schema."""
    if func in _BATCH_NORMS:
        return tensors_in(args[3:5]) if args[5] else []  # in training
    schema = getattr(func, "_schema", None)  # higher-order operators have none
    if schema is None or not schema.is_mutable:
        return []
    written = [
        args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tensors_in(written)


def why_not_recordable(func: Any, args: tuple[Any, ...], leaves: list[Any], device: torch.device) -> str | None:
    """The reason why this op, which is not `on_host_alone`, must be a break on `device`; `None` when it can be recorded."""
    if device.type != "cpu" and len(kinds := _kinds(leaves)) > 1:
        return f"it joins {' and '.join(sorted(kinds))}"
    if func in _INDEXING:
        # Tagged as of dynamic shape, but that is so for masks alone; assignment by mask is not tagged and waits for the host.
        return "it indexes by a mask" if any(t.dtype in _MASKS for t in tensors_in(args[1])) else None
    if torch.Tag.data_dependent_output in func.tags:
        return "its result is read by the host"
    if torch.Tag.dynamic_output_shape in func.tags:
        return "the shape of its result depends on data"
    return None


def draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether this op draws random numbers: attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for i, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return (args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)) != 0
    return True


def size_depends_on_data(fn: Any) -> bool:
    """Whether Python learns something of the data from the mere size of this op's result."""
    return isinstance(fn, torch._ops.OpOverload) and torch.Tag.dynamic_output_shape in fn.tags


def _kinds(leaves: list[Any]) -> set[str]:
    tensors = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return tensors | {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}
