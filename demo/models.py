"""The pipeline that the demo draws with: the one that lies in `demo/model`, a family of `pipelines/`, or anybody's."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import pipelines
from diffgraph import CaptureShape
from diffgraph.cli import models as by_name
from diffgraph.cli.errors import UsageError
from diffgraph.shapes.capture_shape import load_shapes

EMBEDDED = Path(__file__).parent / "model"
STAND_IN = "qwen_image"  # where nothing is embedded: the same pipeline class, with random weights
SHORT_BUCKETS = (8, 16, 24, 32, 40, 48, 64)  # prompts of more rows are longer than the small models have learnt to read


@dataclass
class Model:
    """A pipeline, and what the page has to know of it.

    start: shapes to record before the first visitor comes. is_noise: its weights are random. grid, least, most: which heights and
    widths it takes, in pixels.
    """

    pipe: Any
    name: str
    about: str
    start: list[CaptureShape]
    prompts: list[str]
    steps: int
    most: int
    most_frames: int = 121
    buckets: Any = "auto"
    is_noise: bool = False
    accepted: frozenset[str] = field(init=False)
    defaults: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        parameters = inspect.signature(type(self.pipe).__call__).parameters
        self.accepted = frozenset(parameters)
        self.defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}

    @property
    def device(self) -> torch.device:
        return torch.device(getattr(self.pipe, "_execution_device", None) or self.pipe.device)

    @property
    def makes_video(self) -> bool:
        return "num_frames" in self.accepted

    @property
    def grid(self) -> int:
        """Pixels that heights and widths are multiples of: the VAE's, and, with transformers, two of its latents a row."""
        names = ("vae_scale_factor_spatial", "vae_scale_factor")
        scale = next((s for name in names if isinstance(s := getattr(self.pipe, name, None), int)), 8)
        return scale * (2 if getattr(self.pipe, "transformer", None) is not None else 1)

    @property
    def least(self) -> int:
        return 2 * self.grid

    @property
    def stranger(self) -> str:
        """A size that is deliberately not recorded, so that a visitor can see what happens then."""
        known = {(s.height, s.width) for s in self.start}
        first = min(self.start, key=lambda s: s.size)
        sides = ((first.height, first.width + k * self.grid) for k in (4, 2, 1, 3, 5, 6, 7))
        height, width = next(s for s in sides if s not in known)
        frames = "" if first.num_frames is None else f"x{first.num_frames}"
        return f"{height}x{width}{frames}"


def load(name: str | None = None, shapes: str | None = None, device: str | None = None, dtype: str | None = None) -> Model:
    """`name`: a folder, a hub id or a family of `pipelines/`, which is then built tiny; none: the embedded model, or where there
    is none, a tiny stand-in. `shapes`: what to record, as text or a file. Raises `UsageError` and `ShapeError`."""
    asked = name or (str(EMBEDDED) if is_embedded() else STAND_IN)
    tiny = asked in pipelines.FAMILIES
    found = by_name.load(argparse.Namespace(model=asked, tiny=tiny, device=device, dtype=dtype or (None if name else "float32")))
    if getattr(found.pipe, "text_encoder", None) is None and getattr(found.pipe, "tokenizer", None) is None:
        raise UsageError(f"{asked} has no text encoder, and the page gives it nothing but text")
    model = _described(found, name, tiny)
    if shapes is not None:
        texts = shapes if shapes.lower().endswith((".json", ".yaml", ".yml")) else shapes.split()
        model.start = load_shapes(texts)
        model.most = max(model.most, *(max(s.height, s.width) for s in model.start))
    return model


def is_embedded() -> bool:
    return (EMBEDDED / "model_index.json").is_file()


def _described(found: Any, name: str | None, tiny: bool) -> Model:
    kind = type(found.pipe).__name__
    if tiny:
        missing = "" if name else " The trained model is not in this copy of the repository."
        return Model(
            found.pipe,
            f"tiny {kind}",
            f"A tiny {kind} with random weights: real classes, real steps, but its pictures are noise.{missing} "
            "Give --model a folder or a hub id to see real ones.",
            load_shapes(["64x64x5"] if found.makes_video else ["64x64", "128x128"]),
            ["a red heart", "a cat face", "a slice of pizza on a blue plate"],
            steps=20,
            most=256,
            most_frames=17,
            buckets=SHORT_BUCKETS if found.name == STAND_IN else "auto",
            is_noise=True,
        )
    if name is None:
        return Model(
            found.pipe,
            "the embedded emoji model",
            f"A small trained {kind} that comes with the repository and draws emoji by their names: “red heart”, “cat face”.",
            load_shapes(["64x64", "96x96"]),
            ["red heart", "cat face", "a slice of pizza", "an umbrella in the rain, drawn as a flat sticker"],
            steps=20,
            most=128,
            buckets=SHORT_BUCKETS,
        )
    large = {"prompts": ["a red fox in the snow", "a lighthouse at dusk, oil on canvas"], "steps": 20, "most": 2048}
    return Model(found.pipe, found.name, f"{kind}, from {found.name}.", [found.default_shape()], **large)


def use_few_threads() -> None:
    """For models as small as these, several threads wait for each other."""
    torch.set_num_threads(1)
