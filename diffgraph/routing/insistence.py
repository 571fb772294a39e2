"""Inside `diffgraph.capture`: the calls of the thread that asked for it are recorded at first sight, and anew."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from diffgraph.recording.signature import Signature


class Insistence:
    """One denoiser's. `number`: how often it was begun; what was recorded or met under an earlier one is to be made anew."""

    def __init__(self) -> None:
        self.number = 0
        self._here = threading.local()

    @contextmanager
    def begun(self) -> Iterator[None]:
        self._here.on, self._here.every_bucket, self._here.steps = True, False, Counter()
        self.number += 1
        try:
            yield
        finally:
            self._here.on = False

    @property
    def is_on(self) -> bool:
        """Whether this thread is inside."""
        return getattr(self._here, "on", False)

    def ask_for_every_bucket(self, every: bool) -> None:
        """Whether this thread's calls from now on record all prompt buckets, or their own prompt's alone."""
        self._here.every_bucket = every

    @property
    def wants_every_bucket(self) -> bool:
        return self.is_on and self._here.every_bucket

    def step(self, signature: Signature) -> int:
        """How often this thread has called with this signature: its step in the pipeline's loop."""
        self._here.steps[signature] += 1
        return self._here.steps[signature]
