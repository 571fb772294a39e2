"""The capture signature: what must be equal for a recorded forward to be valid, as far as the call itself shows it."""

from __future__ import annotations

import hashlib
import sys
from typing import Any, NamedTuple

import torch

from diffgraph.prompts.buckets import Prompt, PromptBuckets
from diffgraph.reasons import Reason, Refused
from diffgraph.values.ambient import attention_kernels, attention_order
from diffgraph.values.constants import is_constant
from diffgraph.values.tensors import own_attributes
from diffgraph.values.tree import LEAF, Spec, TooManyLeaves, flatten

#: A call with more leaves is not worth a signature: it would cost more than the graph saves.
MAX_LEAVES = 2048

_NUMBERS = (int, float)


class Signature(NamedTuple):
    spec: Spec
    leaves: tuple[Any, ...]
    mode: tuple[Any, ...]
    lane: int = 0  # which of the forwards that wait for their backwards at the same time; 0 where none is to come

    def without_numbers(self) -> Signature:
        """The same with every number taken out: signatures that then are equal differ in host values alone."""
        leaves = tuple((leaf[0],) if leaf[0] in _NUMBERS else leaf for leaf in self.leaves)
        return self._replace(leaves=leaves)

    def key(self) -> str:
        """The same in every process."""
        return hashlib.sha1(repr(self).encode()).hexdigest()

    def label(self, names: tuple[str, ...] = ()) -> str:
        """For people: each tensor by its argument's name and shape, and the plain arguments. `names`: of positional arguments."""
        parts, leaves = [], iter(self.leaves)
        (_, _, (positional, keywords)) = self.spec  # type: ignore[misc]
        for i, child in enumerate(positional[2]):
            parts += _describe(names[i] if i < len(names) else f"args[{i}]", child, leaves)
        for name, child in zip(keywords[1], keywords[2], strict=True):
            parts += _describe(name, child, leaves)
        return " ".join(parts)


class Call(NamedTuple):
    """One call, flattened."""

    leaves: list[Any]
    spec: Spec
    signature: Signature
    prompt: Prompt | None = None  # where its prompts are padded up to a bucket

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, prompt: Prompt | None = None) -> Call:
        """Raises `Refused` for what cannot be part of a signature, or does not lie on `device`."""
        try:
            leaves, spec = flatten((args, kwargs), MAX_LEAVES, objects=True)
        except (TooManyLeaves, RecursionError):  # a list that holds itself, say
            raise Refused(Reason.UNSUPPORTED_INPUT, f"more than {MAX_LEAVES} values in the arguments") from None
        first: dict[int, int] = {}
        described = tuple([describe_leaf(i, leaf, device, first) for i, leaf in enumerate(leaves)])
        return cls(leaves, spec, Signature(spec, described, _mode(device)), prompt)

    @classmethod
    def padded(cls, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, prompts: PromptBuckets | None) -> Call:
        """The call as it is recorded: its prompts padded, where they share recordings. Raises as `of` does."""
        padded = None if prompts is None else prompts.padded(args, kwargs)
        return cls.of(args, kwargs, device) if padded is None else cls.of(padded.args, padded.kwargs, device, padded.prompt)


def describe_leaf(i: int, leaf: Any, device: torch.device, first: dict[int, int]) -> tuple[Any, ...]:
    if isinstance(leaf, torch.Tensor):
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout != torch.strided:
            raise Refused(Reason.UNSUPPORTED_INPUT, f"a {type(leaf).__name__} of layout {leaf.layout}")
        if leaf.device != device:
            reason = Reason.CPU_INPUT if leaf.device.type == "cpu" else Reason.MULTI_DEVICE
            raise Refused(reason, f"an input lies on {leaf.device}, the denoiser on {device}")
        strides = layout(leaf)
        if strides is not CONTIGUOUS and _overlaps(leaf):
            raise Refused(Reason.UNSUPPORTED_INPUT, "a tensor whose elements overlap in memory")
        if leaf.__dict__ and (names := own_attributes(leaf)):
            raise Refused(Reason.UNSUPPORTED_INPUT, f"a tensor with attributes of its own: {', '.join(names)}")
        is_parameter = type(leaf) is torch.nn.Parameter
        # `matmul` takes another path, with other bits, for one that wants gradients.
        return torch.Tensor, leaf.shape, strides, leaf.dtype, first.setdefault(id(leaf), i), leaf.requires_grad, is_parameter
    kind = type(leaf)
    if not is_constant(leaf):
        raise Refused(Reason.UNSUPPORTED_INPUT, f"a {kind.__module__}.{kind.__qualname__}, whose state cannot be compared")
    if isinstance(leaf, float):
        return kind, leaf.hex()  # 0.0 and -0.0 differ, nan equals itself
    if isinstance(leaf, complex):
        return kind, leaf.real.hex(), leaf.imag.hex()
    return kind, leaf


CONTIGUOUS = "contiguous"


def layout(tensor: torch.Tensor) -> str | tuple[int, ...]:
    """How an input lies in memory, as it decides which kernels run (`linear` fuses its bias for a contiguous input alone, which
    rounds once and not twice): `CONTIGUOUS`, or the strides, which a static input then has as well.

    An expanded vector is like a contiguous one: pipelines give `timestep.expand(batch)` and a whole one in turn, and what is done
    to a vector is done element by element.
    """
    if tensor.is_contiguous() or (tensor.stride() == (0,)):
        return CONTIGUOUS
    return tensor.stride()


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory otherwise than by repetition along a dimension: such a tensor could not be written."""
    end = 0
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and s != 0):
        if stride <= end:
            return True
        end += stride * (size - 1)
    return False


#: What `_mode` holds, in its order.
MODE = (
    "autocast",
    "default dtype",
    "float32 precision",
    "deterministic algorithms",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "bf16 reduced-precision reduction",
    "fp16 reduced-precision reduction",
    "fp16 accumulation",
    "BLAS",
    "order of attention kernels",
    "attention kernels",
    "attention backend",
    "fast path of MultiheadAttention",
)


def _mode(device: torch.device) -> tuple[Any, ...]:
    """Global state that decides which kernels a forward launches."""
    kind = device.type
    return (
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
        torch.get_default_dtype(),
        _float32_precision(),
        torch.get_deterministic_debug_mode(),
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.deterministic,
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        _allow_fp16_accumulation(),
        torch._C._get_blas_preferred_backend(),
        attention_order(device),
        attention_kernels(),
        _attention_backend(),
        torch.backends.mha.get_fastpath_enabled(),
    )


_allow_fp16_accumulation = getattr(torch._C, "_get_cublas_allow_fp16_accumulation", bool)  # since torch 2.7


def _float32_precision() -> tuple[Any, ...]:
    backends = torch.backends
    try:
        return torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    except RuntimeError:  # set by the switches of torch 2.9, which these do not know
        matmuls = backends.cuda.matmul, backends.mkldnn.matmul  # type: ignore[attr-defined]
        others = backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.conv  # type: ignore[attr-defined]
        return tuple(part.fp32_precision for part in (*matmuls, *others))


def _attention_backend() -> Any:
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    return dispatch._AttentionBackendRegistry._active_backend if dispatch is not None else None


def _describe(name: str, spec: Any, leaves: Any) -> list[str]:
    if spec != LEAF:
        return [text for i, child in enumerate(spec[2]) for text in _describe(f"{name}[{i}]", child, leaves)]
    leaf = next(leaves)
    if leaf[0] is torch.Tensor:
        return [f"{name}=[{'x'.join(map(str, leaf[1])) or 'scalar'}]"]
    if leaf[0] is float:
        return [f"{name}={float.fromhex(leaf[1]):g}"]
    return [f"{name}={leaf[1]}"] if leaf[0] in (int, str) and "[" not in name else []
