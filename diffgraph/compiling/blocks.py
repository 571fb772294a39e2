"""A model's repeated blocks, compiled for as long as a forward is recorded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._device import DeviceContext

from diffgraph.compiling.arguments import Arguments
from diffgraph.compiling.pieces import LONGEST, Backend, Tally
from diffgraph.engine.current import open_recorder
from diffgraph.errors import CaptureError

if TYPE_CHECKING:
    from diffgraph.recording.signature import Signature

logger = logging.getLogger("diffgraph")

#: What was compiled so many times Dynamo runs eagerly, by default 8. One block may see many sizes and LoRAs.
_RECOMPILES = 512
_LIMITS = {"recompile_limit": _RECOMPILES, "accumulated_recompile_limit": 8 * _RECOMPILES}
#: Whatever would have a block run as it is, in part or whole, raises.
_STRICT = {"fail_on_recompile_limit_hit": True, "suppress_errors": False, "specialize_float": True}
#: The sizes that code is compiled for: the very ones, any, or any where they have changed since, which is Dynamo's own way.
_OWN = {"assume_static_by_default": True, "automatic_dynamic_shapes": False}
_ANY = {"assume_static_by_default": False, "automatic_dynamic_shapes": True}
_CHANGED = {"assume_static_by_default": True, "automatic_dynamic_shapes": True}
_TRIES = 4


class Compilation(NamedTuple):
    """What compiling the blocks for one recording took; `compiles` is 0 where code of an earlier one served."""

    compiles: int
    seconds: float


def repeated_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Of the classes that a diffusers model names in `_repeated_blocks`; else what lists of one class hold, outermost first."""
    names = getattr(module, "_repeated_blocks", None) or ()
    return [m for m in module.modules() if type(m).__name__ in names] or list(_listed(module))


def _listed(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for child in module.children():
        if isinstance(child, torch.nn.ModuleList) and len(child) > 1 and len(set(map(type, child))) == 1:
            yield from child
        else:
            yield from _listed(child)


class BlockCompiler:
    """`given`: keyword arguments of `torch.compile`."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._backend = Backend(given)
        self._first: Signature | None = None
        self._sizes, self._later = _OWN, _ANY
        self._told: set[str] = set()
        self._failures: list[str] = []  # in a row

    def compile(self, module: torch.nn.Module, signature: Signature, forward: Callable[[], Any]) -> Compilation:
        """Run `forward`, made inside `placed`: what is not compiled yet for its sizes is, and kernels load and are chosen.

        The first signature is compiled for its very sizes, though blocks may differ in theirs. A kind of block that then gets
        others is compiled for any, which all that follow share, unless the options say otherwise. Any, because Dynamo's own way
        would compile again for the next size to change: after a second picture size, for a second prompt length. Blocks whose
        Python wants plain numbers, `str(x.shape[-1])` say, are compiled in that way.
        Raises whatever the compiler does, and `CaptureError` where it leaves a block uncompiled, or there is none.
        """
        if len(self._failures) >= _TRIES:  # it takes its time to fail
            raise CaptureError(self._failures[-1])
        self._first = self._first or signature
        self._sizes = _OWN if signature == self._first else self._later
        start, compiles, entered = perf_counter(), Tally.compiles, Tally.entered
        try:
            forward()
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if self._sizes is not _ANY:
                raise
            self._sizes = self._later = _CHANGED
            forward()
        if Tally.entered == entered:
            blocks = repeated_blocks(module)
            why = ": all have hooks, or a patched forward" if blocks and not any(map(_is_plain, blocks)) else ""
            raise CaptureError(f"no repeated block of {type(module).__name__} could be compiled{why}")
        self.forgive()
        return Compilation(Tally.compiles - compiles, perf_counter() - start)

    def failed(self, module: torch.nn.Module, error: BaseException) -> str:
        """Say so, once; returns why in one line."""
        error = _unwrapped(error)
        text = " ".join(str(error).partition("\n\n")[0].split())[:LONGEST] or repr(error)
        self._failures.append(text)
        if text not in self._told:
            self._told.add(text)
            logger.warning("the blocks of this %s are recorded uncompiled: %s", type(module).__name__, error)
        return text

    def forgive(self) -> None:
        """Try again, however often it has failed."""
        self._failures = []

    @contextmanager
    def placed(self, module: torch.nn.Module) -> Iterator[None]:
        """Inside, the blocks' calls by this thread run compiled. Nothing is written to any module, so that others see no change.

        Not for two threads at a time.
        """
        blocks = {id(block): self._stand_in(block) for block in repeated_blocks(module) if _is_plain(block)}
        # `Module.__call__` asks this before its own way; a module that was compiled by its owner has one of its own.
        was = torch.nn.Module._compiled_call_impl
        torch.nn.Module._compiled_call_impl = _OfThread(blocks)  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.nn.Module._compiled_call_impl = was

    def _stand_in(self, block: torch.nn.Module) -> Callable[..., Any]:
        compiled = torch.compile(block.forward, backend=self._backend, fullgraph=True, dynamic=self._backend.dynamic)

        def call(*args: Any, **kwargs: Any) -> Any:
            recorder = open_recorder()
            if recorder is not None and recorder.in_break:  # which runs at replay as it is
                return block._call_impl(*args, **kwargs)
            entered, arguments = Tally.entered, Arguments(args, kwargs)
            with out_of_modes(), self._configured():
                result = arguments.given_to(compiled)
            if Tally.entered == entered:
                raise CaptureError(f"the compiler ran {type(block).__name__} as it is")
            if arguments.written():
                raise CaptureError(f"a {type(block).__name__} writes to its input, of which it was given a copy or two views")
            if recorder is None and arguments.outlived():
                raise CaptureError(f"a {type(block).__name__} hands on its input, of which it was given a copy")
            return result

        return call

    @contextmanager
    def _configured(self) -> Iterator[None]:
        """Inside, Dynamo compiles as we want it; around blocks alone, for what else a forward compiles is the user's."""
        import torch._dynamo as dynamo
        from torch.fx.experimental import _config as symbolic

        with (
            dynamo.config.patch({**_LIMITS, **_STRICT, **self._sizes}),
            # Or what is equal by chance, 3,072 rows of 3,072 channels, would have to be so ever after.
            symbolic.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        ):
            yield


class _OfThread:
    """As an attribute of `torch.nn.Module`: what this thread's calls of some modules run instead, and `None` for all others."""

    def __init__(self, calls: dict[int, Callable[..., Any]]) -> None:
        self._calls = calls
        self._thread = threading.get_ident()

    def __get__(self, module: torch.nn.Module | None, _: type) -> Callable[..., Any] | None:
        call = self._calls.get(id(module))  # first: Dynamo, in another thread, cannot trace the other question
        return call if call is not None and threading.get_ident() == self._thread else None


def _unwrapped(error: BaseException) -> BaseException:
    """An error of ours, if Dynamo has only wrapped it."""
    found, seen = error, set[int]()
    while type(found).__module__ == "torch._dynamo.exc" and id(found) not in seen:
        seen.add(id(found))
        found = found.__cause__ or found.__context__ or error
    return found if isinstance(found, CaptureError) else error


def _is_plain(block: torch.nn.Module) -> bool:
    """Whether its call is its class's forward: no hooks, nothing patched over it, a break say."""
    hooks = (block._forward_hooks, block._forward_pre_hooks, *_GLOBAL_HOOKS)
    return "forward" not in block.__dict__ and not any(hooks)


_GLOBAL_HOOKS = (
    torch.nn.modules.module._global_forward_hooks,
    torch.nn.modules.module._global_forward_pre_hooks,
)


@contextmanager
def out_of_modes() -> Iterator[None]:
    """Dynamo takes neither its own code nor any other under a dispatch mode: the recorder's, which its pieces and breaks find
    without it. A function mode of ours (`families`) looks for what happens outside of blocks."""
    functions = torch.overrides._get_current_function_mode_stack()
    with ExitStack() as stack:
        if functions and type(functions[-1]) is not DeviceContext:
            stack.enter_context(torch.overrides._pop_mode_temporarily())
        recorder = open_recorder()
        if recorder is not None:
            stack.enter_context(recorder.left())
        yield
