"""MODEL on the command line: a local folder, a hub id, or a family of `pipelines/`, tiny or at its published size."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from diffgraph.cli.errors import UsageError
from diffgraph.shapes.capture_shape import CaptureShape

DTYPES = ("bfloat16", "float16", "float32")


@dataclass
class Model:
    """A pipeline and what is known about it. `families`: the package `pipelines`, if it was built by that."""

    pipe: Any
    name: str
    size: str = "real"
    families: Any = None

    def default_shape(self) -> CaptureShape:
        if self.size == "tiny":
            return CaptureShape(64, 64, num_frames=5 if self.makes_video else None)
        if self.size == "full":
            return CaptureShape.parse(self.families.module(self.name).SHAPES[0])
        return CaptureShape(480, 832, num_frames=17) if self.makes_video else CaptureShape(512, 512)

    @property
    def makes_video(self) -> bool:
        import inspect

        return "num_frames" in inspect.signature(type(self.pipe).__call__).parameters

    def arguments(self, shape: CaptureShape, prompt: str | None = None) -> dict[str, Any]:
        """Keyword arguments of a pipeline call at this shape; random embeddings where the pipeline has no text encoder."""
        from diffgraph.routing.startup import call_arguments

        if self.size == "full" and prompt is not None:
            raise UsageError(f"{self.name} at its published size has random weights and no text encoder: no --prompt is accepted")
        if self.size == "full":
            given = {"prompt_length": shape.prompt_length, "batch": shape.batch, "cfg": shape.guidance}
            frames = {} if shape.num_frames is None else {"num_frames": shape.num_frames}
            return self.families.inputs(self.name, self.pipe, height=shape.height, width=shape.width, **frames, **given)
        if prompt is not None:
            shape = CaptureShape(**{**shape.to_dict(), "inputs": {**shape.inputs, "prompt": prompt}})
        given = call_arguments(self.pipe, shape)
        return {name: value for name, value in given.items() if name not in ("generator", "num_inference_steps", "output_type")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="hub id (owner/name), folder, or a family of pipelines/")
    parser.add_argument("--tiny", action="store_true", help="the family's tiny pipeline: random weights, no download")
    parser.add_argument("--device", help="default: cuda if there is a GPU, else cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16 on a GPU, float32 on a CPU")


def load(options: argparse.Namespace) -> Model:
    """The pipeline, on the device, without progress bars. Raises `UsageError` for a MODEL that is none."""
    with _quiet():
        return _load(options)


def _load(options: argparse.Namespace) -> Model:
    import torch

    name, families = options.model, _families()
    device = _device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" and not options.tiny else "float32"))
    if families is not None and name in families.FAMILIES:
        if device.type == "cpu" and not options.tiny:
            raise UsageError(f"{name} at its published size needs a GPU; here, add --tiny, or give a hub id or a folder")
        if options.tiny:
            model = Model(families.build(name, "tiny").to(device, dtype), name, "tiny", families)
        else:
            model = Model(families.build(name, "full", device=device, dtype=dtype), name, "full", families)
    elif options.tiny:
        raise UsageError(f"--tiny needs one of {_told(families)}; given {name!r}")
    else:
        model = Model(_pretrained(name, families, dtype).to(device), name)
    model.pipe.set_progress_bar_config(disable=True)
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """A command's own words are not to drown in those of the libraries, which give advice when they are imported and when they
    load: errors come through, advice does not."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        import diffusers
        import transformers

        told = [(library, library.get_verbosity()) for library in (diffusers.utils.logging, transformers.logging)]
        try:
            for library, _ in told:
                library.set_verbosity_error()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # `torch_dtype` is `dtype` since diffusers 0.42, for one
                yield
        finally:
            for library, verbosity in told:
                library.set_verbosity(verbosity)
    finally:
        logging.disable(before)


def _device(name: str | None) -> Any:
    import torch

    gpu = torch.cuda.is_available()
    try:
        device = torch.device(name or ("cuda" if gpu else "cpu"))
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cuda", "cpu"):
        raise UsageError(f"--device is {name}; accepted: cpu{', cuda, cuda:0, …' if gpu else ' (this torch sees no GPU)'}")
    if device.type == "cuda" and (not gpu or (device.index or 0) >= torch.cuda.device_count()):
        raise UsageError(f"--device is {name}, and this torch sees {torch.cuda.device_count()} GPUs; accepted here: cpu")
    return device


def _families() -> Any:
    """The package `pipelines`, which lies beside the library in its repository and is not in the wheel."""
    found = importlib.import_module("pipelines") if importlib.util.find_spec("pipelines") is not None else None
    return found if found is not None and hasattr(found, "FAMILIES") else None


def _told(families: Any) -> str:
    if families is None:
        return "the families in pipelines/, which is not installed with the library: run from a clone of the repository"
    return f"the families in pipelines/ ({', '.join(families.FAMILIES)})"


def _pretrained(name: str, families: Any, dtype: Any) -> Any:
    is_folder = os.path.isdir(name)
    if is_folder and not os.path.isfile(os.path.join(name, "model_index.json")):
        raise UsageError(f"{name} holds no model_index.json, so it is no diffusers pipeline's folder")
    if not is_folder and (name.count("/") != 1 or name.startswith((".", "/")) or name.endswith("/")):
        raise UsageError(f"{name!r} is neither a folder here, nor a hub id (owner/name), nor one of {_told(families)}")
    import diffusers

    try:
        return diffusers.DiffusionPipeline.from_pretrained(name, torch_dtype=dtype)  # type: ignore[attr-defined]
    except (OSError, ValueError, TypeError, AttributeError, ImportError) as error:  # no such id, no network, a broken folder
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(f"{name} cannot be loaded: {first}") from None
