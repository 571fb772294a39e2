"""How far two pictures are apart: float arrays of values from 0 to 1, as pipelines give them with `output_type="np"`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Distance(NamedTuple):
    """`equal`: to the bit. `largest`: difference of one channel of one pixel, 1 being all there is. `psnr`: in dB, infinite if
    equal. `same_when_shown`: as pictures of 8 bits a channel, which is what a screen shows."""

    equal: bool
    largest: float
    psnr: float
    same_when_shown: bool


def distance(a: np.ndarray, b: np.ndarray) -> Distance:
    if a.shape != b.shape or a.dtype != b.dtype:
        return Distance(False, float("nan"), float("nan"), False)
    if a.tobytes() == b.tobytes():  # NaN's too
        return Distance(True, 0.0, float("inf"), True)
    apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
    mean = float(np.mean(apart**2))
    psnr = -10 * float(np.log10(mean)) if mean > 0 else float("inf")
    return Distance(False, float(apart.max()), psnr, bool(np.array_equal(shown(a), shown(b))))


def shown(picture: np.ndarray) -> np.ndarray:
    """Eight bits a channel."""
    return (np.nan_to_num(picture).clip(0, 1) * 255).round().astype(np.uint8)
