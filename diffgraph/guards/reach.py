"""What a forward may read: the modules of a tree, those that nobody registered too, the objects that they own, and which of
their attributes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import cache
from itertools import chain
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from diffgraph.guards.contents import DEPTH, is_container, items_of
from diffgraph.guards.objects import SlotTable, ThreadTable, classes_of, is_object, slots_of

_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__) - {"training"}
# Set anew by diffusers at every call, and empty of meaning for a forward; and a hook registry's own module.
_VOLATILE = frozenset({"_child_registries_cache", "_compiled_call_impl", "_module_ref"})
HOLDERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)  # without a forward
#: Layers that a large model has by the thousand. Their settings (`eps`, `negative_slope`) are not compared, as a call would cost
#: a fifth more; their weights, dropout's mode, and whether their `forward` is patched are.
_BY_THE_THOUSAND = (
    "torch.nn.modules.linear",
    "torch.nn.modules.normalization",
    "torch.nn.modules.activation",
    "torch.nn.modules.dropout",
    "torch.nn.modules.sparse",
    "diffusers.models.activations",
    "diffusers.models.normalization",
)
# A layer's record of its own weights' shapes; of a LoRA's, of what its `scaling` was computed from
_UNREAD = frozenset({"in_features", "out_features", "in_channels", "out_channels", "num_embeddings", "embedding_dim"})
_UNREAD_BY_PEFT = _UNREAD | {"r", "lora_alpha", "use_dora", "use_rslora", "lora_bias", "kwargs", "is_target_conv_1d_layer"}
_ATOMS = (str, int, float, type(None), torch.Tensor, torch.nn.Module, torch.dtype)
PEFT = "peft."
HOOK_ATTRIBUTES = ("_hf_hook", "_old_forward", "_diffusers_hook", "forward", "hooks")
REGISTRY = "_diffusers_hook"


def modules_within(root: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of the tree, and those that its modules or their objects hold without having registered them."""
    found = {id(module): module for module in root.modules()}
    waiting, seen, classes = list(found.values()), set(), set()
    while waiting:
        module = waiting.pop()
        held = [] if _is_by_the_thousand(module) else _held_by(module)
        if type(module) not in classes:
            classes.add(type(module))
            held += [value for c in classes_of(type(module)) for key, value in vars(c).items() if is_data(key, value)]
        for hidden in chain.from_iterable(_reached(value, seen, DEPTH) for value in held):
            if isinstance(hidden, torch.nn.Module) and id(hidden) not in found:
                new = {id(part): part for part in hidden.modules() if id(part) not in found}
                found |= new
                waiting += new.values()
    return list(found.values())


def readers_in(modules: list[torch.nn.Module], root: torch.nn.Module) -> Iterator[tuple[Any, tuple[str, ...], bool, Any]]:
    """Whose attributes are read (modules', and those of the objects that they own), which, whether as a whole, and from where."""
    seen: set[int] = set()
    for module in modules:
        keys = _attribute_names(module, is_root=module is root)
        table = module.__dict__
        if keys:
            # Iterating over a whole table costs about a third of looking up as many keys. The root's leads back to us.
            whole = len(table) < 3 * len(keys) and module is not root and "_compiled_call_impl" not in table
            yield module, keys, whole, table
        slots = slots_of(type(module))
        if slots:
            yield module, slots, False, SlotTable(module)
        for value in (*map(table.__getitem__, keys), *(getattr(module, name, None) for name in slots)):
            for owned in objects_in(value, seen, DEPTH):
                yield from readers_of(owned)


def readers_of(owned: Any) -> Iterator[tuple[Any, tuple[str, ...], bool, Any]]:
    if isinstance(owned, threading.local):
        yield owned, (ThreadTable.NAME,), False, ThreadTable(owned)
    elif hasattr(owned, "__dict__"):
        yield owned, tuple(k for k in owned.__dict__ if k not in _VOLATILE), False, owned.__dict__
    slots = slots_of(type(owned))
    if slots:
        yield owned, slots, False, SlotTable(owned)


def _attribute_names(module: torch.nn.Module, is_root: bool) -> tuple[str, ...]:
    if isinstance(module, torch.nn.ParameterDict):
        return ("_keys",)  # their order
    if isinstance(module, HOLDERS):
        return ()  # what they hold is read from their tables
    if _is_by_the_thousand(module):
        patched = tuple(key for key in HOOK_ATTRIBUTES if key in module.__dict__ and not (is_root and key == REGISTRY))
        heeded = ("training", "p", "dropout") if _heeds_training(module) else ("p",)  # a dropout of 0 need not stay one
        return (*patched, *(key for key in heeded if key in module.__dict__))
    ignored = _VOLATILE | {REGISTRY} if is_root else _VOLATILE
    if type(module).__module__.startswith(("torch.", "diffusers.")) and not is_root and not _heeds_training(module):
        ignored = ignored | {"training"}  # read for gradient checkpointing alone
    if is_adapter(module):
        ignored = ignored | _UNREAD_BY_PEFT
    elif type(module).__module__.startswith("torch.nn.modules."):
        ignored = ignored | _UNREAD
    return tuple(k for k in module.__dict__ if k not in _MODULE_INTERNALS and k not in ignored)


def _heeds_training(module: torch.nn.Module) -> bool:
    """Whether the forward of this layer of torch's does otherwise in training mode."""
    return module.p > 0 if isinstance(module, _DropoutNd) else _asks_for_training(type(module))


@cache
def _asks_for_training(kind: type) -> bool:
    ours = [c for c in classes_of(kind) if c.__module__.startswith("torch.")]
    functions = (value for c in ours for value in vars(c).values() if isinstance(value, FunctionType))
    return any("training" in function.__code__.co_names for function in functions)


def objects_in(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """The objects with a state of their own that `value` is or leads to, each once."""
    return (found for found in _reached(value, seen, depth) if not isinstance(found, torch.nn.Module))


def _reached(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """The objects with a state of their own that `value` is or leads to, each once, and the modules."""
    if isinstance(value, torch.nn.Module):
        yield value
    elif isinstance(value, _ATOMS) or depth == 0:
        return
    elif isinstance(value, MethodType):
        yield from _reached(value.__self__, seen, depth)
    else:
        if is_container(value):
            for item in items_of(value)[1]:
                yield from _reached(item, seen, depth - 1)
        if is_object(value) and id(value) not in seen:
            seen.add(id(value))
            yield value
            for item in _held_by(value):
                yield from _reached(item, seen, depth - 1)


def _held_by(owner: Any) -> list[Any]:
    """What an object holds in its own attributes."""
    table = getattr(owner, "__dict__", {})
    named = [value for key, value in table.items() if key not in _MODULE_INTERNALS and key not in _VOLATILE]
    return named + [getattr(owner, name, None) for name in slots_of(type(owner))]


def is_data(name: str, value: Any) -> bool:
    """Whether a class attribute may have a state of its own, or be a number: not methods, say."""
    methods = (FunctionType, classmethod, staticmethod, property, type, MemberDescriptorType)
    return not isinstance(value, methods) and not (name.startswith("__") and name.endswith("__"))


def is_watched(table: Any) -> bool:
    return isinstance(table, dict) and _VOLATILE.isdisjoint(table)


def _is_by_the_thousand(module: torch.nn.Module) -> bool:
    return type(module).__module__ in _BY_THE_THOUSAND


def own_tables(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Where a module keeps what its forward, or its owner's, may look for."""
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)):
        return [module._modules]
    if isinstance(module, (torch.nn.ParameterList, torch.nn.ParameterDict)):
        return [module._parameters]
    return [module._parameters, module._buffers, module._modules]


def is_adapter(obj: Any) -> bool:
    return type(obj).__module__.startswith(PEFT)
