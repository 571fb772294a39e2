"""Whether memory was given back: a weight that then lies at the same address may be another, of another dtype or layout."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch


class Memory:
    """Of some tensors; `given_back()` costs a look at one list, as the storages themselves tell when they go."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._gone: list[Any] = []
        with torch._C.DisableTorchFunctionSubclass():
            storages = [tensor.untyped_storage() for tensor in tensors]
        # PyTorch keeps the Python object of a storage for as long as the storage lives, so a weak reference is one to the memory.
        self._watches = [weakref.ref(storage, self._gone.append) for storage in {id(s): s for s in storages}.values()]
        del storages
        if self._gone:  # a torch that does not; then addresses alone must tell
            self._watches, self._gone = [], []

    def given_back(self) -> bool:
        return bool(self._gone)
