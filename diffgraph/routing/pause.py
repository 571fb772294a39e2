"""`diffgraph.paused`, for one runner: eager while any thread is inside."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Pause:
    def __init__(self) -> None:
        self._holders = 0
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        return self._holders > 0

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
