"""The prompt side of a capture shape: a prompt of the wanted length, and guidance on, off or of a given scale."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from diffgraph.errors import ShapeError
from diffgraph.shapes.capture_shape import CaptureShape
from diffgraph.values.tree import flatten

_WORD = " a"
_PROMPT = "a photo of a cat"
#: The pipelines' own names for the scale of classifier-free guidance; the first that a pipeline takes is meant.
SCALES = ("true_cfg_scale", "guidance_scale")
_ON = 4.0
PROMPTS = {"prompt", "prompt_embeds"}


def per_prompt_argument(accepted: Mapping[str, Any]) -> str | None:
    """The name of a pipeline's argument for how many pictures it makes of each prompt."""
    return next((n for n in ("num_images_per_prompt", "num_videos_per_prompt") if n in accepted), None)


class Batch(str, Enum):
    """How a call may come by several pictures: pipelines tell the denoiser, in one way or another, which of these it is."""

    ALIKE = "as many prompts, of one length"
    UNLIKE = "as many prompts, of several lengths"
    ONE = "as many pictures of one prompt"


def batches(shape: CaptureShape, accepted: Mapping[str, Any]) -> list[Batch]:
    """The ways to a shape's pictures that it leaves open."""
    if shape.batch == 1 or PROMPTS & set(shape.inputs) or "prompt" not in accepted:
        return [Batch.ALIKE]
    per_prompt = per_prompt_argument(accepted)
    return [Batch.ALIKE, Batch.UNLIKE] + [Batch.ONE] * (per_prompt is not None and per_prompt not in shape.inputs)


def prompt_arguments(
    pipe: Any, shape: CaptureShape, accepted: Mapping[str, Any], others: Mapping[str, Any], batch: Batch = Batch.ALIKE
) -> dict[str, Any]:
    """Prompt, negative prompt and guidance for a call of the pipeline at this shape; `others` are its further arguments."""
    wanted: dict[str, Any] = {}
    prompts = 1 if batch is Batch.ONE else _prompts(pipe, shape, accepted)
    if shape.batch > prompts:
        wanted[per_prompt_argument(accepted) or ""] = shape.batch // prompts
    if not PROMPTS & set(shape.inputs) and "prompt" in accepted:
        wanted.update(_prompt(pipe, shape, accepted, others))
        if prompts > 1:
            text = wanted["prompt"]
            last = text.rpartition(" ")[0] if batch is Batch.UNLIKE else text
            wanted["prompt"] = [text] * (prompts - 1) + [last]
    wanted.update(_guidance(pipe, shape, accepted, "prompt_embeds" in shape.inputs, prompts))
    return wanted


def _prompts(pipe: Any, shape: CaptureShape, accepted: Mapping[str, Any]) -> int:
    """How many prompts a batch takes, where each has a picture or as many as `inputs` say."""
    per_prompt = per_prompt_argument(accepted)
    given = next((shape.inputs[name] for name in sorted(PROMPTS) if shape.inputs.get(name) is not None), None)
    if given is None:
        prompts, left = divmod(shape.batch, shape.inputs.get(per_prompt or "", 1))
        prompts, left = (1, 0) if shape.batch == 1 else (prompts, left)  # which `inputs` need not repeat
    else:
        prompts = 1 if isinstance(given, str) else len(given)
        left = shape.batch % prompts if shape.batch > prompts else 0
        if shape.batch > prompts and per_prompt is None:
            raise ShapeError(f"{type(pipe).__name__} makes one picture per prompt; give {shape.batch} prompts in inputs")
    if left:
        raise ShapeError(f"{shape} asks for {shape.batch} pictures, not divisible by the prompts or {per_prompt} in its inputs")
    return prompts


def _guidance(pipe: Any, shape: CaptureShape, accepted: Mapping[str, Any], embedded: bool, prompts: int) -> dict[str, Any]:
    if shape.guidance is None:
        return {}
    name = next((n for n in SCALES if n in accepted), None)
    if name is None:
        raise ShapeError(f"{type(pipe).__name__} takes none of {', '.join(SCALES)}, so capture shape {shape} cannot set cfg")
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


def recorded_length(pipe: Any, shape: CaptureShape, others: Mapping[str, Any]) -> int | None:
    """The one prompt length, in tokens, that this shape records where lengths vary from prompt to prompt and it names none."""
    unnamed = shape.prompt_length is None and not PROMPTS & set(shape.inputs)
    if not unnamed or getattr(pipe, "tokenizer", None) is None or not hasattr(pipe, "encode_prompt"):
        return None
    try:
        least, more = (_embedded_length(pipe, _WORD * words, others) for words in (1, 9))
        return None if least == more else _embedded_length(pipe, _PROMPT, others)
    except Exception:  # a prompt side of another kind: what the pipeline makes of the shape will show
        return None


def _prompt(pipe: Any, shape: CaptureShape, accepted: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt whose embeddings have the wanted length, by asking the pipeline how long its embeddings come out."""
    if shape.prompt_length is None:
        return {"prompt": _PROMPT}
    least, more = (_embedded_length(pipe, _WORD * words, others) for words in (1, 9))
    if least == more:  # padded to a fixed length, which the pipeline's own limit may set
        if shape.prompt_length == least:
            return {"prompt": _WORD}
        if "max_sequence_length" not in accepted:
            raise ShapeError(f"{type(pipe).__name__} pads every prompt to {least} tokens; {shape} asks for {shape.prompt_length}")
        limit = accepted["max_sequence_length"].default
        return {"prompt": _WORD, "max_sequence_length": shape.prompt_length - (least - limit)}
    a_word = max((more - least) // 8, 1)
    guess = 1 + (shape.prompt_length - least) // a_word
    for words in (guess, guess - 1, guess + 1):
        for letters in ("", "b", "bc", "bcd"):  # where a word is several tokens
            prompt = _WORD * words + letters
            if words >= 0 and prompt and _embedded_length(pipe, prompt, others) == shape.prompt_length:
                return {"prompt": prompt}
    raise ShapeError(
        f"{type(pipe).__name__} made no prompt of {shape.prompt_length} tokens, as {shape} asks; '{_WORD}' makes {least}"
    )


class _Encoded(Exception):
    """Ends a pipeline call as soon as its prompt is encoded."""

    def __init__(self, embeddings: Any) -> None:
        super().__init__()
        self.embeddings = embeddings


def _embedded_length(pipe: Any, prompt: str, others: Mapping[str, Any]) -> int:
    """How long the prompt is in a call of the pipeline: what else the call is given, a picture, say, may add to its tokens."""
    encode, before = pipe.encode_prompt, dict(vars(pipe))

    def encode_and_stop(*args: Any, **kwargs: Any) -> None:
        raise _Encoded(encode(*args, **kwargs))

    vars(pipe)["encode_prompt"] = encode_and_stop
    try:
        pipe(**others, prompt=prompt)
    except _Encoded as stopped:
        return _rows(stopped.embeddings)
    finally:
        del vars(pipe)["encode_prompt"]
        vars(pipe).update({name: before[name] for name in {"encode_prompt"} & before.keys()})
    raise ShapeError(f"{type(pipe).__name__} encodes its prompt by itself, so no length can be asked for")


def _rows(embeddings: Any) -> int:
    """Of the first prompt's embeddings: first among all that `encode_prompt` returns, and maybe in several pieces."""
    first = embeddings[0] if isinstance(embeddings, tuple) else embeddings
    if isinstance(first, list):  # a prompt each
        first = first[0]
    return sum(piece.shape[-2] for piece in flatten(first)[0])
