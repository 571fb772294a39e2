"""A backend for `torch.compile` that keeps breaks out of the compiler.

Dynamo hands over a block's whole graph, in which a call of attention is one opaque node. The graph is cut there. Each piece
between two breaks is compiled, and is to an open capture what an op is: its results are born in the segment, and its own memory
is the pool's to reuse. Pieces and breaks are all there is: no Python of the block's runs between them, unseen by the capture.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from diffgraph.compiling.int8_weights import with_int8_kept
from diffgraph.engine.current import open_recorder
from diffgraph.engine.layout import BREAK, Layout
from diffgraph.errors import CaptureError, OptionError
from diffgraph.values.ambient import Ambient
from diffgraph.values.tensors import tensors_in
from diffgraph.values.tree import flatten, map_leaves

LONGEST = 240  # of the compiler's own words, in characters
COMPILER = "inductor"  # unless another is asked for


class Tally:
    """What happened in this process, for those who compile or call under the lock `RECORDING`."""

    compiles = 0  # graphs that were compiled
    entered = 0  # calls of compiled graphs


class Backend:
    """Compiles what lies between breaks. `given` are keyword arguments of `torch.compile`: backend, mode, options, dynamic.

    Inductor's search by coordinate descent is left to who asks for it here, by mode or option: torchao's configurations switch it
    on for the process, in all directions. Z-Image in fp8 was not compiled after 100 s on an H200; without it, after 12 s.
    Raises `OptionError` for what `torch.compile` does not accept.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.dynamic = given.get("dynamic")
        backend, mode, options = given.get("backend", COMPILER), given.get("mode"), given.get("options")
        inner: Any = torch
        try:
            if backend == "inductor":
                # Not its own CUDA graphs, which "reduce-overhead" asks for: ours take their place.
                searches = {"coordinate_descent_tuning": str(mode).startswith("max-autotune")}
                options = {**searches, **(options or {}), "triton.cudagraphs": False}
                self._compile = inner._TorchCompileInductorWrapper(mode, options, self.dynamic)
            else:
                self._compile = inner._TorchCompileWrapper(backend, mode, options, self.dynamic)
        except Exception as error:
            why = str(error)[:LONGEST]
            raise OptionError(f"compile_blocks is {dict(given)!r}, which torch.compile does not accept: {why}") from None

    def __eq__(self, other: object) -> bool:
        """Then Dynamo takes what the other has compiled."""
        return isinstance(other, Backend) and self._compile == other._compile

    def __repr__(self) -> str:
        return str(self._compile.compiler_name)

    __hash__ = None  # type: ignore[assignment]

    def __call__(self, graph: GraphModule, _: Any) -> Callable[..., Any]:
        Tally.compiles += 1
        parts = _cut(graph)
        for name, part in list(parts.named_children()):
            found = next(filter(_is_break, part.graph.nodes), None)  # type: ignore[union-attr]
            delattr(parts, name)
            parts.__dict__[name] = self._piece(part) if found is None else _LaidOut(part, found.meta["example_value"])
            _forget(part)
        _forget(parts)

        def entered(*args: Any) -> Any:
            Tally.entered += 1
            return parts(*args)

        return entered

    def _piece(self, part: Any) -> Piece:
        """Raises `CaptureError` for what a capture must look into: a recording would bake what the host reads."""
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

        given = [node.meta["example_value"] for node in part.graph.find_nodes(op="placeholder")]
        (output,) = part.graph.find_nodes(op="output")
        is_single = not isinstance(output.args[0], tuple)
        if is_single:  # compilers want a tuple
            output.args = ((output.args[0],),)
            part.recompile()
        values = [node.meta.get("example_value") for node in part.graph.nodes]
        devices = {tensor.device.type for tensor in tensors_in(values)}
        if len(devices) > 1:
            raise CaptureError(f"a block works on {' and '.join(sorted(devices))} at once")
        if any(free_unbacked_symbols(value) for value in flatten(values)[0]):
            raise CaptureError("a block reads values on the host, or sizes that depend on values")
        compile = with_int8_kept(self._compile)
        return Piece(compile(part, given), is_single, Ambient.now(next(iter(devices), "cpu")))


class Piece:
    """Compiled code between two breaks."""

    def __init__(self, compiled: Callable[..., Any], is_single: bool, ambient: Ambient) -> None:
        self._compiled, self._is_single, self._ambient = compiled, is_single, ambient

    def __call__(self, *args: Any) -> Any:
        recorder = open_recorder()
        return self.run(*args) if recorder is None else recorder.run_piece(self.run, args)

    def run(self, *args: Any) -> Any:
        with self._ambient.precision(), torch.no_grad():  # as it was compiled: a tape replays in another state
            results = self._compiled(*args)
        return results[0] if self._is_single else results


class _LaidOut:
    """A break, and its results laid out as the next piece expects them."""

    def __init__(self, call: Callable[..., Any], example: Any) -> None:
        self._call, self._layout = call, Layout.seen_in(example)

    def __call__(self, *args: Any) -> Any:
        return map_leaves(self._laid_out, self._call(*args))

    def _laid_out(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or self._layout.holds(leaf):
            return leaf
        recorder = open_recorder()
        return self._layout.of(leaf) if recorder is None else recorder.run_piece(self._layout.of, (leaf,))


def _is_break(node: Any) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and getattr(node.target, BREAK, False)


def _has_several_results(node: Node) -> bool:
    return not isinstance(node.meta["example_value"], torch.Tensor)


def _forget(graph: Any) -> None:
    """What Dynamo noted on the nodes: weak references to weights, with which `module.to` cannot swap quantised ones."""
    for node in graph.graph.nodes:
        node.meta.clear()


def _cut(graph: GraphModule) -> GraphModule:
    """The graph as calls of its parts, in order: each break is one of its own."""
    from torch.fx.passes.split_module import split_module

    part_of: dict[Node, int] = {}
    last = 0
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and _is_break(node.args[0]) and _has_several_results(node.args[0]):
            part_of[node] = part_of[node.args[0]]  # one of them
        elif _is_break(node):
            part_of[node] = last + 1
            last += 2
        else:
            part_of[node] = last
    if last and any(node.target is torch.autograd.grad_mode._enter_inference_mode for node in graph.graph.nodes):
        raise CaptureError("a block enters or leaves inference mode around a break, which its parts would not do")
    return split_module(graph, None, part_of.__getitem__, keep_original_order=True)  # type: ignore[arg-type]
