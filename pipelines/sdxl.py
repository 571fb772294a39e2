"""Stable Diffusion XL base: a UNet of 2.6B, CFG as a batch of two, prompts of 77 rows."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from pipelines import _parts, _text, _vae

SHAPES = ("512x512", "1024x1024")
GUIDANCE = 5.0  # the pipeline's own default

# unet, vae and scheduler configurations of stabilityai/stable-diffusion-xl-base-1.0
DENOISER = {
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (320, 640, 1280),
    "layers_per_block": 2,
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "norm_num_groups": 32,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
VAE = {**_vae.KL, "latent_channels": 4, "sample_size": 1024, "scaling_factor": 0.13025, "force_upcast": True}
SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "timestep_spacing": "leading",
    "steps_offset": 1,
}

TINY = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "block_out_channels": (16, 32),
    "layers_per_block": 1,
    "transformer_layers_per_block": (1, 2),
    "attention_head_dim": (1, 2),
    "cross_attention_dim": 64,  # two CLIPs side by side
    "norm_num_groups": 8,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 32,
}


def tiny(seed: int = 0) -> StableDiffusionXLPipeline:
    tokenizer, text_encoder = _text.clip(CLIPTextModel, seed)
    tokenizer_2, text_encoder_2 = _text.clip(CLIPTextModelWithProjection, seed + 1)
    return StableDiffusionXLPipeline(
        unet=_parts.random_model(UNet2DConditionModel, {**DENOISER, **TINY}, seed=seed),
        vae=_parts.random_model(AutoencoderKL, {**VAE, **_vae.TINY_KL}, seed=seed),
        scheduler=EulerDiscreteScheduler(**SCHEDULER),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
    )


def full(device="cuda", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> StableDiffusionXLPipeline:
    return StableDiffusionXLPipeline(
        unet=_parts.random_model(UNet2DConditionModel, DENOISER, device, dtype, seed),
        vae=_parts.random_model(AutoencoderKL, VAE, device, dtype, seed),
        scheduler=EulerDiscreteScheduler(**SCHEDULER),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
    )


def inputs(pipe, *, height, width, num_frames=None, prompt_length=None, batch=1, cfg=None, seed=0) -> dict:
    """Embeddings [batch, 77, 2048] and pooled ones [batch, 1280]; negative ones of the same shapes."""
    draw, config = _parts.drawer(pipe.unet, seed), pipe.unet.config
    scale = _parts.guidance(cfg, GUIDANCE)
    prompt = (batch, prompt_length or 77, config.cross_attention_dim)
    # The UNet takes the pooled embeddings beside six numbers (sizes and crop), each embedded
    pooled = (batch, config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim)
    kwargs = {
        **_parts.size(height, width, num_frames),
        "prompt_embeds": draw(*prompt),
        "pooled_prompt_embeds": draw(*pooled),
        "guidance_scale": scale,
    }
    if scale > 1:
        kwargs |= {"negative_prompt_embeds": draw(*prompt), "negative_pooled_prompt_embeds": draw(*pooled)}
    return kwargs
