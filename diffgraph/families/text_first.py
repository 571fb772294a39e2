"""Denoisers whose every attention joins text and image rows, text first, and whose other layers take each row for itself.

Read in diffusers 0.42: the forwards of the classes that `families` lists under this rule. The positions of the image rows do not
depend on the text's length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from diffgraph.engine.padding import Padding, left_out
from diffgraph.families.base import Lengths, PromptRule, bucket_of, rows


class TextFirst(PromptRule):
    """text: the argument that holds the prompt, [batch, rows, channels]; mask: the one that says which rows count, [batch, rows];
    absent: arguments with which the rule does not hold."""

    def __init__(self, text: str, *, mask: str, absent: tuple[str, ...] = ()) -> None:
        self._text, self._mask, self._absent = text, mask, absent

    def fits(self, module: torch.nn.Module, kind: type) -> bool:
        processors = [p for m in module.modules() if (p := getattr(m, "processor", None)) is not None]
        return super().fits(module, kind) and all(type(p).__module__ == kind.__module__ for p in processors)

    def lengths(self, given: Mapping[str, Any]) -> Lengths | None:
        text, mask = given.get(self._text), given.get(self._mask)
        if not isinstance(text, torch.Tensor) or text.dim() != 3 or any(given.get(name) is not None for name in self._absent):
            return None
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != text.shape[:2]):
            return None
        return (text.shape[1],) if text.shape[1] else None

    def buckets(self, lengths: Lengths, sizes: Sequence[int]) -> Lengths | None:
        bucket = bucket_of(lengths[0], sizes)
        return None if bucket is None else (bucket,)

    def resized(self, given: Mapping[str, Any], lengths: Lengths) -> dict[str, Any]:
        found = {name: given.get(name) for name in (self._text, self._mask)}
        return {name: rows(tensor, lengths[0], 1, before=True) for name, tensor in found.items() if tensor is not None}

    def every(self, lengths: Lengths, sizes: Sequence[int]) -> list[Lengths]:
        return [(size,) for size in reversed(sizes)]

    def placed(self, module: torch.nn.Module, padding: Padding) -> AbstractContextManager[Any]:
        return left_out(padding)
