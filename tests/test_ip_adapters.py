"""IP-adapters: pictures as prompts. What the user sets on them is in the picture, whatever was recorded before."""

from __future__ import annotations

import functools

import pytest
import torch
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
from diffusers.models.embeddings import ImageProjection
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

import diffgraph
import pipelines
from diffgraph.values.compare import same_bits
from tests._toys import some_slow

EMBEDDING = 32  # of a picture


def projection(width):
    """Random weights for what turns a picture's embedding into tokens, under the names of a checkpoint."""
    weights = ImageProjection(cross_attention_dim=width, image_embed_dim=EMBEDDING, num_image_text_embeds=4).state_dict()
    return {name.replace("image_embeds", "proj"): value for name, value in weights.items()}


def numbered(processors, step):
    names = ("to_k_ip.0.weight", "to_v_ip.0.weight", "to_k_ip.0.bias", "to_v_ip.0.bias")
    weights = {}
    for i, processor in enumerate(processors):
        state = processor.state_dict()
        weights |= {f"{i * step + step - 1}.{name.replace('.0', '')}": state[name] for name in names if name in state}
    return weights


def sdxl_adapter(unet):
    """As diffusers numbers them: each block's cross-attention counts, its self-attention too."""
    channels = unet.config.block_out_channels
    width = unet.config.cross_attention_dim
    processors = []
    for name in unet.attn_processors:
        place, number = name.split(".")[:2]
        if name.endswith("attn1.processor"):
            continue
        hidden = {"down_blocks": channels, "up_blocks": channels[::-1]}.get(place, (channels[-1],) * 9)
        size = hidden[int(number)] if number.isdigit() else channels[-1]
        processors.append(IPAdapterAttnProcessor2_0(hidden_size=size, cross_attention_dim=width, scale=1.0))
    return {"image_proj": projection(width), "ip_adapter": numbered(processors, step=2)}


def flux_adapter(transformer):
    config = transformer.config
    width, hidden = config.joint_attention_dim, config.num_attention_heads * config.attention_head_dim
    names = [name for name in transformer.attn_processors if not name.startswith("single_")]
    processors = [FluxIPAdapterAttnProcessor(hidden_size=hidden, cross_attention_dim=width, scale=1.0) for _ in names]
    return {"image_proj": projection(width), "ip_adapter": numbered(processors, step=1)}


ADAPTERS = {"sdxl": ("unet", sdxl_adapter), "flux": ("transformer", flux_adapter)}


def with_adapter(pipe, family):
    name, make = ADAPTERS[family]
    denoiser = getattr(pipe, name)
    torch.manual_seed(3)
    denoiser._load_ip_adapter_weights([make(denoiser)])
    return pipe


@functools.cache
def embedding(seed):
    return torch.randn(1, 1, EMBEDDING, generator=torch.Generator().manual_seed(seed))


def prompted(pipe, picture):
    """Arguments that give a picture as prompt; where there is guidance, the other half has none."""
    if picture is None:
        return {}
    given, none = embedding(picture), torch.zeros_like(embedding(picture))
    if hasattr(pipe, "unet"):
        return {"ip_adapter_image_embeds": [torch.cat([none, given])]}
    return {"ip_adapter_image_embeds": [given], "negative_ip_adapter_image_embeds": [none]}


def draw(pipe, seed=0, picture=0):
    embeds = prompted(pipe, picture)
    generator = torch.Generator().manual_seed(seed)
    call = dict(height=64, width=64, num_inference_steps=2, generator=generator, output_type="latent", **embeds)
    return pipe("a red cat", **call)[0].clone()


def drawn(pipe, **kwargs):
    """A picture, found equal to eager's, and the reasons why some of its calls were eager."""
    before = diffgraph.report(pipe).reasons
    found = draw(pipe, **kwargs)
    after = diffgraph.report(pipe).reasons
    with diffgraph.paused(pipe):
        assert same_bits(found, draw(pipe, **kwargs))
    return found, {reason for reason, count in after.items() if count != before.get(reason, 0)}


@pytest.fixture(params=some_slow(ADAPTERS, "sdxl"))
def family(request):
    return request.param


@pytest.fixture
def pipe(family):
    pipe = with_adapter(pipelines.build(family, "tiny"), family)
    pipe.set_progress_bar_config(disable=True)
    pipe.set_ip_adapter_scale(0.3)
    diffgraph.accelerate_pipeline(pipe, poison=True)
    for _ in range(2):
        drawn(pipe)
    return pipe


def replays(pipe, **kwargs):
    """Whether all calls of a picture are replays."""
    before = diffgraph.report(pipe).captures
    _, reasons = drawn(pipe, **kwargs)
    return not reasons and diffgraph.report(pipe).captures == before


def test_another_picture_as_prompt_is_replayed_and_seen(pipe):
    (first, _), (second, reasons) = drawn(pipe, picture=0), drawn(pipe, picture=1)
    assert not reasons
    assert not same_bits(first, second)


def test_the_adapters_scale_is_followed(pipe):
    before, _ = drawn(pipe)
    pipe.set_ip_adapter_scale(0.9)
    after, reasons = drawn(pipe)
    assert reasons == {"adapter_changed"}
    assert not same_bits(before, after)
    assert [replays(pipe) for _ in range(2)][-1]
    pipe.set_ip_adapter_scale(0.0)
    none, reasons = drawn(pipe)
    assert reasons == {"adapter_changed"}
    assert not same_bits(none, after)


def test_the_adapter_is_gone_when_unloaded_and_back_when_loaded(pipe, family):
    with_it, _ = drawn(pipe)
    pipe.unload_ip_adapter()
    without, reasons = drawn(pipe, picture=None)
    assert reasons
    assert not same_bits(with_it, without)
    assert [replays(pipe, picture=None) for _ in range(3)][-1]
    with_adapter(pipe, family)
    pipe.set_ip_adapter_scale(0.3)
    again, reasons = drawn(pipe)
    assert reasons
    assert same_bits(again, with_it)
    assert [replays(pipe) for _ in range(3)][-1]


def test_another_adapters_weights_are_seen(pipe, family):
    before, _ = drawn(pipe)
    name, make = ADAPTERS[family]
    denoiser = getattr(pipe, name)
    torch.manual_seed(4)
    denoiser._load_ip_adapter_weights([make(denoiser)])
    pipe.set_ip_adapter_scale(0.3)
    after, reasons = drawn(pipe)
    assert reasons
    assert not same_bits(before, after)
    assert [replays(pipe) for _ in range(3)][-1]
