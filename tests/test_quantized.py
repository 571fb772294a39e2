"""Quantised weights: replays give the bits that eager gives with the same quantised weights, and what becomes of them is seen.

A weight of another kind than plain memory is made of other tensors; its module may keep still others (bitsandbytes). A recording
reads these, so each way in which they may be exchanged is a change here, and each kind of weight is put to all of them.
"""

from __future__ import annotations

import copy
import gc
import sys
import weakref

import bitsandbytes as bnb
import gguf
import pytest
import torch
import torchao.quantization as ao
from _toys import SETTLED, accelerated, call, calls, eager, flux, settle
from diffusers.models.model_loading_utils import load_gguf_checkpoint
from diffusers.quantizers.gguf.utils import _dequantize_gguf_and_restore_linear, _replace_with_gguf_linear
from optimum import quanto
from torch import nn

import diffgraph
from benchmarks._weights import add_lora, block_linears
from diffgraph.guards import Fingerprint
from diffgraph.values.compare import same_bits
from diffgraph.values.tensors import tensors_in

# -- each kind: quantise a denoiser's blocks in place

pytestmark = pytest.mark.slow


def by_torchao(config):
    def act(module):
        names = set(block_linears(module))
        ao.quantize_(module, config(), filter_fn=lambda layer, name: isinstance(layer, nn.Linear) and name in names)

    return act


def by_gguf(kind):
    """Through a real file and diffusers' own loader and layers."""

    def act(module, folder):
        path = folder / "weights.gguf"
        writer = gguf.GGUFWriter(path, "none")
        for name in block_linears(module):
            weight = module.get_submodule(name).weight.detach().float().numpy()
            writer.add_tensor(f"{name}.weight", gguf.quantize(weight, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        loaded = load_gguf_checkpoint(path)
        biases = {f"{name}.bias": module.get_submodule(name).bias for name in block_linears(module)}
        _replace_with_gguf_linear(module, torch.float32, loaded)
        for name, value in {**loaded, **{k: v for k, v in biases.items() if v is not None}}.items():
            owner, _, attribute = name.rpartition(".")
            module.get_submodule(owner)._parameters[attribute] = value

    return act


def by_bitsandbytes(make):
    def act(module):
        for name in block_linears(module):
            layer = module.get_submodule(name)
            made = make(layer.in_features, layer.out_features, bias=layer.bias is not None)
            made.load_state_dict(layer.state_dict())
            owner, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(owner), attribute, made.to("cpu"))  # which quantises

    return act


def four_bits(nested=False):
    return lambda *args, **kwargs: bnb.nn.Linear4bit(
        *args, **kwargs, compute_dtype=torch.float32, quant_type="nf4", compress_statistics=nested
    )


def eight_bits(threshold):
    return lambda *args, **kwargs: bnb.nn.Linear8bitLt(*args, **kwargs, has_fp16_weights=False, threshold=threshold)


def by_quanto(kind):
    def act(module):
        quanto.quantize(module, weights=kind, include=block_linears(module))
        quanto.freeze(module)

    return act


KINDS = {
    "torchao int8": by_torchao(ao.Int8WeightOnlyConfig),
    "torchao int8, activations too": by_torchao(ao.Int8DynamicActivationInt8WeightConfig),
    "torchao fp8": by_torchao(ao.Float8WeightOnlyConfig),
    "torchao int4": by_torchao(
        lambda: ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32)),
    ),
    "GGUF Q8_0": by_gguf(gguf.GGMLQuantizationType.Q8_0),
    "GGUF Q4_0": by_gguf(gguf.GGMLQuantizationType.Q4_0),
    "bitsandbytes 4 bits": by_bitsandbytes(four_bits()),
    "bitsandbytes 4 bits, nested": by_bitsandbytes(four_bits(nested=True)),
    "bitsandbytes 8 bits": by_bitsandbytes(eight_bits(threshold=0.0)),
    "quanto int8": by_quanto(quanto.qint8),
    "quanto fp8": by_quanto(quanto.qfloat8),
}
TORCHAO = [kind for kind in KINDS if kind.startswith("torchao")]


def wider_flux():
    """Of 64 channels in its blocks: a block of scales needs as many."""
    t, inputs = flux()
    torch.manual_seed(0)
    wider = type(t).from_config({**t.config, "num_attention_heads": 64 // t.config.attention_head_dim})
    return wider.eval(), inputs


@pytest.fixture
def quantized(tmp_path):
    """A denoiser with weights of a kind, and the arguments of a call."""

    def make(kind):
        t, inputs = wider_flux()
        folder = [tmp_path] if kind.startswith("GGUF") else []
        KINDS[kind](t, *folder)
        return t.eval(), inputs

    return make


def ready(made):
    """Accelerated, until it replays."""
    t, inputs = made
    accelerated(t)
    assert calls(t, 5, **inputs)[-2:] == SETTLED[-2:]
    return t, inputs, eager(t, **inputs)


def layer_of(t):
    return t.get_submodule(block_linears(t)[0]) if block_linears(t) else t.transformer_blocks[0].attn.to_q


def tensor_of(layer):
    """One of the tensors that hold the weight, by its owner and name: the scales, where there are any."""
    weight = layer.weight
    if isinstance(layer, bnb.nn.Linear8bitLt):
        if layer.state.SCB is None:
            layer(torch.ones(1, layer.in_features))  # the first call fills it
        return layer.state, "SCB"
    if isinstance(layer, bnb.nn.Linear4bit):
        return weight.quant_state, "absmax"
    if hasattr(weight, "__tensor_flatten__"):
        return weight, "_scale" if hasattr(weight, "_scale") else "scale"
    return layer, "weight"


def changed(tensor):
    """Other contents, whatever they are made of."""
    return tensor.flip(-1).clone() if tensor.dtype in (torch.uint8, torch.int8) else (tensor * 1.5).to(tensor.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_gives_what_the_quantised_denoiser_gives(kind, quantized):
    (t, inputs), (plain, _) = quantized(kind), quantized(kind)
    accelerated(t)
    routes = calls(t, 5, **inputs)
    assert routes[-2:] == ["replay", "replay"]
    if not kind.startswith("bitsandbytes"):  # which prepare their weights at the first call, so that the second warms up anew
        assert routes[:4] == SETTLED
    other = {**inputs, "hidden_states": inputs["hidden_states"] + 1}
    assert call(t, **other) == "replay"
    with torch.no_grad():
        assert same_bits(t(**other), plain(**other))
        assert not same_bits(plain(**inputs), wider_flux()[0](**inputs)), "nothing was quantised"


@pytest.mark.parametrize("kind", KINDS)
def test_a_recording_reads_what_a_weight_is_made_of_and_not_the_weight(kind, quantized):
    """As a graph on a GPU does: were an op of the weight's own class kept, the CPU would find at replay what a graph cannot."""
    t, _, _ = ready(quantized(kind))
    recordings = [entry.recording for entry in vars(t)["_compiled_call_impl"].table.entries.values() if entry.recording]
    read = [t for r in recordings for step in r.sequence.steps for op in getattr(step, "ops", ()) for t in tensors_in(op[1:3])]
    assert read
    assert not any(hasattr(tensor, "__tensor_flatten__") for tensor in read)


def test_an_op_inside_a_weights_own_that_the_host_waits_for_is_a_break():
    module = nn.Linear(4, 4, bias=False)
    module.weight = nn.Parameter(Halved(torch.eye(4), torch.tensor(2.0)), requires_grad=False)
    accelerated(module)
    x = torch.ones(2, 4)
    assert calls(module, 4, x) == SETTLED
    assert diffgraph.report(module).signatures[0].breaks > 0
    module.weight.factor.fill_(3.0)
    assert call(module, x) == "capture", "recorded with the other value"
    with torch.no_grad():
        assert same_bits(module(x), nn.functional.linear(x, torch.eye(4) * (1 / 3.0)))


class Halved(torch.Tensor):
    """A weight that reads its factor on the host."""

    @staticmethod
    def __new__(cls, inner, factor):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner, factor):
        self.inner, self.factor = inner, factor

    def __tensor_flatten__(self):
        return ["inner", "factor"], None

    @staticmethod
    def __tensor_unflatten__(tensors, _, size, stride):
        return Halved(tensors["inner"], tensors["factor"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Halved(args[0].inner, args[0].factor)
        args = torch.utils._pytree.tree_map_only(Halved, lambda t: t.inner * (1 / t.factor.item()), args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_scales_changed_in_place_are_read_by_the_same_recording(kind, quantized):
    t, inputs, before = ready(quantized(kind))
    owner, name = tensor_of(layer_of(t))
    with torch.no_grad():
        getattr(owner, name).data.copy_(changed(getattr(owner, name).data))
    assert calls(t, 2, **inputs) == ["replay", "replay"]
    assert not same_bits(before, eager(t, **inputs)), "the change has no effect to see"


@pytest.mark.parametrize("kind", KINDS)
def test_other_memory_under_the_scales_is_seen(kind, quantized):
    t, inputs, before = ready(quantized(kind))
    owner, name = tensor_of(layer_of(t))
    tensor = getattr(owner, name)
    tensor.data = changed(tensor.data)
    assert call(t, **inputs) in ("weights_changed", "attributes_changed")
    assert not same_bits(before, eager(t, **inputs)), "the change has no effect to see"
    assert calls(t, 3, **inputs)[-1] == "replay"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("GGUF")])
def test_other_scales_are_seen(kind, quantized):
    t, inputs, before = ready(quantized(kind))
    owner, name = tensor_of(layer_of(t))
    with torch.no_grad():
        setattr(owner, name, changed(getattr(owner, name)))
    assert call(t, **inputs) in ("weights_changed", "attributes_changed")
    assert not same_bits(before, eager(t, **inputs)), "the change has no effect to see"
    assert calls(t, 3, **inputs)[-1] == "replay"


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_were_moved_are_read_where_they_are(kind, quantized):
    """`Module.to` goes the same way, and this machine has no other device to go to."""
    t, inputs, before = ready(quantized(kind))
    layer = layer_of(t)
    owner, name = tensor_of(layer)
    memory = getattr(owner, name).data_ptr()
    if kind.startswith(("bitsandbytes", "quanto")):  # which move what they are made of by `to(device)` alone
        setattr(owner, name, getattr(owner, name).clone())
    else:
        t._apply(lambda tensor: tensor.clone())
    owner, name = tensor_of(layer)
    assert getattr(owner, name).data_ptr() != memory
    assert call(t, **inputs) in ("weights_changed", "attributes_changed")
    assert same_bits(before, eager(t, **inputs))
    assert calls(t, 3, **inputs)[-1] == "replay"


@pytest.mark.parametrize("kind", KINDS)
def test_another_quantised_weight_in_its_place_is_seen(kind, quantized):
    t, inputs, before = ready(quantized(kind))
    other, _ = quantized(kind)
    layer, stranger = layer_of(t), layer_of(other)
    with torch.no_grad():
        owner, name = tensor_of(stranger)
        getattr(owner, name).data.copy_(changed(getattr(owner, name).data))
    if isinstance(layer, bnb.nn.Linear8bitLt):
        layer.state = stranger.state
    layer.weight = stranger.weight
    assert call(t, **inputs) in ("weights_changed", "attributes_changed")
    assert not same_bits(before, eager(t, **inputs)), "the change has no effect to see"
    assert calls(t, 3, **inputs)[-1] == "replay"


@pytest.mark.parametrize("kind", TORCHAO)
def test_weights_quantised_after_recording_and_back_are_seen(kind):
    t, inputs = wider_flux()
    accelerated(t)
    settle(t, **inputs)
    before = eager(t, **inputs)
    names = block_linears(t)
    KINDS[kind](t)
    assert call(t, **inputs) == "weights_changed"
    assert not same_bits(before, eager(t, **inputs))
    assert calls(t, 3, **inputs)[-1] == "replay"
    for name in names:
        layer = t.get_submodule(name)
        layer.weight = nn.Parameter(layer.weight.dequantize(), requires_grad=False)
    assert call(t, **inputs) == "weights_changed"
    assert calls(t, 3, **inputs)[-1] == "replay"


def test_dequantised_gguf_weights_are_seen(quantized):
    t, inputs, _ = ready(quantized("GGUF Q8_0"))
    _dequantize_gguf_and_restore_linear(t)
    assert call(t, **inputs) == "weights_changed"
    assert calls(t, 3, **inputs)[-1] == "replay"


def test_a_gguf_weight_of_another_type_is_seen(quantized):
    """Its bytes stay where they are; another type reads them otherwise."""
    t, _ = quantized("GGUF Q8_0")
    fingerprint = Fingerprint(t)
    weight = layer_of(t).weight
    weight.quant_type = gguf.GGMLQuantizationType.Q8_0  # as it was
    assert fingerprint.change() is None
    weight.quant_type = gguf.GGMLQuantizationType.Q4_0
    assert fingerprint.change() == "weights_changed"


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_keeps_no_memory_of_replaced_quantised_weights(kind, quantized):
    """(The CPU's tape does, as it keeps all that it reads.)"""
    t, inputs = quantized(kind)
    with torch.no_grad():
        t(**inputs)
    layer = layer_of(t)
    weight = layer.weight
    parts = [getattr(weight, name) for name in ("qdata", "_data") if hasattr(weight, name)] or [weight]
    memory = weakref.ref(parts.pop())
    fingerprint = Fingerprint(t)
    assert fingerprint.change() is None
    del weight
    layer.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    if hasattr(layer, "state"):
        layer.state = type(layer.state)()
    gc.collect()
    assert memory() is None
    assert fingerprint.change() == "weights_changed"


@pytest.mark.parametrize("kind", ["torchao int8", "GGUF Q8_0", "bitsandbytes 8 bits", "bitsandbytes 4 bits"])
def test_a_lora_on_quantised_weights_is_followed(kind, quantized):
    t, inputs = quantized(kind)
    torch.manual_seed(1)
    add_lora(t, "a", rank=4)
    accelerated(t)
    assert calls(t, 5, **inputs)[-2:] == ["replay", "replay"]
    before = eager(t, **inputs)
    t.set_adapters(["a"], [0.3])
    assert call(t, **inputs) == "adapter_changed"
    assert not same_bits(before, eager(t, **inputs))
    assert calls(t, 3, **inputs)[-1] == "replay"


def test_bitsandbytes_8_bits_with_outliers_is_never_recorded(quantized):
    """diffusers' default threshold: each forward keeps its outliers' columns in the layer's state."""
    t, inputs = wider_flux()
    by_bitsandbytes(eight_bits(threshold=6.0))(t)
    accelerated(t)
    assert calls(t, 4, **inputs) == ["side_effects"] * 4
    assert diffgraph.report(t).captures == 0


def test_weights_cast_layer_by_layer_are_never_recorded():
    t, inputs = flux()
    t.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    accelerated(t)
    assert calls(t, 3, **inputs) == ["layerwise_casting"] * 3
    assert diffgraph.report(t).captures == 0


# -- what a look costs: Python calls, which do not depend on the machine


def python_calls(act):
    count = 0

    def profile(frame, event, _):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def looks(module):
    fingerprint = Fingerprint(module)
    assert fingerprint.change() is None
    assert fingerprint.change() is None
    return python_calls(fingerprint.change)


def test_a_look_at_many_quantised_weights_is_no_python_call_for_each():
    few, many = (nn.Sequential(*[nn.Linear(16, 16, dtype=torch.bfloat16) for _ in range(n)]) for n in (4, 40))
    for module in (few, many):
        ao.quantize_(module, ao.Int8WeightOnlyConfig())
    assert looks(many) < looks(few) + 9 < 100


def test_a_look_at_many_loras_is_no_python_call_for_each():
    counts = []
    for blocks in (1, 4):
        t, _ = flux()
        t.transformer_blocks = nn.ModuleList([copy.deepcopy(t.transformer_blocks[0]) for _ in range(blocks)])
        add_lora(t, "a", rank=2)
        counts.append(looks(t))
    assert counts[1] < counts[0] + 9 < 100


@pytest.mark.parametrize("restored", [False, True])
def test_what_was_compiled_lets_quantised_weights_move(restored):
    """`module.to` swaps them, which it cannot while anybody holds one weakly."""
    t, inputs = flux()
    by_torchao(ao.Int8WeightOnlyConfig)(t)
    accelerated(t, compile_blocks={"backend": "eager"})
    with torch.no_grad():
        for _ in range(4):
            t(**inputs)
        assert diffgraph.report(t).signatures[0].uncompiled is None
        if restored:
            diffgraph.restore_pipeline(t)
        gc.collect()  # Dynamo's own cycles
        t.to("cpu")
        t(**inputs)
