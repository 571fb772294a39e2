"""Who sets a generator while a step is recorded: gradient checkpointing, to draw the same dropout twice. A replay would not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from diffgraph.current import open_recorder

_NAMES = ("set_rng_state", "manual_seed")
_PLACES = (torch, torch.random, torch.cuda, torch.cuda.random)


@contextmanager
def settings_seen() -> Iterator[None]:
    """Inside, setting a generator is noted by the capture that the calling thread has open."""
    with ExitStack() as stack:
        for place in _PLACES:
            for name in _NAMES:
                stack.enter_context(_noted(place, name))
        yield


@contextmanager
def _noted(place: Any, name: str) -> Iterator[None]:
    original: Callable[..., Any] = getattr(place, name)

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        recorder = open_recorder()
        if recorder is not None:
            recorder.generator_was_set = True
        return original(*args, **kwargs)

    setattr(place, name, stand_in)
    try:
        yield
    finally:
        setattr(place, name, original)
