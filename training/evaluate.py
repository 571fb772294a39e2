"""Asks for every emoji in words the model was never trained on, and looks which rendering the picture is nearest to.

The distance is that of RGB pixels at 32x32, brought down from 64x64 by averaging: Euclidean, over all renderings.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from PIL import Image, ImageDraw

from training import wordings

SHEET = (
    *("red heart", "cat face", "pizza", "rocket", "grinning face", "sunflower", "octopus", "hamburger", "soccer ball", "rainbow"),
    *("fire", "ghost", "penguin", "watermelon", "bicycle", "crown", "blue book", "snowman", "guitar", "hot beverage"),
    *("four leaf clover", "unicorn", "alarm clock", "smiling face with sunglasses", "umbrella", "crab", "airplane", "key"),
    *("birthday cake", "purple heart", "fox", "tractor"),
)
COLUMNS = 8


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.evaluate", description=__doc__)
    parser.add_argument("model", type=Path, help="the folder that training.train wrote")
    parser.add_argument("--data", type=Path, default=Path(".tmp/emoji.npz"))
    parser.add_argument("--count", type=int, help="that many emoji, drawn at random, instead of all")
    parser.add_argument("--only", type=Path, help="a file of names, one a line, instead of all")
    parser.add_argument("--bare", action="store_true", help="ask by the names alone")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cfg", type=float, default=2.0, help="true_cfg_scale")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sheet", type=Path, help="write a contact sheet there, a .png")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)

    if args.device == "cpu":
        torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()
    pipe = DiffusionPipeline.from_pretrained(args.model).to(args.device)
    pipe.set_progress_bar_config(disable=True)
    data = np.load(args.data)
    names = [str(name) for name in data["names"]]
    known = features(torch.from_numpy(data["pixels_64"]).permute(0, 3, 1, 2).float() / 255)

    rng = random.Random(args.seed)
    asked = args.only.read_text().splitlines() if args.only else names
    asked = rng.sample(asked, min(args.count or len(asked), len(asked)))
    prompts = asked if args.bare else [wordings.unseen(name, rng) for name in asked]
    drawn = drawings(pipe, prompts, args)
    nearest = torch.cdist(features(torch.from_numpy(drawn).permute(0, 3, 1, 2)), known).argsort(dim=1)
    ranks = [nearest[i].tolist().index(names.index(name)) for i, name in enumerate(asked)]
    how = "names" if args.bare else "unseen wordings"
    for place in (1, 5, 20):
        share = sum(rank < place for rank in ranks) / len(ranks)
        print(f"the right emoji among the first {place:2} of {len(names)}: {share:.1%} of {len(ranks)} {how}")
    worst = sorted(range(len(ranks)), key=ranks.__getitem__)[-8:]
    print("furthest off:", "; ".join(f"{prompts[i]!r} at {ranks[i] + 1}" for i in worst))

    if args.sheet:
        shown = [name for name in SHEET if name in names] if not args.only else asked
        wanted = [wordings.unseen(name, rng) for name in shown]
        args.sheet.parent.mkdir(parents=True, exist_ok=True)
        sheet(drawings(pipe, wanted, args), wanted).save(args.sheet)
        print(f"saved {args.sheet}: what the model draws for wordings it never saw")
    return 0


def drawings(pipe, prompts: list[str], args) -> np.ndarray:
    """float32 [prompts, 64, 64, 3] in 0..1"""
    made = []
    for start in range(0, len(prompts), args.batch):
        some = prompts[start : start + args.batch]
        generators = [torch.Generator("cpu").manual_seed(args.seed + start + i) for i in range(len(some))]
        made.append(
            pipe(
                some,
                negative_prompt=[" "] * len(some),
                true_cfg_scale=args.cfg,
                height=64,
                width=64,
                num_inference_steps=args.steps,
                generator=generators,
                output_type="np",
            ).images
        )
    return np.concatenate(made)


def features(pictures: torch.Tensor) -> torch.Tensor:
    """[pictures, 3072] of float [pictures, 3, 64, 64] in 0..1"""
    return F.avg_pool2d(pictures, 2).flatten(1)


def sheet(pictures: np.ndarray, names: list[str], zoom: int = 2) -> Image.Image:
    """Pictures in rows, each above its wording."""
    side, line = 64 * zoom, 36
    page = Image.new("RGB", (COLUMNS * (side + 16), -(-len(names) // COLUMNS) * (side + line + 12)), "white")
    for i, (picture, name) in enumerate(zip(pictures, names, strict=True)):
        left, top = i % COLUMNS * (side + 16) + 8, i // COLUMNS * (side + line + 12) + 6
        tile = Image.fromarray((picture * 255).round().astype(np.uint8)).resize((side, side), Image.Resampling.LANCZOS)
        page.paste(tile, (left, top))
        ImageDraw.Draw(page).multiline_text((left, top + side + 2), folded(name), fill="black", font_size=11)
    return page


def folded(text: str, width: int = 24) -> str:
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines[:3])


if __name__ == "__main__":
    sys.exit(main())
