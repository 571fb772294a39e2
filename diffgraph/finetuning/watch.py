"""What no recording of a step could hold, seen while the step runs eagerly: an attempt that fails would run its Python twice."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from diffgraph.engine.recordable import on_host_alone, why_never_recordable, why_not_recordable
from diffgraph.engine.recorder import check_for_training
from diffgraph.engine.untraced import untraced
from diffgraph.errors import CaptureError
from diffgraph.values.tensors import is_made_of_others
from diffgraph.values.tree import flatten


class Watch(TorchDispatchMode):
    """Lets every op through; `why_not` says which was the first that would end a recording."""

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.why_not: str | None = None
        self._device = device

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what the step compiles is compiled all the same

    @untraced
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(is_made_of_others, types)):
            return NotImplemented
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            with self:
                return func.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        result = func(*args, **kwargs)
        if self.why_not is None:
            self._look(func, args, flatten((args, kwargs))[0], result)
        return result

    def _look(self, func: Any, args: Any, leaves: list[Any], result: Any) -> None:
        never = why_never_recordable(func, leaves)
        if never is not None:
            self.why_not = f"{func} cannot be replayed: {never}"
        elif not on_host_alone(leaves, self._device) and (why := why_not_recordable(func, args, leaves, self._device)):
            try:
                check_for_training(f"{func} ({why})", func, flatten(result)[0], self._device)
            except CaptureError as error:
                self.why_not = str(error)
