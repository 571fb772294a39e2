"""`make run`: the main job on a tiny pipeline. Records, replays, compares, times, and saves eager beside accelerated."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import diffgraph
import pipelines

PROMPTS = ("a red cat", "a red day", "a red ear")  # of one length in the tiny tokenizers
SIZES = ((128, 128), (128, 192))
ROUNDS = 3


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo.run", description=__doc__)
    parser.add_argument("--family", choices=[f for f in pipelines.FAMILIES if f != "wan"], default="qwen_image")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("out/side_by_side.png"))
    args = parser.parse_args(argv)

    pipe = pipelines.build(args.family, "tiny").to(args.device)
    pipe.set_progress_bar_config(disable=True)
    print(f"{type(pipe).__name__}, tiny, random weights (so its pictures are noise), on {args.device}; torch {torch.__version__}")

    calls = [(prompt, *size) for size in SIZES for prompt in PROMPTS]
    eager, eager_s = pictures(pipe, calls, args.steps)
    diffgraph.accelerate_pipeline(pipe)
    first, _ = pictures(pipe, calls, args.steps)  # warm-up, capture and first replays among them
    accelerated, accelerated_s = pictures(pipe, calls, args.steps)

    equal = all(np.array_equal(e, a) and np.array_equal(e, f) for e, a, f in zip(eager, accelerated, first, strict=True))
    print(diffgraph.report(pipe))
    print(f"one picture of {args.steps} steps: eager {eager_s * 1e3:.1f} ms, accelerated {accelerated_s * 1e3:.1f} ms", end="")
    print(f" ({eager_s / accelerated_s:.2f}x; median of {ROUNDS * len(calls)})")
    print(f"{2 * len(calls)} pictures against eager: {'bit-equal' if equal else 'DIFFERENT'}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    side_by_side(eager[-len(PROMPTS) :], accelerated[-len(PROMPTS) :]).save(args.out)
    print(f"saved {args.out}: eager above, accelerated below")
    diffgraph.restore_pipeline(pipe)
    return 0 if equal else 1


def pictures(pipe, calls, steps) -> tuple[list[np.ndarray], float]:
    """The pictures of all calls, and the median time of one in seconds."""
    taken, times = [], []
    for round_ in range(ROUNDS):
        for seed, (prompt, height, width) in enumerate(calls):
            generator = torch.Generator("cpu").manual_seed(seed)
            start = time.perf_counter()
            # As an array on the host, so that the GPU is done when the clock is read.
            image = pipe(
                prompt, height=height, width=width, num_inference_steps=steps, generator=generator, output_type="np"
            ).images[0]
            times.append(time.perf_counter() - start)
            if round_ == 0:
                taken.append(image)
    return taken, statistics.median(times)


def side_by_side(above: list[np.ndarray], below: list[np.ndarray]) -> Image.Image:
    rows = [np.concatenate(row, axis=1) for row in (above, below)]
    return Image.fromarray((np.concatenate(rows, axis=0) * 255).round().astype(np.uint8))


if __name__ == "__main__":
    sys.exit(main())
