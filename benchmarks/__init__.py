"""What diffgraph saves, measured: `python -m benchmarks.denoiser`, `.pipeline`, `.memory`. Results of machines: `results/`."""
