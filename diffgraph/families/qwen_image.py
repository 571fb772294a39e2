"""Qwen-Image: text first, and the text rows have positions of their own, which count from the first real one.

The forward cuts the text's rotary frequencies out of a table, as many as the text has. (Read in diffusers 0.42.) With padding
before the prompt, the cut has to begin earlier, by as many rows as the call that runs is padded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from diffgraph.engine.padding import Padding, left_out
from diffgraph.engine.recorder import eager_on_graph
from diffgraph.errors import CaptureError
from diffgraph.families.text_first import TextFirst


class QwenImage(TextFirst):
    def fits(self, module: torch.nn.Module, kind: type) -> bool:
        return super().fits(module, kind) and hasattr(getattr(module, "pos_embed", None), "_get_device_freqs")

    @contextmanager
    def placed(self, module: torch.nn.Module, padding: Padding) -> Iterator[None]:
        positions: Any = module.pos_embed
        cut = _LiveCut(positions, padding)
        with left_out(padding), cut:
            yield
        if cut.made != 1:
            raise CaptureError(f"the text's positions were looked up {cut.made} times, where the prompt rule expects one")


@eager_on_graph
def text_positions(table: torch.Tensor, start: int, padding: Padding) -> torch.Tensor:
    rows = torch.arange(start - padding.rows, start - padding.rows + padding.buckets[0], device=table.device)
    return table.index_select(0, rows.clamp_(min=0))


class _LiveCut(TorchFunctionMode):
    """Cuts the text's rows out of the table of positions by the length of the call that runs, not by the recorded one."""

    def __init__(self, positions: Any, padding: Padding) -> None:
        super().__init__()
        self._positions, self._padding = positions, padding
        self.made = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and self._is_text(*args):
            self.made += 1
            return text_positions(args[0], args[1][0].start, self._padding)
        return func(*args, **(kwargs or {}))

    def _is_text(self, table: torch.Tensor, key: Any) -> bool:
        if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], slice) and key[1] is Ellipsis):
            return False
        rows, start = key[0], key[0].start
        if start is None or rows.stop - start != self._padding.buckets[0]:
            return False
        return table is self._positions._get_device_freqs(table.device)[0]
