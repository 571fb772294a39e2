"""The cases: one module a kind of denoiser, each with its `case` register."""
