"""What a family's forward needs so that prompts of many lengths can share a recording. The one place in the library that names
models; a denoiser without a rule here is recorded for each length exactly."""

from __future__ import annotations

import torch

from diffgraph.families.base import PromptRule
from diffgraph.families.qwen_image import QwenImage
from diffgraph.families.text_first import TextFirst
from diffgraph.families.z_image import ZImage

RULES: dict[str, PromptRule] = {
    "QwenImageTransformer2DModel": QwenImage(
        "encoder_hidden_states", mask="encoder_hidden_states_mask", absent=("txt_seq_lens",)
    ),
    "CogView4Transformer2DModel": TextFirst("encoder_hidden_states", mask="attention_mask"),
    "GlmImageTransformer2DModel": TextFirst("encoder_hidden_states", mask="attention_mask", absent=("kv_caches",)),
    "ZImageTransformer2DModel": ZImage(),
}


def rule_of(module: torch.nn.Module) -> PromptRule | None:
    """The rule for this denoiser, if its forward is the one that the rule was written for."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith("diffusers.") and kind.__name__ in RULES:
            own = getattr(type(module), "forward", None) is getattr(kind, "forward", None)
            rule = RULES[kind.__name__]
            return rule if own and rule.fits(module, kind) else None
    return None
