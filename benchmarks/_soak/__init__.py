"""What `benchmarks.soak` is made of: subjects (accelerated tiny pipelines), acts, faults, and what is counted."""
