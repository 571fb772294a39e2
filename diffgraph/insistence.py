"""Inside `diffgraph.capture`: the calls of the thread that asked for it are recorded at first sight, and anew."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from diffgraph.signature import Signature


class Insistence:
    """One denoiser's. `number`: how often it was begun; what was recorded or met under an earlier one is to be made anew."""

    def __init__(self) -> None:
        self.number = 0
        self._here = threading.local()

    @contextmanager
    def begun(self) -> Iterator[None]:
        self._here.on, self._here.every_bucket, self._here.spread = True, False, set()
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

    def spreads(self, signature: Signature) -> bool:
        """Whether a call of this signature is the first, whose prompt is to be tried at all other lengths."""
        is_first = signature not in self._here.spread
        self._here.spread.add(signature)
        return is_first
