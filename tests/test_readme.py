"""The README says what is so."""

import json
import re

import pytest
import torch

import diffgraph
import pipelines
from benchmarks import readme

TEXT = (readme.ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_its_tables_are_those_of_the_measured_results_and_of_the_reason_codes():
    assert readme.filled(TEXT) == TEXT


def test_the_committed_results_are_equal_to_eager_and_complete():
    data = json.loads(readme.RESULTS.read_text(encoding="utf-8"))
    assert set(data) == {"machine", "versions", "rows"}
    keys = {"what", "family", "shape", "mode", "ms", "submit_ms", "segments", "capture_s", "pool_mib", "max_abs_diff"}
    for row in data["rows"]:
        assert keys <= set(row)
        assert not row["max_abs_diff"], row


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_its_code_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes.json").write_text('["64x64", "64x96"]', encoding="utf-8")
    pipe = pipelines.build("flux", "tiny")
    embeds, pooled, _ = pipe.encode_prompt("a red cat", None)
    names = {
        "diffgraph": diffgraph,
        "pipe": pipe,
        "embeds": embeds,
        "pooled": pooled,
        "x": torch.randn(4, 8),
        "new_input": torch.randn(4, 8),
        "layer": torch.nn.Linear(8, 8),
    }
    # The sizes of life are too much for a test's CPU.
    block = block.replace("512", "64").replace("1024", "128").replace("768", "96")
    for statement in re.split(r"\n(?=pipe = diffgraph)", block):
        exec(compile(statement, "README.md", "exec"), names)
        if "accelerate_pipeline" in statement:
            diffgraph.restore_pipeline(pipe)
    if "y = layer" in block:
        assert torch.equal(names["y"], names["layer"](names["new_input"]) * names["dynamic"](names["new_input"]))
