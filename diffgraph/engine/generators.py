"""Who sets a generator while something is recorded: gradient checkpointing, to draw the same dropout twice, or a forward that
wants the same noise each time. A replay would not.

It is seen by the functions' names: a GPU's generator says nothing of its state while a capture is open (torch 2.11), and from the
host's other threads draw as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from diffgraph.engine.current import open_recorder
from diffgraph.engine.stand_ins import put_in

_NAMES = ("set_rng_state", "set_rng_state_all", "manual_seed", "manual_seed_all", "seed", "seed_all")
_PLACES = (torch.cuda, torch.cuda.random)  # `torch.manual_seed` and `torch.seed` go by here, too
_OF_THE_HOST = (torch, torch.random)


@contextmanager
def settings_seen() -> Iterator[None]:
    """Inside, setting a generator is noted by the capture that the calling thread has open."""
    with ExitStack() as stack:
        for place in (*_PLACES, *_OF_THE_HOST):
            for name in filter(partial(hasattr, place), _NAMES):
                stack.enter_context(put_in(vars(place), name, _noted(place, name)))
        yield


class HostGenerator:
    """The default one: has it been set since it was last looked at?"""

    def __init__(self) -> None:
        self.look()

    def look(self) -> None:
        self._state = torch.get_rng_state()

    def was_set(self) -> bool:
        return not torch.equal(self._state, torch.get_rng_state())


def _noted(place: Any, name: str) -> Callable[..., Any]:
    original: Callable[..., Any] = getattr(place, name)

    @functools.wraps(original)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        recorder = open_recorder()
        if recorder is not None and not recorder.in_break:  # which a replay runs, too
            recorder.note_setting(of_the_host=place in _OF_THE_HOST)
        return original(*args, **kwargs)

    return stand_in
