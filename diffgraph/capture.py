"""One forward made replayable: static inputs, a sequence, and where its outputs lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch

from diffgraph import breaks as break_points
from diffgraph.collectives import arrived
from diffgraph.compare import same_bits
from diffgraph.containers import follow
from diffgraph.devices import Pool
from diffgraph.errors import CaptureError
from diffgraph.padding import Padding
from diffgraph.ranges import opened
from diffgraph.ranks import Ranks
from diffgraph.recorder import record
from diffgraph.sequence import Break, GraphSequence
from diffgraph.signature import Call, is_constant
from diffgraph.static_inputs import StaticInputs
from diffgraph.tensors import describe, has_plain_memory
from diffgraph.tree import Spec, flatten, map_leaves, unflatten

Forward = Callable[..., Any]


class Recording:
    """A recorded forward. `run` gives it a call's live leaves and returns what the forward would."""

    def __init__(self, inputs: StaticInputs, sequence: GraphSequence) -> None:
        self.inputs = inputs
        self.sequence = sequence
        self.wrote_inputs = False  # it wrote to its arguments, which a replay would do to the static inputs only
        self.draws = False  # it draws random numbers
        self.unused_breaks: list[str] = []  # names given to `breaks` that the forward never called
        self.left: list[Any] | None = None  # by the last run, in the caller's containers, where the forward changes them
        self.left_spec: Spec = None
        self.padding: Padding | None = None  # of its prompts
        self.escaped = False  # something outside still holds memory that the next replay overwrites
        self._spec: Spec = None
        self._leaves: list[Any] = []
        self._given: list[int | None] = []  # which of the call's leaves an output is, where the forward hands one back

    @property
    def pool(self) -> Pool:
        return self.sequence.pool

    @property
    def segments(self) -> int:
        return self.sequence.segments

    @property
    def breaks(self) -> int:
        return self.sequence.breaks

    def readers(self) -> list[torch.nn.Module]:
        """The modules in whose forwards Python reads values, or sizes that depend on values."""
        found = [step.reader() for step in self.sequence.steps if isinstance(step, Break) and step.reader is not None]
        return [module for module in found if module is not None]

    def run(self, call: Call, ranks: Ranks | None = None) -> Any:
        """`ranks`: those that run it at the same time for the first time, and speak to one another on the way."""
        with self.pool.turn():
            self.inputs.copy_from(call.leaves)
            if self.padding is not None and call.prompt is not None:
                self.padding.lengths = call.prompt.lengths
            self.sequence.failed_halfway = None
            room = self._made_room() if self.sequence.collectives else {}
            if ranks is None:
                self.sequence.replay()
            else:
                with torch.inference_mode(False), torch.no_grad(), ranks.watching():  # as while it was recorded: see `record`
                    self.sequence.replay(None if self.pool.runs_while_recording else ranks.before)
            return self.outputs(call.leaves, room)

    def _made_room(self) -> dict[int, torch.Tensor]:
        try:
            return self._room()
        except torch.OutOfMemoryError:  # the other ranks replay, so this one had better, too
            torch.cuda.empty_cache()
            return self._room()

    def _room(self) -> dict[int, torch.Tensor]:
        """Memory for what the next replay returns: where there is none, other ranks do not yet wait for our part in it."""
        mine = (leaf for leaf, at in zip(self._leaves, self._given, strict=True) if at is None)
        return {id(leaf): torch.empty_like(leaf) for leaf in mine if isinstance(leaf, torch.Tensor)}

    def outputs(self, given: list[Any], room: dict[int, torch.Tensor] | None = None) -> Any:
        """Clones, in the forward's own containers: the next replay must not overwrite what this one returned."""
        room = room or {}
        made = {id(leaf): room[id(leaf)].copy_(leaf) for leaf in self._leaves if id(leaf) in room}
        leaves = [
            given[at] if at is not None else _cloned(leaf, made) for leaf, at in zip(self._leaves, self._given, strict=True)
        ]
        output, self.left = unflatten(self._spec, leaves)
        return output

    def follow(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Do to the caller's containers what the forward did to the static ones."""
        if self.left is not None:
            follow((args, kwargs), self.left_spec, iter(self.left))
            self.left = None

    def did(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether eager has just done to the caller's containers what the last run would."""
        if self.left is None:
            return True
        leaves, spec = flatten((args, dict(sorted(kwargs.items()))), objects=True)
        left, self.left = self.left, None
        return spec == self.left_spec and same_bits(leaves, left)

    def _set_outputs(self, output: Any, changed: tuple[list[Any], Spec] | None, is_born: Callable[[torch.Tensor], bool]) -> None:
        """`changed`: what the forward left in the containers that it was given."""
        left, self.left_spec = (None, None) if changed is None else changed
        leaves, self._spec = flatten((output, left), objects=True)
        self._given = list(map(self.inputs.position, leaves))
        made: dict[int, Any] = {}
        for leaf in leaves:
            aliased = isinstance(leaf, torch.Tensor) and is_born(leaf)
            made[id(leaf)] = self.pool.alias(leaf) if aliased else leaf
        self._leaves = [made[id(leaf)] for leaf in leaves]

    def release(self) -> None:
        self._leaves, self._given = [], []
        self.sequence.reset()


def _cloned(leaf: Any, made: dict[int, torch.Tensor]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if id(leaf) not in made:
        made[id(leaf)] = leaf.clone()
    return made[id(leaf)]


class EagerRecording(Recording):
    """The debug backend: static inputs and every rule of the runner, but the forward itself runs each time.

    If a fault survives it, capture is not to blame.
    """

    def __init__(self, inputs: StaticInputs, sequence: GraphSequence, forward: Forward) -> None:
        super().__init__(inputs, sequence)
        self._forward = forward

    def run(self, call: Call, ranks: Ranks | None = None) -> Any:
        with self.pool.turn():
            self.inputs.copy_from(call.leaves)
            args, kwargs = self.inputs.call()
            output = map_leaves(settled, self._forward(*args, **kwargs), objects=True)
            self._set_outputs(output, self.inputs.changed(args, kwargs), lambda _: False)
            return self.outputs(call.leaves)


def capture(
    module: torch.nn.Module,
    forward: Forward,
    call: Call,
    pool: Pool,
    *,
    backend: str,
    breaks: str | Sequence[str],
    more_breaks: Sequence[str] = (),
    break_ops: Collection[Any] = (),
    ranks: Ranks | None = None,
    collectives: str = "record",
) -> tuple[Recording, Any]:
    """Record `forward` for this call. Returns the recording and the call's own result: a capture is a true forward.

    `more_breaks` are names of submodules, beside what `breaks` chooses, and `break_ops` ops to run eagerly. `ranks` are those
    that record the same at the same time; what they say to one another is recorded or a break, as `collectives` tells.
    Whatever the forward raises is passed on, with nothing of the attempt left.
    """
    with pool.turn(), opened("capture"):
        inputs = StaticInputs(call)
        sequence = GraphSequence(pool)
        if backend == "eager":
            made = EagerRecording(inputs, sequence, forward)
            return made, made.run(call)
        recording = Recording(inputs, sequence)
        rng = pool.rng_state()
        whole = backend == "full"
        args, kwargs = inputs.call()
        weights = chain(module.parameters(), module.buffers())
        recording.padding = None if call.prompt is None else call.prompt.padding()
        with (
            break_points.placed(module, () if whole else breaks, () if whole else more_breaks, is_parallel=ranks is not None),
            padded(module, call, recording.padding),
            record(
                sequence,
                weights=weights,
                inputs=inputs.tensors,
                whole=whole,
                break_ops=break_ops,
                ranks=ranks,
                break_at_collectives=collectives == "break",
            ) as recorder,
        ):
            output = map_leaves(settled, forward(*args, **kwargs), objects=True)
            changed = inputs.changed(args, kwargs)
            _check_outputs((output, changed and changed[0]))
            _check_host_reads(sequence)
        recording.wrote_inputs = bool(recorder.written)
        recording._set_outputs(output, changed, recorder.is_born)
        recording.draws = pool.drew(rng)
        recording.unused_breaks = break_points.unused(() if whole else breaks, sequence)
        result = recording.outputs(call.leaves)
        del output, args, kwargs, changed
        recording.escaped = recorder.escaped()
        return recording, result


def padded(module: torch.nn.Module, call: Call, padding: Padding | None) -> AbstractContextManager[Any]:
    """Inside, a forward of this thread on the call's own arguments takes the padded rows of its prompts for what they are."""
    return nullcontext() if call.prompt is None or padding is None else call.prompt.rule.placed(module, padding)


def padded_forward(module: torch.nn.Module, forward: Forward, call: Call) -> Any:
    """The forward that a recording of this call is of, unrecorded: the same ops on the same shapes."""
    assert call.prompt is not None
    args, kwargs = unflatten(call.spec, call.leaves)
    with break_points.placed(module, "attention"), padded(module, call, call.prompt.padding()):
        return forward(*args, **kwargs)


def settled(leaf: Any) -> Any:
    """Without what is yet to be done at its first use, a conjugation, a negation, or to wait for a collective: an alias of the
    memory would not know of it."""
    leaf = arrived(leaf)
    lazy = isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and (leaf.is_conj() or leaf.is_neg())
    return leaf.resolve_conj().resolve_neg() if lazy else leaf


def _check_host_reads(sequence: GraphSequence) -> None:
    """Where a replay gives up since the host reads another value, other ranks must not wait for the rest of it."""
    issued = 0
    for step in sequence.steps:
        issued += step.collectives
        if issued and isinstance(step, Break) and step.reads_host:
            raise CaptureError(f"{step.name} is read by the host after a collective, where the ranks of a replay could part")


def _check_outputs(output: Any) -> None:
    for leaf in flatten(output, objects=True)[0]:
        if isinstance(leaf, torch.Tensor) and not has_plain_memory(leaf):
            raise CaptureError(f"the forward returned a {describe(leaf)}; accepted: plain dense tensors")
        if not isinstance(leaf, torch.Tensor) and not is_constant(leaf):
            raise CaptureError(
                f"the forward returned a {type(leaf).__qualname__}, which a replay cannot make anew; "
                "accepted: tensors and constants, nested in tuples, lists, dicts and dataclasses"
            )
