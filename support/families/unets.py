"""U-Nets, and what is fed into them: residuals of ControlNets and T2I adapters, IP-adapters, host timesteps, motion adapters."""

from __future__ import annotations

import torch

from support.cases import BATCHED, NO_GUIDANCE, Cases, Draw, classes, model, randomized

case = Cases()

SMALL = {"block_out_channels": (4, 8), "norm_num_groups": 4, "cross_attention_dim": 8, "layers_per_block": 1, "sample_size": 8}
UNET = {**SMALL, "attention_head_dim": 2, "in_channels": 4, "out_channels": 4}
UNET |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
#: Of that U-Net's skip connections, from an 8x8 latent.
SKIPS = [(2, 4, 8, 8), (2, 4, 8, 8), (2, 4, 4, 4), (2, 8, 4, 4)]
MIDDLE = (2, 8, 4, 4)


def sample(draw: Draw) -> dict:
    return {"sample": draw(2, 4, 8, 8), "timestep": draw.steps(), "encoder_hidden_states": draw(2, 6, 8)}


@case("UNet2DConditionModel", cfg=BATCHED, prompt="77", **UNET)
def unet(draw):
    return sample(draw)


@case(
    "UNet2DConditionModel",
    "SDXL",
    cfg=BATCHED,
    prompt="77",
    **UNET,
    addition_embed_type="text_time",
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=64,
    use_linear_projection=True,
)
def sdxl(draw):
    return {**sample(draw), "added_cond_kwargs": {"text_embeds": draw(2, 16), "time_ids": draw.unit(2, 6) * 64}}


@case("UNet2DConditionModel", "a scalar timestep, mask, tuples", cfg=BATCHED, prompt="77", **UNET)
def unet_masked(draw):
    timestep = draw.steps()[0]
    return {**sample(draw), "timestep": timestep, "encoder_attention_mask": draw.mask([6, 3], 6), "return_dict": False}


@case("UNet2DConditionModel", "a timestep on the host", cfg=BATCHED, prompt="77", changes="the timestep", **UNET)
def unet_host_timestep(draw):
    return {**sample(draw), "timestep": draw.pick(981, 961)}


@case("UNet2DConditionModel", "LCM's embedded guidance", cfg="embedded", prompt="77", **UNET, time_cond_proj_dim=8)
def unet_lcm(draw):
    return {**sample(draw), "timestep_cond": draw(2, 8)}


@case("UNet2DConditionModel", "ControlNet residuals as a tuple", cfg=BATCHED, prompt="77", **UNET)
def unet_control_tuple(draw):
    residuals = {"down_block_additional_residuals": tuple(draw.many(SKIPS)), "mid_block_additional_residual": draw(*MIDDLE)}
    return {**sample(draw), **residuals}


@case("UNet2DConditionModel", "ControlNet residuals as a list", cfg=BATCHED, prompt="77", **UNET)
def unet_control_list(draw):
    residuals = {"down_block_additional_residuals": draw.many(SKIPS), "mid_block_additional_residual": draw(*MIDDLE)}
    return {**sample(draw), **residuals}


@case(
    "UNet2DConditionModel",
    "T2I adapter residuals",
    cfg=BATCHED,
    prompt="77",
    note="Its forward takes them off the caller's list: so does a replay",
    **UNET,
)
def unet_adapter(draw):
    return {**sample(draw), "down_intrablock_additional_residuals": draw.many([(2, 4, 8, 8), (2, 8, 4, 4)])}


def ip_adapter_weights(unet: torch.nn.Module) -> dict:
    """Weights of an IP-Adapter for one picture of four tokens: of each cross-attention, and of the projection."""
    width = unet.config.cross_attention_dim
    draw = Draw(7)
    cross = [attention for name, attention in unet.named_modules() if name.endswith("attn2") and "motion" not in name]
    layers = {f"{2 * i + 1}.to_{kind}_ip.weight": draw(a.to_k.out_features, width) for i, a in enumerate(cross) for kind in "kv"}
    norm = {"norm.weight": torch.ones(width), "norm.bias": torch.zeros(width)}
    return {"image_proj": {"proj.weight": draw(4 * width, width), "proj.bias": draw(4 * width), **norm}, "ip_adapter": layers}


def with_ip_adapter(cls: str = "UNet2DConditionModel", **config) -> torch.nn.Module:
    made = model(cls, **(config or UNET))
    made._load_ip_adapter_weights([ip_adapter_weights(made)])
    return made.eval()


@case("UNet2DConditionModel", "IP-Adapter", cfg=BATCHED, prompt="77", build=with_ip_adapter)
def unet_ip_adapter(draw):
    return {**sample(draw), "added_cond_kwargs": {"image_embeds": [draw(2, 1, 8)]}}


@case("UNet2DConditionModel", "IP-Adapter with a mask", cfg=BATCHED, prompt="77", build=with_ip_adapter)
def unet_ip_adapter_masked(draw):
    mask = draw.mask([8] * 4 + [0] * 4, 8, draw.dtype).reshape(1, 1, 8, 8)
    return {**unet_ip_adapter(draw), "cross_attention_kwargs": {"ip_adapter_masks": [mask]}}


@case(
    "UNet2DModel",
    cfg=NO_GUIDANCE,
    block_out_channels=(4, 8),
    norm_num_groups=2,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    attention_head_dim=4,
    layers_per_block=1,
    sample_size=8,
)
def unet_2d(draw):
    return {"sample": draw(2, 3, 8, 8), "timestep": draw.steps()}


def frames(draw: Draw, batch: int = 2, width: int = 8) -> dict:
    return {"sample": draw(batch, 4, 2, 8, 8), "timestep": draw.steps(), "encoder_hidden_states": draw(batch, 4, width)}


DIMENSIONAL = {"down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"), "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")}


@case("UNet3DConditionModel", cfg=BATCHED, prompt="77", **{**UNET, **DIMENSIONAL})
def unet_3d(draw):
    return frames(draw)


I2VGEN = {**SMALL, **DIMENSIONAL, "attention_head_dim": 2, "in_channels": 4, "out_channels": 4}


@case("I2VGenXLUNet", cfg=BATCHED, prompt="77", **I2VGEN)
def i2vgen(draw):
    return {**frames(draw), "fps": draw.const([16, 16]), "image_latents": draw(2, 4, 2, 8, 8), "image_embeddings": draw(2, 8)}


MOTION = {**SMALL, "block_out_channels": (8, 16), "num_attention_heads": 2, "motion_num_attention_heads": 2}
MOTION |= {
    "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
    "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"),
}


def clip(draw: Draw) -> dict:
    return {**frames(draw), "encoder_hidden_states": draw(4, 4, 8)}


@case("UNetMotionModel", cfg=BATCHED, prompt="77", **MOTION)
def unet_motion(draw):
    return clip(draw)


@case("UNetMotionModel", "IP-Adapter", cfg=BATCHED, prompt="77", build=lambda: with_ip_adapter("UNetMotionModel", **MOTION))
def unet_motion_ip_adapter(draw):
    return {**clip(draw), "added_cond_kwargs": {"image_embeds": [draw(2, 1, 8)]}}


def _with_adapter() -> torch.nn.Module:
    """As AnimateDiff's pipelines do: a U-Net for pictures, and the adapter that makes it one for videos."""
    wide = {"block_out_channels": (8, 16)}
    unet = model("UNet2DConditionModel", **{**UNET, **wide})
    adapter = model("MotionAdapter", **wide, motion_layers_per_block=1, motion_num_attention_heads=2, motion_norm_num_groups=4)
    return randomized(classes()["UNetMotionModel"].from_unet2d(unet, adapter))


@case("MotionAdapter", "in a UNetMotionModel", cfg=BATCHED, prompt="77", note="It has no forward of its own", build=_with_adapter)
def motion_adapter(draw):
    return clip(draw)


SVD = {
    "block_out_channels": (32, 64),
    "cross_attention_dim": 8,
    "num_attention_heads": 2,
    "in_channels": 4,
    "layers_per_block": 1,
}
SVD |= {"down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"), "addition_time_embed_dim": 8}
SVD |= {
    "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
    "projection_class_embeddings_input_dim": 24,
}


@case("UNetSpatioTemporalConditionModel", cfg=BATCHED, prompt="a picture", **SVD)
def unet_spatio_temporal(draw):
    video = {"sample": draw(2, 2, 4, 8, 8), "timestep": draw.steps(), "encoder_hidden_states": draw(2, 1, 8)}
    return {**video, "added_time_ids": draw.const([[6.0, 127.0, 0.02]] * 2)}


DREAMLITE = {"block_out_channels": (8, 8, 16), "norm_num_groups": 4, "cross_attention_dim": 8, "layers_per_block": 1}


@case("DreamLiteUNetModel", cfg=BATCHED, prompt="any", **DREAMLITE, attention_head_dim=8, sample_size=8)
def dreamlite(draw):
    return sample(draw)


KANDINSKY3 = {
    "time_embedding_dim": 16,
    "groups": 1,
    "attention_head_dim": 8,
    "layers_per_block": 2,
    "block_out_channels": (16, 32),
}


@case(
    "Kandinsky3UNet",
    cfg=BATCHED,
    prompt="128, masked",
    changes="prompt lengths",
    **KANDINSKY3,
    cross_attention_dim=16,
    encoder_hid_dim=16,
)
def kandinsky3(draw):
    text = {"encoder_hidden_states": draw(2, 6, 16), "encoder_attention_mask": draw.mask(draw.pick([6, 3], [2, 5]), 6)}
    return {"sample": draw(2, 4, 16, 16), "timestep": draw.steps(2), **text}


CASCADE = {
    "in_channels": 4,
    "out_channels": 4,
    "timestep_ratio_embedding_dim": 8,
    "conditioning_dim": 16,
    "block_out_channels": (16, 16),
}
CASCADE |= {"num_attention_heads": (2, 2), "down_num_layers_per_block": (1, 1), "up_num_layers_per_block": (1, 1)}
CASCADE |= {
    "clip_text_in_channels": 16,
    "clip_text_pooled_in_channels": 16,
    "clip_image_in_channels": 16,
    "switch_level": (False,),
}


@case("StableCascadeUNet", cfg=BATCHED, prompt="77", **CASCADE)
def stable_cascade(draw):
    embeddings = {"clip_text_pooled": draw(2, 1, 16), "clip_text": draw(2, 6, 16), "clip_img": draw(2, 1, 16)}
    return {"sample": draw(2, 4, 8, 8), "timestep_ratio": draw.unit(2), **embeddings}


UVIT = {"hidden_size": 16, "cond_embed_dim": 8, "micro_cond_encode_dim": 4, "micro_cond_embed_dim": 20, "encoder_hidden_size": 8}
UVIT |= {
    "vocab_size": 32,
    "codebook_size": 24,
    "in_channels": 8,
    "block_out_channels": 8,
    "num_res_blocks": 1,
    "block_num_heads": 1,
}
UVIT |= {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16, "sample_size": 4}


@case("UVit2DModel", cfg=BATCHED, prompt="77", **UVIT)
def uvit(draw):
    conditions = {"encoder_hidden_states": draw(2, 6, 8), "pooled_text_emb": draw(2, 8), "micro_conds": draw.unit(2, 5) * 64}
    return {"input_ids": draw.ints(24, 2, 4, 4), **conditions}
