"""The denoiser and the text encoder, trained together: flow matching, from noise at sigma 1 to the emoji at 0."""

from __future__ import annotations

from unittest.mock import patch

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_qwenimage

from training.prompts import Prompts, embedded

NOTHING = 0.1  # how often the prompt is empty, for classifier-free guidance


def start_small(transformer) -> None:
    """Blocks that do nothing yet, and an output of zero: the usual start of a DiT."""
    last = [linear for block in transformer.transformer_blocks for linear in (block.img_mod[1], block.txt_mod[1])]
    for linear in (*last, transformer.norm_out.linear, transformer.proj_out):
        torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(linear.bias)


def packed(pipe, latents: torch.Tensor) -> torch.Tensor:
    """Normalised and as rows, the way the pipeline keeps them: [pictures, rows, 4 x channels]."""
    config = pipe.vae.config
    mean, std = (torch.tensor(of, device=latents.device).view(1, -1, 1, 1) for of in (config.latents_mean, config.latents_std))
    return pipe._pack_latents((latents - mean) / std, *latents.shape)


def loss(pipe, prompts: Prompts, rows: torch.Tensor, grid: tuple[int, int], batch: int) -> torch.Tensor:
    """rows: the packed latents of every emoji; grid: how many of them high and wide."""
    emoji = torch.randint(rows.shape[0], (batch,), device=rows.device)
    text, mask = embedded(pipe.text_encoder, *prompts.drawn(emoji, NOTHING), prompts.prefix)
    clean = rows[emoji]
    noise = torch.randn_like(clean)
    sigma = sigmas(batch, pipe.scheduler.config.shift, rows.device)
    mixed = torch.lerp(clean, noise, sigma[:, None, None])
    with patch.object(transformer_qwenimage, "compute_text_seq_len_from_mask", lengths_left_out):
        guess = pipe.transformer(
            hidden_states=mixed,
            timestep=sigma,
            encoder_hidden_states=text,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, *grid)]] * batch,
            return_dict=False,
        )[0]
    return F.mse_loss(guess, noise - clean)


def lengths_left_out(text: torch.Tensor, mask: torch.Tensor) -> tuple[int, None, torch.Tensor]:
    """diffusers 0.42 counts each prompt's rows, and then has no use for the count; a constant in it cannot be recorded."""
    return text.shape[1], None, mask


def sigmas(batch: int, shift: float, device: torch.device) -> torch.Tensor:
    """Most in the middle, a fifth anywhere; shifted as the scheduler shifts them."""
    middle = torch.randn(batch, device=device).sigmoid()
    anywhere = torch.rand(batch, device=device)
    drawn = torch.where(torch.rand(batch, device=device) < 0.2, anywhere, middle)
    return shift * drawn / (1 + (shift - 1) * drawn)
