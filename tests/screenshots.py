"""`make screenshots`: the page as it is, on a desktop and on a phone, into docs/pictures/ for the README. To be looked at."""

from __future__ import annotations

import base64
import io
import sys
import tempfile
from pathlib import Path

from _browser import Visitor, chromium, missing
from PIL import Image

from demo import models
from demo.page import LAUNCH, build
from demo.studio import Studio

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
WINDOWS = {"demo-desktop": (1280, 1000, False), "demo-phone": (390, 844, True)}
MOST = 300 * 1024  # bytes


def main() -> int:
    if lacking := missing():
        print(lacking, file=sys.stderr)
        return 1
    models.use_few_threads()
    studio = Studio(models.load(device="cpu"))
    page = build(studio)
    _, url, _ = page.launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **LAUNCH)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, (width, height, mobile) in WINDOWS.items():
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            driver = chromium(Path(folder), width, height, mobile)
            try:
                save(drawn(Visitor(driver, url)), FOLDER / f"{name}.png")
            finally:
                driver.quit()
    page.close()
    return 0


def drawn(visitor: Visitor) -> Image.Image:
    """The whole page, however long, after a picture was drawn."""
    visitor.press("draw")
    visitor.reads("verdict", "replayed")
    visitor.wait(lambda: len(visitor.pictures("slider")) == 2)
    driver = visitor.driver
    driver.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    size = driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"]
    clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": clip})
    return Image.open(io.BytesIO(base64.b64decode(shot["data"])))


def save(picture: Image.Image, path: Path) -> None:
    picture = picture.convert("RGB")
    if picture.width > 1280:
        picture = picture.resize((1280, picture.height * 1280 // picture.width))
    picture.quantize(256).save(path, optimize=True)
    print(f"{path}: {picture.width} x {picture.height}, {path.stat().st_size / 1024:.0f} KiB")
    assert path.stat().st_size <= MOST, "too large for the repository"


if __name__ == "__main__":
    sys.exit(main())
