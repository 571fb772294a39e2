"""Prompt buckets: prompts of many lengths through one recording. What a family's forward needs for it: `families`."""
