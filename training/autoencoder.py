"""The VAE: trained to give pictures back from latents that are a little off, then its latents are measured."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from training.pictures import as_input

BLUR = 0.15  # noise on latents of about unit size: what the denoiser gets wrong, the decoder is to forgive


def loss(vae, pixels: torch.Tensor, batch: int) -> torch.Tensor:
    """Around the class's own encode and decode: these clamp, and nothing is learnt beyond a clamp."""
    picture = as_input(pixels[torch.randint(pixels.shape[0], (batch,), device=pixels.device)])
    latents = mean_of(vae, picture)
    back = vae.decoder(vae.post_quant_conv(latents + BLUR * torch.randn_like(latents)))
    size = (latents.pow(2).mean(dim=(0, 2, 3, 4)) - 1).pow(2).mean()
    return F.l1_loss(back, picture) + F.mse_loss(back, picture) + 0.01 * size


def mean_of(vae, picture: torch.Tensor) -> torch.Tensor:
    return vae.quant_conv(vae.encoder(picture)).chunk(2, dim=1)[0]


@torch.no_grad()
def encoded(vae, pixels: torch.Tensor, batch: int = 64) -> torch.Tensor:
    """[pictures, channels, height / 4, width / 4]"""
    return torch.cat([mean_of(vae, as_input(some))[:, :, 0] for some in pixels.split(batch)])


def measured(vae, latents: torch.Tensor) -> None:
    """Writes the mean and the deviation of each channel where the pipeline looks for them."""
    vae.register_to_config(latents_mean=latents.mean(dim=(0, 2, 3)).tolist(), latents_std=latents.std(dim=(0, 2, 3)).tolist())


@torch.no_grad()
def psnr(vae, pixels: torch.Tensor) -> float:
    errors = []
    for some in pixels.split(64):
        back = vae.decode(vae.encode(as_input(some)).latent_dist.mode()).sample
        errors.append(((back - as_input(some)) / 2).pow(2).mean())
    return -10 * torch.stack(errors).mean().log10().item()
