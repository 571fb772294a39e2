"""One forward made replayable: static inputs, a sequence, and where its outputs lie."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from diffgraph.compiling.blocks import BlockCompiler, Compilation
from diffgraph.compiling.users import pieces_placed
from diffgraph.devices import Pool
from diffgraph.devices.collectives import arrived
from diffgraph.engine import breaks as break_points
from diffgraph.engine.padding import Padding
from diffgraph.engine.ranges import opened
from diffgraph.engine.recorder import Rules, precision, record
from diffgraph.engine.sequence import Break, GraphSequence
from diffgraph.engine.write_log import WriteLog
from diffgraph.errors import CaptureError, OpNotRecordable
from diffgraph.families.base import PromptRule
from diffgraph.parallel.ranks import Ranks
from diffgraph.recording.signature import Call
from diffgraph.recording.static_inputs import StaticInputs
from diffgraph.values.compare import same_bits
from diffgraph.values.constants import is_constant
from diffgraph.values.containers import follow
from diffgraph.values.tensors import describe, has_plain_memory, own_attributes
from diffgraph.values.tree import Spec, flatten, map_leaves, unflatten

Forward = Callable[..., Any]


class Recording:
    """A recorded forward. `run` gives it a call's live leaves and returns what the forward would."""

    def __init__(self, inputs: StaticInputs, sequence: GraphSequence, around: Surroundings | None = None) -> None:
        self._around = around
        self.inputs = inputs
        self.sequence = sequence
        self.wrote_inputs = False  # it wrote to its arguments, which a replay would do to the static inputs only
        self.elsewhere = WriteLog(is_for_undoing=True)  # what else it wrote: a replay to be compared would do so, too
        self.draws = False  # it draws random numbers
        self.unused_breaks: list[str] = []  # names given to `breaks` that the forward never called
        self.left: list[Any] | None = None  # by the last run, in the caller's containers, where the forward changes them
        self.left_spec: Spec = None
        self.padding: Padding | None = None  # of its prompts
        self.compilation: Compilation | None = None  # of its blocks
        self.uncompiled: str | None = None  # why they are not, where they were to be
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

    @property
    def in_flight(self) -> bool:
        """Whether a run waits for what is to follow it, a backward, and what it left in the pool is needed till then."""
        return False

    def readers(self) -> list[torch.nn.Module]:
        """The modules in whose forwards Python reads values, or sizes that depend on values."""
        found = [step.reader() for step in self.sequence.steps if isinstance(step, Break) and step.reader is not None]
        return [module for module in found if module is not None]

    def unrecorded(self, module: torch.nn.Module, forward: Forward) -> Any:
        """The forward that this is of, on the inputs that it was last given: the same ops on the same shapes."""
        assert self._around is not None
        args, kwargs = self.inputs.call()
        with self._around.placed(module, self.padding), precision():
            return forward(*args, **kwargs)

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
        leaves, spec = flatten((args, kwargs), objects=True)
        left, self.left = self.left, None
        return spec == self.left_spec and same_bits(leaves, left)

    def set_outputs(self, output: Any, changed: tuple[list[Any], Spec] | None, is_born: Callable[[torch.Tensor], bool]) -> None:
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
        self.elsewhere.forget()
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
            self.set_outputs(output, self.inputs.changed(args, kwargs), lambda _: False)
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
    compiler: BlockCompiler | None = None,
) -> tuple[Recording, Any]:
    """Record `forward` for this call. Returns the recording and the call's own result: a capture is a true forward.

    `more_breaks` are names of submodules, beside what `breaks` chooses, and `break_ops` ops to run eagerly. Where compiling the
    module's blocks fails, or recording what was compiled, they are recorded as they are. `ranks` are those that record the same
    at the same time; what they say to one another is recorded or a break, as `collectives` tells.
    Whatever the forward raises is passed on, with nothing of the attempt left.
    """
    with pool.turn(), opened("capture"):
        inputs = StaticInputs(call)
        if backend == "eager":
            made = EagerRecording(inputs, GraphSequence(pool), forward)
            return made, made.run(call)
        whole = backend == "full"
        rule = None if call.prompt is None else call.prompt.rule
        around = Surroundings(rule, () if whole else breaks, () if whole else more_breaks, compiler, ranks is not None)
        rules = Rules(whole, break_ops, ranks, break_at_collectives=collectives == "break")
        if compiler is not None:
            # Uncompiled first: compiled code does not show what it writes, and is run more than once before it is recorded.
            rng = pool.rng_state()
            made = _recorded(module, forward, call, inputs, GraphSequence(pool), around._replace(compiler=None), rules)
            if made[0].wrote_inputs or made[0].elsewhere.tensors:
                return made
            made[0].release()
            pool.set_rng_state(rng)
            del made
            try:
                return _recorded(module, forward, call, inputs, GraphSequence(pool), around, rules)
            except (torch.OutOfMemoryError, OpNotRecordable):
                raise
            except Exception as error:
                why = compiler.failed(module, error)
            around = around._replace(compiler=None)
        recording, result = _recorded(module, forward, call, inputs, GraphSequence(pool), around, rules)
        recording.uncompiled = None if compiler is None else why
        return recording, result


class Surroundings(NamedTuple):
    """What stands around a forward while it is recorded: padded prompts, breaks, compiled blocks."""

    rule: PromptRule | None
    breaks: str | Sequence[str]
    more_breaks: Sequence[str]
    compiler: BlockCompiler | None
    is_parallel: bool = False  # other ranks take part in the forward

    @contextmanager
    def placed(self, module: torch.nn.Module, padding: Padding | None) -> Iterator[None]:
        rule, compiler = self.rule, self.compiler
        with (
            break_points.placed(
                module, self.breaks, self.more_breaks, in_graph=compiler is not None, is_parallel=self.is_parallel
            ),
            # A forward of this thread takes the padded rows of its prompts for what they are.
            nullcontext() if rule is None or padding is None else rule.placed(module, padding),
            nullcontext() if compiler is None else compiler.placed(module),
            pieces_placed(module),
        ):
            yield


def _recorded(
    module: torch.nn.Module,
    forward: Forward,
    call: Call,
    inputs: StaticInputs,
    sequence: GraphSequence,
    around: Surroundings,
    rules: Rules,
) -> tuple[Recording, Any]:
    recording = Recording(inputs, sequence, around)
    recording.padding = None if call.prompt is None else call.prompt.padding()
    rng = sequence.pool.rng_state()
    if around.compiler is not None:
        warm_up = partial(recording.unrecorded, module, forward)
        recording.compilation = around.compiler.compile(module, call.signature, warm_up)
        if sequence.pool.drew(rng):
            sequence.pool.set_rng_state(rng)
            warm_up()  # was it the compiler, trying kernels?
        if sequence.pool.drew(rng):
            sequence.pool.set_rng_state(rng)
            raise CaptureError("the forward draws random numbers, which compiled code would draw from elsewhere")
    args, kwargs = inputs.call()
    weights = chain(module.parameters(), module.buffers())
    with (
        around.placed(module, recording.padding),
        record(sequence, weights=weights, inputs=inputs.tensors, rules=rules, elsewhere=recording.elsewhere) as recorder,
    ):
        output = map_leaves(settled, forward(*args, **kwargs), objects=True)
        changed = inputs.changed(args, kwargs)
        check_outputs((output, changed and changed[0]))
        _check_host_reads(sequence)
    recording.wrote_inputs = bool(recorder.written)
    recording.set_outputs(output, changed, recorder.is_born)
    recording.draws = recording.pool.drew(rng)
    recording.unused_breaks = break_points.unused(around.breaks, sequence)
    result = recording.outputs(call.leaves)
    del output, args, kwargs, changed
    recording.escaped = recorder.escaped()
    return recording, result


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


def check_outputs(output: Any) -> None:
    for leaf in flatten(output, objects=True)[0]:
        if isinstance(leaf, torch.Tensor) and not has_plain_memory(leaf):
            raise CaptureError(f"the forward returned a {describe(leaf)}; accepted: plain dense tensors")
        if isinstance(leaf, torch.nn.Parameter) or (isinstance(leaf, torch.Tensor) and own_attributes(leaf)):
            raise CaptureError("the forward returned a parameter or a tensor with attributes of its own, and a replay would not")
        if not isinstance(leaf, torch.Tensor) and not is_constant(leaf):
            raise CaptureError(
                f"the forward returned a {type(leaf).__qualname__}, which a replay cannot make anew; "
                "accepted: tensors and constants, nested in tuples, lists, dicts and dataclasses"
            )
