"""State that a call's arguments do not show, and forwards that do more than compute: the result is eager's, to the bit."""

import copy
import gc
import random
import warnings
from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy
import pytest
import torch
from _toys import SETTLED, Net, accelerated, call, calls, eager, settle
from diffusers.configuration_utils import FrozenDict
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import diffgraph
from diffgraph import Reason
from diffgraph.guards import Fingerprint
from diffgraph.routing.installed import runners
from diffgraph.values.compare import same_bits

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


def module_of(forward, **attributes):
    """A module with a few layers and this forward."""
    toy = type("Toy", (Toy,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(toy, name, value)
    return toy


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.act = nn.LeakyReLU()
        self.more = nn.ModuleList()
        self.named = nn.ModuleDict()
        self.factors = nn.ParameterDict()
        self.other_factors = nn.ParameterDict({"a": nn.Parameter(torch.tensor(1.5))})
        self.sequence = nn.Sequential()
        self.unbiased = nn.Linear(8, 8, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.register_buffer("shift", torch.ones(8), persistent=False)
        self.plain = torch.ones(8)
        self.flag = False
        self.list = [1.0]
        self.tensors = [torch.tensor(1.0)]
        self.settings = {"inner": {"scale": 1.0}, "all": [(1.0, [1.0])]}
        self.state = SimpleNamespace(scale=1.0, inner=SimpleNamespace(scale=1.0))
        self.parts = [SimpleNamespace(scale=1.0)]
        self.empty = Empty()
        self.config = FrozenDict(scale=1.0)
        self.ordered, self.queue = OrderedDict(a=1.0), deque([1.0])

    factor = 1.0

    def method(self, x):
        return x

    def forward(self, x):
        x = self.act(self.norm(self.conv(x)))
        x = self.linear(x) + self.shift * self.plain
        for layer in (*self.blocks, *self.more, *self.named.values()):
            x = layer(x)
        x = self.unbiased(self.sequence(x)) * self.tensors[0]
        for factor in (*self.factors.values(), *self.other_factors.values()):
            x = x * factor
        x = x * self.list[0] * self.settings["inner"]["scale"] * self.settings["all"][0][1][0]
        x = (
            x
            * self.state.scale
            * self.state.inner.scale
            * self.parts[0].scale
            * self.ordered["a"]
            * self.queue[0]
            * getattr(self.empty, "scale", 1.0)
            * self.config.scale
        )
        return self.method(x * self.factor) + self.flag


class Empty:
    pass


class Other(Toy):
    factor = 3.0


def pad_around(m):
    m.conv.padding_mode, m.conv._reversed_padding_repeated_twice = "circular", [1, 1, 1, 1]


def tie(m):
    m.blocks[1].weight = m.blocks[0].weight


def patch_leaf(m):
    m.linear.forward = lambda x: x * 2


def move_layer_to_another_name(m):
    m.blocks = nn.ModuleList(reversed(m.blocks))


CHANGES = {
    "an attribute of the denoiser": (lambda m: setattr(m, "flag", True), "attributes_changed"),
    "a new attribute": (lambda m: setattr(m, "factor", 2.0), "attributes_changed"),
    "an item of a list": (lambda m: m.list.__setitem__(0, 2.0), "attributes_changed"),
    "an item of a nested dict": (lambda m: m.settings["inner"].update(scale=2.0), "attributes_changed"),
    "an item deep in containers": (lambda m: m.settings["all"][0][1].__setitem__(0, 2.0), "attributes_changed"),
    "an item of an ordered dict": (lambda m: m.ordered.update(a=2.0), "attributes_changed"),
    "an item of a queue": (lambda m: m.queue.__setitem__(0, 2.0), "attributes_changed"),
    "an attribute of an owned object": (lambda m: setattr(m.state, "scale", 2.0), "attributes_changed"),
    "an attribute of its object": (lambda m: setattr(m.state.inner, "scale", 2.0), "attributes_changed"),
    "an attribute of an object in a list": (lambda m: setattr(m.parts[0], "scale", 2.0), "attributes_changed"),
    "the first attribute of an object": (lambda m: setattr(m.empty, "scale", 2.0), "attributes_changed"),
    "the configuration": (lambda m: setattr(m.config, "scale", 2.0), "attributes_changed"),
    "a tensor attribute": (lambda m: setattr(m, "plain", torch.full((8,), 2.0)), "attributes_changed"),
    "a tensor attribute's memory": (lambda m: setattr(m.plain, "data", torch.full((8,), 2.0)), "attributes_changed"),
    "the memory of a tensor in a list": (lambda m: setattr(m.tensors[0], "data", torch.tensor(2.0)), "attributes_changed"),
    "a tensor attribute's contents": (lambda m: m.plain.mul_(2), "replay"),
    "a buffer": (lambda m: m.register_buffer("shift", torch.zeros(8), persistent=False), "weights_changed"),
    "a buffer's contents": (lambda m: m.shift.mul_(2), "replay"),
    "a weight's contents": (lambda m: m.linear.weight.data.mul_(2), "replay"),
    "a weight": (lambda m: setattr(m.linear, "weight", nn.Parameter(torch.eye(8))), "weights_changed"),
    "a bias that goes": (lambda m: setattr(m.linear, "bias", None), "weights_changed"),
    "weights that are tied": (tie, "weights_changed"),
    "a module in a list": (lambda m: m.blocks.__setitem__(1, nn.Linear(8, 8)), "weights_changed"),
    "the order of modules": (move_layer_to_another_name, "weights_changed"),
    "a module in a list that was empty": (lambda m: m.more.append(nn.Tanh()), "weights_changed"),
    "a module in a dict that was empty": (lambda m: m.named.update({"a": nn.Tanh()}), "weights_changed"),
    "a parameter in a dict that was empty": (
        lambda m: m.factors.update({"a": nn.Parameter(torch.tensor(2.0))}),
        "weights_changed",
    ),
    "a parameter in a dict that held others": (
        lambda m: m.other_factors.update({"b": nn.Parameter(torch.tensor(2.0))}),
        "weights_changed",
    ),
    "a layer in a sequence that was empty": (lambda m: m.sequence.append(nn.Tanh()), "weights_changed"),
    "a bias where there was none": (
        lambda m: setattr(m.unbiased, "bias", nn.Parameter(torch.ones(8))),
        "weights_changed",
    ),
    "a convolution's padding": (pad_around, "attributes_changed"),
    "an activation": (lambda m: setattr(m, "act", nn.Tanh()), "weights_changed"),
    "a layer's forward": (patch_leaf, "hooks_changed"),
    "a method": (lambda m: setattr(m, "method", lambda x: x * 2), "attributes_changed"),
    "the class": (lambda m: setattr(m, "__class__", Other), "attributes_changed"),
}


@pytest.mark.parametrize("change, reason", CHANGES.values(), ids=CHANGES)
def test_a_change_is_followed_of(change, reason):
    m = accelerated(Toy())
    settle(m, X)
    before = eager(m, X)
    with torch.no_grad():
        change(m)
    assert call(m, X) == reason
    assert not same_bits(before, eager(m, X)), "the change has no effect to see"
    assert calls(m, 3, X)[-1] == "replay"


def test_weights_may_be_swapped_under_their_parameters():
    """As `Module.to` does where it is told to, or the weights are quantised; it refuses where a weak reference is held."""
    m = accelerated(Toy())
    settle(m, X)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        m.to(torch.float64).to(torch.float32)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert call(m, X) == "weights_changed"
    assert calls(m, 3, X)[-1] == "replay"


def test_a_sparse_weight_that_is_replaced_is_seen():
    def forward(self, x):
        return (self.sparse @ x.flatten(1).t()).t()

    def eye(factor):
        return nn.Parameter((torch.eye(256) * factor).to_sparse(), requires_grad=False)

    m = accelerated(module_of(forward, sparse=eye(1.0)))
    settle(m, X)
    m.sparse = eye(2.0)
    assert call(m, X) == "weights_changed"


CLASSES = {
    "its own": (Toy, "factor", 2.0),
    "a method of it": (Toy, "method", lambda self, x: x * 2),
    "torch's": (nn.GroupNorm, "forward", lambda self, x: x * 2),
}


@pytest.mark.parametrize("owner, name, value", CLASSES.values(), ids=CLASSES)
def test_a_change_of_a_class_is_followed(owner, name, value, monkeypatch):
    m = accelerated(Toy())
    settle(m, X)
    monkeypatch.setattr(owner, name, value)
    assert call(m, X) == "attributes_changed"
    assert calls(m, 3, X)[-1] == "replay"


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


class Counting(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_that_intercepts_operations_sees_all_of_them():
    m = accelerated(Toy())
    settle(m, X)
    with Doubling():
        assert calls(m, 2, X) == ["nested_capture"] * 2
    with Counting() as counting:
        assert call(m, X) == "nested_capture"
    assert counting.count > 20
    with torch.device("cpu"):
        assert calls(m, 2, X)[-1] != "nested_capture"
    assert call(m, X) == "replay"


def test_overlapping_inputs_of_which_one_is_written_are_right():
    def forward(self, a, b):
        a.add_(1)
        return b * 2

    m, plain = accelerated(module_of(forward)), module_of(forward)
    with torch.inference_mode():
        for _ in range(5):
            ours, theirs = X.clone(), X.clone()
            assert same_bits(m(ours, ours[:1]), plain(theirs, theirs[:1]))
            assert same_bits(ours, theirs)
    assert diffgraph.report(m).reasons["side_effects"] == 4


def test_a_layer_patched_twice_runs_the_second_patch():
    m = accelerated(Toy())
    for factor in (2, 3):
        m.linear.forward = lambda x, factor=factor: x * factor
        assert calls(m, 4, X)[-1] == "replay"


def test_hooks_for_all_modules_are_called_every_time():
    m = accelerated(Toy())
    settle(m, X)
    hook = nn.modules.module.register_module_forward_hook(lambda layer, _, out: out * 2)
    try:
        assert calls(m, 2, X) == ["hooks_changed"] * 2
    finally:
        hook.remove()
    assert calls(m, 4, X)[-1] == "replay"


@pytest.mark.parametrize("p, training, reason", [(0.5, True, "training"), (0.5, False, None), (0.0, True, None)])
def test_dropout_draws_new_numbers_each_time_in_training(p, training, reason):
    m = module_of(lambda self, x: self.drop(x) + x.sum(), drop=nn.Dropout(p))
    accelerated(m)
    settle(m, X)
    m.train(training)
    assert (call(m, X) == reason) or reason is None
    torch.manual_seed(0)
    with torch.no_grad():
        first, second = m(X), m(X)
    assert same_bits(first, second) is not (reason == "training")
    m.eval()
    assert calls(m, 4, X)[-1] == "replay"


def test_gradients_are_eager_and_autocast_is_a_signature_of_its_own():
    m = accelerated(Toy())
    settle(m, X)
    assert m(X).requires_grad
    assert diffgraph.report(m).reasons["grad_enabled"] == 1
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            routes = calls(m, 4, X)
        assert routes[-1] == "replay"
        assert call(m, X) == "replay"
    with torch.autocast("cpu", torch.float16):
        assert call(m, X) == "unseen_signature"


@pytest.mark.parametrize("order", [(torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.no_grad)])
def test_inference_mode_and_no_grad_may_alternate(order):
    m = accelerated(Toy())
    with torch.inference_mode():
        inside = X.clone()
    for _ in range(5):
        for mode in order:
            for x in (X, inside):
                with mode():
                    found = m(x)
                    with diffgraph.paused(m):
                        wanted = m(x)
                assert same_bits(found, wanted)
                assert found.is_inference() == wanted.is_inference()
    assert diffgraph.report(m).captures == 1
    assert diffgraph.report(m).replays == 18


# -- forwards that do more than compute: each is compared with a twin that is not accelerated


def counts_in_attribute(self, x):
    self.count = getattr(self, "count", 0) + 1
    return self.linear(x) * self.count


def appends_to_list(self, x):
    self.list.append(len(self.list))
    return self.linear(x) * len(self.list)


def keeps_moving_average(self, x):
    self.shift.mul_(0.5).add_(x.mean())
    return self.linear(x) + self.shift


def writes_to_attribute(self, x):
    self.plain.add_(1)
    return self.linear(x) * self.plain


def writes_to_input(self, x):
    x.mul_(0.5)
    return self.linear(x)


def keeps_one_slot(self, x):
    if getattr(self, "slot", (None,))[0] != x.shape:
        self.slot = (x.shape, torch.arange(8.0) * x.shape[0])
    return self.linear(x) + self.slot[1]


def keeps_a_table_by_shape(self, x):
    table = self.__dict__.setdefault("table", {})
    if x.shape not in table:
        table[x.shape] = torch.arange(8.0) * x.shape[0]
    return self.linear(x) + table[x.shape]


def remembers_the_last_larger_batch(self, x):
    if x.shape[0] > 2:
        self.plain = x.mean() + torch.zeros(8)
    return self.linear(x) + self.plain


def remembers_that_it_saw_a_larger_batch(self, x):
    if x.shape[0] > 2:
        self.flag = True
    return self.linear(x) * (2 if self.flag else 1)


def remembers_the_batch(self, x):
    before, self.flag = self.flag, x.shape[0]
    return self.linear(x) * (before if x.shape[0] == 1 else 1)


def draws(self, x):
    return self.linear(x) + torch.randn_like(x)


def draws_an_order(self, x):
    return self.linear(x)[torch.randperm(x.shape[0])]


def draws_and_looks(self, x):
    return self.linear(x) * (2 if torch.rand(()).item() > 0.5 else 3)


def drops_out(self, x):
    return nn.functional.dropout(self.linear(x), 0.5, training=True)


STATEFUL = {
    f.__name__.replace("_", " "): f
    for f in (
        counts_in_attribute,
        appends_to_list,
        keeps_moving_average,
        writes_to_attribute,
        writes_to_input,
        keeps_one_slot,
        keeps_a_table_by_shape,
        remembers_the_last_larger_batch,
        remembers_that_it_saw_a_larger_batch,
        remembers_the_batch,
        draws,
        draws_an_order,
        draws_and_looks,
        drops_out,
    )
}
ORDER = [2, 2, 2, 2, 3, 3, 3, 3, 2, 2, 1, 1, 1, 1, 3, 2, 1, 2, 1, 3, 1, 2, 3, 2, 2, 2, 3, 3, 3, 1, 2]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("forward", STATEFUL.values(), ids=STATEFUL)
def test_a_forward_gives_what_it_gives_without_us_when_it(forward, inference):
    def history(accelerate):
        m = module_of(forward).eval()
        if accelerate:
            accelerated(m)
        results = []
        torch.manual_seed(5)
        with torch.inference_mode(inference), torch.no_grad():
            for i, batch in enumerate(ORDER):
                x = torch.full((batch, 8), float(i))
                results += [m(x), x]
        state = {k: v for k, v in vars(m).items() if k in ("flag", "count", "list", "plain")}
        return m, results, (state, m.shift)

    m, found, found_state = history(True)
    _, wanted, wanted_state = history(False)
    differing = [i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if not same_bits(a, b)]
    assert not differing
    if forward not in (keeps_one_slot, remembers_the_batch):
        assert same_bits(found_state, wanted_state)
    report = diffgraph.report(m)
    if forward in (keeps_a_table_by_shape, draws, draws_an_order, drops_out):
        assert report.replays > 10
    if forward in (counts_in_attribute, appends_to_list, keeps_moving_average, writes_to_attribute, writes_to_input):
        assert report.replays == 0
        assert report.reasons["side_effects"] > 0


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
def test_a_generator_of_the_modules_own_is_drawn_from_once_a_call():
    def history(accelerate):
        m = module_of(lambda self, x: x + torch.randn(8, generator=self.generator))
        m.generator = torch.Generator().manual_seed(0)
        if accelerate:
            accelerated(m)
        with torch.no_grad():
            return [m(X) for _ in range(6)]

    assert same_bits(history(True), history(False))


def pops(self, x, options):
    return self.linear(x) * options.pop("scale", 1.0)


def marks(self, x, options):
    options["scale"] = 2.0
    return self.linear(x)


def appends(self, x, options):
    options["done"].append(True)
    return self.linear(x)


def replaces(self, x, options):
    options["done"] = [True]  # and whoever holds the old list sees nothing
    return self.linear(x)


def moves(self, x, options):
    options["lists"].append(options["lists"].pop(0))
    return self.linear(x)


def results(self, x, options):
    options["done"].append(self.linear(x))
    return x * 2


@pytest.mark.parametrize(
    "forward, route",
    [
        *((forward, "replay") for forward in (pops, marks, appends, results)),
        *((forward, "side_effects") for forward in (replaces, moves)),
    ],
)
def test_the_callers_dict_is_changed_each_time_when_the_forward(forward, route):
    m = accelerated(module_of(forward))
    for i in range(5):
        ours, theirs = ({"scale": 3.0, "done": [], "lists": [[1], [2]]} for _ in range(2))
        done, old = ours["done"], theirs["done"]
        with torch.no_grad():
            found = m(X + i, options=ours)
            with diffgraph.paused(m):
                wanted = m(X + i, options=theirs)
        assert same_bits(found, wanted)
        assert same_bits(ours, theirs) and same_bits(done, old)
    report = diffgraph.report(m)
    assert (report.replays if route == "replay" else report.reasons[route]) >= 3


def test_at_start_up_a_list_that_the_forward_empties_is_recorded_full():
    def forward(self, x, parts):
        while parts:
            x = x + parts.pop(0)
        return self.linear(x)

    m = accelerated(module_of(forward), capture="startup")
    ((_, runner),) = runners(m)
    with runner.insistence.begun(), torch.no_grad():  # as `diffgraph.capture` does with a pipeline
        m(X, [X + 1, X + 2])
    assert diffgraph.report(m).captures == 1
    for i in range(3):
        parts, others = [X * i, X + 2], [X * i, X + 2]
        with torch.no_grad():
            found = m(X, parts)
            with diffgraph.paused(m):
                assert same_bits(found, m(X, others))
        assert parts == []
    assert diffgraph.report(m).replays == 3


def test_a_change_at_each_call_is_not_looked_for_each_time(monkeypatch):
    m = accelerated(module_of(lambda self, x: self.linear(x) * self.list[0]))
    taken = []
    original = Fingerprint.__init__
    monkeypatch.setattr(Fingerprint, "__init__", lambda self, module: taken.append(1) or original(self, module))
    for i in range(100):
        m.list[0] = float(i)
        call(m, X)
    assert len(taken) < 30
    assert diffgraph.report(m).reasons["attributes_changed"] > 60
    assert calls(m, 20, X)[-1] == "replay"


# -- odd inputs and outputs


def test_a_number_that_changes_at_each_call_is_followed_and_bounded():
    m = accelerated(module_of(lambda self, x, t: self.linear(x) * t))
    for t in range(40):
        call(m, X, float(t))
    assert len(diffgraph.report(m).signatures) <= 16
    assert diffgraph.report(m).reasons["host_value_changed"] > 0


NUMBERS = [1, True, 1.0, 0.0, -0.0, float("nan"), float("inf"), 1 + 0j, None, "1"]


def test_numbers_that_python_takes_for_equal_are_told_apart():
    def forward(self, x, value):
        return x * len(repr(value)) + float(repr(value).startswith("-")), type(value).__name__

    m = accelerated(module_of(forward))
    for _ in range(5):
        for value in NUMBERS:
            call(m, X, value)
    assert diffgraph.report(m).captures == len(NUMBERS)


def two_outputs_that_are_one_tensor(self, x):
    y = self.linear(x)
    return y, y


FORWARDS = {
    "the input itself": lambda self, x: x,
    "a view of the input": lambda self, x: (x[:1], self.linear(x)),
    "one tensor twice": two_outputs_that_are_one_tensor,
    "a tensor and a view of it": lambda self, x: (lambda y: (y, y[:1], y.transpose(0, 1)))(self.linear(x)),
    "None and numbers": lambda self, x: (None, 3, self.linear(x), "text", 2.5),
    "nested containers": lambda self, x: {"a": [self.linear(x), (x * 2,)], "b": {"c": None}},
    "a namespace's tensor": lambda self, x: self.plain,
    "a weight's values": lambda self, x: self.linear.weight.detach(),
    "nothing": lambda self, x: None,
    "an empty tensor": lambda self, x: x[:0] * 2,
    "a boolean": lambda self, x: x > 0,
    "indices": lambda self, x: x.argsort(),
    "a complex tensor": lambda self, x: torch.complex(x, x * 2),
    "a conjugate": lambda self, x: torch.complex(x, x * 2).conj(),
    "the imaginary part of a conjugate": lambda self, x: torch.complex(x, x * 2).conj().imag,
    "nonzero": lambda self, x: x.nonzero(),
    "a tensor that was born from a list": lambda self, x: x + torch.tensor([1.0, 2.0]).sum(),
    "a scalar": lambda self, x: x.sum(),
    "a strided tensor": lambda self, x: (x * 2).transpose(0, 1)[::2],
}


@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_an_output_is_right_that_is(forward):
    m = accelerated(module_of(forward))
    for i in range(5):
        call(m, X + i)
        call(m, X[:0])
    assert diffgraph.report(m).captures >= 1


def test_an_output_that_cannot_be_compared_is_eagers():
    m = accelerated(module_of(lambda self, x: (x * 2).reshape(-1, 8).to_sparse()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", diffgraph.CaptureWarning)
        for i in range(5):
            with torch.no_grad():
                assert torch.equal(m(X + i).to_dense(), ((X + i) * 2).reshape(-1, 8))
    assert diffgraph.report(m).replays == 0


def test_one_tensor_returned_twice_stays_one():
    m = accelerated(module_of(two_outputs_that_are_one_tensor))
    settle(m, X)
    with torch.no_grad():
        first, second = m(X)
    assert first is second


def test_a_tensor_given_twice_and_two_equal_tensors_are_told_apart():
    m = accelerated(module_of(lambda self, a, b: self.linear(a) * (2 if a is b else 1) + b))
    other = X.clone()
    assert calls(m, 4, X, X) == SETTLED
    assert calls(m, 4, X, other) == SETTLED
    other += 1
    assert [call(m, *given) for given in ((X, other), (X, X), (other, other), (other, X))] == ["replay"] * 4


@pytest.mark.parametrize("key", ["a", "b"])
def test_keywords_are_passed_on_by_name(key):
    m = accelerated(module_of(lambda self, x, **extra: self.linear(x) * (2 if "a" in extra else 1) + extra[key]))
    settle(m, X, **{key: X + 1})
    assert call(m, X, **{key: X + 2}) == "replay"


def test_a_module_without_parameters_replays():
    class Bare(nn.Module):
        def forward(self, x):
            return x * 2

    m = accelerated(Bare())
    settle(m, X)
    assert call(m, X + 1) == "replay"


def test_a_switch_by_an_inputs_value_is_followed():
    m = accelerated(module_of(lambda self, x: self.linear(x) * (2 if x.sum().item() > 0 else 3)))
    ones = torch.ones(2, 8)
    for x in (ones, -ones, ones, ones, -ones, -ones, ones * 2, -ones):
        call(m, x)
    assert diffgraph.report(m).captures == 3  # sums of 16, -16 and 32


def test_numbers_are_drawn_on_as_without_us_when_a_replay_is_given_up():
    def forward(self, x):
        return x + torch.randn(8) + (1 if x.sum().item() > 0 else 0) + torch.randn(8)

    m, plain = accelerated(module_of(forward)), module_of(forward)
    ones = torch.ones(2, 8)

    def history(module):
        torch.manual_seed(1)
        with torch.no_grad():
            return [module(sign * ones) for sign in (1, 1, 1, 1, -1, 1, 1, 1, 1, -1)]

    assert same_bits(history(m), history(plain))
    assert diffgraph.report(m).captures == 2


# -- memory and errors


def test_out_of_memory_anywhere_still_gives_the_picture():
    m = accelerated(module_of(lambda self, x: self.method(self.linear(x))))
    fail = []

    def fragile(x):
        if fail and fail.pop():
            raise torch.OutOfMemoryError("injected")
        return x

    m.method = diffgraph.eager_on_graph(fragile)
    call(m, X)
    fail[:] = [True]
    assert call(m, X) == "out_of_memory"  # at capture
    assert diffgraph.report(m).memory_bytes == 0
    diffgraph.capture(m)
    assert calls(m, 2, X)[-1] in ("capture", "replay")
    fail[:] = [True]
    assert call(m, X) == "out_of_memory"  # at verify, or at replay
    assert diffgraph.report(m).memory_bytes == 0
    assert calls(m, 5, X)[-1] == "replay"
    fail[:] = [True]
    assert call(m, X) == "out_of_memory"
    assert calls(m, 5, X)[-1] == "replay"


def test_the_forwards_own_error_is_the_callers():
    m = accelerated(module_of(lambda self, x: self.linear(x)))
    settle(m, X)
    for _ in range(3):
        with torch.no_grad(), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            m(torch.ones(2, 3))
    assert call(m, X) == "replay"


def test_the_guards_see_no_change_where_there_is_none():
    m = Toy()
    twin = copy.deepcopy(m)
    for module in (m, twin):
        fingerprint = Fingerprint(module)
        with torch.no_grad():
            module(X)
        assert fingerprint.change() is None


def test_an_empty_hook_registry_is_no_hook():
    """diffusers makes one at the end of a pipeline's call, when start-up capture is over."""
    m = accelerated(Toy())
    settle(m, X)
    HookRegistry.check_if_exists_or_initialize(m)
    assert calls(m, 2, X) == ["replay", "replay"]
    m._diffusers_hook.register_hook(ModelHook(), "mine")
    assert calls(m, 2, X) == ["hooks_changed", "hooks_changed"]
    m._diffusers_hook.remove_hook("mine")
    assert "replay" in calls(m, 4, X)


def test_inference_mode_gives_the_bits_of_eager_from_the_capture_on():
    m = accelerated(torch.nn.Linear(48, 32))
    x = torch.randn(2, 16, 48)[:, :2]
    with torch.inference_mode():
        for _ in range(4):
            found = m(x)
            with diffgraph.paused(m):
                assert torch.equal(found, m(x))
    assert diffgraph.report(m).replays == 2


@pytest.mark.slow
def test_captures_that_never_pay_become_rare():
    m = accelerated(Toy(), verify=False)
    for n in range(1, 61):  # each batch size comes three times
        calls(m, 3, X[:1].expand(n, *X.shape[1:]).contiguous())
    assert diffgraph.report(m).captures < 30
    settled = X[:1].expand(70, *X.shape[1:]).contiguous()
    assert "replay" in calls(m, 600, settled)


def test_a_host_value_that_alternates_is_not_captured_again_and_again():
    m = module_of(lambda self, x: self.linear(x) * x.sum().sign().item())
    accelerated(m)
    for _ in range(30):
        call(m, X.abs())
        call(m, -X.abs())
    assert diffgraph.report(m).captures <= 6  # of 60 calls, further and further apart


def test_copying_an_object_of_the_same_class_elsewhere_is_no_change():
    """The first `deepcopy` of any instance leaves `__slotnames__` in its class; pipelines copy schedulers and configurations."""

    class Own:
        pass

    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.own = Own()

    module = Module()
    fingerprint = Fingerprint(module)
    copy.deepcopy(Own())
    assert Own.__annotations__ == {}
    assert fingerprint.change() is None


def test_a_copy_of_what_a_module_owns_is_no_change():
    """The first copy of an object leaves a note on its class, as a pipeline's scheduler does when `explain` copies it."""

    class Settings:
        scale = 1.0

    m = Toy()
    m.settings = Settings()
    fingerprint = Fingerprint(m)
    copy.deepcopy(m.settings)
    assert "__slotnames__" in vars(Settings)
    assert fingerprint.change() is None
    Settings.scale = 2.0
    assert fingerprint.change() == "attributes_changed"


@pytest.mark.parametrize("mode", [True, False])
def test_a_dropout_of_nothing_that_is_to_drop_something_is_seen(mode):
    """Every attention of diffusers ends in one."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.0), torch.nn.Linear(8, 8))
    module = diffgraph.accelerate_module(module.train(mode))
    x = torch.ones(4, 8)
    calls(module, 3, x)
    module[1].p = 0.5
    module[1].train()
    calls(module, 4, x)  # each is compared with eager


@pytest.mark.parametrize("made", [random.Random, numpy.random.default_rng, numpy.random.RandomState])
def test_a_generator_of_the_models_own_is_not_baked(made):
    class Drops(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(self.generator.random() > 0.3)

    plain, module = Drops(8, 8), Drops(8, 8)
    module.load_state_dict(plain.state_dict())
    plain.generator, module.generator = made(3), made(3)
    diffgraph.accelerate_module(module)
    x = torch.ones(4, 8)
    with torch.no_grad():
        assert [module(x).sum().item() for _ in range(16)] == [plain(x).sum().item() for _ in range(16)]


@pytest.mark.parametrize("tensor", [lambda m: m.layer.weight, lambda m: m.shift], ids=["weight", "attribute"])
def test_other_memory_at_the_same_address_is_other_memory(tensor, monkeypatch):
    """As after `pipe.to("cpu").to("cuda", memory_format=torch.channels_last)`: the allocator gives out the same addresses."""
    module = Net()
    module.shift = torch.zeros(8)
    monkeypatch.setattr("diffgraph.guards.fingerprint.addresses", lambda tensors: [0 for _ in tensors])
    fingerprint = Fingerprint(module)
    with torch.no_grad():
        assert fingerprint.change() is None
        tensor(module).data = tensor(module).clone()
    assert fingerprint.change() in (Reason.WEIGHTS_CHANGED, Reason.ATTRIBUTES_CHANGED)


def test_memory_that_is_written_or_seen_by_others_is_not_given_back():
    module = torch.nn.Linear(8, 8)
    fingerprint = Fingerprint(module)
    with torch.no_grad():
        module.weight.add_(1)
        view = module.weight.view(-1).detach()
    del view
    gc.collect()
    assert fingerprint.change() is None
