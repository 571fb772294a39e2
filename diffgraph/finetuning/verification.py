"""Is a step's first replay what eager would have done? Both are run from the same state; eager's outcome is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from diffgraph.compare import same_bits
from diffgraph.finetuning.gradients import Gradients
from diffgraph.finetuning.recording import StepRecording
from diffgraph.signature import Call
from diffgraph.tensors import bits_of, tensors_in

#: Where kernels add in no fixed order (most backward passes of attention on a GPU), Adam turns their noise into whole steps of
#: some weights. Memory that was overwritten is farther off.
NOISE = 0.25


def replay_and_compare(recording: StepRecording, call: Call, gradients: Gradients, eager: Callable[[], Any]) -> tuple[Any, bool]:
    """What `eager()` returns, and whether a replay did the same to everything: to the bit where kernels are deterministic.

    Raises `torch.OutOfMemoryError` before anything is changed when the copies do not fit.
    """
    pool, log = recording.pool, recording.log
    gradients.bring_home()
    before, held, rng = log.contents(), gradients.held(), pool.rng_state()
    replayed = recording.run(call)
    replayed_state = _State(replayed, recording, gradients)
    rng_after = pool.rng_state()
    gradients.put(held)
    log.restore(before)
    pool.set_rng_state(rng)
    output = eager()
    eager_state = _State(output, recording, gradients)
    exact = pool.runs_while_recording or torch.are_deterministic_algorithms_enabled()
    same = replayed_state.is_same(eager_state) if exact else replayed_state.is_close(eager_state)
    return output, same and not pool.drew(rng_after)


class _State:
    """What a step leaves: its output, gradients, and all else that it writes."""

    def __init__(self, output: Any, recording: StepRecording, gradients: Gradients) -> None:
        self._output = output
        self._gradients = [None if p.grad is None else p.grad.clone() for p in gradients.parameters]
        self._written = recording.log.values(without=[*recording.inputs.tensors, *gradients.homes()])

    def is_same(self, other: _State) -> bool:
        return same_bits(*self._both(other))

    def is_close(self, other: _State) -> bool:
        return is_close(*self._both(other))

    def _both(self, other: _State) -> tuple[Any, Any]:
        return (self._output, self._gradients, self._written), (other._output, other._gradients, other._written)


def is_close(a: Any, b: Any) -> bool:
    """Whether the tensors of two results differ by noise alone."""
    mine, others = tensors_in(a), tensors_in(b)
    return [t.shape for t in mine] == [t.shape for t in others] and all(map(_is_close, mine, others))


def _is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(bits_of(a), bits_of(b))
    distance = torch.linalg.vector_norm(a.float() - b.float())
    return bool(distance <= NOISE * torch.linalg.vector_norm(b.float()))
