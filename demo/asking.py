"""What a visitor asks for, and whether it can be drawn: a wrong wish is answered in a sentence before anything runs."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from demo.errors import NotPossible
from demo.models import Model
from diffgraph import CaptureShape
from diffgraph.errors import ShapeError
from diffgraph.shapes.capture_shape import load_shapes

MOST_STEPS = 200
MOST_GUIDANCE = 30.0
MOST_IMAGES = 8
MOST_SHAPES = 8  # in one capture: other visitors wait for it
SEEDS = 2**32
LONGEST = 2000  # characters of a prompt
_SIZE = re.compile(r"\s*(\d{1,5})\s*[x×*]\s*(\d{1,5})(?:\s*[x×*]\s*(\d{1,5}))?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class Ask:
    """One wish, checked. `shape`: its size (and frames), with as many pictures as its batch says."""

    prompt: str
    shape: CaptureShape
    seed: int
    steps: int
    guidance: float
    negative: str = ""
    paused: bool = False

    @property
    def images(self) -> int:
        return self.shape.batch


def checked(
    model: Model,
    *,
    prompt: Any,
    size: Any,
    seed: Any,
    steps: Any,
    guidance: Any,
    images: Any = 1,
    negative: Any = "",
    paused: bool = False,
) -> Ask:
    """The wish, out of what the page's fields hold. Raises `NotPossible`."""
    text, negative = str(prompt or "").strip(), str(negative or "").strip()
    if not text:
        raise NotPossible("The prompt is empty. Write what the picture should show, for example “a red heart”.")
    if max(len(text), len(negative)) > LONGEST:
        raise NotPossible(
            f"The prompt is too long: {max(len(text), len(negative))} characters. At most {LONGEST} are accepted here."
        )
    height, width, frames = size_of(model, size)
    count = _whole("The number of pictures", images, 1, MOST_IMAGES)
    return Ask(
        prompt=text,
        negative=negative,
        shape=CaptureShape(height, width, num_frames=frames, batch=count),
        seed=_whole("The seed", seed, 0, SEEDS - 1),
        steps=_whole("The number of steps", steps, 1, MOST_STEPS),
        guidance=_number("Guidance", guidance, 0, MOST_GUIDANCE),
        paused=bool(paused),
    )


def size_of(model: Model, size: Any) -> tuple[int, int, int | None]:
    """Height, width and frames that a text such as 64x96 names."""
    example = model.start[0]
    found = _SIZE.fullmatch(str(size or ""))
    if found is None:
        form = "HEIGHTxWIDTHxFRAMES" if model.makes_video else "HEIGHTxWIDTH"
        raise NotPossible(f"“{size}” is not a size. A size is {form} in pixels, height first, for example {example}.")
    height, width = int(found[1]), int(found[2])
    _check_sides(model, height, width)
    if found[3] is not None and not model.makes_video:
        raise NotPossible(f"This model draws pictures, not videos, so a size has no frames: write {height}x{width}.")
    frames = int(found[3]) if found[3] is not None else example.num_frames
    if frames is not None and not 1 <= frames <= model.most_frames:
        raise NotPossible(f"A video here has 1 to {model.most_frames} frames, not {frames}.")
    return height, width, frames


def shapes_of(model: Model, text: Any) -> list[CaptureShape]:
    """The shapes to record that a text such as `64x96, 80x80@batch=2` names, largest first. Raises `NotPossible`."""
    said = str(text or "").strip()
    if not said:
        raise NotPossible(f"Write which size to record, for example {model.stranger}.")
    # Options hold commas too: a new shape begins at whitespace, a semicolon, or a comma before a size
    parts = [p for p in re.split(r"[;\s]+|,\s*(?=\d+\s*[xX])", said.replace("×", "x")) if p.strip(",")]
    if len(parts) > MOST_SHAPES:
        raise NotPossible(f"{len(parts)} sizes at once are too many for a shared page; at most {MOST_SHAPES} are accepted.")
    try:
        shapes = load_shapes([CaptureShape.parse(part.strip(",")) for part in parts])
    except ShapeError:
        raise NotPossible(
            f"“{said}” does not name a size to record. Write HEIGHTxWIDTH, for example {model.stranger}, "
            f"and @batch=2 behind it for two pictures at once."
        ) from None
    for shape in shapes:
        _check_sides(model, shape.height, shape.width)
        if shape.batch > MOST_IMAGES or (shape.num_frames or 1) > model.most_frames:
            raise NotPossible(f"{shape} is more than this page draws: {MOST_IMAGES} pictures, {model.most_frames} frames.")
    return shapes


def _check_sides(model: Model, height: int, width: int) -> None:
    grid, least, most = model.grid, model.least, model.most
    if any(side % grid or not least <= side <= most for side in (height, width)):
        near = "x".join(str(min(max(round(side / grid) * grid, least), most)) for side in (height, width))
        raise NotPossible(
            f"{height}x{width} is not a size that this model draws: height and width are multiples of {grid}, "
            f"from {least} to {most} pixels. The nearest is {near}."
        )


def _number(what: str, value: Any, least: float, most: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not least <= number <= most:  # nor is NaN
        raise NotPossible(f"{what} is a number from {least:g} to {most:g}, not {_said(value)}.")
    return number


def _whole(what: str, value: Any, least: int, most: int) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not least <= number <= most or number != int(number):
        raise NotPossible(f"{what} is a whole number from {least} to {most}, not {_said(value)}.")
    return int(number)


def _said(value: Any) -> str:
    return "nothing" if value is None or value == "" else f"“{value}”"
