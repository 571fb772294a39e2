"""The errors that diffgraph raises: one base to catch them all, and the built-in type that fits each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class DiffgraphError(Exception):
    """Base of every error that diffgraph raises."""


class OptionError(DiffgraphError, ValueError):
    """An option's name or value is not accepted."""


class OptionTypeError(DiffgraphError, TypeError):
    """An option, or the object to accelerate, is of a type that is not accepted."""


class ShapeError(DiffgraphError, ValueError):
    """A capture shape is malformed, or the pipeline refuses it."""


class NoDenoiserError(DiffgraphError, ValueError):
    """The pipeline has no denoiser under any name that is looked for."""


class AlreadyAcceleratedError(DiffgraphError, ValueError):
    """The pipeline or module is accelerated already."""


class NotAcceleratedError(DiffgraphError, ValueError):
    """The pipeline or module is not accelerated."""


class CaptureError(DiffgraphError, RuntimeError):
    """A forward could not be recorded."""


class OpNotRecordable(CaptureError):
    """An op failed while it was recorded, though nothing about it told that it would: it has to be a break."""

    def __init__(self, op: Any, cause: BaseException) -> None:
        super().__init__(f"{op} cannot be recorded: {cause}")
        self.op = op


class ReplayError(DiffgraphError, RuntimeError):
    """A recorded sequence cannot be replayed, or failed while it was."""


class HostValueChanged(ReplayError):
    """A value that the host read, and that is baked into the recording, has changed."""

    reader: torch.nn.Module | None = None  # whose forward read it


class RankError(DiffgraphError, RuntimeError):
    """The ranks of a parallel forward cannot go on together: one does not answer, or has failed between two collectives."""


class OtherRankFailed(DiffgraphError, RuntimeError):
    """What all ranks had begun together is given up, since another one failed."""


class CaptureWarning(UserWarning):
    """A forward could not be recorded and runs eager."""
