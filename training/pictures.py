"""The rendered emoji as the VAE takes them, at every size the model is trained for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

#: height x width, and how often it is trained: the small square most of all
SIZES = {(64, 64): 0.7, (64, 96): 0.1, (96, 64): 0.1, (96, 96): 0.1}


def load(path: Path, count: int | None, device: torch.device) -> tuple[list[str], dict[tuple[int, int], torch.Tensor]]:
    """Names, and uint8 [names, 3, height, width] by size; of `count` names only, spread over the alphabet."""
    data = np.load(path)
    chosen = np.linspace(0, len(data["names"]) - 1, count or len(data["names"])).astype(int)
    square = {side: torch.from_numpy(data[f"pixels_{side}"][chosen]).permute(0, 3, 1, 2).to(device) for side in (64, 96)}
    return [str(name) for name in data["names"][chosen]], {size: on_canvas(square[min(size)], *size) for size in SIZES}


def on_canvas(square: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """In the middle of a white picture."""
    canvas = square.new_full((*square.shape[:2], height, width), 255)
    top, left = (height - square.shape[2]) // 2, (width - square.shape[3]) // 2
    canvas[:, :, top : top + square.shape[2], left : left + square.shape[3]] = square
    return canvas


def as_input(pixels: torch.Tensor) -> torch.Tensor:
    """float32 [batch, 3, 1, height, width] in -1..1: one frame."""
    return (pixels.float() / 127.5 - 1).unsqueeze(2)
