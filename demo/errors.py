"""What a visitor is told when something cannot be done."""

from __future__ import annotations

import logging

import torch

from diffgraph.errors import DiffgraphError

logger = logging.getLogger("demo")


class NotPossible(Exception):
    """Its text is a sentence for the page."""


def sentence(error: Exception) -> str:
    """An error as a sentence. What nobody foresaw is logged in full: a visitor cannot do anything with a traceback."""
    if isinstance(error, NotPossible):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "The memory of the device is not enough for this. Try a smaller size or fewer pictures."
    said = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    said = said if len(said) <= 400 else said[:400] + "…"
    if isinstance(error, DiffgraphError):
        return f"diffgraph refuses this: {said}."
    if isinstance(error, ValueError):  # how pipelines say that they do not take an argument
        return f"The pipeline refuses this: {said}."
    logger.error("a request failed", exc_info=error)
    return f"Something went wrong: {said}. The server's log has the details."
