"""A step of which nothing is left: a warm-up before training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from diffgraph.devices import Pool
from diffgraph.engine.write_log import WriteLog, WritesNoted
from diffgraph.finetuning.gradients import Gradients
from diffgraph.finetuning.optimizers import Kept


@contextmanager
def undone(gradients: Gradients, optimizers: Sequence[torch.optim.Optimizer], pool: Pool) -> Iterator[None]:
    """Afterwards tensors, gradients, the optimizers' state and the generators are as before, whether it raised or not."""
    held, kept, rng, log = gradients.held(), Kept(optimizers), pool.rng_state(), WriteLog()
    try:
        with WritesNoted(log):
            yield
    finally:
        gradients.put(held)
        kept.put_back()
        pool.set_rng_state(rng)
        log.undo()
