"""Where recording stops by choice: attention through either door, named submodules and functions. Patches leave no trace."""

import inspect
import threading

import pytest
import torch
import torch.nn.functional as F
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn
from torch.nn.functional import scaled_dot_product_attention as imported_by_name

from diffgraph import GraphSequence, breakable_graph
from diffgraph.engine.breaks import check, placed
from diffgraph.engine.sequence import Break
from diffgraph.errors import OptionError
from diffgraph.values.compare import same_bits

REGISTRY = attention_dispatch._AttentionBackendRegistry._backends


@pytest.fixture(autouse=True)
def nothing_is_left_patched():
    functions, registry = dict(vars(F)), dict(REGISTRY)
    yield
    assert vars(F) == functions and registry == REGISTRY


class Block(torch.nn.Module):
    """Two submodules, and a function of torch's between them."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.inner = torch.nn.ModuleDict({"second": Scaled()})

    def forward(self, x):
        return self.inner["second"](F.gelu(self.first(x)), by=3.0) + 1


class Scaled(torch.nn.Module):
    def forward(self, x, *, by=1.0, note=None):
        return {"x": x * by, "note": note}["x"]


def recorded(program, *inputs, breaks="attention", module=None):
    seq = GraphSequence(device="cpu", poison=True)
    with torch.no_grad(), placed(module or torch.nn.Module(), breaks), breakable_graph(seq):
        output = program(*inputs)
    return seq, output


def names(seq):
    return [step.name for step in seq.steps if isinstance(step, Break)]


def check_replay(seq, output, program, x):
    with torch.no_grad():
        for _ in range(2):
            x.copy_(torch.randn_like(x))
            seq.replay()
            assert same_bits(output, program(x))


def qkv():
    return torch.randn(1, 6, 2, 8)


DOORS = {
    "functional": lambda x: F.scaled_dot_product_attention(x, x * 2, x) + 1,
    "dispatch": lambda x: dispatch_attention_fn(x, x * 2, x) + 1,
    "dispatch to a named backend": lambda x: dispatch_attention_fn(x, x * 2, x, backend="_native_math") + 1,
    "dispatch to flex": lambda x: dispatch_attention_fn(x, x * 2, x, backend="flex") + 1,
    "multi-head attention": lambda x: F.multi_head_attention_forward(
        *[x.reshape(6, 1, 16)] * 3,
        16,
        2,
        torch.ones(48, 16),
        None,
        None,
        None,
        False,
        0.0,
        torch.eye(16),
        None,
        need_weights=False,
    )[0],
}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("door", DOORS)
def test_attention_is_one_break_through_either_door(door):
    x = qkv()
    seq, output = recorded(DOORS[door], x)
    assert len(names(seq)) == 1 and names(seq)[0].startswith("attention")
    check_replay(seq, output, DOORS[door], x)


def test_attention_that_was_imported_by_name_is_recorded_and_right():
    x = qkv()
    program = lambda x: imported_by_name(x, x * 2, x) + 1  # noqa: E731
    seq, output = recorded(program, x)
    assert seq.breaks == 0
    check_replay(seq, output, program, x)


def test_attention_with_all_its_arguments_crosses_the_break():
    mask = torch.ones(6, 6, dtype=torch.bool).tril()

    def program(x):
        q = x.transpose(1, 2)
        masked = F.scaled_dot_product_attention(q, q, q, attn_mask=mask, scale=0.3)
        return masked, F.scaled_dot_product_attention(q, q[:, :1], value=q[:, :1], is_causal=True, enable_gqa=True)

    x = qkv()
    seq, output = recorded(program, x)
    assert seq.breaks == 2
    check_replay(seq, output, program, x)


def test_attention_of_a_transformer_layer_is_found():
    # Not `eval()`: torch would take its fused path, which has no attention to break at.
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(1, 6, 16)
    seq, output = recorded(layer, x, module=layer)
    assert names(seq) == ["attention"]
    check_replay(seq, output, layer, x)


def test_a_replay_calls_the_attention_that_is_live_then(monkeypatch):
    x = qkv()
    seq, output = recorded(DOORS["functional"], x)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v: q * 0 + 6)
    seq.replay()
    assert output.unique().tolist() == [7]
    monkeypatch.undo()


def test_a_backend_that_is_registered_anew_is_used_by_the_next_replay(monkeypatch):
    x = qkv()
    with attention_backend("_native_math"):
        seq, output = recorded(DOORS["dispatch"], x)
    monkeypatch.setitem(REGISTRY, attention_dispatch.AttentionBackendName._NATIVE_MATH, lambda query, **_: query * 0 + 2)
    seq.replay()
    assert output.unique().tolist() == [3]
    monkeypatch.undo()


def test_patches_keep_the_names_and_signatures_of_what_they_stand_for():
    before = {backend: inspect.signature(fn) for backend, fn in REGISTRY.items()}
    with placed(torch.nn.Module(), "auto"):
        assert F.scaled_dot_product_attention is not imported_by_name
        assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"
        assert {backend: inspect.signature(fn) for backend, fn in REGISTRY.items()} == before
    assert F.scaled_dot_product_attention is imported_by_name


def test_patches_are_plain_while_nothing_records():
    x = qkv()
    with placed(torch.nn.Module(), "auto"):
        assert same_bits(DOORS["functional"](x), imported_by_name(x, x * 2, x) + 1)


@pytest.mark.parametrize("breaks", ["attention", ["first", "inner.second", "torch.nn.functional.gelu"]])
def test_nothing_is_patched_after_an_exception(breaks):
    block = Block()
    attributes = {name: set(vars(module)) for name, module in block.named_modules()}
    with pytest.raises(ZeroDivisionError):
        recorded(lambda: 1 / 0, breaks=breaks, module=block)
    assert {name: set(vars(module)) for name, module in block.named_modules()} == attributes


def test_a_name_that_is_unknown_leaves_the_others_unpatched():
    block = Block()
    with pytest.raises(OptionError, match="nothing"):
        recorded(block, breaks=["first", "torch.nn.functional.gelu", "nothing"], module=block)
    assert "forward" not in vars(block.first)


def test_other_threads_go_their_way_while_a_capture_is_open():
    x, other = qkv(), qkv()
    seen = {}

    def elsewhere():
        seen["attention"] = DOORS["functional"](other)
        seen["host value"] = float(other.sum()), other.tolist()

    def program(x):
        y = x * 2
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return DOORS["functional"](y)

    seq, output = recorded(program, x)
    assert seq.breaks == 1
    wanted = imported_by_name(other, other * 2, other) + 1
    assert same_bits(seen["attention"], wanted)
    check_replay(seq, output, lambda x: DOORS["functional"](x * 2), x)


def test_two_threads_record_one_after_the_other():
    x, started, made = qkv(), threading.Event(), {}

    def elsewhere():
        started.set()
        made["sequence"], made["output"] = recorded(DOORS["functional"], x)

    thread = threading.Thread(target=elsewhere)

    def program(x):
        thread.start()
        started.wait(10)
        return DOORS["functional"](x * 2)

    seq, output = recorded(program, x)
    thread.join(30)
    seq.replay()
    assert same_bits(output, DOORS["functional"](x * 2))
    assert same_bits(made["output"], DOORS["functional"](x))


def test_a_replay_in_another_thread_meets_no_patch_of_a_capture():
    x, y = qkv(), qkv()
    ready, output = recorded(DOORS["functional"], x)
    failures = []

    def replay():
        try:
            x.fill_(1)
            ready.replay()
        except BaseException as error:
            failures.append(error)

    def program(y):
        thread = threading.Thread(target=replay)
        thread.start()
        thread.join()
        return DOORS["functional"](y)

    seq, _ = recorded(program, y)
    assert not failures and seq.breaks == 1
    assert same_bits(output, DOORS["functional"](torch.ones_like(x)))


# -- names


def test_a_named_submodule_is_a_break_with_its_keyword_arguments():
    block = Block()
    x = torch.randn(2, 4)
    seq, output = recorded(block, x, breaks=["inner.second"], module=block)
    assert names(seq) == ["inner.second"]
    check_replay(seq, output, block, x)
    assert "forward" not in vars(block.inner["second"])


def test_a_named_function_is_a_break():
    block = Block()
    x = torch.randn(2, 4)
    seq, output = recorded(block, x, breaks=("torch.nn.functional.gelu", "first"), module=block)
    assert names(seq) == ["first", "torch.nn.functional.gelu"]
    check_replay(seq, output, block, x)


def test_a_break_inside_a_named_break_is_none():
    block = Block()
    x = torch.randn(2, 4)
    seq, output = recorded(block, x, breaks=["first", "first", "torch.nn.functional.linear"], module=block)
    assert names(seq) == ["first"]
    check_replay(seq, output, block, x)


def test_a_submodule_whose_forward_is_replaced_afterwards_runs_the_new_one():
    block = Block()
    x = torch.randn(2, 4)
    own = block.first.forward
    block.first.forward = lambda x: own(x) * 0 + 5  # as offload hooks do
    seq, output = recorded(block, x, breaks=["first"], module=block)
    check_replay(seq, output, block, x)
    del block.first.forward
    check_replay(seq, output, block, x)
    block.first.forward = lambda x: own(x) * 2
    check_replay(seq, output, block, x)


def test_no_breaks_are_placed_where_none_are_named():
    x = qkv()
    seq, output = recorded(DOORS["functional"], x, breaks=())
    assert seq.breaks == 0
    check_replay(seq, output, DOORS["functional"], x)


@pytest.mark.parametrize(
    "name", ["", ".", "..x", "a..b", "nothing", "first.nothing", "torch.nn.functional.nothing", "torch.nn", "no.such.module"]
)
def test_an_unknown_name_is_refused_saying_what_is_accepted(name):
    block = Block()
    with pytest.raises(OptionError, match=r"neither a submodule of Block nor a function 'package\.module\.name'") as error:
        check(block, ["first", name])
    assert repr(name) in str(error.value)


def test_names_that_are_known_are_accepted():
    check(Block(), ["first", "inner.second", "torch.nn.functional.gelu"])
    check(Block(), "auto")
