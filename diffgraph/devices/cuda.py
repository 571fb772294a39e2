"""A segment on a GPU is a CUDA graph."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from diffgraph.devices.base import Pool, Segment

_abandoned: list[Any] = []
# torch 2.7 has it under another name
_end_allocate_to_pool: Any = getattr(torch._C, "_cuda_endAllocateToPool", None) or getattr(
    torch._C, "_cuda_endAllocateCurrentStreamToPool", None
)


class CudaSegment(Segment):
    """Recorded on the pool's side stream: capture is not allowed on the default one. Nothing runs there."""

    def __init__(self, pool: CudaPool, handle: Any) -> None:
        self.pool = pool
        self.graph = torch.cuda.CUDAGraph()
        self._handle = handle
        self.empty = False
        self._random = _CapturedGenerator(torch.cuda.default_generators[pool.index])
        self._on_side_stream = torch.cuda.stream(pool.side_stream)
        self._on_side_stream.__enter__()
        try:
            # thread_local: what other threads do (event queries, allocations) neither fails nor invalidates the capture.
            self.graph.capture_begin(pool=handle, capture_error_mode="thread_local")
        except BaseException:
            self._on_side_stream.__exit__(None, None, None)
            self._give_up()
            raise
        self._random.lend()

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            with self._random.at_hand():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    def end(self) -> None:
        try:
            # On the stream it began on, or that stream stays invalid.
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self.graph.capture_end()
        except BaseException:
            self._give_up()
            raise
        finally:
            self._on_side_stream.__exit__(None, None, None)
        self._random.give_back()
        # PyTorch warns of an empty graph. It is not replayed but kept: were it the pool's only one, the pool would die with it.
        self.empty = any("CUDA Graph is empty" in str(w.message) for w in caught)

    def _give_up(self) -> None:
        """What PyTorch leaves undone when a capture fails (aten/src/ATen/cuda/CUDAGraph.cpp): the allocator would believe for
        good that it is under way, and neither reuse nor free memory as it should; the generator likewise."""
        try:
            self.graph.pool()
            captured = True  # it failed later: the graph itself has ended its part, and will release it
        except RuntimeError:
            captured = False
        self.reset()
        _abandoned.append(self.graph)  # the pinned-memory allocator's filter goes on pointing at it
        if not captured:
            with suppress(RuntimeError):
                _end_allocate_to_pool(self.pool.index, self._handle)
            with suppress(RuntimeError):
                torch._C._cuda_releasePool(self.pool.index, self._handle)
        self._random.heal(self.pool.side_stream)

    def abort(self) -> None:
        with suppress(RuntimeError):  # the failure that brought us here, once more: `end` has cleaned up
            self.end()
            self.reset()

    def replay(self) -> None:
        if not self.empty:
            self.graph.replay()

    def reset(self) -> None:
        self.graph.reset()
        self.pool.segments.discard(self)


class _CapturedGenerator:
    """The default generator around an open segment.

    PyTorch registers it with every capture, and from then on it fails in any other thread that draws from it ("Offset increment
    outside graph capture"). So everybody else gets a copy of its state while the segment is open; an op that draws random numbers
    inside the segment sees the captured one. What is left is the moment in which `capture_begin` runs.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator
        self._captured = generator.graphsafe_get_state()
        self._lent = generator.clone_state()
        self._before = self._lent.get_state()

    def lend(self) -> None:
        self._generator.graphsafe_set_state(self._lent)

    @contextmanager
    def at_hand(self) -> Iterator[None]:
        self._generator.graphsafe_set_state(self._captured)
        try:
            yield
        finally:
            self.lend()

    def heal(self, side_stream: torch.cuda.Stream) -> None:
        """After a failed capture its state believes that it is capturing, and every graph that holds it fails to replay. A
        capture that succeeds ends that."""
        drawn_elsewhere = self._lent.get_state()
        self._generator.graphsafe_set_state(self._captured)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side_stream), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "The CUDA Graph is empty": it is
            graph.capture_begin(capture_error_mode="thread_local")
            graph.capture_end()
        graph.reset()
        self._generator.set_state(drawn_elsewhere)

    def give_back(self) -> None:
        drawn_elsewhere = self._lent.get_state()
        self._generator.graphsafe_set_state(self._captured)
        if not torch.equal(drawn_elsewhere, self._before):
            self._generator.set_state(drawn_elsewhere)


class CudaPool(Pool):
    runs_while_recording = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self.index)
        self.side_stream = torch.cuda.Stream(self.device)
        self._handle: Any = None
        self._last_stream: torch.cuda.Stream | None = None
        self._last_use = torch.cuda.Event()

    @contextmanager
    def _ordered(self) -> Iterator[None]:
        # The lock orders the host alone: on another stream than the last one's, the GPU must wait as well.
        stream = torch.cuda.current_stream(self.device)
        if self._last_stream is not None and self._last_stream != stream:
            stream.wait_event(self._last_use)
        try:
            yield
        finally:
            self._last_use.record(stream)
            self._last_stream = stream

    @contextmanager
    def recording(self) -> Iterator[None]:
        collecting = gc.isenabled()
        with torch.cuda.device(self.device):
            lifted = torch._C._only_lift_cpu_tensors()
            # So that the host-to-device copy of `torch.tensor(list, device=...)` is seen by a dispatch mode.
            torch._C._set_only_lift_cpu_tensors(True)
            # As PyTorch's graph trees do: a workspace that a segment uses must be allocated in the pool, and none may outlive it.
            torch._C._cuda_clearCublasWorkspaces()
            # The collector could free another graph, which is not allowed during capture.
            gc.disable()
            try:
                yield
            finally:
                torch._C._cuda_clearCublasWorkspaces()
                torch._C._set_only_lift_cpu_tensors(lifted)
                if collecting:
                    gc.enable()

    def open_segment(self) -> CudaSegment:
        if not self.segments:
            self._handle = torch.cuda.graph_pool_handle()  # a handle dies with its last graph
        segment = CudaSegment(self, self._handle)
        self.segments.add(segment)
        return segment

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """As PyTorch's own graph trees make them."""
        memory = tensor.untyped_storage()
        with torch.inference_mode(False):
            storage = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), tensor.device, memory.nbytes())
            return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(
                {
                    "nbytes": memory.nbytes(),
                    "data_ptr": memory.data_ptr(),
                    "size": tensor.shape,
                    "stride": tensor.stride(),
                    "dtype": tensor.dtype,
                    "device": tensor.device,
                    "storage_offset": tensor.storage_offset(),
                },
                storage,
            )

    def bytes(self) -> int:
        if not self.segments:
            return 0
        pool = tuple(self._handle)
        return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool)

    def settle(self) -> None:
        # Not the whole device, which would invalidate a capture that another thread has open: the last user, whom earlier ones
        # precede, and what this turn has launched.
        self._last_use.synchronize()
        torch.cuda.current_stream(self.device).synchronize()

    def finishes(self, within_s: float) -> bool:
        # Asked again and again: who waits for a collective that another rank never issues would wait for good.
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        deadline = time.monotonic() + within_s
        while not done.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-4)
        return True

    def rng_state(self) -> Any:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.device)

    def set_rng_state(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], self.device)

    def timed(self, fn: Callable[[], Any]) -> tuple[Any, float | None]:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self.device)
        stream.synchronize()
        start.record(stream)
        result = fn()
        end.record(stream)
        end.synchronize()
        return result, start.elapsed_time(end)

    def drew(self, before: Any) -> bool:
        return not all(map(torch.equal, before, self.rng_state()))

    def replayable_rng(self, before: Any) -> bool:
        return torch.equal(before[0], torch.get_rng_state())  # numbers drawn on the host are baked; the GPU's are registered
