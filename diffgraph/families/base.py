"""What a rule for prompt buckets has to tell."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from diffgraph.engine.padding import Padding

Lengths = tuple[int, ...]

#: Whose layers stand in diffusers' denoisers: adapters' and quantised ones included.
_LIBRARIES = frozenset({"torch", "diffusers", "peft", "torchao", "bitsandbytes", "optimum", "accelerate"})


class PromptRule(ABC):
    """How the forward of one family of denoisers takes prompts that are padded up to a bucket.

    Calls are given as their arguments by name.
    """

    about = "shared"  # in a word, for tables
    #: Whether padded rows are left out in attention, which then has to be a break.
    drops_rows = True

    def fits(self, module: torch.nn.Module, kind: type) -> bool:
        """Whether this module, of diffusers' class `kind`, is built as the rule takes for granted: of layers that are known to
        take each row for itself, not of one that somebody put there."""
        return all(_comes_from_a_library(submodule) for submodule in module.modules())

    @abstractmethod
    def lengths(self, given: Mapping[str, Any]) -> Lengths | None:
        """The rows of each prompt in a call; `None` for a call to which the rule does not apply."""

    @abstractmethod
    def buckets(self, lengths: Lengths, sizes: Sequence[int]) -> Lengths | None:
        """The bucket of each prompt, out of the `sizes` that the user wants; `None` if one is too long."""

    @abstractmethod
    def resized(self, given: Mapping[str, Any], lengths: Lengths) -> dict[str, Any]:
        """The arguments that change when the prompts get these lengths, filled up with zeros or cut."""

    @abstractmethod
    def every(self, lengths: Lengths, sizes: Sequence[int]) -> list[Lengths]:
        """The buckets of all prompts that might come instead of these, largest first."""

    @abstractmethod
    def placed(self, module: torch.nn.Module, padding: Padding) -> AbstractContextManager[Any]:
        """Inside, a forward of this thread, recorded or not, takes the padded rows for what they are."""


def bucket_of(length: int, sizes: Sequence[int]) -> int | None:
    return next((size for size in sizes if size >= length), None)


def rows(tensor: torch.Tensor, length: int, dim: int, *, before: bool = False) -> torch.Tensor:
    """`tensor` with `length` rows along `dim`, contiguous: cut, or filled up with zeros (`False`), behind or `before` the
    others."""
    missing = length - tensor.shape[dim]
    if missing <= 0:
        return (tensor if missing == 0 else tensor.narrow(dim, 0, length)).contiguous()
    shape = list(tensor.shape)
    shape[dim] = missing
    filling = tensor.new_zeros(shape)
    return torch.cat([filling, tensor] if before else [tensor, filling], dim)


def _comes_from_a_library(module: torch.nn.Module) -> bool:
    """Whether the forward that a call of this module runs does."""
    forward = module.__dict__.get("forward") or type(module).forward
    return (getattr(forward, "__module__", None) or "").partition(".")[0] in _LIBRARIES
