"""Which of diffusers' denoisers replay: a tiny configuration and inputs for every class, and what became of each.

`python -m support` runs them all and writes SUPPORT.md; `python -m support Flux` shows those whose name holds "Flux". The modules
of `families` hold the cases, `check` runs one, `table` writes.
"""
