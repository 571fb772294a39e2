"""Optimizers whose step can be recorded, and what a recording relies on in them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from diffgraph.errors import OptionError, OptionTypeError
from diffgraph.finetuning.held import Held
from diffgraph.guards.composed import addresses
from diffgraph.values.constants import same_value

Optimizer = torch.optim.Optimizer


def unwrapped(optimizer: Any) -> Any:
    """accelerate's wrapper is an optimizer that holds another."""
    inner = getattr(optimizer, "optimizer", None) if isinstance(optimizer, Optimizer) else None
    return inner if isinstance(inner, Optimizer) else optimizer


def checked(given: Any) -> list[Optimizer]:
    """The optimizers given as `optimizer=`. Raises `OptionTypeError`; and `OptionError` for one whose step reads on the host."""
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    optimizers = list(map(unwrapped, several))
    if not optimizers:
        raise OptionError("no optimizer is given; accepted: optimizer=the torch.optim.Optimizer it steps, or several")
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not isinstance(optimizer, Optimizer):
            raise OptionTypeError(f"optimizer is of type {kind}; accepted: a torch.optim.Optimizer, or several in a list")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise OptionError(f"{kind} runs the loss as often as it needs, as no replay can; accepted: AdamW, say")
        for i, group in enumerate(optimizer.param_groups):
            _check_group(f"param group {i} of {type(optimizer).__name__}", group)
    return optimizers


def have_hooks(optimizers: Iterable[Optimizer]) -> bool:
    """Whether their steps call hooks, of their own or of the whole process."""
    everyones = [_global_optimizer_pre_hooks, _global_optimizer_post_hooks]
    own = chain.from_iterable((o._optimizer_step_pre_hooks, o._optimizer_step_post_hooks) for o in optimizers)
    return any(chain(everyones, own))


def _check_group(name: str, group: dict[str, Any]) -> None:
    devices = {parameter.device.type for parameter in group["params"]}
    rate = group["lr"] if "lr" in group else torch.zeros((), device=next(iter(devices), "cpu"))
    if rate is None:  # Adafactor's own schedule
        raise OptionError(f"{name} has lr=None, a rate that its step counts out on the host; accepted: lr=torch.tensor(1e-3)")
    if not isinstance(rate, torch.Tensor):
        raise OptionError(
            f"{name} has lr={rate!r}, a number, which a recording would hold on to; accepted: lr=torch.tensor({rate!r}), which "
            "schedulers change in place"
        )
    if "cuda" in devices and not rate.is_cuda and not group.get("fused"):
        raise OptionError(
            f"{name} has its lr on the CPU, which only fused=True reads anew; accepted: lr on the parameters' device"
        )
    if "cuda" in devices and not group.get("capturable", group.get("fused", True)):
        wanted = "capturable=True" if "capturable" in group else "fused=True"
        raise OptionError(
            f"{name} reads its step or rate on the host; accepted on CUDA: {wanted} (fused=True may stand beside it)"
        )
    if "cpu" in devices and "fused" in group and not group["fused"]:
        raise OptionError(f"{name} reads its step or rate on the host; accepted on the CPU device: fused=True")


class OptimizerState:
    """Parameters, settings and state tensors of some optimizers, as recordings rely on them."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._settings, self._tensors, self._addresses = self._read()

    def changed(self) -> bool:
        settings, tensors, where = self._read()
        same = len(tensors) == len(self._tensors) and all(a is b for a, b in zip(tensors, self._tensors, strict=True))
        return not same or where != self._addresses or not same_values(settings, self._settings)

    def rates(self) -> list[torch.Tensor]:
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers)
        return [group["lr"] for group in groups if isinstance(group.get("lr"), torch.Tensor)]

    def _read(self) -> tuple[list[Any], list[torch.Tensor], list[int]]:
        found: list[Any] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found += group["params"]
            found += chain.from_iterable(map(dict.values, optimizer.state.values()))
            settings = Held(type(optimizer).__name__, _settings(optimizer))
            found += [*settings.plain, *settings.objects]
            found.append(optimizer.step)  # schedulers, for one, wrap it
        tensors = [value for value in found if isinstance(value, torch.Tensor)]
        return [value for value in found if not isinstance(value, torch.Tensor)], tensors, addresses(tensors)


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Of its groups, and attributes of its own: there its step may also keep count, as no replay would."""
    return [_without(table, "params", "state", "param_groups") for table in (*optimizer.param_groups, vars(optimizer))]


def _without(table: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}


def same_values(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(map(same_value, a, b))


class Kept:
    """The optimizers' state and settings as they were, tensors by reference: their contents are for others to keep."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._states = [(o, {parameter: dict(state) for parameter, state in o.state.items()}) for o in optimizers]
        self._settings = [(table, dict(table)) for o in optimizers for table in (*o.param_groups, vars(o))]

    def put_back(self) -> None:
        for table, kept in self._settings:
            for key in [key for key in table if key not in kept]:
                del table[key]
            table.update(kept)
        for optimizer, kept in self._states:
            for parameter in list(optimizer.state):
                if parameter in kept:
                    optimizer.state[parameter].clear()
                    optimizer.state[parameter].update(kept[parameter])
                else:
                    del optimizer.state[parameter]
