"""Arrays as pictures that a page can show, without a codec that changes a pixel."""

from __future__ import annotations

import tempfile
from collections import deque
from pathlib import Path

import numpy as np
from PIL import Image

from demo.measures import shown

SIDE = 320  # pixels that small pictures are enlarged to, at least
KEPT = 64  # videos on the disk: the page copies each when it shows it
FPS = 8


def still(picture: np.ndarray) -> Image.Image:
    """[height, width, 3] → a picture; a small one enlarged by a whole number, each pixel a square."""
    height, width = picture.shape[:2]
    times = max(1, -(-SIDE // max(height, width)))
    return Image.fromarray(shown(picture).repeat(times, axis=0).repeat(times, axis=1))


class Shelf:
    """Videos as animated, lossless WebP files, which every browser plays and Pillow alone can write. Old ones go."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="diffgraph-demo-")
        self._files: deque[Path] = deque()
        self._count = 0

    def video(self, frames: np.ndarray) -> str:
        """[frames, height, width, 3] → the path of a file."""
        self._count += 1
        path = Path(self._folder.name) / f"{self._count}.webp"
        first, *rest = map(still, frames)
        first.save(path, save_all=True, append_images=rest, duration=1000 // FPS, loop=0, lossless=True)
        self._files.append(path)
        while len(self._files) > KEPT:
            self._files.popleft().unlink(missing_ok=True)
        return str(path)
