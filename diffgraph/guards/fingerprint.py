"""What a recording relies on, read so that comparing it at each call costs little.

Read are addresses of parameters and buffers (of quantised ones, see `composed`) and of tensors among the attributes, the module
tree, hooks, classes (their methods and class attributes), and the plain attributes of modules and of the objects that
they own (attention processors, hook registries, the configuration), which hold LoRA scales, merged and disabled flags,
IP-adapter scales, the attention backend and the training flag. Containers among the attributes are compared by content, and
objects are followed, through containers and other objects, as deep as `contents.DEPTH`; so are modules that nobody registered.
Values must be the same to code that is given them: 1 is not 1.0.

Not compared, and told in the README: the settings of layers that a model has by the thousand (`reach`), containers longer than
`contents` allows, objects with neither a `__dict__` nor `__slots__`, what functions and closures refer to, module globals, the
contents of tensors (a graph reads them afresh) and of arrays, whether a weight's memory, where it is the same memory, is seen by
another shape or stride than before, and `requires_grad` of all weights but a sample.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Iterable
from itertools import chain
from operator import getitem
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from diffgraph.guards.composed import ComposedWeights, addresses, has_own_memory
from diffgraph.guards.contents import DEPTH, Contents, Slots, Values, is_alike, is_container, is_flat, tensors_among
from diffgraph.guards.memory import Memory
from diffgraph.guards.objects import classes_of
from diffgraph.guards.reach import (
    HOLDERS,
    HOOK_ATTRIBUTES,
    PEFT,
    REGISTRY,
    is_adapter,
    is_data,
    is_watched,
    modules_within,
    objects_in,
    own_tables,
    readers_in,
    readers_of,
)
from diffgraph.guards.refusals import global_hook_tables
from diffgraph.guards.writes import Writes
from diffgraph.reasons import Reason
from diffgraph.values.tensors import own_attributes

_ONE_IN = 16  # weights is asked whether it wants gradients, which decides how a matrix product is computed; asking all is dear
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
        forward_hooks = [d for m in modules for d in (m._forward_hooks, m._forward_pre_hooks)]
        backward_hooks = [d for m in modules for d in (m._backward_hooks, m._backward_pre_hooks)]
        self._hook_tables = [*forward_hooks, *backward_hooks, *global_hook_tables(trains=True)]
        self._hooks_made = RemovableHandle.next_id
        self._hooks = list(map(len, self._hook_tables))
        self._had_hooks = any(self._hooks)

        absent = [table for table, _ in self._absent]
        sized = [*self._must_be_empty, *self._stateful, *self._sized]
        self._writes = Writes([*self._children.tables, *absent, *self._watched], sized)
        self._written: Any = None  # their count when all was last seen to be as it was, and the very same

    def _note_weights(self, modules: list[torch.nn.Module]) -> None:
        self._children = Values([m._modules for m in modules if m._modules], named=True)
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
        self._memory = Memory([*self._weights(), *self._composed.parts()])
        plain = [(d, name) for d, name in own_memory if _is_plain(d[name])]
        self._attributed = [(d, name) for d, name in plain if d[name].__dict__ and own_attributes(d[name])]
        # What is not torch's or diffusers' own may look for what it had none of.
        lists = (*HOLDERS, torch.nn.Sequential)
        own = [m for m in modules if not type(m).__module__.startswith(("torch.", "diffusers.")) or isinstance(m, lists)]
        self._must_be_empty = [d for m in own for d in own_tables(m) if not d]

    def _note_attributes(self, modules: list[torch.nn.Module], root: torch.nn.Module) -> None:
        readers = list(readers_in(modules, root))
        kinds = {*map(type, modules), *(type(owner) for owner, *_ in readers)}
        classes = list({c: None for kind in kinds for c in classes_of(kind)})
        for c in classes:  # what Python itself puts there when it is first asked: by `copy.deepcopy` of any instance, say
            copyreg._slotnames(c), getattr(c, "__annotations__", None)  # type: ignore[attr-defined]
        self._class_tables = [vars(c) for c in classes]
        self._owners: dict[int, type] = dict(zip(map(id, self._class_tables), classes, strict=True))
        shared = [(table, key) for table in self._class_tables for key, value in table.items() if is_data(key, value)]
        seen = {id(owner) for owner, *_ in readers}
        for weight in (table[name] for table, name in self._attributed):
            names = own_attributes(weight)
            readers.append((weight, tuple(names), False, vars(weight)))
            readers += [r for n in names for owned in objects_in(vars(weight)[n], seen, DEPTH) for r in readers_of(owned)]
        readers += [r for table, key in shared for owned in objects_in(table[key], seen, DEPTH) for r in readers_of(owned)]
        # Written at every call, though nothing that matters changes: these are read, not watched.
        restless = {id(table) for *_, table in readers if not is_watched(table) or table is self._root_table}
        self._whole = Values([table for _, _, whole, table in readers if whole])
        single = [(table, key) for _, keys, whole, table in readers if not whole for key in keys]
        self._single = Slots([(table, key) for table, key in single if id(table) not in restless])
        attributed = self._attributed  # another weight in its place may have others
        self._restless = Slots([*((table, key) for table, key in single if id(table) in restless), *shared, *attributed])
        self._owners |= {id(table): torch.nn.Module for table, _ in attributed}
        self._owners |= {id(table): type(owner) for owner, *_, table in readers}
        named = [*((table, key) for _, keys, _, table in readers for key in keys), *shared]
        restless |= set(map(id, self._class_tables))
        containers = [(t, k) for t, k in named if is_container(t[k])]
        flat = [(t, k) for t, k in containers if is_flat(t[k]) and id(t) not in restless]
        flat_names = {(id(table), key) for table, key in flat}
        self._flat = Contents(flat)
        self._deep = Contents([(t, k) for t, k in containers if (id(t), k) not in flat_names])
        among = {id(t): t for table, key in named for t in tensors_among(table[key], DEPTH)}
        for part in self._composed.parts():  # a layer may hold them too
            among.pop(id(part), None)
        self._tensors = list(among.values())
        self._tensor_addresses = addresses(self._tensors)
        self._tensor_memory = Memory(self._tensors)
        tables = [table for *_, table in readers if id(table) not in restless]
        self._watched = tables + [table[key] for table, key in flat]
        # An attribute more is seen by its table's size, where the table is not read whole.
        whole = set(map(id, self._whole.tables))
        called = [m.__dict__ for m in modules if not isinstance(m, HOLDERS)]
        owned = [t for owner, *_, t in readers if not isinstance(owner, torch.nn.Module) and isinstance(t, dict)]
        self._sized = [t for t in (*called, *owned) if id(t) not in whole and t is not self._root_table]
        self._owners |= {id(m.__dict__): type(m) for m in modules}
        self._sizes = self._read_sizes()

    def _note_classes(self, modules: list[torch.nn.Module], root: torch.nn.Module) -> None:
        self._typed = [m for m in modules if m is not root and not isinstance(m, HOLDERS)]
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
        registry = self._root_table.get(REGISTRY)
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
        if self._tensor_memory.given_back() or addresses(self._tensors) != self._tensor_addresses:
            return Reason.ATTRIBUTES_CHANGED
        if self._read_root() != self._root_then:
            return self._root_change()
        if self._read_types() != self._types or self._read_class_attributes() != self._class_attributes:
            return Reason.ATTRIBUTES_CHANGED
        return None

    def _weights_moved(self) -> bool:
        try:
            moved = self._memory.given_back() or addresses(self._weights()) != self._addresses or self._composed.moved()
            return moved or self._read_sample() != self._ask_for_gradients
        except (KeyError, TypeError, AttributeError, RuntimeError):  # it is gone, or another kind of tensor
            return True

    # -- which kind of change (slow; only once something differs)

    def _tree_change(self) -> Reason:
        now, then = self._children.now(), self._children.then
        different = set(map(id, now)) ^ set(map(id, then))
        if any(is_adapter(m) for m in (*now, *then) if id(m) in different):
            return Reason.ADAPTER_CHANGED
        held = [*self._flat.copies(), *self._deep.copies()]
        changed = any(self._in_peft(table) and not is_alike(table.get(key), copy) for table, key, copy in held)
        return Reason.ADAPTER_CHANGED if changed else Reason.WEIGHTS_CHANGED

    def _in_peft(self, table: Table) -> bool:
        return self._owners[id(table)].__module__.startswith(PEFT)

    def _filled_change(self) -> Reason:
        values = next(d for d in self._must_be_empty if d).values()
        return Reason.ADAPTER_CHANGED if any(map(is_adapter, values)) else Reason.WEIGHTS_CHANGED

    def _attribute_change(self) -> Reason:
        for slots in (self._single, self._restless):
            for table, key, then in zip(slots.tables, slots.keys, slots.then, strict=True):
                if not is_alike(table.get(key), then):
                    return _kind_of_change(self._owners[id(table)], key)
        for table, then in zip(self._whole.tables, self._whole.rows(), strict=True):
            if len(table) != len(then):
                return _kind_of_change(self._owners[id(table)], next((k for k in HOOK_ATTRIBUTES if k in table), ""))
            for (key, now), old in zip(table.items(), then, strict=True):
                if not is_alike(now, old):
                    return _kind_of_change(self._owners[id(table)], key)
        return Reason.ATTRIBUTES_CHANGED

    def _container_change(self, contents: Contents) -> Reason:
        table, key = next((table, key) for table, key, copy in contents.copies() if not is_alike(table[key], copy))
        return _kind_of_change(self._owners[id(table)], key)

    def _root_change(self) -> Reason:
        replaced = any(key in self._root_table for key in HOOK_ATTRIBUTES if key != REGISTRY)
        hooks = replaced or self._read_root()[1] != self._root_then[1]
        return Reason.HOOKS_CHANGED if hooks else Reason.ATTRIBUTES_CHANGED

    def _size_change(self) -> Reason:
        sizes = zip(self._read_sizes(), self._sizes, self._sized, strict=True)
        table = next(table for now, then, table in sizes if now != then)
        return _kind_of_change(self._owners[id(table)], next((key for key in HOOK_ATTRIBUTES if key in table), ""))


def _kind_of_change(owner: type, key: str) -> Reason:
    """Which kind of change it is when attribute `key` of an object of class `owner` has changed, or came or went."""
    if owner.__module__.startswith(PEFT):
        return Reason.ADAPTER_CHANGED
    if issubclass(owner, torch.nn.ParameterDict):
        return Reason.WEIGHTS_CHANGED
    if key == "training":
        return Reason.TRAINING
    if key == "processor":
        return Reason.PROCESSORS_CHANGED
    if owner.__name__.endswith("Processor") or "AttnProcessor" in owner.__name__:
        return Reason.ADAPTER_CHANGED if key == "scale" else Reason.PROCESSORS_CHANGED
    return Reason.HOOKS_CHANGED if key in HOOK_ATTRIBUTES else Reason.ATTRIBUTES_CHANGED


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and tensor.layout == torch.strided
