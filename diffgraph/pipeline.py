"""The door: finds a pipeline's denoisers, installs runners and removes them without a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from diffgraph.engine import breaks as break_points
from diffgraph.errors import (
    AlreadyAcceleratedError,
    OptionError,
    OptionTypeError,
)
from diffgraph.finetuning.module import GradientRunner
from diffgraph.finetuning.step import TrainingStep, refuse_step
from diffgraph.options import Options, checked
from diffgraph.reports.report import Report
from diffgraph.routing import components as components_of
from diffgraph.routing import installed
from diffgraph.routing.runner import Runner
from diffgraph.routing.startup import capture_shapes as capture_at_startup
from diffgraph.shapes.capture_shape import load_shapes

P = TypeVar("P")
M = TypeVar("M", bound=torch.nn.Module)


def accelerate_pipeline(
    pipe: P,
    capture_shapes: Any = None,
    *,
    backend: str = "breakable",
    capture: str = "auto",
    compile_blocks: bool | Mapping[str, Any] = False,
    prompt_buckets: Any = "auto",
    breaks: str | Sequence[str] = "auto",
    components: str | Sequence[str] = "denoiser",
    max_graphs: int | None = None,
    memory_limit: int | float | str | None = None,
    verify: bool = True,
    poison: bool = False,
    collectives: str = "record",
    **unknown: Any,
) -> P:
    """Record the denoiser's forward of a diffusers pipeline and replay it over the steps. In place; returns `pipe`.

    The pictures stay the same to the bit; where `prompt_buckets` pads a prompt, but for rounding. What has not been seen, or can
    no longer be trusted, runs eager; `report` says why.

    Args:
        pipe: any diffusers pipeline with a `transformer`, `transformer_2` or `unet`.
        capture_shapes: shapes to record now: text (`"512x512"`, `"480x832x81@prompt=128,cfg=off,batch=2"`, height first),
            `CaptureShape`, dict, (height, width), a list of these, or the path of a .json or .yaml file.
        backend: `"breakable"`: CUDA graph segments with attention eager between them; `"full"`: one graph, no breaks; `"eager"`:
            for debugging, nothing is recorded.
        capture: `"startup"`: only `capture_shapes` (and `diffgraph.capture`); `"on_demand"`: each signature's first call runs
            eager, its second is recorded, the rest replay; `"auto"`: start-up if shapes are given.
        breaks: `"attention"`, or names of submodules ("blocks.0.attn") and functions ("package.module.function") to run eager.
            `"auto"`: attention; where several GPUs compute it together (`enable_parallelism`), only attention with a mask or
            by a backend that is not PyTorch's own.
        components: `"denoiser"`, or names of the pipeline's modules, as in `("transformer", "text_encoder", "vae")`: of a VAE,
            encoder and decoder.
        prompt_buckets: `"auto"`: where a rule in `families` allows it, prompts share the recording of the next bucket of
            rows (up to 4,096), exactly; a list of lengths instead; `None`: each length is recorded for itself.
        max_graphs: recorded signatures a device, the least recently used going first; default 32, or as many as the capture
            shapes ask for.
        memory_limit: of graph memory a device: bytes, text (`"4GiB"`) or a fraction of the device's memory.
        verify: compare each signature's first replay with eager before it is trusted (costs one eager forward): to the bit, or,
            where blocks are compiled or a prompt is padded, within a relative difference of 0.044 in bf16, 0.016 in float16,
            1.7e-4 in float32, 0.18 where torchao rounds activations to 8 bits, and then to the bit with the same forward
            unrecorded.
        poison: (CPU) fill dead intermediates with NaN before each replay, to find faults of lifetime.
        collectives: where several GPUs compute the denoiser together, `"record"` what they exchange, or `"break"` at it.
        compile_blocks: have `torch.compile` fuse what lies between the breaks of the model's repeated blocks before it is
            recorded; or a dict of its `backend`, `mode`, `options`, `dynamic`. Compiled code rounds otherwise: replays are close
            to eager (see `verify`), not equal to the bit. What runs eager runs uncompiled.

    Raises:
        OptionError, OptionTypeError: an option is wrong. NoDenoiserError: nothing to accelerate.
        AlreadyAcceleratedError: call `restore_pipeline` first. ShapeError: a shape is malformed or refused by the pipeline.
        All are `DiffgraphError`, and leave the pipeline as it was.

    Example:
        >>> pipe = diffgraph.accelerate_pipeline(pipe, capture_shapes=["512x512", "1024x1024"])
        >>> image = pipe("a red cat", height=512, width=512).images[0]
        >>> print(diffgraph.report(pipe))
    """
    modules = components_of.chosen(pipe, components)
    if capture_shapes is not None and isinstance(pipe, torch.nn.Module):
        raise OptionTypeError("capture_shapes need a pipeline to run through; a module is recorded by calling it")
    shapes = load_shapes(capture_shapes) if capture_shapes is not None else []
    training = unknown.pop("training", False) if isinstance(pipe, torch.nn.Module) else False  # see `accelerate_module`
    options = checked(
        backend=backend,
        capture=capture,
        has_shapes=bool(shapes),
        compile_blocks=compile_blocks,
        prompt_buckets=prompt_buckets,
        breaks=breaks,
        max_graphs=max_graphs,
        memory_limit=memory_limit,
        verify=verify,
        poison=poison,
        collectives=collectives,
        training=training,
        unknown=unknown,
    )
    if any(installed.serves(module, pipe) for module in modules.values()):
        raise AlreadyAcceleratedError(f"this {type(pipe).__name__} is accelerated already; call restore_pipeline first")
    _check_shared(modules, options)
    try:
        runners = installed.install(pipe, modules, options)
        if options.training:
            for runner in runners:
                runner.training = runner.training or GradientRunner(runner.name, runner.positional, options, runner.memory)
        if shapes:
            capture_at_startup(pipe, runners, shapes)
    except BaseException:
        for module, runner in installed.found(pipe):
            installed.disown(pipe, module, runner)
        raise
    return pipe


def accelerate_module(module: M, *, training: bool = False, **options: Any) -> M:
    """As `accelerate_pipeline`, for a denoiser that is called by a loop of one's own. In place; returns `module`.

    Takes the same options, but no `capture_shapes` and no `components`: there is no pipeline to run shapes through.

    Args:
        training: record calls under gradients as well: the forward, and the backward that autograd will run, in a training loop
            that is not ours (`record_training_step` gains more). Parameters get their gradients from autograd as ever, so
            optimizers, accumulation, DDP and its `no_sync` work as they are; DDP's exchange no longer overlaps with backward.
            Up to eight forwards may wait for their backwards; each backward runs once. Neither `backend`, `capture`, `breaks`,
            `collectives` nor `compile_blocks` can be chosen with it, and prompts are padded without gradients alone.
    """
    if not isinstance(module, torch.nn.Module):
        raise OptionTypeError(f"{type(module).__name__} is no torch.nn.Module; for a pipeline, use accelerate_pipeline")
    for name in ("capture_shapes", "components"):
        if name in options:
            raise OptionTypeError(f"accelerate_module takes no {name}: there is no pipeline to run; call the module instead")
    return accelerate_pipeline(module, training=training, **options)


def restore_pipeline(pipe: P) -> P:
    """Undo `accelerate_pipeline` or `accelerate_module`: nothing of ours is left on any object. Returns `pipe`.

    A denoiser that several accelerated pipelines share is restored with the last of them. Raises `NotAcceleratedError`.
    """
    pushed_out = installed.pushed_out(pipe)
    for module, runner in installed.found(pipe) if pushed_out else _runners(pipe):
        installed.disown(pipe, module, runner)
    for module in pushed_out:
        installed.forget(pipe, module)
    return pipe


def capture(pipe: Any, shapes: Any = None) -> None:
    """Record more shapes, or all of them anew, say after a change of weights.

    `shapes` is what `capture_shapes` of `accelerate_pipeline` may be; what they record replaces what was recorded for the same
    signature. Without it, everything is forgotten, refusals too: the shapes given so far are recorded again, and signatures that
    were recorded on demand are so at their next calls. Raises `ShapeError` and `NotAcceleratedError`.
    """
    runners = [runner for _, runner in _runners(pipe)]
    if shapes is not None and isinstance(pipe, torch.nn.Module):
        raise OptionTypeError("shapes need a pipeline to run through; a module is recorded by calling it")
    wanted = load_shapes(shapes) if shapes is not None else runners[0].shapes
    if any(runner.pause.is_on for runner in runners):
        raise OptionError("nothing can be recorded inside `diffgraph.paused`; call `capture` outside of it")
    for runner in runners:
        runner.forgive()
        if shapes is None:
            runner.release()
    if wanted:
        capture_at_startup(pipe, runners, wanted)


@contextmanager
def paused(pipe: Any) -> Iterator[None]:
    """Eager inside the `with`, in all threads; recordings stay. Also for one module of an accelerated pipeline.

    Raises `NotAcceleratedError`.
    """
    with ExitStack() as stack:
        for recorded in [pipe] if isinstance(pipe, TrainingStep) else [runner for _, runner in installed.looked_at(pipe)]:
            stack.enter_context(recorded.pause.held())
        yield


def report(pipe: Any) -> Report:
    """What happened so far on this pipeline, this module (also one of a pipeline), or this training step.

    Raises `NotAcceleratedError`.
    """
    if isinstance(pipe, TrainingStep):
        return Report.of([pipe])
    found, pushed_out = installed.found(pipe), installed.pushed_out(pipe)
    if not pushed_out:
        found = installed.looked_at(pipe)  # or say that there are none
    called = components_of.candidates(pipe)
    around = [m for m, _ in found if not any(m is candidate for candidate in called.values())]  # by `torch.compile(module)`
    names = {id(module): name for name, module in components_of.with_compiled(called)}
    runners = [runner for _, runner in found]
    training = [runner.training for runner in runners if runner.training is not None]
    return Report.of([*runners, *training], [names[id(module)] for module in (*around, *pushed_out)])


def _check_shared(modules: dict[str, torch.nn.Module], options: Options) -> None:
    for name, module in modules.items():
        break_points.check(module, options.breaks)
        runner = installed.runner_of(module)
        if options.compile_blocks is not None and runner is None and module.__dict__.get("_compiled_call_impl") is not None:
            raise OptionError(f"the {name} is compiled already; accepted with it: compile_blocks=False")
        if runner is not None and runner.options != options:
            raise OptionError(
                f"the {name} is shared with a pipeline that was accelerated with other options: {runner.options}; "
                f"accepted: the same, given {options}"
            )


def _runners(pipe: Any) -> list[tuple[torch.nn.Module, Runner]]:
    refuse_step(pipe)
    return installed.runners(pipe)
