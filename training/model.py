"""The embedded pipeline before training: Qwen-Image's own classes, all small. 64x64 pixels are 8x8 image rows."""

from __future__ import annotations

import json
import random

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from pipelines.qwen_image import TEMPLATE
from training import wordings

PIXELS = 8  # per image row, each way: the VAE makes pictures 4x smaller, and the denoiser takes latents 2x2
LATENTS = 16
WIDTH = 128
VOCABULARY = 3000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

DENOISER = {
    "patch_size": 2,
    "in_channels": 4 * LATENTS,
    "out_channels": LATENTS,
    "num_layers": 6,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": WIDTH,
    "guidance_embeds": False,
    "axes_dims_rope": (8, 12, 12),
}
VAE = {
    "base_dim": 16,
    "z_dim": LATENTS,
    "dim_mult": [1, 2, 3],
    "num_res_blocks": 1,
    "attn_scales": [],
    "temperal_downsample": [False, False],
    "dropout": 0.0,
    "latents_mean": [0.0] * LATENTS,
    "latents_std": [1.0] * LATENTS,
}
TEXT = {
    "hidden_size": WIDTH,
    "intermediate_size": 3 * WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
}
# The class has an eye, which a pipeline that only reads never opens
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": WIDTH, "patch_size": 2}
SCHEDULER = {"shift": 2.0, "use_dynamic_shifting": False}


def build(names: list[str]) -> QwenImagePipeline:
    tokenizer = read_tokenizer(names)
    config = Qwen2_5_VLConfig(text_config={**TEXT, "vocab_size": len(tokenizer)}, vision_config=VISION, tie_word_embeddings=True)
    return QwenImagePipeline(
        transformer=QwenImageTransformer2DModel(**DENOISER),
        vae=AutoencoderKLQwenImage(**VAE),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokenizer,
    )


def read_tokenizer(names: list[str]) -> Qwen2Tokenizer:
    """Byte pairs, merged by what training asks for.

    The pipeline cuts a fixed number of tokens, those before the prompt in the published vocabulary, off its template. With
    each word of it one token, the number is the same: so it is read often.
    """
    rng = random.Random(0)
    corpus = [TEMPLATE] * 5000 + [f" {name} {wordings.trained(name, rng)}" for name in names for _ in range(12)]
    learner = Tokenizer(models.BPE())
    published = Qwen2Tokenizer(vocab={SPECIAL[0]: 0}, merges=[]).backend_tokenizer
    learner.normalizer, learner.pre_tokenizer = published.normalizer, published.pre_tokenizer
    learner.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    learnt = json.loads(learner.to_str())["model"]
    merges = [tuple(pair) for pair in learnt["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=learnt["vocab"], merges=merges, model_max_length=1024)
    tokenizer.add_tokens(SPECIAL[1:], special_tokens=True)
    return tokenizer
