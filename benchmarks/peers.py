"""One denoiser call in every way to make it fast: eager, torch.compile's modes, one whole graph, breakable, compiled blocks.

Each mode starts with empty compiler caches. Its seconds to build are what its first calls take beyond as many settled ones;
likewise the seconds that a second size, a second prompt length and a switch of LoRAs (with `--loras`) cost when they first come.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import monotonic
from typing import Any

import torch

import diffgraph
import pipelines
from benchmarks import _cli
from benchmarks._calls import DenoiserCall, difference, inputs, relative_difference
from benchmarks._floor import floor
from benchmarks._measure import MIB, call_ms, release, seconds
from benchmarks._names import MODES, MORE_MODES, NOT_READY
from benchmarks._results import Results, Row
from benchmarks._spent import spent
from benchmarks._weights import add_lora
from benchmarks.denoiser import default_shapes
from diffgraph.compiling.blocks import repeated_blocks

LATER = ("size", "prompt")
FIRST = 5  # calls until a mode has settled: compiled, warmed up, recorded
COLUMNS = {
    "family": "family",
    "shape": "shape",
    "mode": "mode",
    "build s": "build_s",
    "compiles": "compiles",
    "ms": "ms",
    "x eager": "ratio",
    "floor ms": "floor_ms",
    "peak MiB": "peak_mib",
    "rel. diff": "relative_diff",
    "bit-equal": "equal",
    "2nd size": "size_shape",
    ": s": "size_s",
    "compiles ": "size_compiles",
    "ms ": "size_ms",
    "2nd prompt: s": "prompt_s",
    "compiles  ": "prompt_compiles",
    "LoRA switch: s": "lora_s",
    "compiles   ": "lora_compiles",
    "pipeline s": "pipeline_s",
    "": "note",
}


@contextmanager
def mode_of(module: Any, mode: str, compiler: str) -> Iterator[None]:
    """Inside, calls of `module` run in that mode; compiled for it alone, from nothing."""
    from torch._inductor.utils import fresh_inductor_cache

    kind, _, how = mode.partition(":")
    compiled: list[torch.nn.Module] = []
    torch._dynamo.reset()
    with fresh_inductor_cache():
        try:
            if kind == "torch.compile":
                compiled = repeated_blocks(module) if how == "regional" else [module]
                for part in compiled:
                    part.compile(backend=compiler, mode=how if compiler == "inductor" and how not in ("", "regional") else None)
            elif kind != "eager":
                backend, _, what = kind.partition("+")
                if what == "torch.compile":
                    compiled = [module]
                    module.compile(backend=compiler)
                given = {"backend": compiler} | ({"dynamic": False} if how == "static" else {"mode": how} if how else {})
                options = {"backend": backend, "compile_blocks": given if what == "compile" else False}
                diffgraph.accelerate_module(module, **options, prompt_buckets=None)
            yield
        finally:
            if kind not in ("eager", "torch.compile"):
                diffgraph.restore_pipeline(module)
            for part in compiled:
                del part.__dict__["_compiled_call_impl"]
            torch._dynamo.reset()
            release()


@contextmanager
def at_most(limit_s: float | None) -> Iterator[None]:
    """Inside, `TimeoutError` is raised after that time, and again ever after as long, as compilers catch some errors."""
    if limit_s is None:
        yield
        return
    start, late = monotonic(), f"{NOT_READY}{limit_s:g} s"

    def ring(*_: Any) -> None:
        raise TimeoutError(late)

    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, limit_s, limit_s)
    try:
        yield
    except Exception as error:  # that they made of it
        if monotonic() - start < limit_s:
            raise
        raise TimeoutError(late) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


class Case:
    """One family at one shape, and what may come after it: another size, another prompt length, other LoRAs."""

    def __init__(self, pipe: Any, family: str, shape: str, options: argparse.Namespace) -> None:
        self.pipe, self.family, self.shape, self.options = pipe, family, shape, options
        self.call = DenoiserCall.of(pipe, family, shape)
        self.module, self.device = self.call.module, self.call.device
        self.new = [self.call.with_new_inputs(seed) for seed in (1, 2)]
        about = {"what": "peers", "family": family, "shape": shape, "dtype": str(self.module.dtype)[6:]}
        self.about: Row = about | {"loras": options.loras, "quantized": options.quantize}
        self.later = {}
        if "size" in options.later:
            self.about["size_shape"] = options.second_shape or second_shape(family, shape)
            self.later["size"] = DenoiserCall.of(pipe, family, self.about["size_shape"])
        if "prompt" in options.later:
            try:
                self.later["prompt"] = DenoiserCall.of(pipe, family, shape, prompt_length=options.second_prompt)
            except (ValueError, RuntimeError) as error:  # its prompts have one length
                print(f"{family}: no second prompt length: {error}", file=sys.stderr)
        self.loras = [f"lora{i}" for i in range(options.loras)]
        if self.loras:
            add_lora(self.module, "other")
            self.module.set_adapters(self.loras)
        self.expected = [call() for call in self.new]
        self.floor = floor(self.call)
        self.eager_ms: float | None = None

    def row(self, mode: str) -> Row:
        row = {**self.about, "mode": mode, **self.floor, **dict.fromkeys(["build_s", "ms", "ratio", "note"])}
        try:
            with mode_of(self.module, mode, self.options.compiler):
                self._measure(row, self._stepping(mode))
        except Exception as error:  # of a peer: the others are measured still
            traceback.print_exc()
            late = str(error).startswith(NOT_READY)
            row["note"] = str(error) if late else f"{type(error).__name__}: {error}".partition("\n")[0]
        if mode == "eager":
            self.eager_ms = row["ms"]
        if self.eager_ms and row["ms"]:
            row["ratio"] = self.eager_ms / row["ms"]
        return row

    def _stepping(self, mode: str) -> Callable[[DenoiserCall], Callable[[], Any]]:
        """How a mode is called: torch's own CUDA graphs want to know where a step begins, or results are overwritten."""
        if not mode.endswith("reduce-overhead"):
            return lambda call: call

        def step(call: DenoiserCall) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return call()

        return lambda call: lambda: step(call)

    def _measure(self, row: Row, stepping: Callable[[DenoiserCall], Callable[[], Any]]) -> None:
        release()
        reserved = torch.cuda.memory_reserved() if self.device.type == "cuda" else 0
        with at_most(self.options.mode_limit):
            lost = self._settled(stepping(self.call))
        row |= {"build_s": lost["s"], "compiles": lost["compiles"], "ms": lost["ms"]}
        row |= self._difference(stepping)
        if self.device.type == "cuda":
            release()
            torch.cuda.reset_peak_memory_stats()
            stepping(self.call)()
            row["peak_mib"] = (torch.cuda.max_memory_reserved() - reserved) / MIB
        if not row["mode"].startswith(("eager", "torch.compile")):
            row["note"] = ours(self.module)
        for name, call in self.later.items() if row["mode"] in self.options.later_in else ():
            row |= {f"{name}_{key}": value for key, value in self._settled(stepping(call)).items()}
        if self.options.pipeline and row["mode"] in self.options.later_in:
            row |= self._whole_pipeline()
        if row["mode"] in self.options.profile and self.device.type == "cuda":
            row |= spent(stepping(self.call), row["ms"])
        if self.loras:
            try:
                self.module.set_adapters([*self.loras[1:], "other"])
                row |= {f"lora_{key}": value for key, value in self._settled(stepping(self.call)).items()}
            finally:
                self.module.set_adapters(self.loras)

    def _settled(self, call: Callable[[], Any]) -> Row:
        """Call until it has settled: what a call takes then, what the first ones took beyond that, and how often was compiled."""
        before = compiles()
        first_s = sum(seconds(call, self.device) for _ in range(FIRST))
        compiled = compiles() - before
        ms = median(call_ms(call, self.options.repeats, self.device))
        return {"ms": ms, "s": max(0.0, first_s - FIRST * ms / 1e3), "compiles": compiled}

    def _difference(self, stepping: Callable[[DenoiserCall], Callable[[], Any]]) -> Row:
        worst: Row = {"max_abs_diff": 0.0, "relative_diff": 0.0, "equal": True}
        for new, expected in zip(self.new, self.expected, strict=True):
            found = stepping(new)()
            apart = difference(found, expected) | {"relative_diff": relative_difference(found, expected)}
            for name in ("max_abs_diff", "relative_diff"):
                is_number = None not in (worst[name], apart[name])
                worst[name] = max(worst[name], apart[name]) if is_number else None
            worst["equal"] = worst["equal"] and apart["equal"]
        return worst

    def _whole_pipeline(self) -> Row:
        """The first call of the whole pipeline, and what a later one takes."""

        def draw() -> Any:
            given = inputs(self.pipe, self.family, self.shape)
            return self.pipe(**given, num_inference_steps=self.options.pipeline, output_type="pt")

        steps = {"pipeline_steps": self.options.pipeline}
        first_s = seconds(draw, self.device)
        return {**steps, "pipeline_first_s": first_s, "pipeline_s": median(seconds(draw, self.device) for _ in range(3))}


def start_compiler(options: argparse.Namespace) -> None:
    """Its first use in a process starts its workers, which no mode shall pay for."""
    if options.compiler == "inductor":
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=options.device))


def ours(module: torch.nn.Module) -> str | None:
    """What keeps a mode of ours from being what it is called."""
    report = diffgraph.report(module)
    uncompiled = [f"not compiled: {s.uncompiled}" for s in report.signatures if s.uncompiled]
    return ", ".join(uncompiled + [reason for reason in report.reasons if reason != diffgraph.Reason.UNSEEN_SIGNATURE]) or None


def compiles() -> int:
    """Graphs that Dynamo has had compiled."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def second_shape(family: str, shape: str) -> str:
    """Another of those the family is measured at, or one of half the height."""
    others = [other for other in pipelines.module(family).SHAPES if other != shape]
    height, _, rest = shape.partition("x")
    small = shape == "64x64"
    return others[0] if others and not small else f"{int(height) // 2}x{rest}"


@torch.no_grad()
def family_rows(family: str, options: argparse.Namespace, in_time: Callable[[], bool]) -> Iterator[Row]:
    pipe = _cli.build(family, options)
    for shape in options.shapes or default_shapes(family, options):
        case = Case(pipe, family, shape, options)
        for mode in options.modes:
            if not in_time():
                print(f"time is up: {family} {shape} {mode} and what follows is not measured", file=sys.stderr)
                return
            yield case.row(mode)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _cli.parser(__doc__)
    parser.add_argument("--families", type=_cli.families, default=list(pipelines.FAMILIES))
    parser.add_argument("--shapes", type=_cli.words, help="512x512,480x832x17,... (default: the family's smallest)")
    parser.add_argument("--second-shape", help="the size that comes next (default: another of the family's)")
    parser.add_argument("--second-prompt", type=int, default=128, help="rows of the prompt that comes next")
    parser.add_argument("--later", type=_cli.some_of(LATER), default=list(LATER), help="what comes next; '': nothing")
    every_mode, more = _cli.some_of((*MODES, *MORE_MODES)), ", ".join(MORE_MODES)
    parser.add_argument("--modes", type=every_mode, default=list(MODES), help=f"those, or more: {more}")
    parser.add_argument(
        "--later-in", type=every_mode, default=list(MODES), help="modes in which it comes, and that draw whole pictures"
    )
    parser.add_argument("--repeats", type=int, default=15, help="timed calls a mode")
    parser.add_argument("--pipeline", type=int, default=0, metavar="STEPS", help="time a whole pipeline call, too")
    parser.add_argument("--profile", type=every_mode, default=MODES[-1:], help="modes whose time is told by kind of kernel")
    parser.add_argument("--compiler", default="inductor", help="backend of torch.compile, for all that compile")
    parser.add_argument("--mode-limit", type=float, metavar="SECONDS", help="give a mode up that is not ready and timed by then")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="start no mode after that time")
    options = parser.parse_args(argv)
    start_compiler(options)
    results, start, rows, failed = Results(options.out, options.device), monotonic(), [], []
    for family in options.families:
        try:
            for row in family_rows(family, options, lambda: options.budget is None or monotonic() - start < options.budget):
                results.add([row])
                rows.append(row)
                took = "failed" if row["ms"] is None else f"{row['ms']:.2f} ms"
                print(f"{family} {row['shape']} {row['mode']}: {took} after {monotonic() - start:.0f} s", file=sys.stderr)
        except Exception:  # the next family may still be measured in the time that a GPU is lent for
            traceback.print_exc()
            failed.append(family)
        release()
    if rows:
        print(results.table(rows, COLUMNS))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
