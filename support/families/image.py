"""Pictures, by transformers that patch latents themselves."""

import torch

from support.cases import BATCHED, NO_GUIDANCE, TWO_CALLS, Cases, Draw

case = Cases()


def latents(draw: Draw, batch: int = 2, channels: int = 4, size: int = 8, text: tuple[int, int] = (8, 8)) -> dict:
    return {
        "hidden_states": draw(batch, channels, size, size),
        "encoder_hidden_states": draw(batch, *text),
        "timestep": draw.steps(batch),
    }


def sizes(draw: Draw, batch: int, dtype: torch.dtype | None = None) -> dict:
    size = draw.const([[64, 64]] * batch, dtype)
    return {"original_size": size, "target_size": size.clone(), "crop_coords": size * 0}


SAMPLE = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 1}
ADA = {"attention_bias": True, "activation_fn": "gelu-approximate", "norm_elementwise_affine": False, "norm_eps": 1e-6}


@case(
    "DiTTransformer2DModel",
    cfg=BATCHED,
    prompt="class labels",
    **SAMPLE,
    num_attention_heads=2,
    attention_head_dim=4,
    out_channels=8,
    num_embeds_ada_norm=8,
)
def dit(draw):
    return {"hidden_states": draw(2, 4, 8, 8), "timestep": draw.steps(2), "class_labels": draw.ints(8, 2)}


PIXART = {**SAMPLE, **ADA, "attention_head_dim": 4, "num_attention_heads": 2, "cross_attention_dim": 8, "out_channels": 8}
PIXART |= {"num_embeds_ada_norm": 8, "norm_type": "ada_norm_single", "use_additional_conditions": False, "caption_channels": 8}


@case("PixArtTransformer2DModel", cfg=BATCHED, prompt="300, masked", changes="prompt lengths", **PIXART)
def pixart(draw):
    mask = draw.mask(draw.pick([8, 3], [2, 6]), 8)
    return {**latents(draw), "encoder_attention_mask": mask, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


@case(
    "PixArtTransformer2DModel",
    "resolution given",
    cfg=BATCHED,
    prompt="120, masked",
    **{**PIXART, "use_additional_conditions": True, "attention_head_dim": 24, "cross_attention_dim": 48},
)
def pixart_alpha(draw):
    added = {"resolution": draw.const([[64.0, 64.0]] * 2), "aspect_ratio": draw.const([[1.0]] * 2)}
    return {**latents(draw), "added_cond_kwargs": added}


SANA = {"patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 1, "attention_head_dim": 4, "num_attention_heads": 2}
SANA |= {"num_cross_attention_heads": 2, "cross_attention_head_dim": 4, "cross_attention_dim": 8, "caption_channels": 8}


@case("SanaTransformer2DModel", cfg=BATCHED, prompt="300, masked", changes="prompt lengths", **SANA, sample_size=8)
def sana(draw):
    return {**latents(draw), "encoder_attention_mask": draw.mask(draw.pick([8, 3], [2, 6]), 8)}


@case(
    "SanaTransformer2DModel",
    "Sprint",
    cfg="embedded",
    prompt="300",
    **SANA,
    sample_size=8,
    guidance_embeds=True,
    timestep_scale=1000.0,
    qk_norm="rms_norm_across_heads",
)
def sana_sprint(draw):
    return {**latents(draw), "timestep": draw.unit(2), "guidance": draw.unit(2)}


SD3 = {"sample_size": 8, "patch_size": 1, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 4}
SD3 |= {
    "caption_projection_dim": 32,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 16,
    "out_channels": 4,
    "pos_embed_max_size": 8,
}


def sd3_inputs(draw):
    return {**latents(draw, text=(10, 32)), "pooled_projections": draw(2, 16)}


@case("SD3Transformer2DModel", cfg=BATCHED, prompt="333", **SD3)
def sd3(draw):
    return sd3_inputs(draw)


@case(
    "SD3Transformer2DModel",
    "3.5, skipped layer",
    cfg=BATCHED,
    prompt="333",
    **SD3,
    dual_attention_layers=(0,),
    qk_norm="rms_norm",
)
def sd35(draw):
    return {**sd3_inputs(draw), "skip_layers": [1]}


@case(
    "AuraFlowTransformer2DModel",
    cfg=BATCHED,
    prompt="256",
    sample_size=8,
    patch_size=2,
    in_channels=4,
    num_mmdit_layers=1,
    num_single_dit_layers=1,
    attention_head_dim=8,
    num_attention_heads=4,
    caption_projection_dim=32,
    joint_attention_dim=32,
    out_channels=4,
    pos_embed_max_size=16,
)
def aura_flow(draw):
    return {**latents(draw, text=(10, 32)), "timestep": draw.unit(2)}


COGVIEW = {
    "patch_size": 2,
    "in_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 4,
    "num_attention_heads": 2,
    "out_channels": 4,
}
COGVIEW |= {"text_embed_dim": 8, "time_embed_dim": 8, "condition_dim": 4}


@case("CogView3PlusTransformer2DModel", cfg=BATCHED, prompt="224", **COGVIEW, pos_embed_max_size=8, sample_size=8)
def cogview3(draw):
    return {**latents(draw), **sizes(draw, 2)}


@case("CogView4Transformer2DModel", cfg=TWO_CALLS, prompt="any, in steps of 16", **COGVIEW)
def cogview4(draw):
    return {**latents(draw), **sizes(draw, 2)}


@case("CogView4Transformer2DModel", "mask given", cfg=TWO_CALLS, prompt="any, masked", changes="prompt lengths", **COGVIEW)
def cogview4_masked(draw):
    return {**latents(draw), **sizes(draw, 2), "attention_mask": draw.mask(draw.pick([8, 5], [3, 8]), 8, torch.long)}


GLM = {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2}
GLM |= {"text_embed_dim": 32, "time_embed_dim": 16, "condition_dim": 8, "prior_vq_quantizer_codebook_size": 64}


@case("GlmImageTransformer2DModel", cfg=TWO_CALLS, prompt="any", changes="whether the prior tokens are dropped", **GLM)
def glm_image(draw):
    dropped = draw.pick(False, True)
    prior = {"prior_token_id": draw.ints(64, 1, 16), "prior_token_drop": draw.const([[dropped] * 16])}
    size = {k: v for k, v in sizes(draw, 1, draw.dtype).items() if k != "original_size"}
    return {**latents(draw, batch=1, text=(12, 32)), **prior, **size}


@case(
    "GlmImageTransformer2DModel",
    "edit: cached picture",
    cfg=TWO_CALLS,
    prompt="any",
    changes="whether the prior tokens are dropped",
    **GLM,
)
def glm_image_edit(draw):
    from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

    caches = GlmImageKVCache(1)
    for cache in caches.caches:
        cache.k_caches, cache.v_caches = [draw(1, 16, 2, 8)], [draw(1, 16, 2, 8)]
    caches.set_mode("read")
    return {**glm_image(draw), "kv_caches": caches}


HIDREAM = {"patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8}
HIDREAM |= {"num_attention_heads": 4, "caption_channels": [8, 4], "text_emb_dim": 8, "axes_dims_rope": (4, 2, 2)}
HIDREAM |= {
    "num_routed_experts": 4,
    "num_activated_experts": 2,
    "max_resolution": (16, 16),
    "llama_layers": (0, 1),
    "force_inference_output": True,
}


@case(
    "HiDreamImageTransformer2DModel",
    cfg=BATCHED,
    prompt="128",
    note="Its experts read on the host how many tokens they get, another number at each call: they run eagerly",
    **HIDREAM,
)
def hidream(draw):
    return {
        "hidden_states": draw(1, 4, 16, 16),
        "encoder_hidden_states_t5": draw(1, 8, 8),
        "encoder_hidden_states_llama3": draw(2, 1, 8, 4),
        "pooled_embeds": draw(1, 8),
        "timesteps": draw.steps(1),
    }


HUNYUAN_DIT = {**SAMPLE, "attention_head_dim": 8, "num_attention_heads": 2, "cross_attention_dim": 8, "cross_attention_dim_t5": 8}
HUNYUAN_DIT |= {
    "pooled_projection_dim": 4,
    "hidden_size": 16,
    "text_len": 4,
    "text_len_t5": 4,
    "activation_fn": "gelu-approximate",
}


def hunyuan_dit_inputs(draw: Draw) -> dict:
    return {
        **latents(draw, text=(4, 8)),
        "timestep": draw.unit(2) * 1000,
        "text_embedding_mask": draw.mask([4, 3], 4, torch.long),
        "encoder_hidden_states_t5": draw(2, 4, 8),
        "text_embedding_mask_t5": draw.mask([4, 2], 4, torch.long),
        "image_meta_size": draw.const([[1024.0, 1024, 16, 16, 0, 0]] * 2, draw.dtype),
        "style": draw.const([0, 0]),
        "image_rotary_emb": (draw(16, 8), draw(16, 8)),
    }


@case("HunyuanDiT2DModel", cfg=BATCHED, prompt="77 and 256, masked", **HUNYUAN_DIT)
def hunyuan_dit(draw):
    return hunyuan_dit_inputs(draw)


HUNYUAN_IMAGE = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1}
HUNYUAN_IMAGE |= {
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "text_embed_dim": 16,
    "text_embed_2_dim": 8,
    "rope_axes_dim": (4, 4),
}


@case(
    "HunyuanImageTransformer2DModel",
    cfg="two calls; distilled: embedded",
    prompt="1000 and 128, masked",
    changes="prompt lengths",
    **HUNYUAN_IMAGE,
    guidance_embeds=True,
)
def hunyuan_image(draw):
    return {
        **latents(draw, batch=1, text=(8, 16)),
        "timestep": draw.unit(1) * 1000,
        "encoder_attention_mask": draw.mask([draw.pick(6, 4)], 8),
        "encoder_hidden_states_2": draw(1, 4, 8),
        "encoder_attention_mask_2": draw.mask([draw.pick(3, 0)], 4),
        "guidance": draw.unit(1) * 1000,
    }


@case(
    "LuminaNextDiT2DModel",
    cfg=BATCHED,
    prompt="256, masked",
    sample_size=8,
    patch_size=2,
    in_channels=4,
    hidden_size=24,
    num_layers=2,
    num_attention_heads=3,
    num_kv_heads=1,
    multiple_of=16,
    cross_attention_dim=32,
    learn_sigma=False,
)
def lumina(draw):
    from diffusers.models.embeddings import get_2d_rotary_pos_embed_lumina

    rotary = get_2d_rotary_pos_embed_lumina(8, 384, 384).to(draw.device)
    return {
        **latents(draw, text=(8, 32)),
        "timestep": draw.unit(2),
        "encoder_mask": draw.mask([8, 5], 8),
        "image_rotary_emb": rotary,
        "cross_attention_kwargs": {},
    }


LUMINA2 = {"sample_size": 8, "patch_size": 2, "in_channels": 4, "hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1}
LUMINA2 |= {
    "num_attention_heads": 3,
    "num_kv_heads": 1,
    "multiple_of": 2,
    "axes_dim_rope": (4, 2, 2),
    "axes_lens": (64, 32, 32),
    "cap_feat_dim": 32,
}


@case("Lumina2Transformer2DModel", cfg=TWO_CALLS, prompt="256, masked", changes="prompt length", **LUMINA2)
def lumina2(draw):
    mask = draw.mask([draw.pick(8, 5)], 8)
    return {**latents(draw, batch=1, text=(8, 32)), "timestep": draw.unit(1), "encoder_attention_mask": mask}


OMNIGEN = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 32, "num_layers": 2}
OMNIGEN |= {"pad_token_id": 0, "vocab_size": 100, "in_channels": 4, "time_step_dim": 4}
OMNIGEN |= {"rope_scaling": {"long_factor": [1, 2], "short_factor": [1, 2]}}


@case(
    "OmniGenTransformer2DModel",
    cfg="one batched call",
    prompt="any",
    changes="position ids",
    note="Its rotary embedding assigns its buffer `inv_freq` anew at each call, which a replay would not do",
    **OMNIGEN,
)
def omnigen(draw):
    text, picture = 24, 16
    length = text + 1 + picture
    positions = torch.arange(length).clamp(max=draw.pick(length, length - 2)).repeat(2, 1)
    return {
        "hidden_states": draw(2, 4, 8, 8),
        "timestep": draw.unit(2),
        "input_ids": draw.ints(10, 2, text),
        "input_img_latents": [draw(1, 4, 8, 8)],
        "input_image_sizes": {0: [[0, picture]]},
        "attention_mask": torch.ones(2, length, length).to(draw.device),
        "position_ids": positions.to(draw.device),
    }


PRX = {
    "in_channels": 4,
    "patch_size": 2,
    "context_in_dim": 16,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 2,
    "axes_dim": [8, 8],
}


@case("PRXTransformer2DModel", cfg=BATCHED, prompt="256, masked", **PRX)
def prx(draw):
    return {**latents(draw, text=(8, 16)), "timestep": draw.unit(2), "attention_mask": draw.mask([8, 4], 8)}


ERNIE = {
    "hidden_size": 16,
    "num_attention_heads": 1,
    "num_layers": 1,
    "ffn_hidden_size": 16,
    "in_channels": 16,
    "out_channels": 16,
}
ERNIE |= {"patch_size": 1, "text_in_dim": 16, "rope_theta": 256, "rope_axes_dim": (8, 4, 4), "qk_layernorm": True}


@case("ErnieImageTransformer2DModel", cfg=BATCHED, prompt="any", changes="prompt lengths", **ERNIE)
def ernie(draw):
    lengths = draw.const(draw.pick([8, 5], [8, 3]))
    return {"hidden_states": draw(2, 16, 4, 4), "timestep": draw.steps(2), "text_bth": draw(2, 8, 16), "text_lens": lengths}


Z_IMAGE = {"in_channels": 16, "dim": 16, "n_layers": 1, "n_refiner_layers": 1, "n_heads": 1, "n_kv_heads": 1, "cap_feat_dim": 16}
Z_IMAGE |= {"axes_dims": [8, 4, 4], "axes_lens": [256, 32, 32]}


def z_image_inputs(draw: Draw, lengths: tuple[int, ...] = (20,)) -> dict:
    return {
        "x": [draw(16, 1, 8, 8) for _ in lengths],
        "t": draw.unit(len(lengths)),
        "cap_feats": draw.many([(n, 16) for n in lengths]),
    }


@case("ZImageTransformer2DModel", cfg="one batched call", prompt="any, in steps of 32", **Z_IMAGE)
def z_image(draw):
    return z_image_inputs(draw, (20, 40))


JOY = {"patch_size": [1, 2, 2], "in_channels": 16, "hidden_size": 32, "num_attention_heads": 2, "text_dim": 16, "num_layers": 2}
JOY |= {"rope_dim_list": [4, 6, 6], "theta": 256}


@case("JoyImageEditTransformer3DModel", cfg=TWO_CALLS, prompt="any", **JOY)
def joy_image(draw):
    return {"hidden_states": draw(1, 16, 1, 4, 4), "encoder_hidden_states": draw(1, 12, 16), "timestep": draw.unit(1)}


@case("JoyImageEditPlusTransformer3DModel", cfg="one batched call", prompt="any", **JOY)
def joy_image_plus(draw):
    patches = {"hidden_states": draw(1, 2, 16, 1, 2, 2), "shape_list": [[(1, 1, 1), (1, 1, 1)]]}
    return {**patches, "encoder_hidden_states": draw(1, 12, 16), "timestep": draw.unit(1)}


@case(
    "PriorTransformer",
    cfg=BATCHED,
    prompt="77",
    num_attention_heads=2,
    attention_head_dim=4,
    num_layers=2,
    embedding_dim=8,
    num_embeddings=7,
    additional_embeddings=4,
)
def prior(draw):
    return {
        "hidden_states": draw(2, 8),
        "timestep": draw.steps(2),
        "proj_embedding": draw(2, 8),
        "encoder_hidden_states": draw(2, 7, 8),
    }


@case(
    "Transformer2DModel",
    cfg=BATCHED,
    prompt="77",
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=8,
    cross_attention_dim=8,
    norm_num_groups=4,
)
def transformer_2d(draw):
    return {"hidden_states": draw(2, 8, 8, 8), "encoder_hidden_states": draw(2, 6, 8)}


@case(
    "DreamLiteTransformer2DModel",
    cfg=BATCHED,
    prompt="any",
    num_attention_heads=2,
    attention_head_dim=8,
    in_channels=16,
    cross_attention_dim=8,
    norm_num_groups=4,
)
def dreamlite(draw):
    return {"hidden_states": draw(2, 16, 8, 8), "encoder_hidden_states": draw(2, 6, 8)}


@case(
    "TransformerTemporalModel",
    cfg=BATCHED,
    prompt="77",
    num_attention_heads=2,
    attention_head_dim=4,
    in_channels=4,
    norm_num_groups=1,
)
def temporal(draw):
    return {"hidden_states": draw(4, 4, 8, 8), "num_frames": 2}


@case(
    "MiniMaxMusic3RVQDepthDecoder",
    cfg=NO_GUIDANCE,
    hidden_size=32,
    num_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    audio_vocab_size=16,
    num_codebooks=4,
)
def rvq_decoder(draw):
    return {"inputs_embeds": draw(1, 4, 32)}
