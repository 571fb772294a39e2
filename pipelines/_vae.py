"""The AutoencoderKL that Stable Diffusion started and FLUX, SD3, Z-Image, PixArt and SDXL kept: 8x smaller each way."""

KL = {
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "norm_num_groups": 32,
}
# vae/config.json of black-forest-labs/FLUX.1-dev; Z-Image uses the same
FLUX = {
    **KL,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}

TINY_KL = {"block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}

# Of AutoencoderKLWan and AutoencoderKLQwenImage, which share Wan 2.1's VAE: 8x smaller each way, 4x in time
WAN = {
    "base_dim": 96,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
}  # latents_mean and latents_std are the classes' own defaults

TINY_WAN = {"base_dim": 8, "dim_mult": [1, 1, 2, 2], "num_res_blocks": 1}
