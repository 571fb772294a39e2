"""Capture shapes from real traffic: what was asked for once is recorded at the next start."""

from __future__ import annotations

import pytest
import torch

import diffgraph
import pipelines
from diffgraph import CaptureShape
from tests._toys import some_slow

CALLS = {
    "qwen_image": [
        dict(height=64, width=96, negative_prompt="bad", true_cfg_scale=3.0),
        dict(height=64, width=64),
        dict(height=64, width=64, num_images_per_prompt=2),
    ],
    "z_image": [dict(height=64, width=64, guidance_scale=0.0), dict(height=96, width=64, guidance_scale=4.0)],
    "flux": [dict(height=64, width=64), dict(height=64, width=96, max_sequence_length=256)],
    "sd3": [dict(height=64, width=64), dict(height=64, width=64, guidance_scale=1.0)],
    "sdxl": [
        dict(height=64, width=96, num_images_per_prompt=2),
        dict(height=64, width=64, num_images_per_prompt=2, negative_prompt=["bad"] * 2, prompt=["a cat", "a dog"]),
    ],
    "wan": [dict(height=64, width=64, num_frames=5), dict(height=64, width=64, num_frames=1, guidance_scale=1.0)],
    "pixart": [dict(height=64, width=64)],
    "sana": [dict(height=64, width=64)],
}


def make(pipe, call: dict, prompt: str = "a photo of a red cat"):
    generator = torch.Generator().manual_seed(0)
    return pipe(num_inference_steps=3, output_type="latent", generator=generator, **{"prompt": prompt, **call})[0]


@pytest.mark.parametrize("ending", ["json", "yaml"])
@pytest.mark.parametrize("family", ["qwen_image", "wan"])
def test_a_file_of_real_traffic_serves_the_next_start(family, ending, tmp_path):
    _check(family, tmp_path / f"shapes.{ending}")


@pytest.mark.parametrize("family", some_slow(sorted(set(CALLS) - {"qwen_image", "wan"}), "sdxl", "sd3", "z_image"))
def test_what_was_asked_for_is_recorded_at_the_next_start(family, tmp_path):
    _check(family, tmp_path / "shapes.json")


def _check(family, path):
    first = pipelines.build(family)
    first.set_progress_bar_config(disable=True)
    want = [make(first, call) for call in CALLS[family]]
    diffgraph.accelerate_pipeline(first)
    for call in CALLS[family]:
        make(first, call)
    diffgraph.save_shapes(diffgraph.report(first).to_shapes(), path)

    second = pipelines.build(family)
    second.set_progress_bar_config(disable=True)
    diffgraph.accelerate_pipeline(second, capture_shapes=path)
    before = diffgraph.report(second)
    for call, expected in zip(CALLS[family], want, strict=True):
        assert (make(second, call) - expected).norm() <= 1e-5 * expected.norm()
    after = diffgraph.report(second)
    assert after.unseen == {} and (after.eager, after.captures) == (before.eager, before.captures)


def test_calls_that_start_up_did_not_foresee_are_told_too():
    pipe = pipelines.build("sd3")
    pipe.set_progress_bar_config(disable=True)
    diffgraph.accelerate_pipeline(pipe, capture_shapes="64x64")
    make(pipe, dict(height=96, width=64))
    assert diffgraph.report(pipe).to_shapes() == [CaptureShape(96, 64)]


def test_a_loop_of_ones_own_has_no_shapes():
    module = torch.nn.Linear(2, 2).eval()
    diffgraph.accelerate_module(module)
    with torch.no_grad():
        module(torch.zeros(1, 2))
    assert diffgraph.report(module).to_shapes() == []


def test_a_file_of_another_ending_is_refused(tmp_path):
    with pytest.raises(diffgraph.ShapeError, match=r"ends in \.json, \.yaml or \.yml"):
        diffgraph.save_shapes([CaptureShape(64, 64)], tmp_path / "shapes.txt")
    with pytest.raises(diffgraph.ShapeError, match="cannot be written: No such file"):
        diffgraph.save_shapes("64x64", tmp_path / "nowhere" / "shapes.json")
    with pytest.raises(diffgraph.ShapeError, match="no capture shape in"):
        diffgraph.save_shapes([], tmp_path / "shapes.json")
    with pytest.raises(diffgraph.ShapeError, match="is no path"):
        diffgraph.save_shapes("64x64", ["64x64"])
    diffgraph.save_shapes("64x64@prompt=8", tmp_path / "shapes.json")
    assert "64x64@prompt=8" in (tmp_path / "shapes.json").read_text()
    with pytest.raises(diffgraph.ShapeError, match="inputs that a file cannot hold"):
        diffgraph.save_shapes([CaptureShape(64, 64, inputs={"image": object()})], tmp_path / "shapes.json")
