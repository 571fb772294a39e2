"""Trains until the time is up: a learning rate that follows the clock, a moving average of weights, one graph a step on CUDA."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence

import torch

WARM_UP = 200  # steps
AVERAGED = 0.999


class Average:
    """A moving average of weights, which draws better pictures than the last ones do."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self.live = [p for module in modules for p in module.parameters() if p.requires_grad]
        self.mean = [p.detach().clone() for p in self.live]
        self.share = torch.tensor(1.0, device=self.live[0].device)  # of the live weights in the next average

    def update(self) -> None:
        off = torch._foreach_sub([p.detach() for p in self.live], self.mean)
        torch._foreach_mul_(off, self.share)
        torch._foreach_add_(self.mean, off)

    def swap(self) -> None:
        """The average into the modules, what they had into the average; a second time: back."""
        for live, mean in zip(self.live, self.mean, strict=True):
            held = live.detach().clone()
            live.data.copy_(mean)
            mean.copy_(held)


def train(
    label: str,
    losses: Sequence[Callable[[], torch.Tensor]],
    shares: Iterable[float],
    modules: Sequence[torch.nn.Module],
    *,
    minutes: float,
    rate: float,
    graphs: bool,
    every: float = 15.0,
    save_every: float = math.inf,
    save: Callable[[], None] = lambda: None,
) -> None:
    """Minimises `losses`, drawing one a step by its share. Leaves the average in the modules.

    every, save_every: seconds between two lines, two calls of `save`, which sees the average.
    """
    average = Average(modules)
    device = average.live[0].device
    lr = torch.tensor(0.0, device=device)
    on_cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(average.live, lr=lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True, capturable=on_cuda)
    total = torch.zeros((), device=device)

    def step_of(loss_of: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16, enabled=on_cuda, cache_enabled=False):
                loss = loss_of()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(average.live, 1.0)
            optimizer.step()
            average.update()
            total.add_(loss.detach())

        return recorded(step, optimizer) if graphs and on_cuda else cleared(step, optimizer)

    steps = [step_of(loss) for loss in losses]
    order = torch.Generator().manual_seed(0)
    chances = torch.tensor(list(shares))
    total.zero_()
    start = told = saved = time.perf_counter()
    done = since = 0
    while (part := (time.perf_counter() - start) / (60 * minutes)) < 1:
        lr.fill_(rate * min(1.0, (done + 1) / WARM_UP) * (0.01 + 0.99 * (1 + math.cos(math.pi * part)) / 2))
        average.share.fill_(1 - min(AVERAGED, (done + 1) / (done + 10)))
        steps[int(torch.multinomial(chances, 1, generator=order))]()
        done, since = done + 1, since + 1
        if on_cuda and done % 20 == 0:
            torch.cuda.synchronize()  # else the clock would be that of launches
        now = time.perf_counter()
        if now - told > every:
            print(f"{label}: {now - start:5.0f} s, {done} steps, loss {total.item() / since:.5f}", flush=True)
            total.zero_()
            told, since = now, 0
        if now - saved > save_every:
            average.swap()
            save()
            average.swap()
            saved = time.perf_counter()
    print(f"{label}: done, {done} steps, {1e3 * 60 * minutes / done:.1f} ms each", flush=True)
    average.swap()


def cleared(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def run() -> None:
        optimizer.zero_grad(set_to_none=True)
        step()

    return run


def recorded(step: Callable[[], None], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """The whole step, random numbers and optimizer in it, as one CUDA graph: for a model this small Python is the slow part."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            cleared(step, optimizer)()
    torch.cuda.current_stream().wait_stream(side)
    optimizer.zero_grad(set_to_none=True)  # so that each graph has gradients of its own, which it overwrites
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
