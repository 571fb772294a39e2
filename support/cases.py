"""What is tried: a class, its tiny configuration, and the inputs of one call."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

#: How the pipelines of a class guide.
BATCHED = "one batched call"
TWO_CALLS = "two calls"
EMBEDDED = "embedded"
EMBEDDED_OR_TWO = "embedded, or two calls"
NO_GUIDANCE = "none"

#: Packages of diffusers that hold denoisers and what serves them.
PACKAGES = ("transformers", "unets", "controlnets")


class Draw:
    """Draws the inputs of one call. Equal seeds draw equal inputs, on every device.

    `pick` says what the host will see of them: the first of its values in most calls, the second in those that shall differ.
    """

    def __init__(
        self, seed: int, other: bool = False, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.picked = False
        self._other = other
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.device, self.dtype)

    def many(self, shapes: list[tuple[int, ...]]) -> list[torch.Tensor]:
        return [self(*shape) for shape in shapes]

    def unit(self, *shape: int) -> torch.Tensor:
        """Uniform in [0, 1)."""
        return torch.rand(shape, generator=self._generator).to(self.device, self.dtype)

    def steps(self, batch: int = 1) -> torch.Tensor:
        """Timesteps of 0 to 999, as int64."""
        return self.ints(1000, batch)

    def ints(self, below: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=self._generator).to(self.device)

    def mask(self, kept: list[int], length: int, dtype: torch.dtype = torch.bool) -> torch.Tensor:
        """[len(kept), length]: true for the first `kept` of each row."""
        rows = torch.arange(length)[None] < torch.tensor(kept)[:, None]
        return rows.to(self.device, dtype)

    def const(self, value: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.tensor(value, device=self.device, dtype=dtype)

    def grid(self, height: int, width: int, axes: int = 3, dtype: torch.dtype | None = None) -> torch.Tensor:
        """[height * width, axes]: position ids of a picture; row and column are the second and third axis."""
        ids = torch.zeros(height, width, axes)
        ids[..., 1] = torch.arange(height)[:, None]
        ids[..., 2] = torch.arange(width)[None]
        return ids.reshape(-1, axes).to(self.device, dtype or self.dtype)

    def pick(self, usual: Any, other: Any) -> Any:
        self.picked = True
        return other if self._other else usual


@dataclass(frozen=True)
class Case:
    """`label` is what a row says: the class, and what is special about these inputs."""

    cls: str
    special: str
    build: Callable[[], torch.nn.Module]
    inputs: Callable[[Draw], dict[str, Any]]
    cfg: str = ""
    prompt: str = ""  # how long prompts are
    note: str = ""  # why the verdict is right, by hand
    changes: str = ""  # what `Draw.pick` changes

    @property
    def label(self) -> str:
        return f"{self.cls}, {self.special}" if self.special else self.cls


@dataclass
class Cases:
    """The cases of one family's module, filled by its decorator."""

    found: list[Case] = field(default_factory=list)

    def __call__(
        self,
        cls: str,
        special: str = "",
        *,
        cfg: str = "",
        prompt: str = "",
        note: str = "",
        changes: str = "",
        build: Callable[[], torch.nn.Module] | None = None,
        **config: Any,
    ) -> Callable[[Callable[[Draw], dict[str, Any]]], Callable[[Draw], dict[str, Any]]]:
        """Register what the decorated function draws as the inputs of `cls(**config)`, or of what `build` makes."""

        def register(inputs: Callable[[Draw], dict[str, Any]]) -> Callable[[Draw], dict[str, Any]]:
            make = build or (lambda: model(cls, **config))
            self.found.append(Case(cls, special, make, inputs, cfg, prompt, note, changes))
            return inputs

        return register


def model(cls: str, seed: int = 0, **config: Any) -> torch.nn.Module:
    """A model of diffusers with every weight drawn, so that no output layer is left at zero and hides what is before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return randomized(classes()[cls](**config), seed)


@torch.no_grad()
def randomized(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.copy_(drawn * 0.1 + (0 if name.endswith("bias") else 1))
        else:
            parameter.copy_(drawn / parameter[0].numel() ** 0.5)
    return module.eval()


@functools.cache
def classes() -> dict[str, type[torch.nn.Module]]:
    """Every model that the installed diffusers' packages of denoisers define, by name."""
    from diffusers import ModelMixin

    found = {}
    for package in PACKAGES:
        path = f"diffusers.models.{package}"
        for module in pkgutil.iter_modules(importlib.import_module(path).__path__):
            content = vars(importlib.import_module(f"{path}.{module.name}"))
            for name, value in content.items():
                here = isinstance(value, type) and value.__module__ == content["__name__"]
                if here and issubclass(value, ModelMixin) and not name.startswith("_"):
                    found[name] = value
    return found


def all_cases() -> list[Case]:
    """Those whose class the installed diffusers has."""
    from support import families

    known = classes()
    names = [module.name for module in pkgutil.iter_modules(families.__path__)]
    found = [case for name in names for case in importlib.import_module(f"{families.__name__}.{name}").case.found]
    return [case for case in found if case.cls in known]
