"""The prompt side of a capture shape: a prompt of the wanted length, and guidance on, off or of a given scale."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from diffgraph.errors import ShapeError
from diffgraph.shapes import CaptureShape
from diffgraph.tree import flatten

_WORD = " a"
_PROMPT = "a photo of a cat"
#: The pipelines' own names for the scale of classifier-free guidance; the first that a pipeline takes is meant.
SCALES = ("true_cfg_scale", "guidance_scale")
_ON = 4.0


def per_prompt_argument(accepted: Mapping[str, Any]) -> str | None:
    """The name of a pipeline's argument for how many pictures it makes of each prompt."""
    return next((n for n in ("num_images_per_prompt", "num_videos_per_prompt") if n in accepted), None)


def prompt_arguments(
    pipe: Any, shape: CaptureShape, accepted: Mapping[str, Any], one_prompt: bool = False
) -> dict[str, Any]:
    """Prompt, negative prompt and guidance for a call of the pipeline at this shape.

    A batch is as many prompts, or `one_prompt` that as many pictures are made of.
    """
    wanted: dict[str, Any] = {}
    embedded = "prompt_embeds" in shape.inputs
    given = embedded or "prompt" in shape.inputs
    per_prompt = per_prompt_argument(accepted)
    if not given:
        wanted.update(_prompt(pipe, shape, accepted))
        if one_prompt and per_prompt is not None:
            wanted[per_prompt] = shape.batch
        elif shape.batch > 1:
            wanted["prompt"] = [wanted["prompt"]] * shape.batch
    elif shape.batch > 1:
        if per_prompt is None:
            raise ShapeError(
                f"{type(pipe).__name__} makes one picture per prompt; give {shape.batch} prompts in inputs"
            )
        wanted[per_prompt] = shape.batch
    prompts = 1 if one_prompt and per_prompt is not None else shape.batch
    wanted.update(_guidance(pipe, shape, accepted, embedded, prompts))
    return wanted


def _guidance(
    pipe: Any, shape: CaptureShape, accepted: Mapping[str, Any], embedded: bool, prompts: int
) -> dict[str, Any]:
    if shape.guidance is None:
        return {}
    name = next((n for n in SCALES if n in accepted), None)
    if name is None:
        raise ShapeError(
            f"{type(pipe).__name__} takes none of {', '.join(SCALES)}, so capture shape {shape} cannot set cfg"
        )
    if shape.guidance is False:
        return {name: _off(pipe)}
    scale = _ON if shape.guidance is True else float(shape.guidance)
    if shape.guidance is True:
        default = accepted[name].default
        scale = default if isinstance(default, (int, float)) and default > 1 else _ON
    wanted: dict[str, Any] = {name: scale}
    if scale > 1 and "negative_prompt" in accepted and not embedded and "negative_prompt" not in shape.inputs:
        wanted["negative_prompt"] = [""] * prompts if prompts > 1 else ""
    return wanted


def _off(pipe: Any) -> float:
    """The scale that switches guidance off: 1, but 0 where the scale is a weight beside 1. The pipeline's own property knows."""
    for scale in (1.0, 0.0):
        pipe._guidance_scale = scale
        if not getattr(pipe, "do_classifier_free_guidance", False):
            return scale
    return 1.0


def recorded_length(pipe: Any, shape: CaptureShape) -> int | None:
    """The one prompt length, in tokens, that this shape records where lengths vary from prompt to prompt and it names none."""
    unnamed = shape.prompt_length is None and not {"prompt", "prompt_embeds"} & set(shape.inputs)
    if not unnamed or getattr(pipe, "tokenizer", None) is None or not hasattr(pipe, "encode_prompt"):
        return None
    try:
        least, more = (_embedded_length(pipe, _WORD * words, None) for words in (1, 9))
        return None if least == more else _embedded_length(pipe, _PROMPT, None)
    except Exception:  # a prompt side of another kind: what the pipeline makes of the shape will show
        return None


def _prompt(pipe: Any, shape: CaptureShape, accepted: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt whose embeddings have the wanted length, by asking the pipeline how long its embeddings come out."""
    if "prompt" not in accepted:
        return {}
    if shape.prompt_length is None:
        return {"prompt": _PROMPT}
    limit = accepted["max_sequence_length"].default if "max_sequence_length" in accepted else None
    least, more = (_embedded_length(pipe, _WORD * words, limit) for words in (1, 9))
    if least == more:  # padded to a fixed length, which the pipeline's own limit may set
        if shape.prompt_length == least:
            return {"prompt": _WORD}
        if limit is None:
            raise ShapeError(
                f"{type(pipe).__name__} pads every prompt to {least} tokens; {shape} asks for {shape.prompt_length}"
            )
        return {"prompt": _WORD, "max_sequence_length": shape.prompt_length - (least - limit)}
    a_word = max((more - least) // 8, 1)
    guess = 1 + (shape.prompt_length - least) // a_word
    for words in (guess, guess - 1, guess + 1):
        for letters in ("", "b", "bc", "bcd"):  # where a word is several tokens
            prompt = _WORD * words + letters
            if words >= 0 and prompt and _embedded_length(pipe, prompt, limit) == shape.prompt_length:
                return {"prompt": prompt}
    raise ShapeError(
        f"{type(pipe).__name__} made no prompt of {shape.prompt_length} tokens, as {shape} asks; '{_WORD}' makes {least}"
    )


def _embedded_length(pipe: Any, prompt: str, limit: int | None) -> int:
    parameters = inspect.signature(pipe.encode_prompt).parameters
    arguments: dict[str, Any] = {
        n: None for n, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_KEYWORD
    }
    arguments["prompt"] = prompt
    if limit is not None and "max_sequence_length" in parameters:
        arguments["max_sequence_length"] = limit
    with torch.no_grad():
        leaves = flatten(pipe.encode_prompt(**arguments))[0]
    return next(leaf.shape[-2] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())
