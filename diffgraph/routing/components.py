"""Which modules of a pipeline may be accelerated, and under which names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from diffgraph.errors import NoDenoiserError, OptionError, OptionTypeError

#: The names under which diffusers' pipelines keep the module that they call at each step.
DENOISERS = ("transformer", "transformer_2", "unet")
#: A VAE is called by its methods `encode` and `decode`, which call these.
_PARTS = ("encoder", "decoder")
_COMPILED = "_orig_mod"  # where `torch.compile(module)` keeps the module

Modules = dict[str, torch.nn.Module]


def chosen(pipe: Any, components: Any) -> Modules:
    """The modules that `components` names, by their names.

    Raises `OptionTypeError`, `OptionError` for a name that is none of the pipeline's modules, `NoDenoiserError`.
    """
    if isinstance(pipe, torch.nn.Module):
        return {type(pipe).__name__: pipe}
    if pipe is None or isinstance(pipe, (str, os.PathLike)):
        raise NoDenoiserError(
            f"{type(pipe).__name__} has no denoiser: given {pipe!r}; accepted: a pipeline, such as "
            "DiffusionPipeline.from_pretrained(...) returns"
        )
    known = _known(pipe)
    names = DENOISERS if components == "denoiser" else (components,) if isinstance(components, str) else components
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise OptionTypeError(f"components is {components!r}; accepted: 'denoiser' or a tuple of {_told(known)}")
    found: Modules = {}
    for name in names:
        if name in known:
            found |= _parts(name, known[name])
        elif components != "denoiser" and (name not in DENOISERS or getattr(pipe, name, None) is not None):
            raise OptionError(f"component {name!r} is no module of this {type(pipe).__name__}; accepted: {_told(known)}")
    if not found:
        raise NoDenoiserError(
            f"{type(pipe).__name__} has no denoiser; looked for {', '.join(names)}; accepted: {_told(known)}. For a "
            "module that your own loop calls, use accelerate_module"
        )
    return found


def denoisers(pipe: Any) -> Modules:
    """Those that the pipeline has, by their names."""
    known = _known(pipe)
    return {name: known[name] for name in DENOISERS if name in known}


def candidates(pipe: Any) -> Modules:
    """All modules that may have been accelerated, by their names."""
    if isinstance(pipe, torch.nn.Module):
        return {type(pipe).__name__: pipe}
    return {part: module for name, whole in _known(pipe).items() for part, module in _parts(name, whole).items()}


def with_compiled(modules: Modules) -> Iterator[tuple[str, torch.nn.Module]]:
    """Each module, and the one inside where it is `torch.compile(module)`."""
    for name, module in modules.items():
        yield name, module
        inner = module.__dict__["_modules"].get(_COMPILED)
        if inner is not None:
            yield name, inner


def _told(known: Modules) -> str:
    return ", ".join(known) or "none, as this pipeline holds no torch module"


def _known(pipe: Any) -> Modules:
    attributes = getattr(pipe, "__dict__", {})
    return {name: value for name, value in attributes.items() if isinstance(value, torch.nn.Module)}


def _parts(name: str, module: torch.nn.Module) -> Modules:
    if not (hasattr(module, "decode") and hasattr(module, "decoder")):
        return {name: module}
    parts = {part: module.__dict__["_modules"].get(part) for part in _PARTS}
    return {f"{name}.{part}": found for part, found in parts.items() if found is not None}
