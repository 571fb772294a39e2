"""Is a step's first replay what eager would have done? Both are run from the same state; eager's outcome is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diffgraph.devices import Pool
from diffgraph.engine.write_log import Contents
from diffgraph.finetuning.gradients import Gradients
from diffgraph.finetuning.step_recording import StepRecording
from diffgraph.recording.signature import Call
from diffgraph.values.compare import close, same_bits

#: Where kernels add in no fixed order (most backward passes of attention on a GPU), Adam turns their noise into whole steps of
#: some weights. Memory that was overwritten is farther off.
NOISE = 0.25


def replay_and_compare(
    recording: StepRecording, call: Call, gradients: Gradients, eager: Callable[[], Any]
) -> tuple[Any, bool | None]:
    """What `eager()` returns, which is called once, and whether a replay did the same to everything: to the bit where kernels
    are deterministic. `None` where there is no memory for the copies."""
    with gradients.at_home():
        return _replay_and_compare(recording, call, gradients, eager)


def _replay_and_compare(
    recording: StepRecording, call: Call, gradients: Gradients, eager: Callable[[], Any]
) -> tuple[Any, bool | None]:
    pool, log = recording.pool, recording.log
    try:
        before = log.contents()
    except torch.OutOfMemoryError:
        return eager(), None
    held, rng = gradients.held(), pool.rng_state()
    replayed = rng_after = None
    try:
        replayed = _State(recording.run(call), recording, gradients, before)
        rng_after = pool.rng_state()
    except torch.OutOfMemoryError:
        pass
    finally:
        gradients.put(held)
        log.restore(before)
        pool.set_rng_state(rng)
    output = eager()
    if replayed is None:
        return output, None
    try:
        found = _State(output, recording, gradients, before)
        same = replayed.is_same(found) if has_fixed_order(pool) else replayed.is_close(found)
    except torch.OutOfMemoryError:  # eager's step is made
        return output, None
    return output, same and not pool.drew(rng_after)


def has_fixed_order(pool: Pool) -> bool:
    """Whether kernels give the same bits at each run. `warn_only=True` asks for that and does not get it: it leaves the backward
    of attention, cuDNN's and the memory-efficient one, as fast as it is (ATen/native/transformers/cuda/attention_backward.cu)."""
    asked = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    return pool.runs_while_recording or asked


class _State:
    """What a step leaves: its output, gradients, and all else that it writes. `before`: what was written then held."""

    def __init__(self, output: Any, recording: StepRecording, gradients: Gradients, before: Contents) -> None:
        without = [*recording.inputs.tensors, *gradients.homes()]
        self._output = output
        self._gradients = [None if p.grad is None else p.grad.clone() for p in gradients.parameters]
        self._written = recording.log.values(without=without)
        self._before = recording.log.views(before, without=without)

    def is_same(self, other: _State) -> bool:
        return same_bits((self._output, self._gradients, self._written), (other._output, other._gradients, other._written))

    def is_close(self, other: _State) -> bool:
        """A step is small beside the weights, so not they are compared but what was done to them."""
        return is_close((self._output, self._gradients, self._changes()), (other._output, other._gradients, other._changes()))

    def _changes(self) -> list[torch.Tensor]:
        return list(map(_change, self._written, self._before))


def _change(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    if not now.is_floating_point():
        return now
    precise = now.dtype if now.itemsize > 4 else torch.float32
    return now.to(precise) - before.to(precise)


def is_close(a: Any, b: Any) -> bool:
    """Whether two results differ by noise alone."""
    return close(a, b, tolerance=NOISE)
