"""What is known of one signature, and when it is worth recording (again).

A signature has one recording, or a few that differ in what the host read while they were made (a prompt's length, say): each in
an `Entry` of its own, which `HostValues` holds together.
"""

from __future__ import annotations

from collections.abc import Sequence

from diffgraph.prompts.buckets import Prompt, is_short
from diffgraph.reasons import Reason
from diffgraph.recording.capture import Recording
from diffgraph.shapes.capture_shape import CaptureShape

#: A recording dropped before this many replays has not paid for its capture; after a few of them the next one waits longer.
PAYS_AFTER = 8
FREE_TRIES = 4
#: A forward whose calls so often left something behind that a replay would not is not recorded.
MAX_ESCAPES = 2
#: So many recordings of one signature may differ in what the host read.
MAX_VALUES = 4
MAX_RESTING_CALLS = 1024


class Entry:
    """What is known of one signature: how often it was seen, its recording, or why it has none."""

    def __init__(self, label: str, values: HostValues | None = None) -> None:
        self.label = label
        self.values = values or HostValues(self)
        self.followed_by: Entry | None = None  # the one of the same `values` that was replayed next, when last seen
        self.recording: Recording | None = None
        self.insistence = 0  # of the runner, when that was made
        self.met = 0  # and when it was last met inside `diffgraph.capture`
        self.trusted = False  # a replay was found equal to eager
        self.trusted_padded = False  # and so was one of a prompt shorter than its bucket
        self.doubted = False  # another signature's forward has since changed something that this one may rely on
        self.seen = 0  # eager calls since there was no recording that may serve as warm-up
        self.unpaid = 0  # recordings in a row that were dropped before they had paid for themselves
        self.replays = 0  # in all
        self.recent_replays = 0  # of this recording
        self.memory_bytes = 0
        self.refused: Reason | None = None  # for good, or until `diffgraph.capture`
        self.lost: Reason | None = None  # why the last recording was dropped
        self.escapes = 0
        self.is_met = False  # by a call that nobody made in order to record
        self.shape: CaptureShape | None = None  # of the pipeline call that it was met in

    def is_trusted(self, prompt: Prompt | None) -> bool:
        """Whether a replay with such a prompt was compared: where the first ones filled their bucket, none with padding was."""
        return self.trusted_padded if is_short(prompt) else self.trusted

    @property
    def is_in_use(self) -> bool:
        return self.recording is not None and self.recording.in_flight

    def evict(self) -> None:
        """Make room for others."""
        self.release()
        self.lost = Reason.EVICTED

    def release(self) -> None:
        """Give up the recording and its memory."""
        if self.recording is not None:
            self.recording.release()
            self.recording = None
            self.unpaid = 0 if self.recent_replays >= PAYS_AFTER else self.unpaid + 1
        self.seen = self.recent_replays = self.memory_bytes = 0
        self.trusted = self.trusted_padded = self.doubted = False
        self.lost = None

    def refusal(self, change: Reason | None = None) -> Reason | None:
        """Why it is not to be recorded. A `change` of state makes all that was refused worth another try but what was wrong."""
        return self.refused if change is None or self.refused is Reason.VERIFY_FAILED else None

    @property
    def wait(self) -> int:
        """Eager calls to see before capturing: more where recordings do not last, or they would cost more than they save."""
        return 2 ** min(max(self.unpaid - FREE_TRIES, 0), 10)


class HostValues:
    """The recordings of one signature, told apart by what the host reads: one that reads something else cannot replay.

    Which one fits shows only when it is tried, so the likeliest comes first: with two calls a step, their values alternate.
    A value that is another one each time must not cost more than it saves: after `MAX_VALUES` calls that no recording fitted,
    the modules that read it become breaks, and where that cannot be, or does not help, the signature rests, for longer each time.
    """

    def __init__(self, first: Entry) -> None:
        self.first = first
        self.entries = [first]  # the one used longest ago comes first
        self.breaks: tuple[str, ...] = ()  # submodules that run eagerly, since what they read keeps changing
        self._latest = first
        self._misses = 0  # calls that no recording fitted, less those that one did
        self._rest = 0  # calls to run eager untried
        self._rested = False

    def resting(self) -> bool:
        """Whether this call is to run eager untried."""
        if self._rest == 0:
            return False
        self._rest -= 1
        return True

    @property
    def is_resting(self) -> bool:
        return self._rest > 0

    def recorded(self) -> list[Entry]:
        """Those that can be tried, the likeliest first."""
        known = [entry for entry in reversed(self.entries) if entry.recording is not None]
        likeliest = self._latest.followed_by
        if likeliest in known:
            known.remove(likeliest)
            known.insert(0, likeliest)
        return known

    def forgive(self) -> None:
        self._misses = self._rest = 0
        self._rested = False

    def widen(self, names: Sequence[str]) -> bool:
        """Have these submodules run eagerly from now on; whether that is anything new."""
        new = [name for name in names if name not in self.breaks]
        self.breaks += tuple(new)
        if new:
            self.forgive()
        return bool(new)

    def fitted(self, entry: Entry) -> None:
        self._latest.followed_by = entry
        self._latest = entry
        self._misses = max(0, self._misses - 1)
        self._note_use(entry)

    def missed(self) -> bool:
        """Note that none fitted this call; whether one may be recorded for it."""
        self._misses += 1
        if self._misses < MAX_VALUES or self._rested:
            self._rested = False
            return True
        self._rest, self._rested = min(2 ** (self._misses - MAX_VALUES + 1), MAX_RESTING_CALLS), True
        return False

    def room(self) -> Entry | None:
        """Where a recording of other values can go: a free entry, a new one, or that of the one used longest ago."""
        usable = [entry for entry in self.entries if entry.refused is None]
        found = next((entry for entry in usable if entry.recording is None), None)
        if found is None and len(self.entries) < MAX_VALUES:
            found = Entry(f"{self.first.label} (host values {len(self.entries) + 1})", self)
            self.entries.append(found)
        found = found or next(iter(usable), None)
        if found is not None:
            self._note_use(found)
        return found

    def _note_use(self, entry: Entry) -> None:
        if self.entries[-1] is not entry:  # a new list: others read the old one meanwhile
            self.entries = [*(other for other in self.entries if other is not entry), entry]
