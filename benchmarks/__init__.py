"""What diffgraph saves, measured: `python -m benchmarks.denoiser`, `.pipeline`, `.memory`, `.peers`; `results/` holds figures."""
