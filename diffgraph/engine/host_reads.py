"""What reads a tensor's memory past the recorder: `tolist`, `numpy` and `torch.tensor([t, …])` of CPU tensors, without an op (on
a GPU they are brought to the host first, by an op); and `repr`, which puts all modes aside, reads values, and so fails while a
GPU records."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import _python_dispatch

from diffgraph.engine.current import open_recorder
from diffgraph.engine.stand_ins import put_in
from diffgraph.values.tensors import bits_of

_NAMES = ("tolist", "numpy", "__dlpack__")  # `__array__` calls numpy
_MAKERS = ("tensor", "as_tensor")  # read the tensors in a list that they are given


@contextmanager
def host_reads_seen(device: torch.device) -> Iterator[None]:
    """Inside, such a read is a break of the capture that the calling thread has open on the CPU.

    Patches, as a `TorchFunctionMode` makes torch's fused layers take another path. Not for two threads at a time.
    """
    with _repr_without_values():
        if device.type == "cpu":
            with _reads_without_ops_seen():
                yield
        else:
            yield


@contextmanager
def _repr_without_values() -> Iterator[None]:
    """torchao's int8 layers look for "FakeTensor" in the `repr` of what they multiply, at every forward."""
    printing: Any = torch._tensor_str  # type: ignore[attr-defined]
    original = printing._str

    def described(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> str:
        recorder = open_recorder()
        if recorder is None or recorder.in_break:
            return original(tensor, *args, **kwargs)
        return f"tensor(..., size={tuple(tensor.shape)}, dtype={tensor.dtype}, device='{tensor.device}')"

    printing._str = described
    try:
        yield
    finally:
        printing._str = original


@contextmanager
def _reads_without_ops_seen() -> Iterator[None]:
    found = {name: vars(torch.Tensor).get(name) for name in _NAMES}
    for name in _NAMES:
        setattr(torch.Tensor, name, _stand_in(getattr(torch.Tensor, name)))
    try:
        with ExitStack() as stack:
            for name in _MAKERS:
                stack.enter_context(put_in(torch.__dict__, name, _of_numbers(getattr(torch, name))))
            yield
    finally:
        for name, own in found.items():
            if own is None:
                delattr(torch.Tensor, name)  # it is inherited
            else:
                setattr(torch.Tensor, name, own)


def _stand_in(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        recorder = open_recorder()
        # Not in the stack: an op's own implementation reads, or `repr` does.
        seen = recorder is not None and not recorder.in_break
        if seen and recorder in _python_dispatch._get_current_dispatch_mode_stack():
            recorder.run_break(f"Tensor.{original.__name__}", _content, (tensor,), {})
        return original(tensor, *args, **kwargs)

    return read


def _of_numbers(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = open_recorder()
        seen = recorder is not None and not recorder.in_break
        return original(_numbers(data) if seen else data, *args, **kwargs)

    return make


def _numbers(data: Any) -> Any:
    """A list with tensors in it, as the numbers that they hold now."""
    if isinstance(data, (list, tuple)):
        return [item.tolist() if isinstance(item, torch.Tensor) else _numbers(item) for item in data]
    return data


def _content(tensor: torch.Tensor) -> bytes:
    return bits_of(tensor).numpy().tobytes()
