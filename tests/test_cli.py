"""The command line: what each command answers, and what it says of bad input."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pipelines
from demo import models as demo_models
from diffgraph.cli.advice import recommended, verdict
from diffgraph.cli.calls import denoiser_calls
from diffgraph.cli.diagnosis import DIFFERENT, Diagnosis, diagnose
from diffgraph.cli.forecast import forecast
from diffgraph.cli.main import main
from diffgraph.cli.models import Model, load
from diffgraph.cli.profile import busy_us
from diffgraph.cli.shape_options import shapes_of
from diffgraph.prompts.buckets import AUTO
from diffgraph.shapes.capture_shape import CaptureShape

EMBEDDED = str(demo_models.EMBEDDED)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "COMMAND"),
        (["heal"], "invalid choice: 'heal'"),
        (["doctor"], "MODEL"),
        (["doctor", "no-such-model"], "neither a folder here, nor a hub id (owner/name)"),
        (["doctor", "no-such-model", "--tiny"], "--tiny needs one of the families in pipelines/ (qwen_image"),
        (["doctor", "flux"], "needs a GPU; here, add --tiny"),
        (["doctor", "."], "no model_index.json"),
        (["doctor", "some-owner/no-such-model"], "cannot be loaded"),
        (["doctor", "flux", "--tiny", "--shapes", "12"], "'12' is not a capture shape"),
        (["doctor", "flux", "--tiny", "--shapes", ","], "no capture shape"),
        (["doctor", "flux", "--tiny", "--shapes", "none.json"], "cannot be read"),
        (["doctor", "flux", "--tiny", "--shapes", "60x60x5"], "takes no num_frames"),
        (["doctor", "flux", "--tiny", "--device", "cuda"], "sees 0 GPUs"),
        (["doctor", "flux", "--tiny", "--device", "toaster"], "accepted: cpu"),
        (["doctor", "flux", "--tiny", "--dtype", "int3"], "invalid choice: 'int3'"),
        (["doctor", "flux", "--tiny", "--repeats", "1"], "at least 2"),
        (["bench", "flux", "--tiny", "--backends", "quick"], "accepted: breakable, full"),
        (["run", "flux", "--tiny"], "--prompt"),
        (["run", "flux", "--tiny", "--prompt", "a", "--out", "a.mp3"], "accepted: .png"),
        (["run", "flux", "--tiny", "--prompt", "a", "--steps", "0"], "at least 1"),
        (["run", "flux", "--tiny", "--prompt", "a", "--shape", "64x64,96x96"], "accepted: one shape"),
        (["run", "flux", "--tiny", "--prompt", "a", "--shape", "64x64@batch=2"], "one picture a prompt"),
        (["run", "flux", "--tiny", "--prompt", "a", "--out", "."], "accepted: .png"),
        (["run", "flux", "--tiny", "--prompt", "a", "--capture-shapes", "64x64@cfg=maybe"], "cfg is on, off"),
        (["shapes"], "ACTION"),
        (["shapes", "write", "shapes.txt", "64x64"], "ends in .json"),
        (["shapes", "write", "no/such/folder/shapes.json", "64x64"], "cannot be written"),
        (["shapes", "write", "shapes.json", "64x64", "--batch", "none"], "--batch is 'none'; accepted: a whole number"),
        (["shapes", "check", "shapes.txt"], "ends in .json"),
        (["shapes", "check", "shapes.json"], "cannot be read"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_and_exit_code_2(words, says, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("diffgraph") and err.count("\n") == 1 and "Traceback" not in err
    assert says in err


def test_help_says_what_each_command_is_for(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("doctor", "bench", "run", "shapes"))
    assert main(["doctor", "--help"]) == 0
    assert "Idle share" in capsys.readouterr().out


def test_what_a_command_does_not_need_is_not_imported():
    heavy = "'diffusers', 'transformers', 'rich', 'pipelines'"
    code = f"import sys, diffgraph.cli.main; print([m for m in ({heavy}) if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# -- doctor


def test_doctor_on_a_cpu_says_what_it_found_and_what_it_cannot_know(capsys):
    assert main(["doctor", "pixart", "--tiny", "--shapes", "64x64"]) == 0
    out = capsys.readouterr().out
    assert "No GPU here" in out and "are not known" in out
    assert "attention stays eager by choice" in out
    assert 'pipe = diffgraph.accelerate_pipeline(pipe, capture_shapes=["64x64"])' in out.splitlines()[-1]
    assert "One denoiser call" not in out  # no times of a CPU


def test_doctors_json_holds_everything(capsys):
    assert main(["doctor", "qwen_image", "--tiny", "--prompt", "a red cat on a mat", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (call,) = found["calls"]
    assert found["prompts_vary_in_length"] and found["refused"] == {} and found["pipeline"] == "QwenImagePipeline"
    assert call["recorded"] and call["segments"] == sum(b["count"] for b in call["breaks"]) + 1
    assert call["same"] in ("to the bit", "but for rounding (a padded prompt)")
    assert call["recordings"] == len(AUTO)  # what `capture_shapes` would record: tests/test_prompts.py
    assert call["ops"] > 100 and call["memory_bytes"] > 0 and call["measured_ms"] is None
    assert call["breaks"] and all("transformers/" in b["where"] or "attention" in b["where"] for b in call["breaks"])


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        if x.sum().item() > 0:  # the line that doctor is to name
            x = x + 1
        return self.layer(x)


def test_doctor_names_the_line_where_the_host_reads():
    from diffgraph.cli.calls import DenoiserCall

    call = DenoiserCall("reader", Reader().eval(), (torch.ones(1, 4),), {}, 1.0)
    found = diagnose(call, "4", repeats=2)
    (read,) = found.breaks
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(source, 1) if "the line that doctor is to name" in text)
    assert read.reads_host and read.why == "its result is read by the host"
    assert read.where is not None and read.where.endswith(f"test_cli.py:{line} in forward")


def test_doctor_says_what_is_refused(capsys, monkeypatch):
    pipe = pipelines.build("flux", "tiny")
    pipe.transformer.register_forward_hook(lambda *_: None)
    monkeypatch.setattr("diffgraph.cli.models.load", lambda _: Model(pipe, "flux", "tiny", pipelines))
    assert main(["doctor", "flux", "--tiny"]) == 1
    out = capsys.readouterr().out
    assert "transformer is refused in its present state: hooks_changed" in out
    assert "nothing could be recorded (hooks_changed)" in out


@pytest.mark.parametrize("same, code", [(["to the bit", "different"], 1), (["to the bit"], 0), (["different"], 1)])
def test_doctors_exit_code_tells_of_a_replay_that_differs(same, code, monkeypatch, capsys):
    monkeypatch.setattr("diffgraph.cli.models.load", lambda _: None)
    calls = [{"recorded": True, "same": DIFFERENT if text == "different" else text} for text in same]
    monkeypatch.setattr("diffgraph.cli.doctor.examine", lambda *_: {"calls": calls})
    assert main(["doctor", "flux", "--tiny", "--shapes", "64x64", "--json"]) == code


def test_a_command_leaves_the_libraries_as_talkative_as_they_were():
    import diffusers
    import transformers

    libraries = diffusers.utils.logging, transformers.logging
    before = [library.get_verbosity() for library in libraries]
    load(argparse.Namespace(model="flux", tiny=True, device="cpu", dtype=None))
    assert [library.get_verbosity() for library in libraries] == before


def test_doctor_knows_a_padded_prompts_rounding_from_a_fault(capsys):
    assert main(["doctor", EMBEDDED, "--shapes", "64x64", "--repeats", "2"]) == 0
    assert "please report" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [["run", "flux", "--tiny", "--prompt", "x", "--shape", "7x7"], ["doctor", EMBEDDED, "--shapes", "7x7"]]
)
def test_a_size_that_the_pipeline_cannot_draw_is_told_in_a_line(words, tmp_path, capsys):
    more = ["--out", str(tmp_path / "x.png")] if words[0] == "run" else []
    assert main([*words, *more]) == 2
    assert "7x7" in capsys.readouterr().err


def test_a_step_with_guidance_is_told_call_by_call():
    pipe = pipelines.build("qwen_image", "tiny")
    model = Model(pipe, "qwen_image", "tiny", pipelines)
    calls = denoiser_calls(model, CaptureShape(64, 64, guidance=True), "a red cat")
    assert [call.times for call in calls] == [1.0, 1.0]  # prompt and negative prompt are of two lengths
    pipe = pipelines.build("wan", "tiny")
    (call,) = denoiser_calls(Model(pipe, "wan", "tiny", pipelines), CaptureShape(64, 64, 5))
    assert call.times == 2.0


def test_time_in_which_anything_runs_is_counted_once():
    assert busy_us([]) == 0
    assert busy_us([(0, 4), (2, 3), (3, 6), (10, 11)]) == 7


def test_the_forecast_is_what_bounds_the_call():
    bound_by_host = forecast(eager_ms=100, submit_ms=100, busy_ms=50, launches=2000, breaks=60, gap_us=1)
    assert 1.8 < bound_by_host.speed_up < 2 and bound_by_host.idle == 0.5
    busy = forecast(eager_ms=175, submit_ms=100, busy_ms=170, launches=2000, breaks=60, gap_us=1)
    assert 1 <= busy.speed_up < 1.05 and busy.idle < 0.05
    slow_host = forecast(eager_ms=100, submit_ms=100, busy_ms=5, launches=100, breaks=90, gap_us=1)
    assert slow_host.speed_up == 1  # every launch is a break: nothing to gain


def found(shape, eager, measured, recorded=True, same="to the bit"):
    times = dict(eager_ms=eager, measured_ms=measured, recorded=recorded, same=same)
    return {shape: [Diagnosis(shape, "transformer", 1, 9, reasons={"offload": ""}, **times)]}


def test_the_verdict_recommends_only_what_pays():
    text, line = verdict(found("512x512", 100.0, 50.0) | found("1024x1024", 175.0, 172.0), every_length=True)
    assert text == "it helps: 2.00x at 512x512; not worth it: 1.02x at 1024x1024, where the GPU is busy anyway"
    assert line == 'pipe = diffgraph.accelerate_pipeline(pipe, capture_shapes=["512x512"])'
    text, line = verdict(found("1024x1024", 175.0, 172.0), every_length=True)
    assert text.startswith("not worth it") and line is None
    text, line = verdict(found("64x64", 10.0, 9.0, same="NOT AS EAGER"), every_length=True)
    assert "differed from eager" in text and line is None
    text, line = verdict(found("64x64", None, None, recorded=False), every_length=True)
    assert "offload" in text and line is None
    assert 'capture="on_demand"' in recommended(["64x64"], every_length=False)


# -- bench, run, shapes


def test_bench_compares_the_backends_with_eager(capsys):
    assert main(["bench", "pixart", "--tiny", "--shapes", "64x64", "--repeats", "2", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["backend"] for row in rows] == ["breakable", "full"]
    assert all(row["equal"] is True and row["ratio"] == row["eager_ms"] / row["ms"] for row in rows)
    assert rows[0]["breaks"] > 0 and rows[1]["breaks"] == 0
    assert main(["bench", "pixart", "--tiny", "--shapes", "64x64", "--repeats", "2", "--backends", "breakable"]) == 0
    assert "no speed-up is to be expected" in capsys.readouterr().out


def test_run_draws_the_picture_that_eager_draws(tmp_path, capsys):
    words = ["run", "flux", "--tiny", "--prompt", "a red cat", "--prompt", "a dog", "--steps", "3", "--compare"]
    assert main([*words, "--capture-shapes", "64x64", "--out", "new/cat.png"]) == 0
    out = capsys.readouterr().out
    assert "equal to the bit" in out and "captures 1" in out
    assert [p.name for p in sorted((tmp_path / "new").iterdir())] == ["cat-1.png", "cat-2.png"]


def test_run_draws_a_video(tmp_path, capsys):
    assert main(["run", "wan", "--tiny", "--prompt", "a red cat", "--steps", "2", "--out", "cat.png"]) == 2
    assert "accepted for WanPipeline: .gif" in capsys.readouterr().err
    assert main(["run", "wan", "--tiny", "--prompt", "a red cat", "--steps", "2", "--out", "cat.gif"]) == 0
    assert (tmp_path / "cat.gif").stat().st_size > 0


def test_shapes_are_written_checked_and_expanded(capsys):
    assert main(["shapes", "write", "s.json", "64x64", "96x64@cfg=off,64x96", "--batch", "1", "2"]) == 0
    assert main(["shapes", "write", "s.json", "64x64"]) == 2
    assert "--force" in capsys.readouterr().err
    assert main(["shapes", "check", "s.json"]) == 0
    assert main(["shapes", "expand", "s.json", "--json"]) == 0
    out = capsys.readouterr().out
    shapes = json.loads(out[out.index("[") :])
    assert len(shapes) == 6 and shapes[0]["batch"] == 2 and {s["guidance"] for s in shapes} == {None, False}
    assert main(["shapes", "expand", "s.json"]) == 0
    assert "6 shapes, in the order of recording" in capsys.readouterr().out


def test_check_asks_the_pipeline_and_runs_nothing_of_its_denoiser(capsys):
    assert main(["shapes", "write", "s.json", "64x64", "64x64x5", "60x64"]) == 0
    assert main(["shapes", "check", "s.json", "--model", "flux", "--tiny"]) == 1
    out = capsys.readouterr().out
    assert "FluxPipeline takes no num_frames, as capture shape 64x64x5 asks" in out and "takes 2 of 3 shapes" in out


def test_a_list_in_one_word_keeps_each_shapes_options():
    assert shapes_of(["64x64@batch=2,cfg=off,96x64"]) == [CaptureShape(64, 64, guidance=False, batch=2), CaptureShape(96, 64)]
