"""Which way calls went: counted, and told in the log when it changes."""

from __future__ import annotations

import threading
from collections import Counter
from enum import Enum

from diffgraph.reasons import Reason
from diffgraph.routing.route_log import RouteLog


class Route(str, Enum):
    REPLAY = "replay"
    CAPTURE = "capture"
    EAGER = "eager"


class Routes:
    """Of one denoiser's calls, from all threads: how many were `taken`, by route, and the `reasons` of the eager ones."""

    def __init__(self, name: str) -> None:
        self.taken: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.log = RouteLog(name)
        self._lock = threading.Lock()

    def note(self, route: Route, reason: Reason | None = None, detail: str = "") -> None:
        """The call that this thread makes went this way."""
        with self._lock:
            self.taken[route.value] += 1
            if reason is not None:
                self.reasons[reason.value] += 1
        self.log.note(route.value, None if reason is None else reason.value, detail)
