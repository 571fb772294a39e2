"""One training step made replayable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch

from diffgraph.devices import Pool
from diffgraph.engine.ranges import opened
from diffgraph.engine.recorder import Recorder, in_one_thread, record
from diffgraph.engine.sequence import GraphSequence
from diffgraph.engine.write_log import WriteLog
from diffgraph.errors import CaptureError, ReplayError
from diffgraph.finetuning.gradients import Gradients, Left
from diffgraph.finetuning.optimizers import Kept, OptimizerState
from diffgraph.recording.capture import Recording, check_outputs, settled
from diffgraph.recording.signature import Call
from diffgraph.recording.static_inputs import StaticInputs
from diffgraph.values.tensors import storage_of
from diffgraph.values.tree import map_leaves

Step = Callable[..., Any]


class StepRecording(Recording):
    """A recorded step: what `run` gives is detached, and gradients are where the step would have left them."""

    def __init__(self, inputs: StaticInputs, sequence: GraphSequence, gradients: Gradients) -> None:
        super().__init__(inputs, sequence)
        self.log = WriteLog()
        self._gradients = gradients
        self.left_gradients = Left([], [])

    def run(self, call: Call) -> Any:
        with self._gradients.at_home():
            output = super().run(call)
            self._gradients.leave(self.left_gradients)
        if not self.pool.runs_while_recording:  # a graph's kernels count no writes
            torch.autograd.graph.increment_version(self.log.tensors)
        return output

    def release(self) -> None:
        super().release()
        self.log, self.left_gradients = WriteLog(), Left([], [])


def detached(output: Any) -> Any:
    """What a step returns, without the graph behind it: its nodes would keep the stream that they were made on, and a replay has
    none."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, output, objects=True)


def run_eagerly(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As it will be recorded: backward in this thread, so that its libraries are at hand there."""
    with in_one_thread():
        return detached(step(*args, **kwargs))


def capture_step(
    step: Step,
    call: Call,
    pool: Pool,
    modules: Sequence[torch.nn.Module],
    gradients: Gradients,
    optimizers: Sequence[torch.optim.Optimizer],
) -> tuple[StepRecording, Any]:
    """Record `step` for this call. Returns the recording and the call's own result: a capture is a true step.

    Whatever the step raises is passed on, and then weights, gradients, the optimizers' state and the generators are as before.
    """
    inputs = StaticInputs(call)
    recording = StepRecording(inputs, GraphSequence(pool), gradients)
    held, kept = gradients.held(), Kept(optimizers)
    with pool.turn(), opened("capture"):
        try:
            gradients.bring_home()
            output, recorder = _record(step, recording, modules, gradients, optimizers)
        except BaseException:
            gradients.put(held)
            kept.put_back()
            recording.log.undo()
            recording.release()
            raise
        recording.log.forget()
        try:
            gradients.leave(recording.left_gradients)
            gradients.give_back(held)
            recording.set_outputs(output, None, recorder.is_born)
            result = recording.outputs(call.leaves)
        except Exception as error:
            raise ReplayError(f"the step was made, and what it returns was lost: {error}") from error
        recording.wrote_inputs = bool(recorder.written)
        del output
        recording.escaped = recorder.escaped()
        return recording, result


def _record(
    step: Step,
    recording: StepRecording,
    modules: Sequence[torch.nn.Module],
    gradients: Gradients,
    optimizers: Sequence[torch.optim.Optimizer],
) -> tuple[Any, Recorder]:
    of_modules = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    weights = chain(of_modules, gradients.parameters)
    args, kwargs = recording.inputs.call()
    there = gradients.there()
    with record(recording.sequence, weights=weights, inputs=recording.inputs.tensors, log=recording.log) as recorder:
        output = map_leaves(settled, detached(step(*args, **kwargs)), objects=True)
        check_outputs(output)
        if recording.inputs.changed(args, kwargs) is not None:
            raise CaptureError("the step changed a list or dict that it was given; accepted: batches that it only reads")
        recording.left_gradients = gradients.left_since(there)
        gradients.bring_home(is_recorded=True)
        _check_state(recorder, recording.log, optimizers)  # before it runs, where nothing has run yet
    return output, recorder


def _check_state(recorder: Recorder, log: WriteLog, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    written = set(map(storage_of, log.tensors))
    for rate in OptimizerState(optimizers).rates():
        if storage_of(rate) in written:
            raise CaptureError("the step sets the learning rate; accepted: `scheduler.step()` after the recorded step, not in it")
    for optimizer in optimizers:
        for state in optimizer.state.values():
            if any(isinstance(value, torch.Tensor) and recorder.is_born(value) for value in state.values()):
                raise CaptureError(f"{type(optimizer).__name__} makes its state anew at each step")
