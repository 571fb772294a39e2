"""Where in the source a break is: the line that a reader would point at."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

_OURS = Path(__file__).parent.parent
_PASSED_BY = tuple(str(path) + os.sep for path in (Path(torch.__file__).parent, _OURS))


def calling_line() -> str | None:
    """`path:line in function` of the innermost call that is neither torch's nor ours; the path from its package on.

    No frame is asked for its variables, which would keep them alive.
    """
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((*_PASSED_BY, "<")):
            return f"{_short(path)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return None


def _short(path: str) -> str:
    return path.rpartition("site-packages" + os.sep)[2]
