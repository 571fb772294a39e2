"""A step of which nothing is left: a warm-up before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from diffgraph.devices import Pool
from diffgraph.finetuning.gradients import Gradients
from diffgraph.finetuning.optimizers import Kept
from diffgraph.recordable import written_by
from diffgraph.tensors import storage_of, tensors_in
from diffgraph.write_log import WriteLog


@contextmanager
def undone(gradients: Gradients, optimizers: Sequence[torch.optim.Optimizer], pool: Pool) -> Iterator[None]:
    """Afterwards tensors, gradients, the optimizers' state and the generators are as before, whether it raised or not."""
    held, kept, rng, log = gradients.held(), Kept(optimizers), pool.rng_state(), WriteLog()
    try:
        with _Noted(log):
            yield
    finally:
        gradients.put(held)
        kept.put_back()
        pool.set_rng_state(rng)
        log.undo()


class _Noted(TorchDispatchMode):
    """Notes what is written that was there before."""

    def __init__(self, log: WriteLog) -> None:
        super().__init__()
        self._log = log
        self._born: dict[int, StorageWeakRef] = {}  # a weak reference keeps a storage's identity from being given to another one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = written_by(func, args, kwargs)
        self._log.note((t for t in written if storage_of(t) not in self._born), runs_now=True)
        result = func(*args, **kwargs)
        given = {storage_of(t) for t in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if tensor.layout == torch.strided and storage_of(tensor) not in given:
                reference = StorageWeakRef(tensor.untyped_storage())
                self._born[reference.cdata] = reference
        return result
