"""Is what a step's recordings rely on still true? The models, which parameters are trained, the optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch.utils.hooks import RemovableHandle

from diffgraph.finetuning.gradients import Gradients
from diffgraph.finetuning.optimizers import OptimizerState, have_hooks
from diffgraph.guards import Fingerprint
from diffgraph.guards.refusals import refusal
from diffgraph.reasons import Reason, Refused
from diffgraph.routing.state import Rest


class TrainingState:
    def __init__(self, modules: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._modules, self._optimizers = modules, optimizers
        self.gradients = Gradients([])
        self._rest = Rest()
        self._last_change = Reason.ATTRIBUTES_CHANGED
        self.take()

    def look(self) -> Reason | None:
        """What has changed since the last look, of which this one takes note. Raises `Refused` while it rests."""
        if self._rest.is_on:
            if self._rest.passed():
                self.take()
            raise Refused(self._last_change)
        found = self.change()
        if found is not None:
            self.take()
            self._last_change = found
            self._rest.changed()
        return found

    def lasts(self) -> None:
        """A replay was made in it."""
        self._rest.lasts()

    def take(self) -> None:
        """Note how everything is now."""
        self._fingerprints = list(map(Fingerprint, self._modules))
        self._parameters = self._all_parameters()
        self._trainable = [p.requires_grad for p in self._parameters]
        trainable = [p for p in self._parameters if p.requires_grad]
        if list(map(id, trainable)) != list(map(id, self.gradients.parameters)):
            self.gradients = Gradients(trainable)
        self._optimizer_state = OptimizerState(self._optimizers)
        self.refusal = next(filter(None, (refusal(module, trains=True) for module in self._modules)), None)
        self._hooks_made, self._had_hooks = RemovableHandle.next_id, self._has_hooks()
        if self._had_hooks:
            self.refusal = Reason.HOOKS_CHANGED

    def change(self) -> Reason | None:
        """The kind of the first change since."""
        if [p.requires_grad for p in self._parameters] != self._trainable:
            return Reason.TRAINABLE_CHANGED
        for fingerprint in self._fingerprints:
            if (change := fingerprint.change()) is not None:
                return change
        # PyTorch numbers hooks as they are made: while there are none and none was made, none need be looked for.
        if (self._had_hooks or RemovableHandle.next_id != self._hooks_made) and self._has_hooks() != self._had_hooks:
            return Reason.HOOKS_CHANGED
        return Reason.OPTIMIZER_CHANGED if self._optimizer_state.changed() else None

    def _has_hooks(self) -> bool:
        """Whether a step calls hooks of parameters or optimizers, whose Python a replay would not run. Those of a module's
        parameters, where it alone is recorded, autograd calls as ever."""
        if not self._optimizers:
            return False
        tables = chain.from_iterable((p._backward_hooks, p._post_accumulate_grad_hooks) for p in self._parameters)
        return any(tables) or have_hooks(self._optimizers)

    @property
    def device(self) -> torch.device:
        return self.gradients.parameters[0].device if self.gradients.parameters else torch.device("cpu")

    def _all_parameters(self) -> list[torch.nn.Parameter]:
        groups = chain.from_iterable(optimizer.param_groups for optimizer in self._optimizers)
        of_optimizers = chain.from_iterable(group["params"] for group in groups)
        of_modules = chain.from_iterable(module.parameters() for module in self._modules)
        return list({id(p): p for p in chain(of_modules, of_optimizers)}.values())
