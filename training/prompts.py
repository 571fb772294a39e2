"""Wordings as tokens, and tokens as embeddings, the way the pipeline makes them but for whole batches at once."""

from __future__ import annotations

import random

import torch

from training import wordings

LONGEST = 28  # rows that the denoiser sees while it is trained; longer wordings are not
VARIANTS = 128  # wordings of a name
NOTHING = ("", " ")  # what people give as negative prompts; the model learns them as "any emoji"


class Prompts:
    """ids: int64 [names + 1, VARIANTS, prefix + LONGEST], the last name being nothing; lengths: the rows the denoiser sees."""

    def __init__(self, pipe, names: list[str], device: torch.device, seed: int = 0) -> None:
        self.prefix = pipe.prompt_template_encode_start_idx
        rng = random.Random(seed)
        said = [wordings.trained(name, rng) for name in names for _ in range(VARIANTS)]
        said += [NOTHING[i % len(NOTHING)] for i in range(VARIANTS)]
        bare = [name for name in names for _ in range(VARIANTS)]
        tokens = tokenized(pipe, said)
        for i, name in enumerate(bare):
            if len(tokens[i]) > self.prefix + LONGEST:
                tokens[i] = tokenized(pipe, [name])[0]
        width = self.prefix + LONGEST
        assert max(map(len, tokens)) <= width, "a bare name is too long"
        padded = torch.tensor([row + [0] * (width - len(row)) for row in tokens])
        lengths = torch.tensor([len(row) - self.prefix for row in tokens])
        self.ids = padded.view(len(names) + 1, VARIANTS, width).to(device)
        self.lengths = lengths.view(len(names) + 1, VARIANTS).to(device)

    def drawn(self, emoji: torch.Tensor, nothing: float) -> tuple[torch.Tensor, torch.Tensor]:
        """ids and lengths of one wording for each emoji [batch]; of nothing at all for that share of them."""
        chance = torch.rand(emoji.shape, device=emoji.device)
        row = emoji.masked_fill(chance < nothing, self.ids.shape[0] - 1)
        variant = torch.randint(VARIANTS, emoji.shape, device=emoji.device)
        return self.ids[row, variant], self.lengths[row, variant]


def tokenized(pipe, prompts: list[str]) -> list[list[int]]:
    return pipe.tokenizer([pipe.prompt_template_encode.format(prompt) for prompt in prompts]).input_ids


def embedded(text_encoder, ids: torch.Tensor, lengths: torch.Tensor, prefix: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings [batch, rows, width] and their mask [batch, rows].

    The encoder looks back only, so that padding behind the prompt needs no mask: none is made, which would take a host read.
    """
    reader = text_encoder.model.language_model
    hidden = reader(input_ids=ids, attention_mask={"full_attention": None}, use_cache=False).last_hidden_state[:, prefix:]
    return hidden, torch.arange(hidden.shape[1], device=ids.device) < lengths[:, None]
