"""Text encoders of the real classes, each with a tokenizer made in memory: (tokenizer, encoder) pairs.

Tokens are bytes or characters, so different prompts give different ids and a longer prompt more of them. Encoders are tiny, or
as large as the published ones (`published`).
"""

from __future__ import annotations

import string

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    GemmaTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3Model,
    T5TokenizerFast,
)

from pipelines._parts import random_model, randomize

Pair = tuple[PreTrainedTokenizerBase, PreTrainedModel]

BYTES = sorted(ByteLevel.alphabet())  # one printable stand-in for each of the 256 bytes
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 4096,
}
TINY_DECODER = {**TINY, "num_key_value_heads": 2, "head_dim": 16}

# config.json of openai/clip-vit-large-patch14's text model, google/t5-v1_1-xxl and Qwen/Qwen3-4B
CLIP_L = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
    "vocab_size": 49408,
}
T5_XXL = {"vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "layer_types": None,  # of the tiny one; made anew for these layers
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


def encoder(cls, config, seed: int) -> PreTrainedModel:
    """A tiny random text encoder. Its constructor draws from the global generator, which is left as it was."""
    with torch.random.fork_rng(devices=[]):
        return randomize(cls(config), seed)


def published(tiny: Pair, size: dict, device, dtype: torch.dtype, seed: int) -> Pair:
    """A tiny pair's tokenizer, beside an encoder of its class and of `size`, with random weights on `device`."""
    tokenizer, model = tiny
    config = type(model.config).from_dict({**model.config.to_dict(), **size})
    return tokenizer, random_model(lambda: type(model)(config), {}, device, dtype, seed)


def numbered(*tokens: str) -> dict[str, int]:
    return {token: i for i, token in enumerate(tokens)}


def clip(cls, seed: int) -> Pair:
    """CLIP, 77 tokens: `cls` is CLIPTextModel or CLIPTextModelWithProjection. All embeddings are 32 wide."""
    vocab = numbered("<|startoftext|>", "<|endoftext|>", *BYTES, *(byte + "</w>" for byte in BYTES))
    tokenizer = CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)
    # The pooled row is that of eos_token_id, except for 2, the default: then it is that of the highest id
    config = CLIPTextConfig(
        **{**TINY, "max_position_embeddings": 77},
        projection_dim=32,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return tokenizer, encoder(cls, config, seed)


def t5(cls, seed: int, width: int = 32) -> Pair:
    """T5: `cls` is T5EncoderModel or UMT5EncoderModel. Embeddings are `width` wide."""
    scores = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    scores += [(character, -1.0) for character in "▁" + "".join(sorted(set(string.printable) - set(string.whitespace)))]
    tokenizer = T5TokenizerFast(vocab=scores, extra_ids=0, model_max_length=512)
    config = cls.config_class(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=16,
        d_ff=2 * width,
        num_layers=2,
        num_heads=2,
        feed_forward_proj="gated-gelu",
    )
    return tokenizer, encoder(cls, config, seed)


def gemma2(seed: int) -> Pair:
    """Gemma 2. Embeddings are 32 wide."""
    specials = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    byte_tokens = (f"<0x{byte:02X}>" for byte in range(256))
    tokenizer = GemmaTokenizer(vocab=numbered(*specials, *byte_tokens, "▁"), merges=[], model_max_length=8192)
    config = Gemma2Config(**TINY_DECODER, vocab_size=len(tokenizer))
    return tokenizer, encoder(Gemma2Model, config, seed)


def qwen_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = Qwen2Tokenizer(vocab=numbered("<|endoftext|>", *BYTES), merges=[], model_max_length=4096)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
    return tokenizer


def qwen2_5_vl(seed: int, template: str) -> Pair:
    """Qwen2.5-VL. Embeddings are 32 wide.

    The pipeline cuts a fixed number of tokens, those before the prompt in the published vocabulary, off its `template`.
    Trained on the template, the tokenizer has each of its words as one token, and so the same number.
    """
    tokenizer = qwen_tokenizer().train_new_from_iterator([template], vocab_size=2000, show_progress=False)
    text = {
        **TINY_DECODER,
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return tokenizer, encoder(Qwen2_5_VLForConditionalGeneration, config, seed)


def qwen3(seed: int) -> Pair:
    """Qwen3. Embeddings are 32 wide."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = Qwen3Config(**TINY_DECODER, vocab_size=len(tokenizer))
    return tokenizer, encoder(Qwen3Model, config, seed)
