"""A picture or video from the shell, accelerated: the main job, and its report.

With --compare the same picture is drawn eagerly too, and the exit code is 1 unless both are equal to the bit.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from diffgraph.cli import models
from diffgraph.cli.errors import UsageError
from diffgraph.cli.shape_options import shapes_of, split
from diffgraph.shapes.capture_shape import CaptureShape

PICTURES = (".png", ".jpg", ".jpeg", ".webp")
VIDEOS = (".gif", ".webp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models.add_arguments(parser)
    parser.add_argument("--prompt", required=True, action="append", help="given more than once: one picture each")
    parser.add_argument("--shape", help="of the picture, as 512x512 or 480x832x17 (default: the model's usual one)")
    parser.add_argument("--capture-shapes", metavar="SHAPES", help="record these first (a list or a file); default: on demand")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out.png"), help=".png, .jpg, .webp; a video: .gif or .webp")
    parser.add_argument("--compare", action="store_true", help="draw eagerly too, and compare to the bit")


def run(options: argparse.Namespace) -> int:
    import diffgraph
    from diffgraph.cli.clock import seconds

    _check(options)
    captured = shapes_of([options.capture_shapes]) if options.capture_shapes is not None else None
    shape = CaptureShape.parse(options.shape) if options.shape is not None else None
    model = models.load(options)
    shape = shape or model.default_shape()
    is_video = model.makes_video and (shape.num_frames or 0) != 1
    accepted = VIDEOS if is_video else PICTURES
    if options.out.suffix.lower() not in accepted:
        raise UsageError(f"--out is {options.out}; accepted for {type(model.pipe).__name__}: {', '.join(accepted)}")

    device = model.pipe.device
    times: dict[str, list[float]] = {"eager": [], "accelerated": []}
    wanted = _drawn(model, shape, options, times["eager"], seconds, device) if options.compare else None
    diffgraph.accelerate_pipeline(model.pipe, capture_shapes=captured)
    drawn = _drawn(model, shape, options, times["accelerated"], seconds, device)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for i, (frames, prompt) in enumerate(zip(drawn, options.prompt, strict=True)):
        path = options.out if len(drawn) == 1 else options.out.with_stem(f"{options.out.stem}-{i + 1}")
        _save(frames, path)
        print(f"{path}: {prompt!r}, {times['accelerated'][i]:.2f} s")
    print(diffgraph.report(model.pipe))
    if wanted is None:
        return 0
    equal = all(map(_equal, drawn, wanted))
    print(f"eager took {', '.join(f'{s:.2f} s' for s in times['eager'])}; {'equal to the bit' if equal else 'NOT EQUAL'}")
    return 0 if equal else 1


def _check(options: argparse.Namespace) -> None:
    if options.steps < 1:
        raise UsageError(f"--steps is {options.steps}; accepted: at least 1")
    if options.shape is not None and len(split(options.shape)) != 1:
        raise UsageError(f"--shape is {options.shape!r}; accepted: one shape; give --capture-shapes the list")
    if options.out.suffix.lower() not in {*PICTURES, *VIDEOS}:
        raise UsageError(f"--out is {options.out}; accepted: {', '.join(dict.fromkeys((*PICTURES, *VIDEOS)))}")
    if options.shape is not None and CaptureShape.parse(options.shape).batch != 1:
        raise UsageError("--shape has a batch; accepted: one picture a prompt; give --prompt more than once")
    if options.out.is_dir():
        raise UsageError(f"--out is {options.out}, a folder; accepted: a file in it")


def _drawn(model: Any, shape: Any, options: Any, times: list[float], seconds: Any, device: Any) -> list[Any]:
    """Per prompt its frames, as an array [frames, height, width, 3]; a picture is one frame."""
    import numpy as np

    from diffgraph.cli.calls import draw

    found: list[Any] = []
    for prompt in options.prompt:
        made: list[Any] = []

        def one(prompt: str = prompt, made: list[Any] = made) -> None:
            made.append(draw(model, shape, prompt, steps=options.steps, seed=options.seed, output_type="np"))

        times.append(seconds(one, device))
        frames = np.asarray(made[0][0])
        found.append(frames[0] if frames.ndim == 5 else frames)
    return found


def _save(frames: Any, path: Path) -> None:
    import numpy as np
    from PIL import Image

    whole = (np.nan_to_num(frames).clip(0, 1) * 255).round().astype("uint8")
    pictures = [Image.fromarray(frame) for frame in whole]
    more = {"save_all": True, "append_images": pictures[1:], "duration": 60, "loop": 0} if len(pictures) > 1 else {}
    try:
        pictures[0].save(path, **more)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None


def _equal(a: Any, b: Any) -> bool:
    import numpy as np

    return np.array_equal(a, b, equal_nan=True)
