"""What the ranks of a parallel forward exchange: the ops by which torch.distributed's functional collectives are seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_FUNCTIONAL = "_c10d_functional"
#: Of these, neither says anything to another rank.
_WAIT = f"{_FUNCTIONAL}::wait_tensor"
_WRAP = f"{_FUNCTIONAL}::_wrap_tensor_autograd"


def is_collective(func: Any) -> bool:
    """Whether this op waits for, or is waited for by, other ranks."""
    namespace = getattr(func, "namespace", None)
    return namespace == "c10d" or (namespace == _FUNCTIONAL and func.name().partition(".")[0] not in (_WAIT, _WRAP))


def is_waiting(func: Any) -> bool:
    """Whether this op waits for what a collective makes."""
    return getattr(func, "namespace", None) == _FUNCTIONAL and func.name().partition(".")[0] == _WAIT


def is_wrapping(func: Any) -> bool:
    """Whether this op only wraps a collective's result, so that its first use waits for it."""
    return getattr(func, "namespace", None) == _FUNCTIONAL and func.name().partition(".")[0] == _WRAP


def is_awaited_in_python(func: Any) -> bool:
    """Whether what this collective makes is there only after its caller has called `wait()`, which a replay would not."""
    return getattr(func, "namespace", None) == "c10d"


def completed(func: Any) -> Callable[..., Any]:
    """A functional collective that returns when its results are there (on a GPU: to the stream)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        return list(map(waited, result)) if isinstance(result, (list, tuple)) else waited(result)

    return run


def waited(tensor: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(tensor)


def arrived(leaf: Any) -> Any:
    """A plain tensor in place of one that is to be waited for at its first use."""
    return leaf.trigger_wait() if type(leaf).__name__ == "AsyncCollectiveTensor" else leaf
