"""Stable Diffusion 3.5 medium: a joint-attention DiT of 2.2B, CFG as a batch of two, prompts of 77 + 256 rows."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection, T5EncoderModel

from pipelines import _parts, _text, _vae

SHAPES = ("512x512", "1024x1024")
GUIDANCE = 4.5  # of the model card

# transformer, vae and scheduler configurations of stabilityai/stable-diffusion-3.5-medium
DENOISER = {
    "sample_size": 128,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 24,
    "attention_head_dim": 64,
    "num_attention_heads": 24,
    "joint_attention_dim": 4096,
    "caption_projection_dim": 1536,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "dual_attention_layers": tuple(range(13)),
    "qk_norm": "rms_norm",
}
VAE = {
    **_vae.KL,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 1.5305,
    "shift_factor": 0.0609,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
SCHEDULER = {"shift": 3.0}

TINY = {
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 64,
    "pos_embed_max_size": 96,
    "dual_attention_layers": (0,),
}


def tiny(seed: int = 0) -> StableDiffusion3Pipeline:
    tokenizer, text_encoder = _text.clip(CLIPTextModelWithProjection, seed)
    tokenizer_2, text_encoder_2 = _text.clip(CLIPTextModelWithProjection, seed + 1)
    tokenizer_3, text_encoder_3 = _text.t5(T5EncoderModel, seed, width=64)  # the two CLIPs side by side must fit in it
    return StableDiffusion3Pipeline(
        transformer=_parts.random_model(SD3Transformer2DModel, {**DENOISER, **TINY}, seed=seed),
        vae=_parts.random_model(AutoencoderKL, {**VAE, **_vae.TINY_KL}, seed=seed),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
        text_encoder_3=text_encoder_3,
        tokenizer_3=tokenizer_3,
    )


def full(device="cuda", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> StableDiffusion3Pipeline:
    return StableDiffusion3Pipeline(
        transformer=_parts.random_model(SD3Transformer2DModel, DENOISER, device, dtype, seed),
        vae=_parts.random_model(AutoencoderKL, VAE, device, dtype, seed),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
        text_encoder_3=None,
        tokenizer_3=None,
    )


def inputs(pipe, *, height, width, num_frames=None, prompt_length=None, batch=1, cfg=None, seed=0) -> dict:
    """Embeddings [batch, 77 + 256, 4096] and pooled ones [batch, 2048]; negative ones of the same shapes."""
    draw, config = _parts.drawer(pipe.transformer, seed), pipe.transformer.config
    scale = _parts.guidance(cfg, GUIDANCE)
    prompt = (batch, prompt_length or 77 + 256, config.joint_attention_dim)
    pooled = (batch, config.pooled_projection_dim)
    kwargs = {
        **_parts.size(height, width, num_frames),
        "prompt_embeds": draw(*prompt),
        "pooled_prompt_embeds": draw(*pooled),
        "guidance_scale": scale,
    }
    if scale > 1:
        kwargs |= {"negative_prompt_embeds": draw(*prompt), "negative_pooled_prompt_embeds": draw(*pooled)}
    return kwargs
