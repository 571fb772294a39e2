"""The trained model in the box: what it is made of, that it draws what it is asked for, and that recording changes no pixel."""

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

import diffgraph
from demo import models
from demo.run import main

SIDE = 64
PLACES = {"red heart": 0, "green heart": 1, "blue heart": 2}  # of the channel that is to be the brightest in the middle


@pytest.fixture(scope="module")
def pipe():
    found = DiffusionPipeline.from_pretrained(models.EMBEDDED)
    found.set_progress_bar_config(disable=True)
    return found


def picture(pipe, prompt, seed=0, side=SIDE, **given):
    given = {"negative_prompt": " ", "true_cfg_scale": 2.0, "num_inference_steps": 12, **given}
    generator = torch.Generator().manual_seed(seed)
    return pipe(prompt, height=side, width=side, generator=generator, output_type="np", **given).images[0]


def test_it_is_made_of_the_libraries_own_classes_and_small(pipe):
    files = [path for path in models.EMBEDDED.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 12e6
    assert {path.suffix for path in files} <= {".json", ".safetensors", ""}
    for part in pipe.components.values():
        assert type(part).__module__.partition(".")[0] in {"diffusers", "transformers"}
    assert "MIT License" in (models.EMBEDDED / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("prompt", PLACES)
def test_it_draws_the_colour_that_it_is_asked_for_on_white(pipe, prompt):
    drawn = picture(pipe, f"a picture of the {prompt}")
    middle, corners = drawn[SIDE // 2 - 8 : SIDE // 2 + 8, SIDE // 2 - 8 : SIDE // 2 + 8], drawn[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert middle.mean(axis=(0, 1)).argmax() == PLACES[prompt]
    assert corners.min() > 0.9


@pytest.mark.slow
def test_prompts_of_any_length_share_recordings_and_no_pixel_changes(pipe):
    prompts = ("red heart", "cat face", "a slice of pizza", "please draw a soccer ball, flat design")
    wanted = [picture(pipe, prompt) for prompt in prompts]
    alone = {"true_cfg_scale": 1.0}  # one call a step
    exact = [picture(pipe, prompt, **alone) for prompt in prompts]
    diffgraph.accelerate_pipeline(pipe, capture_shapes=["64x64"], prompt_buckets=list(models.SHORT_BUCKETS))
    try:
        for prompt, eager in zip(prompts, wanted, strict=True):
            assert np.abs(picture(pipe, prompt) - eager).max() < 1e-4  # a bucket's matrix products round otherwise
        assert set(diffgraph.report(pipe).reasons) == {"warm_up"}
    finally:
        diffgraph.restore_pipeline(pipe)
    diffgraph.accelerate_pipeline(pipe, prompt_buckets=None)
    try:
        for _ in range(2):
            assert all(np.array_equal(picture(pipe, p, **alone), eager) for p, eager in zip(prompts, exact, strict=True))
        assert diffgraph.report(pipe).replays > 60
    finally:
        diffgraph.restore_pipeline(pipe)


@pytest.mark.slow
def test_make_run_draws_with_it(tmp_path, capsys):
    assert main(["--steps", "2", "--out", str(tmp_path / "sheet.png")]) == 0
    said = capsys.readouterr().out
    assert "the embedded emoji model" in said and "bit-equal" in said
    assert (tmp_path / "sheet.png").stat().st_size > 1000
