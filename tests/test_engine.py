"""A recorded program does what the program does: on other data, in other modes, after failures, and with memory reused."""

import copy
import dataclasses
import functools
import gc
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from diffgraph import GraphSequence, breakable_graph, eager_on_graph
from diffgraph.devices import new_pool
from diffgraph.engine.recorder import Rules, open_recorder, record
from diffgraph.errors import CaptureError, HostValueChanged, OptionError, OptionTypeError, ReplayError
from diffgraph.recording.capture import capture
from diffgraph.recording.signature import Call
from diffgraph.values.tensors import bits_of
from diffgraph.values.tree import flatten


@pytest.fixture(autouse=True)
def nothing_left_open():
    yield
    assert open_recorder() is None
    assert not _get_current_dispatch_mode_stack() and not {"tolist", "numpy"} & set(vars(torch.Tensor))
    assert torch.is_autocast_cache_enabled() and not torch.is_autocast_enabled("cpu")


def sequence(**options):
    return GraphSequence(device="cpu", **{"poison": True, **options})


def recorded(program, *inputs, **options):
    seq = sequence(**options)
    with breakable_graph(seq):
        output = program(*inputs)
    return seq, output


def set_to(inputs, values):
    with torch.no_grad():
        for x, value in zip(inputs, values, strict=True):
            x.copy_(value)


def clones(tensors):
    return [t.detach().clone() for t in tensors]


def check(program, *datasets, breaks=None, segments=None, **options):
    """Record `program` on the first data, replay it on all of them, each time like eager to the bit."""
    inputs = clones(datasets[0])
    torch.manual_seed(0)
    with torch.no_grad():
        wanted = program(*clones(datasets[0]))
    torch.manual_seed(0)
    seq, output = recorded(program, *inputs, **options)
    assert same_bits(output, wanted)
    for n, data in enumerate((*datasets, *datasets[::-1])):
        set_to(inputs, data)
        torch.manual_seed(n)
        seq.replay()
        drawn = torch.rand(1)
        torch.manual_seed(n)
        with torch.no_grad():
            assert same_bits(output, program(*clones(data)))
        assert torch.equal(drawn, torch.rand(1))
    if breaks is not None:
        assert (seq.breaks, seq.segments) == (breaks, breaks + 1 if segments is None else segments)
    return seq, inputs, output


def same_bits(a, b):
    """Whether both have the same containers, shapes, dtypes and bits, and the same values beside tensors."""
    (a_leaves, a_spec), (b_leaves, b_spec) = flatten(a), flatten(b)
    if a_spec != b_spec:
        return False
    for x, y in zip(a_leaves, b_leaves, strict=True):
        if isinstance(x, torch.Tensor):
            if (x.shape, x.dtype) != (y.shape, y.dtype) or not torch.equal(bits_of(x), bits_of(y)):
                return False
        elif (type(x), x) != (type(y), y):
            return False
    return True


def data(*shapes, n=2):
    return [[torch.randn(shape) for shape in shapes] for _ in range(n)]


# -- random programs


@dataclasses.dataclass
class Box:
    item: Any
    rest: Any = None


def _writable(a):
    return a.clone() if any(stride == 0 and n > 1 for stride, n in zip(a.stride(), a.shape, strict=True)) else a


def _half(a):
    return (torch.arange(a.numel()) % 2 == 0).reshape(a.shape)


def _nested_break(a, b):
    inner = eager_on_graph(lambda t: t.cos())
    made = inner(a * 2)
    return {"box": Box([made, None, a.dim()], (made.reshape(-1)[1:], b)), "text": "x"}


def _in_place_break(a, b):
    a.mul_(0.5).sub_(b.sum() * 0.1)


def _chunks_break(a, b):
    return (a.reshape(-1) + 1).repeat(3).chunk(3)


PLAIN = {
    "add": lambda a, b: a + b.sum(),
    "tanh": lambda a, b: a.tanh(),
    "flat": lambda a, b: a.reshape(-1),
    "transpose": lambda a, b: a.mT if a.dim() > 1 else a,
    "narrow": lambda a, b: a[..., :2] if a.dim() else a,
    "expand": lambda a, b: a.unsqueeze(0).expand(2, *a.shape),
    "cat": lambda a, b: torch.cat([a.reshape(-1), b.reshape(-1)])[:24],
    "split": lambda a, b: list(a.reshape(-1).tensor_split(2)),
    "unbind": lambda a, b: list(a.unbind(0)) if a.dim() else a,
    "largest": lambda a, b: list(a.max(-1)) if a.dim() and a.shape[-1] else a,
    "softmax": lambda a, b: a.softmax(-1) if a.dim() else a,
    "add_": lambda a, b: _writable(a).add_(b.sum() * 0.5),
    "zero_": lambda a, b: _writable(a).reshape(-1)[:1].zero_(),
    "copy_": lambda a, b: _writable(a).copy_(b.reshape(-1)[0].clone()) if b.numel() else a,
    "new": lambda a, b: torch.ones(a.shape) * 3,
    "dropout": lambda a, b: F.dropout(a, 0.5, training=True),
    "randn": lambda a, b: torch.randn(a.shape) + a,
    "numbers": lambda a, b: a * a.numel(),
    # breaks that nobody marked
    "item": lambda a, b: a + ((a == a).sum() + (a != a).sum()).item(),
    "bool": lambda a, b: a.neg() if (a.isnan() | (a.abs() >= 0)).all() else a,
    "nonzero": lambda a, b: torch.nonzero(_half(a)).sum() + a,
    "take mask": lambda a, b: a[_half(a)],
    "put mask": lambda a, b: a.reshape(-1).index_put((_half(a).reshape(-1),), torch.tensor(2.0)),
    "select": lambda a, b: a.masked_select(_half(a)),
    "repeat": lambda a, b: a.reshape(-1).repeat_interleave(_half(a).reshape(-1).int())[:24],
}
MARKED = {
    "new": lambda a, b: a * 2 - b.sum(),
    "view": lambda a, b: a.reshape(-1)[1:],
    "same": lambda a, b: (a, b, a),
    "expanded": lambda a, b: (a + 1).unsqueeze(0).expand(3, *a.shape),
    "in place": _in_place_break,
    "in place, returned": lambda a, b: a.add_(1) if _writable(a) is a else a,
    "nested": _nested_break,
    "chunks": _chunks_break,
    "random": lambda a, b: torch.rand(a.shape),
    "plain values": lambda a, b: [a.numel(), None, 0.5, ("x", True)],
}


def interpreted(instructions, *inputs):
    """Each instruction takes two of the tensors there are and adds those it makes."""
    values = list(inputs)
    made = []
    for name, marked, i, j in instructions:
        a, b = values[i % len(values)], values[j % len(values)]
        if marked:
            a = _writable(a.float()) if name.startswith("in place") else a
            result = eager_on_graph(MARKED[name])(a, b)
        else:
            result = PLAIN[name](a.float(), b.float())
        made.append(result)
        leaves = flatten(result)[0]
        values += [t for t in leaves if isinstance(t, torch.Tensor) and t.numel() <= 200]
    return made, values


places = st.integers(0, 30)
instructions = st.lists(
    st.tuples(st.sampled_from(sorted(PLAIN)), st.just(False), places, places)
    | st.tuples(st.sampled_from(sorted(MARKED)), st.just(True), places, places),
    max_size=10,
)
modes = st.sampled_from([torch.no_grad, torch.inference_mode, torch.enable_grad])


@settings(max_examples=150)
@given(instructions, modes, modes, st.booleans(), st.integers(0, 1000))
def test_any_program_replays_like_eager(program, recording_mode, replay_mode, poison, seed):
    run = functools.partial(interpreted, program)
    torch.manual_seed(seed)
    first, second = data((2, 3), (6,), ())
    inputs, eager = clones(first), clones(first)
    torch.manual_seed(1)
    with torch.no_grad():
        wanted = run(*eager)
    torch.manual_seed(1)
    with recording_mode():
        seq, output = recorded(run, *inputs, poison=poison)
    assert same_bits(output, wanted) and same_bits(inputs, eager)
    assert [t.stride() for t in output[1]] == [t.stride() for t in wanted[1]]
    for values in (second, first):
        set_to(inputs, values)
        eager = clones(values)
        torch.manual_seed(2)
        with torch.no_grad():
            wanted = run(*eager)
        torch.manual_seed(2)
        with replay_mode():
            seq.replay()
        assert same_bits(output, wanted) and same_bits(inputs, eager)


# -- segments and breaks


def test_without_a_break_there_is_one_segment():
    check(lambda x: (x * 2).relu() + 1, *data(3), breaks=0)


def test_a_break_stands_between_two_segments():
    double = eager_on_graph(lambda x: x * 2)
    check(lambda x: double(double(x + 1) + 1), *data(3), breaks=2)


def test_a_marked_function_is_plain_outside_a_capture():
    double = eager_on_graph(lambda x, by=2: x * by)
    assert double(3) == 6 and double(3, by=3) == 9


def test_a_break_inside_a_break_runs_plainly():
    calls = []

    @eager_on_graph
    def inner(x):
        calls.append(open_recorder() is not None and open_recorder().in_break)
        return x + 1

    outer = eager_on_graph(lambda x: inner(inner(x)) * 2)
    check(lambda x: outer(x) + 1, *data(3, n=1), breaks=1)
    assert calls[2:4] == [True, True]  # the first two are eager's


def test_a_break_sees_real_data_while_it_is_recorded():
    seen = []
    look = eager_on_graph(lambda x: seen.append(float(x.sum())))
    recorded(lambda x: look(x * 2), torch.ones(3))
    assert seen == [6.0]


def test_everything_that_nests_crosses_a_break():
    @eager_on_graph
    def shuffle(box, *, more):
        return {"a": Box(more["x"] * 2, [box.item + 1, None]), "b": (3, "text"), "c": [], "d": torch.Size([2])}

    def program(x):
        out = shuffle(Box(x * 1, None), more={"x": x + 1})
        assert out["b"] == (3, "text") and out["c"] == [] and out["d"] == (2,)
        return out["a"].item + out["a"].rest[0]

    check(program, *data(3), breaks=1)


def test_views_of_one_memory_stay_views_of_one_memory_across_a_break():
    @eager_on_graph
    def halves(x):
        y = x * 2
        return y, y.view(-1)[2:], torch.view_as_real(torch.view_as_complex(y.view(-1, 2)))

    def program(x):
        whole, tail, pairs = halves(x)
        whole.add_(1)
        tail.mul_(3)
        pairs[0].zero_()
        return whole.clone(), tail.clone(), pairs.clone()

    check(program, *data((2, 3)), breaks=1)


def test_the_chunks_of_one_result_share_one_buffer():
    project = eager_on_graph(lambda x: (x @ torch.ones(8, 3 * 64)).chunk(3, -1))
    q, k, v = recorded(lambda x: project(x), torch.ones(4, 8))[1]
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert q.stride() == (192, 1) and q.untyped_storage().nbytes() == 4 * 192 * 4


@pytest.mark.parametrize(
    "shape_it",
    [
        lambda y: y.expand(4, 3),
        lambda y: y.unfold(1, 2, 1),
        lambda y: y.mT,
        lambda y: y[:, ::2],
        lambda y: y[:, :0],
        lambda y: (y.expand(4, 3), y),
        lambda y: torch.max(y, dim=1),
        lambda y: torch.nn.Parameter(y),
    ],
    ids=["expanded", "overlapping", "transposed", "strided", "empty", "expanded and not", "torch's tuple", "parameter"],
)
def test_a_break_may_return_any_dense_view(shape_it):
    make = eager_on_graph(lambda x: shape_it(x * 2))
    check(lambda x: [t + 1 for t in flatten(make(x))[0]], *data((1, 3)), breaks=1)


def test_an_expanded_result_that_is_expanded_no_more_is_noticed():
    kind = ["expanded"]
    make = eager_on_graph(lambda x: x.sum().expand(3) if kind == ["expanded"] else x * 2)
    x = torch.ones(3)
    seq, _ = recorded(lambda x: make(x) + 1, x)
    kind[0] = "dense"
    with pytest.raises(HostValueChanged, match="expanded"):
        seq.replay()


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (lambda x: torch.complex(x, x).conj(), "conjugated"),
        (lambda x: torch.diag(x).to_sparse(), "sparse"),
        (lambda x: x.clone().as_subclass(type("Sub", (torch.Tensor,), {})), "Sub"),
    ],
    ids=["conjugated", "sparse", "subclass"],
)
def test_a_break_that_returns_no_dense_tensor_is_refused(result, named):
    seq = sequence()
    with pytest.raises(CaptureError, match=f"{named}.*accepted: plain dense tensors"), breakable_graph(seq):
        eager_on_graph(result)(torch.ones(3) * 1)
    assert not seq.steps


@pytest.mark.parametrize("change", ["append", "replace", "add a key"])
def test_a_break_that_changes_the_callers_containers_is_refused(change):
    @eager_on_graph
    def fill(items, named, x):
        if change == "append":
            items.append(x * 2)
        elif change == "replace":
            items[0] = x * 2
        else:
            named["new"] = x

    with pytest.raises(CaptureError, match="container"):
        recorded(lambda x: fill([x], {}, x), torch.ones(3))


def test_a_result_whose_structure_or_shape_changes_is_noticed_and_the_sequence_lives():
    state = {"make": lambda x: [x * 2]}
    make = eager_on_graph(lambda x: state["make"](x))
    x = torch.ones(3)
    seq, y = recorded(lambda x: make(x)[0] + 1, x)
    for other in (lambda x: (x * 2,), lambda x: [x[:2]], lambda x: [x.double()], lambda x: [None], lambda x: x):
        state["make"] = other
        with pytest.raises(HostValueChanged):
            seq.replay()
    state["make"] = lambda x: [x * 3]
    seq.replay()
    assert y.tolist() == [4, 4, 4]


def test_a_break_that_returned_its_input_and_now_does_not_is_noticed():
    state = {"same": True}
    make = eager_on_graph(lambda x: x if state["same"] else x * 1)
    seq, _ = recorded(lambda x: make(x) + 1, torch.ones(3))
    seq.replay()
    state["same"] = False
    with pytest.raises(HostValueChanged, match="its own input"):
        seq.replay()


# -- values that Python reads

READS = {
    "item": lambda x: x * x.sum().item(),
    "float": lambda x: x * float(x[0]),
    "if": lambda x: x * 2 if x.sum() > 0 else x,
    "int index": lambda x: x[: int(x.argmax()) + 1] + 1,
    "tensor index": lambda x: x[x.argmax()] + x,
    "range": lambda x: sum((x * i for i in range(x.argmax())), x),
    "tolist": lambda x: x * sum(x.tolist()),
    "tolist of one element": lambda x: x * x[:1].expand(1).tolist()[0] + sum(x[:1].as_strided((1,), (0,)).tolist()),
    "tolist of a view": lambda x: x * (x * 2)[1:].tolist()[0],
    "numpy": lambda x: x * float(x.numpy().sum()),
    "asarray": lambda x: x * float(np.asarray(x * 2).sum()),
    "numpy of bfloat16": lambda x: x * sum(x.bfloat16().tolist()),
    "equal": lambda x: x * 2 if torch.equal(x, x.abs()) else x,
    "allclose": lambda x: x * 2 if torch.allclose(x, x.abs()) else x,
    "len of nonzero": lambda x: x * len(x.clamp_min(0).nonzero()),
}


@pytest.mark.parametrize("name", READS)
def test_a_value_that_python_reads_is_compared_at_each_replay(name):
    good, other = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([5.0, -9.0, -1.0])
    x = good.clone()
    seq, y = recorded(READS[name], x)
    assert seq.breaks >= 1 and torch.equal(y, READS[name](good))
    for _ in range(2):
        x.copy_(other)
        with pytest.raises(HostValueChanged):
            seq.replay()
        x.copy_(good)
        seq.replay()
        assert torch.equal(y, READS[name](good))


def test_printing_a_tensor_and_reading_it_inside_an_op_are_no_host_reads():
    @torch.library.custom_op("diffgraph_tests::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 2)

    def program(x):
        assert "tensor(" in repr(x)
        return double(x) + 1

    check(program, *data(3), breaks=0)


def test_a_read_inside_another_mode_is_still_seen():
    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def program(x):
        with Looking():
            return x * sum(x.tolist()) + eager_on_graph(lambda t: t * 2)(x)

    x = torch.ones(3)
    seq, y = recorded(program, x)
    seq.replay()
    assert seq.breaks == 2 and y.tolist() == [5, 5, 5]
    x.fill_(2)
    with pytest.raises(HostValueChanged):
        seq.replay()


def test_the_same_host_value_from_other_data_replays():
    def program(x):
        scale = 2 if x.sum() > 0 else 3
        return x * scale + (x > 0).sum().item()

    check(program, [torch.tensor([1.0, -0.5])], [torch.tensor([-2.0, 7.0])], breaks=2)


def test_a_read_of_what_does_not_change_replays():
    check(lambda x: x * sum(torch.arange(3).tolist()), *data(3), breaks=1)


@pytest.mark.parametrize(
    ("first", "then", "same"),
    [(math.nan, math.nan, True), (0.0, -0.0, False), (0.0, 0.0, True), (math.inf, math.inf, True), (math.nan, 1.0, False)],
)
def test_host_values_are_compared_as_code_would_see_them(first, then, same):
    def program(x):
        return torch.zeros(1) + math.copysign(1, x.item())

    x = torch.tensor(first)
    seq, _ = recorded(program, x)
    x.fill_(then)
    if same:
        seq.replay()
    else:
        with pytest.raises(HostValueChanged):
            seq.replay()


def test_true_is_not_one_and_numpy_numbers_are_values():
    state = {"value": np.float32(3)}
    seq, _ = recorded(lambda x: x * float(eager_on_graph(lambda: state["value"])()), torch.ones(2))
    state["value"] = np.float32(3)
    seq.replay()
    for other in (np.float64(3), np.float32(4), 3, 3.0):
        state["value"] = other
        with pytest.raises(HostValueChanged):
            seq.replay()
    state["value"] = True
    seq, _ = recorded(lambda x: x * eager_on_graph(lambda: state["value"])(), torch.ones(2))
    state["value"] = 1
    with pytest.raises(HostValueChanged):
        seq.replay()


def _put(x):
    y = x * 1
    y[y > 0] = -1.0
    return y


DYNAMIC = {
    "nonzero": lambda x: x.clamp_min(0).nonzero() * 2,
    "where": lambda x: torch.where(x > 0)[0] + 1,
    "by mask": lambda x: x[x > 0] * 2,
    "put by mask": _put,
    "masked_select": lambda x: x.masked_select(x > 0) + 1,
    "repeat_interleave": lambda x: x.repeat_interleave((x > 0).int()),
    "unique": lambda x: torch.unique(x > 0).int() + 1,
    "argwhere": lambda x: torch.argwhere(x > 0) + 1,
}


@pytest.mark.parametrize("name", DYNAMIC)
def test_a_shape_that_depends_on_data_is_a_break(name):
    seq, (x,), _ = check(DYNAMIC[name], [torch.tensor([1.0, -2.0, 3.0])], [torch.tensor([-1.0, 5.0, 4.0])])
    assert seq.breaks == 1
    if name != "put by mask":  # whose shape does not depend on how many there are
        x.fill_(7)
        with pytest.raises(HostValueChanged):
            seq.replay()
    x.copy_(torch.tensor([2.0, 2.0, -1.0]))
    seq.replay()


def test_an_op_that_hides_that_its_shape_depends_on_data_is_noticed():
    def program(x):
        lengths = x.long() + 0
        return torch._VF._pack_padded_sequence(torch.ones(2, 3, 1), lengths, True)[0] * 2

    x = torch.tensor([3.0, 2.0])
    seq, packed = recorded(program, x)
    x.copy_(torch.tensor([3.0, 1.0]))
    with pytest.raises(HostValueChanged, match="another shape"):
        seq.replay()
    x.copy_(torch.tensor([3.0, 2.0]))
    seq.replay()
    assert packed.tolist() == [[2.0]] * 5


# -- modes and state around it


def _matmul(x):
    return x @ x + 1


def test_autocast_is_that_of_the_recording():
    x = torch.randn(16, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        seq, half = recorded(_matmul, x)
        wanted_half = _matmul(x)
    whole_seq, whole = recorded(_matmul, x)
    wanted = whole.clone()
    seq.replay()
    with torch.autocast("cpu", torch.bfloat16):
        whole_seq.replay()
    assert half.dtype == torch.bfloat16 and same_bits((half, whole), (wanted_half, wanted))


def test_a_part_that_is_kept_out_of_autocast_stays_out_of_it():
    def program(x):
        low = x @ x
        with torch.autocast("cpu", enabled=False):
            return low, x @ x + 1

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        check(program, *data((16, 16)), breaks=0)


@pytest.mark.parametrize("around", [False, True], ids=["set in the forward", "unset in the forward"])
def test_a_break_runs_in_the_autocast_that_the_forward_set_around_it(around):
    square = eager_on_graph(lambda x: (x @ x).float())

    def program(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=not around):
            y = square(x * 1)
        return square(y) + 0

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=around):
        check(program, *data((16, 16)), breaks=2)


def test_a_break_runs_with_the_attention_kernel_that_the_forward_chose():
    attend = eager_on_graph(F.scaled_dot_product_attention)

    def program(q):
        with sdpa_kernel(SDPBackend.MATH):
            chosen = attend(q, q * 2, q)
        return chosen, attend(q, q, q)

    check(program, *data((1, 2, 64, 32)), breaks=2)


def test_a_switch_of_attention_kernels_after_recording_is_honoured_and_left_alone():
    seen = []

    @eager_on_graph
    def look():
        seen.append(torch.backends.cuda.flash_sdp_enabled())

    def program(x):
        look()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            look()
        return x + 1

    seq, _ = recorded(program, torch.ones(2))
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        seq.replay()
        assert not torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)
    assert seen == [True, True, False, True]


def test_a_part_in_inference_mode_replays():
    double = eager_on_graph(lambda x: x * 2)
    bump = eager_on_graph(lambda x: x.add_(1))

    def program(x):
        with torch.inference_mode():
            y = double(x + 1) + 1
            bump(y)
        return y * 2

    check(program, *data(3), breaks=2)


def test_a_cast_weight_is_not_remembered_from_before_the_recording():
    layer = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)  # autocast now keeps the weight that it has cast
        seq, y = recorded(layer, x)
        with torch.no_grad():
            layer.weight.mul_(2)
        assert torch.is_autocast_cache_enabled()
    seq.replay()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert same_bits(y, layer(x))


def test_random_numbers_are_drawn_as_eager_draws_them():
    def program(x):
        return F.dropout(x, 0.5, True) + torch.randn(3), torch.rand(2), torch.randperm(5), x.clone().normal_()

    check(program, *data(3), breaks=0)


def test_a_generator_of_its_own_is_refused_before_it_is_drawn_from():
    own = torch.Generator().manual_seed(5)
    before = own.get_state()
    with pytest.raises(CaptureError, match="generator of its own"):
        recorded(lambda: torch.randn(3, generator=own) + 0)
    assert torch.equal(own.get_state(), before)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_and_compiled_code_may_be_breaks():
    attend = eager_on_graph(lambda q: flex_attention(q, q, q))
    compiled = eager_on_graph(torch.compile(lambda x: x.sin() + 1, backend="eager"))
    check(lambda q: compiled(attend(q * 1)) + 1, *data((1, 1, 16, 16)), breaks=2)


def test_compiled_code_in_a_break_is_compiled_while_recording_too():
    runs = []

    def backend(graph, inputs):
        def run(*args):
            runs.append("compiled")
            return graph(*args)

        return run

    brk = eager_on_graph(torch.compile(lambda x: x.sin() + 1, backend=backend))
    seq, _ = recorded(lambda x: brk(x) + 1, torch.ones(3))
    seq.replay()
    assert runs == ["compiled"] * 2


def test_torchs_fused_layers_take_the_path_that_eager_takes():
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    check(layer, *data((1, 6, 16)))


def test_a_tensor_whose_shape_is_changed_in_place_is_read_as_it_was():
    look = eager_on_graph(lambda t: t.cumsum(0))

    def program(x):
        y = x * 2
        first = y @ torch.ones(3, 3).triu()
        seen = look(y)
        y.t_()
        seen.t_()
        y.add_(first)
        y.unsqueeze_(0)
        grown = torch.empty(0)
        torch.add(y, 1, out=grown)
        moved = torch.zeros(3)
        moved.set_(grown)
        moved.mul_(2)
        return first, seen.clone(), y.clone(), grown, copy.deepcopy(y), moved

    check(program, *data((3, 3)), breaks=1)


def test_an_input_whose_shape_is_changed_in_place_is_given_to_a_break_as_it_was():
    def program(x):
        seen = eager_on_graph(lambda t: t.cumsum(0))(x)
        return seen, x.t_() * 2

    x = torch.arange(9.0).reshape(3, 3)
    seq, output = recorded(program, x)
    x.copy_(torch.randn(3, 3))
    seq.replay()
    assert same_bits(output, program(x.t().clone()))


def test_statistics_kept_by_a_layer_in_training_go_on():
    layer = torch.nn.BatchNorm1d(4)
    twin = copy.deepcopy(layer)
    x = torch.randn(3, 4)
    seq, y = recorded(layer, x)
    with torch.no_grad():
        twin(x)
        seq.replay()
        assert same_bits((y, *layer.buffers()), (twin(x), *twin.buffers()))


def test_gradients_computed_inside_are_recorded():
    weight = torch.nn.Parameter(torch.ones(3))

    def program(x):
        with torch.enable_grad():
            return torch.autograd.grad((x * weight).square().sum(), weight)[0]

    check(program, *data(3), breaks=0)


def test_a_sparse_matrix_may_be_part_of_a_segment():
    sparse = torch.eye(3).to_sparse()
    check(lambda x: torch.sparse.mm(sparse * 2, x) + 1, *data((3, 2)), breaks=0)


# -- weights and lifetimes


def test_a_weight_changed_in_place_is_seen_and_a_replaced_one_is_not():
    layer = torch.nn.Linear(3, 3)
    x = torch.randn(2, 3)
    seq, y = recorded(layer, x)
    with torch.no_grad():
        layer.weight.mul_(2)
        seq.replay()
        assert torch.equal(y, layer(x))
        before = y.clone()
        layer.weight.data = torch.zeros(3, 3)
        seq.replay()
    assert torch.equal(y, before), "as on CUDA, the recording still reads the memory it was recorded with"


def test_the_memory_of_a_weight_that_is_not_lent_is_kept():
    weight = torch.nn.Parameter(torch.ones(3))
    seq = sequence()
    with breakable_graph(seq):
        _ = weight * 2
    address = weight.data_ptr()
    weight.data = torch.zeros(3)
    assert address in [t.data_ptr() for t in seq.held.values()]
    lent = sequence()
    with record(lent, weights=[weight]):
        _ = weight * 2
    assert not lent.held


def churn():
    """What a run does to memory: freed blocks are handed out again and overwritten."""
    gc.collect()
    kept = [torch.full((n,), math.nan) for n in (1, 3, 4, 12, 16, 64, 256) for _ in range(200)]
    del kept


def test_what_is_read_lives_although_nobody_else_keeps_it():
    cache: dict[str, torch.Tensor] = {}
    double = eager_on_graph(lambda t, table: (t * 2 + table, table * 3))

    def program(x):
        table = cache.setdefault("rope", torch.arange(4.0) + 1)
        a, b = double(x + torch.full((4,), 2.0), table)
        return a + b + table

    x = torch.zeros(4)
    program(x)  # the cache fills before, as a warm-up would
    seq, y = recorded(program, x)
    cache.clear()
    for n in range(2):
        churn()
        x.fill_(n)
        seq.replay()
        assert torch.equal(y, program(x))
        cache.clear()


def test_an_input_that_the_caller_drops_is_still_read():
    inputs = [torch.ones(3)]
    seq, y = recorded(lambda: inputs[0] * 2)
    inputs.clear()
    churn()
    seq.replay()
    assert y.tolist() == [2, 2, 2]


def test_a_cache_that_the_recording_filled_is_filled_again_by_each_replay():
    cache = []

    def program(x):
        if not cache:
            cache.append(x * 2)
        return cache[0] + 1

    x = torch.ones(3)
    seq, y = recorded(program, x)
    x.fill_(5)
    seq.replay()
    assert cache[0].tolist() == [10] * 3 and y.tolist() == [11] * 3


def test_poison_shows_what_nothing_writes_before_it_is_read():
    seen = []
    leak = eager_on_graph(lambda: seen[0].clone() if seen else torch.zeros(2))

    def program(x):
        early = leak()
        seen.append(x * 2)
        return early + 1

    x = torch.ones(2)
    seq, y = recorded(program, x)
    seq.replay()
    assert y.isnan().all()


# -- failures


class Boom(Exception):
    pass


def failing(where):
    @eager_on_graph
    def brk(x):
        torch.rand(5)
        if where == "break":
            raise Boom
        return x + 1

    def program(x):
        y = brk(x + torch.rand(3))
        if where == "forward":
            raise Boom
        if where == "item":
            y.item()
        return y

    return program


@pytest.mark.parametrize("where", ["break", "forward", "item"])
def test_after_a_failure_everything_is_usable(where):
    seq = sequence()
    torch.manual_seed(3)
    torch.rand(2)
    rng = torch.get_rng_state()
    with pytest.raises((Boom, RuntimeError)), breakable_graph(seq):
        failing(where)(torch.ones(3))
    assert torch.equal(torch.get_rng_state(), rng)
    assert (seq.steps, seq.held, seq.segments, seq.breaks) == ([], {}, 0, 0)
    assert open_recorder() is None and gc.isenabled() and torch.is_grad_enabled()
    with pytest.raises(ReplayError, match="nothing is recorded"):
        seq.replay()
    x = torch.ones(3)
    with breakable_graph(seq):
        y = eager_on_graph(lambda t: t * 2)(x) + 1
    x.fill_(4)
    seq.replay()
    assert y.tolist() == [9, 9, 9]


def test_a_failure_that_the_forward_swallows_is_not_recorded():
    @eager_on_graph
    def brk(x):
        raise Boom

    def program(x):
        try:
            return brk(x)
        except Boom:
            return eager_on_graph(lambda t: t + 1)(x) * 2

    seq = sequence()
    x = torch.ones(3)
    with pytest.raises(CaptureError, match="Boom") as error, breakable_graph(seq):
        y = program(x)
    assert isinstance(error.value.__cause__, Boom) and not seq.steps
    assert y.tolist() == [4, 4, 4], "the forward itself ran to its end"


def test_one_whole_graph_does_not_take_the_path_of_a_forward_that_swallows_the_refusal():
    def program(x):
        try:
            scale = x.sum().item()
        except Exception:
            scale = 0
        return x * scale

    seq = sequence()
    with pytest.raises(CaptureError, match="whole graph"), record(seq, rules=Rules(whole=True)):
        program(torch.ones(3))
    assert not seq.steps


def test_one_whole_graph_records_what_has_no_break():
    seq = sequence()
    with record(seq, rules=Rules(whole=True)):
        y = torch.ones(3) * 2
    seq.replay()
    assert seq.segments == 1 and y.tolist() == [2, 2, 2]


def test_a_break_that_fails_at_replay_leaves_the_sequence_usable():
    state = {"fail": False}

    @eager_on_graph
    def brk(x):
        if state["fail"]:
            raise Boom
        return x * 2

    x = torch.ones(3)
    seq, y = recorded(lambda x: brk(x + 1) + 1, x)
    state["fail"] = True
    with pytest.raises(Boom):
        seq.replay()
    state["fail"] = False
    x.fill_(2)
    seq.replay()
    assert y.tolist() == [7, 7, 7] and not seq.pool.in_turn


def test_graphs_do_not_nest():
    outer, inner = sequence(), sequence()
    with pytest.raises(CaptureError, match="inside one another"), breakable_graph(outer), breakable_graph(inner):
        pass
    assert not outer.steps and not inner.steps


def test_a_sequence_is_recorded_once_until_it_is_reset():
    x = torch.ones(3)
    seq, y = recorded(lambda x: x + 1, x)
    with pytest.raises(CaptureError, match="reset"), breakable_graph(seq):
        pass
    x.fill_(2)
    seq.replay()
    assert y.tolist() == [3, 3, 3], "the recording survives the refusal"
    seq.reset()
    assert (seq.steps, seq.held, seq.pool.bytes()) == ([], {}, 0)
    with pytest.raises(ReplayError):
        seq.replay()
    with breakable_graph(seq):
        z = x * 5
    x.fill_(3)
    seq.replay()
    assert z.tolist() == [15, 15, 15] and y.tolist() == [3, 3, 3]


def test_sequences_of_one_pool_replay_in_any_order():
    x = torch.ones(3)
    a, y = recorded(lambda x: x + 1, x)
    b = GraphSequence(pool=a.pool)
    with breakable_graph(b):
        z = eager_on_graph(lambda t: t * 10)(y) + x
    for n in (2.0, 5.0):
        x.fill_(n)
        a.replay()
        b.replay()
        assert z.tolist() == [(n + 1) * 10 + n] * 3
    a.reset()
    b.replay()
    assert b.pool is a.pool and b.segments == 2


@pytest.mark.parametrize("pool", [0, "cpu", [], GraphSequence], ids=str)
def test_a_pool_of_the_wrong_type_is_refused(pool):
    with pytest.raises(OptionTypeError, match="accepted"):
        GraphSequence(pool=pool)


def test_a_device_that_is_none_of_ours_is_refused():
    for device in ("quantum", "meta", "cpu::1"):
        with pytest.raises(OptionError, match="accepted: cpu, cuda"):
            GraphSequence(device=device)
    with pytest.raises(OptionTypeError, match="the pool is on cpu"):
        GraphSequence(pool=new_pool("cpu"), device="cuda")
    with pytest.raises(OptionError, match="poison"):
        GraphSequence(pool=new_pool("cpu"), poison=True)
    assert GraphSequence(pool=new_pool("cpu", poison=True), device="cpu", poison=True).pool.poison


# -- a forward made replayable


class Net(torch.nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)
        self._forward = forward

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


def captured(forward, *args, **kwargs):
    module = Net(forward)
    pool = new_pool("cpu", poison=True)
    with torch.no_grad():
        call = Call.of(args, kwargs, torch.device("cpu"))
        return module, *capture(module, module.forward, call, pool, backend="breakable", breaks="auto")


def test_a_result_is_not_overwritten_by_the_next_replay():
    def forward(self, x):
        h = self.layer(x)
        return Box(h, [h, {"n": h.shape[0], "view": h[0]}])

    x = torch.randn(2, 3)
    module, recording, first = captured(forward, x)
    with torch.no_grad():
        kept = copy.deepcopy(first)
        second = recording.run(Call.of((torch.randn(2, 3),), {}, torch.device("cpu")))
        assert same_bits(first, kept) and not same_bits(second, first)
        assert same_bits(recording.run(Call.of((x,), {}, torch.device("cpu"))), module(x))
    assert type(second) is Box and second.item is second.rest[0] and second.rest[1]["n"] == 2


def test_a_result_that_cannot_be_made_anew_is_refused():
    class Cache:
        def __init__(self, value):
            self.value = value

    with pytest.raises(CaptureError, match="Cache"):
        captured(lambda self, x: Cache(self.layer(x)), torch.ones(2, 3))


@pytest.mark.parametrize("how", ["op", "view", "out", "break"])
def test_a_forward_that_writes_to_its_arguments_is_noticed(how):
    def forward(self, x):
        if how == "op":
            x.add_(1)
        elif how == "view":
            x[0].zero_()
        elif how == "out":
            torch.mul(x, 2, out=x)
        else:
            eager_on_graph(lambda t: t.add_(1))(x)
        return self.layer(x)

    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert captured(forward, torch.ones(2, 3))[1].wrote_inputs
    assert not captured(lambda self, x: eager_on_graph(lambda t: t + 1)(x), torch.ones(2, 3))[1].wrote_inputs


def test_a_capture_that_fails_leaves_the_pool_empty():
    pool = new_pool("cpu")
    module = Net(lambda self, x: self.layer(x).reshape(1000))
    with torch.no_grad(), pytest.raises(RuntimeError):
        call = Call.of((torch.ones(2, 3),), {}, torch.device("cpu"))
        capture(module, module.forward, call, pool, backend="breakable", breaks="auto")
    assert pool.bytes() == 0 and not pool.in_turn and not pool.segments


def test_a_higher_order_operator_is_recorded_as_the_ops_that_it_is_made_of():
    from torch._higher_order_ops.out_dtype import out_dtype

    a, b = (torch.randint(-5, 5, shape, dtype=torch.int8) for shape in ((32, 16), (16, 8)))
    seq = GraphSequence(device="cpu")
    with breakable_graph(seq):
        product = out_dtype(torch.ops.aten.mm.default, torch.int32, a, b) + 1
    a.fill_(3)
    seq.replay()
    assert seq.breaks == 0 and torch.equal(product, a.int() @ b.int() + 1)


def test_a_tensor_shows_no_values_while_recording():
    """Reading them for a `repr` would fail on a GPU, and a replay would not do it again."""
    x = torch.ones(2, 3)
    seq = GraphSequence(device="cpu")
    with breakable_graph(seq):
        y = x + 1
        assert repr(y) == "tensor(..., size=(2, 3), dtype=torch.float32, device='cpu')"
    assert repr(y) == repr(torch.full((2, 3), 2.0))
