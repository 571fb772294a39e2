"""One accelerated tiny pipeline, what is done to it, and the oracle: the same call while it is paused."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

import diffgraph
import pipelines
from benchmarks._calls import DenoiserCall, inputs
from benchmarks._soak.tally import Outcome, Tally
from diffgraph.families import rule_of
from diffgraph.routing.components import denoisers
from diffgraph.values.tensors import map_tensors

FAMILIES = ("qwen_image", "flux", "sdxl", "pixart", "wan")
SHAPES = ("32x32", "32x48", "64x32")
VARYING_PROMPTS = ("qwen_image", "flux")  # lengths that a user of the others meets are one
LIMITS = {"cpu": (2**20, 3 * 2**20), "cuda": (4 * 2**20, 2**24)}  # bytes; CUDA's allocator takes 2 MiB at a time
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
#: Ambient modes of a call; no recording is relied on beyond the one that it was made in.
MODES: dict[str, Callable[[str], AbstractContextManager[Any]]] = {
    "no_grad": lambda _: torch.no_grad(),
    "inference_mode": lambda _: torch.inference_mode(),
    "autocast": lambda device: _autocast(device),
    "grad": lambda _: torch.enable_grad(),
}


class Subject:
    """A pipeline whose denoiser is its own and whose other components are the family's."""

    def __init__(self, family: str, device: str, tally: Tally, rng: random.Random, backend: str = "breakable") -> None:
        self.family, self.device, self.tally, self.backend = family, device, tally, backend
        self.begin(rng)

    def begin(self, rng: random.Random) -> None:
        """With a denoiser that nothing was done to."""
        pristine = _pristine(self.family, self.device)
        self.name = next(iter(denoisers(pristine)))
        parts = {**pristine.components, self.name: copy.deepcopy(getattr(pristine, self.name))}
        self.pipe = type(pristine)(**parts)
        self.pipe.set_progress_bar_config(disable=True)
        self.dtype = torch.float32
        self.adapters: list[str] = []
        self.fused = False
        self.hooks: list[Any] = []
        self.moved: Callable[[], None] | None = None  # how to end the offloading or casting that is on
        self.adapters_made = 0
        self.accelerate(rng)

    @property
    def module(self) -> Any:
        return getattr(self.pipe, self.name)

    def accelerate(self, rng: random.Random, **options: Any) -> None:
        limit = rng.choice((None, None, None, *LIMITS[self.device]))
        chosen: dict[str, Any] = {"max_graphs": rng.choice((1, 2, 2, 3, 8)), "memory_limit": limit}
        if self.device == "cpu":
            chosen["poison"] = rng.random() < 0.5
        if rule_of(self.module) is not None:
            chosen["prompt_buckets"] = rng.choice(("auto", None))
        self.options = {**chosen, "backend": self.backend, "verify": rng.random() < 0.8}
        diffgraph.accelerate_pipeline(self.pipe, **self.options, **options)

    @property
    def pads_prompts(self) -> bool:
        """Then matrix products of another shape may round otherwise than eager's."""
        return self.options.get("prompt_buckets") is not None

    def accelerate_if_not(self, rng: random.Random) -> None:
        """After an act that broke off between the two."""
        if "_compiled_call_impl" not in vars(self.module):
            self.accelerate(rng)

    def restore(self) -> None:
        before = set(vars(self.module))
        self.tally.absorb(self.pipe)
        diffgraph.restore_pipeline(self.pipe)
        if before - set(vars(self.module)) != {"_compiled_call_impl"} or traces(self.module):
            self.tally.note_unforeseen(f"{self.family}: restoring left {traces(self.module)}")

    def clear_caches(self) -> None:
        """diffusers' `lru_cache`s on methods, which keep every module alive that ever called them."""
        methods = [value for kind in {type(m) for m in self.module.modules()} for value in vars(kind).values()]
        inner = [cell.cell_contents for m in methods for cell in getattr(m, "__closure__", None) or ()]
        for cached in [c for c in (*methods, *inner) if hasattr(c, "cache_clear")]:
            cached.cache_clear()

    # -- calls

    def calls(self, rng: random.Random, times: int) -> list[Callable[[], Any]]:
        """As many calls of the denoiser at one shape, each with inputs of its own."""
        variant = rng.choice(variants(self.family, self.device))
        spaced = rng.random() < 0.1
        return [self._call(variant, rng.randrange(10**6), spaced) for _ in range(times)]

    def _call(self, variant: DenoiserCall, seed: int, spaced: bool) -> Callable[[], Any]:
        made = variant.with_new_inputs(seed)
        args, kwargs = map_tensors(lambda t: self._as_wanted(t, spaced), (made.args, made.kwargs))
        return functools.partial(self.module, *args, **kwargs)

    def _as_wanted(self, tensor: torch.Tensor, spaced: bool) -> torch.Tensor:
        if tensor.is_floating_point():
            tensor = tensor.to(self.dtype)
        if spaced and tensor.dim() > 2:
            tensor = torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]
        return tensor

    def loop(self, rng: random.Random, times: int | None = None) -> None:
        """As a denoising loop calls. All outputs are kept, then compared: a later call must not overwrite an earlier one's."""
        calls = self.calls(rng, times or rng.choice((2, 3, 4, 6, 10)))
        mode = rng.choice(("no_grad",) * 7 + tuple(MODES))
        with MODES[mode](self.device):
            found = [Outcome.of(call) for call in calls]
            wanted = self.wanted(calls)
        self.judge(found, wanted, f"{mode} loop")

    def wanted(self, calls: Sequence[Callable[[], Any]]) -> list[Outcome]:
        with diffgraph.paused(self.pipe):
            return [Outcome.of(call) for call in calls]

    def judge(self, found: Sequence[Outcome], wanted: Sequence[Outcome], what: str) -> None:
        for i, (ours, eager) in enumerate(zip(found, wanted, strict=True)):
            self.tally.judge(ours, eager, f"{self.family} {what} {i + 1}/{len(found)}", rounds=self.pads_prompts)

    def picture(self, rng: random.Random) -> None:
        """A whole pipeline call: its scheduler, its cache contexts and its hooks."""
        given = self.picture_inputs(rng)
        steps = rng.choice((2, 3, 4))

        def draw() -> Any:
            generator = torch.Generator().manual_seed(0)
            return self.pipe(**given, generator=generator, num_inference_steps=steps, output_type="latent")[0]

        found = Outcome.of(draw)
        self.judge([found], self.wanted([draw]), "picture")

    def picture_inputs(self, rng: random.Random) -> dict[str, Any]:
        shape = _shape(self.family, rng.choice(SHAPES))
        given = inputs(self.pipe, self.family, shape, **_prompt(self.family, rng.choice((4, 9))))
        given.pop("generator")
        return given

    # -- what must hold at any time

    def check_limits(self) -> None:
        report = diffgraph.report(self.pipe)
        recorded = sum(s.captured for s in report.signatures)
        if recorded > self.options["max_graphs"]:
            self.tally.note_unforeseen(f"{self.family}: {recorded} recordings, max_graphs is {self.options['max_graphs']}")
        limit = self.options["memory_limit"]
        if limit is not None and report.memory_bytes > limit:
            self.tally.note_unforeseen(f"{self.family}: {report.memory_bytes} bytes, the limit is {limit}")


def traces(module: torch.nn.Module) -> list[str]:
    """Attributes of `module` and its submodules that are ours."""
    owned = ((name, key, value) for name, m in module.named_modules() for key, value in vars(m).items())
    return [f"{name}.{key}" for name, key, value in owned if type(value).__module__.startswith("diffgraph")]


@functools.cache
def _pristine(family: str, device: str) -> Any:
    pipe = pipelines.build(family).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@functools.cache
def variants(family: str, device: str) -> list[DenoiserCall]:
    """Calls of several shapes, prompt lengths and batches, as the pipeline makes them. Without the module: it is the family's."""
    pipe = _pristine(family, device)
    options = [{"cfg": False}, {"cfg": False, "batch": 2}, {"cfg": True}]
    found = [DenoiserCall.of(pipe, family, _shape(family, shape), **_prompt(family, 7), **options[0]) for shape in SHAPES]
    found += [DenoiserCall.of(pipe, family, _shape(family, SHAPES[0]), **_prompt(family, 7), **o) for o in options[1:]]
    if family in VARYING_PROMPTS:
        found.append(DenoiserCall.of(pipe, family, _shape(family, SHAPES[0]), **_prompt(family, 12), **options[0]))
    if family == "wan":
        found.append(DenoiserCall.of(pipe, family, f"{SHAPES[0]}x5", **_prompt(family, 7), **options[0]))
    return found


def _shape(family: str, size: str) -> str:
    return f"{size}x1" if family == "wan" else size


def _prompt(family: str, length: int) -> dict[str, int]:
    return {"prompt_length": length if family in VARYING_PROMPTS else 8}


@contextmanager
def _autocast(device: str) -> Iterator[None]:
    with torch.no_grad(), torch.autocast(device, torch.bfloat16):
        yield
