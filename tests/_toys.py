"""What the tests of guards, threads and ownership share: a call that is compared with eager, and a denoiser with its inputs."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch

import diffgraph
import pipelines
from diffgraph.values.compare import same_bits

SETTLED = ["unseen_signature", "capture", "replay", "replay"]


class Net(torch.nn.Module):
    """One layer and one attention: two segments around a break."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x, scale=1.0):
        return torch.nn.functional.scaled_dot_product_attention(*[self.layer(x)] * 3) * scale


def accelerated(module, **options):
    """Poison is on: what reads a dead intermediate gives NaN."""
    return diffgraph.accelerate_module(module.eval(), **{"poison": True, **options})


def route_of(module, call: Callable):
    """The result of `call()`, and what `report` says happened: "replay", "capture", or the reason for eager."""
    before = diffgraph.report(module)
    result = call()
    after = diffgraph.report(module)
    routes = ["replay"] * (after.replays - before.replays) + ["capture"] * (after.captures - before.captures)
    for reason, count in after.reasons.items():
        routes += [reason] * (count - before.reasons.get(reason, 0))
    assert len(routes) == 1, f"one call was counted as {routes}"
    return result, routes[0]


def call(module, *args, **kwargs):
    """Call, compare with eager to the bit, and say the route."""
    torch.manual_seed(0)
    with torch.no_grad():
        found, route = route_of(module, lambda: module(*args, **kwargs))
        torch.manual_seed(0)
        with diffgraph.paused(module):
            wanted = module(*args, **kwargs)
    assert same_bits(found, wanted), f"{route}: not what eager gives"
    return route


def calls(module, times, *args, **kwargs):
    return [call(module, *args, **kwargs) for _ in range(times)]


def settle(module, *args, **kwargs):
    """Until it replays."""
    assert calls(module, 4, *args, **kwargs) == SETTLED


def eager(module, *args, **kwargs):
    with torch.no_grad(), diffgraph.paused(module):
        return module(*args, **kwargs)


@functools.cache
def _flux():
    pipe = pipelines.build("flux", "tiny")
    pipe.set_progress_bar_config(disable=True)
    t = pipe.transformer  # one block of each kind is enough here
    t.transformer_blocks, t.single_transformer_blocks = t.transformer_blocks[:1], t.single_transformer_blocks[:1]
    t.eval()
    t.register_to_config(num_layers=1, num_single_layers=1)
    seen = []
    hook = pipe.transformer.register_forward_pre_hook(lambda _, *args: seen.append(args), with_kwargs=True)
    pipe("a red cat", height=32, width=32, num_inference_steps=1, output_type="latent")
    hook.remove()
    (args, kwargs) = seen[0]
    assert not args
    return pipe, kwargs


def flux_pipe():
    """A tiny Flux of one's own."""
    return copy.deepcopy(_flux()[0])


def flux():
    """A tiny Flux denoiser of one's own, and the keyword arguments of one call."""
    return copy.deepcopy(_flux()[0].transformer), dict(_flux()[1])


def some_slow(names, *slow):
    """Parameters, of which those are for `make test-slow`."""
    return [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]
