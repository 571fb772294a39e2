"""Fine-tune a LoRA, its steps recorded: `python -m pipelines.finetune sd3` (tiny, on a CPU), `--size full` (on a GPU).

Trains twice, eagerly and recorded, from the same start, and compares the loss curves to the bit (`--mode` chooses one). Batches
of two shapes alternate, gradients are accumulated and clipped, the rate follows a schedule.

On several GPUs: `accelerate launch --num_processes 2 -m pipelines.finetune sd3`. Each process records its own steps on its own
batches; gradients are averaged between the last accumulating recording and the optimizer's, where `DistributedDataParallel`
would do it from hooks inside backward, which no recording sees.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import diffgraph
import pipelines

RANK = 16
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
MODES = ("eager", "recorded", "both")

Batch = tuple[torch.Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Flow:
    """How a family's denoiser is asked for the velocity from clean latents to noise, at noise level `sigma` [batch]."""

    timestep: Callable[[torch.Tensor], torch.Tensor]

    def call(self, denoiser: Any, noisy: torch.Tensor, sigma: torch.Tensor, conditions: dict[str, Any]) -> torch.Tensor:
        return denoiser(hidden_states=noisy, timestep=self.timestep(sigma), **conditions)[0]

    def split(self, args: Any, kwargs: dict[str, Any]) -> Batch:
        conditions = {name: value for name, value in kwargs.items() if name not in ("hidden_states", "timestep")}
        return kwargs["hidden_states"], conditions


@dataclass(frozen=True)
class ZImageFlow(Flow):
    """It takes and gives lists, one picture each, counts time the other way, and gives the velocity from noise."""

    def call(self, denoiser: Any, noisy: torch.Tensor, sigma: torch.Tensor, conditions: dict[str, Any]) -> torch.Tensor:
        kwargs = {name: value for name, value in conditions.items() if name != "cap_feats"}
        found = denoiser(list(noisy), self.timestep(sigma), conditions["cap_feats"], **kwargs)[0]
        return -torch.stack(list(found))

    def split(self, args: Any, kwargs: dict[str, Any]) -> Batch:
        pictures, _, prompts = args
        return torch.stack(list(pictures)), {**kwargs, "cap_feats": list(prompts)}


def _thousand(sigma: torch.Tensor) -> torch.Tensor:
    return sigma * 1000


def _itself(sigma: torch.Tensor) -> torch.Tensor:
    return sigma


def _reversed(sigma: torch.Tensor) -> torch.Tensor:
    return 1 - sigma


FLOWS = {
    "sd3": Flow(_thousand),
    "wan": Flow(_thousand),
    "qwen_image": Flow(_itself),
    "flux": Flow(_itself),
    "z_image": ZImageFlow(_reversed),
}


def add_lora(denoiser: Any, rank: int = RANK, seed: int = 0) -> list[torch.nn.Parameter]:
    """A trainable LoRA on the attention projections, as diffusers' example scripts add it; returns its parameters, in float32."""
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    denoiser.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        denoiser.add_adapter(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian", target_modules=list(ATTENTION)))
    cast_training_params([denoiser], dtype=torch.float32)
    return [p for p in denoiser.parameters() if p.requires_grad]


def first_batch(pipe: Any, family: str, shape: str, seed: int = 0) -> Batch:
    """Latents and conditions of the pipeline's own first denoiser call at `shape` (`512x512`, `480x832x1`)."""
    seen: list[Any] = []
    hook = pipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    size = dict(zip(("height", "width", "num_frames"), map(int, shape.split("x")), strict=False))
    given = pipelines.inputs(family, pipe, **size, cfg=False, seed=seed)
    try:
        pipe(**given, num_inference_steps=1, output_type="latent", generator=torch.Generator().manual_seed(seed))
    finally:
        hook.remove()
    return FLOWS[family].split(*seen[0])


def new_optimizer(parameters: Sequence[torch.nn.Parameter], rate: float = 1e-4) -> torch.optim.Optimizer:
    """One whose step and rate can be recorded."""
    on_cuda = parameters[0].is_cuda
    return torch.optim.AdamW(parameters, lr=torch.tensor(rate), fused=True, capturable=on_cuda)


class Trainer:
    """One training step of a LoRA, as a function of the batch: what is recorded, or not."""

    def __init__(self, denoiser: Any, family: str, parameters: Sequence[torch.nn.Parameter], accumulate: int = 1) -> None:
        self.denoiser, self.flow, self.parameters = denoiser, FLOWS[family], list(parameters)
        self.optimizer = new_optimizer(self.parameters)
        self.accumulate = accumulate

    def step(self, latents: torch.Tensor, conditions: dict[str, Any], update: bool = True) -> torch.Tensor:
        """Flow matching: loss and gradients of one batch, and where `update`, the optimizer's step."""
        noise = torch.randn_like(latents)
        sigma = torch.sigmoid(torch.randn(len(latents), device=latents.device))
        mixed = sigma.view(-1, *[1] * (latents.dim() - 1)).to(latents.dtype)
        found = self.flow.call(self.denoiser, torch.lerp(latents, noise, mixed), sigma, conditions)
        loss = torch.nn.functional.mse_loss(found.float(), (noise - latents).float())
        (loss / self.accumulate).backward()
        if update:
            self.update()
        return loss.detach()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    report: Any = None


def train(
    trainer: Trainer, batches: Sequence[Batch], steps: int, *, recorded: bool, seed: int = 0, told: Callable[[str], None] = print
) -> Result:
    """`steps` optimizer steps. Losses are brought to the host at the end, as reading one waits for the GPU."""
    torch.manual_seed(seed)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, steps)
    step: Callable[..., torch.Tensor] = trainer.step
    update: Callable[[], None] = trainer.update
    if recorded:
        options = {"optimizer": trainer.optimizer, "model": trainer.denoiser}
        step, update = diffgraph.record_training_step(step, **options), diffgraph.record_training_step(update, **options)
    parallel = torch.distributed.is_initialized()
    losses, start = [], time.perf_counter()
    for i in range(steps):
        for micro in range(trainer.accumulate):
            latents, conditions = batches[(i * trainer.accumulate + micro) % len(batches)]
            last = micro == trainer.accumulate - 1
            losses.append(step(latents, conditions, update=last and not parallel))
        if parallel:
            average_gradients(trainer.parameters)
            update()
        scheduler.step()
    values = torch.stack(losses).tolist()
    seconds = time.perf_counter() - start
    told(f"{'recorded' if recorded else 'eager':>8}: {steps} steps in {seconds:.1f} s, loss {values[0]:.4f} -> {values[-1]:.4f}")
    return Result(values, seconds, diffgraph.report(step) if recorded else None)  # type: ignore[arg-type]


@torch.no_grad()
def average_gradients(parameters: Sequence[torch.nn.Parameter]) -> None:
    gradients = [p.grad for p in parameters if p.grad is not None]
    together = torch.cat([g.flatten() for g in gradients])
    torch.distributed.all_reduce(together)
    parts = (together / torch.distributed.get_world_size()).split([g.numel() for g in gradients])
    torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])


def start_over(trainer: Trainer, weights: Sequence[torch.Tensor]) -> Trainer:
    """The same LoRA as it was at first, and a new optimizer."""
    with torch.no_grad():
        for parameter, weight in zip(trainer.parameters, weights, strict=True):
            parameter.copy_(weight)
            parameter.grad = None
    # `denoiser` stays: peft's layers, and diffusers' caches, are not made anew
    family = next(name for name, flow in FLOWS.items() if flow is trainer.flow)
    return Trainer(trainer.denoiser, family, trainer.parameters, trainer.accumulate)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", choices=list(FLOWS))
    parser.add_argument("--size", default="tiny", help="tiny, full (random weights), a hub id or a folder")
    parser.add_argument("--shapes", nargs="+", help="default: 64x64 64x96 for tiny, the family's smallest otherwise")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--accumulate", type=int, default=2, help="batches a step")
    parser.add_argument("--rank", type=int, default=RANK)
    parser.add_argument("--mode", choices=MODES, default="both")
    parser.add_argument("--deterministic", action="store_true", help="kernels that add in a fixed order: curves equal to the bit")
    parser.add_argument("--save", metavar="FOLDER", help="where to write the LoRA")
    options = parser.parse_args(argv)
    rank, device = _processes()
    try:
        for shape in options.shapes or ():
            diffgraph.CaptureShape.parse(shape)
    except diffgraph.ShapeError as error:
        parser.error(str(error))
    for name in ("steps", "accumulate", "rank"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; accepted: 1 or more")
    if options.size == "full" and device == "cpu":
        parser.error("--size full needs a GPU; accepted here: tiny, a hub id or a folder")
    if options.deterministic:
        torch.use_deterministic_algorithms(True)

    try:
        pipe = pipelines.build(options.family, options.size, **({"device": device} if options.size == "full" else {}))
    except (OSError, ValueError) as error:  # no such id or folder
        parser.error(f"--size {options.size} cannot be loaded: {str(error).partition(chr(10))[0]}")
    pipe = pipe if options.size == "full" else pipe.to(device)
    pipe.set_progress_bar_config(disable=True)
    tiny = ["64x64x1", "64x96x1"] if options.family == "wan" else ["64x64", "64x96"]
    shapes = options.shapes or (tiny if options.size == "tiny" else pipelines.module(options.family).SHAPES[:1])
    batches = [first_batch(pipe, options.family, shape, seed=rank) for shape in shapes]
    parameters = add_lora(pipe.transformer, options.rank)
    weights = [p.detach().clone() for p in parameters]
    trainer = Trainer(pipe.transformer.train(), options.family, parameters, options.accumulate)

    results = []
    for mode in ("eager", "recorded") if options.mode == "both" else (options.mode,):
        trainer = start_over(trainer, weights)
        told = print if rank == 0 else (lambda _: None)
        if mode == "recorded" and device == "cpu":
            told("recorded on the CPU device, which is for tests: the same losses, and no gain")
        results.append(train(trainer, batches, options.steps, recorded=mode == "recorded", seed=rank, told=told))
        if results[-1].report is not None:
            told(str(results[-1].report))
    if options.save and rank == 0:
        pipe.transformer.save_lora_adapter(options.save)
    if len(results) == 2:
        same = results[0].losses == results[1].losses
        if rank == 0:
            print("same loss curve, to the bit" if same else "the loss curves differ")
        return 0 if same or (not options.deterministic and device != "cpu") else 1
    return 0


def _processes() -> tuple[int, str]:
    """This process' number and device, under `accelerate launch` or alone."""
    import os

    gpu = torch.cuda.is_available()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    if gpu:
        torch.cuda.set_device(local)
    if world > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if gpu else "gloo")
    return rank, f"cuda:{local}" if gpu else "cpu"


if __name__ == "__main__":
    raise SystemExit(main())
