"""The benchmarks on a CPU: every column is filled, results are bit-equal to eager, and the JSON adds up over runs."""

import json
import signal
from contextlib import suppress

import pytest
import torch

from benchmarks import _floor, _spent, _table, chart, denoiser, few_steps, finetuning, memory, peers, pipeline, prompts, readme
from benchmarks._peer_tables import tables

COLUMNS = {"what", "family", "shape", "mode", "ms", "submit_ms", "segments", "capture_s", "pool_mib", "max_abs_diff"}
TINY = ["--size", "tiny", "--device", "cpu"]


def run(benchmark, out, *options):
    assert benchmark.main([*TINY, "--out", str(out), *options]) == 0
    return read(out)["rows"]


def read(out):
    return json.loads(out.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_denoiser_call_is_measured_in_every_mode(tmp_path, capsys):
    rows = run(denoiser, tmp_path / "new" / "cpu.json", "--families", "qwen_image,pixart", "--repeats", "3")
    assert [(row["family"], row["mode"]) for row in rows] == [
        (family, mode) for family in ("qwen_image", "pixart") for mode in denoiser.MODES
    ]
    for row in rows:
        assert row.keys() >= COLUMNS
        assert row["ms"] > 0 and row["submit_ms"] > 0 and row["ratio"] > 0
        assert row["max_abs_diff"] == 0 and row["equal"] is True and row["note"] is None
        if row["mode"] != "eager":
            assert row["capture_s"] > 0 and row["pool_mib"] > 0
            assert row["runner_ms"] == pytest.approx(sum(row["runner_parts_ms"].values()))
            assert row["segments"] == row["breaks"] + 1 == row["boundary_buffers"] + 1
    assert "launch gaps" in denoiser.explain(rows[1])
    assert "qwen_image" in capsys.readouterr().out


@pytest.mark.slow
def test_rows_of_an_earlier_run_stay_or_are_replaced(tmp_path):
    out = tmp_path / "cpu.json"
    run(denoiser, out, "--families", "pixart", "--repeats", "1", "--modes", "eager,breakable")
    rows = run(denoiser, out, "--families", "pixart", "--repeats", "4", "--modes", "breakable")
    assert [(row["mode"], row["repeats"]) for row in rows] == [("eager", 2), ("breakable", 4)]
    assert read(out)["machine"] == "CPU"
    assert read(out)["versions"]["torch"] == torch.__version__


def test_figures_of_another_machine_are_not_mixed_in(tmp_path):
    out = tmp_path / "gpu.json"
    before = json.dumps({"machine": "one NVIDIA H200", "versions": {}, "rows": []})
    out.write_text(before, encoding="utf-8")
    with pytest.raises(SystemExit, match="one NVIDIA H200"):
        denoiser.main([*TINY, "--out", str(out)])
    assert out.read_text(encoding="utf-8") == before


def test_no_family_is_started_once_the_time_is_up(tmp_path, capsys):
    assert denoiser.main([*TINY, "--budget", "-1"]) == 0
    assert "qwen_image and what follows is not measured" in capsys.readouterr().err


def test_a_family_that_fails_does_not_stop_the_next(tmp_path, monkeypatch):
    real = denoiser.family_rows

    def flaky(family, options):
        if family == "flux":
            raise RuntimeError("no memory")
        return real(family, options)

    monkeypatch.setattr(denoiser, "family_rows", flaky)
    out = tmp_path / "cpu.json"
    options = ["--families", "flux,pixart", "--repeats", "1", "--modes", "eager", "--out", str(out)]
    assert denoiser.main([*TINY, *options]) == 1
    assert [row["family"] for row in read(out)["rows"]] == ["pixart"]


@pytest.mark.slow
def test_the_whole_pipeline_is_measured_eager_and_breakable(tmp_path):
    rows = run(pipeline, tmp_path / "cpu.json", "--shape", "64x64", "--steps", "3")
    assert [row["mode"] for row in rows] == ["eager", "breakable"]
    assert all(row.keys() >= COLUMNS and row["ms"] > 0 and row["first_s"] > 0 for row in rows)
    breakable = rows[1]
    assert breakable["equal"] is True and breakable["max_abs_diff"] == 0
    assert breakable["signatures"] == breakable["routes"]["capture"] == 2  # true CFG: prompts of two lengths


def test_sizes_share_a_pool_and_still_replay_to_the_bit(tmp_path):
    rows = run(memory, tmp_path / "cpu.json", "--sizes", "64,96x64,96")
    assert [row["shape"] for row in rows] == ["96x96", "96x64", "64x64"]
    assert all(row.keys() >= COLUMNS and row["equal"] is True and row["max_abs_diff"] == 0 for row in rows)
    assert rows[0]["over_largest"] == 1


@pytest.mark.parametrize("options", [["--families", "qwen"], ["--modes", "fast"], ["--device", "tpu"]])
def test_a_wrong_option_says_what_is_accepted(options, capsys):
    with pytest.raises(SystemExit):
        denoiser.main(options)
    message = capsys.readouterr().err
    assert "qwen_image" in message or "breakable" in message or "cuda" in message


def test_a_table_aligns_text_left_and_numbers_right():
    rows = [{"a": "x", "b": 1.25, "c": True}, {"a": "long", "b": 100.0, "c": None}]
    lines = _table.table(rows, {"name": "a", "ms": "b", "ok": "c"}).splitlines()
    assert lines == ["name    ms   ok", "x     1.25  yes", "long   100"]


@pytest.mark.slow
def test_a_training_step_is_measured_in_every_mode(tmp_path):
    rows = run(finetuning, tmp_path / "cpu.json", "--families", "sd3", "--shapes", "16x16", "--repeats", "2", "--curve", "6")
    assert [row["mode"] for row in rows] == [*finetuning.MODES, *finetuning.MODES]
    for row in rows[:3]:
        assert row.keys() >= COLUMNS and row["ms"] > 0 and row["ratio"] > 0 and row["note"] is None
        if row["mode"] != "eager":
            assert row["capture_s"] > 0 and row["pool_mib"] > 0 and row["segments"] > 0
    for row in rows[3:]:
        assert row["what"] == "finetuning curve" and row["steps"] == 6 and row["note"] is None
        assert row["max_abs_diff"] == 0 and row["equal"] is True
        assert (row["replays"] > 0) == (row["mode"] != "eager")


@pytest.mark.slow
def test_peers_are_measured_side_by_side_and_drawn(tmp_path, monkeypatch):
    out, drawn = tmp_path / "cpu.json", tmp_path / "chart.svg"
    modes = ["eager", "torch.compile:regional", "breakable+compile", "full+torch.compile"]
    every = ["--modes", ",".join(modes), "--later-in", ",".join(modes)]
    options = ["--families", "pixart", *every, "--compiler", "eager", "--repeats", "2", "--pipeline", "2"]
    rows = run(peers, out, *options, "--second-shape", "32x32", "--second-prompt", "300")  # its own length: compiled already
    assert [row["mode"] for row in rows] == modes
    for row in rows:
        assert row["note"] is None and row["ms"] > 0 and row["pipeline_s"] > 0 and row["floor_ms"] > 0
        assert row["equal"] is True and row["relative_diff"] == 0, "this compiler rounds as eager does"
        assert (row["compiles"] > 0) == (row["size_compiles"] > 0) == ("compile" in row["mode"])
        assert row["prompt_compiles"] == 0
    assert chart.main([str(out), str(drawn)]) == 0
    assert drawn.stat().st_size > 10_000
    monkeypatch.setattr(readme, "PEERS", out)
    table = readme.peers().splitlines()
    assert table[2].count("`") == 2 * len(modes) and table[4].startswith("| PixArt 0.6B | 64×64 | ")
    assert readme.peers_in_detail().count("| 32×32 |") == len(modes)


def test_the_floor_is_that_of_the_numbers_that_are_multiplied():
    """Wan keeps a few tables in float32, its first parameter among them; integers are turned into floats first."""
    table, scales = torch.ones(2), torch.ones(3, dtype=torch.bfloat16)
    for weight in (torch.ones(64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.int8)):
        assert _floor.multiplied([table, weight, scales, scales]) is torch.bfloat16
    fp8 = torch.ones(64).to(torch.float8_e4m3fn)
    assert _floor.multiplied([table, fp8, scales]) is torch.float8_e4m3fn
    assert min(_floor.matrix_rate(torch.device("cpu"), dtype) for dtype in (torch.float32, fp8.dtype)) > 0


def test_a_peer_that_fails_leaves_a_note_and_the_next_is_measured(tmp_path, monkeypatch):
    def fails(module):
        raise RuntimeError("no blocks\nhere")

    monkeypatch.setattr(peers, "repeated_blocks", fails)
    options = ["--families", "pixart", "--repeats", "1", "--second-shape", "32x32"]
    rows = run(peers, tmp_path / "cpu.json", *options, "--modes", "torch.compile:regional,breakable")
    assert rows[0]["note"] == "RuntimeError: no blocks" and rows[0]["ms"] is None
    assert rows[1]["note"] is None and rows[1]["ms"] > 0


def test_what_takes_too_long_is_given_up_whatever_is_made_of_the_error():
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    with peers.at_most(None), peers.at_most(60.0):
        pass
    with pytest.raises(TimeoutError, match=r"not ready after 0\.01 s"), peers.at_most(0.01):
        for _ in range(2):
            with suppress(TimeoutError):  # as compilers do
                signal.pause()
        raise RuntimeError("no attempt succeeded")
    with pytest.raises(RuntimeError, match="in time"), peers.at_most(60.0):
        raise RuntimeError("in time")
    assert signal.getsignal(signal.SIGALRM) is before[0]
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (before[1] > 0), "that of pytest-timeout"


def test_the_table_of_peers_tells_what_is_far_from_eager_late_or_of_another_run_and_who_is_faster():
    about = {"family": "pixart", "shape": "512x512", "floor_ms": None, "build_s": 2.0, "note": None, "relative_diff": 0.01}
    modes = {
        "eager": {"ms": 20.0, "ratio": 1.0},
        "torch.compile": {"ms": None, "ratio": None, "note": "not ready after 3 s"},
        "torch.compile:reduce-overhead": {"ms": 8.0, "ratio": 2.5, "relative_diff": 0.6},
        "breakable": {"ms": 10.0, "ratio": 3.0},
        "breakable+compile": {"ms": 9.0, "ratio": 20 / 9, "matrix_ms": 6.0},
        "full+compile": {"ms": 7.0, "ratio": 20 / 7},
    }
    rows = [{**about, "mode": mode, **row} for mode, row in modes.items()]
    lines = tables({"machine": "one GPU", "versions": {"torch": "2"}, "rows": rows}, None).splitlines()
    assert lines[4].split(" | ")[2:] == [
        "20.0", "> 3 s to build", "8.0 (2.0) ≠", "10.0 (2.0) °", "9.0 (2.0)", "**7.0** (2.0)", "– |",
    ]  # fmt: skip
    assert [line.partition(": ")[2] for line in lines[6:]] == [
        "results far from eager's, relative difference 0.60 ([why](docs/together.md#torchcompile)).",
        "`torch.compile:reduce-overhead` takes 11% less than `breakable+compile` (of its 9.0 ms, matrix products 6.0); "
        "`full+compile` 12% less than that.",
    ]
    for ms, told in ((8.0, "and as much as `full+compile`."), (8.5, "and 6% less than `full+compile`: [what is left]")):
        rows[-1]["ms"] = ms
        assert told in tables({"machine": "", "versions": {"torch": ""}, "rows": rows}, None)


def test_the_table_of_several_gpus_compares_with_one_gpus_eager_call(tmp_path, monkeypatch):
    monkeypatch.setattr(readme, "PARALLEL", tmp_path / "parallel.json")
    assert readme.parallel() == ""
    about = {"what": "parallel denoiser", "family": "flux", "shape": "512x512"}
    rows = [
        {**about, "gpus": 1, "mode": "1 GPU: eager", "ms": 80.0},
        {**about, "gpus": 2, "mode": "2 GPUs: ulysses, recorded", "ms": 40.0},
        {**about, "what": "parallel soak", "gpus": 2, "mode": "2 GPUs: ulysses, recorded", "ms": 41.0, "note": "0 wrong results"},
    ]
    data = {"machine": "GPUs of one host", "versions": {"torch": "2", "diffusers": "0"}, "rows": rows}
    readme.PARALLEL.write_text(json.dumps(data), encoding="utf-8")
    lines = readme.parallel().splitlines()
    assert "| FLUX.1 11.9B | 512×512 | one denoiser call | 2 GPUs: ulysses, recorded | 40.0 | **2.00x** |" in lines
    assert lines[-1] == "- 2 GPUs: ulysses, recorded, 512×512: 0 wrong results."


@pytest.mark.slow
def test_a_picture_from_a_text_is_measured_with_every_component(tmp_path, monkeypatch):
    out = tmp_path / "cpu.json"
    rows = run(few_steps, out, "--families", "flux", "--shape", "64x64", "--repeats", "1", "--modes", "denoiser,every")
    assert [row["mode"] for row in rows] == ["eager", "denoiser", "every"]
    for row in rows:
        assert row.keys() >= COLUMNS and row["s"] > 0 and row["ratio"] > 0 and row["first_s"] > 0
        assert row["equal"] is True and row["note"] is None and row["steps"] == 4
    assert rows[2]["segments"] > rows[1]["segments"] > 0
    monkeypatch.setattr(readme, "RESULTS", out)
    eager, *recorded = (line for line in readme.few_steps().splitlines() if line.startswith("| FLUX.1-schnell"))
    assert "x**" not in eager and len(recorded) == 2 and all("x** | yes |" in line for line in recorded)


@pytest.mark.slow
def test_whole_calls_of_each_prompt_length_are_compared_alone(tmp_path):
    out = tmp_path / "cpu.json"
    rows = run(prompts, out, "--lengths", "5,28", "--shape", "64x64", "--steps", "3", "--repeats", "0")
    assert [row["what"] for row in rows] == ["prompt, whole call"] * 2
    for row in rows:
        assert row["latents_equal"] or min(row["psnr"], row["masked_psnr"]) > 100
        assert "cost" not in row


@pytest.mark.parametrize(
    "kernel, kind",
    [
        ("nvjet_tst_128x64_64x10_1x2_h_bz_coopB_TNT", "matrix"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "matrix"),
        ("triton_tem_fused_addmm_3", "matrix"),
        ("pytorch_flash::flash_fwd_kernel", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("triton_poi_fused_add_mul_0", "other"),
    ],
)
def test_kernels_are_sorted_by_their_names(kernel, kind):
    assert _spent.kind(kernel) == kind


@pytest.mark.slow
def test_what_comes_later_comes_in_some_modes_alone(tmp_path):
    options = ["--families", "pixart", "--repeats", "1", "--second-shape", "32x32", "--compiler", "eager"]
    rows = run(peers, tmp_path / "cpu.json", *options, "--modes", "eager,breakable", "--later-in", "breakable")
    assert ["size_ms" in row for row in rows] == [False, True]
