"""A model's repeated blocks, compiled between the breaks."""
