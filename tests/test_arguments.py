"""All that a forward can tell of its arguments is part of the signature, or the call runs eager."""

import dataclasses
from collections import OrderedDict, namedtuple
from enum import IntEnum

import numpy as np
import pytest
import torch
from _toys import accelerated, calls, settle
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

import diffgraph
from diffgraph.values.tree import flatten, unflatten

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


@dataclasses.dataclass
class Conditions:
    picture: torch.Tensor
    scale = 1.0  # no annotation: no field


class Pair(namedtuple("Pair", "a b")):
    pass


class Words(str):
    pass


class Slotted(int):
    __slots__ = ()


class Size(IntEnum):
    SMALL = 1


class Ordered(nn.Module):
    """What it computes depends on the order of its keyword arguments."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x, **conditions):
        for condition in conditions.values():
            x = self.layer(x).tanh() * 2 + condition
        return x


@pytest.mark.parametrize("verify", [True, False])
def test_keyword_arguments_keep_the_order_in_which_they_are_given(verify):
    module = accelerated(Ordered(), verify=verify)
    assert calls(module, 3, X, pose=X + 1, depth=X - 1)[-1] == "replay"
    assert calls(module, 3, X, depth=X - 1, pose=X + 1)[-1] == "replay"


def test_so_do_their_gradients():
    eager, module = Ordered(), Ordered()
    module.load_state_dict(eager.state_dict())
    diffgraph.accelerate_module(module, training=True)
    for i in range(6):
        for m in (eager, module):
            m.zero_grad()
            m(X + i, pose=X + 1, depth=X - 1).square().sum().backward()
        assert torch.equal(module.layer.weight.grad, eager.layer.weight.grad)
    assert diffgraph.report(module).replays == 4


class Told(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.layer, self._read = nn.Linear(8, 8), read

    def forward(self, x, given):
        return self.layer(x) * self._read(given)


def dataclass(scale):
    made = Conditions(X)
    made.scale = scale
    return made


def output(more):
    made = Transformer2DModelOutput(sample=X)
    if more:
        made["more"] = more
    return made


def attributed(made, scale):
    made.scale = scale
    return made


SCALE = {
    "an attribute that is no field": (lambda given: given.scale, dataclass(2.0), dataclass(3.0)),
    "an item more": (lambda given: given.get("more", 0.0), output(0.0), output(3.0)),
    "a tensor's attribute": (lambda given: getattr(given, "scale", 1.0), X.clone(), attributed(X.clone(), 3.0)),
    "a text's attribute": (lambda given: given.scale, attributed(Words("a"), 1.0), attributed(Words("a"), 3.0)),
    "a named tuple's": (lambda given: given.scale, attributed(Pair(1, 2), 1.0), attributed(Pair(1, 2), 3.0)),
    "an ordered dict's": (lambda given: given.scale, attributed(OrderedDict(), 1.0), attributed(OrderedDict(), 3.0)),
    "the type of a key": (lambda given: 2.0 if type(next(iter(given))) is bool else 3.0, {1: X}, {True: X}),
    "a parameter": (lambda given: 2.0 if isinstance(given, nn.Parameter) else 3.0, X.clone(), nn.Parameter(X.clone(), False)),
}


@pytest.mark.parametrize("read, first, then", SCALE.values(), ids=SCALE)
def test_what_an_argument_says_otherwise_than_by_its_value_is_heeded(read, first, then):
    module = accelerated(Told(read))
    calls(module, 4, X, first)
    calls(module, 4, X, then)
    calls(module, 1, X, first)


@pytest.mark.parametrize(
    "given", [np.float64(2), Slotted(2), Size.SMALL, torch.Size([2]), {(1, 2): X, None: X}, nn.Parameter(X), nn.Buffer(X)]
)
def test_what_says_all_by_its_value_is_recorded(given):
    module = accelerated(Told(lambda given: 2.0))
    settle(module, X, given)


@pytest.mark.parametrize("obj", [{1: "a", True.__str__(): "b"}, {1.0: X}, {None: {"a": 1}}, OrderedDict({(1, 2): 3})])
def test_keys_come_back_as_they_were(obj):
    leaves, spec = flatten(obj)
    back = unflatten(spec, leaves)
    assert back == obj and type(back) is type(obj) and list(map(type, back)) == list(map(type, obj))


def test_keys_that_python_takes_for_equal_are_told_apart():
    assert len({flatten({key: 0})[1] for key in (1, 1.0, True)}) == 3


def test_a_training_step_heeds_a_batchs_attributes():
    def losses(recorded):
        torch.manual_seed(0)
        net = nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-2), fused=True)

        def step(batch):
            loss = (net(batch.picture) * batch.scale).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        made = diffgraph.record_training_step(step, optimizer=optimizer, model=net) if recorded else step
        return [made(dataclass(1.0 if i < 5 else 4.0)).item() for i in range(8)]

    assert losses(True) == losses(False)
