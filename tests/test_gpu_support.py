"""The cases of SUPPORT.md on CUDA, where copies between host and device are breaks too: the same bits, and the same verdicts."""

import pytest
import torch

from support.__main__ import FILE
from support.cases import all_cases
from support.check import check

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::diffgraph.errors.CaptureWarning")]

CASES = {case.label: case for case in all_cases()}


@pytest.fixture(autouse=True)
def slow_is_fine(monkeypatch):
    """Models as small as these gain little; what is asked here is whether they are right."""
    monkeypatch.setattr("diffgraph.recording.verification.MAX_SLOWER", float("inf"))


@pytest.fixture(scope="module")
def rows():
    lines = [line for line in FILE.read_text().splitlines() if line.startswith("| ")]
    return {line.split("|")[1].strip().replace("<br>", ", "): line for line in lines}


@pytest.mark.parametrize("label", CASES)
def test_it_replays_on_cuda_if_it_does_on_the_cpu(label, rows):
    if not torch.cuda.is_available():
        pytest.fail("the gpu tests need a CUDA device")
    found = check(CASES[label], "cuda")
    assert found.replays == ("| replays" in rows[label]), f"{found.routes} {found.detail}"
    if found.alternating:
        said = "eager" if "; eager" in rows[label] else "replays"
        assert ("replays" if found.alternating[-1] == "replay" else "eager") == said, found.alternating


@pytest.mark.parametrize(
    "label", ["FluxTransformer2DModel", "WanTransformer3DModel", "UNet2DConditionModel, SDXL", "Lumina2Transformer2DModel"]
)
def test_it_replays_in_half_precision(label):
    if not torch.cuda.is_available():
        pytest.fail("the gpu tests need a CUDA device")
    found = check(CASES[label], "cuda", torch.bfloat16)
    assert found.replays, f"{found.routes} {found.detail}"
