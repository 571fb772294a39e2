"""Containers come apart and together again, and their specs say whether they are alike."""

import dataclasses
import sys
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux2 import Flux2AttnProcessor, Flux2KVCache
from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_outputs import BaseModelOutputWithPooling

from diffgraph.values.tensors import tensors_within
from diffgraph.values.tree import TooManyLeaves, flatten, map_leaves, unflatten

Point = namedtuple("Point", "x y")


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


@dataclasses.dataclass
class Derived:
    value: Any
    total: Any = dataclasses.field(init=False)

    def __post_init__(self):
        self.total = ("total of", self.value)


@dataclasses.dataclass(slots=True, kw_only=True)
class Slotted:
    value: Any


leaves = st.none() | st.integers() | st.text(max_size=2) | st.booleans() | st.just(torch.Size([2, 3]))


def containers(children):
    lists = st.lists(children, max_size=3)
    dicts = st.dictionaries(st.text(max_size=2) | st.integers(), children, max_size=3)
    return (
        lists
        | lists.map(tuple)
        | dicts
        | dicts.map(OrderedDict)
        | st.builds(Point, children, children)
        | st.builds(Pair, children, children)
        | st.builds(Frozen, children)
        | st.builds(Derived, children)
        | st.builds(lambda value: Slotted(value=value), children)
    )


trees = st.recursive(leaves, containers, max_leaves=12)


def same(a, b):
    """Equality that also asks for the same types, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a is b
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and not isinstance(a, torch.Size):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def blank(tree):
    return map_leaves(lambda leaf: 0, tree)


@given(trees)
def test_what_is_taken_apart_comes_together_again(tree):
    found, spec = flatten(tree)
    assert same(unflatten(spec, found), tree)


@given(trees, trees)
def test_specs_are_equal_exactly_when_the_containers_are(a, b):
    same_containers = same(blank(a), blank(b))
    assert (flatten(a)[1] == flatten(b)[1]) == same_containers
    assert not same_containers or hash(flatten(a)[1]) == hash(flatten(b)[1])


@given(trees)
def test_containers_are_made_anew(tree):
    made = map_leaves(lambda leaf: leaf, tree)
    if isinstance(tree, (list, dict, Pair, Derived)):
        assert made is not tree


@pytest.mark.parametrize(
    "output",
    [
        UNet2DConditionOutput(sample=torch.ones(2)),
        BaseModelOutputWithPooling(last_hidden_state=torch.ones(2), pooler_output=None),
        BaseModelOutputWithPooling(hidden_states=(torch.ones(1), torch.zeros(1))),
    ],
    ids=["diffusers", "transformers", "transformers without its first field"],
)
def test_a_library_output_keeps_its_keys_attributes_and_nones(output):
    made = map_leaves(lambda leaf: leaf, output)
    assert type(made) is type(output) and list(made.keys()) == list(output.keys())
    for field in dataclasses.fields(output):
        assert same(getattr(made, field.name), getattr(output, field.name))
        if getattr(output, field.name) is not None:
            assert made[field.name] is getattr(made, field.name)
    assert all(map(same, made.to_tuple(), output.to_tuple()))


def test_a_new_leaf_reaches_the_keys_of_a_library_output_too():
    made = map_leaves(lambda t: t + 1, UNet2DConditionOutput(sample=torch.ones(2)))
    assert made["sample"] is made.sample is made[0]
    assert made.sample.tolist() == [2, 2]


def test_a_dataclass_that_computes_its_fields_is_not_computed_twice():
    @dataclasses.dataclass
    class Scaled:
        value: Any

        def __post_init__(self):
            self.value = self.value * 2

    assert map_leaves(lambda leaf: leaf, Scaled(torch.ones(2))).value.tolist() == [2, 2]


def test_a_field_that_was_never_set_stays_so():
    @dataclasses.dataclass
    class Lazy:
        value: Any
        cache: Any = dataclasses.field(init=False)

    made = map_leaves(lambda leaf: leaf, Lazy(3))
    assert made.value == 3 and not hasattr(made, "cache")


def test_what_torch_returns_in_its_own_tuples_comes_apart():
    largest = torch.max(torch.tensor([[1.0, 5.0], [7.0, 2.0]]), dim=1)
    found, spec = flatten(largest)
    assert [type(leaf) for leaf in found] == [torch.Tensor, torch.Tensor]
    made = unflatten(spec, found)
    assert type(made) is type(largest) and made.indices is largest.indices


def test_a_class_is_a_leaf():
    assert flatten(Pair)[0] == [Pair]


def nested(lists, items):
    return [list(range(items)) for _ in range(lists)]


def test_the_limit_counts_leaves_and_containers():
    tree = {"a": [1, 2], "b": 3}  # a dict, a list, three leaves
    assert flatten(tree, 5)[0] == [1, 2, 3]
    with pytest.raises(TooManyLeaves):
        flatten(tree, 4)


@pytest.mark.parametrize(
    "huge",
    [
        list(range(10**5)),
        dict.fromkeys(range(10**5)),
        nested(100, 1000),
        [[[] for _ in range(1000)] for _ in range(100)],
    ],
    ids=["list", "dict", "nested", "empty lists"],
)
def test_a_huge_object_is_given_up_early(huge):
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with pytest.raises(TooManyLeaves):
            flatten(huge, 2048)
    finally:
        sys.setprofile(before)
    assert calls < 10_000


# -- diffusers' plain objects, where they are asked for


def filled_cache():
    cache = Flux2KVCache(1, 1)
    cache.get_double(0).store(torch.ones(2), torch.zeros(2))
    cache.num_ref_tokens = 2
    return cache


def test_a_cache_of_diffusers_is_a_container_where_objects_are_asked_for():
    cache = filled_cache()
    found, spec = flatten([cache], objects=True)
    assert [leaf for leaf in found if isinstance(leaf, torch.Tensor)] == [*cache.get_double(0).get()]
    (made,) = unflatten(spec, found)
    assert type(made) is Flux2KVCache and made is not cache and made.num_ref_tokens == 2
    assert made.get_double(0).get() == cache.get_double(0).get()
    assert flatten([cache])[0] == [cache]


def test_caches_that_differ_in_what_they_hold_have_other_specs_or_leaves():
    empty = flatten(Flux2KVCache(1, 1), objects=True)
    assert flatten(Flux2KVCache(2, 1), objects=True)[1] != empty[1]
    assert flatten(filled_cache(), objects=True)[0] != empty[0]


def test_what_does_more_than_hold_attributes_is_a_leaf():
    class Thing:
        pass

    for leaf in (Thing(), Flux2AttnProcessor(), torch.Generator(), torch.nn.Linear(1, 1), Flux2KVCache):
        assert flatten(leaf, objects=True)[0] == [leaf]


def test_tensors_within_an_object_are_found_through_attributes_containers_and_closures():
    class Mask:
        def __init__(self, blocks, edge):
            self.blocks = {"full": [blocks]}
            self.rule = lambda q, k: q + edge > k
            self.module = torch.nn.Linear(1, 1)  # not its own

    def empty():
        return later  # noqa: F821

    blocks, edge = torch.zeros(2), torch.zeros(3)
    found = list(tensors_within((Mask(blocks, edge), empty, "text", None)))
    assert {id(t) for t in found} == {id(blocks), id(edge)}
