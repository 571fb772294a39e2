"""Renders Fluent Emoji (flat) to one file of small pictures with their names: the training data, which is not committed.

The icons are those of the npm package @iconify-json/fluent-emoji-flat (MIT, as Microsoft's own). Needs npm and resvg-py.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

PACKAGE = "@iconify-json/fluent-emoji-flat@1.2.6"
SIZES = (64, 96)
# Left out: skin tones, the same scene once more with a man, a woman or from the other side, and signs in Japanese script
REPEATED = re.compile(r"-(light|dark|medium|medium-(light|dark))$|^(man|woman|person|mx)-|-facing-right$|^japanese-.*-button$")
MISSPELT = {"piata": "pinata", "mans shoe": "man's shoe", "mens room": "men's room", "womans clothes": "woman's clothes"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m training.render", description=__doc__)
    parser.add_argument("--icons", type=Path, default=Path(".tmp/npm"), help="where npm installs the icons")
    parser.add_argument("--out", type=Path, default=Path(".tmp/emoji.npz"))
    args = parser.parse_args(argv)

    icons, grid = read_icons(args.icons)
    named = {name_of(icon): body for icon, body in sorted(icons.items()) if not REPEATED.search(icon)}
    pictures = {f"pixels_{size}": np.stack([render(body, grid, size) for body in named.values()]) for size in SIZES}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.out, names=np.array(list(named)), **pictures)
    print(f"{len(named)} emoji at {SIZES} pixels: {args.out}, {args.out.stat().st_size / 2**20:.1f} MiB")
    return 0


def read_icons(folder: Path) -> tuple[dict[str, str], int]:
    """The SVG body of each icon, and the side of the square they are drawn in."""
    package = folder / "node_modules" / PACKAGE.rpartition("@")[0]
    if not package.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), PACKAGE], check=True)
    read = json.loads((package / "icons.json").read_text())
    return {icon: data["body"] for icon, data in read["icons"].items()}, read["width"]


def name_of(icon: str) -> str:
    name = icon.replace("-", " ")
    return MISSPELT.get(name, name)


def render(body: str, grid: int, size: int) -> np.ndarray:
    """uint8 [size, size, 3], on white."""
    import resvg_py

    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {grid} {grid}" width="{size}" height="{size}">{body}</svg>'
    png = resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size, background="#ffffff", skip_system_fonts=True)
    return np.asarray(Image.open(io.BytesIO(bytes(png))).convert("RGB"))


if __name__ == "__main__":
    sys.exit(main())
