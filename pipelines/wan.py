"""Wan 2.1 T2V 1.3B and the two denoisers of Wan 2.2 T2V A14B: video, CFG as two calls a step, 512 prompt rows."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from transformers import UMT5EncoderModel

from pipelines import _parts, _text, _vae

SHAPES = ("480x832x1", "480x832x17")  # 1 and 5 latent frames
GUIDANCE = 5.0  # the pipeline's own default

# transformer and scheduler configurations of Wan-AI/Wan2.1-T2V-1.3B-Diffusers
DENOISER = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 8960,
    "num_layers": 30,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}
SCHEDULER = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
# Wan-AI/Wan2.2-T2V-A14B-Diffusers: `transformer` draws while the timestep is above the boundary, `transformer_2` below
DENOISER_2_2 = {**DENOISER, "num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}
BOUNDARY = 0.875

TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 64,
    "num_layers": 2,
}


def tiny(seed: int = 0, denoisers: int = 1) -> WanPipeline:
    """`denoisers=2` is the form of Wan 2.2."""
    tokenizer, text_encoder = _text.t5(UMT5EncoderModel, seed)
    return WanPipeline(
        **_denoisers({**DENOISER, **TINY}, denoisers, "cpu", torch.float32, seed),
        vae=_parts.random_model(AutoencoderKLWan, {**_vae.WAN, **_vae.TINY_WAN}, seed=seed),
        scheduler=UniPCMultistepScheduler(**SCHEDULER),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
    )


def full(device="cuda", dtype: torch.dtype = torch.bfloat16, seed: int = 0, denoisers: int = 1) -> WanPipeline:
    """`denoisers=2` is Wan 2.2 A14B: 2 x 14.3B. The VAE stays in float32, as the model cards ask."""
    return WanPipeline(
        **_denoisers(DENOISER if denoisers == 1 else DENOISER_2_2, denoisers, device, dtype, seed),
        vae=_parts.random_model(AutoencoderKLWan, _vae.WAN, device, torch.float32, seed),
        scheduler=UniPCMultistepScheduler(**SCHEDULER),
        text_encoder=None,
        tokenizer=None,
    )


def _denoisers(config, count, device, dtype, seed) -> dict:
    if count not in (1, 2):
        raise ValueError(f"Wan has 1 denoiser (2.1) or 2 (2.2), not {count!r}.")
    models = [_parts.random_model(WanTransformer3DModel, config, device, dtype, seed + i) for i in range(count)]
    return {
        "transformer": models[0],
        "transformer_2": models[1] if count == 2 else None,
        "boundary_ratio": BOUNDARY if count == 2 else None,
    }


def inputs(pipe, *, height, width, num_frames=None, prompt_length=None, batch=1, cfg=None, seed=0) -> dict:
    """Embeddings [batch, 512, 4096]; negative ones of the same shape. One frame if `num_frames` is not given."""
    draw = _parts.drawer(pipe.transformer, seed)
    scale = _parts.guidance(cfg, GUIDANCE)
    prompt = (batch, prompt_length or 512, pipe.transformer.config.text_dim)
    kwargs = {
        **_parts.size(height, width, num_frames or 1),
        "prompt_embeds": draw(*prompt),
        "guidance_scale": scale,
    }
    if scale > 1:
        kwargs["negative_prompt_embeds"] = draw(*prompt)
    return kwargs
