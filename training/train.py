"""Trains the embedded model: the VAE for a quarter of the time, then the denoiser with its text encoder."""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import diffusers
import torch

from training import autoencoder, denoiser, loop, model, pictures
from training.prompts import Prompts
from training.save import save


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    parser.add_argument("--data", type=Path, default=Path(".tmp/emoji.npz"), help="what training.render wrote")
    parser.add_argument("--out", type=Path, default=Path("out/emoji"), help="the model's folder; beside it, the same as a .tar")
    parser.add_argument("--start", type=Path, help="go on with the model in that folder, its VAE left as it is")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--names", type=int, help="train on that many emoji only, to try things out")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--vae-batch", type=int, default=128)
    parser.add_argument("--vae-share", type=float, default=0.25, help="of the minutes; with --start: 0")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU; for models as small as these, more wait for each other")
    parser.add_argument("--no-graphs", action="store_true", help="do not record training steps as CUDA graphs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)

    began = time.perf_counter()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    diffusers.utils.logging.set_verbosity_error()
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    names, pixels = pictures.load(args.data, args.names, device)
    if args.start is None:
        pipe = model.build(names)
        denoiser.start_small(pipe.transformer)
    else:
        pipe, args.vae_share = diffusers.DiffusionPipeline.from_pretrained(args.start), 0.0
    pipe.to(device)
    pipe.text_encoder.requires_grad_(False)
    pipe.text_encoder.model.language_model.requires_grad_(True)
    prompts = Prompts(pipe, names, device)
    parts = {name: count(getattr(pipe, name)) for name in ("transformer", "text_encoder", "vae")}
    print(f"{len(names)} emoji on {device}; millions of weights: {parts}", flush=True)
    training = partial(loop.train, graphs=not args.no_graphs)

    if args.vae_share:
        training(
            "vae",
            [partial(autoencoder.loss, pipe.vae, pixels[size], args.vae_batch) for size in ((64, 64), (96, 96))],
            (0.7, 0.3),
            [pipe.vae],
            minutes=args.minutes * args.vae_share,
            rate=2e-3,
        )
    pipe.vae.eval().requires_grad_(False)
    print(f"vae: pictures come back at {autoencoder.psnr(pipe.vae, pixels[64, 64]):.1f} dB", flush=True)

    latents = {size: autoencoder.encoded(pipe.vae, some) for size, some in pixels.items()}
    if args.start is None:
        autoencoder.measured(pipe.vae, latents[64, 64])
    losses = [
        partial(denoiser.loss, pipe, prompts, denoiser.packed(pipe, some), grid(*size), max(1, batch_of(args.batch, size)))
        for size, some in latents.items()
    ]
    archive = args.out.with_suffix(".tar")
    training(
        "denoiser",
        losses,
        pictures.SIZES.values(),
        [pipe.transformer, pipe.text_encoder],
        minutes=args.minutes * (1 - args.vae_share),
        rate=1.5e-3 if args.start is None else 5e-4,
        save_every=60,
        save=lambda: save(pipe, args.out, archive),
    )
    save(pipe, args.out, archive)
    weights = sum(file.stat().st_size for file in args.out.rglob("*.safetensors"))
    print(f"saved {args.out} and {archive}: {weights / 1e6:.2f} MB of weights, after {time.perf_counter() - began:.0f} s")
    return 0


def grid(height: int, width: int) -> tuple[int, int]:
    return height // model.PIXELS, width // model.PIXELS


def batch_of(batch: int, size: tuple[int, int]) -> int:
    """Fewer of the larger pictures, so that a step takes about the same time."""
    return batch * 64 * 64 // (size[0] * size[1])


def count(module: torch.nn.Module) -> float:
    return round(sum(p.numel() for p in module.parameters()) / 1e6, 2)


if __name__ == "__main__":
    sys.exit(main())
