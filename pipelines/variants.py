"""The edit, inpaint, image-to-image, image-to-video and control pipelines of the eight families, tiny, with random weights.

    pipe, given = variants.build("FluxControlNetPipeline")     # `given`: what its call needs beside a prompt and a size
    pipe("a red cat", height=64, width=64, **given)

A pipeline that takes the parts of its family's tiny pipeline and a picture is a line in a table here; the others, a few lines.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, Siglip2VisionConfig, Siglip2VisionModel

import pipelines
from pipelines import _parts, _text, flux, qwen_image, sana, sd3, sdxl

Built = tuple[Any, dict[str, Any]]
Given = Callable[[int, int], Any]  # an argument of the call, from height and width
Changes = Callable[[Any, int], dict[str, Any]]  # the parts to put into the family's tiny pipeline, from it and the seed


def picture(height: int = 64, width: int = 64, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def mask(height: int = 64, width: int = 64) -> Image.Image:
    """White, to be painted, in its left half."""
    half = np.zeros((height, width), np.uint8)
    half[:, : width // 2] = 255
    return Image.fromarray(half)


def build(name: str, height: int = 64, width: int = 64, seed: int = 0) -> Built:
    """The tiny pipeline of diffusers' class `name`, and what its call needs beside a prompt and a size."""
    return VARIANTS[name](name, height, width, seed)


def _of_class(name: str, parts: dict[str, Any]) -> Any:
    """A pipeline of diffusers' class `name` (what follows a comma is ours), out of those of the parts that it takes."""
    cls = getattr(diffusers, name.partition(",")[0])
    taken = inspect.signature(cls.__init__).parameters
    return cls(**{key: part for key, part in parts.items() if key in taken})


def _simple(family: str, **given: Given) -> Callable[..., Built]:
    """A pipeline with the very parts of its family's."""

    def make(name: str, height: int, width: int, seed: int) -> Built:
        pipe = _of_class(name, pipelines.build(family, seed=seed).components)
        return pipe, {key: value(height, width) for key, value in given.items()}

    return make


def _rebuilt(family: str, changes: Changes, **given: Given) -> Callable[..., Built]:
    """A pipeline with other parts, or more of them: `changes` makes them, given the tiny pipeline and the seed."""

    def make(name: str, height: int, width: int, seed: int) -> Built:
        base = pipelines.build(family, seed=seed)
        pipe = _of_class(name, {**base.components, **changes(base, seed)})
        return pipe, {key: value(height, width) for key, value in given.items()}

    return make


def _denoiser(family: str, cls: Any, **changes: Any) -> Changes:
    parts = pipelines.module(family)
    return lambda base, seed: {"transformer": _parts.random_model(cls, {**parts.DENOISER, **parts.TINY, **changes}, seed=seed)}


def _unet(**changes: Any) -> Changes:
    config = {**sdxl.DENOISER, **sdxl.TINY, **changes}
    return lambda base, seed: {"unet": _parts.random_model(diffusers.UNet2DConditionModel, config, seed=seed)}


def _control(cls: Any, config: dict[str, Any], part: str = "controlnet") -> Changes:
    return lambda base, seed: {part: _parts.random_model(cls, config, seed=seed + 5)}


def _of(denoiser: dict[str, Any], *left_out: str, **changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**denoiser, **changes}.items() if key not in left_out}


def _z_image_control(in_dim: int) -> Changes:
    def make(base: Any, seed: int) -> dict[str, Any]:
        places = {"control_layers_places": [0], "control_refiner_layers_places": [0], "control_in_dim": in_dim}
        config = {**places, "add_control_noise_refiner": "control_noise_refiner", "dim": 64, "n_refiner_layers": 1}
        net = _parts.random_model(diffusers.ZImageControlNetModel, {**config, "n_heads": 4, "n_kv_heads": 4}, seed=seed + 5)
        return {"controlnet": diffusers.ZImageControlNetModel.from_transformer(net, base.transformer)}

    return make


class _Siglip2Processor:
    """16 patches of each picture: the real one needs torchvision."""

    def __call__(self, images: list[Image.Image], **_: Any) -> Any:
        small = [np.asarray(image.convert("RGB").resize((16, 16)), np.float32) / 127.5 - 1 for image in images]
        patches = [a.reshape(4, 4, 4, 4, 3).transpose(0, 2, 1, 3, 4).reshape(16, 48) for a in small]
        return _Batch(
            pixel_values=torch.from_numpy(np.stack(patches)),
            pixel_attention_mask=torch.ones(len(images), 16, dtype=torch.long),
            spatial_shapes=torch.full((len(images), 2), 4),
        )


class _QwenProcessor:
    """The text side of Qwen2-VL's: a picture is as many tokens as it has tiles of 28x28. (The other side needs torchvision.)"""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: list[str], images: Any = None, **_: Any) -> Any:
        given = images if isinstance(images, list) else [] if images is None else [images]
        tiles = [(image.width // 28) * (image.height // 28) for image in given]
        for count in tiles:
            text = [t.replace("<|image_pad|>", "<|image|>" * count, 1) for t in text]
        tokens = self._tokenizer([t.replace("<|image|>", "*") for t in text], padding=True, return_tensors="pt")
        return _Batch(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)


class _Batch(dict):
    __getattr__ = dict.__getitem__

    def to(self, device: Any) -> _Batch:
        return _Batch({key: value.to(device) for key, value in self.items()})


def _omni(base: Any, seed: int) -> dict[str, Any]:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Siglip2VisionConfig(**vision, patch_size=4, num_patches=16, vision_use_head=False)
    siglip = _text.encoder(Siglip2VisionModel, config, seed)
    denoiser = _denoiser("z_image", diffusers.ZImageTransformer2DModel, siglip_feat_dim=32)(base, seed)
    vae = base.vae.to(torch.bfloat16)  # the pipeline gives it bfloat16 whatever it is
    return {**denoiser, "siglip": siglip, "siglip_processor": _Siglip2Processor(), "vae": vae}


def _edit(base: Any, seed: int) -> dict[str, Any]:
    return {"processor": _QwenProcessor(base.tokenizer)}


def _image_to_video(base: Any, seed: int) -> dict[str, Any]:
    """As Wan 2.1: CLIP looks at the first frame, and the denoiser is told."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    looks = _text.encoder(CLIPVisionModel, CLIPVisionConfig(**vision, image_size=32, patch_size=16), seed)
    size = {"shortest_edge": 32}
    processor = CLIPImageProcessor(size=size, crop_size={"height": 32, "width": 32})
    changes = {"in_channels": 36, "image_dim": 32, "added_kv_proj_dim": 32}
    denoiser = _denoiser("wan", diffusers.WanTransformer3DModel, **changes)(base, seed)
    return {**denoiser, "image_encoder": looks, "image_processor": processor}


def _first_frame(base: Any, seed: int) -> dict[str, Any]:
    """As Wan 2.2 A14B: two denoisers, which see the first frame among the latents alone."""
    denoisers = [_denoiser("wan", diffusers.WanTransformer3DModel, in_channels=36)(base, seed + i) for i in range(2)]
    both = {"transformer": denoisers[0]["transformer"], "transformer_2": denoisers[1]["transformer"]}
    return {**both, "boundary_ratio": 0.9}


def _vace(base: Any, seed: int) -> dict[str, Any]:
    denoiser = _denoiser("wan", diffusers.WanVACETransformer3DModel, vace_layers=[0, 1], vace_in_channels=96)
    return denoiser(base, seed)


def _frames(height: int, width: int) -> list[Image.Image]:
    return [picture(height, width, seed) for seed in range(5)]


_QWEN_CONTROL = _of({**qwen_image.DENOISER, **qwen_image.TINY}, "guidance_embeds", num_layers=1)
_FLUX_CONTROL = _of({**flux.DENOISER, **flux.TINY}, num_layers=1, num_single_layers=1)
_SD3_CONTROL = _of({**sd3.DENOISER, **sd3.TINY}, num_layers=1, dual_attention_layers=())
_SANA_CONTROL = _of({**sana.DENOISER, **sana.TINY}, num_layers=1)
_SDXL_CONTROL = _of(
    {**sdxl.DENOISER, **sdxl.TINY},
    "sample_size",
    "out_channels",
    "up_block_types",
    conditioning_embedding_out_channels=(4, 4, 8, 8),
)
_ADAPTER = {"channels": [16, 32, 32, 32], "num_res_blocks": 1, "downscale_factor": 16, "adapter_type": "full_adapter_xl"}
_FLUX = diffusers.FluxTransformer2DModel

_image = {"image": picture}
_painted = {"image": picture, "mask_image": mask}
_controlled = {"control_image": picture}

#: How each is made, by diffusers' name.
VARIANTS: dict[str, Callable[..., Built]] = {
    "QwenImageImg2ImgPipeline": _simple("qwen_image", **_image),
    "QwenImageInpaintPipeline": _simple("qwen_image", **_painted),
    "QwenImageEditPipeline": _rebuilt("qwen_image", _edit, **_image),
    "QwenImageEditInpaintPipeline": _rebuilt("qwen_image", _edit, **_painted),
    "QwenImageEditPlusPipeline": _rebuilt("qwen_image", _edit, image=lambda h, w: [picture(h, w), picture(w, h, 1)]),
    "QwenImageControlNetPipeline": _rebuilt(
        "qwen_image", _control(diffusers.QwenImageControlNetModel, _QWEN_CONTROL), **_controlled
    ),
    "QwenImageControlNetInpaintPipeline": _rebuilt(
        "qwen_image",
        _control(diffusers.QwenImageControlNetModel, {**_QWEN_CONTROL, "extra_condition_channels": 4}),
        **_controlled,
        control_mask=mask,
    ),
    "ZImageImg2ImgPipeline": _simple("z_image", **_image),
    "ZImageInpaintPipeline": _simple("z_image", **_painted),
    "ZImageControlNetPipeline": _rebuilt("z_image", _z_image_control(16), **_controlled),
    "ZImageControlNetInpaintPipeline": _rebuilt("z_image", _z_image_control(33), **_painted, **_controlled),
    "ZImageOmniPipeline": _rebuilt("z_image", _omni, image=lambda h, w: [picture(h, w)]),
    "FluxImg2ImgPipeline": _simple("flux", **_image),
    "FluxInpaintPipeline": _simple("flux", **_painted),
    "FluxFillPipeline": _rebuilt("flux", _denoiser("flux", _FLUX, in_channels=384, out_channels=64), **_painted),
    "FluxKontextPipeline": _simple("flux", **_image, max_area=lambda h, w: h * w, _auto_resize=lambda h, w: False),
    "FluxKontextInpaintPipeline": _simple("flux", **_painted, max_area=lambda h, w: h * w, _auto_resize=lambda h, w: False),
    "FluxControlPipeline": _rebuilt("flux", _denoiser("flux", _FLUX, in_channels=128, out_channels=64), **_controlled),
    "FluxControlImg2ImgPipeline": _rebuilt(
        "flux", _denoiser("flux", _FLUX, in_channels=128, out_channels=64), **_image, **_controlled
    ),
    "FluxControlInpaintPipeline": _rebuilt(
        "flux", _denoiser("flux", _FLUX, in_channels=128, out_channels=64), **_painted, **_controlled
    ),
    "FluxControlNetPipeline": _rebuilt("flux", _control(diffusers.FluxControlNetModel, _FLUX_CONTROL), **_controlled),
    "FluxControlNetImg2ImgPipeline": _rebuilt(
        "flux", _control(diffusers.FluxControlNetModel, _FLUX_CONTROL), **_image, **_controlled
    ),
    "FluxControlNetInpaintPipeline": _rebuilt(
        "flux", _control(diffusers.FluxControlNetModel, _FLUX_CONTROL), **_painted, **_controlled
    ),
    "StableDiffusion3Img2ImgPipeline": _simple("sd3", **_image),
    "StableDiffusion3InpaintPipeline": _simple("sd3", **_painted),
    "StableDiffusion3ControlNetPipeline": _rebuilt("sd3", _control(diffusers.SD3ControlNetModel, _SD3_CONTROL), **_controlled),
    "StableDiffusion3ControlNetInpaintingPipeline": _rebuilt(
        "sd3",
        _control(diffusers.SD3ControlNetModel, {**_SD3_CONTROL, "extra_conditioning_channels": 1}),
        **_controlled,
        control_mask=mask,
    ),
    "PixArtAlphaPipeline": _simple("pixart"),
    "SanaSprintPipeline": _rebuilt(
        "sana",
        lambda base, seed: {
            **_denoiser("sana", diffusers.SanaTransformer2DModel, guidance_embeds=True, sample_size=32)(base, seed),
            "scheduler": diffusers.SCMScheduler(),
        },
    ),
    "SanaSprintImg2ImgPipeline": _rebuilt(
        "sana",
        lambda base, seed: {
            **_denoiser("sana", diffusers.SanaTransformer2DModel, guidance_embeds=True, sample_size=32)(base, seed),
            "scheduler": diffusers.SCMScheduler(),
        },
        **_image,
    ),
    "SanaControlNetPipeline": _rebuilt("sana", _control(diffusers.SanaControlNetModel, _SANA_CONTROL), **_controlled),
    "WanImageToVideoPipeline": _rebuilt("wan", _image_to_video, **_image, num_frames=lambda h, w: 5),
    "WanImageToVideoPipeline, two denoisers": _rebuilt("wan", _first_frame, **_image, num_frames=lambda h, w: 5),
    "WanVideoToVideoPipeline": _simple("wan", video=_frames),
    "WanVACEPipeline": _rebuilt("wan", _vace, video=_frames, num_frames=lambda h, w: 5),
    "StableDiffusionXLImg2ImgPipeline": _simple("sdxl", **_image),
    "StableDiffusionXLInpaintPipeline": _simple("sdxl", **_painted),
    "StableDiffusionXLInpaintPipeline, nine channels": _rebuilt("sdxl", _unet(in_channels=9), **_painted),
    "StableDiffusionXLInstructPix2PixPipeline": _rebuilt("sdxl", _unet(in_channels=8), **_image),
    "StableDiffusionXLControlNetPipeline": _rebuilt("sdxl", _control(diffusers.ControlNetModel, _SDXL_CONTROL), **_image),
    "StableDiffusionXLControlNetImg2ImgPipeline": _rebuilt(
        "sdxl", _control(diffusers.ControlNetModel, _SDXL_CONTROL), **_image, **_controlled
    ),
    "StableDiffusionXLControlNetInpaintPipeline": _rebuilt(
        "sdxl", _control(diffusers.ControlNetModel, _SDXL_CONTROL), **_painted, **_controlled
    ),
    "StableDiffusionXLControlNetUnionPipeline": _rebuilt(
        "sdxl",
        _control(
            diffusers.ControlNetUnionModel,
            {**_SDXL_CONTROL, "num_control_type": 2, "num_trans_channel": 16, "num_trans_head": 2, "num_proj_channel": 16},
        ),
        control_image=lambda h, w: [picture(h, w)],
        control_mode=lambda h, w: [0],
    ),
    "StableDiffusionXLAdapterPipeline": _rebuilt("sdxl", _control(diffusers.T2IAdapter, _ADAPTER, "adapter"), **_image),
    "StableDiffusionXLPAGPipeline": _simple("sdxl"),
}
