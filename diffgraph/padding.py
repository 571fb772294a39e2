"""Rows of a padded prompt: how many of them are real, and attention without the others.

A recording made for a bucket of, say, 64 rows serves every shorter prompt. What is recorded works on all 64 rows, each for
itself; attention, where rows meet, runs eagerly between the segments and is given the real ones alone. So no padded row ever
reaches a real one, whatever it holds, no mask is needed, and attention launches the kernel that it would without padding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
_here = threading.local()


class Padding:
    """How long each prompt of a call really is (`lengths`), in a recording that was made for `buckets`. Written before each run,
    read by the breaks in it."""

    def __init__(self, buckets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
        self.buckets = buckets
        self.lengths = lengths


def current() -> Padding | None:
    """Of the forward that this thread runs or records now, if it is to drop padded rows in attention."""
    return getattr(_here, "padding", None)


@contextmanager
def dropped(padding: Padding | None) -> Iterator[None]:
    """Inside, this thread's attention calls (through the doors that `breaks` opens) leave padded rows out."""
    before = current()
    _here.padding = padding
    try:
        yield
    finally:
        _here.padding = before


def without_padding(attention: Callable[..., Any], padding: Padding, dim: int) -> Callable[..., Any]:
    """`attention` on the real rows alone, for tensors whose rows lie along `dim`, text first; zeros for the rest."""

    def call(*args: Any, **kwargs: Any) -> Any:
        length, bucket = padding.lengths[0], padding.buckets[0]
        if length == bucket:
            return attention(*args, **kwargs)
        given = {**dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)), **kwargs}

        def real(tensor: torch.Tensor, dim: int) -> torch.Tensor:
            rest = tensor.shape[dim] - bucket
            return torch.cat([tensor.narrow(dim, 0, length), tensor.narrow(dim, bucket, rest)], dim)

        rows = given["query"].shape[dim]
        for name in ("query", "key", "value"):
            given[name] = real(given[name], dim)
        mask = given.get("attn_mask")
        if mask is not None:
            mask = real(mask, -1)
            given["attn_mask"] = real(mask, -2) if mask.shape[-2] == rows else mask
        found = attention(**given)
        shape = list(found.shape)
        shape[dim] = bucket - length
        parts = found.narrow(dim, 0, length), found.new_zeros(shape), found.narrow(dim, length, found.shape[dim] - length)
        return torch.cat(parts, dim)

    return call
