"""One call on its way: the three routes, each of which may turn out to be eager after all."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from diffgraph.devices import Pool
from diffgraph.engine.ranges import named
from diffgraph.errors import CaptureWarning, HostValueChanged, OpNotRecordable, OtherRankFailed, RankError
from diffgraph.parallel.ranks import Ranks
from diffgraph.prompts.buckets import is_short
from diffgraph.reasons import Reason, Refused
from diffgraph.recording.capture import Recording, capture
from diffgraph.recording.side_effects import Before, drawn_in_python
from diffgraph.recording.signature import Call
from diffgraph.recording.verification import is_close, is_same, is_slower
from diffgraph.routing.entry import Entry
from diffgraph.routing.routes import Route

if TYPE_CHECKING:
    from diffgraph.routing.runner import Runner

logger = logging.getLogger("diffgraph")


class Visit(NamedTuple):
    """What the caller gave, and what is recorded in its place (its prompt may be padded).

    Each route returns what the call returns, or raises `Refused`: then it is eager's.
    """

    runner: Runner
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: Call
    entry: Entry
    pool: Pool
    ranks: Ranks | None = None  # that make this call together

    # -- eager, to be recorded later

    def warm_up(self) -> Any:
        """The eager call that a capture needs before it: caches fill, kernels are chosen, side effects show."""
        runner, entry, prompt = self.runner, self.entry, self.call.prompt
        is_asked_for = runner.insistence.is_on
        versions = runner.state.versions()
        before, forbidden = None, None
        try:
            before = Before(self.args, self.kwargs)
        except torch.OutOfMemoryError:  # eager alone may fit
            forbidden = Reason.OUT_OF_MEMORY
        known = Reason.WARM_UP if is_asked_for else entry.lost or Reason.UNSEEN_SIGNATURE
        runner.routes.note(Route.EAGER, forbidden or known)
        rng, drawn = self.pool.rng_state(), drawn_in_python()
        output = runner.eager(self.module, self.args, self.kwargs)
        if before is not None:
            forbidden = before.forbids(self.args, self.kwargs, is_padded=prompt is not None and prompt.is_padded)
        if forbidden is None and not self.pool.replayable_rng(rng):
            forbidden = Reason.SIDE_EFFECTS
        forbidden = self._verdict(forbidden)
        with self.pool.lock:
            if forbidden is not None:
                runner.memory.drop(entry, refused=forbidden)
            elif runner.changed_state(self.module, entry):
                pass
            elif runner.state.versions() != versions or drawn_in_python() != drawn:
                runner.note_escape(entry)  # others read the tensor afresh; or another thread has drawn
            else:
                entry.seen += 1
        if is_asked_for and entry.recording is None and self._verdict(entry.refused) is None and before is not None:
            return runner.routed(self.module, *before.arguments())
        return output

    # -- capture

    def capture(self) -> Any:
        before = self.pool.bytes()
        recording, output = self._record()
        is_padded = self.call.prompt is not None and self.call.prompt.is_padded
        try:
            wrong = self._wrong_result(recording, output) if is_padded or recording.compilation is not None else None
            if wrong is not None:
                raise self._refused(wrong)
        except BaseException:  # of the comparison, which runs eager, too
            recording.release()
            raise
        self.runner.routes.note(Route.CAPTURE)
        recording.follow(self.args, self.kwargs)
        self._take_in(recording, self.pool.bytes() - before)
        if recording.unused_breaks:
            names = ", ".join(map(repr, recording.unused_breaks))
            text = f"diffgraph: breaks names {names}, which the forward never called (under that name): recorded without a break"
            warnings.warn(text, CaptureWarning, stacklevel=4)
        return output

    def _record(self) -> tuple[Recording, Any]:
        runner, entry, ranks = self.runner, self.entry, self.ranks
        recording: Recording | None = None
        try:
            with nullcontext() if ranks is None else ranks.step(f"the capture of {entry.label}"):
                recording, output = capture(
                    self.module,
                    runner.run_forward,
                    self.call,
                    self.pool,
                    backend=runner.options.backend,
                    breaks=runner.options.breaks,
                    more_breaks=entry.values.breaks,
                    break_ops=runner.break_ops,
                    compiler=runner.compiler if ranks is None else None,  # each rank would compile in its own time
                    ranks=ranks,
                    collectives=runner.options.collectives,
                )
                if ranks is not None:
                    ranks.wait_for(self.pool)
                return recording, output
        except RankError:  # nothing is released: that would wait for a GPU that may be waiting for the others
            raise
        except OtherRankFailed as error:
            if recording is not None:
                recording.release()
            runner.memory.drop(entry, lost=Reason.OTHER_RANK)
            raise Refused(Reason.OTHER_RANK, str(error)) from None
        except OpNotRecordable as error:
            if error.op in runner.break_ops or (ranks is not None and len(set(ranks.failures)) > 1):
                raise self._failed(error) from error
            runner.break_ops.add(error.op)
            logger.info("%s: %s is a break from now on", entry.label, error.op)
        except torch.OutOfMemoryError:
            raise self._refused(Reason.OUT_OF_MEMORY) from None
        except Exception as error:
            raise self._failed(error) from error
        return self._record()

    def _take_in(self, recording: Recording, memory_bytes: int) -> None:
        """Keep the recording, if what it did while it was made could be done again."""
        runner, entry = self.runner, self.entry
        if recording.wrote_inputs:
            recording.inputs.copy_back(self.call.leaves)
            recording.release()
            runner.memory.drop(entry, refused=Reason.SIDE_EFFECTS)
        elif runner.changed_state(self.module, entry) or not runner.table.knows(self.call.signature, entry):
            recording.release()
        elif recording.escaped or recording.elsewhere.tensors:
            # The result is right, but a cache of the model now holds what a replay would overwrite, or was written to. It may be
            # full now: once more.
            recording.release()
            runner.note_escape(entry)
        else:
            entry.recording, entry.lost, entry.insistence = recording, None, runner.insistence.number
            entry.memory_bytes = memory_bytes
            if not runner.memory.admit(entry, self.pool):
                entry.refused = Reason.OUT_OF_MEMORY

    def _wrong_result(self, recording: Recording, output: Any) -> Reason | None:
        """Whether a forward on padded prompts, or of compiled blocks, did what the caller's own would not: then its very result
        must not be returned."""
        if recording.wrote_inputs or recording.left is not None or recording.elsewhere.tensors:
            recording.elsewhere.undo()
            return Reason.SIDE_EFFECTS
        runner = self.runner
        if runner.options.verify and not is_close(output, runner.eager(self.module, self.args, self.kwargs), self.module):
            return self._differs("what was recorded")
        return None

    def _differs(self, what: str) -> Reason:
        refused = self._refused(Reason.VERIFY_FAILED)  # first: a warning may be an error
        text = f"diffgraph: {self.entry.label} runs eager: {what} differed from eager"
        warnings.warn(text, CaptureWarning, stacklevel=6)
        return refused.reason

    def _failed(self, error: Exception) -> Refused:
        refused = self._refused(Reason.CAPTURE_FAILED, str(error))
        warnings.warn(f"diffgraph: {self.entry.label} runs eager: {error}", CaptureWarning, stacklevel=6)
        return refused

    def _refused(self, reason: Reason, detail: str = "") -> Refused:
        """For good, or until `diffgraph.capture`."""
        self.runner.memory.drop(self.entry, refused=reason)
        return Refused(reason, detail)

    # -- replay

    def replay(self) -> Any:
        recording = self.entry.recording
        assert recording is not None
        if self.runner.options.verify and not self.entry.is_trusted(self.call.prompt):
            return self._verify(recording)
        output = self._run(recording)
        recording.follow(self.args, self.kwargs)
        self.runner.note_replay(self.entry, recording)
        return output

    def _run(self, recording: Recording, watchers: Ranks | None = None) -> Any:
        pool = recording.pool
        rng = pool.rng_state() if recording.draws else None
        run = recording.run if watchers is None else partial(recording.run, ranks=watchers)
        try:
            # What an unfinished replay drew, eager draws again.
            with _undone(lambda: pool.set_rng_state(rng)) if recording.draws else nullcontext(), self._not_halfway(watchers):
                return named(self.entry.label, run, self.call)
        except (HostValueChanged, OtherRankFailed, RankError):
            raise  # another recording of this signature may fit; or all ranks give it up; or none can go on
        except torch.OutOfMemoryError:
            self.runner.memory.drop(self.entry, lost=Reason.OUT_OF_MEMORY)
            raise Refused(Reason.OUT_OF_MEMORY) from None
        except Exception as error:
            refused = self._refused(Reason.CAPTURE_FAILED, str(error))
            text = f"diffgraph: {self.entry.label} runs eager: its replay raised {error!r}"
            warnings.warn(text, CaptureWarning, stacklevel=5)
            raise refused from error

    def _verify(self, recording: Recording) -> Any:
        """The first replay beside eager on the same inputs; equal to the bit, or this signature stays eager."""
        runner, entry = self.runner, self.entry
        rng = self.pool.rng_state() if recording.draws else None
        replayed, replay_ms = self._timed(lambda: self._run_watched(recording))
        if rng is not None:
            self.pool.set_rng_state(rng)
        output, eager_ms = self._timed(lambda: runner.eager(self.module, self.args, self.kwargs))
        try:
            same = is_same(replayed, output, recording, self.module, runner.run_forward, self.call)
            reason = self._distrust(recording, same and recording.did(self.args, self.kwargs))
        except torch.OutOfMemoryError:  # of the comparison, which needs memory of its own
            reason = self._refused(Reason.OUT_OF_MEMORY).reason
        if self._verdict(reason) is not None and reason is None:
            reason = Reason.OTHER_RANK
            runner.memory.drop(entry, lost=reason)
        if reason is None:
            reason = self._slowness(recording, replay_ms, eager_ms)
        if reason is None:
            entry.trusted, entry.doubted = True, False
            entry.trusted_padded |= is_short(self.call.prompt)
            runner.note_replay(entry, recording)
        else:
            runner.routes.note(Route.EAGER, reason)
        return output

    def _distrust(self, recording: Recording, same: bool) -> Reason | None:
        """Why a replay is not to be trusted after all, its recording given up; `None` when it is."""
        runner, entry = self.runner, self.entry
        if entry.recording is not recording:  # eager ran out of memory and took ours
            return Reason.OUT_OF_MEMORY
        if runner.changed_state(self.module, entry):
            return Reason.SIDE_EFFECTS
        if same:
            return None
        if entry.doubted:
            runner.memory.drop(entry, lost=Reason.SIDE_EFFECTS)
            return Reason.SIDE_EFFECTS
        return self._differs("its replay")

    def _slowness(self, recording: Recording, replay_ms: float | None, eager_ms: float | None) -> Reason | None:
        """Why a replay that is right is still given up: eager is faster, or a replay that was made to be timed failed."""
        if self.runner.options.backend == "eager":  # which is for debugging
            return None
        try:
            slower = is_slower(recording, lambda: self._timed(lambda: self._run_watched(recording)), replay_ms, eager_ms)
        except Refused as refused:
            return refused.reason
        if not slower:
            return None
        logger.info("%s runs eager: a replay takes %s ms, eager %s ms", self.entry.label, replay_ms, eager_ms)
        return self._refused(Reason.NOT_FASTER).reason

    # -- with other ranks

    def _run_watched(self, recording: Recording) -> Any:
        """A replay that other ranks may have to give up together with this one."""
        ranks = self.ranks
        if ranks is None:
            return self._run(recording)
        try:
            with ranks.step(f"the first replay of {self.entry.label}"):
                ranks.before("the replay")
                output = self._run(recording, ranks)
                ranks.wait_for(recording.pool)
                return output
        except OtherRankFailed as error:
            self.runner.memory.drop(self.entry, lost=Reason.OTHER_RANK)
            raise Refused(Reason.OTHER_RANK, str(error)) from None

    def _verdict(self, reason: Reason | None) -> Reason | None:
        """The reason of the first rank that has one."""
        return reason if self.ranks is None else self.ranks.verdict(reason)

    def _timed(self, fn: Callable[[], Any]) -> tuple[Any, float | None]:
        """What `fn` returns, and how long the device took; with other ranks, as long as the slowest of them."""
        if self.ranks is None:
            return self.pool.timed(fn)
        self.ranks.largest(0.0)  # start together
        result, ms = self.pool.timed(fn)
        return result, self.ranks.largest(ms)

    @contextmanager
    def _not_halfway(self, watchers: Ranks | None) -> Iterator[None]:
        """Raise `RankError` where a replay fails after a collective, and the other ranks, unknowing, wait for the rest of it."""
        try:
            yield
        except Exception as error:
            recording = self.entry.recording
            failed = None if recording is None or watchers is not None else recording.sequence.failed_halfway
            if self.ranks is None or failed is None:
                raise
            raise self.ranks.parted(
                f"a replay of {self.entry.label} raised {error!r} in {failed}, after a collective; the other ranks wait for "
                "the rest"
            ) from error


@contextmanager
def _undone(undo: Callable[[], None]) -> Iterator[None]:
    """Call `undo` when what is inside raises."""
    try:
        yield
    except BaseException:
        undo()
        raise
