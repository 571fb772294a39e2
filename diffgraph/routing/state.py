"""A module's state as its recordings rely on it, as it was when last looked at."""

from __future__ import annotations

from typing import NamedTuple

import torch

from diffgraph.compiling.users import is_compiled
from diffgraph.devices import SUPPORTED
from diffgraph.guards import Fingerprint
from diffgraph.guards.refusals import refusal
from diffgraph.options import Options
from diffgraph.prompts.buckets import PromptBuckets
from diffgraph.reasons import Reason
from diffgraph.values.tensors import weights_device

#: After so many changes of state without a replay between them, the runner looks again only after so many calls.
MAX_CHANGES = 8
MAX_REST = 16


class Conditions(NamedTuple):
    """What a module's present state means for recording it: why nothing can be (`refusal`), how prompts are padded, and where its
    weights lie."""

    refusal: Reason | None
    prompts: PromptBuckets | None
    device: torch.device

    @classmethod
    def of(cls, module: torch.nn.Module, options: Options, positional: tuple[str, ...]) -> Conditions:
        device = weights_device(module)
        unsupported = None if device.type in SUPPORTED else Reason.UNSUPPORTED_INPUT
        # Compiled attention would see a prompt's padded rows.
        compiled = any(map(is_compiled, module.modules()))
        prompts = None if compiled else PromptBuckets.of(module, options, positional)
        return cls(refusal(module) or unsupported, prompts, device)


class Rest:
    """Where something changes each time, looking is dear: after a few changes without a replay between them, calls run eager
    without a look."""

    def __init__(self) -> None:
        self._changes = 0  # seen without a replay between them
        self._calls = 0  # that yet run eager without a look

    @property
    def is_on(self) -> bool:
        return self._calls > 0

    def passed(self) -> bool:
        """One call has; whether that was the last."""
        self._calls -= 1
        return self._calls == 0

    def changed(self) -> None:
        self._changes += 1
        self._calls = MAX_REST if self._changes > MAX_CHANGES else 0

    def lasts(self) -> None:
        """A replay was made."""
        self._changes = 0


class State:
    def __init__(self, options: Options, positional: tuple[str, ...]) -> None:
        self.fingerprint: Fingerprint | None = None  # `None`: not looked at yet
        self.conditions = Conditions(None, None, torch.device("cpu"))
        self.last_change = Reason.ATTRIBUTES_CHANGED
        self._options, self._positional = options, positional
        self._rest = Rest()

    @property
    def is_resting(self) -> bool:
        return self._rest.is_on

    def rest(self) -> bool:
        """Let one call pass without a look; whether that was the last. The next call then starts from the state that it finds."""
        was_last = self._rest.passed()
        if was_last:
            self.fingerprint = None
        return was_last

    def change(self) -> Reason | None:
        """What has changed since it was taken."""
        return None if self.fingerprint is None else self.fingerprint.change()

    def look(self, module: torch.nn.Module) -> Reason | None:
        """What has changed since the last look, of which this one takes note."""
        change = self.change()
        if self.fingerprint is None or change is not None:
            self.take(module)
        if change is not None:
            self.last_change = self.conditions.refusal or change
            self._rest.changed()
        return change

    def take(self, module: torch.nn.Module) -> None:
        fingerprint = Fingerprint(module)
        self.conditions = Conditions.of(module, self._options, self._positional)
        self.fingerprint = fingerprint  # last: a thread that finds it finds what belongs to it

    def versions(self) -> list[int]:
        """How often its tensors were written."""
        return [] if self.fingerprint is None else self.fingerprint.state_versions()

    def lasts(self) -> None:
        """A replay was made in it."""
        self._rest.lasts()

    def forgive(self) -> None:
        self._rest = Rest()
