"""Pictures, by transformers that join text and picture in one sequence and take position ids or picture shapes."""

import torch

from support.cases import BATCHED, EMBEDDED_OR_TWO, NO_GUIDANCE, TWO_CALLS, Cases, Draw, model

case = Cases()

TOKENS, TEXT, WIDTH = 16, 12, 32  # of a 4x4 picture, of the prompt, of a token of the prompt


def joined(draw: Draw, channels: int = 4, width: int = WIDTH) -> dict:
    """What FLUX's forward takes, and the many that are like it."""
    return {
        "hidden_states": draw(1, TOKENS, channels),
        "encoder_hidden_states": draw(1, TEXT, width),
        "img_ids": draw.grid(4, 4),
        "txt_ids": draw.grid(1, TEXT) * 0,
        "timestep": draw.unit(1),
    }


SMALL = {"patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2}
HEAD = {"attention_head_dim": 16, "axes_dims_rope": (4, 4, 8)}
POOLED = {"joint_attention_dim": WIDTH, "pooled_projection_dim": WIDTH}
FLUX = {**SMALL, **HEAD, **POOLED}


@case("FluxTransformer2DModel", cfg=EMBEDDED_OR_TWO, prompt="512", guidance_embeds=True, **FLUX)
def flux(draw):
    return {**joined(draw), "pooled_projections": draw(1, WIDTH), "guidance": draw.unit(1) * 5}


@case("FluxTransformer2DModel", "schnell, tuples", cfg=NO_GUIDANCE, prompt="256", **FLUX)
def schnell(draw):
    return {**joined(draw), "pooled_projections": draw(1, WIDTH), "return_dict": False}


FLUX2 = {**SMALL, "attention_head_dim": 16, "joint_attention_dim": WIDTH, "axes_dims_rope": (4, 4, 4, 4)}


@case("Flux2Transformer2DModel", cfg="embedded; Klein: two calls", prompt="512", **FLUX2)
def flux2(draw):
    ids = {"img_ids": draw.grid(4, 4, 4)[None], "txt_ids": draw.grid(1, TEXT, 4)[None]}
    return {**joined(draw), **ids, "guidance": draw.unit(1) * 5}


def flux2_cache(draw: Draw, tokens: int, layers: tuple[int, int] = (1, 1)):
    """Keys and values of the reference pictures' tokens, as the first step leaves them."""
    from diffusers.models.transformers.transformer_flux2 import Flux2KVCache

    cache = Flux2KVCache(*layers)
    cache.num_ref_tokens = tokens
    for layer in (*cache.double_block_caches, *cache.single_block_caches):
        layer.store(draw(1, tokens, 2, 16), draw(1, tokens, 2, 16))
    return cache


def _klein() -> torch.nn.Module:
    """With the attention processors that its pipeline sets."""
    from diffusers.models.transformers import transformer_flux2

    made = model("Flux2Transformer2DModel", **FLUX2)
    for block in made.transformer_blocks:
        block.attn.set_processor(transformer_flux2.Flux2KVAttnProcessor())
    for block in made.single_transformer_blocks:
        block.attn.set_processor(transformer_flux2.Flux2KVParallelSelfAttnProcessor())
    return made


@case("Flux2Transformer2DModel", "Klein's cache of reference pictures", cfg=NO_GUIDANCE, prompt="512", build=_klein)
def flux2_cached(draw):
    return {**flux2(draw), "kv_cache": flux2_cache(draw, 8), "kv_cache_mode": "cached"}


FLUX3 = {"in_channels": 4, "cond_in_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_attention_heads": 2}
FLUX3 |= {"attention_head_dim": 16, "joint_attention_dim": WIDTH, "timestep_channels": 16, "axes_dims_rope": (4, 4, 4, 4)}


@case("Flux3Transformer2DModel", cfg=TWO_CALLS, prompt="any", **FLUX3)
def flux3(draw):
    return {**joined(draw), "img_ids": draw.grid(4, 4, 4), "txt_ids": draw.grid(1, TEXT, 4)}


@case("Flux3Transformer2DModel", "reference picture, flow map", cfg=NO_GUIDANCE, prompt="any", flow_map=True, **FLUX3)
def flux3_edit(draw):
    reference = {"image_cond_hidden_states": draw(1, TOKENS, 4), "image_cond_ids": draw.grid(4, 4, 4) + 1}
    return {**flux3(draw), **reference, "target_timestep": draw.unit(1)}


CHROMA = {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1}


@case(
    "ChromaTransformer2DModel",
    changes="prompt length",
    cfg=TWO_CALLS,
    prompt="512, masked",
    **SMALL,
    **HEAD,
    **CHROMA,
    joint_attention_dim=WIDTH,
)
def chroma(draw):
    return {**joined(draw), "attention_mask": draw.mask([draw.pick(20, 25)], TEXT + TOKENS)}


BRIA = {**SMALL, "attention_head_dim": 8, "axes_dims_rope": (0, 4, 4), "pooled_projection_dim": None}


@case("BriaTransformer2DModel", cfg=BATCHED, prompt="128", **BRIA, joint_attention_dim=WIDTH)
def bria(draw):
    return joined(draw)


@case("BriaFiboTransformer2DModel", cfg=BATCHED, prompt="any", **BRIA, joint_attention_dim=WIDTH, text_encoder_dim=16)
def bria_fibo(draw):
    return {**joined(draw), "text_encoder_layers": draw.many([(1, TEXT, 16)] * 2)}


FIBO2 = {"in_channels": 4, "dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "cap_feat_dim": 16}
FIBO2 |= {"injection_layer_ids": (1,), "perceiver_num_layers": 1, "min_num_gist_tokens": 4, "max_num_gist_tokens": 8}
FIBO2 |= {"gist_step": 2, "gist_min_text_len": 4, "gist_max_text_len": 16, "axes_dims": (4, 6, 6), "axes_lens": (32, 8, 8)}


@case("BriaFibo2Transformer2DModel", cfg=TWO_CALLS, prompt="any, masked", changes="prompt length", **FIBO2)
def bria_fibo2(draw):
    mask = draw.mask([draw.pick(12, 5)], TEXT)
    text = draw(1, 2, TEXT, 16)
    return {
        "hidden_states": draw(1, 4, 8, 8),
        "timestep": draw.unit(1),
        "encoder_hidden_states": text,
        "encoder_attention_mask": mask,
    }


@case("LongCatImageTransformer2DModel", cfg=TWO_CALLS, prompt="512", **FLUX)
def longcat(draw):
    return {**joined(draw), "guidance": draw.unit(1)}


@case("OvisImageTransformer2DModel", cfg=TWO_CALLS, prompt="256", out_channels=4, **SMALL, **HEAD, joint_attention_dim=WIDTH)
def ovis(draw):
    return joined(draw)


# -- picture shapes instead of ids

QWEN = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
}
QWEN |= {"joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)}


def shaped(draw: Draw, batch: int = 1) -> dict:
    return {
        "hidden_states": draw(batch, TOKENS, 16),
        "encoder_hidden_states": draw(batch, 8, 16),
        "timestep": draw.unit(batch),
        "img_shapes": [[(1, 4, 4)]] * batch,
    }


@case("QwenImageTransformer2DModel", cfg=TWO_CALLS, prompt="any", **QWEN)
def qwen(draw):
    return shaped(draw)


@case("QwenImageTransformer2DModel", "mask given", cfg=TWO_CALLS, prompt="any, masked", changes="prompt lengths", **QWEN)
def qwen_masked(draw):
    return {**shaped(draw, 2), "encoder_hidden_states_mask": draw.mask(draw.pick([8, 5], [3, 8]), 8)}


@case("QwenImageTransformer2DModel", "edit", cfg=TWO_CALLS, prompt="any", zero_cond_t=True, **QWEN)
def qwen_edit(draw):
    two = {"img_shapes": [[(1, 4, 4), (1, 4, 4)]], "hidden_states": draw(1, 2 * TOKENS, 16)}
    return {**shaped(draw), **two}


NUCLEUS = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
}
NUCLEUS |= {"joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4), "capacity_factors": [8.0, 8.0]}


@case("NucleusMoEImageTransformer2DModel", "dense", cfg=TWO_CALLS, prompt="any, masked", moe_enabled=False, **NUCLEUS)
def nucleus(draw):
    return {**shaped(draw), "encoder_hidden_states_mask": draw.mask([8], 8, torch.long), "img_shapes": [(1, 4, 4)]}


MOE = {
    "moe_enabled": True,
    "dense_moe_strategy": "leave_first_three_and_last_block_dense",
    "num_experts": 4,
    "moe_intermediate_dim": 16,
}


@case(
    "NucleusMoEImageTransformer2DModel",
    cfg=TWO_CALLS,
    prompt="any, masked",
    **{**NUCLEUS, **MOE, "num_layers": 5, "capacity_factors": [2.0] * 5},
)
def nucleus_moe(draw):
    return {**shaped(draw), "encoder_hidden_states_mask": draw.mask([8], 8, torch.long), "img_shapes": [(1, 4, 4)]}


QWEN21 = {"in_channels": 16, "out_channels": 16, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
QWEN21 |= {"context_in_dim": 16, "axes_dims_rope": (4, 6, 6)}


@case("QwenImage21Transformer2DModel", cfg=TWO_CALLS, prompt="any", changes="prompt length", **QWEN21)
def qwen21(draw):
    # Six rows of prompt, then four slots of the picture to be made, each of four tokens.
    slots = torch.zeros(1, 10, dtype=torch.bool)
    slots[:, 6:] = True
    text = draw(1, 6, 16)
    mask = draw.mask([draw.pick(6, 4)], 6)
    return {
        "hidden_states": draw(1, TOKENS, 16),
        "encoder_hidden_states": text,
        "encoder_hidden_states_mask": mask,
        "timestep": draw.unit(1),
        "img_shapes": [[(1, 4, 4)]],
        "img_mask": slots.to(draw.device),
    }


@case("QwenImage21Transformer2DModel", "prompt cached", cfg=TWO_CALLS, prompt="any", changes="prompt length", **QWEN21)
def qwen21_cached(draw):
    from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache

    cache = QwenImage21KVCache(2)
    for layer in cache.layer_caches:
        layer.store(draw(1, 6, 2, 16), draw(1, 6, 2, 16))
    return {**qwen21(draw), "kv_cache": cache, "kv_cache_mode": "cached"}


IDEOGRAM = {"in_channels": 16, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4, "intermediate_size": 32}
IDEOGRAM |= {"adaln_dim": 16, "llm_features_dim": 24, "rope_theta": 10_000, "mrope_section": (2, 1, 1)}


@case("Ideogram4Transformer2DModel", cfg="two calls, of two transformers", prompt="any", **IDEOGRAM)
def ideogram(draw):
    from diffusers.models.transformers import transformer_ideogram4 as ideogram4

    text, picture = 4, 4
    positions = torch.zeros(1, text + picture, 3, dtype=torch.long)
    positions[:, :text] = torch.arange(text)[None, :, None]
    positions[:, text:] = ideogram4.IMAGE_POSITION_OFFSET + torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]])
    indicator = torch.tensor([[ideogram4.LLM_TOKEN_INDICATOR] * text + [ideogram4.OUTPUT_IMAGE_INDICATOR] * picture])
    return {
        "hidden_states": draw(1, text + picture, 16),
        "encoder_hidden_states": draw(1, text + picture, 24),
        "timestep": draw.unit(1),
        "position_ids": positions.to(draw.device),
        "segment_ids": draw.const([[1] * (text + picture)]),
        "indicator": indicator.to(draw.device),
    }


KREA = {"in_channels": 16, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
KREA |= {"intermediate_size": 32, "timestep_embed_dim": 8, "text_hidden_dim": 16, "num_text_layers": 3, "rope_theta": 1000.0}
KREA |= {"text_num_attention_heads": 2, "text_num_key_value_heads": 1, "text_intermediate_size": 16, "axes_dims_rope": (4, 2, 2)}
KREA |= {"num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1}


@case("Krea2Transformer2DModel", cfg=TWO_CALLS, prompt="any, masked", changes="prompt length", **KREA)
def krea2(draw):
    positions = torch.cat([draw.grid(1, 4) * 0, draw.grid(2, 2)])
    return {
        "hidden_states": draw(1, 4, 16),
        "encoder_hidden_states": draw(1, 4, 3, 16),
        "timestep": draw.unit(1),
        "position_ids": positions,
        "encoder_attention_mask": draw.mask([draw.pick(4, 3)], 4),
    }
