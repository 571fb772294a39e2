"""PixArt-Sigma: a cross-attention DiT of 0.6B, CFG as a batch of two, prompts padded to 300 rows and masked."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel
from transformers import T5EncoderModel

from pipelines import _parts, _text, _vae

SHAPES = ("512x512",)
GUIDANCE = 4.5  # the pipeline's own default

# transformer and scheduler configurations of PixArt-alpha/PixArt-Sigma-XL-2-512-MS; its VAE is
# PixArt-alpha/pixart_sigma_sdxlvae_T5_diffusers, SDXL's
DENOISER = {
    "sample_size": 64,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 28,
    "attention_head_dim": 72,
    "num_attention_heads": 16,
    "cross_attention_dim": 1152,
    "caption_channels": 4096,
    "attention_bias": True,
    "activation_fn": "gelu-approximate",
    "num_embeds_ada_norm": 1000,
    "norm_type": "ada_norm_single",
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
    "interpolation_scale": 1,
    "use_additional_conditions": False,
}
VAE = {**_vae.KL, "latent_channels": 4, "sample_size": 1024, "scaling_factor": 0.13025}
SCHEDULER = {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear", "algorithm_type": "dpmsolver++"}

# 32 is the smallest sample size whose aspect ratios the pipeline knows: it draws near 256x256, then scales
TINY = {
    "sample_size": 32,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "cross_attention_dim": 32,
    "caption_channels": 32,
}


def tiny(seed: int = 0) -> PixArtSigmaPipeline:
    tokenizer, text_encoder = _text.t5(T5EncoderModel, seed)
    return PixArtSigmaPipeline(
        transformer=_parts.random_model(PixArtTransformer2DModel, {**DENOISER, **TINY}, seed=seed),
        vae=_parts.random_model(AutoencoderKL, {**VAE, **_vae.TINY_KL}, seed=seed),
        scheduler=DPMSolverMultistepScheduler(**SCHEDULER),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
    )


def full(device="cuda", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> PixArtSigmaPipeline:
    return PixArtSigmaPipeline(
        transformer=_parts.random_model(PixArtTransformer2DModel, DENOISER, device, dtype, seed),
        vae=_parts.random_model(AutoencoderKL, VAE, device, dtype, seed),
        scheduler=DPMSolverMultistepScheduler(**SCHEDULER),
        text_encoder=None,
        tokenizer=None,
    )


def inputs(pipe, *, height, width, num_frames=None, prompt_length=None, batch=1, cfg=None, seed=0) -> dict:
    """See `_parts.masked_inputs`: embeddings [batch, 300, 4096]."""
    size, scale = _parts.size(height, width, num_frames), _parts.guidance(cfg, GUIDANCE)
    return size | _parts.masked_inputs(pipe, scale, batch, prompt_length or 300, seed)
