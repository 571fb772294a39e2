"""What the tests of fine-tuning share: a model in training, and the same training eager and recorded, compared at each step."""

import copy

import _toys
import pytest
import torch

import diffgraph
import pipelines
from diffgraph.values.compare import same_bits
from diffgraph.values.tensors import map_tensors
from pipelines import finetune

SETTLED = ["unseen_signature", "unseen_signature", "capture", "replay", "replay"]


class Net(torch.nn.Module):
    """Dropout: random numbers belong to a step."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, x):
        return self.second(self.dropout(torch.nn.functional.gelu(self.first(x))))


class Loop:
    """A model in training, with all that a step of it changes."""

    device = "cpu"

    def __init__(self):
        torch.manual_seed(0)
        self.net = Net().train().to(self.device)
        on_cuda = self.device == "cuda"
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=torch.tensor(1e-2), fused=True, capturable=on_cuda)

    def step(self, x, update=True):
        loss = (self.net(x + 0.1 * torch.randn_like(x)) - x).square().mean()
        loss.backward()
        if update:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"loss": loss}

    def everything(self):
        parameters = list(self.net.parameters())
        states = [dict(self.optimizer.state[p]) for p in parameters if p in self.optimizer.state]
        gradients, rates = [p.grad for p in parameters], [group["lr"] for group in self.optimizer.param_groups]
        return map_tensors(lambda t: t.detach().clone(), (parameters, gradients, states, rates, generators()))


def recorded(loop, step_fn=None, **options):
    """Poison is on: what reads a dead intermediate gives NaN."""
    poison = {"poison": True} if loop.device == "cpu" else {}
    given = {"optimizer": loop.optimizer, "model": loop.net, **poison, **options}
    return diffgraph.record_training_step(step_fn or loop.step, **given)


def batch(i=0, rows=4):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(i))


def generators():
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


def set_generators(states):
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state)


def route_of(step, *args, **kwargs):
    return _toys.route_of(step, lambda: step(*args, **kwargs))


class Twins:
    """The same training, eager and recorded: after each step all must be the same."""

    def __init__(self, make=Loop, **options):
        self.eager, self.recorded = make(), make()
        self.step = recorded(self.recorded, **options)
        self.rng = generators()

    def both(self, change):
        for loop in (self.eager, self.recorded):
            change(loop)

    def __call__(self, *args, **kwargs):
        args = map_tensors(lambda t: t.to(self.eager.device), args)
        set_generators(self.rng)
        wanted = self.eager.step(*args, **kwargs)
        wanted_state = self.eager.everything()
        set_generators(self.rng)
        found, route = route_of(self.step, *args, **kwargs)
        self.rng = generators()
        assert same_bits(found, wanted), route
        assert same_bits(self.recorded.everything(), wanted_state), route
        return route

    def times(self, count, *args, **kwargs):
        return [self(*args, **kwargs) for _ in range(count)]

    def settle(self):
        assert self.times(5, batch()) == SETTLED


@pytest.fixture(scope="module")
def sd3():
    pipe = pipelines.build("sd3", "tiny")
    pipe.set_progress_bar_config(disable=True)
    batches = [finetune.first_batch(pipe, "sd3", shape) for shape in ("32x32", "32x48")]
    return pipe, batches


class LoraLoop(finetune.Trainer):
    """Of the tiny SD3: attention, embeddings, norms, as in life."""

    device = "cpu"

    def __init__(self, pipe):
        net = copy.deepcopy(pipe.transformer).to(self.device)
        net.transformer_blocks = net.transformer_blocks[::2]  # the one with two attentions, and the last, which differs
        super().__init__(net.train(), "sd3", finetune.add_lora(net, rank=4), accumulate=2)
        self.net = self.denoiser
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)

    def everything(self):
        states = [list(self.optimizer.state[p].values()) for p in self.parameters if p in self.optimizer.state]
        gradients = [p.grad for p in self.parameters]
        return map_tensors(lambda t: t.detach().clone(), (self.parameters, gradients, states, generators()))


class Checkpointed(Loop):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.net.dropout.p = dropout

    def step(self, x):
        loss = (torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False) - x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def trained(make, loop_fn, steps=8):
    """Everything after training eagerly, the same recorded, and the report."""
    results = []
    for is_recorded in (False, True):
        loop = make()
        if is_recorded:
            poison = {"poison": True} if loop.device == "cpu" else {}
            diffgraph.accelerate_module(loop.net, training=True, **poison)
        torch.manual_seed(3)
        outputs = [loop_fn(loop, i) for i in range(steps)]
        results.append((outputs, loop.everything()))
    return *results, diffgraph.report(loop.net)


def step(loop, i):
    return loop.step(batch(i).to(loop.device))["loss"].detach()


def delayed(loop, i):
    """Three forwards, then their backwards, the last first."""
    losses = [(loop.net(batch(3 * i + j).to(loop.device)) - 1).square().mean() for j in range(3)]
    for loss in reversed(losses):
        loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return torch.stack(losses).detach()


def accumulated(loop, i):
    return loop.step(batch(i).to(loop.device), update=i % 4 == 3)["loss"].detach()
