"""Is what was recorded still true? State that a call's arguments do not show.

`Fingerprint` lays out what a recording relies on so that comparing it costs little: addresses of parameters and buffers (of
quantised ones, see `composed`) and of tensors among the attributes, the module tree, forward hooks, classes (their methods and
class attributes), and the plain attributes of modules and of the objects that they own (attention processors, hook registries,
the configuration), which hold LoRA scales, merged and disabled flags, IP-adapter scales, the attention backend and the training
flag. Containers among the attributes are compared by content, and objects are followed, through containers and other objects, as
deep as `_DEPTH`; so are modules that nobody registered. Values must be the same to code that is given them: 1 is not 1.0.

Not compared, and told in the README: the settings of layers `_BY_THE_THOUSAND`, containers longer than `_CONTAINER_LIMIT`,
objects with neither a `__dict__` nor `__slots__`, what functions and closures refer to, module globals, the contents of tensors
(a graph reads them afresh) and of arrays, whether a weight's memory is seen by another shape or stride than before, and
`requires_grad` of all weights but a sample.
"""

from __future__ import annotations

import copyreg
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from functools import cache, partial
from itertools import chain
from operator import getitem, is_
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from diffgraph.composed import ComposedWeights, addresses, has_own_memory
from diffgraph.reasons import Reason
from diffgraph.refusals import global_hook_tables, random_or_stateful
from diffgraph.values import same_value
from diffgraph.writes import Writes

_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__) - {"training"}
# Set anew by diffusers at every call, and empty of meaning for a forward; and a hook registry's own module.
_VOLATILE = frozenset({"_child_registries_cache", "_compiled_call_impl", "_module_ref"})
_CONTAINER_LIMIT = 256  # a longer list is compared by identity, to bound the cost of a call
_CONTAINER_TYPES = (list, tuple, set, dict, deque, bytearray)
_SETS = (set,)
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
_ABSENT = object()
_BASES = frozenset({object, torch.nn.Module})
_HEAP_TYPE = 1 << 9  # of `__flags__`: a class written in Python, so one that can be changed

Table = dict[str, Any]


class Fingerprint:
    """What a recording of `module` relies on; `change()` tells what has become of it.

    While nothing is written to the tables (`writes`), what they hold need not be read: only the weights' addresses, and what does
    not lie in a table that is watched. All reading is done by loops in C. `benchmarks.denoiser` measures it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        modules = modules_within(module)
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
        self._children = _Values([m._modules for m in modules if m._modules], named=True)
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
        kinds = {*map(type, modules), *(type(owner) for owner, *_ in readers)}
        classes = list({c: None for kind in kinds for c in _classes_of(kind)})
        for c in classes:  # what Python itself puts there when it is first asked: by `copy.deepcopy` of any instance, say
            copyreg._slotnames(c), getattr(c, "__annotations__", None)  # type: ignore[attr-defined]
        self._class_tables = [vars(c) for c in classes]
        self._owners: dict[int, type] = dict(zip(map(id, self._class_tables), classes, strict=True))
        shared = [(table, key) for table in self._class_tables for key, value in table.items() if _is_data(key, value)]
        seen = {id(owner) for owner, *_ in readers}
        readers += [r for table, key in shared for owned in _objects(table[key], seen, _DEPTH) for r in _readers_of(owned)]
        # Written at every call, though nothing that matters changes: these are read, not watched.
        restless = {id(table) for *_, table in readers if not _is_watched(table) or table is self._root_table}
        self._whole = _Values([table for _, _, whole, table in readers if whole])
        single = [(table, key) for _, keys, whole, table in readers if not whole for key in keys]
        self._single = _Slots([(table, key) for table, key in single if id(table) not in restless])
        self._restless = _Slots([*((table, key) for table, key in single if id(table) in restless), *shared])
        self._owners |= {id(table): type(owner) for owner, *_, table in readers}
        named = [*((table, key) for _, keys, _, table in readers for key in keys), *shared]
        restless |= set(map(id, self._class_tables))
        containers = [(t, k) for t, k in named if _is_container(t[k])]
        flat = [(t, k) for t, k in containers if _is_flat(t[k]) and id(t) not in restless]
        flat_names = {(id(table), key) for table, key in flat}
        self._flat = _Contents(flat)
        self._deep = _Contents([(t, k) for t, k in containers if (id(t), k) not in flat_names])
        among = {id(t): t for table, key in named for t in _tensors_among(table[key], _DEPTH)}
        for part in self._composed.parts():  # a layer may hold them too
            among.pop(id(part), None)
        self._tensors = list(among.values())
        self._tensor_addresses = addresses(self._tensors)
        tables = [table for *_, table in readers if id(table) not in restless]
        self._watched = tables + [table[key] for table, key in flat]
        # An attribute more is seen by its table's size, where the table is not read whole.
        whole = set(map(id, self._whole.tables))
        called = [m.__dict__ for m in modules if not isinstance(m, _HOLDERS)]
        owned = [t for owner, *_, t in readers if not isinstance(owner, torch.nn.Module) and isinstance(t, dict)]
        self._sized = [t for t in (*called, *owned) if id(t) not in whole and t is not self._root_table]
        self._owners |= {id(m.__dict__): type(m) for m in modules}
        self._sizes = self._read_sizes()

    def _note_classes(self, modules: list[torch.nn.Module], root: torch.nn.Module) -> None:
        self._typed = [m for m in modules if m is not root and not isinstance(m, _HOLDERS)]
        self._types = self._read_types()
        self._class_attributes = self._read_class_attributes()

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
                same = all(part.are_the_same() for part in (self._children, self._whole, self._single, self._flat))
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
        if self._flat.changed():
            return self._container_change(self._flat)
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
            return self._container_change(self._deep)
        if addresses(self._tensors) != self._tensor_addresses:
            return Reason.ATTRIBUTES_CHANGED
        if self._read_root() != self._root_then:
            return self._root_change()
        if self._read_types() != self._types or self._read_class_attributes() != self._class_attributes:
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
        different = set(map(id, now)) ^ set(map(id, then))
        if any(_is_adapter(m) for m in (*now, *then) if id(m) in different):
            return Reason.ADAPTER_CHANGED
        held = [*self._flat.copies(), *self._deep.copies()]
        changed = any(self._in_peft(table) and not _same(table.get(key), copy) for table, key, copy in held)
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

    def _container_change(self, contents: _Contents) -> Reason:
        table, key = next((table, key) for table, key, copy in contents.copies() if not _same(table[key], copy))
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
        now = self.now()
        return not _are_the_same(now, self.then) and not (len(now) == len(self.then) and all(map(_same, now, self.then)))

    def are_the_same(self) -> bool:
        """Whether they are the very objects, not only equal ones."""
        return _are_the_same(self.now(), self.then)


class _Values(_Then):
    """All values of some tables, one after the other, and where they are `named`, their names."""

    def __init__(self, tables: list[Any], named: bool = False) -> None:
        self.tables = tables
        self._named = tables if named else []
        self.then = self.now()
        self._lengths = list(map(len, tables))

    def now(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self.tables)), *chain.from_iterable(self._named)]

    def rows(self) -> list[list[Any]]:
        values = iter(self.then)
        return [[next(values) for _ in range(length)] for length in self._lengths]


class _Slots(_Then):
    """The values that stand under some names in some tables."""

    def __init__(self, slots: Sequence[tuple[Any, str]]) -> None:
        self.tables = [table for table, _ in slots]
        self.keys = [key for _, key in slots]
        self.then = self.now()

    def now(self) -> list[Any]:
        return list(map(getitem, self.tables, self.keys))


class _Contents(_Slots):
    """The containers that stand under some names in some tables, with all that is in them, as deep as `_DEPTH`.

    As long as each holds the very items that it held, one after the other, nothing is compared.
    """

    def __init__(self, slots: Sequence[tuple[Any, str]]) -> None:
        self._inner: tuple[list[Any], list[Any]] = ([], [])
        super().__init__(slots)
        self._note()

    def _note(self) -> None:
        found = {id(c): c for container in _Slots.now(self) for c in _containers_in(container, _DEPTH)}.values()
        self._inner = [c for c in found if not isinstance(c, dict)], [c for c in found if isinstance(c, dict)]
        self._copies = [_copy(container, _DEPTH) for container in _Slots.now(self)]
        self.then = self.now()

    def now(self) -> list[Any]:
        lists, dicts = self._inner
        values = chain.from_iterable(map(dict.values, dicts))
        return [*super().now(), *chain.from_iterable(lists), *chain.from_iterable(dicts), *values]

    def changed(self) -> bool:
        if self.are_the_same():
            return False
        if not all(map(_same, _Slots.now(self), self._copies)):
            return True
        self._note()  # of equal ones in their place
        return False

    def copies(self) -> Iterable[tuple[Any, str, Any]]:
        return zip(self.tables, self.keys, self._copies, strict=True)


class _Copy(NamedTuple):
    """Of a container: a change of its contents shows."""

    kind: type
    keys: list[Any]
    values: Any


def _are_the_same(now: list[Any], then: list[Any]) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


def _same(now: Any, then: Any) -> bool:
    """Whether code that is given `now` does as with `then`, which may be a copy: not so with 1 and 1.0, with dicts in another
    order, or with two objects whose attributes may differ, whatever they say of themselves."""
    if now is then:
        return True
    if isinstance(then, _Copy):
        if type(now) is not then.kind or (type(now) in _SETS and now != then.values):
            return False
        keys, values = _items(now)
        if type(now) in _SETS:
            return True
        same_size = len(keys) == len(then.keys) and len(values) == len(then.values)
        return same_size and all(map(_same, keys, then.keys)) and all(map(_same, values, then.values))
    if type(now) is not type(then) or isinstance(now, (torch.Tensor, torch.nn.Module)) or _is_object(now):
        return False
    if _is_container(now):
        return _same(now, _copy(then, _DEPTH))
    return same_value(now, then)


def _kind_of_change(owner: type, key: str) -> Reason:
    """Which kind of change it is when attribute `key` of an object of class `owner` has changed, or came or went."""
    if owner.__module__.startswith(_PEFT):
        return Reason.ADAPTER_CHANGED
    if issubclass(owner, torch.nn.ParameterDict):
        return Reason.WEIGHTS_CHANGED
    if key == "training":
        return Reason.TRAINING
    if key == "processor":
        return Reason.PROCESSORS_CHANGED
    if owner.__name__.endswith("Processor") or "AttnProcessor" in owner.__name__:
        return Reason.ADAPTER_CHANGED if key == "scale" else Reason.PROCESSORS_CHANGED
    return Reason.HOOKS_CHANGED if key in _HOOK_ATTRIBUTES else Reason.ATTRIBUTES_CHANGED


def _readers(modules: list[torch.nn.Module], root: torch.nn.Module) -> Iterator[tuple[Any, tuple[str, ...], bool, Any]]:
    """Whose attributes are read (modules', and those of the objects that they own), which, whether as a whole, and from where."""
    seen: set[int] = set()
    for module in modules:
        keys = _attribute_names(module, is_root=module is root)
        table = module.__dict__
        if keys:
            # Iterating over a whole table costs about a third of looking up as many keys. The root's leads back to us.
            whole = len(table) < 3 * len(keys) and module is not root and "_compiled_call_impl" not in table
            yield module, keys, whole, table
        slots = _slots_of(type(module))
        if slots:
            yield module, slots, False, _SlotTable(module)
        for value in (*map(table.__getitem__, keys), *(getattr(module, name, None) for name in slots)):
            for owned in _objects(value, seen, _DEPTH):
                yield from _readers_of(owned)


def _readers_of(owned: Any) -> Iterator[tuple[Any, tuple[str, ...], bool, Any]]:
    if hasattr(owned, "__dict__"):
        yield owned, tuple(k for k in owned.__dict__ if k not in _VOLATILE), False, owned.__dict__
    slots = _slots_of(type(owned))
    if slots:
        yield owned, slots, False, _SlotTable(owned)


class _SlotTable:
    """What an object holds in `__slots__`, read as if it were in its `__dict__`; no writes to it are seen."""

    def __init__(self, owner: Any) -> None:
        # Modules are known weakly, as the root is; not every object with slots can be.
        self._owner = weakref.ref(owner) if isinstance(owner, torch.nn.Module) else partial(_itself, owner)

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner(), name, _ABSENT)

    get = __getitem__


def _itself(owner: Any) -> Any:
    return owner


@cache
def _slots_of(kind: type) -> tuple[str, ...]:
    return tuple(name for c in _classes_of(kind) for name, value in vars(c).items() if type(value) is MemberDescriptorType)


def _classes_of(kind: type) -> list[type]:
    """Those whose attributes an object of this class has, and which can be changed."""
    return [c for c in kind.__mro__ if c not in _BASES and c.__flags__ & _HEAP_TYPE]


def _is_data(name: str, value: Any) -> bool:
    """Whether a class attribute may have a state of its own, or be a number: not methods, say."""
    methods = (FunctionType, classmethod, staticmethod, property, type, MemberDescriptorType)
    return not isinstance(value, methods) and not (name.startswith("__") and name.endswith("__"))


def _is_watched(table: Any) -> bool:
    return isinstance(table, dict) and _VOLATILE.isdisjoint(table)


def _attribute_names(module: torch.nn.Module, is_root: bool) -> tuple[str, ...]:
    if isinstance(module, torch.nn.ParameterDict):
        return ("_keys",)  # their order
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


def modules_within(root: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of the tree, and those that its modules or their objects hold without having registered them."""
    found = {id(module): module for module in root.modules()}
    waiting, seen, classes = list(found.values()), set(), set()
    while waiting:
        module = waiting.pop()
        held = [] if _is_by_the_thousand(module) else _held_by(module)
        if type(module) not in classes:
            classes.add(type(module))
            held += [value for c in _classes_of(type(module)) for key, value in vars(c).items() if _is_data(key, value)]
        for hidden in chain.from_iterable(_reached(value, seen, _DEPTH) for value in held):
            if isinstance(hidden, torch.nn.Module) and id(hidden) not in found:
                new = {id(part): part for part in hidden.modules() if id(part) not in found}
                found |= new
                waiting += new.values()
    return list(found.values())


def _objects(value: Any, seen: set[int], depth: int) -> Iterator[Any]:
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
        if _is_container(value):
            for item in _items(value)[1]:
                yield from _reached(item, seen, depth - 1)
        if _is_object(value) and id(value) not in seen:
            seen.add(id(value))
            yield value
            for item in _held_by(value):
                yield from _reached(item, seen, depth - 1)


def _held_by(owner: Any) -> list[Any]:
    """What an object holds in its own attributes."""
    table = getattr(owner, "__dict__", {})
    named = [value for key, value in table.items() if key not in _MODULE_INTERNALS and key not in _VOLATILE]
    return named + [getattr(owner, name, None) for name in _slots_of(type(owner))]


def _is_object(value: Any) -> bool:
    """An object with a state of its own; not a tensor, a module, a class or a function. It may be a container, too."""
    others = (torch.Tensor, torch.nn.Module, type, FunctionType, MethodType, ModuleType, partial, Enum)
    return not isinstance(value, others) and (hasattr(value, "__dict__") or bool(_slots_of(type(value))))


def _is_container(value: Any) -> bool:
    """Whose contents are compared. Not those of diffusers' configuration: its items are attributes, too, and saving it takes one
    of them out."""
    if type(value).__module__ == "diffusers.configuration_utils":
        return False
    return isinstance(value, partial) or (isinstance(value, _CONTAINER_TYPES) and len(value) <= _CONTAINER_LIMIT)


def _items(container: Any) -> tuple[list[Any], Any]:
    """What a container holds, by which keys."""
    if isinstance(container, partial):
        return [], [container.func, container.args, container.keywords]
    if isinstance(container, dict):
        return list(dict.keys(container)), list(dict.values(container))
    return [], list(container)


def _containers_in(value: Any, depth: int) -> Iterator[Any]:
    """The containers that `value` is or holds, which can be read one item after the other."""
    if _is_container(value) and depth > 0:
        if not isinstance(value, partial):
            yield value
        for item in _items(value)[1]:
            yield from _containers_in(item, depth - 1)


def _copy(value: Any, depth: int) -> Any:
    """A container is copied, so that a change of its contents shows."""
    if not _is_container(value) or depth == 0:
        return value
    keys, values = _items(value)
    if type(value) in _SETS:
        return _Copy(type(value), [], set(value))
    return _Copy(type(value), keys, [_copy(item, depth - 1) for item in values])


def _is_flat(container: Any) -> bool:
    """Whether writes to this one dict are all that can change what it holds."""
    return type(container) is dict and not any(_is_container(v) or isinstance(v, torch.nn.Module) for v in container.values())


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
    elif _is_container(value) and depth > 0:
        for item in _items(value)[1]:
            yield from _tensors_among(item, depth - 1)


def _is_adapter(obj: Any) -> bool:
    return type(obj).__module__.startswith(_PEFT)
