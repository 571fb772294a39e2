"""What diffgraph does, to be looked at: `make run` in a terminal, `make demo` in a browser.

The page's rooms, in the order in which a request passes through them: `page` (what is shown, and what its buttons do) → `asking`
(can it be drawn?) → `studio` (the one pipeline, and whose turn it is) → `comparing` (eager, accelerated, accelerated, eager) →
`measures` (how far apart) → `words` (what to say about it) and `pictures` (how to show it). `models` loads the pipeline, `errors`
turns what fails into sentences. Only `page` knows of Gradio.
"""
