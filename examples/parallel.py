"""One picture by several GPUs together: `torchrun --nproc-per-node 2 -m examples.parallel "a red cat"`"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, DiffusionPipeline

import diffgraph

MODEL = os.environ.get("MODEL", "black-forest-labs/FLUX.1-dev")


def load() -> Any:
    return DiffusionPipeline.from_pretrained(MODEL, torch_dtype=torch.bfloat16).to("cuda")


def create(load: Callable[[], Any] = load, shapes: Sequence[str] = ("1024x1024",)) -> Any:
    """The same on every rank: first diffusers' parallelism, then ours."""
    pipe = load()
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=dist.get_world_size()))
    return diffgraph.accelerate_pipeline(pipe, capture_shapes=list(shapes))


def main(prompt: str = "a red cat") -> None:
    if "LOCAL_RANK" not in os.environ:
        sys.exit("start this with torchrun: torchrun --nproc-per-node 2 -m examples.parallel 'a red cat'")
    if torch.cuda.device_count() <= int(os.environ["LOCAL_RANK"]):
        sys.exit(f"each process needs a GPU: {os.environ['LOCAL_WORLD_SIZE']} processes, {torch.cuda.device_count()} GPUs")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    pipe = create()
    noise = torch.Generator().manual_seed(0)  # the same on every rank
    image = pipe(prompt, height=1024, width=1024, num_inference_steps=28, generator=noise).images[0]
    if dist.get_rank() == 0:
        image.save("picture.png")
        print(diffgraph.report(pipe))
    diffgraph.restore_pipeline(pipe)  # NCCL waits for graphs that hold its collectives
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
