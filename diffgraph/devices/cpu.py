"""A segment on the CPU is a tape: each op with the very tensors it read and wrote; replay runs the ops into the same storages.

It has a CUDA graph's rules and faults: a value that Python computed stays baked, an address that moved is stale, an output is
overwritten by the next replay. So laptops and CI test what a GPU would do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from diffgraph.devices.base import Pool, Segment
from diffgraph.devices.collectives import completed, is_collective
from diffgraph.errors import HostValueChanged
from diffgraph.values.tensors import storage_of, tensors_in
from diffgraph.values.tree import flatten, map_leaves


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
        # As a graph does, keep what the op reads now: a tensor may be given other memory (`module.to`) or another shape (`t_`).
        kept_args, kept_kwargs = map_leaves(_fixed, (args, kwargs))
        result = func(*args, **kwargs)
        read = {storage_of(t) for t in tensors_in((kept_args, kept_kwargs))}
        outputs = [(i, t) for i, t in enumerate(flatten(result)[0]) if isinstance(t, torch.Tensor)]
        fresh = [(i, _fixed(t)) for i, t in outputs if storage_of(t) not in read]
        # A view has nothing to replay: its storage is refilled by whoever writes it.
        schema = getattr(func, "_schema", None)  # compiled code has none
        if fresh or schema is None or schema.is_mutable or not outputs:
            self.ops.append(Op(completed(func) if is_collective(func) else func, kept_args, kept_kwargs, fresh))
        return result

    def end(self) -> None:
        pass

    def abort(self) -> None:
        self.reset()

    def poison(self) -> None:
        """Fill every intermediate with NaN: whatever reads one before it is written again will show."""
        for op in self.ops:
            for _, tensor in op.outputs:
                if tensor.layout == torch.strided:
                    _each_once(tensor).fill_(_poison_value(tensor.dtype))

    def replay(self) -> None:
        # Inference mode, because what was recorded in it may only be written in it. Autocast has done its part when ops are seen.
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            for func, args, kwargs, outputs in self.ops:
                result = func(*args, **kwargs)
                if outputs:
                    results = flatten(result)[0]
                    for i, tensor in outputs:
                        if results[i].shape != tensor.shape:  # of an op without the tag of a dynamic shape
                            raise HostValueChanged(f"{func} made another shape than when it was recorded")
                        _each_once(tensor).copy_(_each_once(results[i], like=tensor))

    def reset(self) -> None:
        self.ops = []
        self.pool.segments.discard(self)

    def bytes(self) -> int:
        outputs = (t for op in self.ops for _, t in op.outputs if t.layout == torch.strided)
        return sum(t.untyped_storage().nbytes() for t in outputs)


class CpuPool(Pool):
    runs_while_recording = True

    def __init__(self, device: torch.device, *, poison: bool = False) -> None:
        super().__init__(device)
        self.poison = poison

    def _ordered(self):
        return nullcontext()

    def recording(self):
        return nullcontext()

    def open_segment(self) -> TapeSegment:
        segment = TapeSegment(self)
        self.segments.add(segment)
        return segment

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        return _fixed(tensor)  # the tape never reuses memory, so owning it costs nothing but memory

    def bytes(self) -> int:
        with self.lock:
            return sum(segment.bytes() for segment in self.segments if isinstance(segment, TapeSegment))

    def settle(self) -> None:
        pass

    def rng_state(self) -> Any:
        return torch.get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        torch.set_rng_state(state)

    def timed(self, fn: Callable[[], Any]) -> tuple[Any, float | None]:
        return fn(), None  # the tape is not there for speed

    def drew(self, before: Any) -> bool:
        return not torch.equal(before, torch.get_rng_state())

    def replayable_rng(self, before: Any) -> bool:
        return True  # the tape runs the op again, generator and all


def _fixed(leaf: Any) -> Any:
    plain = type(leaf) in (torch.Tensor, torch.nn.Parameter) and leaf.layout == torch.strided
    return leaf.detach() if plain else leaf


def _each_once(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """Without the repetitions of what was expanded, as compiled code may return it: they cannot be written to. `like`: where that
    was."""
    expanded = tensor if like is None else like
    for dim, stride in enumerate(expanded.stride() if expanded.layout == torch.strided else ()):
        if stride == 0 and expanded.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _poison_value(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
