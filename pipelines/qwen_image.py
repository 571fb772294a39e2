"""Qwen-Image: a joint-attention DiT of 20.4B, prompts of variable length, CFG as two calls a step."""

from __future__ import annotations

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)

from pipelines import _parts, _text, _vae

SHAPES = ("512x512", "1024x1024")
GUIDANCE = 4.0  # true_cfg_scale of the model card

# transformer/config.json and scheduler/scheduler_config.json of Qwen/Qwen-Image; its VAE is Wan's
DENOISER = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 60,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 3584,
    "guidance_embeds": False,
    "axes_dims_rope": (16, 56, 56),
}
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}

TINY = {
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (4, 6, 6),
}
# The text around each prompt is the pipeline's own, and set in its constructor: the tokenizer is trained on a copy
TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)


def tiny(seed: int = 0) -> QwenImagePipeline:
    tokenizer, text_encoder = _text.qwen2_5_vl(seed, TEMPLATE)
    return QwenImagePipeline(
        transformer=_parts.random_model(QwenImageTransformer2DModel, {**DENOISER, **TINY}, seed=seed),
        vae=_parts.random_model(AutoencoderKLQwenImage, {**_vae.WAN, **_vae.TINY_WAN}, seed=seed),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
    )


def full(device="cuda", dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> QwenImagePipeline:
    return QwenImagePipeline(
        transformer=_parts.random_model(QwenImageTransformer2DModel, DENOISER, device, dtype, seed),
        vae=_parts.random_model(AutoencoderKLQwenImage, _vae.WAN, device, dtype, seed),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        text_encoder=None,
        tokenizer=None,
    )


def inputs(pipe, *, height, width, num_frames=None, prompt_length=None, batch=1, cfg=None, seed=0) -> dict:
    """Embeddings [batch, L, 3584] of any L up to 1024 (64 if not given), and masks of ones.

    Negative ones are 6 rows, what the published `negative_prompt=" "` becomes: two lengths, as in life.
    """
    draw, width_in = _parts.drawer(pipe.transformer, seed), pipe.transformer.config.joint_attention_dim
    scale = _parts.guidance(cfg, GUIDANCE)
    embeds = draw(batch, prompt_length or 64, width_in)
    kwargs = {
        **_parts.size(height, width, num_frames),
        "prompt_embeds": embeds,
        "prompt_embeds_mask": _parts.padding_mask(embeds, embeds.shape[1]),
        "true_cfg_scale": scale,
    }
    if scale > 1:
        negative = draw(batch, 6, width_in)
        kwargs |= {
            "negative_prompt_embeds": negative,
            "negative_prompt_embeds_mask": _parts.padding_mask(negative, negative.shape[1]),
        }
    return kwargs
