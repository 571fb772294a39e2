"""Equal calls have equal signatures, and whatever a recording depends on changes the signature."""

import math
from enum import Enum, IntEnum

import numpy as np
import pytest
import torch
from _toys import SETTLED, accelerated, call, settle
from diffusers.models.attention_dispatch import attention_backend
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffgraph.reasons import Refused
from diffgraph.recording.signature import MAX_LEAVES, Call
from diffgraph.recording.static_inputs import StaticInputs

CPU = torch.device("cpu")


def signature(*args, **kwargs):
    return Call.of(args, kwargs, CPU).signature


def assert_differ(*signatures):
    assert len(set(signatures)) == len(signatures)


def refusal(*args, device=CPU, **kwargs):
    with pytest.raises(Refused) as refused:
        Call.of(args, kwargs, device)
    return refused.value


class Mode(Enum):
    A = 1
    B = 2


class Level(IntEnum):
    ONE = 1


shapes = st.lists(st.integers(0, 4), max_size=3)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
tensors = st.tuples(shapes, dtypes)
constants = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=2),
    st.sampled_from([Mode.A, Mode.B, Level.ONE, torch.float16, CPU, torch.Size([1]), torch.preserve_format, int]),
)
values = st.recursive(
    st.one_of(tensors.map(lambda t: ("tensor", *t)), constants.map(lambda c: ("constant", c))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)


def built(value):
    """Tensors of their own at each call, holding anything."""
    if isinstance(value, list):
        return [built(v) for v in value]
    if isinstance(value, dict):
        return {k: built(v) for k, v in value.items()}
    kind, *rest = value
    return torch.empty(rest[0], dtype=rest[1]) if kind == "tensor" else rest[0]


@given(values)
def test_calls_that_differ_in_data_alone_are_one_signature(value):
    assert signature(built(value), x=built(value)) == signature(built(value), x=built(value))
    assert hash(signature(built(value))) == hash(signature(built(value)))


def key(value):
    """What a value is, told apart by its text, which no comparison of numbers blurs."""
    if isinstance(value, list):
        return [key(v) for v in value]
    if isinstance(value, dict):
        return {k: key(v) for k, v in value.items()}
    return repr((value, type(value[-1])))


leaf = values.filter(lambda value: not isinstance(value, (list, dict)))
few = st.sampled_from(
    [("constant", c) for c in (None, False, 0, 0.0, -0.0, 0j, "", b"", math.nan)]
    + [("tensor", shape, dtype) for shape in ([], [0], [1], [1, 1]) for dtype in (torch.int8, torch.bool)]
    + [[], {}]
)


@given(*[few | leaf | values] * 2, st.booleans())
def test_any_other_structure_shape_dtype_or_constant_is_another_signature(a, b, nested):
    a, b = ([{"x": a}, a], [{"x": a}, b]) if nested else (a, b)
    assert (signature(built(a)) == signature(built(b))) == (repr(key(a)) == repr(key(b)))


def test_constants_that_compare_equal_are_told_apart():
    assert_differ(*map(signature, [1, True, 1.0, 1 + 0j, Level.ONE, np.float64(1)]))
    assert_differ(signature(0.0), signature(-0.0))
    assert_differ(signature(0j), signature(complex(0.0, -0.0)), signature(complex(-0.0, 0.0)))
    assert_differ(signature(Mode.A), signature(Mode.B))
    assert_differ(signature([1]), signature((1,)), signature({"a": 1}))


def test_nan_equals_itself():
    assert signature(math.nan) == signature(float("nan"))
    assert signature(complex(math.nan, 1)) == signature(complex(float("nan"), 1))


def test_the_name_of_an_argument_counts_and_so_does_the_order_of_names():
    """A forward may take them all by `**`."""
    x = torch.ones(2)
    assert_differ(signature(x), signature(a=x), signature(b=x))
    assert_differ(signature(a=x, b=1), signature(b=1, a=x))


def test_a_tensor_given_twice_is_not_two_tensors():
    x, y = torch.ones(2), torch.ones(2)
    assert_differ(signature(x, x, y), signature(x, y, y), signature(x, y, x), signature(x, y, torch.ones(2)))
    assert signature(x, x) == signature(y, y)


def test_a_parameter_is_told_from_a_tensor():
    """A forward may ask."""
    assert_differ(signature(torch.nn.Parameter(torch.ones(2), requires_grad=False)), signature(torch.ones(2)))


# -- layout


def test_an_expanded_vector_is_like_a_contiguous_one_and_an_expanded_matrix_is_not():
    assert signature(torch.ones(1).expand(4)) == signature(torch.ones(4))
    assert_differ(signature(torch.ones(4, 1).expand(4, 3)), signature(torch.ones(4, 3)))


def test_a_slice_is_neither_like_a_contiguous_one_nor_like_any_other_slice():
    assert_differ(*map(signature, [torch.ones(4, 6)[:, ::2], torch.ones(4, 9)[:, ::3], torch.ones(4, 3)]))
    assert signature(torch.ones(4, 6)[:, ::2]) == signature(torch.zeros(4, 6)[:, 1::2])


@pytest.mark.parametrize("windows", [torch.ones(8).unfold(0, 4, 2), torch.ones(9).as_strided((3, 3), (1, 2))], ids=[4, 3])
def test_a_tensor_that_overlaps_itself_is_refused(windows):
    assert "overlap" in str(refusal(windows))


LAYOUTS = {
    "a slice": lambda **of: torch.randn(2, 8, 64, **of)[..., :32],
    "every other row": lambda **of: torch.randn(2, 16, 32, **of)[:, ::2],
    "expanded": lambda **of: torch.randn(1, 8, 32, **of).expand(2, 8, 32),
    "expanded along two": lambda **of: torch.randn(1, 1, 32, **of).expand(2, 8, 32),
    "transposed": lambda **of: torch.randn(2, 32, 8, **of).transpose(1, 2),
}


@pytest.mark.parametrize("made", LAYOUTS.values(), ids=LAYOUTS)
def test_a_static_input_lies_in_memory_as_the_callers_does(made):
    inputs = StaticInputs(Call.of((made(),), {}, CPU))
    live = made()
    inputs.copy_from([live])
    assert inputs.tensors[0].stride() == live.stride()
    assert torch.equal(inputs.tensors[0], live)


@pytest.mark.parametrize("made", LAYOUTS.values(), ids=LAYOUTS)
def test_an_input_of_any_layout_gives_the_bits_of_eager_at_every_call(made):
    """In bfloat16 `linear` rounds once for a contiguous input, and twice for another."""
    torch.manual_seed(0)
    module = accelerated(torch.nn.Linear(32, 64).to(torch.bfloat16))
    plain = torch.randn(2, 8, 32, dtype=torch.bfloat16)
    settle(module, plain)
    assert [call(module, made(dtype=torch.bfloat16)) for _ in range(4)] == SETTLED
    assert call(module, plain) == "replay"


def test_a_dense_layout_is_kept():
    image = torch.ones(2, 3, 4, 5)
    last = image.to(memory_format=torch.channels_last)
    assert_differ(signature(image), signature(last), signature(image.transpose(2, 3).contiguous().transpose(2, 3)))
    static = StaticInputs(Call.of((last,), {}, CPU)).tensors[0]
    assert static.is_contiguous(memory_format=torch.channels_last) and static.stride() == last.stride()


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_a_static_input_has_the_values_and_any_dense_strides(order, shape):
    live = torch.arange(math.prod(shape)).reshape(shape).permute(order)
    static = StaticInputs(Call.of((live,), {}, CPU)).tensors[0]
    assert torch.equal(static, live) and static.data_ptr() != live.data_ptr()
    assert live.is_contiguous() or static.stride() == live.stride()


def test_static_inputs_share_what_the_call_shares_and_nothing_with_it():
    x, y, items = torch.ones(2), torch.zeros(2), [1]
    static = StaticInputs(Call.of((x, [y, items]), {"again": x}, CPU))
    (a, (b, copied)), kwargs = static.call()
    assert a is kwargs["again"] and a is not x and len(static.tensors) == 2
    copied.append(2)
    assert items == [1] and static.call()[0][1][1] == [1]
    static.copy_from([torch.full((2,), 5.0), torch.full((2,), 6.0), 1, torch.full((2,), 5.0)])
    assert (a.tolist(), b.tolist()) == ([5, 5], [6, 6])


def test_static_inputs_made_in_inference_mode_can_be_written_outside():
    with torch.inference_mode():
        static = StaticInputs(Call.of((torch.ones(2),), {}, CPU))
    static.copy_from([torch.zeros(2)])
    assert static.tensors[0].tolist() == [0, 0]


# -- what is around the call


def test_modes_around_the_call_change_it():
    x = torch.ones(2)
    found = [signature(x)]
    with torch.inference_mode():
        assert signature(x) == found[0]  # it changes no kernel, and start-up does not know in which one will be called
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            found.append(signature(x))
    with attention_backend("_native_math"):
        found.append(signature(x))
    with sdpa_kernel(SDPBackend.MATH):
        found.append(signature(x))
    try:
        for warn_only in (False, True):  # the latter leaves some kernels as they are
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
            found.append(signature(x))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    try:
        found.append(signature(x))
    finally:
        torch.set_default_dtype(torch.float32)
    assert_differ(*found)
    assert signature(x) == found[0]


def test_float32_precision_changes_it():
    before = signature()
    torch.set_float32_matmul_precision("medium")
    try:
        assert signature() != before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert signature() == before


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="torch before 2.9 has no such switches")
def test_float32_precision_set_one_operator_at_a_time_changes_it():
    before = signature()
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    were = matmul.fp32_precision, conv.fp32_precision
    try:
        matmul.fp32_precision, conv.fp32_precision = "tf32", "ieee"
        one = signature()
        matmul.fp32_precision = "ieee"
        assert_differ(before, one, signature())
    finally:
        matmul.fp32_precision, conv.fp32_precision = were
    assert signature() == before


# -- what is refused


def test_what_cannot_be_compared_is_refused_by_name():
    class Thing:
        pass

    for given_, named in [
        (Thing(), "Thing"),
        (torch.Generator(), "Generator"),
        (lambda: 0, "function"),
        (iter([]), "list_iterator"),
        ({1, 2}, "set"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.ones(2).as_subclass(type("Sub", (torch.Tensor,), {})), "Sub"),
    ]:
        refused = refusal(given_)
        assert refused.reason == "unsupported_input" and named in str(refused)


def test_a_tensor_elsewhere_is_refused():
    assert refusal(torch.ones(2, device="meta")).reason == "multi_device"
    here = refusal(torch.ones(2), device=torch.device("meta"))
    assert here.reason == "cpu_input" and "cpu" in str(here)


def holding_itself():
    items = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    "huge", [list(range(10**5)), [[]] * MAX_LEAVES, holding_itself()], ids=["long", "empty lists", "endless"]
)
def test_a_huge_argument_is_refused(huge):
    assert refusal(extra=huge).reason == "unsupported_input"


# -- what is made of it


def test_numbers_can_be_left_out():
    x = torch.ones(2)
    assert signature(x, 3, s=0.5).without_numbers() == signature(x, 4, s=0.25).without_numbers()
    assert signature(x, 3).without_numbers() != signature(x, 3.0).without_numbers()
    assert signature(x, True).without_numbers() != signature(x, False).without_numbers()
    assert signature(x, "a").without_numbers() != signature(x, "b").without_numbers()


def test_the_label_names_arguments_and_their_shapes():
    x = torch.ones(2, 3)
    label = signature(x, [x, None], scale=torch.tensor(1.0), mode="m").label(("sample",))
    assert label == "sample=[2x3] args[1][0]=[2x3] scale=[scalar] mode=m"
