"""Every denoiser class of diffusers replays with eager's bits, or runs eager for the reason that SUPPORT.md gives."""

import functools
import re

import pytest

from diffgraph.values.tensors import tensors_in
from support import table
from support.__main__ import FILE
from support.cases import Draw, all_cases, classes
from support.check import check
from tests._toys import some_slow

CASES = {case.label: case for case in all_cases()}


@functools.cache
def written():
    """SUPPORT.md's rows, by label."""
    lines = [line for line in FILE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| class")]
    return {line.split("|")[1].strip().replace("<br>", ", "): line for line in lines}


#: Every other class in CI, the rest in `make test-slow`; on a GPU all of them.
SPREAD = some_slow(CASES, *list(CASES)[1::2])


@pytest.mark.filterwarnings("ignore::diffgraph.errors.CaptureWarning")
@pytest.mark.parametrize("label", SPREAD)
def test_the_bits_are_eagers_and_the_row_is_what_was_found(label):
    case = CASES[label]
    assert table.row(case, check(case)) == written().get(label), "run `make support`, and read what it changed"


def test_every_class_has_a_row_and_the_summary_counts_them():
    assert set(CASES) <= set(written())
    assert table.summary(written()) in FILE.read_text()
    replaying = re.search(r"\*\*(\d+) replay", table.summary(written()))
    assert replaying and int(replaying[1]) >= 60


def test_a_class_that_a_release_adds_is_a_row_to_be_filled(monkeypatch):
    monkeypatch.setattr(table, "classes", lambda: {**classes(), "NewTransformer2DModel": object})
    rows = table.rows([])
    assert rows["NewTransformer2DModel"].endswith(f"| {table.TO_BE_FILLED} |")
    assert table.summary({**written(), **rows}).endswith("1 are to be filled.")


def test_what_does_not_replay_says_why():
    """By hand, once: the reason code alone does not tell whether it is right."""
    for label, line in written().items():
        verdict = table.verdict_of(line)
        assert verdict.startswith("replays") or ". " in verdict, label


def test_equal_seeds_draw_equal_inputs_on_every_device():
    first, second = Draw(3), Draw(3)
    assert first(2, 3).equal(second(2, 3)) and first.steps(4).equal(second.steps(4))
    assert not Draw(4)(2, 3).equal(Draw(3)(2, 3))


@pytest.mark.parametrize("label", CASES)
def test_inputs_lie_on_the_device_that_is_asked_for(label):
    """Or the gpu tests would see `cpu_input`."""
    tensors = tensors_in(CASES[label].inputs(Draw(0, device="meta")))
    assert tensors and {tensor.device.type for tensor in tensors} == {"meta"}
