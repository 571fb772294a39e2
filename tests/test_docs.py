"""The documentation says what is so: its code runs, its lists are complete, and it builds without a warning."""

from __future__ import annotations

import base64
import importlib.util
import json
import logging
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import diffusers
import pytest
import torch

import diffgraph
import pipelines
from benchmarks import readme
from diffgraph.cli.main import main
from diffgraph.compiling import pieces
from diffgraph.reasons import Reason

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\w*)\n(?P<text>.*?)^ *```$", re.DOTALL | re.MULTILINE)
GIVEN = re.compile(r"<!-- given: (\w+) -->\n\Z")
#: Blocks that are no code: what something prints.
PRINTED = {"text"}
MODELS = {"Qwen/Qwen-Image": "qwen_image", "black-forest-labs/FLUX.1-dev": "flux"}


class Block(NamedTuple):
    kind: str
    text: str
    given: str | None  # the family that the block's `pipe` is of, where another than before


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        indent = len(match["indent"])
        lines = [line[indent:] for line in match["text"].splitlines(keepends=True)]
        given = GIVEN.search(text[: match.start()])
        found.append(Block(match["kind"], "".join(lines), given[1] if given else None))
    return found


def small(text: str) -> str:
    """The sizes of life are too much for a test's CPU."""
    return re.sub(r"\b1024", "128", re.sub(r"\b768", "96", re.sub(r"\b512", "64", text)))


def tiny(family: str):
    pipe = pipelines.build(family, "tiny")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tiny_controlnet():
    transformer = pipelines.build("flux", "tiny").transformer
    heads = {name: transformer.config[name] for name in ("num_attention_heads", "attention_head_dim")}
    one = {"num_layers": 1, "num_single_layers": 1}
    return diffusers.FluxControlNetModel.from_transformer(transformer, **one, **heads, load_weights_from_transformer=False).eval()


@pytest.fixture
def a_users_machine(tmp_path, monkeypatch):
    """A folder of one's own, a hub whose models are tiny, a GPU that is none, and a compiler that takes no time."""
    monkeypatch.chdir(tmp_path)
    real = diffusers.DiffusionPipeline
    monkeypatch.setattr(real, "from_pretrained", lambda name, **_: tiny(MODELS[name]))
    monkeypatch.setattr(real, "to", lambda self, *_: self)
    monkeypatch.setattr(diffusers.FluxControlNetModel, "from_pretrained", lambda name, **_: tiny_controlnet())
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, *_, **__: None)
    monkeypatch.setattr(pieces, "COMPILER", "eager")
    level = logging.getLogger("diffgraph").level
    yield
    logging.getLogger("diffgraph").setLevel(level)


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.stem)
def test_every_block_of_a_page_runs(page, a_users_machine, capsys):
    """In order, as a reader would: what one block defines, the next may use."""
    names = {"diffgraph": diffgraph, "torch": torch, "__name__": "a page"}
    for block in blocks(page):
        if block.kind == "python" and "--8<--" not in block.text:
            if block.given or ("pipe" in block.text and "pipe" not in names):
                names["pipe"] = tiny(block.given or "flux")
            exec(compile(small(block.text), str(page), "exec"), names)
        elif block.kind == "bash":
            run_shell(block.text)
        elif block.kind == "json":
            diffgraph.shapes.capture_shape.load_shapes(json.loads(block.text))
        else:
            assert block.kind in PRINTED or "--8<--" in block.text, f"{page.name}: nobody runs a block of kind {block.kind!r}"


def run_shell(text: str) -> None:
    """Our own commands run; of others it is checked that what they name exists."""
    for line in filter(None, map(str.strip, text.splitlines())):
        words = shlex.split(small(line), comments=True)
        if words[0] == "diffgraph":
            words = [part for word in words[1:] for part in ([MODELS[word], "--tiny"] if word in MODELS else [word])]
            assert main(words) == 0, line
        elif words[:2] == ["pip", "install"]:
            extras = {extra for word in words for extra in re.findall(r"\[(\w+)\]", word)}
            assert extras <= extras_of_the_project(), line
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        elif words[0] == "uvicorn":
            module, _, factory = words[-1].partition(":")
            assert hasattr(importlib.import_module(module), factory), line
        elif words[0] in ("python", "torchrun"):
            assert importlib.util.find_spec(words[words.index("-m") + 1]) is not None, line
        else:
            assert words[0] in ("curl", "git"), f"nobody checks {line!r}"


def extras_of_the_project() -> set[str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return set(re.findall(r"^(\w+) = \[", text.partition("[project.optional-dependencies]")[2].partition("\n[")[0], re.MULTILINE))


def test_the_commands_of_the_readme_exist(a_users_machine, capsys):
    for block in blocks(ROOT / "README.md"):
        assert block.kind in {"python", "bash", "json", *PRINTED, ""}
        if block.kind == "bash":
            run_shell(block.text)
        if block.kind == "json":
            assert diffgraph.shapes.capture_shape.load_shapes(json.loads(block.text))


def test_every_reason_has_a_cause_and_a_remedy():
    text = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## `(\w+)`\n\n(.+?)\.\n\n- \*\*Cause:\*\* .+\n- \*\*Remedy:\*\* .+\n", text, re.MULTILINE)
    assert [(code, meaning.lower()) for code, meaning in sections] == [(str(r), r.meaning.lower()) for r in Reason]


def test_the_measured_results_are_those_that_were_measured():
    for page in readme.PAGES:
        text = page.read_text(encoding="utf-8")
        assert readme.filled(text) == text, f"python -m benchmarks.readme fills in {page.name}"


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    missing = []
    for name in diffgraph.__all__:
        found = getattr(diffgraph, name)
        if f"::: {found.__module__}.{name}\n" not in text and f"::: {found.__module__}\n" not in text:
            missing.append(name)
    assert not missing


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert sorted(re.findall(r": (\S+\.md)$", text, re.MULTILINE)) == [page.name for page in DOCS]


def test_it_builds_without_a_warning(tmp_path):
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    reference = (tmp_path / "site" / "reference" / "index.html").read_text(encoding="utf-8")
    assert "Record the denoiser" in reference


def test_the_example_of_a_server_serves():
    from fastapi.testclient import TestClient

    from examples.server import create_app

    small_picture = {"prompt": "a red cat", "height": 64, "width": 64, "steps": 3}
    with TestClient(create_app(lambda: tiny("flux"), ["64x64"])) as client:
        assert client.get("/health").json() == {"ready": True, "as_recorded": True, "lost": {}, "unseen": {}}
        first, second = (client.post("/pictures", json=small_picture) for _ in range(2))
        assert first.status_code == 200 and first.headers["content-type"] == "image/png" and first.content == second.content
        assert base64.b64encode(first.content).startswith(b"iVBORw0KGgo")
        assert 'route="replay"} 7' in client.get("/metrics").text  # one of them at start-up
        assert client.post("/pictures", json={**small_picture, "width": 96}).status_code == 200
        health = client.get("/health").json()
        assert not health["as_recorded"] and sum(health["unseen"].values()) == 3
        assert client.post("/pictures", json={**small_picture, "steps": 0}).status_code == 422
