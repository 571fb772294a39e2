"""Videos, by transformers; with sound where they make it."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

from support.cases import BATCHED, EMBEDDED_OR_TWO, NO_GUIDANCE, TWO_CALLS, Cases, Draw, model

case = Cases()


def clip(draw: Draw, channels: int = 4, frames: int = 2, size: int = 8, text: tuple[int, int] = (12, 16), batch: int = 1) -> dict:
    return {
        "hidden_states": draw(batch, channels, frames, size, size),
        "encoder_hidden_states": draw(batch, *text),
        "timestep": draw.steps(batch),
    }


def frames_first(inputs: dict) -> dict:
    return {**inputs, "hidden_states": inputs["hidden_states"].transpose(1, 2).contiguous()}


# -- Wan and what grew from it

WAN = {"patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4}
WAN |= {"text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": True, "rope_max_seq_len": 32}
NORMED = {**WAN, "qk_norm": "rms_norm_across_heads"}


@case("WanTransformer3DModel", cfg=TWO_CALLS, prompt="512", **NORMED)
def wan(draw):
    return clip(draw)


@case(
    "WanTransformer3DModel", "first frame given (CLIP)", cfg=TWO_CALLS, prompt="512", **NORMED, image_dim=8, added_kv_proj_dim=24
)
def wan_image(draw):
    return {**clip(draw), "encoder_hidden_states_image": draw(1, 4, 8)}


@case("WanTransformer3DModel", "2.2 5B: a timestep each token", cfg=TWO_CALLS, prompt="512", **NORMED)
def wan_tokens(draw):
    return {**clip(draw), "timestep": draw.unit(1, 2 * 4 * 4) * 1000}


@case("WanVACETransformer3DModel", cfg=TWO_CALLS, prompt="512", **NORMED, vace_layers=[0, 1], vace_in_channels=12)
def wan_vace(draw):
    return {**clip(draw), "control_hidden_states": draw(1, 12, 2, 8, 8), "control_hidden_states_scale": draw.const([1.0, 0.5])}


ANIMATE = {"latent_channels": 4, "image_dim": 16, "motion_encoder_channel_sizes": {"4": 16, "8": 16, "16": 16}}
ANIMATE |= {"motion_encoder_size": 16, "motion_style_dim": 8, "motion_dim": 4, "motion_encoder_dim": 16}
ANIMATE |= {"face_encoder_hidden_dim": 16, "face_encoder_num_heads": 2, "inject_face_latents_blocks": 2}


@case("WanAnimateTransformer3DModel", cfg=TWO_CALLS, prompt="512", **{**NORMED, "in_channels": 12}, **ANIMATE)
def wan_animate(draw):
    # Faces come four to a latent frame, after one for the first.
    faces = {"pose_hidden_states": draw(1, 4, 2, 8, 8), "face_pixel_values": draw(1, 3, 5, 16, 16)}
    return {**clip(draw, channels=12, frames=3), **faces, "encoder_hidden_states_image": draw(1, 4, 16)}


ANIMATE2 = {"patch_size": (1, 2, 2), "text_len": 16, "in_dim": 36, "dim": 128, "ffn_dim": 32, "freq_dim": 64, "text_dim": 32}
ANIMATE2 |= {"out_dim": 16, "num_heads": 4, "num_layers": 2, "cross_attn_norm": True, "use_img_emb": True}


def animate2(draw: Draw, frames: int, **given) -> dict:
    return {
        "hidden_states": [draw(16, frames, 4, 4)],
        "timestep": draw.unit(1),
        "encoder_hidden_states": [draw(8, 32)],
        "condition_latents": [draw(20, frames, 4, 4)],
        "encoder_hidden_states_image": draw(1, 4, 1280),
        "seq_len": 4 * frames,
        **given,
    }


def animate2_cache(draw: Draw, filled: bool):
    """Keys and values of the two reference frames, for each of two layers."""
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    cache = WanAnimate2KVCache(2)
    for layer in cache.layer_caches if filled else ():
        layer.store(draw(1, 8, 4, 32), draw(1, 8, 4, 32))
    return cache


@case("WanAnimate2Transformer3DModel", cfg=TWO_CALLS, prompt="512", **ANIMATE2)
def wan_animate2(draw):
    grid = {"reference_grid_sizes": draw.const([[2, 2, 2]]), "origin_len": 5, "origin_area": [32, 32]}
    return animate2(draw, 3, kv_cache=animate2_cache(draw, filled=True), kv_cache_mode="cached", **grid)


@case(
    "WanAnimate2Transformer3DModel",
    "reference pass",
    cfg=TWO_CALLS,
    prompt="512",
    note="Once a segment, it fills the caller's cache of keys and values: so does a replay",
    **ANIMATE2,
)
def wan_animate2_reference(draw):
    cache = animate2_cache(draw, filled=False)
    return animate2(draw, 2, kv_cache=cache, kv_cache_mode="extract", offset_grid_sizes=draw.const([[2, 2, 2]]))


@case("ChronoEditTransformer3DModel", cfg=TWO_CALLS, prompt="512", **NORMED, rope_temporal_skip_len=8)
def chrono_edit(draw):
    return clip(draw)


@case("SkyReelsV2Transformer3DModel", cfg=TWO_CALLS, prompt="512", **NORMED)
def skyreels(draw):
    return clip(draw)


@case("SkyReelsV2Transformer3DModel", "diffusion forcing", cfg=TWO_CALLS, prompt="512", **NORMED, inject_sample_info=True)
def skyreels_forcing(draw):
    extra = {"timestep": draw.ints(1000, 1, 2), "fps": draw.const([1]), "enable_diffusion_forcing": True}
    return {**clip(draw), **extra}


ANYFLOW = {**WAN, "gate_value": 0.25, "deltatime_type": "r"}


@case("AnyFlowTransformer3DModel", cfg=BATCHED, prompt="512", **ANYFLOW)
def anyflow(draw):
    times = {"timestep": draw.unit(1, 2) * 1000, "r_timestep": draw.unit(1, 2) * 1000}
    return {**frames_first(clip(draw)), **times}


@case("AnyFlowFARTransformer3DModel", cfg=BATCHED, prompt="512", **ANYFLOW, compressed_patch_size=(1, 4, 4), full_chunk_limit=3)
def anyflow_far(draw):
    times = {"timestep": draw.unit(1, 4) * 1000, "r_timestep": draw.unit(1, 4) * 1000}
    return {**frames_first(clip(draw, frames=4)), **times, "chunk_partition": [2, 2]}


HELIOS = {**NORMED, "rope_dim": (4, 4, 4), "has_multi_term_memory_patch": True, "guidance_cross_attn": True}
HELIOS |= {"zero_history_timestep": True, "is_amplify_history": False}
del HELIOS["rope_max_seq_len"]


@case("HeliosTransformer3DModel", cfg=TWO_CALLS, prompt="512", **HELIOS)
def helios(draw):
    history = {"short": 1, "mid": 1, "long": 4}
    return {
        **clip(draw, size=16),
        "indices_hidden_states": draw.const([[5.0, 6.0]]),
        **{f"indices_latents_history_{name}": draw.const([[1.0] * n]) for name, n in history.items()},
        **{f"latents_history_{name}": draw(1, 4, n, 16, 16) for name, n in history.items()},
    }


# -- CogVideoX and what grew from it

COGVIDEO = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "time_embed_dim": 2}
COGVIDEO |= {
    "text_embed_dim": 8,
    "num_layers": 1,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 8,
    "max_text_seq_length": 8,
}


@case("CogVideoXTransformer3DModel", cfg=BATCHED, prompt="226", **COGVIDEO)
def cogvideox(draw):
    return frames_first(clip(draw, frames=2, text=(8, 8), batch=2))


@case(
    "CogVideoXTransformer3DModel",
    "1.5, rotary",
    cfg=BATCHED,
    prompt="226",
    **COGVIDEO,
    patch_size_t=2,
    use_rotary_positional_embeddings=True,
)
def cogvideox15(draw):
    rotary = (draw(16, 8), draw(16, 8))
    return {**frames_first(clip(draw, frames=2, text=(8, 8), batch=2)), "image_rotary_emb": rotary}


CONSIS = {"cross_attn_interval": 1, "is_kps": False, "is_train_face": True, "cross_attn_dim_head": 1, "cross_attn_num_heads": 1}
CONSIS |= {"LFE_id_dim": 2, "LFE_vit_dim": 2, "LFE_depth": 5, "LFE_dim_head": 8, "LFE_num_heads": 2, "LFE_num_id_token": 1}
CONSIS |= {"LFE_num_querie": 1, "LFE_output_dim": 10, "LFE_ff_mult": 1, "LFE_num_scale": 1}


@case("ConsisIDTransformer3DModel", cfg=BATCHED, prompt="226", **COGVIDEO, **CONSIS)
def consisid(draw):
    return {**frames_first(clip(draw, frames=1, text=(8, 8), batch=2)), "id_vit_hidden": [draw(2, 2, 2)], "id_cond": draw(2, 2)}


EASY = {
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "in_channels": 4,
    "mmdit_layers": 2,
    "num_layers": 2,
    "out_channels": 4,
}
EASY |= {"patch_size": 2, "sample_height": 60, "sample_width": 90, "text_embed_dim": 16, "time_embed_dim": 8}


@case("EasyAnimateTransformer3DModel", cfg=BATCHED, prompt="256", **EASY)
def easy_animate(draw):
    return {**clip(draw, batch=2), "timestep": draw.unit(2)}


@case(
    "AllegroTransformer3DModel",
    cfg=BATCHED,
    prompt="512, masked",
    num_attention_heads=2,
    attention_head_dim=12,
    in_channels=4,
    out_channels=4,
    num_layers=1,
    cross_attention_dim=24,
    sample_width=8,
    sample_height=8,
    sample_frames=8,
    caption_channels=8,
)
def allegro(draw):
    mask = {
        "attention_mask": draw.mask([2 * 64] * 2, 2 * 64).reshape(2, 2, 8, 8),
        "encoder_attention_mask": draw.mask([8, 4], 12),
    }
    return {**clip(draw, text=(12, 8), batch=2), **mask}


LATTE = {
    "sample_size": 8,
    "num_layers": 1,
    "patch_size": 2,
    "attention_head_dim": 4,
    "num_attention_heads": 2,
    "caption_channels": 8,
}
LATTE |= {
    "in_channels": 4,
    "cross_attention_dim": 8,
    "out_channels": 8,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
}
LATTE |= {"num_embeds_ada_norm": 1000, "norm_type": "ada_norm_single", "norm_elementwise_affine": False, "norm_eps": 1e-6}
LATTE |= {"video_length": 2}


@case("LatteTransformer3DModel", cfg=BATCHED, prompt="120", **LATTE)
def latte(draw):
    return clip(draw, text=(8, 8), batch=2)


# -- LTX

LTX = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16}
LTX |= {"num_layers": 1, "qk_norm": "rms_norm_across_heads", "caption_channels": 16}


@case("LTXVideoTransformer3DModel", cfg=BATCHED, prompt="128, masked", changes="prompt lengths", **LTX)
def ltx(draw):
    return {
        "hidden_states": draw(2, 2 * 4 * 4, 4),
        "encoder_hidden_states": draw(2, 8, 16),
        "timestep": draw.unit(2) * 1000,
        "encoder_attention_mask": draw.mask(draw.pick([8, 5], [2, 7]), 8),
        "num_frames": 2,
        "height": 4,
        "width": 4,
        "rope_interpolation_scale": (8 / 25, 32, 32),
    }


LTX2 = {**LTX, "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2, "audio_attention_head_dim": 4}
LTX2 |= {"audio_cross_attention_dim": 8, "rope_double_precision": False}


@case("LTX2VideoTransformer3DModel", cfg="one batched call; some guidance: more calls", prompt="1024, masked", **LTX2)
def ltx2(draw):
    return {
        "hidden_states": draw(2, 2 * 4 * 4, 4),
        "audio_hidden_states": draw(2, 9, 4),
        "encoder_hidden_states": draw(2, 8, 16),
        "audio_encoder_hidden_states": draw(2, 8, 16),
        "timestep": draw.unit(2) * 1000,
        "encoder_attention_mask": draw.mask([8, 5], 8),
        "audio_encoder_attention_mask": draw.mask([8, 5], 8),
        "num_frames": 2,
        "height": 4,
        "width": 4,
        "fps": 25.0,
        "audio_num_frames": 9,
    }


@case(
    "LTX2VideoTransformer3DModel",
    "spatio-temporal guidance",
    cfg="one batched call; some guidance: more calls",
    prompt="1024, masked",
    changes="whether all of the batch is perturbed",
    **LTX2,
    perturbed_attn=True,
)
def ltx2_perturbed(draw):
    perturbed = {"spatio_temporal_guidance_blocks": [0], "perturbation_mask": draw.const(draw.pick([0.0, 0.0], [1.0, 0.0]))}
    return {**ltx2(draw), **perturbed}


@case("SanaWMLTX2RefinerTransformer3DModel", cfg=NO_GUIDANCE, prompt="1024, masked", **LTX2)
def sana_wm_refiner(draw):
    return {
        "hidden_states": draw(1, 32, 4),
        "encoder_hidden_states": draw(1, 8, 16),
        "timestep": draw.unit(1, 32) * 1000,
        "video_rotary_emb": (draw(1, 32, 16), draw(1, 32, 16)),
        "encoder_attention_mask": draw.mask([5], 8, torch.long),
    }


# -- Hunyuan

HUNYUAN = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1}
HUNYUAN |= {"num_single_layers": 1, "num_refiner_layers": 1, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 16}
HUNYUAN |= {"pooled_projection_dim": 8, "rope_axes_dim": (2, 4, 4)}


def hunyuan_inputs(draw: Draw, **given) -> dict:
    mask = draw.mask([draw.pick(12, 7)], 12, torch.long)
    return {**clip(draw, **given), "pooled_projections": draw(1, 8), "encoder_attention_mask": mask}


@case(
    "HunyuanVideoTransformer3DModel",
    cfg=EMBEDDED_OR_TWO,
    prompt="256, masked",
    changes="prompt length",
    **HUNYUAN,
    guidance_embeds=True,
)
def hunyuan_video(draw):
    return {**hunyuan_inputs(draw), "guidance": draw.unit(1) * 6000}


@case(
    "HunyuanVideoTransformer3DModel",
    "first frame replaced",
    cfg=EMBEDDED_OR_TWO,
    prompt="256, masked",
    changes="prompt length",
    **HUNYUAN,
    guidance_embeds=True,
    image_condition_type="token_replace",
)
def hunyuan_video_replace(draw):
    return {**hunyuan_inputs(draw), "guidance": draw.unit(1) * 6000}


FRAMEPACK = {"has_image_proj": True, "image_proj_dim": 16, "has_clean_x_embedder": True, "patch_size": 2, "guidance_embeds": True}


@case(
    "HunyuanVideoFramepackTransformer3DModel",
    cfg=EMBEDDED_OR_TWO,
    prompt="256, masked",
    changes="prompt length",
    **{**HUNYUAN, **FRAMEPACK},
)
def framepack(draw):
    return {
        **hunyuan_inputs(draw, frames=3, size=4),
        "guidance": draw.unit(1) * 6000,
        "image_embeds": draw(1, 12, 16),
        "indices_latents": draw.const([7, 8, 9]),
        "latents_clean": draw(1, 4, 2, 4, 4),
        "indices_latents_clean": draw.const([0, 10]),
        "latents_history_2x": draw(1, 4, 2, 4, 4),
        "indices_latents_history_2x": draw.const([5, 6]),
        "latents_history_4x": draw(1, 4, 4, 4, 4),
        "indices_latents_history_4x": draw.const([1, 2, 3, 4]),
    }


HUNYUAN15 = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
HUNYUAN15 |= {"num_refiner_layers": 1, "mlp_ratio": 2.0, "patch_size": 1, "patch_size_t": 1, "text_embed_dim": 16}
HUNYUAN15 |= {"text_embed_2_dim": 8, "image_embed_dim": 12, "rope_axes_dim": (2, 2, 4), "target_size": 16, "task_type": "t2v"}


@case("HunyuanVideo15Transformer3DModel", cfg=TWO_CALLS, prompt="1000 and 256, masked", changes="prompt lengths", **HUNYUAN15)
def hunyuan_video15(draw):
    return {
        **clip(draw, frames=1, text=(6, 16)),
        "timestep": draw.unit(1) * 1000,
        "encoder_hidden_states_2": draw(1, 4, 8),
        "encoder_attention_mask": draw.mask([draw.pick(6, 4)], 6),
        "encoder_attention_mask_2": draw.mask([draw.pick(3, 0)], 4),
        "image_embeds": draw(1, 3, 12) * 0,
    }


@case(
    "HunyuanVideo15Transformer3DModel",
    "first frame given",
    changes="prompt lengths",
    cfg=TWO_CALLS,
    prompt="1000 and 256, masked",
    **HUNYUAN15,
)
def hunyuan_video15_image(draw):
    return {**hunyuan_video15(draw), "image_embeds": draw(1, 3, 12)}


@case(
    "HunyuanVideo15Transformer3DModel",
    "with and without a first frame",
    cfg=TWO_CALLS,
    prompt="1000 and 256, masked",
    changes="whether there is a first frame",
    **HUNYUAN15,
)
def hunyuan_video15_either(draw):
    masks = {"encoder_attention_mask": draw.mask([6], 6), "encoder_attention_mask_2": draw.mask([3], 4)}
    return {**hunyuan_video15(draw), **masks, "image_embeds": draw(1, 3, 12) * draw.pick(0, 1)}


@case(
    "HunyuanVideoTransformer3DModel",
    "first frame beside the latents",
    cfg=EMBEDDED_OR_TWO,
    prompt="256, masked",
    changes="prompt length",
    **{**HUNYUAN, "in_channels": 9, "image_condition_type": "latent_concat", "guidance_embeds": False},
)
def hunyuan_video_concat(draw):
    return hunyuan_inputs(draw, channels=9)


# -- the others

COSMOS = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "mlp_ratio": 2,
}
COSMOS |= {
    "text_embed_dim": 16,
    "adaln_lora_dim": 4,
    "max_size": (4, 32, 32),
    "patch_size": (1, 2, 2),
    "rope_scale": (2.0, 1.0, 1.0),
}


def resizing(source: str, cls: str, **config: Any) -> torch.nn.Module:
    """Cosmos' forward resizes the padding mask with torchvision, to the size that the mask has already."""
    from diffusers.models import controlnets, transformers

    module = getattr({"transformer_cosmos": transformers, "controlnet_cosmos": controlnets}[source], source)
    if not hasattr(module, "transforms"):  # torchvision is not installed
        functional = SimpleNamespace(resize=lambda mask, size, interpolation: F.interpolate(mask, size))
        module.transforms = SimpleNamespace(functional=functional, InterpolationMode=SimpleNamespace(NEAREST="nearest"))
    return model(cls, **config)


_cosmos = partial(resizing, "transformer_cosmos", "CosmosTransformer3DModel")


@case("CosmosTransformer3DModel", cfg=TWO_CALLS, prompt="512", build=partial(_cosmos, **COSMOS, extra_pos_embed_type="learnable"))
def cosmos(draw):
    return {**clip(draw, frames=1), "fps": 30, "padding_mask": draw(1, 1, 8, 8) * 0}


@case(
    "CosmosTransformer3DModel",
    "a video goes on",
    cfg=TWO_CALLS,
    prompt="512",
    build=partial(_cosmos, **{**COSMOS, "in_channels": 5}),
)
def cosmos_video(draw):
    mask = {"condition_mask": draw.mask([1], 2, draw.dtype).reshape(1, 1, 2, 1, 1).expand(1, 1, 2, 8, 8)}
    times = {"timestep": draw.unit(1, 1, 2, 1, 1)}
    return {**clip(draw), **times, **mask, "fps": 16, "padding_mask": draw(1, 1, 8, 8) * 0}


COSMOS3 = {
    "head_dim": 6,
    "hidden_act": "relu2",
    "hidden_size": 12,
    "intermediate_size": 24,
    "latent_channel": 2,
    "latent_patch_size": 1,
}
COSMOS3 |= {
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "patch_latent_dim": 2,
    "qk_norm_for_text": False,
}
COSMOS3 |= {"rope_axes_dim": [1, 1, 1], "rope_theta": 1e8, "vocab_size": 32}


@case("Cosmos3OmniTransformer", cfg=TWO_CALLS, prompt="any", **COSMOS3)
def cosmos3(draw):
    text, picture = 2, 16
    place = torch.arange(text, text + picture, device=draw.device)
    return {
        "input_ids": draw.ints(32, text),
        "text_indexes": torch.arange(text, device=draw.device),
        "position_ids": torch.arange(text + picture, device=draw.device).repeat(3, 1),
        "und_len": text,
        "sequence_length": text + picture,
        "vision_tokens": [draw(1, 2, 1, 4, 4)],
        "vision_token_shapes": [(1, 4, 4)],
        "vision_sequence_indexes": place,
        "vision_mse_loss_indexes": place,
        "vision_timesteps": draw.unit(picture),
        "vision_noisy_frame_indexes": [draw.const([0])],
    }


MOCHI = {"patch_size": 2, "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "pooled_projection_dim": 16}
MOCHI |= {"in_channels": 4, "qk_norm": "rms_norm", "text_embed_dim": 16, "time_embed_dim": 4, "activation_fn": "swiglu"}


@case("MochiTransformer3DModel", cfg=BATCHED, prompt="256, masked", changes="prompt lengths", **MOCHI, max_sequence_length=12)
def mochi(draw):
    return {**clip(draw, batch=2), "encoder_attention_mask": draw.mask(draw.pick([12, 4], [5, 9]), 12)}


MOTIF = {"in_channels": 9, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 1}
MOTIF |= {"num_single_layers": 1, "num_decoder_layers": 1, "mlp_ratio": 2.0, "patch_size": 1, "patch_size_t": 1}
MOTIF |= {"text_embed_dim": 16, "image_embed_dim": 4, "rope_axes_dim": (4, 4, 4)}


@case("MotifVideoTransformer3DModel", cfg=TWO_CALLS, prompt="512, masked", changes="prompt length", **MOTIF)
def motif(draw):
    return {**clip(draw, channels=9), "encoder_attention_mask": draw.mask([draw.pick(12, 5)], 12)}


SANA_VIDEO = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 12, "num_layers": 2}
SANA_VIDEO |= {"num_cross_attention_heads": 2, "cross_attention_head_dim": 12, "cross_attention_dim": 24, "caption_channels": 16}
SANA_VIDEO |= {"sample_size": 8, "patch_size": (1, 2, 2), "qk_norm": "rms_norm_across_heads", "rope_max_seq_len": 32}


@case("SanaVideoTransformer3DModel", cfg=BATCHED, prompt="300, masked", changes="prompt lengths", **SANA_VIDEO)
def sana_video(draw):
    return {**clip(draw, batch=2), "encoder_attention_mask": draw.mask(draw.pick([12, 4], [5, 9]), 12)}


SANA_WM = {
    "in_channels": 4,
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "linear_head_dim": 16,
    "softmax_every_n": 2,
}
SANA_WM |= {"caption_channels": 16, "mlp_ratio": 2.0, "chunk_plucker_channels": 6, "chunk_plucker_post_attn_blocks": 2}


@case("SanaWMTransformer3DModel", cfg=BATCHED, prompt="300, masked", **SANA_WM)
def sana_wm(draw):
    camera = torch.cat([torch.eye(4).flatten(), torch.tensor([8.0, 8.0, 4.0, 4.0])]).repeat(1, 2, 1).to(draw.device)
    return {
        **clip(draw, text=(12, 16)),
        "timestep": draw.steps(2).reshape(1, 1, 2),
        "encoder_hidden_states": draw(1, 1, 12, 16),
        "encoder_attention_mask": draw.mask([8], 12, torch.long)[:, None, None],
        "camera_conditions": camera + draw(1, 2, 20) * 0.01,
        "chunk_plucker": draw(1, 6, 2, 8, 8),
    }


KANDINSKY5 = {"in_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 8, "time_dim": 16, "out_visual_dim": 4, "model_dim": 24}
KANDINSKY5 |= {"ff_dim": 32, "num_text_blocks": 1, "num_visual_blocks": 2, "axes_dims": (4, 4, 4)}


@case("Kandinsky5Transformer3DModel", cfg=TWO_CALLS, prompt="any", **KANDINSKY5)
def kandinsky5(draw):
    return {
        "hidden_states": draw(1, 2, 8, 8, 4),
        "encoder_hidden_states": draw(1, 12, 16),
        "timestep": draw.unit(1) * 1000,
        "pooled_projections": draw(1, 8),
        "visual_rope_pos": [torch.arange(n, device=draw.device) for n in (2, 4, 4)],
        "text_rope_pos": torch.arange(12, device=draw.device),
        "scale_factor": (1.0, 2.0, 2.0),
    }


KANDINSKY6 = {**KANDINSKY5, "visual_cond": False, "in_audio_dim": 4, "out_audio_dim": 4}


@case("Kandinsky6Transformer3DModel", cfg=TWO_CALLS, prompt="any, masked", changes="prompt length", **KANDINSKY6)
def kandinsky6(draw):
    return {
        "hidden_states": draw(1, 2, 8, 8, 4),
        "encoder_hidden_states": draw(1, 12, 16),
        "pooled_projections": draw(1, 8),
        "timestep": draw.unit(1) * 1000,
        "audio_hidden_states": draw(1, 6, 4),
        "encoder_attention_mask": draw.mask([draw.pick(12, 6)], 12),
    }


@case(
    "Kandinsky6SRTransformer3DModel",
    cfg=NO_GUIDANCE,
    in_visual_dim=4,
    out_visual_dim=4,
    time_dim=16,
    model_dim=32,
    ff_dim=32,
    num_visual_blocks=1,
    axes_dims=(4, 6, 6),
)
def kandinsky6_sr(draw):
    return {"hidden_states": draw(1, 2, 16, 16, 9), "timestep": draw.unit(1) * 1000}


MINIMAX = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "hidden_size": 24,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "ffn_dim": 32,
}
MINIMAX |= {"in_channels": 4, "audio_in_channels": 6, "patch_size": (1, 2, 2), "text_dim": 8, "freq_dim": 8}
MINIMAX |= {"time_embed_hidden_dim": 24, "time_embed_dim": 16, "rope_freq_dim": 2}


@case("MiniMaxH3Transformer3DModel", cfg=NO_GUIDANCE, prompt="any", **MINIMAX)
def minimax_h3(draw):
    text, audio, video = 4, 6, 8
    rows = torch.arange(text + audio + video, device=draw.device)
    tags = draw.const([1] * text + [2] * audio + [0] * video)
    return {
        "hidden_states": draw(2, video, 16),
        "audio_hidden_states": draw(2, audio, 6),
        "encoder_hidden_states": draw(2, text, 8),
        "timestep": draw.unit(2),
        "timestep_indices": (tags == 2).long(),
        "token_tags": tags,
        "position_ids": rows[:, None].repeat(1, 3).float(),
        "text_indices": rows[:text],
        "audio_indices": rows[text : text + audio],
        "video_indices": rows[text + audio :],
    }
