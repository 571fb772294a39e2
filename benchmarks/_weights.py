"""What users do to a denoiser's weights, and what makes the host slow: LoRAs left unfused, quantised weights."""

from __future__ import annotations

from typing import Any

import torch

#: The names are ours, the configurations torchao's.
QUANTIZED = {"fp8": "Float8DynamicActivationFloat8WeightConfig", "int8": "Int8WeightOnlyConfig"}


def block_linears(module: torch.nn.Module) -> list[str]:
    """Names of the linear layers that stand in a list of blocks."""
    inside = [f"{n}." for n, m in module.named_modules() if isinstance(m, torch.nn.ModuleList)]
    linears = [n for n, m in module.named_modules() if isinstance(m, torch.nn.Linear)]
    return [name for name in linears if name.startswith(tuple(inside))]


def add_lora(module: Any, name: str, rank: int = 16) -> None:
    """An unfused LoRA with random weights on every linear layer of the blocks; those added before stay active."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer

    before = {n for m in module.modules() if isinstance(m, LoraLayer) for n in m.active_adapters}
    targets = [n.removesuffix(".base_layer") for n in block_linears(module) if "lora_" not in n]
    module.add_adapter(LoraConfig(r=rank, target_modules=targets, init_lora_weights=False), name)
    module.set_adapters([*before, name])


def quantize(module: torch.nn.Module, kind: str) -> None:
    """torchao weights, on every linear layer of the blocks; fp8 with one scale a row.

    torchao would otherwise have torch.compile search the sizes of all the process's kernels (coordinate descent, all directions):
    Z-Image in fp8 was not compiled after 100 s on an H200.
    """
    import torchao.quantization as ao

    config = getattr(ao, QUANTIZED[kind])
    names = set(block_linears(module))
    granularity = {"granularity": ao.PerRow()} if kind == "fp8" else {}
    made = config(**granularity, set_inductor_config=False)
    ao.quantize_(module, made, filter_fn=lambda m, name: isinstance(m, torch.nn.Linear) and name in names)
