"""What a prompt bucket costs and changes: one denoiser call with the prompt padded to its bucket, beside its exact length."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from math import log10
from statistics import median
from typing import Any

import torch

import diffgraph
from benchmarks import _cli
from benchmarks._calls import DenoiserCall, inputs
from benchmarks._measure import call_ms, release
from benchmarks._results import Results, Row
from diffgraph.families.base import rows
from diffgraph.options import Options
from diffgraph.prompts.buckets import PromptBuckets
from diffgraph.values.compare import same_bits

LENGTHS = (20, 40, 64, 70, 100, 130, 190, 200, 270, 330, 400, 520, 600, 726, 850, 1000)
COLUMNS = {
    "family": "family",
    "shape": "shape",
    "rows": "length",
    "bucket": "bucket",
    "eager ms": "eager_ms",
    "exact ms": "exact_ms",
    "bucket ms": "ms",
    "cost %": "cost",
    "difference": "difference",
    "bit-equal": "equal",
    "eager, masked": "masked",
    "latents equal": "latents_equal",
    "PSNR dB": "psnr",
    "eager, masked dB": "masked_psnr",
}


class Case:
    """One family at one shape: what its calls take, and give, for a prompt of each length."""

    def __init__(self, pipe: Any, family: str, shape: str, options: argparse.Namespace) -> None:
        self.pipe, self.family, self.shape = pipe, family, shape
        self.options = options

    def row(self, length: int) -> Row:
        call = DenoiserCall.first(self.pipe, self._given(length))
        row = {
            "what": "prompt" if self.options.repeats else "prompt, whole call",
            "family": self.family,
            "shape": f"{self.shape}@prompt={length}",
            "mode": "breakable",
        }
        row |= {"length": length, "bucket": self._bucket(call), "psnr": None, "masked_psnr": None}
        if self.options.repeats:
            row |= self._one_call(call)
        if self.options.steps:
            row |= self._whole(length, row["bucket"])
        return row

    def _one_call(self, call: DenoiserCall) -> Row:
        eager = call()
        exact_ms, _ = self._measured(call, None)
        bucket_ms, found = self._measured(call, "auto")
        again_ms, _ = self._measured(call, None)
        exact = median([*exact_ms, *again_ms])
        row = {"ms": median(bucket_ms), "exact_ms": exact, "cost": 100 * (median(bucket_ms) / exact - 1)}
        row |= {"eager_ms": median(call_ms(call, 3, call.device)), "masked": self._masked(call, eager)}
        return row | {"difference": _distance(found, eager), "equal": same_bits(found, eager)}

    def _given(self, length: int) -> dict[str, Any]:
        limit = {"max_sequence_length": 1024} if length > 512 else {}  # longer ones are cut at the pipelines' default
        return {**inputs(self.pipe, self.family, self.shape, prompt_length=length), **limit}

    def _measured(self, call: DenoiserCall, buckets: Any) -> tuple[list[float], Any]:
        diffgraph.accelerate_pipeline(self.pipe, prompt_buckets=buckets, verify=False)
        try:
            for _ in range(4):
                found = call()
            times = call_ms(call, self.options.repeats, call.device)
            if diffgraph.report(self.pipe).captures != 1:
                raise RuntimeError(f"not replayed: {diffgraph.report(self.pipe).reasons}")
            return times, found
        finally:
            diffgraph.restore_pipeline(self.pipe)
            release()

    def _bucket(self, call: DenoiserCall) -> int:
        padded = PromptBuckets.of(call.module, Options(), ()).padded((), call.kwargs)  # type: ignore[union-attr]
        return padded.prompt.buckets[0]  # type: ignore[union-attr]

    def _masked(self, call: DenoiserCall, eager: Any) -> float | None:
        """How far eager itself moves when the same prompt is padded to the bucket under a mask, as pipelines pad: other shapes of
        matrices, another attention kernel."""
        if "encoder_hidden_states_mask" not in call.kwargs:
            return None
        text, size = call.kwargs["encoder_hidden_states"], self._bucket(call)
        mask = torch.ones(text.shape[:2], dtype=torch.bool, device=text.device)
        padded = {"encoder_hidden_states": rows(text, size, 1), "encoder_hidden_states_mask": rows(mask, size, 1)}
        return _distance(call.module(*call.args, **{**call.kwargs, **padded}), eager)

    def _whole(self, length: int, bucket: int) -> Row:
        """How close a whole call's final latents are to eager's; and those of eager itself, its prompt padded under a mask."""
        given, steps = self._given(length), self.options.steps
        want = self._latents(given, steps)
        diffgraph.accelerate_pipeline(self.pipe)
        try:
            self._latents(given, 3)  # each call recorded, and verified
            found = psnr(self._latents(given, steps), want)
        finally:
            diffgraph.restore_pipeline(self.pipe)
            release()
        row = {"steps": steps, "psnr": found, "latents_equal": found is None, "masked_psnr": None}
        if found is None:
            return row
        names = [name for name in given if name.endswith(("prompt_embeds", "prompt_embeds_mask"))]
        padded = {name: rows(given[name], bucket, 1) for name in names if given[name].shape[1] == length}
        return row | {"masked_psnr": psnr(self._latents(given | padded, steps), want)}

    def _latents(self, given: dict[str, Any], steps: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return self.pipe(**{**given, "generator": generator}, num_inference_steps=steps, output_type="latent")[0]


def psnr(found: torch.Tensor, want: torch.Tensor) -> float | None:
    """In dB, over the range of `want`; `None` where they are equal."""
    error = float((found.double() - want.double()).square().mean())
    return None if error == 0 else 20 * log10(float(want.double().max() - want.double().min())) - 10 * log10(error)


def _distance(found: Any, want: Any) -> float:
    return float((found[0].double() - want[0].double()).norm() / want[0].double().norm())


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> int:
    parser = _cli.parser(__doc__)
    parser.add_argument("--families", type=_cli.families, default=["qwen_image"])
    parser.add_argument("--shape", help="default: 512x512, tiny 64x64")
    parser.add_argument("--lengths", type=lambda text: [int(word) for word in _cli.words(text)], default=list(LENGTHS))
    parser.add_argument("--repeats", type=int, default=7, help="timed calls; 0: compare whole calls alone")
    parser.add_argument("--steps", type=int, default=0, help="compare whole calls of so many steps, too")
    options = parser.parse_args(argv)
    results, rows = Results(options.out, options.device), []
    for family in options.families:
        shape = options.shape or ("512x512" if options.size == "full" else "64x64")
        case = Case(_cli.build(family, options), family, shape, options)
        for length in options.lengths:
            rows.append(case.row(length))
            results.add(rows[-1:])
        release()
    print(results.table(rows, COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
