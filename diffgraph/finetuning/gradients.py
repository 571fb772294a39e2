"""Where gradients lie while a recording runs: at addresses of our own, for it to find them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from diffgraph.errors import CaptureError
from diffgraph.reasons import Reason, Refused
from diffgraph.values.tensors import has_plain_memory


class Left(NamedTuple):
    """What a recorded step does to `.grad`, for Python to do after a replay."""

    none: list[torch.nn.Parameter]
    new: list[torch.nn.Parameter]  # it has put another gradient in the place of the one that was there, or of none


class Gradients:
    """Of all trainable parameters. Each has a `home`, allocated once, where every recording that starts with gradients reads
    them, and leaves them: so accumulating and stepping recordings need not know of each other. Between steps they are where
    eager would have left them: in the tensors in which they came, else in new ones, which are the caller's to keep."""

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

    def make_homes(self) -> None:
        """For the gradients there are. Raises `Refused` where one cannot have any."""
        for parameter in self._away():
            self._home(parameter)

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """What happens to gradients in it happens at home. Raises `Refused` before anything is moved."""
        held = self.held()
        self.bring_home()
        try:
            yield
        finally:
            self.give_back(held)

    @torch.no_grad()
    def bring_home(self, *, is_recorded: bool = False) -> None:
        """Move the gradients there are to their homes. `is_recorded`: this is part of a recording, in whose memory no home may
        lie; raises `CaptureError` where one is missing."""
        away = self._away()
        if is_recorded and not all(id(p) in self._homes for p in away):
            raise CaptureError("the step left a gradient that its warm-up did not leave")
        homes = [self._home(p) for p in away]
        _copy(homes, [p.grad for p in away if p.grad is not None])
        for parameter, home in zip(away, homes, strict=True):
            parameter.grad = home

    @torch.no_grad()
    def give_back(self, held: list[torch.Tensor | None]) -> None:
        """Move gradients from home to where they were `held`, but for those in whose place the step has put another."""
        same = [(p, h) for p, h in zip(self.parameters, held, strict=True) if p.grad is None or self._is_home(p)]
        moved = [(p, h) for p, h in same if h is not None and h is not self._homes[id(p)]]
        _copy([gradient for _, gradient in moved], [self._homes[id(p)] for p, _ in moved])
        for parameter, gradient in moved:
            if parameter.grad is not None:  # the step may have let go of it
                parameter.grad = gradient

    def left_since(self, there: tuple[bool, ...]) -> Left:
        """What has become of the gradients since those were `there`, at home."""
        none = [p for p, was in zip(self.parameters, there, strict=True) if was and p.grad is None]
        return Left(none, self._away())

    @torch.no_grad()
    def leave(self, left: Left) -> None:
        for parameter in left.none:
            parameter.grad = None
        homes = [self._homes[id(p)] for p in left.new]
        with torch.inference_mode(False):
            made = list(map(torch.empty_like, homes))
        _copy(made, homes)
        for parameter, gradient in zip(left.new, made, strict=True):
            parameter.grad = gradient

    def _away(self) -> list[torch.nn.Parameter]:
        return [p for p in self.parameters if p.grad is not None and not self._is_home(p)]

    def _is_home(self, parameter: torch.nn.Parameter) -> bool:
        return parameter.grad is self._homes.get(id(parameter))

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
        elif (home.shape, home.dtype, home.layout) != (gradient.shape, gradient.dtype, gradient.layout):
            raise Refused(Reason.UNSUPPORTED_INPUT, "a gradient of another shape, dtype or layout than before")
        return home


def _copy(to: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)  # pyright: ignore[reportPrivateImportUsage]
