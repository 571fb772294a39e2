"""FLUX.1-dev: 19 joint and 38 single blocks, 11.9B, prompts padded to 512, guidance distilled into an input."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel, T5EncoderModel

from pipelines import _parts, _text, _vae

SHAPES = ("512x512", "1024x1024")
GUIDANCE = 1.0  # true CFG is off; the distilled guidance stays at the pipeline's own default

# transformer/config.json and scheduler/scheduler_config.json of black-forest-labs/FLUX.1-dev
DENOISER = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 19,
    "num_single_layers": 38,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "pooled_projection_dim": 768,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
# scheduler/scheduler_config.json of black-forest-labs/FLUX.1-schnell
SCHNELL = {**SCHEDULER, "shift": 1.0, "use_dynamic_shifting": False}

TINY = {
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}


def tiny(seed: int = 0) -> FluxPipeline:
    tokenizer, text_encoder = _text.clip(CLIPTextModel, seed)
    tokenizer_2, text_encoder_2 = _text.t5(T5EncoderModel, seed)
    return FluxPipeline(
        transformer=_parts.random_model(FluxTransformer2DModel, {**DENOISER, **TINY}, seed=seed),
        vae=_parts.random_model(AutoencoderKL, {**_vae.FLUX, **_vae.TINY_KL}, seed=seed),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
    )


def full(
    device="cuda", dtype: torch.dtype = torch.bfloat16, seed: int = 0, text: bool = False, schnell: bool = False
) -> FluxPipeline:
    """With `text`, its text encoders are there too and take prompts; without, prompt embeddings have to be given.
    `schnell`: FLUX.1-schnell, of four steps, which takes no guidance."""
    pairs = [(None, None), (None, None)]
    if text:
        pairs = [
            _text.published(_text.clip(CLIPTextModel, seed), _text.CLIP_L, device, dtype, seed),
            _text.published(_text.t5(T5EncoderModel, seed), _text.T5_XXL, device, dtype, seed),
        ]
    (tokenizer, text_encoder), (tokenizer_2, text_encoder_2) = pairs
    denoiser = {**DENOISER, "guidance_embeds": not schnell}
    return FluxPipeline(
        transformer=_parts.random_model(FluxTransformer2DModel, denoiser, device, dtype, seed),
        vae=_parts.random_model(AutoencoderKL, _vae.FLUX, device, dtype, seed),
        scheduler=FlowMatchEulerDiscreteScheduler(**(SCHNELL if schnell else SCHEDULER)),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
    )


def inputs(pipe, *, height, width, num_frames=None, prompt_length=None, batch=1, cfg=None, seed=0) -> dict:
    """T5 embeddings [batch, 512, 4096] and pooled CLIP ones [batch, 768]; negative ones of the same shapes."""
    draw, config = _parts.drawer(pipe.transformer, seed), pipe.transformer.config
    scale = _parts.guidance(cfg, GUIDANCE)
    prompt = (batch, prompt_length or 512, config.joint_attention_dim)
    pooled = (batch, config.pooled_projection_dim)
    kwargs = {
        **_parts.size(height, width, num_frames),
        "prompt_embeds": draw(*prompt),
        "pooled_prompt_embeds": draw(*pooled),
        "true_cfg_scale": scale,
    }
    if scale > 1:
        kwargs |= {"negative_prompt_embeds": draw(*prompt), "negative_pooled_prompt_embeds": draw(*pooled)}
    return kwargs
