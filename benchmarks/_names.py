"""What families, modes and notes are called, in tables and on the command line."""

NAMES = {
    "qwen_image": "Qwen-Image 20.4B",
    "flux": "FLUX.1 11.9B",
    "z_image": "Z-Image 6.2B",
    "sd3": "SD3.5-medium 2.2B",
    "pixart": "PixArt 0.6B",
    "sana": "SANA 1.6B",
    "wan": "Wan2.1 1.3B",
    "sdxl": "SDXL 2.6B",
}
MODES = (
    "eager",
    "torch.compile",
    "torch.compile:reduce-overhead",
    "torch.compile:max-autotune-no-cudagraphs",
    "torch.compile:regional",
    "full",
    "breakable",
    "breakable+compile",
)
MORE_MODES = (
    "full+compile",
    "full+torch.compile",  # the whole forward compiled by `module.compile()`, then recorded
    "breakable+compile:static",
    "breakable+compile:max-autotune-no-cudagraphs",
)
NOT_READY = "not ready after "  # begins the note of a mode that took too long
