"""What a forward reads, or does, beside its arguments and its module's own tensors."""

import threading
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from _toys import accelerated, calls, settle
from torch import nn
from torch.nn.utils import parametrize

import diffgraph

X = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))


class Sums(nn.Module):
    """Adds what its blocks make to a tensor that nobody registered, as tools that look into attention do."""

    def __init__(self, read, total):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self._hold = lambda: (read, total)

    def forward(self, x):
        read, total = self._hold()
        for block in self.blocks:
            x = block(x)
        if read:
            x = x + total
        total.mul_(0.5).add_(x)
        return x


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("options", [{}, {"verify": False}, {"compile_blocks": {"backend": "eager"}}], ids=str)
def test_what_is_written_to_a_tensor_that_nobody_registered_is_written_once_a_call(read, options, mode):
    totals = torch.zeros(2, 8), torch.zeros(2, 8)
    eager, module = (Sums(read, total).eval() for total in totals)
    module.load_state_dict(eager.state_dict())
    diffgraph.accelerate_module(module, **options)
    with mode():
        for i in range(10):
            assert torch.equal(module(X + i), eager(X + i))
            assert torch.equal(*totals), i
    assert diffgraph.report(module).reasons["side_effects"] > 0


def test_it_is_written_once_where_recording_fails_halfway():
    total, generator = torch.zeros(2, 8), torch.Generator()

    class Fails(nn.Module):
        def forward(self, x):
            total.add_(x)
            return x + torch.rand(2, 8, generator=generator)

    module = diffgraph.accelerate_module(Fails())
    with torch.no_grad(), pytest.warns(diffgraph.CaptureWarning, match="generator of its own"):
        for _ in range(5):
            module(torch.ones(2, 8))
    assert torch.equal(total, torch.full((2, 8), 5.0))


@pytest.mark.parametrize("options", [{}, {"compile_blocks": {"backend": "eager"}}], ids=str)
@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
def test_a_sparse_tensor_from_elsewhere_may_be_written(options):
    table = torch.eye(8).to_sparse()

    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x):
            table.mul_(2.0)
            for block in self.blocks:
                x = block(x)
            return x

    module = diffgraph.accelerate_module(Scales(), **options)
    with torch.no_grad():
        for _ in range(5):
            module(X)
    assert torch.equal(table.to_dense(), 32 * torch.eye(8))


def test_a_tensor_that_the_forward_makes_of_numbers_is_its_own():
    class Made(nn.Module):
        def forward(self, x):
            scale = torch.tensor([2.0, 1, 1, 1, 1, 1, 1, 1])
            scale[0] = 5
            scale.mul_(3)
            return x * scale

    settle(accelerated(Made()), X)


def test_a_break_may_write_to_what_it_makes_itself():
    @diffgraph.eager_on_graph
    def dynamic(x):
        made = torch.zeros(2, 8)
        made.add_(x)
        return made

    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return self.layer(dynamic(self.layer(x)))

    settle(accelerated(Breaks()), X)


def test_a_graph_of_its_own_keeps_no_copy_of_what_it_writes():
    out, x = torch.zeros(8), torch.ones(8)
    sequence = diffgraph.GraphSequence()
    with diffgraph.breakable_graph(sequence):
        out.copy_(x * 2)
        out.add_(1)
    x.fill_(3)
    sequence.replay()
    assert torch.equal(out, torch.full((8,), 7.0))


def test_a_tensor_from_elsewhere_that_is_read_alone_is_recorded():
    table = torch.arange(8.0)

    class Reads(nn.Module):
        def forward(self, x):
            return x * table

    module = accelerated(Reads())
    settle(module, X)
    table.mul_(2)
    assert calls(module, 1, X) == ["replay"]


def test_statistics_that_are_read_alone_are_recorded():
    class Norm(nn.Module):
        def forward(self, x):
            return torch.nn.functional.batch_norm(x, MEAN, VARIANCE)

    settle(accelerated(Norm()), X)


MEAN, VARIANCE = torch.zeros(8), torch.ones(8)


READS = {
    "torch.tensor": lambda x, scale: x * torch.tensor([scale[0], 1 - scale[0]]).sum() * scale[0],
    "torch.as_tensor": lambda x, scale: x * torch.as_tensor([[scale[0]], [scale[0] * 2]]),
    "from_dlpack": lambda x, scale: x * float(np.from_dlpack(scale)[0]),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_numbers_that_are_made_of_tensors_are_read_each_time(read):
    class Reads(nn.Module):
        def forward(self, x, scale):
            return read(x, scale)

    module = accelerated(Reads())
    for value in (3.0, 3.0, 3.0, 5.0, 3.0, 7.0):
        calls(module, 2, X, torch.tensor([value]))


OUTPUTS = {
    "with an attribute": lambda layer, x: attributed(layer(x)),
    "a parameter": lambda layer, x: nn.Parameter(layer(x), requires_grad=False),
    "a weight": lambda layer, x: layer.weight,
}


def attributed(tensor):
    tensor.scale = 3
    return tensor


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
@pytest.mark.parametrize("made", OUTPUTS.values(), ids=OUTPUTS)
def test_a_result_is_what_it_is_by_more_than_its_values(made):
    class Makes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return made(self.layer, x)

    module = diffgraph.accelerate_module(Makes())
    with torch.no_grad():
        found = [module(X) for _ in range(5)]
    assert len({(type(y), getattr(y, "scale", None)) for y in found}) == 1


class Noisy(nn.Module):
    """The same noise at each call."""

    def __init__(self, is_undone):
        super().__init__()
        self.layer, self._is_undone = nn.Linear(8, 8), is_undone

    def forward(self, x):
        with torch.random.fork_rng(devices=[], enabled=self._is_undone):
            torch.manual_seed(0)
            noise = torch.randn(2, 8)
        return self.layer(x) + noise


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
@pytest.mark.parametrize("is_undone", [True, False])
def test_a_forward_that_sets_the_generator_sets_it_each_time(is_undone):
    module = accelerated(Noisy(is_undone))
    for seed in (0, 0, 0, 0, 1, 2):
        torch.manual_seed(seed)
        with diffgraph.paused(module):
            wanted, left = module(X), torch.get_rng_state()
        torch.manual_seed(seed)
        with torch.no_grad():
            assert torch.equal(module(X), wanted)
        assert torch.equal(torch.get_rng_state(), left)


class PerThread(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.request = nn.Linear(8, 8), threading.local()

    def forward(self, x):
        return self.layer(x) * getattr(self.request, "strength", 1.0)


def test_what_a_thread_has_set_for_itself_is_its_own():
    module, found = accelerated(PerThread()), []

    def serve(strength):
        if strength is not None:
            module.request.strength = strength
        found.append(calls(module, 3, X))

    for strength in (None, 1.0, 0.5, 2.0, 2.0, None):
        thread = threading.Thread(target=serve, args=(strength,))
        thread.start()
        thread.join()
    assert len(found) == 6 and found[0][-1] == found[-1][-1] == "replay"


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


def parametrized():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8))
    parametrize.register_parametrization(module[0], "weight", Symmetric())
    return module


def test_weights_that_are_computed_once_for_many_calls_are_not_recorded():
    module = accelerated(parametrized())
    with parametrize.cached():
        assert set(calls(module, 4, X)) == {"nested_capture"}
    with torch.no_grad():
        module[0].parametrizations.weight.original.mul_(2)
    assert calls(module, 4, X)[-1] == "replay"


def test_nor_are_their_gradients():
    def gradients(recorded):
        module = parametrized()
        if recorded:
            diffgraph.accelerate_module(module, training=True)
        found = []
        for i in range(4):
            with parametrize.cached():
                loss = (module(X + i) + module(X - i)).square().mean()
            loss.backward()
            found.append(module[0].parametrizations.weight.original.grad.clone())
            module.zero_grad()
        return found

    assert all(map(torch.equal, gradients(True), gradients(False)))


def test_the_fast_path_of_attention_is_part_of_the_signature():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    module = accelerated(layer)
    assert calls(module, 4, X[None])[-1] == "replay"
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        calls(module, 4, X[None])
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert calls(module, 1, X[None]) == ["replay"]


class Gained(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.layer.weight.gain, self.layer.weight.more, self.layer.weight.owner = 1.0, {"gain": 1.0}, SimpleNamespace(gain=1.0)

    def forward(self, x):
        weight = self.layer.weight
        return self.layer(x) * weight.gain * weight.more["gain"] * weight.owner.gain * getattr(weight, "other", 1.0)


def another(weight):
    made = nn.Parameter(weight.data)
    made.gain, made.more, made.owner = 3.0, weight.more, weight.owner
    return made


CHANGES = {
    "a number": lambda layer: setattr(layer.weight, "gain", 3.0),
    "one more": lambda layer: setattr(layer.weight, "other", 3.0),
    "in a dict": lambda layer: layer.weight.more.update(gain=3.0),
    "of an object": lambda layer: setattr(layer.weight.owner, "gain", 3.0),
    "another weight": lambda layer: setattr(layer, "weight", another(layer.weight)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_attributes_of_a_weight_are_watched(change):
    module = accelerated(Gained())
    settle(module, X)
    change(module.layer)
    assert calls(module, 3, X)[0] in ("attributes_changed", "weights_changed")


def test_what_loaders_and_compilers_note_on_a_tensor_is_no_attribute():
    module = accelerated(Gained())
    settle(module, X)
    module.layer.bias._is_hf_initialized = True
    given = X.clone()
    torch._dynamo.mark_dynamic(given, 0)
    assert calls(module, 2, given) == ["replay"] * 2


def test_a_failure_is_the_callers_own_where_what_was_written_cannot_be_put_back():
    total = torch.zeros(8)

    class Fails(nn.Module):
        def forward(self, x):
            total.add_(1)
            if CALLS:
                total.resize_(0)
                raise LookupError("mine")
            CALLS.append(True)
            return x * 1

    module = diffgraph.accelerate_module(Fails())
    with torch.no_grad():
        module(X)
        with pytest.raises(LookupError, match="mine"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module(X)


CALLS = []


def test_a_warning_that_is_an_error_is_raised_once():
    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x):
            return x + torch.rand(2, 8, generator=self.generator)

    module, raised = diffgraph.accelerate_module(Draws()), []
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for _ in range(5):
            try:
                module(X)
            except diffgraph.CaptureWarning:
                raised.append(True)
    assert len(raised) == 1
