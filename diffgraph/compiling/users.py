"""Code that the user has had compiled, a module's or a submodule's: to an open capture it is one op, its attention included.

Under the capture's dispatch mode Dynamo would not run what it has compiled, and would mark it as not to be compiled, for good.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from diffgraph.compiling.blocks import out_of_modes
from diffgraph.engine.breaks import lifted
from diffgraph.engine.current import open_recorder
from diffgraph.engine.recorder import autocast_cache
from diffgraph.engine.stand_ins import put_in
from diffgraph.values.tree import flatten, unflatten

_IMPL = "_compiled_call_impl"


@contextmanager
def pieces_placed(module: torch.nn.Module) -> Iterator[None]:
    """Inside, submodules that were compiled run as pieces of the capture that the calling thread has open. Other threads' calls
    find a stand-in that makes no difference. Not for two threads at a time."""
    with ExitStack() as stack:
        for m in [m for m in module.modules() if m is not module and is_compiled(m)]:
            impl = m.__dict__.get(_IMPL)
            stack.enter_context(put_in(m.__dict__, _IMPL, as_piece(m._call_impl if impl is None else impl)))
        yield


def is_compiled(module: torch.nn.Module) -> bool:
    """By `module.compile()`, over which a runner of ours may stand, or by `torch.compile(module)`."""
    impl = module.__dict__.get(_IMPL)
    return getattr(impl, "wrapped", impl) is not None or "_orig_mod" in module.__dict__["_modules"]


def as_piece(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, a compiled callable of any arguments and results, which inside a capture is run as one op."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a block that it stands in, which takes it in
            return fn(*args, **kwargs)
        recorder = open_recorder()
        if recorder is None or recorder.in_break:
            return fn(*args, **kwargs)
        leaves, spec = flatten((args, kwargs), objects=True)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = tuple(leaves[i] for i in at)
        others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]  # the pool owns the tensors
        spec_of_results: list[Any] = []

        def piece(*given: torch.Tensor) -> list[Any]:
            filled = list(others)
            for i, tensor in zip(at, given, strict=True):
                filled[i] = tensor
            args, kwargs = unflatten(spec, filled)
            # As it was compiled: a tape replays in another state, breaks would cut it anew, and autocast's cache, which a capture
            # has put off, is on outside of autocast.
            cached = torch.is_autocast_cache_enabled() or not torch.is_autocast_enabled()
            with torch.inference_mode(False), torch.no_grad(), autocast_cache(cached), out_of_modes(), lifted():
                results, found = flatten(fn(*args, **kwargs), objects=True)
            spec_of_results[:] = [found]
            return results

        results = recorder.run_piece(piece, tensors)
        return unflatten(spec_of_results[0], results)

    return call
