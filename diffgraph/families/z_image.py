"""Z-Image pads each caption to a multiple of 32 rows with a learned token, which attention sees. (Read in diffusers 0.42.)

So a caption may be padded inside its block of 32, if the rows that are added become that token, and no further. Which rows those
are is the one thing in the forward that the length decides: the mask of a `torch.where` between the token and the caption's rows.
A ControlNet's residuals have a row for each of the picture's and each of the longest caption's, padded to its block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from diffgraph.engine.padding import Padding
from diffgraph.engine.recorder import eager_on_graph
from diffgraph.families.base import Lengths, PromptRule, rows

_BLOCK = 32
_LONGEST = 512  # captions that the pipeline makes unless told otherwise
_RESIDUALS = "controlnet_block_samples"


class ZImage(PromptRule):
    about = "shared inside blocks of 32"
    drops_rows = False

    def lengths(self, given: Mapping[str, Any]) -> Lengths | None:
        captions = given.get("cap_feats")
        flat = isinstance(captions, list) and captions and all(isinstance(c, torch.Tensor) and c.dim() == 2 for c in captions)
        if not flat or given.get("siglip_feats") is not None or given.get("image_noise_mask") is not None:
            return None
        residuals = given.get(_RESIDUALS)
        whole = isinstance(residuals, dict) and all(isinstance(r, torch.Tensor) and r.dim() == 3 for r in residuals.values())
        if residuals is not None and not whole:
            return None
        found = tuple(caption.shape[0] for caption in captions)  # type: ignore[union-attr]
        return found if all(found) else None

    def buckets(self, lengths: Lengths, sizes: Sequence[int]) -> Lengths:
        return tuple(map(_block, lengths))

    def resized(self, given: Mapping[str, Any], lengths: Lengths) -> dict[str, Any]:
        captions = given["cap_feats"]
        changed: dict[str, Any] = {"cap_feats": [rows(c, length, 0) for c, length in zip(captions, lengths, strict=True)]}
        residuals = given.get(_RESIDUALS)
        if residuals is not None:
            more = _block(max(lengths)) - _block(max(caption.shape[0] for caption in captions))
            changed[_RESIDUALS] = {at: rows(found, found.shape[1] + more, 1) for at, found in residuals.items()}
        return changed

    def every(self, lengths: Lengths, sizes: Sequence[int]) -> list[Lengths]:
        """Captions as long as a call's first are the prompt's; others, the negative prompt's, stay as they are."""
        now, first = self.buckets(lengths, sizes), lengths[0]
        blocks = range(_LONGEST, 0, -_BLOCK)
        return [tuple(size if n == first else own for n, own in zip(lengths, now, strict=True)) for size in blocks]

    def placed(self, module: torch.nn.Module, padding: Padding) -> AbstractContextManager[Any]:
        return _LiveMask(module.cap_pad_token, padding)


def _block(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK


@eager_on_graph
def is_padding(device: torch.device, padding: Padding) -> torch.Tensor:
    captions = zip(padding.buckets, padding.lengths, strict=True)
    return torch.cat([torch.arange(bucket, device=device) >= length for bucket, length in captions]).unsqueeze(-1)


class _LiveMask(TorchFunctionMode):
    """Says of each caption row whether it is padding by the lengths of the call that runs, not by those that were recorded."""

    def __init__(self, token: Any, padding: Padding) -> None:
        super().__init__()
        self._token, self._padding = token, padding

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.where and len(args) == 3 and args[1] is self._token:
            args = (is_padding(args[0].device, self._padding), *args[1:])
        return func(*args, **(kwargs or {}))
