"""Where gradients live between steps: at addresses of our own, for a recording to find them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from diffgraph.errors import CaptureError
from diffgraph.reasons import Reason
from diffgraph.signature import Refused
from diffgraph.tensors import has_plain_memory


class Left(NamedTuple):
    """What a recorded step does to `.grad`, for Python to do after a replay."""

    none: list[torch.nn.Parameter]
    home: list[torch.nn.Parameter]


class Gradients:
    """Of all trainable parameters. A gradient that a step leaves is moved to its `home`, which is allocated once, and is where
    every recording that starts with gradients reads them: so accumulating and stepping recordings need not know of each other."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._homes: dict[int, torch.Tensor] = {}

    def there(self) -> tuple[bool, ...]:
        """Which parameters have one."""
        return tuple([p.grad is not None for p in self.parameters])

    def held(self) -> list[torch.Tensor | None]:
        return [p.grad for p in self.parameters]

    def put(self, gradients: list[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def homes(self) -> list[torch.Tensor]:
        return list(self._homes.values())

    @torch.no_grad()
    def bring_home(self, *, is_recorded: bool = False) -> None:
        """Move the gradients there are to their homes. `is_recorded`: this is part of a recording, in whose memory no home may
        lie; raises `CaptureError` where one is missing."""
        away = [p for p in self.parameters if p.grad is not None and p.grad is not self._homes.get(id(p))]
        if not away:
            return
        if is_recorded and not all(id(p) in self._homes for p in away):
            raise CaptureError("the step left a gradient that its warm-up did not leave")
        homes = [self._home(p) for p in away]
        torch._foreach_copy_(homes, [p.grad for p in away if p.grad is not None])  # pyright: ignore[reportPrivateImportUsage]
        for parameter, home in zip(away, homes, strict=True):
            parameter.grad = home

    def left_since(self, there: tuple[bool, ...]) -> Left:
        """What has become of the gradients since those were `there`."""
        pairs = list(zip(self.parameters, there, strict=True))
        none = [p for p, was in pairs if was and p.grad is None]
        return Left(none, [p for p, was in pairs if not was and p.grad is not None])

    def leave(self, left: Left) -> None:
        for parameter in left.none:
            parameter.grad = None
        for parameter in left.home:
            parameter.grad = self._homes[id(parameter)]

    def _home(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None
        home = self._homes.get(id(parameter))
        if home is None:
            if not has_plain_memory(gradient):
                raise Refused(Reason.UNSUPPORTED_INPUT, f"a gradient of layout {gradient.layout}")
            with torch.inference_mode(False):
                home = torch.empty_strided(gradient.shape, gradient.stride(), dtype=gradient.dtype, device=gradient.device)
            self._homes[id(parameter)] = home
        elif home.shape != gradient.shape or home.dtype != gradient.dtype:
            raise Refused(Reason.UNSUPPORTED_INPUT, "a gradient of another shape or dtype than before")
        return home
