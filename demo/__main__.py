"""`make demo`: the page. Loads a model, records its first sizes, and serves it on this machine."""

from __future__ import annotations

import argparse
import os
import sys

from demo import models
from demo.studio import Studio
from diffgraph.cli.errors import UsageError
from diffgraph.errors import DiffgraphError


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--model", help="a folder, a hub id, or a family of pipelines/ (built tiny); default: the embedded model")
    parser.add_argument("--capture-shapes", metavar="SHAPES", help="what to record first: '512x512 768x512', or a .json file")
    parser.add_argument("--device", help="default: cuda if there is a GPU, else cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: for other machines, too")
    parser.add_argument("--port", type=int, default=7860)
    options = parser.parse_args(argv)
    if not 0 < options.port < 2**16:
        parser.error(f"--port is {options.port}; accepted: 1 to {2**16 - 1}")

    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        from demo import page
    except ImportError as error:
        print(f'the page needs Gradio ({error}): pip install ".[demo]"', file=sys.stderr)
        return 1
    try:
        print("loading the model …", flush=True)
        model = models.load(options.model, options.capture_shapes, options.device, options.dtype)
        if model.device.type == "cpu":
            models.use_few_threads()
        studio = Studio(model)
    except (UsageError, DiffgraphError) as error:
        parser.error(str(error))
    print(f"{model.name} on {model.device}; {', '.join(map(str, model.start))} recorded", flush=True)
    try:
        page.build(studio).launch(server_name=options.host, server_port=options.port, **page.LAUNCH)
    except OSError as error:  # the port is taken
        print(f"cannot serve: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
