"""What real calls ask of a pipeline, as capture shapes: read off the pipeline's own call when a signature is first met."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch

from diffgraph.errors import ShapeError
from diffgraph.prompts.buckets import Prompt
from diffgraph.shapes.capture_shape import CaptureShape
from diffgraph.shapes.prompt_arguments import SCALES, per_prompt_argument


def asked_shape(prompt: Prompt | None) -> CaptureShape | None:
    """The shape of the pipeline call inside which the denoiser is called now; `None` outside of one, or of one without a size.

    `prompt`: the denoiser call's own, where prompts share buckets: a shape of that length records that bucket.
    """
    frame = _pipeline_call(sys._getframe(1))
    if frame is None:
        return None
    given = frame.f_locals
    accepted = inspect.signature(type(given["self"]).__call__).parameters
    if not {"height", "width"} <= accepted.keys():
        return None
    prompts, name = given.get("batch_size") or 1, per_prompt_argument(accepted)
    per_prompt = given.get(name or "") or 1
    try:
        return CaptureShape(
            height=given["height"],
            width=given["width"],
            num_frames=given.get("num_frames") if "num_frames" in accepted else None,
            prompt_length=max(prompt.buckets) if prompt is not None else _length(given, accepted),
            guidance=_guidance(given, accepted),
            batch=prompts * per_prompt,
            inputs={name: per_prompt} if name is not None and prompts > 1 and per_prompt > 1 else {},
        )
    except ShapeError:  # not sizes but lists of them, say
        return None


def _pipeline_call(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        names = frame.f_code.co_varnames
        if frame.f_code.co_name == "__call__" and "height" in names and "width" in names:
            owner = frame.f_locals.get("self")
            if owner is not None and not isinstance(owner, torch.nn.Module):
                return frame
        frame = frame.f_back
    return None


def _length(given: Mapping[str, Any], accepted: Mapping[str, Any]) -> int | None:
    """Of prompts that are padded to a limit, where the call set another limit than usual."""
    limit = "max_sequence_length"
    embeddings = given.get("prompt_embeds")
    if limit not in accepted or given.get(limit) == accepted[limit].default or not isinstance(embeddings, torch.Tensor):
        return None
    return embeddings.shape[-2]


def _guidance(given: Mapping[str, Any], accepted: Mapping[str, Any]) -> bool | float | None:
    name = next((n for n in SCALES if n in accepted), None)
    scale = given.get(name) if name is not None else None
    if name is None or not isinstance(scale, (int, float)):
        return None
    if name == "true_cfg_scale":  # which takes a negative prompt, too
        negative = given.get("negative_prompt") is not None or given.get("negative_prompt_embeds") is not None
        return float(scale) if negative and scale > 1 else None
    return None if scale == accepted[name].default else float(scale)
