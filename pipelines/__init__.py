"""Ready diffusers pipelines for the demo, the tests and the benchmarks: one module a family.

Every family builds a tiny pipeline, which needs no download and makes a picture in a second on a CPU, and one of its
published size with random weights, as fast and as large as the real model. Both hold unmodified diffusers classes.

    pipe = pipelines.build("flux")                                  # tiny
    pipe = pipelines.build("flux", "full")                          # 11.9B random weights on the GPU, no text encoders
    pipe = pipelines.build("flux", "black-forest-labs/FLUX.1-dev")  # the real one, from the hub or a folder
    pipe(**pipelines.inputs("flux", pipe, height=512, width=512), num_inference_steps=4)
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

FAMILIES = ("qwen_image", "z_image", "flux", "sd3", "pixart", "sana", "wan", "sdxl")


def module(family: str) -> ModuleType:
    """What a family is made of: `tiny`, `full`, `inputs`, `SHAPES`. Imported on first use: diffusers takes seconds."""
    if family not in FAMILIES:
        raise ValueError(f"Unknown family {family!r}. Choose one of: {', '.join(FAMILIES)}.")
    return importlib.import_module(f"{__name__}.{family}")


def build(family: str, size: str | os.PathLike[str] = "tiny", **kwargs: Any) -> DiffusionPipeline:
    """A pipeline of `family`. `size` is `"tiny"`, `"full"`, a hub id or a folder; `kwargs` go to what builds it."""
    parts = module(family)
    if size == "tiny":
        return parts.tiny(**kwargs)
    if size == "full":
        return parts.full(**kwargs)
    return load(size, **kwargs)


def load(path: str | os.PathLike[str], **kwargs: Any) -> DiffusionPipeline:
    """A pipeline from a hub id or a folder; `kwargs` (`torch_dtype=`, `device_map=`...) go to `from_pretrained`."""
    from diffusers import DiffusionPipeline

    return DiffusionPipeline.from_pretrained(path, **kwargs)


def inputs(family: str, pipe: DiffusionPipeline, *, height: int, width: int, **options: Any) -> dict[str, Any]:
    """Keyword arguments for `pipe(...)`, with random prompt embeddings in place of a prompt.

    Options, the same in every family:
        num_frames: of the video; only for families that make one.
        prompt_length: rows of the prompt embeddings; the family's own if not given.
        batch: pictures in one call.
        cfg: guidance scale. None is the family's published setting, False none at all, True the usual one. Where
            guidance is on, negative embeddings are given too.
        seed: of the embeddings, which are drawn on the CPU and so are equal on every device.
    """
    return module(family).inputs(pipe, height=height, width=width, **options)
