"""A signature field by field, in words, and how two of them differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from diffgraph.recording.signature import CONTIGUOUS, MODE, Signature
from diffgraph.values.tree import LEAF, key_of

_ABSENT = "not given"


class Difference(NamedTuple):
    """One field of a signature: what was recorded, and what this call gives."""

    field: str
    recorded: str
    given: str


def nearest(signature: Signature, others: Iterable[Signature], names: Sequence[str]) -> tuple[Signature, list[Difference]] | None:
    """The signature with the fewest differences, and those; `None` where there is no other."""
    found = [(other, differences(other, signature, names)) for other in others]
    return min(found, key=lambda pair: len(pair[1]), default=None)


def differences(recorded: Signature, given: Signature, names: Sequence[str]) -> list[Difference]:
    """`names`: of positional arguments."""
    then, now = fields(recorded, names), fields(given, names)
    found = [Difference(f, then.get(f, _ABSENT), now.get(f, _ABSENT)) for f in {**then, **now} if then.get(f) != now.get(f)]
    if not found and recorded != given:
        return [Difference("arguments", "given in one way", "given in another: by position or keyword, or in other containers")]
    return found


def fields(signature: Signature, names: Sequence[str] = ()) -> dict[str, str]:
    """Each argument, with nested ones as `name[key]`, and each global mode, as text that differs where the signature does."""
    _, _, (positional, keywords) = signature.spec  # type: ignore[misc]
    paths: list[str] = []
    for i, child in enumerate(positional[2]):
        _walk(names[i] if i < len(names) else f"args[{i}]", child, paths)
    for name, child in zip(keywords[1], keywords[2], strict=True):
        _walk(name, child, paths)
    arguments = {path: _leaf(leaf, path, paths) for path, leaf in zip(paths, signature.leaves, strict=True)}
    return {**arguments, **{name: str(value) for name, value in zip(MODE, signature.mode, strict=True)}}


def _walk(name: str, spec: Any, paths: list[str]) -> None:
    if spec == LEAF:
        paths.append(name)
        return
    _, keys, children = spec
    for i, child in enumerate(children):
        _walk(f"{name}[{key_of(keys[i]) if i < len(keys) else i}]", child, paths)


def _leaf(leaf: tuple[Any, ...], path: str, paths: list[str]) -> str:
    kind = leaf[0]
    if kind is torch.Tensor:
        _, shape, layout, dtype, first, wants_gradients, is_parameter = leaf
        text = f"[{'x'.join(map(str, shape)) or 'scalar'}] {str(dtype).removeprefix('torch.')}"
        text += "" if layout == CONTIGUOUS else f", layout {layout}"
        text += ", wants gradients" if wants_gradients else ""
        text += ", a Parameter" if is_parameter else ""
        return text if paths[first] == path else f"{text}, the same tensor as {paths[first]}"
    if kind is float:
        return repr(float.fromhex(leaf[1]))
    return " ".join(map(repr, leaf[1:]))
