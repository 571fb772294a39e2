"""What diffgraph saves, measured: `python -m benchmarks.denoiser`, `.pipeline`, `.memory`; `results/` holds figures."""
