"""SANA-1.6B: linear attention over a 32x smaller latent, CFG as a batch of two, prompts of 300 rows, masked."""

from __future__ import annotations

import torch
from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

from pipelines import _parts, _text

SHAPES = ("1024x1024",)
GUIDANCE = 4.5  # of the model card and the pipeline

# transformer, vae and scheduler configurations of Efficient-Large-Model/Sana_1600M_1024px_diffusers
DENOISER = {
    "sample_size": 32,
    "patch_size": 1,
    "in_channels": 32,
    "out_channels": 32,
    "num_layers": 20,
    "attention_head_dim": 32,
    "num_attention_heads": 70,
    "cross_attention_head_dim": 112,
    "num_cross_attention_heads": 20,
    "cross_attention_dim": 2240,
    "caption_channels": 2304,
    "mlp_ratio": 2.5,
    "attention_bias": False,
    "norm_elementwise_affine": False,
    "norm_eps": 1e-6,
}
BLOCKS = ("ResBlock",) * 3 + ("EfficientViTBlock",) * 3
SCALES = ((), (), (), (5,), (5,), (5,))
VAE = {
    "latent_channels": 32,
    "attention_head_dim": 32,
    "encoder_block_types": BLOCKS,
    "decoder_block_types": BLOCKS,
    "encoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "decoder_block_out_channels": (128, 256, 512, 512, 1024, 1024),
    "encoder_layers_per_block": (2, 2, 2, 3, 3, 3),
    "decoder_layers_per_block": (3, 3, 3, 3, 3, 3),
    "encoder_qkv_multiscales": SCALES,
    "decoder_qkv_multiscales": SCALES,
    "downsample_block_type": "conv",
    "upsample_block_type": "interpolate",
    "decoder_norm_types": "rms_norm",
    "decoder_act_fns": "silu",
    "scaling_factor": 0.41407,
}
SCHEDULER = {
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "algorithm_type": "dpmsolver++",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}

# 16 is the smallest sample size whose aspect ratios the pipeline knows: it draws near 512x512, then scales
TINY = {
    "sample_size": 16,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "cross_attention_head_dim": 16,
    "num_cross_attention_heads": 2,
    "cross_attention_dim": 32,
    "caption_channels": 32,
}
TINY_VAE = {
    "attention_head_dim": 4,
    "encoder_block_out_channels": (4, 4, 4, 8, 16, 32),
    "decoder_block_out_channels": (4, 4, 4, 8, 16, 32),  # the last one holds the 32 latent channels
    "encoder_layers_per_block": (1,) * 6,
    "decoder_layers_per_block": (1,) * 6,
}


def tiny(seed: int = 0) -> SanaPipeline:
    tokenizer, text_encoder = _text.gemma2(seed)
    return SanaPipeline(
        transformer=_parts.random_model(SanaTransformer2DModel, {**DENOISER, **TINY}, seed=seed),
        vae=_parts.random_model(AutoencoderDC, {**VAE, **TINY_VAE}, seed=seed),
        scheduler=DPMSolverMultistepScheduler(**SCHEDULER),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
    )


def full(device="cuda", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> SanaPipeline:
    return SanaPipeline(
        transformer=_parts.random_model(SanaTransformer2DModel, DENOISER, device, dtype, seed),
        vae=_parts.random_model(AutoencoderDC, VAE, device, dtype, seed),
        scheduler=DPMSolverMultistepScheduler(**SCHEDULER),
        text_encoder=None,
        tokenizer=None,
    )


def inputs(pipe, *, height, width, num_frames=None, prompt_length=None, batch=1, cfg=None, seed=0) -> dict:
    """See `_parts.masked_inputs`: embeddings [batch, 300, 2304]."""
    size, scale = _parts.size(height, width, num_frames), _parts.guidance(cfg, GUIDANCE)
    return size | _parts.masked_inputs(pipe, scale, batch, prompt_length or 300, seed)
