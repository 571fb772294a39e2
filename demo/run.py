"""`make run`: the main job on the embedded model. Records, replays, compares, times, and saves eager beside accelerated."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import diffusers
import numpy as np
import torch
from PIL import Image, ImageDraw

import diffgraph
import pipelines
from demo import models

SIZES = ((64, 64), (96, 96))  # height and width
NOISE_SIZES = ((128, 128), (128, 192))
ROUNDS = 2
GAP = 8  # pixels between pictures
ZOOM = 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.run", description=__doc__)
    families = [f for f in pipelines.FAMILIES if f != "wan"]
    parser.add_argument("--family", choices=families, help="built tiny, with random weights, instead of the embedded model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("out/side_by_side.png"))
    args = parser.parse_args(argv)

    if args.steps < 1:
        parser.error(f"--steps is {args.steps}; accepted: at least 1")
    if args.out.suffix.lower() not in Image.registered_extensions():
        parser.error(f"--out is {args.out}; accepted: a picture's name, as out.png")
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device is {args.device}, and this torch sees no GPU; accepted here: cpu")
    if args.device == "cpu":
        torch.set_num_threads(1)  # for models as small as these, several threads wait for each other
    diffusers.utils.logging.set_verbosity_error()
    model = models.load(args.family, device=args.device, dtype="float32")
    pipe, prompts = model.pipe, model.prompts[:3]
    pipe.set_progress_bar_config(disable=True)
    print(f"{model.name} on {args.device}; torch {torch.__version__}\n{model.about}")
    print("Each prompt is recorded at its own length (prompt_buckets=None), so that its pictures have eager's bits.")

    calls = [(prompt, *size) for size in (NOISE_SIZES if model.is_noise else SIZES) for prompt in prompts]
    eager, eager_s = pictures(pipe, calls, args.steps)
    # Each prompt at its own length: on a CPU, a bucket's matrix products round otherwise, in the sixth digit.
    diffgraph.accelerate_pipeline(pipe, prompt_buckets=None)
    first, _ = pictures(pipe, calls, args.steps)  # warm-up, capture and first replays among them
    accelerated, accelerated_s = pictures(pipe, calls, args.steps)

    equal = all(np.array_equal(e, a) and np.array_equal(e, f) for e, a, f in zip(eager, accelerated, first, strict=True))
    print(diffgraph.report(pipe))
    print(f"one picture of {args.steps} steps: eager {eager_s * 1e3:.1f} ms, accelerated {accelerated_s * 1e3:.1f} ms", end=" ")
    print("(medians; on a CPU nothing waits for Python: no speedup is to be expected)" if args.device == "cpu" else "(medians)")
    print(f"{2 * len(calls)} pictures against eager: {'bit-equal' if equal else 'DIFFERENT'}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    side_by_side(eager[-len(prompts) :], accelerated[-len(prompts) :]).save(args.out)
    print(f"saved {args.out.resolve()}: eager, accelerated, and their difference")
    diffgraph.restore_pipeline(pipe)
    return 0 if equal else 1


def pictures(pipe, calls, steps) -> tuple[list[np.ndarray], float]:
    """The pictures of all calls, and the median time of one in seconds."""
    taken, times = [], []
    for round_ in range(ROUNDS):
        for seed, (prompt, height, width) in enumerate(calls):
            generator = torch.Generator("cpu").manual_seed(seed)
            start = time.perf_counter()
            given = {"height": height, "width": width, "num_inference_steps": steps, "generator": generator}
            # As an array on the host, so that the GPU is done when the clock is read.
            image = pipe(prompt, negative_prompt=" ", output_type="np", **given).images[0]
            times.append(time.perf_counter() - start)
            if round_ == 0:
                taken.append(image)
    return taken, statistics.median(times)


def side_by_side(eager: list[np.ndarray], accelerated: list[np.ndarray]) -> Image.Image:
    """Three rows of pictures, each with its name: eager, accelerated, and how far apart they are (black: not at all)."""
    difference = [np.abs(a - b) for a, b in zip(eager, accelerated, strict=True)]
    height, width = (ZOOM * pixels for pixels in eager[0].shape[:2])
    sheet = Image.new("RGB", (len(eager) * (width + GAP) + GAP, 3 * (height + 3 * GAP) + GAP), "white")
    for i, (name, row) in enumerate([("eager", eager), ("accelerated", accelerated), ("difference", difference)]):
        top = i * (height + 3 * GAP) + GAP
        ImageDraw.Draw(sheet).text((GAP, top), name, fill="black")
        for j, picture in enumerate(row):
            tile = Image.fromarray((picture * 255).round().astype(np.uint8)).resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(tile, (j * (width + GAP) + GAP, top + 2 * GAP))
    return sheet


if __name__ == "__main__":
    sys.exit(main())
