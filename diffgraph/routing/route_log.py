"""The log of routes: what becomes of each signature's calls, told once when it changes and not at every call."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger("diffgraph")

#: Of signatures that are told apart in the log; as many as anybody uses.
MAX_LABELS = 4096


class RouteLog:
    """One denoiser's. A call is noted under its signature's label, or under the denoiser's name where it got none."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: dict[str, tuple[str, str | None]] = {}
        self._here = threading.local()

    def at(self, label: str) -> None:
        """The call that this thread makes now turned out to be of this signature."""
        self._here.label = label

    def note(self, route: str, reason: str | None = None, detail: str = "") -> None:
        """The call that this thread makes went this way."""
        label = getattr(self._here, "label", None) or self._name
        self._here.label = None
        last = self._last.get(label)
        if last is not None and last[0] == route and last[1] == reason:
            return
        if last is None and len(self._last) >= MAX_LABELS:
            return
        self._last[label] = (route, reason)
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s: %s%s", label, _text(route, reason, detail), f", was {_text(*last)}" if last is not None else "")


def _text(route: str, reason: str | None, detail: str = "") -> str:
    why = f" ({reason}{': ' + detail if detail else ''})" if reason is not None else ""
    return f"{route}{why}"
