"""ControlNets, and what they feed into transformers: block samples as lists, tuples and dicts."""

from __future__ import annotations

from functools import partial

import torch

from support.cases import BATCHED, EMBEDDED_OR_TWO, TWO_CALLS, Cases, Draw, classes, model, randomized
from support.families.image import HUNYUAN_DIT, SANA, SD3, Z_IMAGE, hunyuan_dit_inputs, latents, sd3_inputs, z_image_inputs
from support.families.image_streams import FLUX, QWEN, TOKENS, flux, schnell, shaped
from support.families.unets import MOTION, UNET, clip, sample
from support.families.video import COSMOS, resizing

case = Cases()

NET = {key: value for key, value in UNET.items() if key not in ("up_block_types", "out_channels", "sample_size")}
NET |= {"conditioning_embedding_out_channels": (4, 8)}


def picture(draw: Draw, batch: int = 2, size: int = 16) -> torch.Tensor:
    """Two times the latent: the tiny ControlNets' embedding halves once."""
    return draw.unit(batch, 3, size, size)


def several(cls: str, of: str, **config):
    """A ControlNet of two ControlNets."""
    return lambda: classes()[cls]([model(of, seed=i, **config) for i in range(2)]).eval()


@case("ControlNetModel", cfg=BATCHED, prompt="77", **NET)
def controlnet(draw):
    return {**sample(draw), "controlnet_cond": picture(draw)}


@case("ControlNetModel", "guess mode, tuples", cfg=BATCHED, prompt="77", **NET)
def controlnet_guess(draw):
    return {**controlnet(draw), "guess_mode": True, "conditioning_scale": 0.5, "return_dict": False}


@case("MultiControlNetModel", cfg=BATCHED, prompt="77", build=several("MultiControlNetModel", "ControlNetModel", **NET))
def multi_controlnet(draw):
    pictures = {"controlnet_cond": [picture(draw), picture(draw)], "conditioning_scale": [1.0, 0.5]}
    return {**sample(draw), **pictures, "return_dict": False}


UNION = {**NET, "num_control_type": 3, "num_trans_channel": 4, "num_trans_head": 2, "num_proj_channel": 4}
UNION |= {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 64}


def union_inputs(draw: Draw) -> dict:
    return {**sample(draw), "added_cond_kwargs": {"text_embeds": draw(2, 16), "time_ids": draw.unit(2, 6) * 64}}


@case("ControlNetUnionModel", cfg=BATCHED, prompt="77", **UNION)
def controlnet_union(draw):
    types = {"control_type": draw.const([[1.0, 0.0, 1.0]] * 2), "control_type_idx": [0, 2]}
    return {**union_inputs(draw), "controlnet_cond": [picture(draw), picture(draw)], **types}


@case(
    "MultiControlNetUnionModel",
    cfg=BATCHED,
    prompt="77",
    build=several("MultiControlNetUnionModel", "ControlNetUnionModel", **UNION),
)
def multi_controlnet_union(draw):
    types = {"control_type": [draw.const([[1.0, 0.0, 0.0]] * 2)] * 2, "control_type_idx": [[0], [0]]}
    pictures = {"controlnet_cond": [[picture(draw)], [picture(draw)]], "conditioning_scale": [[1.0], [0.5]]}
    return {**union_inputs(draw), **types, **pictures, "return_dict": False}


XS = {"ctrl_block_out_channels": (2, 4), "ctrl_num_attention_heads": 2, "ctrl_max_norm_num_groups": 2}
XS |= {"ctrl_conditioning_embedding_out_channels": (2, 2), "num_attention_heads": 2, "sample_size": 8, "upcast_attention": False}
XS |= {k: UNET[k] for k in ("down_block_types", "up_block_types", "block_out_channels", "cross_attention_dim", "norm_num_groups")}


@case("UNetControlNetXSModel", cfg=BATCHED, prompt="77", **XS)
def controlnet_xs(draw):
    return {**sample(draw), "controlnet_cond": picture(draw), "conditioning_scale": 0.5}


def _xs_of_two() -> torch.nn.Module:
    """As its pipelines do: a U-Net and the adapter joined into one model."""
    unet = model("UNet2DConditionModel", **{**UNET, "layers_per_block": 2, "attention_head_dim": 2})
    adapter = classes()["ControlNetXSAdapter"].from_unet(unet, size_ratio=0.5, conditioning_embedding_out_channels=(2, 2))
    return randomized(classes()["UNetControlNetXSModel"].from_unet(unet, adapter))


@case(
    "ControlNetXSAdapter",
    "in a UNetControlNetXSModel",
    cfg=BATCHED,
    prompt="77",
    note="Its own forward only raises",
    build=_xs_of_two,
)
def controlnet_xs_adapter(draw):
    return controlnet_xs(draw)


SPARSE = {**{k: v for k, v in MOTION.items() if k not in ("up_block_types", "sample_size")}, "conditioning_channels": 4}


@case("SparseControlNetModel", cfg=BATCHED, prompt="77", **SPARSE)
def sparse_controlnet(draw):
    control = {
        "controlnet_cond": draw(2, 4, 2, 8, 8),
        "conditioning_mask": draw.mask([1, 1], 2, draw.dtype).reshape(2, 1, 2, 1, 1).repeat(1, 1, 1, 8, 8),
    }
    return {**clip(draw), **control}


@case("FluxControlNetModel", cfg=EMBEDDED_OR_TWO, prompt="512", **FLUX)
def flux_controlnet(draw):
    return {**schnell(draw), "controlnet_cond": draw(1, TOKENS, 4)}


@case("FluxControlNetModel", "union: a mode", cfg=EMBEDDED_OR_TWO, prompt="512", **FLUX, num_mode=3)
def flux_controlnet_union(draw):
    return {**flux_controlnet(draw), "controlnet_mode": draw.const([[1]])}


@case(
    "FluxMultiControlNetModel",
    cfg=EMBEDDED_OR_TWO,
    prompt="512",
    build=several("FluxMultiControlNetModel", "FluxControlNetModel", **FLUX, num_mode=3),
)
def flux_multi_controlnet(draw):
    nets = {
        "controlnet_cond": draw.many([(1, TOKENS, 4)] * 2),
        "controlnet_mode": [draw.const([0]), draw.const([2])],
        "conditioning_scale": [1.0, 0.5],
    }
    return {**schnell(draw), **nets}


CONTROL_FLUX = {**FLUX, "num_layers": 2, "num_single_layers": 2, "guidance_embeds": True}


@case("FluxTransformer2DModel", "ControlNet block samples as lists", cfg=EMBEDDED_OR_TWO, prompt="512", **CONTROL_FLUX)
def flux_controlled(draw):
    blocks = draw.many([(1, TOKENS, 32)] * 2)
    return {**flux(draw), "controlnet_block_samples": blocks, "controlnet_single_block_samples": draw.many([(1, TOKENS, 32)])}


@case("FluxTransformer2DModel", "ControlNet block samples as tuples", cfg=EMBEDDED_OR_TWO, prompt="512", **CONTROL_FLUX)
def flux_controlled_tuples(draw):
    return {**flux(draw), "controlnet_block_samples": tuple(draw.many([(1, TOKENS, 32)] * 2))}


def _flux_with_ip_adapter() -> torch.nn.Module:
    made = model("FluxTransformer2DModel", **FLUX, guidance_embeds=True)
    draw, width = Draw(7), FLUX["joint_attention_dim"]
    layers = {f"0.to_{kind}_ip.{part}": draw(*size) for kind in "kv" for part, size in (("weight", (32, width)), ("bias", (32,)))}
    projection = {"proj.weight": draw(4 * width, width), "proj.bias": draw(4 * width)}
    norm = {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
    made._load_ip_adapter_weights([{"image_proj": {**projection, **norm}, "ip_adapter": layers}])
    return made.eval()


@case("FluxTransformer2DModel", "IP-Adapter", cfg=EMBEDDED_OR_TWO, prompt="512", build=_flux_with_ip_adapter)
def flux_ip_adapter(draw):
    return {**flux(draw), "joint_attention_kwargs": {"ip_adapter_image_embeds": [draw(1, 1, 32)]}}


@case("SD3ControlNetModel", cfg=BATCHED, prompt="333", **SD3)
def sd3_controlnet(draw):
    return {**sd3_inputs(draw), "controlnet_cond": draw(2, 4, 8, 8)}


@case("SD3MultiControlNetModel", cfg=BATCHED, prompt="333", build=several("SD3MultiControlNetModel", "SD3ControlNetModel", **SD3))
def sd3_multi_controlnet(draw):
    return {**sd3_inputs(draw), "controlnet_cond": draw.many([(2, 4, 8, 8)] * 2), "conditioning_scale": [1.0, 0.5]}


@case("SD3Transformer2DModel", "ControlNet block samples as a list", cfg=BATCHED, prompt="333", **SD3)
def sd3_controlled(draw):
    return {**sd3_inputs(draw), "block_controlnet_hidden_states": draw.many([(2, 64, 32)])}


@case("SD3Transformer2DModel", "ControlNet block samples as a tuple", cfg=BATCHED, prompt="333", **SD3)
def sd3_controlled_tuple(draw):
    return {**sd3_inputs(draw), "block_controlnet_hidden_states": tuple(draw.many([(2, 64, 32)]))}


@case("QwenImageControlNetModel", cfg=TWO_CALLS, prompt="any", **QWEN)
def qwen_controlnet(draw):
    return {**shaped(draw), "controlnet_cond": draw(1, TOKENS, 16)}


@case(
    "QwenImageMultiControlNetModel",
    cfg=TWO_CALLS,
    prompt="any",
    build=lambda: classes()["QwenImageMultiControlNetModel"]([model("QwenImageControlNetModel", **QWEN)]).eval(),
)
def qwen_multi_controlnet(draw):
    # One ControlNet, given several pictures.
    return {
        **shaped(draw),
        "controlnet_cond": draw.many([(1, TOKENS, 16)] * 2),
        "conditioning_scale": [1.0, 0.5],
        "return_dict": False,
    }


@case("QwenImageTransformer2DModel", "ControlNet block samples as a list", cfg=TWO_CALLS, prompt="any", **QWEN)
def qwen_controlled(draw):
    return {**shaped(draw), "controlnet_block_samples": draw.many([(1, TOKENS, 32)] * 2)}


@case("SanaControlNetModel", cfg=BATCHED, prompt="300, masked", **SANA, sample_size=8)
def sana_controlnet(draw):
    return {**latents(draw), "controlnet_cond": draw(2, 4, 8, 8)}


@case(
    "SanaTransformer2DModel",
    "ControlNet block samples as a tuple",
    cfg=BATCHED,
    prompt="300, masked",
    **{**SANA, "num_layers": 2},
    sample_size=8,
)
def sana_controlled(draw):
    return {**latents(draw), "controlnet_block_samples": tuple(draw.many([(2, 64, 8)]))}


HUNYUAN_NET = {**{k: v for k, v in HUNYUAN_DIT.items() if k != "num_layers"}, "transformer_num_layers": 6}


@case("HunyuanDiT2DControlNetModel", cfg=BATCHED, prompt="77 and 256, masked", **HUNYUAN_NET)
def hunyuan_controlnet(draw):
    return {**hunyuan_dit_inputs(draw), "controlnet_cond": draw(2, 4, 8, 8)}


@case(
    "HunyuanDiT2DMultiControlNetModel",
    cfg=BATCHED,
    prompt="77 and 256, masked",
    build=several("HunyuanDiT2DMultiControlNetModel", "HunyuanDiT2DControlNetModel", **HUNYUAN_NET),
)
def hunyuan_multi_controlnet(draw):
    return {**hunyuan_dit_inputs(draw), "controlnet_cond": draw.many([(2, 4, 8, 8)] * 2), "conditioning_scale": [1.0, 0.5]}


COSMOS_NET = {"n_controlnet_blocks": 2, "in_channels": 6, "latent_channels": 6, "model_channels": 24, "max_size": (4, 32, 32)}
COSMOS_NET |= {
    k: COSMOS[k] for k in ("num_attention_heads", "attention_head_dim", "mlp_ratio", "text_embed_dim", "adaln_lora_dim")
}
COSMOS_NET |= {"img_context_dim_in": 8, "img_context_dim_out": 24}


@case(
    "CosmosControlNetModel",
    cfg=TWO_CALLS,
    prompt="512",
    build=partial(resizing, "controlnet_cosmos", "CosmosControlNetModel", **COSMOS_NET),
)
def cosmos_controlnet(draw):
    return {
        "controls_latents": draw(1, 4, 1, 8, 8),
        "latents": draw(1, 4, 1, 8, 8),
        "timestep": draw.unit(1),
        "encoder_hidden_states": (draw(1, 6, 16), draw(1, 4, 8)),
        "condition_mask": draw(1, 1, 1, 8, 8) * 0 + 1,
        "padding_mask": draw(1, 1, 8, 8) * 0,
    }


Z_NET = {"control_layers_places": [0], "control_refiner_layers_places": [0], "control_in_dim": 16, "n_refiner_layers": 1}
Z_NET |= {"dim": 16, "n_heads": 1, "n_kv_heads": 1, "add_control_noise_refiner": "control_noise_refiner"}


def _z_controlnet() -> torch.nn.Module:
    """It borrows embedders and refiners of the transformer that it controls."""
    cls = classes()["ZImageControlNetModel"]
    return cls.from_transformer(model("ZImageControlNetModel", **Z_NET), model("ZImageTransformer2DModel", **Z_IMAGE)).eval()


@case("ZImageControlNetModel", cfg=BATCHED, prompt="any, in steps of 32", build=_z_controlnet)
def z_image_controlnet(draw):
    return {**z_image_inputs(draw), "control_context": [draw(16, 1, 8, 8)], "conditioning_scale": 0.75}


@case("ZImageTransformer2DModel", "ControlNet block samples as a dict", cfg=BATCHED, prompt="any, in steps of 32", **Z_IMAGE)
def z_image_controlled(draw):
    return {**z_image_inputs(draw), "controlnet_block_samples": {0: draw(1, 64, 16)}}
