"""What several rooms ask of tensors: which there are, whose memory they see, what they are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from types import CellType, FunctionType, ModuleType
from typing import Any

import torch

from diffgraph.values.tree import flatten, unflatten


def tensors_in(obj: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(obj)[0] if isinstance(leaf, torch.Tensor)]


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], obj: Any) -> Any:
    """`obj` with `fn` applied to its tensors; one that stands there twice stays one tensor."""
    leaves, spec = flatten(obj)
    made = {id(leaf): fn(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves}
    return unflatten(spec, [made[id(leaf)] for leaf in leaves])


def weights_device(module: torch.nn.Module) -> torch.device:
    """Where the first parameter, or buffer, lies; the CPU where there is none."""
    tensor = next(chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def tensors_within(obj: Any, depth: int = 6) -> Iterator[torch.Tensor]:
    """Tensors that an object keeps alive, as far as its attributes, containers and closures lead: a block mask's, say."""
    if isinstance(obj, torch.Tensor):
        yield obj
    elif depth > 0 and not isinstance(obj, (type, torch.nn.Module, ModuleType)):
        inner: Iterable[Any] = ()
        if isinstance(obj, dict):
            inner = obj.values()
        elif isinstance(obj, (list, tuple)):
            inner = obj
        elif isinstance(obj, FunctionType):
            inner = [cell.cell_contents for cell in obj.__closure__ or () if cell != CellType()]
        elif hasattr(obj, "__dict__"):
            inner = vars(obj).values()
        for item in inner:
            yield from tensors_within(item, depth - 1)


def storage_of(tensor: torch.Tensor) -> int:
    """Identity of a tensor's memory; of the tensor itself where it has none of its own (sparse, subclass)."""
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def is_made_of_others(kind: type) -> bool:
    """Whether tensors of this class hold others: quantised weights, say."""
    return hasattr(kind, "__tensor_flatten__")


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a tensor subclass (a quantised weight, say) is made of; a plain tensor is its own."""
    if is_made_of_others(type(tensor)):
        names = tensor.__tensor_flatten__()[0]  # type: ignore[operator, attr-defined]
        return [plain for name in names for plain in plain_parts(getattr(tensor, name))]
    return [tensor]


def has_plain_memory(tensor: torch.Tensor) -> bool:
    plain_type = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return plain_type and tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The values as bytes, in which NaN equals itself and 0.0 is not -0.0."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # A single element counts as contiguous whatever its stride, and `view` does not agree.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8)


def once(tensor: torch.Tensor) -> torch.Tensor:
    """Without the repetition of an expanded tensor, whose memory could not be written otherwise."""
    for d, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(d, 0, 1)
    return tensor


def same_tensor_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one device have the same shape, dtype and bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b))


#: What PyTorch, compilers and loaders note on a tensor, and no forward reads.
_MARKS = ("_dynamo_", "_has_dynamo_", "_specialize_on", "_is_hf_initialized", "_is_buffer", "persistent")


def is_mark(name: str) -> bool:
    return name.startswith(_MARKS)


def own_attributes(tensor: Any) -> list[str]:
    """The names of a tensor's Python attributes, but for such marks."""
    return [name for name in tensor.__dict__ if not is_mark(name)]


def describe(tensor: torch.Tensor) -> str:
    """What is special about a tensor that has no plain memory, in words."""
    lazy = tensor.layout == torch.strided and (tensor.is_conj() or tensor.is_neg())
    return "view that is conjugated or negated lazily" if lazy else f"{type(tensor).__name__} of {tensor.layout}"
