"""A block's arguments as compiled code is given them: laid out alike for every block, and views of nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from diffgraph.values.tensors import has_plain_memory, storage_of, tensors_in


class Arguments:
    """Stand-ins for a call's tensors, copies some of them. What a block does that tells them from the caller's own is right at
    first perhaps, adding nothing say, and wrong at a replay: so it is looked for after the call."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        given = {id(t): t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)}
        stand_ins = {key: _uniform(tensor) for key, tensor in given.items()}
        for tensor in _in_tuples((args, *kwargs.values())):
            if id(tensor) not in given:
                given[id(tensor)], stand_ins[id(tensor)] = tensor, _no_view(tensor)
        copies = {key: copy for key, copy in stand_ins.items() if storage_of(copy) != storage_of(given[key])}
        watched = [*copies.values(), *map(given.__getitem__, copies), *_sharing((args, kwargs))]
        self._versions = [(tensor, tensor._version) for tensor in watched if not tensor.is_inference()]
        self._copies = [StorageWeakRef(copy.untyped_storage()) for copy in copies.values()]
        self._own = {id(stand_ins[key]): tensor for key, tensor in given.items()}
        self._args: Any = _replaced(args, stand_ins)
        self._kwargs = {name: _replaced(arg, stand_ins) for name, arg in kwargs.items()}

    def given_to(self, compiled: Callable[..., Any]) -> Any:
        """Its result, in which what was given is the caller's own."""
        return _replaced(compiled(*self._args, **self._kwargs), self._own)

    def written(self) -> bool:
        """Whether a tensor was written to that is a copy, has one, or shares its memory with another: code that was compiled for
        some is used for others, which may share none."""
        return any(tensor._version != version for tensor, version in self._versions)

    def outlived(self) -> bool:
        """Whether a copy lives on, in the result or where the block has put it. The arguments are given up."""
        self._versions, self._own, self._args, self._kwargs = [], {}, (), {}
        return not all(copy.expired() for copy in self._copies)


def _uniform(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, if it is dense, with the strides that are usual then. The first block's input often is a transposed view, the
    others' are not; code that is compiled for both is slower than the copy."""
    if not has_plain_memory(tensor):
        return tensor
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    is_dense = tensor.permute(by_stride).is_contiguous()
    return (tensor.contiguous().flatten().view(tensor.shape) if is_dense else tensor).detach()


def _no_view(tensor: torch.Tensor) -> torch.Tensor:
    """Or the sizes of what it is a view of would be compiled for: those of Wan's rotary table, whose frames may be one."""
    return tensor.detach() if has_plain_memory(tensor) and tensor._is_view() else tensor


def _in_tuples(value: Any) -> Iterator[torch.Tensor]:
    """Lists and dicts are left alone: a block may add to its caller's."""
    if isinstance(value, torch.Tensor):
        yield value
    elif type(value) is tuple:
        for item in value:
            yield from _in_tuples(item)


def _replaced(value: Any, by: Mapping[int, torch.Tensor]) -> Any:
    return tuple(_replaced(item, by) for item in value) if type(value) is tuple else by.get(id(value), value)


def _sharing(value: Any) -> list[torch.Tensor]:
    """Tensors whose memory another one has, too."""
    tensors = {id(tensor): tensor for tensor in tensors_in(value)}.values()
    times = Counter(map(storage_of, tensors))
    return [tensor for tensor in tensors if times[storage_of(tensor)] > 1]
