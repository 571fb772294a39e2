"""What a step changes for good: noted while it is recorded, so that it can be undone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from diffgraph.engine.recordable import written_by
from diffgraph.errors import CaptureError
from diffgraph.values.tensors import describe, storage_of, tensors_in

Contents = dict[int, torch.UntypedStorage]


class WriteLog:
    """The memory that outlives a recording and that it writes to: weights, gradients, the optimizer's state, whatever else.

    What it held before is kept for as long as the recording may fail: from before the first write where ops run while they are
    recorded, and from before the first segment runs where they do not.
    """

    def __init__(self, *, is_for_undoing: bool = False) -> None:
        self.is_for_undoing = is_for_undoing  # whether the recording fails or not
        self.tensors: list[torch.Tensor] = []  # one a storage; its version counts the writes
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._before: Contents = {}

    def note(self, tensors: Iterable[torch.Tensor], *, runs_now: bool) -> None:
        for tensor in tensors:
            key = storage_of(tensor)
            if key not in self._storages:
                if tensor.layout != torch.strided or key == id(tensor):
                    raise CaptureError(f"it writes to a {describe(tensor)}, which could not be undone")
                self.tensors.append(tensor.detach())
                self._storages[key] = tensor.untyped_storage()
            if runs_now and key not in self._before:
                self._before[key] = self._storages[key].clone()

    def before_running(self) -> None:
        """What was noted so far is about to be written."""
        for key, storage in self._storages.items():
            if key not in self._before:
                self._before[key] = storage.clone()

    def undo(self) -> None:
        self.restore(self._before)
        self.forget()

    def forget(self) -> None:
        """It is not to be undone any more."""
        self._before = {}

    def contents(self) -> Contents:
        return {key: storage.clone() for key, storage in self._storages.items()}

    def values(self, *, without: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of all of it, for comparison."""
        return [view.clone() for view in self.views(self._storages, without=without)]

    def views(self, contents: Contents, *, without: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those contents, in the order and the dtypes of `values`."""
        left_out = set(map(storage_of, without))
        found = [tensor for tensor in self.tensors if storage_of(tensor) not in left_out]
        return [torch.empty(0, dtype=t.dtype, device=t.device).set_(contents[storage_of(t)]) for t in found]

    def restore(self, contents: Contents) -> None:
        for key, content in contents.items():
            self._storages[key].copy_(content)
        torch.autograd.graph.increment_version(self.tensors)


class WritesNoted(TorchDispatchMode):
    """Inside, what is written and was there before is noted, of what runs at once. `is_known`: tensors that do not matter."""

    def __init__(self, log: WriteLog, is_known: Callable[[torch.Tensor], bool] = lambda _: False) -> None:
        super().__init__()
        self._log, self._is_known = log, is_known
        self._born: dict[int, StorageWeakRef] = {}  # a weak reference keeps a storage's identity from being given to another one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = written_by(func, args, kwargs)
        outlasting = (t for t in written if storage_of(t) not in self._born and not self._is_known(t))
        self._log.note(outlasting, runs_now=True)
        result = func(*args, **kwargs)
        given = {storage_of(t) for t in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if tensor.layout == torch.strided and storage_of(tensor) not in given:
                reference = StorageWeakRef(tensor.untyped_storage())
                self._born[reference.cdata] = reference
        return result
