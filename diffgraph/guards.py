"""Is what was recorded still true? State that a call's arguments do not show.

`Fingerprint` lays out what a recording relies on so that comparing it costs little: addresses of parameters and buffers, the
module tree, forward hooks, the classes (their methods and class attributes), and the plain attributes of modules and of the
objects that they own (attention processors, hook registries), which hold LoRA scales, merged and disabled flags, IP-adapter
scales, the attention backend and the training flag. Containers among the attributes are compared by content, and objects are
followed, through containers and other objects, as deep as `_DEPTH`. Not compared: containers longer than `_CONTAINER_LIMIT`,
objects without a `__dict__`, what functions and closures refer to, module globals, the contents of tensors (a graph reads them
afresh) and of arrays, and whether a weight's memory is seen by another shape or stride than before.

`refusal` says what cannot be trusted at all.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from itertools import chain
from operator import itemgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle

from diffgraph.reasons import Reason

_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__) - {"training"}
# Set anew by diffusers at every call, and empty of meaning for a forward; and a hook registry's own module.
_VOLATILE = frozenset({"_child_registries_cache", "_compiled_call_impl", "_module_ref"})
_CONTAINER_LIMIT = 256  # a longer list is compared by identity, to bound the cost of a call
_CONTAINER_TYPES = frozenset({list, tuple, set, dict, OrderedDict, defaultdict, deque})
_DEPTH = 4  # of containers and objects below a module's attributes
_CONTAINERS = torch.nn.ModuleList.__module__
_HOLDERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)  # without a forward
# A layer's record of its own weights' shapes; of a LoRA's, of what its `scaling` was computed from
_UNREAD = frozenset({"in_features", "out_features", "in_channels", "out_channels", "num_embeddings", "embedding_dim"})
_UNREAD_BY_PEFT = frozenset({"in_features", "out_features", "r", "lora_alpha", "kwargs", "is_target_conv_1d_layer"})
_ATOMS = (str, int, float, type(None), torch.Tensor, torch.nn.Module, torch.dtype)
_PEFT = "peft."
_HOOK_ATTRIBUTES = ("_hf_hook", "_old_forward", "_diffusers_hook", "forward", "hooks")
_BASES = frozenset({object, torch.nn.Module})
_HEAP_TYPE = 1 << 9  # of `__flags__`: a class written in Python, so one that can be changed
_TENSOR_PTR: Callable[[Any], int] = torch.Tensor.data_ptr


class Fingerprint:
    """What a recording of `module` relies on; `change()` tells what has become of it.

    Cost on Qwen-Image (2,297 modules, 1,933 parameters): see the guard row of README's table.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        modules = list(module.modules())
        self._state_tables = tables = [d for m in modules for d in (m._parameters, m._buffers) if d]
        self._weight_tables = [d for d in tables if all(map(_is_plain, d.values()))]
        slots = [(d, name) for d in tables if not all(map(_is_plain, d.values())) for name in d]
        self._weight_slots = [(d, name) for d, name in slots if _is_plain(d[name])]
        self._absent = [(d, name) for d, name in slots if d[name] is None]
        self._composed = [(d, name) for d, name in slots if d[name] is not None and not _is_plain(d[name])]
        self._child_tables = [m._modules for m in modules if m._modules]
        self._hook_tables = [d for m in modules for d in (m._forward_hooks, m._forward_pre_hooks)]
        self._hook_tables += _global_hook_tables()
        # Of a torch.nn layer's forward we know what it reads.
        own = [m for m in modules if not _is_torch_layer(m)]
        self._must_be_empty = [d for m in own for d in (m._parameters, m._buffers, m._modules) if not d]
        called = [m for m in modules if not isinstance(m, _HOLDERS)]
        # A strong reference to the root would be a cycle, which keeps its weights until the garbage collector comes.
        self._root = weakref.ref(module)
        self._typed = [m for m in called if m is not module and not _is_torch_layer(m)]
        readers = list(_readers(modules))
        self._owners = [type(owner) for owner, _, _ in readers]
        self._reads = [(get, table) for _, get, table in readers]
        owned = [(type(owner), table) for owner, _, table in readers if not isinstance(owner, torch.nn.Module)]
        self._attribute_tables = [m.__dict__ for m in called] + [table for _, table in owned]
        self._table_owners = [*map(type, called), *(kind for kind, _ in owned)]
        classes = {base for kind in {*map(type, modules), *self._owners} for base in kind.__mro__} - _BASES
        self._class_tables = [vars(c) for c in classes if c.__flags__ & _HEAP_TYPE]
        self._weights = self._read_weights()
        self._composed_weights = self._read_composed()
        self._children = self._read_children()
        self._sizes = self._read_sizes()
        self._types = self._read_types()
        self._class_attributes = self._read_class_attributes()
        self._attributes = [_copied(values) for values in self._read_attributes()]
        self._hooks_made = RemovableHandle.next_id
        self._hooks = self._read_hooks()
        self._had_hooks = any(self._hooks)

    def _read_weights(self) -> list[int]:
        in_tables = chain.from_iterable(map(dict.values, self._weight_tables))
        with torch._C.DisableTorchFunctionSubclass():  # every parameter is asked for an override else
            try:
                return list(map(_TENSOR_PTR, chain(in_tables, [d[name] for d, name in self._weight_slots])))
            except TypeError:  # one is None now
                return []

    def _read_composed(self) -> list[Any]:
        return [_address(d[name]) for d, name in self._composed]

    def _read_children(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._child_tables)))

    def _read_sizes(self) -> list[int]:
        return list(map(len, self._attribute_tables))

    def _read_attributes(self) -> list[Any]:
        return [get(d) for get, d in self._reads]

    def _read_types(self) -> list[type]:
        return [type(self._root()), *map(type, self._typed)]

    def _read_class_attributes(self) -> list[Any]:
        return list(chain.from_iterable([table.values() for table in self._class_tables]))

    def _read_hooks(self) -> list[int]:
        return list(map(len, self._hook_tables))

    def _hooked(self) -> bool:
        """Whether hooks came or went. PyTorch numbers hooks as they are made: while there are none and none was made, none need
        be looked for."""
        made = RemovableHandle.next_id
        if made == self._hooks_made and not self._had_hooks:
            return False
        if self._read_hooks() != self._hooks:
            return True
        self._hooks_made = made
        return False

    def state_versions(self) -> list[int]:
        """How often the contents of each weight, and of each tensor among the attributes, were written."""
        weights = [t for d in self._state_tables for t in d.values()]
        owned = [v for row in self._attributes for v in row]
        return [t._version for t in (*weights, *owned) if isinstance(t, torch.Tensor) and not t.is_inference()]

    def change(self) -> Reason | None:
        """The kind of the first change found; `None` when everything is as it was."""
        try:
            if self._read_children() != self._children:
                return self._tree_change()
            if self._read_weights() != self._weights or self._read_composed() != self._composed_weights:
                return Reason.WEIGHTS_CHANGED
            if any(d[name] is not None for d, name in self._absent):
                return Reason.WEIGHTS_CHANGED
            if self._hooked():
                return Reason.HOOKS_CHANGED
            if any(self._must_be_empty):
                return self._filled_change()
            if self._read_attributes() != self._attributes:
                return self._attribute_change()
            if self._read_sizes() != self._sizes:
                return self._size_change()
            if self._read_types() != self._types or self._read_class_attributes() != self._class_attributes:
                return Reason.ATTRIBUTES_CHANGED
        except Exception:  # an attribute is gone, a tensor stands where a number stood: whatever it is, it is a change
            return Reason.ATTRIBUTES_CHANGED
        return None

    # -- which kind of change (slow; only once something differs)

    def _tree_change(self) -> Reason:
        now, then = self._read_children(), self._children
        different = {id(m) for m in now} ^ {id(m) for m in then}
        changed = [m for m in (*now, *then) if id(m) in different]
        if any(map(_is_adapter, changed)):
            return Reason.ADAPTER_CHANGED
        rows = zip(self._owners, self._reads, self._attributes, strict=True)
        adapters = (row for row in rows if row[0].__module__.startswith(_PEFT))
        changed = any(get(table) != then for _, (get, table), then in adapters)  # one of several was deleted, say
        return Reason.ADAPTER_CHANGED if changed else Reason.WEIGHTS_CHANGED

    def _filled_change(self) -> Reason:
        values = next(d for d in self._must_be_empty if d).values()
        return Reason.ADAPTER_CHANGED if any(map(_is_adapter, values)) else Reason.WEIGHTS_CHANGED

    def _attribute_change(self) -> Reason:
        rows = zip(self._owners, self._reads, self._attributes, strict=True)
        owner, (get, table), then = next(row for row in rows if row[1][0](row[1][1]) != row[2])
        keys = get.keys
        key = next(k for k, now, old in zip(keys, get(table), then, strict=True) if now is not old and now != old)
        return _kind_of_change(owner, key)

    def _size_change(self) -> Reason:
        sizes = zip(self._read_sizes(), self._sizes, self._table_owners, self._attribute_tables, strict=True)
        owner, table = next((owner, table) for now, then, owner, table in sizes if now != then)
        return _kind_of_change(owner, next((key for key in _HOOK_ATTRIBUTES if key in table), ""))


def _kind_of_change(owner: type, key: str) -> Reason:
    """Which kind of change it is when attribute `key` of an object of class `owner` has changed, or came or went."""
    if owner.__module__.startswith(_PEFT):
        return Reason.ADAPTER_CHANGED
    if key == "training":
        return Reason.TRAINING
    if key == "processor":
        return Reason.PROCESSORS_CHANGED
    if owner.__name__.endswith("Processor") or "AttnProcessor" in owner.__name__:
        return Reason.ADAPTER_CHANGED if key == "scale" else Reason.PROCESSORS_CHANGED
    return Reason.HOOKS_CHANGED if key in _HOOK_ATTRIBUTES else Reason.ATTRIBUTES_CHANGED


class _Reader:
    """`itemgetter` that always gives a tuple and remembers its keys."""

    __slots__ = ("_get", "keys")

    def __init__(self, keys: tuple[str, ...]) -> None:
        self.keys = keys
        self._get = itemgetter(*keys) if len(keys) > 1 else lambda table: tuple(table[key] for key in keys)

    def __call__(self, table: dict[str, Any]) -> tuple[Any, ...]:
        return self._get(table)


def _readers(modules: list[torch.nn.Module]) -> Iterator[tuple[Any, _Reader, dict[str, Any]]]:
    """Whose attributes are read, how, and from which table: modules, and the objects that they own."""
    made: dict[tuple[str, ...], _Reader] = {}
    seen: set[int] = set()
    for module in modules:
        keys = _attribute_names(module)
        if keys:
            yield module, made.setdefault(keys, _Reader(keys)), module.__dict__
        for key in keys:
            for owned in _objects(module.__dict__[key], seen, _DEPTH):
                names = tuple(k for k in owned.__dict__ if k not in _VOLATILE)
                yield owned, made.setdefault(names, _Reader(names)), owned.__dict__


def _attribute_names(module: torch.nn.Module) -> tuple[str, ...]:
    if isinstance(module, _HOLDERS):
        return ()  # what they hold is read from their tables
    ignored = _VOLATILE
    if _is_adapter(module):
        ignored = ignored | _UNREAD_BY_PEFT
    elif type(module).__module__.startswith("torch.nn.modules."):
        # There are thousands: only what their forwards read.
        ignored = ignored | _UNREAD
        if not isinstance(module, (_DropoutNd, _BatchNorm)):
            ignored = ignored | {"training"}
    return tuple(k for k in module.__dict__ if k not in _MODULE_INTERNALS and k not in ignored)


def _objects(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
    """The objects with a state of their own that `value` is or leads to, each once."""
    if isinstance(value, _ATOMS) or depth == 0:
        return
    if type(value) in _CONTAINER_TYPES:
        if len(value) <= _CONTAINER_LIMIT:
            for item in value.values() if isinstance(value, dict) else value:
                yield from _objects(item, seen, depth - 1)
    elif _is_object(value) and id(value) not in seen:
        seen.add(id(value))
        yield value
        for item in list(value.__dict__.values()):
            yield from _objects(item, seen, depth - 1)


def _is_object(value: Any) -> bool:
    """An object with a state of its own; not a tensor, a module, a class, a function or a container."""
    others = (torch.Tensor, torch.nn.Module, type, dict, list, tuple, FunctionType, MethodType, ModuleType, partial, Enum)
    return hasattr(value, "__dict__") and not isinstance(value, others)


def _copied(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Containers are copied, so that a change of their contents shows."""
    return tuple([_copy(value, _DEPTH) for value in values])


def _copy(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind not in _CONTAINER_TYPES or len(value) > _CONTAINER_LIMIT or depth == 0:
        return value
    if isinstance(value, dict):
        return {key: _copy(item, depth - 1) for key, item in value.items()}
    return cast(Any, kind)([_copy(item, depth - 1) for item in value])


def _is_torch_layer(module: torch.nn.Module) -> bool:
    home = type(module).__module__
    return home.startswith("torch.nn.modules.") and home != _CONTAINERS and not module._modules


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _address(tensor: Any) -> Any:
    """Where a weight lies; for a tensor subclass (quantised weights), where the tensors lie that it is made of."""
    if tensor is None:
        return None
    if hasattr(tensor, "__tensor_flatten__"):
        return tuple(_address(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.data_ptr()


def _is_adapter(obj: Any) -> bool:
    return type(obj).__module__.startswith(_PEFT)


# -- refusals

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


def refusal(module: torch.nn.Module) -> Reason | None:
    """Why no recording of `module` in its present state could be trusted; `None` when one can."""
    if any(_global_hook_tables()):
        return Reason.HOOKS_CHANGED
    devices = set()
    for tensor in chain(module.parameters(), module.buffers()):
        devices.add(tensor.device)
    for submodule in module.modules():
        reason = _hook_refusal(submodule)
        if reason is not None:
            return reason
        if submodule.training and _random_or_stateful(submodule):
            return Reason.TRAINING
        if getattr(submodule, "_parallel_config", None) is not None:
            return Reason.MULTI_DEVICE
    if torch.device("meta") in devices:
        return Reason.OFFLOAD
    return Reason.MULTI_DEVICE if len(devices) > 1 else None


def _global_hook_tables() -> list[dict[int, Any]]:
    """Hooks that PyTorch calls for every module of the process."""
    module = torch.nn.modules.module
    return [module._global_forward_hooks, module._global_forward_pre_hooks]


def _hook_refusal(module: torch.nn.Module) -> Reason | None:
    if module._forward_hooks or module._forward_pre_hooks:
        return Reason.HOOKS_CHANGED
    hook = module.__dict__.get("_hf_hook")
    if hook is not None and _offloads(hook):
        return Reason.OFFLOAD
    registry = module.__dict__.get("_diffusers_hook")
    for name in getattr(registry, "hooks", None) or ():
        return next((reason for part, reason in _HOOK_REASONS if part in name), Reason.HOOKS_CHANGED)
    return None


def _offloads(hook: Any) -> bool:
    """accelerate's hooks that move weights around each forward."""
    inner = getattr(hook, "hooks", None)  # a SequentialHook
    if inner:
        return any(map(_offloads, inner))
    return type(hook).__name__ in ("CpuOffload", "LayerwiseCastingHook") or bool(getattr(hook, "offload", False))


def _random_or_stateful(module: torch.nn.Module) -> bool:
    """Draws random numbers or keeps statistics in training mode: warm-up and verify would be seen."""
    return isinstance(module, _BatchNorm) or (isinstance(module, _DropoutNd) and module.p > 0)
