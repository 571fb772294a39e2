"""One denoiser computed by several GPUs together, and the whole pipeline: parallel eager, and recorded in each way. Launched by
`torchrun --nproc-per-node N -m benchmarks.parallel`; with one process, the same on one GPU, to compare with. Without a GPU, tiny
models and gloo show that it works."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

import diffgraph
import pipelines
from benchmarks import _cli
from benchmarks._calls import DenoiserCall, difference, inputs
from benchmarks._measure import MIB, call_ms, release, seconds, submit_ms
from benchmarks._replay import accelerated
from benchmarks._results import Results, Row
from benchmarks._weights import add_lora
from benchmarks.denoiser import WARM_UP, capture_seconds, replays
from diffgraph.devices.collectives import arrived
from diffgraph.values.tree import map_leaves

_EXACT = {"prompt_buckets": None}
#: Options of each mode; `None`: not accelerated.
MODES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "recorded": _EXACT,
    "breaks at collectives": {**_EXACT, "collectives": "break"},
    "breaks at attention": {**_EXACT, "breaks": "attention"},
    "full": {**_EXACT, "backend": "full"},
}
COLUMNS = {
    "what": "what",
    "family": "family",
    "shape": "shape",
    "mode": "mode",
    "GPUs": "gpus",
    "ms": "ms",
    "submit ms": "submit_ms",
    "segments": "segments",
    "breaks": "breaks",
    "capture s": "capture_s",
    "pool MiB": "pool_mib",
    "bit-equal": "equal",
    "": "note",
}


class Case:
    """One family at one shape, on as many GPUs as there are processes."""

    def __init__(self, pipe: Any, family: str, shape: str, kind: str, options: Any) -> None:
        self.pipe, self.options = pipe, options
        self.gpus = dist.get_world_size()
        self.given = _divisible(inputs(pipe, family, shape), self.gpus)
        self.call = DenoiserCall.first(pipe, self.given)
        self.device = self.call.device
        self.new = [self.call.with_new_inputs(seed) for seed in (1, 2)]
        self.expected = [_plain(call()) for call in self.new]
        how = f"{kind}, " if self.gpus > 1 else ""
        self.mode = f"{self.gpus} GPU{'s' * (self.gpus > 1)}: {how}{{}}".format
        self.about = {"family": family, "shape": shape, "gpus": self.gpus, "dtype": str(self.call.module.dtype)[6:]}

    def rows(self) -> Iterator[Row]:
        for mode in self.options.modes:
            with accelerated(self.pipe, MODES[mode]):
                yield self._denoiser(mode)
                if mode in self.options.pipeline:
                    yield self._pipeline(mode)
            release()
        if self.options.replays:  # last of all, as it leaves a LoRA
            with accelerated(self.pipe, MODES["recorded"]):
                yield self._soak(self.options.replays)

    def _denoiser(self, mode: str) -> Row:
        row: Row = {"what": "parallel denoiser", **self.about, "mode": self.mode(mode), "note": None}
        row |= dict.fromkeys(("segments", "breaks", "capture_s", "pool_mib", "max_abs_diff"))
        if MODES[mode] is not None:
            row["capture_s"] = capture_seconds(self.pipe, self.call)
            self.call()  # verified
            report = diffgraph.report(self.pipe)
            row |= {"pool_mib": report.memory_bytes / MIB}
            row |= {"segments": report.signatures[0].segments, "breaks": report.signatures[0].breaks}
        row["equal"] = _on_all(self._is_equal())
        for _ in range(WARM_UP):
            self.call()
        before = self._replays(mode)
        row |= {"ms": median(call_ms(self.call, self.options.repeats, self.device))}
        row |= {"submit_ms": median(submit_ms(self.call, self.options.repeats, self.device))}
        if MODES[mode] is not None and (missed := 2 * self.options.repeats - (self._replays(mode) - before)):
            # Then they are no times of this mode.
            row |= {"ms": None, "note": f"{missed} calls were not replays: {diffgraph.report(self.pipe).reasons}"}
        return row

    def _pipeline(self, mode: str) -> Row:
        """The second of two whole calls: the first records."""
        given = {**self.given, "num_inference_steps": self.options.steps, "output_type": "pt"}
        seconds(lambda: self.pipe(**{**given, "num_inference_steps": 3}), self.device)
        s = min(seconds(lambda: self.pipe(**given), self.device) for _ in range(2))
        row = {"what": "parallel pipeline", **self.about, "mode": self.mode(mode), "steps": self.options.steps, "ms": s * 1e3}
        return row | dict.fromkeys(("submit_ms", "segments", "capture_s", "pool_mib", "max_abs_diff", "equal", "note"))

    def _soak(self, times: int) -> Row:
        """Replays in a row, two signatures in turn; then, with them going on, what may come in between."""
        longer = _with_longer_prompt(self.call, self.gpus)
        calls = [self.call, longer]
        for call in calls * 3:
            call()
        wrong, before = 0, replays(self.pipe)
        took = seconds(lambda: [calls[i % 2]() for i in range(times)], self.device)
        made = replays(self.pipe) - before
        wrong += not self._is_equal()
        events = {"LoRA": self._add_lora, "new shape": lambda: None, "out of memory on one rank": self._run_out}
        for name, event in events.items():
            event()
            if name == "new shape":
                calls.append(_with_longer_prompt(longer, self.gpus))
            for call in calls * 4:
                found = _plain(call())
                with diffgraph.paused(self.pipe):
                    wrong += not difference(found, _plain(call()))["equal"]
        end = replays(self.pipe)
        for call in calls:  # after `paused`, ranks meet once more
            call()
        note = f"{made} of {times} replays, {replays(self.pipe) - end} of {len(calls)} at the end, {wrong} wrong results"
        row = {"what": "parallel soak", **self.about, "mode": self.mode("recorded"), "ms": took / times * 1e3, "note": note}
        equal = _on_all(wrong == 0 and made == times)
        return row | dict.fromkeys(("submit_ms", "segments", "capture_s", "pool_mib", "max_abs_diff")) | {"equal": equal}

    def _add_lora(self) -> None:
        torch.manual_seed(0)  # the same weights on all ranks
        add_lora(self.call.module, "soak")

    def _run_out(self) -> None:
        runner: Any = self.call.module._compiled_call_impl
        recording = next(entry.recording for entry in runner.table.entries.values() if entry.recording is not None)
        left, room = [torch.OutOfMemoryError("injected by the benchmark")], recording._room

        def once_without() -> Any:
            if left and dist.get_rank() == dist.get_world_size() - 1:
                raise left.pop()
            return room()

        recording._room = once_without

    def _is_equal(self) -> bool:
        found = [_plain(call()) for call in self.new]
        return all(difference(a, b)["equal"] for a, b in zip(found, self.expected, strict=True))

    def _replays(self, mode: str) -> int:
        return 0 if MODES[mode] is None else replays(self.pipe)


def _divisible(given: dict[str, Any], ranks: int) -> dict[str, Any]:
    """diffusers splits a prompt's rows among the ranks, in equal parts."""

    def extended(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2 or tensor.shape[1] % ranks == 0:
            return tensor
        return torch.cat([tensor, tensor[:, : -tensor.shape[1] % ranks]], dim=1)

    return {name: extended(value) if "prompt" in name else value for name, value in given.items()}


def _with_longer_prompt(call: DenoiserCall, ranks: int) -> DenoiserCall:
    """A call of another signature."""
    rows = call.kwargs["encoder_hidden_states"].shape[1]
    extra = {
        name: torch.cat([value, value[(slice(None),) * dim + (slice(0, ranks),)]], dim=dim)
        for name, dim in (("encoder_hidden_states", 1), ("encoder_hidden_states_mask", 1), ("txt_ids", 0))
        if isinstance(value := call.kwargs.get(name), torch.Tensor) and value.shape[dim] == rows
    }
    return DenoiserCall(call.module, call.args, {**call.kwargs, **extra})


def _plain(output: Any) -> Any:
    return map_leaves(arrived, output, objects=True)


def _on_all(value: bool) -> bool:
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return all(said)


@contextmanager
def one_device_a_rank(device: str) -> Iterator[None]:
    """diffusers divides a rank by the number of accelerators to find its GPU, and without a GPU there are none."""
    if device != "cpu":
        yield
        return
    was = torch.accelerator.device_count
    torch.accelerator.device_count = lambda: 1  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.accelerator.device_count = was


def _words(text: str) -> list[str]:
    unknown = [word for word in _cli.words(text) if word not in MODES]
    if unknown:
        raise SystemExit(f"{', '.join(unknown)}; accepted: {', '.join(MODES)}")
    return _cli.words(text)


def degrees(kind: str, ranks: int) -> dict[str, int]:
    """Of diffusers' `ContextParallelConfig`."""
    if kind == "unified":
        return {"ulysses_degree": 2, "ring_degree": ranks // 2}
    return {f"{kind}_degree": ranks}


def main(argv: Sequence[str] | None = None) -> int:
    parser = _cli.parser(__doc__)
    parser.add_argument("--families", type=_cli.families, default=["qwen_image"])
    parser.add_argument("--shapes", type=_cli.words, help="512x512,... (default: the family's)")
    parser.add_argument("--kind", choices=("ulysses", "ring", "unified"), default="ulysses")
    parser.add_argument("--attention", help="attention backend of diffusers; ring needs one that returns a log-sum-exp")
    parser.add_argument("--modes", type=_words, default=["eager", "recorded"])
    parser.add_argument("--pipeline", type=_words, default=[], help="modes in which the whole pipeline is measured, too")
    parser.add_argument("--steps", type=int, default=50, help="of the whole pipeline")
    parser.add_argument("--replays", type=int, default=0, help="replays in a row of two signatures, then changes on the way")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(argv)
    begun = not dist.is_initialized()
    if begun:
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    is_first = dist.get_rank() == 0
    host = f"{torch.cuda.get_device_name()}s of one host" if options.device == "cuda" else "CPU"
    results = Results(options.out if is_first else None, options.device, host)
    rows: list[Row] = []
    with torch.no_grad(), one_device_a_rank(options.device):
        for family in options.families:
            pipe = _cli.build(family, options)
            if options.attention:
                pipe.transformer.set_attention_backend(options.attention)
            if dist.get_world_size() > 1:
                config = ContextParallelConfig(**degrees(options.kind, dist.get_world_size()))
                pipe.transformer.enable_parallelism(config=config)
            sizes = pipelines.module(family).SHAPES if options.size == "full" else ["64x64"]
            for shape in options.shapes or sizes:
                for row in Case(pipe, family, shape, options.kind, options).rows():
                    rows.append(row)
                    results.add([row])
            del pipe
            release()
    if is_first:
        print(results.table(rows, COLUMNS))
    if begun:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
