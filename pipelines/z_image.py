"""Z-Image-Turbo: a single-stream DiT of 6.2B that takes and returns lists of tensors, prompts of variable length."""

from __future__ import annotations

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

from pipelines import _parts, _text, _vae

SHAPES = ("512x512", "1024x1024")
GUIDANCE = 0.0  # of the model card of Z-Image-Turbo, which is distilled; the pipeline's own default is 5.0

# transformer/config.json and scheduler/scheduler_config.json of Tongyi-MAI/Z-Image-Turbo; its VAE is FLUX's
DENOISER = {
    "all_patch_size": (2,),
    "all_f_patch_size": (1,),
    "in_channels": 16,
    "dim": 3840,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "n_heads": 30,
    "n_kv_heads": 30,
    "norm_eps": 1e-5,
    "qk_norm": True,
    "cap_feat_dim": 2560,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
}
SCHEDULER = {"shift": 3.0, "use_dynamic_shifting": False}

TINY = {
    "dim": 64,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 4,
    "n_kv_heads": 4,
    "cap_feat_dim": 32,
    "axes_dims": [4, 6, 6],
}


def tiny(seed: int = 0) -> ZImagePipeline:
    tokenizer, text_encoder = _text.qwen3(seed)
    return ZImagePipeline(
        transformer=_parts.random_model(ZImageTransformer2DModel, {**DENOISER, **TINY}, seed=seed),
        vae=_parts.random_model(AutoencoderKL, {**_vae.FLUX, **_vae.TINY_KL}, seed=seed),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
    )


def full(device="cuda", dtype: torch.dtype = torch.bfloat16, seed: int = 0, text: bool = False) -> ZImagePipeline:
    """With `text`, its text encoder is there too, of 4B, and takes prompts; without, prompt embeddings have to be given."""
    tokenizer, text_encoder = None, None
    if text:
        tokenizer, text_encoder = _text.published(_text.qwen3(seed), _text.QWEN3_4B, device, dtype, seed)
    return ZImagePipeline(
        transformer=_parts.random_model(ZImageTransformer2DModel, DENOISER, device, dtype, seed),
        vae=_parts.random_model(AutoencoderKL, _vae.FLUX, device, dtype, seed),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
    )


def inputs(pipe, *, height, width, num_frames=None, prompt_length=None, batch=1, cfg=None, seed=0) -> dict:
    """`batch` embeddings [L, 2560] in a list, L up to 512 (64 if not given). Negative ones, an empty prompt: L is 8."""
    draw, width_in = _parts.drawer(pipe.transformer, seed), pipe.transformer.config.cap_feat_dim
    scale = _parts.guidance(cfg, GUIDANCE)
    kwargs = {
        **_parts.size(height, width, num_frames),
        "prompt_embeds": [draw(prompt_length or 64, width_in) for _ in range(batch)],
        "guidance_scale": scale,
    }
    if scale > 0:
        kwargs["negative_prompt_embeds"] = [draw(8, width_in) for _ in range(batch)]
    return kwargs
