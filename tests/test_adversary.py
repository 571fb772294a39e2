"""State that nobody registers, values that only look equal, and prompts that meet a bucket first at its full length."""

import collections
import dataclasses
import functools
import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from _toys import accelerated, call, calls
from test_prompts import FAMILIES, TOLERANCE, distance, noise, qwen, qwen_call, z_image, z_image_call
from torch import nn

import diffgraph
import pipelines
from diffgraph import Reason, families
from diffgraph.families import rule_of

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
WHOLE = torch.arange(16).reshape(2, 8)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 8), 1.0

    def forward(self, x):
        return self.layer(x) * self.scale


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0

    def of(self, x):
        return x * self.scale


class SlottedBelow(Slotted):
    pass


class Plain:
    def __init__(self):
        self.scale = 1.0

    def of(self, x):
        return x * self.scale


@dataclasses.dataclass
class Equal:
    name: str = "same"
    scale: float = dataclasses.field(default=1.0, compare=False)


class Stored:
    """A descriptor with a store of its own."""

    def __init__(self):
        self.values = {}

    def __get__(self, owner, kind):
        return self if owner is None else self.values.get(id(owner), 1.0)

    def __set__(self, owner, value):
        self.values[id(owner)] = value


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Root(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.inner = nn.Module()
        self.layer = nn.Linear(8, 8)
        self.inner.held = held


Pair = collections.namedtuple("Pair", "first second")


def root(forward, held=None, **of_class):
    return type("Root", (Root,), {"forward": forward, "__slots__": (), **of_class})(held)


def in_order(self, x):
    for key in self.inner.held:
        x = x * 2 if key == "a" else x + 1
    return x


CASES = {
    # held by nobody's registration
    "a module in a list": (lambda s, x: s.inner.held[0](x), lambda: [Scaled()], lambda m: setattr(m.inner.held[0], "scale", 2.0)),
    "the weight of a module in a list": (
        lambda s, x: s.inner.held[0](x),
        lambda: [Scaled()],
        lambda m: setattr(m.inner.held[0].layer.weight, "data", torch.zeros(8, 8)),
    ),
    "a hook of a module in a list": (
        lambda s, x: s.inner.held[0](x),
        lambda: [Scaled()],
        lambda m: m.inner.held[0].register_forward_hook(lambda *a: a[-1] * 3),
    ),
    "the weight of an object's module": (
        lambda s, x: s.inner.held.part(x),
        lambda: SimpleNamespace(part=Scaled()),
        lambda m: setattr(m.inner.held.part.layer, "weight", nn.Parameter(torch.zeros(8, 8))),
    ),
    "the object of a bound method": (
        lambda s, x: s.inner.held(x),
        lambda: Plain().of,
        lambda m: setattr(m.inner.held.__self__, "scale", 2.0),
    ),
    "a partial's keywords": (
        lambda s, x: s.inner.held(x),
        lambda: functools.partial(torch.mul, other=2.0),
        lambda m: m.inner.held.keywords.update(other=3.0),
    ),
    # where it is kept
    "a slot": (lambda s, x: s.inner.held.of(x), Slotted, lambda m: setattr(m.inner.held, "scale", 2.0)),
    "a slot beside a dict": (lambda s, x: s.inner.held.of(x), SlottedBelow, lambda m: setattr(m.inner.held, "scale", 2.0)),
    "a list in a named tuple": (
        lambda s, x: x * s.inner.held.first[0],
        lambda: Pair([1.0], 2),
        lambda m: m.inner.held.first.__setitem__(0, 2.0),
    ),
    "a counter": (
        lambda s, x: x * s.inner.held["a"],
        lambda: collections.Counter(a=1),
        lambda m: m.inner.held.update(a=1),
    ),
    "a bytearray": (lambda s, x: x * s.inner.held[0], lambda: bytearray(b"\1"), lambda m: m.inner.held.__setitem__(0, 2)),
    # equal, and not the same
    "a float for an integer": (lambda s, x: x * s.inner.held, lambda: 2, lambda m: setattr(m.inner, "held", 2.0)),
    "a float for an integer in a list": (
        lambda s, x: x * s.inner.held[0],
        lambda: [2],
        lambda m: m.inner.held.__setitem__(0, 2.0),
    ),
    "a negative zero": (lambda s, x: x * s.inner.held, lambda: 0.0, lambda m: setattr(m.inner, "held", -0.0)),
    "an object that calls itself equal": (
        lambda s, x: x * s.inner.held.scale,
        Equal,
        lambda m: setattr(m.inner, "held", Equal(scale=2.0)),
    ),
    "the order of a dict": (in_order, lambda: {"a": 1, "b": 1}, lambda m: m.inner.held.update(a=m.inner.held.pop("a"))),
    "the order of parameters": (
        in_order,
        lambda: nn.ParameterDict({"a": torch.ones(1), "b": torch.ones(1)}),
        lambda m: m.inner.held.update({"a": m.inner.held.pop("a")}),
    ),
    "a module's name": (
        in_order,
        lambda: nn.ModuleDict({"a": nn.Identity()}),
        lambda m: m.inner.held._modules.update(b=m.inner.held._modules.pop("a")),
    ),
    # of classes
    "a linear layer's class": (lambda s, x: s.layer(x.float()), lambda: None, lambda m: setattr(m.layer, "__class__", Doubled)),
}


@pytest.mark.parametrize("forward, held, change", CASES.values(), ids=CASES)
def test_a_change_is_seen_of(forward, held, change, request):
    x = WHOLE if "integer" in request.node.callspec.id else X
    module = accelerated(root(forward, held()))
    calls(module, 4, x)
    change(module)
    assert call(module, x) != "replay"
    assert "replay" in calls(module, 3, x) or "hook" in request.node.callspec.id


OF_CLASSES = {
    "a dict": (lambda s, x: x * s.shared["a"], lambda: {"a": 1.0}, lambda m: m.shared.update(a=2.0)),
    "a list": (lambda s, x: x * s.shared[0], lambda: [1.0], lambda m: m.shared.__setitem__(0, 2.0)),
    "an object": (lambda s, x: x * s.shared.a, lambda: SimpleNamespace(a=1.0), lambda m: setattr(m.shared, "a", 2.0)),
    "a descriptor's store": (lambda s, x: x * s.shared, Stored, lambda m: setattr(m, "shared", 2.0)),
}


@pytest.mark.parametrize("forward, shared, change", OF_CLASSES.values(), ids=OF_CLASSES)
def test_a_change_is_seen_in_what_a_class_holds(forward, shared, change):
    module = root(forward, shared=shared())
    accelerated(module)
    calls(module, 4, X)
    change(module)
    assert call(module, X) == "attributes_changed"


class Dropping(nn.Module):
    """Leaves a layer out now and then, as Python's own generator decides."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return x + self.second(x) if random.random() < 0.8 else x


def test_what_python_draws_is_drawn_at_each_call():
    module, x = Dropping().eval(), torch.randn(2, 4)
    with torch.no_grad():
        random.seed(1)
        wanted = [module(x) for _ in range(30)]
        accelerated(module)
        random.seed(1)
        assert all(torch.equal(module(x), result) for result in wanted)
    assert diffgraph.report(module).captures == 0


LAYERS = {
    "instance norm": lambda: nn.InstanceNorm1d(4, track_running_stats=True),
    "RReLU": nn.RReLU,
    "attention's dropout": lambda: nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True),
}


class Layered(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x, x, x, need_weights=False)[0] if isinstance(self.layer, nn.MultiheadAttention) else self.layer(x)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_one_layers_training_mode_is_seen_of(layer):
    module, x = accelerated(Layered(layer()).eval()), torch.randn(2, 4, 4)
    calls(module, 4, x)
    module.layer.train()
    assert call(module, x) != "replay"


def test_transforms_of_a_recorded_module_are_torchs_own():
    module = accelerated(nn.Linear(4, 4).eval())
    x = torch.randn(3, 4)
    calls(module, 4, x)
    with torch.no_grad():
        wanted = x @ module.weight.T + module.bias
        assert torch.allclose(torch.vmap(module)(x), wanted)
        primal, tangent = torch.func.jvp(module, (x,), (torch.ones_like(x),))
        assert torch.allclose(primal, wanted) and torch.allclose(tangent, torch.ones_like(x) @ module.weight.T)


def test_what_is_equal_and_the_same_is_no_change():
    module = accelerated(root(lambda s, x: x * s.inner.held[0], [1.5]))
    calls(module, 4, X)
    for held in ([float("1.5")], [float("1.5")]):
        module.inner.held = held
        assert call(module, X) == "replay"
    module.inner.held[0] = 2.5
    assert call(module, X) == "attributes_changed"


class Centred(nn.Module):
    """Where rows meet."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        x = self.layer(x)
        return x - x.mean(1, keepdim=True)


@torch.no_grad()
def check(module, made, **options):
    want = [module(**call)[0] for call in made]
    diffgraph.accelerate_module(module, poison=True, **options)
    for given, expected in zip(made, want, strict=True):
        got = module(**given)[0]
        pairs = zip(got, expected, strict=True) if isinstance(got, list) else [(got, expected)]
        assert all(distance(a, b) < TOLERANCE for a, b in pairs)
    return diffgraph.report(module)


@pytest.mark.parametrize("verify", [True, False])
def test_a_layer_of_ones_own_is_not_given_padded_rows(verify):
    module = qwen()
    module.txt_in = Centred(module.txt_in)
    assert rule_of(module) is None
    check(module, [qwen_call(n, seed=n) for n in (16, 16, 16, 9, 9, 9, 11)], verify=verify)


def test_a_layers_forward_that_was_replaced_is_not_given_padded_rows():
    module = qwen()
    forward = module.txt_in.forward
    module.txt_in.forward = lambda x: forward(x) - forward(x).mean(1, keepdim=True)
    assert rule_of(module) is None


def test_a_rule_that_is_wrong_is_found_out_though_the_first_prompts_fill_their_bucket(monkeypatch):
    monkeypatch.setattr(families.RULES["QwenImageTransformer2DModel"], "placed", lambda *_: nullcontext())
    report = check(qwen(), [qwen_call(n, seed=n) for n in (16, 16, 16, 9, 11, 16)])
    assert report.reasons[Reason.VERIFY_FAILED] == 3


def test_start_up_leaves_out_a_bucket_that_the_forward_does_not_take():
    """Qwen-Image's table of positions has 4,096 rows, of which the picture takes some."""
    pipe = pipelines.build("qwen_image")
    pipe.set_progress_bar_config(disable=True)
    with pytest.warns(diffgraph.CaptureWarning, match="capture_failed"):
        diffgraph.accelerate_pipeline(pipe, capture_shapes="64x64", prompt_buckets=[16, 4096])
    assert diffgraph.report(pipe).captures == 1


@pytest.mark.parametrize("residuals", [[], (), {0: 0.5}, {0: torch.tensor(0.5)}, {0: noise(64)}], ids=str)
def test_residuals_that_z_images_rule_does_not_know(residuals):
    made = [{**z_image_call(n, seed=n), "controlnet_block_samples": residuals} for n in (9, 9, 9, 12)]
    check(z_image(), made)


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_that_fill_their_bucket_first(name):
    build, made = FAMILIES[name]
    report = check(build(), [made(n, seed=n) for n in (32, 32, 32, 27, 29, 32)])
    assert (report.captures, report.replays) == (1, 4)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_input_that_wants_gradients_is_another_signature(mode):
    """A vector times a batch of matrices has other bits then."""
    module, vector = accelerated(root(lambda s, x: x @ s.inner.held, noise(3, 64, 5))), noise(64)
    assert "replay" in calls(module, 4, vector)
    wanting = vector.clone().requires_grad_()
    with mode():
        assert [call(module, wanting) for _ in range(4)][2:] == ["replay"] * 2
    assert call(module, vector) == "replay"
