"""What may happen to an accelerated pipeline, each a small function; `ACTS` says how often and when.

An act changes something, or calls in a certain way, and every call is compared with eager. A change lasts until another act
undoes it or the subject is made anew, so that changes meet each other as they do in a long-lived server.
"""

from __future__ import annotations

import copy
import functools
import gc
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from diffusers import FirstBlockCacheConfig
from diffusers.hooks import HookRegistry, apply_group_offloading
from peft import LoraConfig

import diffgraph
from benchmarks._soak import faults
from benchmarks._soak.subject import DTYPES, Subject
from benchmarks._soak.tally import Outcome, Tally, no_grad
from diffgraph.errors import CaptureWarning
from diffgraph.values.tree import map_leaves


class World(NamedTuple):
    subjects: list[Subject]
    threads: int
    tally: Tally


# -- calls


def loop(world: World, s: Subject, rng: random.Random) -> None:
    s.loop(rng)


def many_shapes(world: World, s: Subject, rng: random.Random) -> None:
    for _ in range(4):
        s.loop(rng, 4)


def picture(world: World, s: Subject, rng: random.Random) -> None:
    s.picture(rng)


def on_a_stream(world: World, s: Subject, rng: random.Random) -> None:
    with _stream(s.device):
        s.loop(rng)


def in_turn_with_eager(world: World, s: Subject, rng: random.Random) -> None:
    with torch.no_grad():
        for call in s.calls(rng, 4):
            s.judge([Outcome.of(call)], s.wanted([call]), "in turn")


def deepcopied(world: World, s: Subject, rng: random.Random) -> None:
    """A copy is plain eager, so it is an oracle that knows nothing of pausing."""
    plain = copy.deepcopy(s.module)
    calls = s.calls(rng, 3)
    with torch.no_grad():
        found = [Outcome.of(call) for call in calls]
        wanted = [Outcome.of(functools.partial(plain, *call.args, **call.keywords)) for call in calls]  # type: ignore[attr-defined]
    s.judge(found, wanted, "beside a copy")


# -- threads: state stays as it is meanwhile. Offloading changes it at each call (`module.to` sets every `.data` anew, which
#    another thread reads), so that plain eager in several threads gives wrong results too: there is nothing to compare with.


def threads_on_one_pipe(world: World, s: Subject, rng: random.Random) -> None:
    _at_once([(s, s.calls(rng, 5)) for _ in range(world.threads)])


def threads_on_several_pipes(world: World, s: Subject, rng: random.Random) -> None:
    _at_once([(other, other.calls(rng, 5)) for other in world.subjects if _stays(other)])


def threads_and_a_meddler(world: World, s: Subject, rng: random.Random) -> None:
    """Another thread pauses, reports, forgets and re-installs meanwhile."""
    kinds = ("pause", "report", "capture", "restore")
    todo = [rng.choice(kinds) for _ in range(6)]

    def meddle() -> None:
        for kind in todo:
            if kind == "pause":
                with diffgraph.paused(s.pipe):
                    gc.collect()
            elif kind == "report":
                str(diffgraph.report(s.pipe))
            elif kind == "capture":
                diffgraph.capture(s.pipe)
            else:
                s.restore()
                diffgraph.accelerate_pipeline(s.pipe, **s.options)

    _at_once([(s, s.calls(rng, 6)) for _ in range(world.threads - 1)], meddle)


def beside_other_work(world: World, s: Subject, rng: random.Random) -> None:
    """Another thread collects garbage, allocates and computes meanwhile."""
    stop, layer = threading.Event(), torch.nn.Linear(32, 32).to(s.device)

    def work() -> None:
        while not stop.is_set():
            x = torch.randn(64, 32, device=s.device)
            for _ in range(20):
                x = layer(x)
            if s.device == "cuda":
                event = torch.cuda.Event()
                event.record()
                event.query()
            gc.collect(0)

    def calls() -> None:
        try:
            for _ in range(3):
                s.loop(rng, 4)
        finally:
            stop.set()

    _together([calls, no_grad(work)])


# -- LoRA


def lora_added(world: World, s: Subject, rng: random.Random) -> None:
    targets = sorted(rng.sample(("to_q", "to_k", "to_v"), rng.randint(1, 3)))
    torch.manual_seed(rng.randrange(10**6))
    s.adapters_made += 1
    name = f"lora{s.adapters_made}"
    config = LoraConfig(r=rng.choice((2, 4)), lora_alpha=4, target_modules=targets, init_lora_weights=False)
    s.module.add_adapter(config, name)
    s.adapters.append(name)
    s.loop(rng)


def lora_scaled(world: World, s: Subject, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 12))):
        chosen = rng.sample(s.adapters, rng.randint(1, len(s.adapters)))
        s.module.set_adapters(chosen, [rng.choice((0.3, 0.5, 0.9)) for _ in chosen])
        s.loop(rng, 2)
    s.loop(rng, 4)


def lora_disabled(world: World, s: Subject, rng: random.Random) -> None:
    s.module.disable_adapters()
    s.loop(rng)
    s.module.enable_adapters()
    s.loop(rng)


def lora_deleted(world: World, s: Subject, rng: random.Random) -> None:
    name = rng.choice(s.adapters)
    s.adapters.remove(name)
    if s.adapters:
        s.module.delete_adapters(name)
        s.module.set_adapters(s.adapters[:1], [0.7])
    else:
        s.module.unload_lora()
    s.loop(rng)


def lora_fused(world: World, s: Subject, rng: random.Random) -> None:
    s.module.fuse_lora(lora_scale=0.5)
    s.loop(rng, 4)
    s.module.unfuse_lora()
    s.loop(rng, 4)


# -- weights


def weight_written(world: World, s: Subject, rng: random.Random) -> None:
    with torch.no_grad():
        _a_weight(s, rng)[1].mul_(rng.choice((0.8, 1.25)))
    s.loop(rng)


def weight_replaced(world: World, s: Subject, rng: random.Random) -> None:
    layer, weight = _a_weight(s, rng)
    other = weight.detach() * rng.choice((0.8, 1.25))
    if rng.random() < 0.5:
        layer.weight = torch.nn.Parameter(other, requires_grad=weight.requires_grad)
    else:
        layer.weight.data = other
    s.loop(rng)


def weights_loaded(world: World, s: Subject, rng: random.Random) -> None:
    factor = rng.choice((0.8, 1.25))
    state = {name: t * factor if "to_q" in name else t.clone() for name, t in s.module.state_dict().items()}
    s.module.load_state_dict(state, assign=rng.random() < 0.5)
    s.loop(rng)


def dtype_changed(world: World, s: Subject, rng: random.Random) -> None:
    s.dtype = rng.choice(DTYPES)
    s.module.to(s.dtype)
    s.loop(rng)


def moved_and_back(world: World, s: Subject, rng: random.Random) -> None:
    away = {"device": "cpu"} if s.device == "cuda" else {"dtype": torch.float64}
    s.module.to(**away)
    if s.device == "cuda":
        gc.collect()
    s.module.to(device=s.device, dtype=s.dtype)
    s.loop(rng)


# -- structure


def processors_set(world: World, s: Subject, rng: random.Random) -> None:
    for module in s.module.modules():
        if getattr(module, "processor", None) is not None and rng.random() < 0.5:
            module.processor = _scaled(module.processor, rng.choice((0.5, 0.9, 1.1)))
    s.loop(rng)


def processor_scaled(world: World, s: Subject, rng: random.Random) -> None:
    for module in s.module.modules():
        if hasattr(getattr(module, "processor", None), "soak_scale"):
            module.processor.soak_scale[0] = rng.choice((0.4, 0.8, 1.2))
    s.loop(rng)


def hook_added(world: World, s: Subject, rng: random.Random) -> None:
    layers = [m for m in s.module.modules() if isinstance(m, torch.nn.Linear)]
    target = rng.choice((s.module, *layers))
    if rng.random() < 0.5:
        s.hooks.append(target.register_forward_hook(_doubled_output))
    else:
        s.hooks.append(target.register_forward_pre_hook(lambda *_: None))
    s.loop(rng)


def hook_removed(world: World, s: Subject, rng: random.Random) -> None:
    s.hooks.pop(rng.randrange(len(s.hooks))).remove()
    s.loop(rng)


def train_and_eval(world: World, s: Subject, rng: random.Random) -> None:
    s.module.train()
    s.loop(rng)
    s.module.eval()
    s.loop(rng)


def attribute_changed(world: World, s: Subject, rng: random.Random) -> None:
    """A plain attribute that the forward of every attention reads, or a patched forward."""
    layers = [m for m in s.module.modules() if isinstance(m, torch.nn.Linear)]
    layer = rng.choice(layers)
    forward = layer.forward
    layer.forward = lambda x, *args, **kwargs: forward(x, *args, **kwargs) * 1.5
    s.loop(rng)
    del layer.forward
    s.loop(rng)


def step_cache(world: World, s: Subject, rng: random.Random) -> None:
    """The cache remembers calls, so the oracle is a copy that is called as often."""
    plain = copy.deepcopy(s.module)
    calls = s.calls(rng, 5)
    for module in (s.module, plain):
        module.enable_cache(FirstBlockCacheConfig(threshold=0.2))
    with torch.no_grad(), s.module.cache_context("cond"), plain.cache_context("cond"):
        found = [Outcome.of(call) for call in calls]
        wanted = [Outcome.of(functools.partial(plain, *call.args, **call.keywords)) for call in calls]  # type: ignore[attr-defined]
    s.judge(found, wanted, "with a step cache")
    s.module.disable_cache()
    s.loop(rng)


# -- offload


def model_offload(world: World, s: Subject, rng: random.Random) -> None:
    s.pipe.enable_model_cpu_offload(device=s.device)

    def end() -> None:
        s.pipe.remove_all_hooks()
        s.pipe.to(s.device)

    s.moved = end
    s.picture(rng)
    s.loop(rng)


def sequential_offload(world: World, s: Subject, rng: random.Random) -> None:
    """Of the denoiser alone, by accelerate's own function: undone at once, as the pipeline would not find its device."""
    cpu_offload(s.module, execution_device=torch.device(s.device))
    s.loop(rng)
    remove_hook_from_module(s.module, recurse=True)
    s.module.to(s.device)
    s.loop(rng)


def group_offload(world: World, s: Subject, rng: random.Random) -> None:
    apply_group_offloading(
        s.module, onload_device=torch.device(s.device), offload_device=torch.device("cpu"), offload_type="leaf_level"
    )

    def end() -> None:
        for name in ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"):
            _remove_hooks(s.module, name)
        s.module.to(s.device)

    s.moved = end
    s.loop(rng)


def layerwise_casting(world: World, s: Subject, rng: random.Random) -> None:
    """diffusers knows no way back, so the denoiser is made anew."""
    s.module.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=s.dtype)
    s.loop(rng)
    renewed(world, s, rng)


def offload_ended(world: World, s: Subject, rng: random.Random) -> None:
    assert s.moved is not None
    s.moved()
    s.moved = None
    s.loop(rng)


# -- ours


def captured_again(world: World, s: Subject, rng: random.Random) -> None:
    if rng.random() < 0.5:
        diffgraph.capture(s.pipe)
    else:
        diffgraph.capture(s.pipe, _capture_shapes(s, rng))
    s.loop(rng)


def paused(world: World, s: Subject, rng: random.Random) -> None:
    """The oracle pauses as well: here what comes after it counts."""
    with diffgraph.paused(s.pipe):
        s.loop(rng, 2)
    s.loop(rng, 4)


def restored_and_accelerated(world: World, s: Subject, rng: random.Random) -> None:
    s.restore()
    s.accelerate(rng)
    s.loop(rng)


def accelerated_at_start_up(world: World, s: Subject, rng: random.Random) -> None:
    shapes = _capture_shapes(s, rng)
    s.restore()
    s.accelerate(rng, capture_shapes=shapes, capture=rng.choice(("auto", "on_demand")))
    s.picture(rng)
    s.loop(rng)


def renewed(world: World, s: Subject, rng: random.Random) -> None:
    s.restore()
    s.begin(rng)
    s.loop(rng)


def shared_denoiser(world: World, s: Subject, rng: random.Random) -> None:
    other = type(s.pipe)(**s.pipe.components)
    diffgraph.accelerate_pipeline(other, **_full_options(s))
    s.loop(rng)
    diffgraph.restore_pipeline(other)
    s.loop(rng)


# -- faults


def fault(world: World, s: Subject, rng: random.Random, kinds: type[BaseException] | tuple[type[BaseException], ...]) -> None:
    """One error, at a random place of a random call of a loop; the calls before and after it must be right too."""
    places = faults.places(s.device)
    place = rng.choice([p for p in places if any(isinstance(e, kinds) for e in faults.errors(p))])
    error = rng.choice([e for e in faults.errors(place) if isinstance(e, kinds)])
    made = faults.Fault(error, nth=rng.choice((1, 1, 2, 3, 6)), ours=places[place][2])
    before, calls = rng.randrange(4), s.calls(rng, 7)
    pool = diffgraph.routing.installed.runners(s.pipe)[0][1].memory.pool(torch.ones(0, device=s.device).device)
    mode = torch.no_grad if rng.random() < 0.8 else torch.inference_mode
    with mode():
        found = [Outcome.of(call) for call in calls[:before]]
        with faults.injected(s.device, place, made, pool):
            found += [Outcome.of(call) for call in calls[before : before + 2]]
        found += [Outcome.of(call) for call in calls[before + 2 :]]
        wanted = s.wanted(calls)
    for i, outcome in enumerate(found):
        if outcome.error is error and made.may_surface:
            found[i] = wanted[i]
    if made.where is not None:
        world.tally.faults[f"{type(error).__name__} {made.where}"] += 1
    s.judge(found, wanted, f"{error} at {place}, {made.where}")


def out_of_memory(world: World, s: Subject, rng: random.Random) -> None:
    fault(world, s, rng, torch.OutOfMemoryError)


def exception(world: World, s: Subject, rng: random.Random) -> None:
    fault(world, s, rng, RuntimeError if rng.random() < 0.7 else faults.Interrupted)


# -- the table

_NOT_RECORDED = "asked for at start-up and not recorded"  # there are hooks, say, or another thread's recording took its place


class Act(NamedTuple):
    run: Callable[[World, Subject, random.Random], None]
    weight: int
    when: Callable[[Subject], bool] = lambda s: True
    warns: str | None = None  # a `CaptureWarning` that says this is an answer to it

    @property
    def name(self) -> str:
        return self.run.__name__


def _stays(s: Subject) -> bool:
    return s.moved is None


def _is_plain(s: Subject) -> bool:
    return _stays(s) and not s.adapters


def _takes_lora(s: Subject) -> bool:
    return _stays(s) and hasattr(s.module, "add_adapter") and len(s.adapters) < 3


def _has_lora(s: Subject) -> bool:
    return _stays(s) and bool(s.adapters)


ACTS = (
    Act(loop, 12),
    Act(many_shapes, 6),
    Act(picture, 5),
    Act(on_a_stream, 2),
    Act(in_turn_with_eager, 3),
    Act(deepcopied, 2, _is_plain),
    Act(threads_on_one_pipe, 5, _stays),
    Act(threads_on_several_pipes, 2, _stays),
    Act(threads_and_a_meddler, 2, _stays, _NOT_RECORDED),
    Act(beside_other_work, 1),
    Act(lora_added, 4, _takes_lora),
    Act(lora_scaled, 4, _has_lora),
    Act(lora_disabled, 2, _has_lora),
    Act(lora_deleted, 3, _has_lora),
    Act(lora_fused, 2, _has_lora),
    Act(weight_written, 2, _stays),
    Act(weight_replaced, 2, _stays),
    Act(weights_loaded, 2, _stays),
    Act(dtype_changed, 2, _is_plain),
    Act(moved_and_back, 2, _is_plain),
    Act(processors_set, 2),
    Act(processor_scaled, 2, lambda s: any(hasattr(getattr(m, "processor", None), "soak_scale") for m in s.module.modules())),
    Act(hook_added, 1, _stays),
    Act(hook_removed, 12, lambda s: bool(s.hooks)),
    Act(train_and_eval, 1),
    Act(attribute_changed, 2, _stays),
    Act(step_cache, 1, lambda s: _is_plain(s) and hasattr(s.module, "enable_cache") and not s.hooks),
    Act(model_offload, 1, _is_plain),
    Act(sequential_offload, 1, lambda s: _is_plain(s) and not s.hooks),
    Act(group_offload, 1, lambda s: _is_plain(s) and not s.hooks),
    Act(layerwise_casting, 1, lambda s: _is_plain(s) and not s.hooks),
    Act(offload_ended, 20, lambda s: not _stays(s)),
    Act(captured_again, 4, warns=_NOT_RECORDED),
    Act(paused, 2),
    Act(restored_and_accelerated, 3),
    Act(accelerated_at_start_up, 2, warns=_NOT_RECORDED),
    Act(renewed, 2, _stays),
    Act(shared_denoiser, 2),
    Act(out_of_memory, 6, warns="runs eager"),
    Act(exception, 5, warns="runs eager"),
)


def is_unforeseen(act: Act, warning: Any) -> bool:
    return issubclass(warning.category, CaptureWarning) and (act.warns is None or act.warns not in str(warning.message))


# -- parts


def _at_once(work: list[tuple[Subject, list[Callable[[], Any]]]], meddler: Callable[[], None] | None = None) -> None:
    """Each list of calls in a thread of its own, and on a stream of its own where there are streams."""
    with torch.no_grad():
        wanted = [s.wanted(calls) for s, calls in work]
    _synchronize(work[0][0].device)

    def run(s: Subject, calls: list[Callable[[], Any]]) -> list[Outcome]:
        with _stream(s.device):
            return [Outcome.of(call) for call in calls]

    jobs = [no_grad(functools.partial(run, s, calls)) for s, calls in work]
    found = _together([*jobs, meddler] if meddler is not None else jobs)
    for (s, _), ours, eager in zip(work, found, wanted, strict=False):
        s.judge(ours, eager, "thread")


def _together(jobs: list[Callable[[], Any]]) -> list[Any]:
    """All at once; results in order, errors raised."""
    barrier = threading.Barrier(len(jobs))

    def start(job: Callable[[], Any]) -> Any:
        barrier.wait(timeout=60)
        return job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(timeout=300) for future in [pool.submit(start, job) for job in jobs]]


@contextmanager
def _stream(device: str) -> Iterator[None]:
    stream = torch.cuda.stream(torch.cuda.Stream()) if device == "cuda" else nullcontext()
    _synchronize(device)
    with stream:
        try:
            yield
        finally:
            _synchronize(device, whole=False)


def _synchronize(device: str, whole: bool = True) -> None:
    if device == "cuda":
        # A whole device's synchronisation would invalidate a capture that another thread has open.
        torch.cuda.current_stream().synchronize()


def _a_weight(s: Subject, rng: random.Random) -> tuple[Any, torch.Tensor]:
    layers = [m for n, m in s.module.named_modules() if isinstance(m, torch.nn.Linear) and "lora" not in n]
    layer = rng.choice(layers)
    return layer, layer.weight


def _doubled_output(_module: Any, _args: Any, output: Any) -> Any:
    return map_leaves(lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf, output)


@functools.cache
def _scaled_kind(kind: type) -> type:
    """A processor's class with a scale in a list, as an IP-adapter's has."""

    @functools.wraps(kind.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        scale = self.soak_scale[0]
        output = kind.__call__(self, *args, **kwargs)
        return map_leaves(lambda leaf: leaf * scale if isinstance(leaf, torch.Tensor) else leaf, output)

    return type(f"Scaled{kind.__name__}", (kind,), {"__call__": call})


def _scaled(processor: Any, scale: float) -> Any:
    kind = type(processor) if hasattr(processor, "soak_scale") else _scaled_kind(type(processor))
    made = kind()
    made.soak_scale = [scale]
    return made


def _remove_hooks(module: torch.nn.Module, name: str) -> None:
    for part in module.modules():
        if hasattr(part, "_diffusers_hook") and part._diffusers_hook.get_hook(name) is not None:
            HookRegistry.check_if_exists_or_initialize(part).remove_hook(name, recurse=False)


def _capture_shapes(s: Subject, rng: random.Random) -> list[diffgraph.CaptureShape] | None:
    """`None` where the pipeline itself refuses to draw (PixArt's after a cast): then diffgraph must refuse as well."""
    given = s.picture_inputs(rng)
    (wanted,) = s.wanted([functools.partial(s.pipe, **given, num_inference_steps=2, output_type="latent")])
    if wanted.error is not None:
        return None
    size = {name: given.pop(name) for name in ("height", "width", "num_frames") if name in given}
    return [diffgraph.CaptureShape(**size, inputs=given)]


def _full_options(s: Subject) -> dict[str, Any]:
    """The same options again; what start-up has added is in the runner's own."""
    return {**s.options, "capture": diffgraph.routing.installed.runners(s.pipe)[0][1].options.capture}
