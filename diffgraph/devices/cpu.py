"""A segment on the CPU is a tape: each op with the very tensors it read and wrote; replay runs the ops into the same storages.

It has a CUDA graph's rules and faults: a value that Python computed stays baked, an address that moved is stale, an output is
overwritten by the next replay. So laptops and CI test what a GPU would do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from diffgraph.devices.base import Pool, Segment
from diffgraph.tree import flatten, map_leaves


class Op(NamedTuple):
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[tuple[int, torch.Tensor]]  # position among the op's results, and the tensor that a replay must refill


class TapeSegment(Segment):
    def __init__(self, pool: CpuPool) -> None:
        self.pool = pool
        self.ops: list[Op] = []

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A parameter's data can be swapped under the same object (`module.to`), unseen by a graph: keep what it reads now.
        args, kwargs = map_leaves(_fixed, (args, kwargs))
        result = func(*args, **kwargs)
        read = {_storage(t) for t in _tensors((args, kwargs))}
        outputs = [(i, t) for i, t in enumerate(flatten(result)[0]) if isinstance(t, torch.Tensor)]
        fresh = [(i, t) for i, t in outputs if _storage(t) not in read]
        # A view has nothing to replay: its storage is refilled by whoever writes it.
        if fresh or func._schema.is_mutable or not outputs:
            self.ops.append(Op(func, args, kwargs, fresh))
        return result

    def end(self) -> None:
        pass

    def abort(self) -> None:
        self.reset()

    def poison(self) -> None:
        """Fill every intermediate with NaN: whatever reads one before it is written again will show."""
        for op in self.ops:
            for _, tensor in op.outputs:
                tensor.fill_(_poison_value(tensor.dtype))

    def replay(self) -> None:
        # Inference mode, because what was recorded in it may only be written in it.
        with torch.inference_mode():
            for func, args, kwargs, outputs in self.ops:
                result = func(*args, **kwargs)
                if outputs:
                    results = flatten(result)[0]
                    for i, tensor in outputs:
                        tensor.copy_(results[i])

    def reset(self) -> None:
        self.ops = []
        self.pool.segments.discard(self)

    def bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for op in self.ops for _, t in op.outputs)


class CpuPool(Pool):
    runs_while_recording = True

    def __init__(self, device: torch.device, *, poison: bool = False) -> None:
        super().__init__(device)
        self.poison = poison

    def _ordered(self):
        return nullcontext()

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self.lock:
            yield

    def open_segment(self) -> TapeSegment:
        segment = TapeSegment(self)
        self.segments.add(segment)
        return segment

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor  # the tape never reuses memory, so owning it costs nothing but memory

    def bytes(self) -> int:
        return sum(segment.bytes() for segment in list(self.segments) if isinstance(segment, TapeSegment))

    def settle(self) -> None:
        pass

    def rng_state(self) -> Any:
        return torch.get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        torch.set_rng_state(state)

    def replayable_rng(self, before: Any) -> bool:
        return True  # the tape runs the op again, generator and all


def _fixed(leaf: Any) -> Any:
    return leaf.detach() if type(leaf) is torch.nn.Parameter else leaf


def _tensors(obj: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(obj)[0] if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _poison_value(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
