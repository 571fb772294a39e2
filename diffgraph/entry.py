"""What is known of one signature, and when it is worth recording (again)."""

from __future__ import annotations

from diffgraph.capture import Recording
from diffgraph.reasons import Reason
from diffgraph.shapes import CaptureShape

#: A recording dropped before this many replays has not paid for its capture; after a few of them the next one waits longer.
PAYS_AFTER = 8
FREE_TRIES = 4


class Entry:
    """What is known of one signature: how often it was seen, its recording, or why it has none."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.recording: Recording | None = None
        self.insistence = 0  # of the runner, when that was made
        self.met = 0  # and when it was last met inside `diffgraph.capture`
        self.trusted = False  # a replay was found equal to eager
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

    def evict(self) -> None:
        """Give up the recording and its memory."""
        if self.recording is not None:
            self.recording.release()
            self.recording = None
            self.unpaid = 0 if self.recent_replays >= PAYS_AFTER else self.unpaid + 1
        self.seen = self.recent_replays = self.memory_bytes = 0
        self.trusted = self.doubted = False
        self.lost = None

    @property
    def wait(self) -> int:
        """Eager calls to see before capturing: more where recordings do not last, or they would cost more than they save."""
        return 2 ** min(max(self.unpaid - FREE_TRIES, 0), 10)
