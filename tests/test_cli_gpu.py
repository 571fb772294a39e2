"""What doctor and the profiler's ranges can only show on CUDA. `make test-gpu` runs it."""

import json

import pytest
import torch

import diffgraph
from diffgraph.cli.main import main
from diffgraph.cli.profile import busy_us, gap_us, profiled

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cuda():
    if not torch.cuda.is_available():
        pytest.fail("the gpu tests need a CUDA device")
    return torch.device("cuda")


def test_the_profile_counts_kernels_and_their_time(cuda):
    x = torch.randn(4096, 4096, device=cuda)
    found = profiled(lambda: (x @ x, x + 1), cuda)
    assert found.ops == 2 and 2 <= (found.launches or 0) <= 4
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    _ = (x @ x, x + 1)
    end.record()
    torch.cuda.synchronize()
    assert 0.5 * start.elapsed_time(end) < (found.busy_ms or 0) < 1.5 * start.elapsed_time(end)
    assert 0 <= gap_us(cuda) < 20 and busy_us([(0, 1)]) == 1


def test_doctor_foresees_and_measures(cuda, capsys, monkeypatch):
    assert main(["doctor", "pixart", "--tiny", "--shapes", "64x64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (call,) = found["calls"]
    assert found["limits"] is None and call["launches"] > 100 and 0 < call["idle"] < 1
    assert call["same"] == "to the bit" and call["measured_ms"] > 0 and call["expected_ms"] > 0
    assert main(["doctor", "pixart", "--tiny", "--shapes", "64x64"]) == 0
    assert "measured speed-up" in capsys.readouterr().out


def test_bench_measures_every_backend(cuda, capsys):
    assert main(["bench", "pixart", "--tiny", "--shapes", "64x64", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert all(row["ms"] > 0 for row in rows) and [row["equal"] for row in rows] == [True, True]


def test_a_trace_names_segments_and_breaks_beside_their_kernels(cuda, monkeypatch):
    monkeypatch.setattr("diffgraph.recording.verification.MAX_SLOWER", float("inf"))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def forward(self, x):
            h = self.layer(x)
            return torch.nn.functional.scaled_dot_product_attention(h, h, h) + x

    module = diffgraph.accelerate_module(Net().to(cuda).eval())
    x = torch.randn(1, 4, 16, 64, device=cuda)
    with torch.no_grad():
        for _ in range(4):
            module(x)
        with torch.profiler.profile() as profile:
            module(x)
            torch.cuda.synchronize()
    names = {event.name for event in profile.events()}
    assert {"segment 0", "break 1: attention", "segment 2"} <= names
    assert diffgraph.report(module).replays == 3
