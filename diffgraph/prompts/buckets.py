"""Prompt buckets: prompts of many lengths through one recording."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from diffgraph.engine.padding import Padding
from diffgraph.families import rule_of
from diffgraph.families.base import Lengths, PromptRule
from diffgraph.options import Options
from diffgraph.parallel.ranks import parallel_config
from diffgraph.values.tensors import tensors_in

#: Rows of text, chosen by measuring Qwen-Image in bf16 at 512² on one H200. A bucket costs at most 5 % over the exact length:
#: doubling ones cost a quarter, and 448, 576 and 832 rows take longer than 512, 640 and 896. Below 64, where matrix products of
#: few rows take other kernels and so round otherwise, finer ones give eager's bits for all lengths but 25 to 31, 41 and 42.
AUTO = (*(8, 16, 24, 32, 40, 48, 64), *(128, 192, 256, 320, 384, 512, 560, 640, 704, 768, 800, 896, 1024))
#: Beyond them: an edited picture, too, may be among a prompt's tokens, 1,369 of them if it has a million pixels.
LONGER = tuple(range(1152, 4097, 128))
_SHORT = 64  # rows that the prompt of start-up capture has at most, unless there are pictures in it
_ROOM = 1024  # rows that a prompt may take beside its pictures


class Prompt(NamedTuple):
    """The prompts of one call: their real lengths, and the buckets that they are padded to."""

    rule: PromptRule
    lengths: Lengths
    buckets: Lengths
    is_padded: bool = False  # or laid out anew: not the caller's own tensors

    def padding(self) -> Padding:
        return Padding(self.buckets, self.lengths)


def is_short(prompt: Prompt | None) -> bool:
    """Whether there are rows of padding."""
    return prompt is not None and prompt.lengths != prompt.buckets


class Padded(NamedTuple):
    """A call's arguments, its prompts padded."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    prompt: Prompt


class PromptBuckets:
    """Pads the prompts of one denoiser's calls."""

    def __init__(self, rule: PromptRule, sizes: Sequence[int] | None, positional: tuple[str, ...]) -> None:
        self._rule, self._sizes, self._positional = rule, (*AUTO, *LONGER) if sizes is None else sizes, positional
        self._chosen = sizes is not None  # by the user

    @classmethod
    def of(cls, module: torch.nn.Module, options: Options, positional: tuple[str, ...]) -> PromptBuckets | None:
        """`None` where lengths are recorded exactly: by choice, or because no rule tells how this forward can be padded."""
        if options.prompt_buckets is None or options.backend == "eager":
            return None
        if parallel_config(module) is not None:
            return None  # padded rows would be one rank's alone
        rule = rule_of(module)
        breaks = options.breaks if options.backend == "breakable" else ()
        if rule is None or (rule.drops_rows and not (breaks in ("auto", "attention") or "attention" in breaks)):
            return None
        return cls(rule, None if isinstance(options.prompt_buckets, str) else options.prompt_buckets, positional)

    def padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Padded | None:
        """The call with its prompts padded; `None` for one without prompts, or with one longer than the largest bucket."""
        given = self._named(args, kwargs)
        lengths = self._rule.lengths(given)
        buckets = None if lengths is None else self._rule.buckets(lengths, self._sizes)
        if lengths is None or buckets is None:
            return None
        return self._resized(args, kwargs, given, Prompt(self._rule, lengths, buckets))

    def too_long(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        lengths = self._rule.lengths(self._named(args, kwargs))
        return lengths is not None and self._rule.buckets(lengths, self._sizes) is None

    def every(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Padded]:
        """The call with prompts as long as each bucket that they might come in, largest first. The call's own prompt is a short
        one, and what makes it long are pictures, which then are in every other prompt, too."""
        given = self._named(args, kwargs)
        lengths = self._rule.lengths(given)
        sizes = self._sizes
        if lengths is not None and not self._chosen:
            least = max(lengths) - _SHORT if max(lengths) > _SHORT else 0
            sizes = [size for size in sizes if least < size <= least + _ROOM]
        for buckets in [] if lengths is None else self._rule.every(lengths, sizes):
            yield self._resized(args, kwargs, given, Prompt(self._rule, buckets, buckets))

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        return {**dict(zip(self._positional, args, strict=False)), **kwargs}

    def _resized(self, args: Any, kwargs: Any, given: Mapping[str, Any], prompt: Prompt) -> Padded:
        changed = self._rule.resized(given, prompt.buckets)
        own = set(map(id, tensors_in([given[name] for name in changed])))
        prompt = prompt._replace(is_padded=any(id(tensor) not in own for tensor in tensors_in(changed)))
        names = (*self._positional, *[""] * len(args))
        return Padded(
            tuple(changed.get(name, value) for name, value in zip(names, args, strict=False)),
            {name: changed.get(name, value) for name, value in kwargs.items()},
            prompt,
        )
