"""What is shipped: the wheel builds, installs where nothing of the repository is, imports fast, and brings its command."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 1.0  # that the library may add to the import of torch and diffusers


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    words = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(words, cwd=ROOT, check=True, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory) -> Path:
    """An environment with the wheel and what it depends on, which it finds where this one has it."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    (site,) = folder.glob("lib/python*/site-packages")
    paths = [sysconfig.get_path("purelib"), *filter(lambda p: p.endswith("site-packages"), sys.path)]
    (site / "dependencies.pth").write_text("\n".join(dict.fromkeys(paths)))  # links to checkouts in there are not followed
    return folder


def run(clean: Path, *words: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run([str(clean / "bin" / words[0]), *words[1:]], cwd=clean, env=env, capture_output=True, text=True)


def test_the_wheel_holds_the_library_alone(wheel):
    with zipfile.ZipFile(wheel) as found:
        assert {name.partition("/")[0].partition("-")[0] for name in found.namelist()} == {"diffgraph"}


def test_it_imports_fast_and_brings_nothing_heavy(clean):
    code = (
        "import sys, time, torch; start = time.perf_counter(); import diffgraph, diffgraph.cli.main;"
        "print(diffgraph.__file__, time.perf_counter() - start,"
        "*[m for m in ('diffusers', 'transformers', 'accelerate', 'rich', 'yaml', 'torch._dynamo') if m in sys.modules])"
    )
    done = run(clean, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    path, seconds, *heavy = done.stdout.split()
    assert Path(path).is_relative_to(clean)
    assert float(seconds) < SECONDS and not heavy


@pytest.mark.slow
def test_its_command_runs_without_the_repository(clean):
    assert "doctor" in run(clean, "diffgraph", "--help").stdout
    assert run(clean, "diffgraph", "shapes", "write", "s.json", "512x512").returncode == 0
    asked = run(clean, "diffgraph", "doctor", "qwen_image", "--tiny")
    assert asked.returncode == 2
    assert "which is not installed with the library: run from a clone" in asked.stderr.splitlines()[-1]
