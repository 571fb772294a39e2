"""The demo without a browser: what it compares, what it refuses, what it says."""

from __future__ import annotations

import re
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

import diffgraph
from demo import comparing, models, words
from demo.__main__ import main
from demo.asking import checked, shapes_of, size_of
from demo.errors import NotPossible, sentence
from demo.measures import distance, shown
from demo.pictures import Shelf, still
from demo.studio import Studio
from diffgraph.cli.errors import UsageError

WISH = {"prompt": "a red heart", "size": "64x64", "seed": 0, "steps": 3, "guidance": 4}


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch):
    monkeypatch.setattr(comparing, "ROUNDS", 1)


def silent(share: float, text: str) -> None:
    pass


@pytest.fixture(scope="module")
def studio():
    found = Studio(models.load("qwen_image", device="cpu"))
    yield found
    found.close()


def drawn(studio: Studio, **wish):
    ask = checked(studio.model, **{**WISH, **wish})
    for found in studio.compare(ask, silent):  # noqa: B007
        pass
    return found


def test_a_recorded_size_replays_every_forward_and_is_bit_equal(studio):
    found = drawn(studio)
    assert found.complete and found.distance.equal and found.repeats
    assert found.route.replayed == 6 and found.route.eager == 0  # three steps, each with the prompt and with the negative one
    assert found.speed_up > 0 and all(run.step_ms > 0 for run in found.eager + found.accelerated)
    said = words.result(found)
    assert "bit-equal" in said and "replayed 6, eager 0" in said and "as measured" in said


def test_pictures_come_as_soon_as_they_are_there(studio):
    ask = checked(studio.model, **WISH)
    told = []
    stages = studio.compare(ask, lambda share, text: told.append((share, text)))
    seen = [(len(found.eager), len(found.accelerated)) for found in stages]
    assert seen == [(1, 0), (1, 1), (2, 2)]
    shares = [share for share, _ in told]
    assert shares == sorted(shares) and shares[-1] == 1.0 and any("Warming up" in text for _, text in told)


def test_a_visitor_who_leaves_midway_keeps_nobody_waiting(studio):
    left = studio.compare(checked(studio.model, **WISH), silent)
    next(left)
    with ThreadPoolExecutor(1) as another_thread:
        assert another_thread.submit(drawn, studio).result(timeout=60).distance.equal
        assert another_thread.submit(next, left).result(timeout=60).route.replayed == 6  # Gradio changes threads, too


def test_without_guidance_a_step_is_one_forward(studio):
    assert drawn(studio, guidance=1).route.replayed == 3


def test_another_seed_is_another_picture_and_the_same_seed_the_same(studio):
    first, again, other = drawn(studio), drawn(studio), drawn(studio, seed=1)
    assert np.array_equal(first.eager[0].pictures, again.eager[0].pictures)
    assert not np.array_equal(first.eager[0].pictures, other.eager[0].pictures)


def test_a_size_that_is_not_recorded_runs_eager_says_why_and_replays_once_it_is(studio):
    stranger = studio.model.stranger
    assert (stranger, False) in studio.sizes()
    before = drawn(studio, size=stranger)
    assert before.route.replayed == 0 and before.route.reasons == {"unseen_signature": 6} and before.distance.equal
    assert any("hidden_states" in line for line in before.differences)
    assert "unseen_signature" in words.result(before) and "Record it below" in words.result(before)

    told = []
    assert studio.capture(shapes_of(studio.model, str(before.ask.shape)), lambda share, text: told.append(text)) == []
    assert any(stranger in text for text in told) and (stranger, True) in studio.sizes()
    after = drawn(studio, size=stranger)
    assert after.route.replayed == 6 and after.distance.equal and not after.differences

    drawn_so_far = studio.state().replays
    studio.reset(silent)
    assert (stranger, False) in studio.sizes() and studio.state().replays < drawn_so_far  # recording replays a few times itself


def test_paused_is_eager_and_says_so(studio):
    found = drawn(studio, paused=True)
    assert found.route.replayed == 0 and found.route.reasons == {"paused": 6} and found.distance.equal


def test_several_pictures_at_once_need_a_recording_of_so_many(studio):
    found = drawn(studio, images=2)
    assert found.eager[0].pictures.shape[0] == 2 and "unseen_signature" in found.route.reasons
    assert str(found.ask.shape) == "64x64@batch=2"


def test_a_prompt_longer_than_the_buckets_runs_eager_and_says_so(studio):
    found = drawn(studio, prompt="a very long story " * 10)
    assert found.route.reasons["prompt_too_long"] == 3 and found.distance.equal


def test_the_table_names_size_bucket_and_hits_of_each_recording(studio):
    drawn(studio)
    state = studio.state()
    assert all(row.shape in studio.model.start and row.bucket in models.SHORT_BUCKETS for row in state.rows)
    assert sum(row.signature.replays for row in state.rows) == state.replays
    text = words.table(state, studio.model)
    assert "64 × 64" in text and text.count("<tr") == len(state.rows) + 1
    assert "MiB" in words.gauge(state, studio.model) and state.graph_memory > 0


BAD = {
    "prompt is empty": {"prompt": "  "},
    "prompt is too long": {"prompt": "a" * 5000},
    "“7” is not a size": {"size": "7"},
    "nearest is 32x32": {"size": "7x7"},
    "multiples of 16": {"size": "64x65"},
    "from 32 to 256": {"size": "4096x4096"},
    "not videos": {"size": "64x64x5"},
    "steps is a whole number": {"steps": 2.5},
    "steps is a whole number from 1": {"steps": 0},
    "seed is a whole number from 0 to 4294967295, not nothing": {"seed": None},
    "not “-1”": {"seed": -1},
    "Guidance is a number": {"guidance": "much"},
    "Guidance is a number from 0": {"guidance": float("nan")},
    "number of pictures": {"images": 100},
}


@pytest.mark.parametrize("said", BAD)
def test_a_wrong_wish_is_answered_in_a_sentence(studio, said):
    with pytest.raises(NotPossible, match=re.escape(said)) as error:
        checked(studio.model, **{**WISH, **BAD[said]})
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    "text", ["", "hello", "64", "64x", "64x65", "64x64@prompt=x", "9999x9999", "64x64@batch=99", "64x64 " * 9]
)
def test_what_is_no_size_to_record_is_answered_in_a_sentence(studio, text):
    with pytest.raises(NotPossible, match=r"\.$"):
        shapes_of(studio.model, text)


def test_sizes_may_be_written_in_many_ways(studio):
    assert [size_of(studio.model, text) for text in ("64x96", " 64 × 96 ", "64X96")] == [(64, 96, None)] * 3
    assert list(map(str, shapes_of(studio.model, "64x96, 96x96;64x64@cfg=off,batch=2"))) == [
        "96x96",
        "64x64@cfg=off,batch=2",
        "64x96",
    ]


def test_errors_are_sentences_and_pages_hold_no_foreign_markup(caplog):
    assert sentence(NotPossible("No.")) == "No."
    assert sentence(diffgraph.errors.ShapeError("odd")) == "diffgraph refuses this: odd."
    assert sentence(ValueError("height must be\nmore")) == "The pipeline refuses this: height must be."
    assert "memory" in sentence(torch.OutOfMemoryError("CUDA out of memory"))
    assert "server's log" in sentence(RuntimeError("boom")) and "boom" in caplog.text
    assert "<script>" not in words.problem("<script>")


def test_distances():
    a = np.linspace(0, 1, 12, dtype=np.float32).reshape(1, 2, 2, 3)
    assert distance(a, a.copy()) == (True, 0.0, float("inf"), True)
    near, far = distance(a, a + np.float32(1e-5)), distance(a, 1 - a)
    assert not near.equal and near.same_when_shown and near.psnr == pytest.approx(100, abs=1)
    assert not far.equal and not far.same_when_shown and far.largest == pytest.approx(1)
    assert np.isnan(distance(a, a[:, :1]).largest)
    nan = np.full_like(a, np.nan)
    assert distance(nan, nan.copy()).equal and shown(nan).max() == 0


def test_small_pictures_are_enlarged_by_whole_pixels():
    picture = np.random.default_rng(0).random((64, 96, 3))
    assert still(picture).size == (384, 256) and still(np.zeros((512, 512, 3))).size == (512, 512)


def test_a_video_pipeline_gives_videos():
    studio = Studio(models.load("wan", device="cpu"))
    try:
        assert studio.model.makes_video and studio.model.stranger.endswith("x5")
        found = drawn(studio, size="64x64x5", steps=2)
        assert found.distance.equal and found.route.replayed == 4 and found.eager[0].pictures.shape[:2] == (1, 5)
        shelf = Shelf()  # whose files go with it
        with Image.open(shelf.video(found.eager[0].pictures[0])) as film:
            assert film.n_frames == 5
        with pytest.raises(NotPossible, match="1 to 17 frames"):
            checked(studio.model, **{**WISH, "size": "64x64x99"})
    finally:
        studio.close()


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_pipelines_with_other_arguments_are_drawn_too(family):
    studio = Studio(models.load(family, "64x64", device="cpu"))
    try:
        found = drawn(
            studio, steps=2, guidance=studio.model.defaults.get("true_cfg_scale", studio.model.defaults["guidance_scale"])
        )
        assert found.distance.equal and found.route.eager == 0 and found.route.replayed == 2
    finally:
        studio.close()


def test_a_folder_is_a_model_and_the_embedded_one_is_taken_where_it_lies(studio, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    studio.model.pipe.save_pretrained(folder)
    monkeypatch.setattr(models, "EMBEDDED", folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, named = models.load(device="cpu"), models.load(str(folder), "64x64", device="cpu")
    assert "emoji" in found.about and found.start[0].height == 96
    assert named.name == str(folder) and str(named.start[0]) == "64x64" and named.stranger == "64x128"


def test_where_nothing_is_embedded_a_stand_in_says_that_it_is_one(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "EMBEDDED", tmp_path)
    assert "noise" in models.load(device="cpu").about


def test_a_wrong_command_line_is_answered_in_a_line(capsys):
    for words_, said in ((["--model", "no-such-model"], "neither a folder"), (["--capture-shapes", "7"], "not a capture shape")):
        with pytest.raises(SystemExit) as error:
            main([*words_, "--device", "cpu"])
        assert error.value.code == 2 and said in capsys.readouterr().err
    with pytest.raises(UsageError):
        models.load(device="nonsense")


def test_what_takes_no_time_is_timed_more_often_and_noise_is_called_noise(studio, monkeypatch):
    monkeypatch.setattr(comparing, "ROUNDS", 3)
    monkeypatch.setattr(comparing, "ENOUGH", float("inf"))
    found = drawn(studio, steps=2)
    assert len(found.eager) == len(found.accelerated) == 6
    for run, seconds in zip(found.eager + found.accelerated, [1.0] * 6 + [2.0] * 5 + [0.5], strict=True):
        run.seconds = seconds
    assert not found.is_clear and "for noise" in words.result(found)
    found.accelerated[-1].seconds = 2.0
    assert found.is_clear and found.speed_up == 0.5 and "for noise" not in words.result(found)
