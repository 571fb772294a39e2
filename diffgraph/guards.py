"""Is what was recorded still true? State that a call's arguments do not show.

`Fingerprint` lays out what a recording relies on so that comparing it costs little: addresses of parameters and buffers (of
quantised ones, see `composed`) and of tensors among the attributes, the module tree, forward hooks, classes (their methods and
class attributes), and the plain attributes of modules and of the objects that they own (attention processors, hook registries,
the configuration), which hold LoRA scales, merged and disabled flags, IP-adapter scales, the attention backend and the training
flag. Containers among the attributes are compared by content, and objects are followed, through containers and other objects, as
deep as `_DEPTH`.

Not compared, and told in the README: the settings of layers `_BY_THE_THOUSAND`, containers longer than `_CONTAINER_LIMIT`,
objects without a `__dict__`, what functions and closures refer to, module globals, the contents of tensors (a graph reads them
afresh) and of arrays, whether a weight's memory is seen by another shape or stride than before, and `requires_grad` of all
weights but a sample.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import partial
from itertools import chain
from operator import getitem, is_
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from diffgraph.composed import ComposedWeights, addresses, has_own_memory
from diffgraph.reasons import Reason
from diffgraph.refusals import global_hook_tables, random_or_stateful
from diffgraph.writes import Writes

_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__) - {"training"}
# Set anew by diffusers at every call, and empty of meaning for a forward; and a hook registry's own module.
_VOLATILE = frozenset({"_child_registries_cache", "_compiled_call_impl", "_module_ref"})
_CONTAINER_LIMIT = 256  # a longer list is compared by identity, to bound the cost of a call
_CONTAINER_TYPES = frozenset({list, tuple, set, dict, OrderedDict, defaultdict, deque})
_ONE_IN = 16  # weights is asked whether it wants gradients, which decides how a matrix product is computed; asking all is dear
_DEPTH = 4  # of containers and objects below a module's attributes
_HOLDERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)  # without a forward
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
_PEFT = "peft."
_HOOK_ATTRIBUTES = ("_hf_hook", "_old_forward", "_diffusers_hook", "forward", "hooks")
_REGISTRY = "_diffusers_hook"
_BASES = frozenset({object, torch.nn.Module})
_NOTED_BY_COPY = "__slotnames__"  # put on a class when an object of it is first copied or pickled
_HEAP_TYPE = 1 << 9  # of `__flags__`: a class written in Python, so one that can be changed

Table = dict[str, Any]


class Fingerprint:
    """What a recording of `module` relies on; `change()` tells what has become of it.

    While nothing is written to the tables (`writes`), what they hold need not be read: only the weights' addresses, and what does
    not lie in a table that is watched. All reading is done by loops in C. `benchmarks.denoiser` measures it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        modules = list(module.modules())
        # A strong reference to the root would be a cycle, which keeps its weights until the garbage collector comes.
        self._root = weakref.ref(module)
        self._root_table = module.__dict__
        self._root_then = self._read_root()
        self._note_weights(modules)
        self._note_attributes(modules, module)
        self._note_classes(modules, module)
        self._hook_tables = [d for m in modules for d in (m._forward_hooks, m._forward_pre_hooks)] + global_hook_tables()
        self._hooks_made = RemovableHandle.next_id
        self._hooks = list(map(len, self._hook_tables))
        self._had_hooks = any(self._hooks)

        absent = [table for table, _ in self._absent]
        sized = [*self._must_be_empty, *self._stateful, *self._sized]
        self._writes = Writes([*self._children.tables, *absent, *self._watched], sized)
        self._written: Any = None  # their count when all was last seen to be as it was, and the very same

    def _note_weights(self, modules: list[torch.nn.Module]) -> None:
        self._children = _Values([m._modules for m in modules if m._modules])
        self._stateful = [d for m in modules for d in (m._parameters, m._buffers) if d]
        self._stateful_sizes = list(map(len, self._stateful))
        slots = [(d, name) for d in self._stateful for name in d]
        self._absent = [(d, name) for d, name in slots if d[name] is None]
        present: list[tuple[dict[str, Any], str]] = [(d, name) for d, name in slots if d[name] is not None]
        own_memory = [(d, name) for d, name in present if has_own_memory(d[name])]
        self._weight_tables = [d for d, _ in own_memory]
        self._weight_names = [name for _, name in own_memory]
        self._addresses = addresses(self._weights())
        self._sample = present[::_ONE_IN]
        self._ask_for_gradients = self._read_sample()
        others = [(d, name) for d, name in present if not _is_plain(d[name])]
        self._composed = ComposedWeights(others)
        # What is not torch's or diffusers' own may look for what it had none of.
        lists = (*_HOLDERS, torch.nn.Sequential)
        own = [m for m in modules if not type(m).__module__.startswith(("torch.", "diffusers.")) or isinstance(m, lists)]
        self._must_be_empty = [d for m in own for d in _own_tables(m) if not d]

    def _note_attributes(self, modules: list[torch.nn.Module], root: torch.nn.Module) -> None:
        readers = list(_readers(modules, root))
        # Written at every call, though nothing that matters changes: these are read, not watched.
        restless = {id(table) for *_, table in readers if table is self._root_table or not _VOLATILE.isdisjoint(table)}
        self._whole = _Values([table for _, _, whole, table in readers if whole])
        single = [(table, key) for _, keys, whole, table in readers if not whole for key in keys]
        self._single = _Slots([(table, key) for table, key in single if id(table) not in restless])
        self._restless = _Slots([(table, key) for table, key in single if id(table) in restless])
        self._owners = {id(table): type(owner) for owner, *_, table in readers}
        named = [(table, key) for _, keys, _, table in readers for key in keys]
        self._containers = [(t, k) for t, k in named if type(t[k]) in _CONTAINER_TYPES]
        self._contents = [_copy(table[key], _DEPTH) for table, key in self._containers]
        flat = [_is_flat(table[key]) and id(table) not in restless for table, key in self._containers]
        deep = [i for i, is_flat in enumerate(flat) if not is_flat]
        self._deep = _Slots([self._containers[i] for i in deep])
        self._deep.then = [self._contents[i] for i in deep]
        among = {id(t): t for table, key in named for t in _tensors_among(table[key], _DEPTH)}
        for part in self._composed.parts():  # a layer may hold them too
            among.pop(id(part), None)
        self._tensors = list(among.values())
        self._tensor_addresses = addresses(self._tensors)
        tables = [table for *_, table in readers if id(table) not in restless]
        self._watched = tables + [table[key] for (table, key), is_flat in zip(self._containers, flat, strict=True) if is_flat]
        # An attribute more is seen by its table's size, where the table is not read whole.
        whole = set(map(id, self._whole.tables))
        called = [m.__dict__ for m in modules if not isinstance(m, _HOLDERS)]
        owned = [table for owner, *_, table in readers if not isinstance(owner, torch.nn.Module)]
        self._sized = [t for t in (*called, *owned) if id(t) not in whole and t is not self._root_table]
        self._owners |= {id(m.__dict__): type(m) for m in modules}
        self._sizes = self._read_sizes()

    def _note_classes(self, modules: list[torch.nn.Module], root: torch.nn.Module) -> None:
        self._typed = [m for m in modules if m is not root and not _is_by_the_thousand(m) and not isinstance(m, _HOLDERS)]
        self._types = self._read_types()
        kinds = {*map(type, modules), *self._owners.values()}
        classes = {base for kind in kinds for base in kind.__mro__} - _BASES
        self._class_tables = [vars(c) for c in classes if c.__flags__ & _HEAP_TYPE]
        self._class_attributes = self._read_class_attributes()
        self._class_attributes_by_name = self._read_class_attributes_by_name()

    def _weights(self) -> Iterable[Any]:
        """Looked up each time: a reference would keep a replaced weight's memory, and a weak one breaks `swap_tensors`."""
        return map(getitem, self._weight_tables, self._weight_names)

    def _read_sample(self) -> list[bool]:
        with torch._C.DisableTorchFunctionSubclass():
            return [table[name].requires_grad for table, name in self._sample]

    def _read_root(self) -> tuple[int, dict[str, Any]]:
        """How many attributes the root has, and its hooks: an empty hook registry, which diffusers makes when a pipeline's call
        ends or a cache context begins, is none."""
        registry = self._root_table.get(_REGISTRY)
        return len(self._root_table) - (registry is not None), dict(getattr(registry, "hooks", None) or {})

    def _read_sizes(self) -> list[int]:
        return list(map(len, self._sized))

    def _read_types(self) -> list[type]:
        return [type(self._root()), *map(type, self._typed)]

    def _read_class_attributes(self) -> list[Any]:
        return list(chain.from_iterable([table.values() for table in self._class_tables]))

    def _read_class_attributes_by_name(self) -> list[Table]:
        return [{name: value for name, value in table.items() if name != _NOTED_BY_COPY} for table in self._class_tables]

    def _classes_changed(self) -> bool:
        now = self._read_class_attributes()
        if now == self._class_attributes:
            return False
        if self._read_class_attributes_by_name() != self._class_attributes_by_name:
            return True
        self._class_attributes = now
        return False

    def _hooked(self) -> bool:
        """Whether hooks came or went. PyTorch numbers hooks as they are made: while there are none and none was made, none need
        be looked for."""
        made = RemovableHandle.next_id
        if made == self._hooks_made and not self._had_hooks:
            return False
        if list(map(len, self._hook_tables)) != self._hooks:
            return True
        self._hooks_made = made
        return False

    def state_versions(self) -> list[int]:
        """How often the contents of each weight, and of each tensor among the attributes, were written."""
        tensors = chain(self._weights(), self._composed.parts(), self._tensors)
        return [t._version for t in tensors if not t.is_inference()]

    def change(self) -> Reason | None:
        """The kind of the first change found; `None` when everything is as it was."""
        try:
            count = self._writes.count()
            if count != self._written:
                written = self._written_change()
                if written is not None:
                    # Who quantises weights in place may leave a mark on their module too.
                    other = written is Reason.ATTRIBUTES_CHANGED and self._weights_moved()
                    return Reason.WEIGHTS_CHANGED if other else written
                # Another object may be equal now, but watched it is not.
                same = self._children.are_the_same() and self._whole.are_the_same() and self._single.are_the_same()
                self._written = count if same else None
            return self._other_change()
        except Exception:  # an attribute is gone, a tensor stands where a number stood: whatever it is, it is a change
            return Reason.ATTRIBUTES_CHANGED

    def _written_change(self) -> Reason | None:
        """A change in what is watched."""
        if self._children.changed():
            return self._tree_change()
        if any(d.get(name) is not None for d, name in self._absent):
            return Reason.WEIGHTS_CHANGED
        if any(self._must_be_empty):
            return self._filled_change()
        if self._whole.changed() or self._single.changed():
            return self._attribute_change()
        if [table[key] for table, key in self._containers] != self._contents:
            return self._container_change()
        if list(map(len, self._stateful)) != self._stateful_sizes:
            return Reason.WEIGHTS_CHANGED
        return self._size_change() if self._read_sizes() != self._sizes else None

    def _other_change(self) -> Reason | None:
        """A change in what no write to a watched table shows."""
        if self._weights_moved():
            return Reason.WEIGHTS_CHANGED
        if self._hooked():
            return Reason.HOOKS_CHANGED
        if self._restless.changed():
            return self._attribute_change()
        if self._deep.changed():
            return self._container_change()
        if addresses(self._tensors) != self._tensor_addresses:
            return Reason.ATTRIBUTES_CHANGED
        if self._read_root() != self._root_then:
            return self._root_change()
        if self._read_types() != self._types or self._classes_changed():
            return Reason.ATTRIBUTES_CHANGED
        return None

    def _weights_moved(self) -> bool:
        try:
            moved = addresses(self._weights()) != self._addresses or self._composed.moved()
            return moved or self._read_sample() != self._ask_for_gradients
        except (KeyError, TypeError, AttributeError, RuntimeError):  # it is gone, or another kind of tensor
            return True

    # -- which kind of change (slow; only once something differs)

    def _tree_change(self) -> Reason:
        now, then = self._children.now(), self._children.then
        different = {id(m) for m in now} ^ {id(m) for m in then}
        if any(_is_adapter(m) for m in (*now, *then) if id(m) in different):
            return Reason.ADAPTER_CHANGED
        adapters = [(t, k, c) for (t, k), c in zip(self._containers, self._contents, strict=True) if self._in_peft(t)]
        changed = any(table.get(key) != content for table, key, content in adapters)  # one of several was deleted, say
        return Reason.ADAPTER_CHANGED if changed else Reason.WEIGHTS_CHANGED

    def _in_peft(self, table: Table) -> bool:
        return self._owners[id(table)].__module__.startswith(_PEFT)

    def _filled_change(self) -> Reason:
        values = next(d for d in self._must_be_empty if d).values()
        return Reason.ADAPTER_CHANGED if any(map(_is_adapter, values)) else Reason.WEIGHTS_CHANGED

    def _attribute_change(self) -> Reason:
        for slots in (self._single, self._restless):
            for table, key, then in zip(slots.tables, slots.keys, slots.then, strict=True):
                if not _same(table.get(key), then):
                    return _kind_of_change(self._owners[id(table)], key)
        for table, then in zip(self._whole.tables, self._whole.rows(), strict=True):
            if len(table) != len(then):
                return _kind_of_change(self._owners[id(table)], next((k for k in _HOOK_ATTRIBUTES if k in table), ""))
            for (key, now), old in zip(table.items(), then, strict=True):
                if not _same(now, old):
                    return _kind_of_change(self._owners[id(table)], key)
        return Reason.ATTRIBUTES_CHANGED

    def _container_change(self) -> Reason:
        pairs = zip(self._containers, self._contents, strict=True)
        table, key = next((table, key) for (table, key), content in pairs if table[key] != content)
        return _kind_of_change(self._owners[id(table)], key)

    def _root_change(self) -> Reason:
        replaced = any(key in self._root_table for key in _HOOK_ATTRIBUTES if key != _REGISTRY)
        hooks = replaced or self._read_root()[1] != self._root_then[1]
        return Reason.HOOKS_CHANGED if hooks else Reason.ATTRIBUTES_CHANGED

    def _size_change(self) -> Reason:
        sizes = zip(self._read_sizes(), self._sizes, self._sized, strict=True)
        table = next(table for now, then, table in sizes if now != then)
        return _kind_of_change(self._owners[id(table)], next((key for key in _HOOK_ATTRIBUTES if key in table), ""))


class _Then:
    """What was read once, to be compared with what is read now."""

    then: list[Any]

    def now(self) -> list[Any]:
        raise NotImplementedError

    def changed(self) -> bool:
        return self.now() != self.then

    def are_the_same(self) -> bool:
        """Whether they are the very objects, not only equal ones."""
        return all(map(is_, self.now(), self.then))


class _Values(_Then):
    """All values of some tables, one after the other."""

    def __init__(self, tables: list[Any]) -> None:
        self.tables = tables
        self.then = self.now()
        self._lengths = list(map(len, tables))

    def now(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self.tables)))

    def rows(self) -> list[list[Any]]:
        values = iter(self.then)
        return [[next(values) for _ in range(length)] for length in self._lengths]


class _Slots(_Then):
    """The values that stand under some names in some tables."""

    def __init__(self, slots: list[tuple[Table, str]]) -> None:
        self.tables = [table for table, _ in slots]
        self.keys = [key for _, key in slots]
        self.then = self.now()

    def now(self) -> list[Any]:
        return list(map(getitem, self.tables, self.keys))


def _same(now: Any, then: Any) -> bool:
    return now is then or (type(now) is type(then) and not isinstance(now, torch.Tensor) and bool(now == then))


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


def _readers(modules: list[torch.nn.Module], root: torch.nn.Module) -> Iterator[tuple[Any, tuple[str, ...], bool, Table]]:
    """Whose attributes are read (modules', and those of the objects that they own), which, whether as a whole, and from where."""
    seen: set[int] = set()
    for module in modules:
        keys = _attribute_names(module, is_root=module is root)
        table = module.__dict__
        if keys:
            # Iterating over a whole table costs about a third of looking up as many keys. The root's leads back to us.
            whole = len(table) < 3 * len(keys) and module is not root and "_compiled_call_impl" not in table
            yield module, keys, whole, table
        for key in keys:
            for owned in _objects(table[key], seen, _DEPTH):
                yield owned, tuple(k for k in owned.__dict__ if k not in _VOLATILE), False, owned.__dict__


def _attribute_names(module: torch.nn.Module, is_root: bool) -> tuple[str, ...]:
    if isinstance(module, _HOLDERS):
        return ()  # what they hold is read from their tables
    if _is_by_the_thousand(module):
        patched = tuple(key for key in _HOOK_ATTRIBUTES if key in module.__dict__ and not (is_root and key == _REGISTRY))
        return (*patched, "training", "p") if random_or_stateful(module) else patched
    ignored = _VOLATILE | {_REGISTRY} if is_root else _VOLATILE
    if type(module).__module__.startswith(("torch.", "diffusers.")) and not is_root and not random_or_stateful(module):
        ignored = ignored | {"training"}  # read for gradient checkpointing alone
    if _is_adapter(module):
        ignored = ignored | _UNREAD_BY_PEFT
    elif type(module).__module__.startswith("torch.nn.modules."):
        ignored = ignored | _UNREAD | ({"p"} if isinstance(module, torch.nn.Dropout) and not module.training else set())
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
    """An object with a state of its own; not a tensor, a module, a class, a function or a container (but diffusers' frozen
    configuration is both: a dict whose items are attributes too)."""
    others = (torch.Tensor, torch.nn.Module, type, list, tuple, FunctionType, MethodType, ModuleType, partial, Enum)
    return hasattr(value, "__dict__") and not isinstance(value, others) and type(value) not in _CONTAINER_TYPES


def _copy(value: Any, depth: int) -> Any:
    """A container is copied, so that a change of its contents shows."""
    kind = type(value)
    if kind not in _CONTAINER_TYPES or len(value) > _CONTAINER_LIMIT or depth == 0:
        return value
    if isinstance(value, dict):
        return {key: _copy(item, depth - 1) for key, item in value.items()}
    return cast(Any, kind)([_copy(item, depth - 1) for item in value])


def _is_flat(container: Any) -> bool:
    """Whether writes to this one dict are all that can change what it holds."""
    kinds = (*_CONTAINER_TYPES, torch.nn.Module)
    return type(container) is dict and not any(isinstance(v, kinds) or _is_object(v) for v in container.values())


def _is_by_the_thousand(module: torch.nn.Module) -> bool:
    return type(module).__module__ in _BY_THE_THOUSAND


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout == torch.strided


def _own_tables(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Where a module keeps what its forward, or its owner's, may look for."""
    if isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)):
        return [module._modules]
    if isinstance(module, (torch.nn.ParameterList, torch.nn.ParameterDict)):
        return [module._parameters]
    return [module._parameters, module._buffers, module._modules]


def _tensors_among(value: Any, depth: int) -> Iterator[torch.Tensor]:
    """The tensors with memory of their own that an attribute is or holds, as deep as its contents are compared."""
    if isinstance(value, torch.Tensor):
        if has_own_memory(value):
            yield value
    elif type(value) in _CONTAINER_TYPES and len(value) <= _CONTAINER_LIMIT and depth > 0:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_among(item, depth - 1)


def _is_adapter(obj: Any) -> bool:
    return type(obj).__module__.startswith(_PEFT)
