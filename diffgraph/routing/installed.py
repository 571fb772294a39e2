"""Which runner serves which module, and for whom: runners are installed here, found, and removed without a trace."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from diffgraph.errors import NotAcceleratedError
from diffgraph.routing import components as components_of
from diffgraph.routing.memory import Memory
from diffgraph.routing.runner import Runner

if TYPE_CHECKING:
    from diffgraph.options import Options

#: Which objects (pipelines, or modules accelerated on their own) each runner serves.
_owners: weakref.WeakKeyDictionary[Runner, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
#: The same by module: `module.compile()` pushes a runner out, and what it served is to be known still.
_served: weakref.WeakKeyDictionary[torch.nn.Module, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()


def accelerated(pipe: Any) -> list[Runner]:
    """The runners of this pipeline, this module, or this module of a pipeline. Raises `NotAcceleratedError`."""
    return [runner for _, runner in looked_at(pipe)]


def serves(module: torch.nn.Module, pipe: Any) -> bool:
    runner = runner_of(module)
    return runner is not None and pipe in _owners[runner]


def runner_of(module: torch.nn.Module) -> Runner | None:
    found = module.__dict__.get("_compiled_call_impl")
    return found if isinstance(found, Runner) else None


def runners(pipe: Any) -> list[tuple[torch.nn.Module, Runner]]:
    """What serves this pipeline or module. Raises `NotAcceleratedError`."""
    known = found(pipe)
    if not known:
        kind = type(pipe).__name__
        if isinstance(pipe, torch.nn.Module) and runner_of(pipe) is not None:
            raise NotAcceleratedError(f"this {kind} was accelerated with its pipeline; pass the pipeline")
        raise NotAcceleratedError(f"this {kind} is not accelerated; call accelerate_pipeline first")
    return known


def looked_at(pipe: Any) -> list[tuple[torch.nn.Module, Runner]]:
    """The same; also of a module that was accelerated with its pipeline."""
    runner = runner_of(pipe) if isinstance(pipe, torch.nn.Module) else None
    return runners(pipe) if runner is None else [(pipe, runner)]


def found(pipe: Any) -> list[tuple[torch.nn.Module, Runner]]:
    """The same, or nothing."""
    return [(m, runner) for m in _modules(pipe) if (runner := runner_of(m)) is not None and pipe in _owners[runner]]


def pushed_out(pipe: Any) -> list[torch.nn.Module]:
    """The denoisers that were accelerated, and then compiled by `module.compile()`, which took our place."""
    return [m for m in _modules(pipe) if runner_of(m) is None and pipe in _served.get(m, ())]


def _modules(pipe: Any) -> list[torch.nn.Module]:
    return [module for _, module in components_of.with_compiled(components_of.candidates(pipe))]


def install(pipe: Any, modules: dict[str, torch.nn.Module], options: Options) -> list[Runner]:
    """`torch.nn.Module` asks `_compiled_call_impl` before its own call: there a runner outlives whatever offloading, hooks and
    adapters do to `forward`, leaves signature and types alone, and is dropped by `deepcopy` and pickle."""
    memory = Memory(options)
    made = []
    for name, module in modules.items():
        runner = runner_of(module)  # another pipeline's, with which this one shares the module
        if runner is None:
            runner = Runner(name, module, options, memory)
            _owners[runner] = _served[module] = weakref.WeakSet()
            module.__dict__["_compiled_call_impl"] = runner
        _owners[runner].add(pipe)
        made.append(runner)
    return made


def forget(pipe: Any, module: torch.nn.Module) -> None:
    """That `module`, whose runner was pushed out, served `pipe`."""
    _served[module].discard(pipe)


def disown(pipe: Any, module: torch.nn.Module, runner: Runner) -> None:
    _owners[runner].discard(pipe)
    if not _owners[runner]:
        _uninstall(module, runner)


def _uninstall(module: torch.nn.Module, runner: Runner) -> None:
    runner.release()
    del _owners[runner]
    if runner.wrapped is None:
        del module.__dict__["_compiled_call_impl"]
    else:
        module.__dict__["_compiled_call_impl"] = runner.wrapped
