"""Random models of any size, made quickly and repeatably, and random inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import init_empty_weights
from diffusers import ModelMixin

Model = TypeVar("Model", bound=torch.nn.Module)


def random_model(
    cls: Callable[..., Model],
    config: dict[str, Any],
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Model:
    """`cls(**config)`, a model of diffusers or transformers, with random weights that were never anywhere but on `device`.

    Parameters are born on the meta device, while buffers and tables that the constructor computes (RoPE, positions) are
    computed for real: `to_empty` on a whole meta model would leave garbage in them. `device="meta"`: shapes alone.
    """
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=str(device) == "meta"):
        model = cls(**config)
    # As from_pretrained(torch_dtype=...) does: some parts of diffusers' models stay in float32 (of transformers' only beside
    # float16), non-persistent buffers keep their own dtype.
    kept = set(model._keep_in_fp32_modules or ()) if isinstance(model, ModelMixin) else set()

    def materialise(name: str, tensor: torch.Tensor) -> torch.Tensor:
        wanted = torch.float32 if kept & set(name.split(".")) else dtype
        return torch.empty_like(tensor, dtype=wanted, device=device) if tensor.is_meta else tensor.to(device, wanted)

    model.load_state_dict({name: materialise(name, t) for name, t in model.state_dict().items()}, assign=True)
    return randomize(model.to(device), seed)


@torch.no_grad()
def randomize(model: Model, seed: int = 0) -> Model:
    """Draw every weight anew so that activations stay of order one, and no output layer is left at zero.

    Norm scales are one, biases small, everything else normal with 1/sqrt(fan-in).
    """
    parameters = dict(model.named_parameters())
    device = next(iter(parameters.values())).device
    if device.type == "meta":
        return model.eval()
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in parameters.items():
        if name.endswith("bias"):
            parameter.normal_(0, 0.02, generator=generator)
        elif parameter.numel() == parameter.shape[0]:  # one number a channel: the scale of a norm
            parameter.fill_(1)
        else:
            parameter.normal_(0, (parameter.shape[0] / parameter.numel()) ** 0.5, generator=generator)
    return model.eval()


def drawer(denoiser, seed: int) -> Callable[..., torch.Tensor]:
    """`draw(*shape)`: normal numbers in the denoiser's dtype, on its device, the same for every device."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator).to(denoiser.device, denoiser.dtype)


def padding_mask(embeds: torch.Tensor, length: int) -> torch.Tensor:
    """int64 [B, L]: ones for the first `length` rows of `embeds` [B, L, D], zeros for the padding after them."""
    mask = torch.zeros(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    mask[:, :length] = 1
    return mask


def guidance(cfg: float | bool | None, published: float) -> float:
    """The guidance scale that `cfg` asks for; see `pipelines.inputs`."""
    if cfg is None:
        return published
    if cfg is True:
        return published if published > 1 else 4.0
    return float(cfg)


def size(height: int, width: int, num_frames: int | None) -> dict[str, int]:
    """The size as a pipeline takes it. One that makes no videos refuses `num_frames` itself."""
    frames = {} if num_frames is None else {"num_frames": num_frames}
    return {"height": height, "width": width, **frames}


def masked_inputs(pipe, scale: float, batch: int, length: int, seed: int) -> dict[str, Any]:
    """For PixArt and SANA: embeddings [batch, length, caption_channels], the first half prompt and the rest padding.

    Resolution binning is off, so that the picture is drawn at the size asked for, not at the nearest one of a table.
    """
    draw, shape = drawer(pipe.transformer, seed), (batch, length, pipe.transformer.config.caption_channels)
    embeds = draw(*shape)
    kwargs = {
        "prompt_embeds": embeds,
        "prompt_attention_mask": padding_mask(embeds, (length + 1) // 2),
        "guidance_scale": scale,
        "use_resolution_binning": False,
        "negative_prompt": None,  # its default is "", which may not stand beside negative embeddings
    }
    if scale > 1:
        kwargs |= {"negative_prompt_embeds": draw(*shape), "negative_prompt_attention_mask": padding_mask(embeds, 1)}
    return kwargs
