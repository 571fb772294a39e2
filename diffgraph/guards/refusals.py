"""What cannot be trusted at all: state in which no recording of a module could stay true."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from diffgraph.parallel.ranks import parallel_config
from diffgraph.reasons import Reason

_HOOK_REASONS = (
    ("group_offload", Reason.OFFLOAD),
    ("layer_execution_tracker", Reason.OFFLOAD),
    ("layerwise_casting", Reason.LAYERWISE_CASTING),
    ("peft_autocast_disable", Reason.LAYERWISE_CASTING),
    ("cp_", Reason.MULTI_DEVICE),
    ("tp_", Reason.MULTI_DEVICE),
    ("cache", Reason.STEP_CACHE),
    ("fbc_", Reason.STEP_CACHE),
    ("pyramid_attention_broadcast", Reason.STEP_CACHE),
)


def refusal(module: torch.nn.Module, *, trains: bool = False) -> Reason | None:
    """Why no recording of `module` in its present state could be trusted; `None` when one can. `trains`: as part of a training
    step, to which random numbers and statistics belong."""
    if any(global_hook_tables(trains=trains)):
        return Reason.HOOKS_CHANGED
    parallel = parallel_config(module)
    if parallel is not None and not _is_recordable(parallel):
        return Reason.MULTI_DEVICE
    devices = set()
    for tensor in chain(module.parameters(), module.buffers()):
        devices.add(tensor.device)
    for submodule in module.modules():
        reason = _hook_refusal(submodule, parallel is not None, trains)
        if reason is not None:
            return reason
        if not trains and submodule.training and random_or_stateful(submodule):
            return Reason.TRAINING
        if _keeps_outliers(submodule):
            return Reason.SIDE_EFFECTS
        if submodule is not module and parallel_config(submodule) is not None:
            return Reason.MULTI_DEVICE
    if any(device.type == "cuda" for device in devices) and torch.cuda.get_allocator_backend() != "native":
        return Reason.ALLOCATOR  # of cudaMallocAsync, recording was reported to abort the process
    if torch.device("meta") in devices:
        return Reason.OFFLOAD
    return Reason.MULTI_DEVICE if len(devices) > 1 else None


def global_hook_tables(*, trains: bool) -> list[dict[int, Any]]:
    """Hooks that PyTorch calls for every module of the process."""
    module = torch.nn.modules.module
    of_backward = [module._global_backward_hooks, module._global_backward_pre_hooks] if trains else []
    return [module._global_forward_hooks, module._global_forward_pre_hooks, *of_backward]


def _is_recordable(config: Any) -> bool:
    """Context parallelism in equal parts: in unequal ones the ranks exchange sizes on the host in every attention."""
    context = getattr(config, "context_parallel_config", None)
    unequal = getattr(context, "ulysses_anything", False) or getattr(context, "ring_anything", False)
    return context is not None and not unequal


def _hook_refusal(module: torch.nn.Module, is_parallel: bool, trains: bool) -> Reason | None:
    if trains and (module._backward_hooks or module._backward_pre_hooks):
        return Reason.HOOKS_CHANGED
    hooks = chain(module._forward_hooks.values(), module._forward_pre_hooks.values())
    if not all(map(_belongs_to_the_forward, hooks)):
        return Reason.HOOKS_CHANGED
    hook = module.__dict__.get("_hf_hook")
    if hook is not None and _offloads(hook):
        return Reason.OFFLOAD
    registry = module.__dict__.get("_diffusers_hook")
    for name in getattr(registry, "hooks", None) or ():
        if is_parallel and name.startswith("cp_"):
            continue  # splits what the forward is given, and gathers what it makes: by ops
        return next((reason for part, reason in _HOOK_REASONS if part in name), Reason.HOOKS_CHANGED)
    return None


def _belongs_to_the_forward(hook: Any) -> bool:
    """transformers collects `hidden_states` by hooks that a model's first call puts on its layers for good."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def _offloads(hook: Any) -> bool:
    """accelerate's hooks that move weights around each forward."""
    inner = getattr(hook, "hooks", None)  # a SequentialHook
    if inner:
        return any(map(_offloads, inner))
    return type(hook).__name__ in ("CpuOffload", "LayerwiseCastingHook") or bool(getattr(hook, "offload", False))


def _keeps_outliers(module: torch.nn.Module) -> bool:
    """bitsandbytes' 8-bit layers with a threshold for outliers: each forward leaves their columns in the layer's state."""
    state = module.__dict__.get("state")
    return type(module).__module__.startswith("bitsandbytes.") and getattr(state, "threshold", 0) > 0


def random_or_stateful(module: torch.nn.Module) -> bool:
    """Draws random numbers or keeps statistics in training mode: warm-up and verify would be seen."""
    return isinstance(module, _BatchNorm) or (isinstance(module, _DropoutNd) and module.p > 0)
