"""Several processes, one forward."""
