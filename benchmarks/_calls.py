"""One denoiser call, as a pipeline makes it; the same call with new inputs; and how far two results are apart."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch

import pipelines
from diffgraph import CaptureShape
from diffgraph.routing.components import denoisers
from diffgraph.values.compare import same_bits
from diffgraph.values.tensors import map_tensors, tensors_in


@dataclass
class DenoiserCall:
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.module(*self.args, **self.kwargs)

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @classmethod
    def of(cls, pipe: Any, family: str, shape: str, **options: Any) -> DenoiserCall:
        """The first call that `pipe` makes at `shape` (`512x512`, `480x832x17`); options as `pipelines.inputs` takes them."""
        return cls.first(pipe, inputs(pipe, family, shape, **options))

    @classmethod
    def first(cls, pipe: Any, given: dict[str, Any]) -> DenoiserCall:
        """The first call that `pipe` makes when it is given these arguments."""
        module = next(iter(denoisers(pipe).values()))
        seen: list[tuple[Any, Any]] = []

        def note(_module: Any, args: Any, kwargs: Any) -> None:
            if not seen:
                seen.append(map_tensors(torch.clone, (args, kwargs)))  # pipelines reuse what they pass

        hook = module.register_forward_pre_hook(note, with_kwargs=True)
        try:
            pipe(**given, num_inference_steps=2, output_type="latent")
        finally:
            hook.remove()
        return cls(module, *seen[0])

    def with_new_inputs(self, seed: int) -> DenoiserCall:
        """Every floating tensor times 1 + noise: latents, timesteps and masks become other ones of their kind."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def renew(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor.clone()
            noise = torch.randn(tensor.shape, generator=generator, device=tensor.device)
            return tensor.clone().mul_((1 + 0.25 * noise).to(tensor.dtype))

        args, kwargs = map_tensors(renew, (self.args, self.kwargs))
        return DenoiserCall(self.module, args, kwargs)


def inputs(pipe: Any, family: str, shape: str, **options: Any) -> dict[str, Any]:
    """Arguments of a whole pipeline call at `shape`, prompt embeddings and a generator included."""
    size = CaptureShape.parse(shape)
    frames = {} if size.num_frames is None else {"num_frames": size.num_frames}
    given = pipelines.inputs(family, pipe, height=size.height, width=size.width, **frames, **options)
    return {**given, "generator": torch.Generator().manual_seed(options.get("seed", 0))}


def difference(a: Any, b: Any) -> dict[str, Any]:
    """Columns `max_abs_diff` (`None` where it is no number) and `equal`, to the bit."""
    largest = [float((x - y).abs().max()) for x, y in zip(_floats(a), _floats(b), strict=True)]
    return {"max_abs_diff": max(largest) if all(map(isfinite, largest)) else None, "equal": same_bits(a, b)}


def relative_difference(a: Any, b: Any) -> float | None:
    """In the 2-norm, over all tensors; `None` where it is no number."""
    pairs = list(zip(_floats(a), _floats(b), strict=True))
    apart, size = (sum(float(t.square().sum()) for t in found) for found in ([x - y for x, y in pairs], [y for _, y in pairs]))
    return (apart / size) ** 0.5 if size and isfinite(apart) and isfinite(size) else None


def is_finite(output: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in _floats(output))


def _floats(obj: Any) -> list[torch.Tensor]:
    return list(map(torch.Tensor.double, tensors_in(obj)))
