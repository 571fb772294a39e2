"""The door: options, bad input, start-up capture in detail, pausing, undoing."""

import json
import logging
import re

import pytest
import torch
from _toys import Net

import diffgraph
import pipelines


@pytest.fixture
def pipe():
    pipe = pipelines.build("flux", "tiny")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(pipe, prompt="a red cat", height=64, width=64, seed=0, **kwargs):
    call = dict(height=height, width=width, num_inference_steps=4, output_type="latent", **kwargs)
    return pipe(prompt, generator=torch.Generator().manual_seed(seed), **call)[0]


def untouched(pipe):
    return pipe.transformer._compiled_call_impl is None and "_compiled_call_impl" not in vars(pipe.transformer)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        (dict(backend="cudagraph"), ValueError, "'breakable', 'full', 'eager'"),
        (dict(backend=["full"]), ValueError, "'breakable', 'full', 'eager'"),
        (dict(capture="always"), ValueError, "'auto', 'startup', 'on_demand'"),
        (dict(breaks="attn"), ValueError, "'attention'"),
        (dict(breaks=3), TypeError, "'attention'"),
        (dict(breaks=["no.such.module"]), ValueError, "no.such.module"),
        (dict(max_graphs=0), ValueError, "at least 1"),
        (dict(max_graphs=2.5), TypeError, "at least 1"),
        (dict(max_graphs=True), TypeError, "at least 1"),
        (dict(memory_limit="lots"), ValueError, "4GiB"),
        (dict(memory_limit=-1), ValueError, "fraction"),
        (dict(memory_limit=1.5), ValueError, "fraction"),
        (dict(memory_limit=float("nan")), ValueError, "fraction"),
        (dict(memory_limit=[1]), TypeError, "fraction"),
        (dict(verify="yes"), TypeError, "True or False"),
        (dict(components=("transformer", "vea")), ValueError, "no module of this .*; accepted: .*vae"),
        (dict(components=7), TypeError, "transformer"),
        (dict(components=()), TypeError, "transformer"),
        (dict(components="unet"), ValueError, "no denoiser"),
        (dict(backend="full", breaks=["transformer_blocks.0.attn"]), ValueError, "without breaks"),
        (dict(backend="full", breaks="attention"), ValueError, "without breaks"),
        (dict(breaks=["transformer_blocks"]), ValueError, "never called"),
        (dict(compile_blocks=1), TypeError, "compile_blocks is 1"),
        (dict(compile_blocks={"fullgraph": True}), ValueError, "backend, mode, options, dynamic"),
        (dict(compile_blocks={"dynamic": "x"}), ValueError, "None, True, False"),
        (dict(compile_blocks={"options": {"zzz": 1}}), ValueError, "does not accept: .{1,240}$"),
        (dict(compile_blocks={"backend": "no_such"}), ValueError, "no_such"),
        (dict(compile_blocks={"mode": "no_such"}), ValueError, "no_such"),
        (dict(compile_blocks={"options": {"no_such": 1}}), ValueError, "no_such"),
        (dict(compile_blocks={"mode": "default", "options": {}}), ValueError, "either"),
        (dict(compile_blocks=True, backend="eager"), ValueError, "records nothing"),
        (dict(warmups=3), TypeError, "warmups"),
        (dict(capture_shapes="512"), ValueError, "512"),
        (dict(capture_shapes="512x512@steps=3"), ValueError, "steps"),
        (dict(capture_shapes=[]), ValueError, "CaptureShape"),
        (dict(capture_shapes="missing.json"), ValueError, "missing.json"),
        (dict(capture_shapes="64x64x5"), ValueError, "num_frames"),
        (dict(capture_shapes={"height": 64, "width": 64, "inputs": {"image": 1}}), ValueError, "image"),
        (dict(capture_shapes={"height": 64, "width": 64, "inputs": {"prompt": 3}}), ValueError, "FluxPipeline refuses"),
    ],
)
def test_a_wrong_option_says_what_is_accepted_and_changes_nothing(pipe, options, error, says):
    with pytest.raises(error, match=says) as caught:
        diffgraph.accelerate_pipeline(pipe, **options)
    assert isinstance(caught.value, diffgraph.DiffgraphError)
    assert untouched(pipe)
    with pytest.raises(diffgraph.NotAcceleratedError):
        diffgraph.report(pipe)


def test_a_shape_that_the_pipeline_refuses_leaves_the_pipe_as_it_was(pipe):
    before, scheduler = dict(vars(pipe)), pipe.scheduler
    with pytest.raises(diffgraph.ShapeError, match="FluxPipeline refuses the capture shape 64x64@prompt=5000"):
        diffgraph.accelerate_pipeline(pipe, capture_shapes=["64x96", "64x64@prompt=5000"])
    assert untouched(pipe)
    assert dict(vars(pipe)) == before
    assert pipe.scheduler is scheduler


def test_a_pipe_without_a_denoiser_is_refused_by_name():
    class Upscaler:
        vae = torch.nn.Linear(2, 2)

    for thing in (Upscaler(), None, "stabilityai/sdxl"):
        with pytest.raises(diffgraph.NoDenoiserError, match=f"{type(thing).__name__} has no denoiser"):
            diffgraph.accelerate_pipeline(thing)


def test_accelerating_twice_is_an_error_and_the_first_stays(pipe):
    diffgraph.accelerate_pipeline(pipe)
    latents(pipe)
    with pytest.raises(diffgraph.AlreadyAcceleratedError, match="restore_pipeline"):
        diffgraph.accelerate_pipeline(pipe)
    assert diffgraph.report(pipe).replays == 2
    diffgraph.restore_pipeline(pipe)
    assert untouched(pipe)
    diffgraph.accelerate_pipeline(pipe)


@pytest.mark.parametrize(
    "verb", [diffgraph.report, diffgraph.restore_pipeline, diffgraph.capture, lambda p: diffgraph.paused(p).__enter__()]
)
def test_what_is_not_accelerated_says_so(pipe, verb):
    with pytest.raises(diffgraph.NotAcceleratedError, match="accelerate_pipeline"):
        verb(pipe)


def test_one_module_of_an_accelerated_pipeline_can_be_asked_about(pipe):
    diffgraph.accelerate_pipeline(pipe)
    latents(pipe)
    assert diffgraph.report(pipe.transformer).to_dict() == diffgraph.report(pipe).to_dict()
    with diffgraph.paused(pipe.transformer):
        latents(pipe)
    assert diffgraph.report(pipe).reasons["paused"] == 4
    for verb in (diffgraph.restore_pipeline, diffgraph.capture):  # the pipeline's to decide
        with pytest.raises(diffgraph.NotAcceleratedError, match="pass the pipeline"):
            verb(pipe.transformer)
    assert diffgraph.report(pipe).signatures[0].captured


def test_a_module_of_ones_own_loop():
    module = Net().eval()
    assert diffgraph.accelerate_module(module) is module
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 4, 8)
            with diffgraph.paused(module):
                want = module(x, scale=0.5)
            assert torch.equal(module(x, scale=0.5), want)
    report = diffgraph.report(module)
    assert (report.captures, report.replays, report.reasons["paused"]) == (1, 2, 4)
    diffgraph.restore_pipeline(module)
    assert "_compiled_call_impl" not in vars(module)
    with pytest.raises(TypeError, match="no pipeline"):
        diffgraph.accelerate_module(module, capture_shapes="64x64")
    with pytest.raises(TypeError, match="accelerate_pipeline"):
        diffgraph.accelerate_module("module")


def test_gradients_are_left_to_eager():
    module = diffgraph.accelerate_module(Net())
    module(torch.randn(2, 4, 8)).sum().backward()
    assert module.layer.weight.grad is not None
    assert diffgraph.report(module).reasons == {"grad_enabled": 1}


def test_a_forward_that_cannot_be_captured_runs_eager_with_one_warning():
    class Stubborn(Net):
        def forward(self, x):
            if not torch.is_inference_mode_enabled() and open_recorder() is not None:
                raise RuntimeError("not while recording")
            return super().forward(x)

    from diffgraph.engine.recorder import open_recorder

    module = diffgraph.accelerate_module(Stubborn().eval())
    x = torch.randn(2, 4, 8)
    with torch.no_grad():
        want = module(x)
        with pytest.warns(diffgraph.CaptureWarning, match="not while recording") as caught:
            for _ in range(4):
                assert torch.equal(module(x), want)
    assert len(caught) == 1
    report = diffgraph.report(module)
    assert (report.captures, report.replays, report.memory_bytes) == (0, 0, 0)
    assert report.reasons["capture_failed"] == 4
    assert report.signatures[0].reason == "capture_failed"


def test_an_op_that_breaks_a_whole_graph_makes_it_eager():
    class Reads(Net):
        def forward(self, x):
            return super().forward(x) * x.abs().max().item()

    x = torch.randn(2, 4, 8)
    whole, breakable = Reads().eval(), Reads().eval()
    diffgraph.accelerate_module(whole, backend="full")
    diffgraph.accelerate_module(breakable)
    with torch.no_grad(), pytest.warns(diffgraph.CaptureWarning, match="whole graph"):
        for module in (whole, breakable):
            want = module(x)
            assert all(torch.equal(module(x), want) for _ in range(3))
    assert diffgraph.report(whole).replays == 0
    assert diffgraph.report(breakable).replays == 2


def test_breaks_by_name_run_eager(pipe):
    want = latents(pipe)
    names = ["transformer_blocks.0.ff", "torch.nn.functional.scaled_dot_product_attention"]
    diffgraph.accelerate_pipeline(pipe, breaks=names)
    assert torch.equal(latents(pipe), want)
    assert torch.equal(latents(pipe), want)
    blocks = len(pipe.transformer.transformer_blocks) + len(pipe.transformer.single_transformer_blocks)
    assert diffgraph.report(pipe).signatures[0].breaks == 1 + blocks
    assert "forward" not in vars(pipe.transformer.transformer_blocks[0].ff)


@pytest.mark.parametrize(
    ("family", "shape", "call"),
    [
        ("flux", "64x64@prompt=128", dict(max_sequence_length=128)),
        ("flux", "64x64@batch=2", dict(num_images_per_prompt=2)),
        ("flux", "64x64@cfg=on", dict(true_cfg_scale=4.0, negative_prompt="bad")),
        ("sd3", "64x64@prompt=205", dict(max_sequence_length=128)),
        ("sd3", "64x64@cfg=off", dict(guidance_scale=1.0)),
        ("z_image", "64x64@prompt=28,cfg=off", dict(guidance_scale=0.0)),
        ("qwen_image", "64x64@prompt=12", {}),
        ("pixart", "64x64@batch=3,cfg=7", dict(num_images_per_prompt=3, guidance_scale=7.0)),
        ("wan", "64x64x5@cfg=off", dict(num_frames=5, guidance_scale=1.0)),
        ("sdxl", "64x64", {}),
    ],
)
def test_a_capture_shape_comes_true_in_the_real_call(family, shape, call):
    pipe = pipelines.build(family, "tiny")
    pipe.set_progress_bar_config(disable=True)
    want = latents(pipe, **call)
    diffgraph.accelerate_pipeline(pipe, capture_shapes=shape)
    before = diffgraph.report(pipe)
    assert before.captures >= 1
    assert torch.equal(latents(pipe, **call), want)
    after = diffgraph.report(pipe)
    assert (after.eager, after.captures) == (before.eager, before.captures)
    assert after.replays > before.replays


def test_shapes_are_recorded_largest_first_from_a_file(pipe, tmp_path, capsys):
    file = tmp_path / "shapes.json"
    file.write_text(json.dumps(["64x64", "64x128", {"height": 64, "width": 96}]))
    diffgraph.accelerate_pipeline(pipe, capture_shapes=str(file))
    sizes = [re.search(r"(?<!_)hidden_states=\[1x(\d+)", s.label) for s in diffgraph.report(pipe).signatures]
    widths = [found and found[1] for found in sizes]
    assert widths == ["32", "24", "16"]
    assert "MiB free" in capsys.readouterr().err


def test_more_shapes_later_and_after_a_change_of_weights(pipe):
    diffgraph.accelerate_pipeline(pipe, capture_shapes="64x64")
    want = latents(pipe, width=96)
    assert diffgraph.report(pipe).reasons == {"unseen_signature": 4, "warm_up": 1}
    diffgraph.capture(pipe, "64x96")
    seen = diffgraph.report(pipe)
    assert torch.equal(latents(pipe, width=96), want)
    assert diffgraph.report(pipe).eager == seen.eager
    state = {name: tensor + 0.01 for name, tensor in pipe.transformer.state_dict().items()}
    pipe.transformer.load_state_dict(state, assign=True)
    changed = latents(pipe, width=96)
    assert not torch.equal(changed, want)
    assert diffgraph.report(pipe).reasons["weights_changed"] == 4
    diffgraph.capture(pipe, "64x96")
    seen = diffgraph.report(pipe)
    assert torch.equal(latents(pipe, width=96), changed)
    assert diffgraph.report(pipe).eager == seen.eager


def test_capture_records_anew_what_no_guard_can_see(pipe):
    table = {"gain": 1.0}  # a global that the forward reads
    block = pipe.transformer.transformer_blocks[0]
    plain = type(block).forward
    patched = lambda self, *args, **kwargs: tuple(t * table["gain"] for t in plain(self, *args, **kwargs))  # noqa: E731
    type(block).forward, expected = patched, {}
    try:
        for gain in (1.0, 2.0):
            table["gain"] = gain
            expected[gain] = latents(pipe)
        for shapes in ("64x64", None):
            table["gain"] = 1.0
            diffgraph.accelerate_pipeline(pipe, capture_shapes="64x64")
            assert torch.equal(latents(pipe), expected[1.0])
            table["gain"] = 2.0
            diffgraph.capture(pipe, shapes)
            before = diffgraph.report(pipe)
            assert torch.equal(latents(pipe), expected[2.0])
            assert diffgraph.report(pipe).eager == before.eager
            diffgraph.restore_pipeline(pipe)
    finally:
        type(block).forward = plain


def test_what_start_up_did_not_record_is_said(pipe):
    with pytest.warns(diffgraph.CaptureWarning, match=r"not recorded: transformer: .* \(out_of_memory\)"):
        diffgraph.accelerate_pipeline(pipe, capture_shapes="64x64", memory_limit=1024)
    diffgraph.restore_pipeline(pipe)
    with pytest.warns(diffgraph.CaptureWarning, match="evicted") as caught:
        diffgraph.accelerate_pipeline(pipe, capture_shapes=["64x64", "64x96"], max_graphs=1)
    assert len(caught) == 1
    latents(pipe, width=96)
    latents(pipe)
    report = diffgraph.report(pipe)
    assert list(report.unseen.values()) == [] and report.reasons["evicted"] == 4
    latents(pipe, width=128)
    assert list(diffgraph.report(pipe).unseen.values()) == [4]
    assert "not recorded, 4 calls: transformer: " in str(diffgraph.report(pipe))
    with diffgraph.paused(pipe), pytest.raises(ValueError, match="outside"):
        diffgraph.capture(pipe, "64x128")


def test_a_shape_that_names_no_prompt_length_warns_where_lengths_vary():
    pipe = pipelines.build("qwen_image", "tiny")
    pipe.set_progress_bar_config(disable=True)
    with pytest.warns(diffgraph.CaptureWarning, match=r"vary in length, and 64x64 names none: recorded for (\d+) tokens alone"):
        diffgraph.accelerate_pipeline(pipe, capture_shapes="64x64", prompt_buckets=None)
    latents(pipe, "a red cat")
    assert list(diffgraph.report(pipe).unseen.values()) == [4]
    assert "encoder_hidden_states=[1x12x32]" in next(iter(diffgraph.report(pipe).unseen))


def test_breaks_that_are_never_called_are_said(pipe):
    diffgraph.accelerate_pipeline(pipe, breaks=["attention", "os.getcwd"])
    with pytest.warns(diffgraph.CaptureWarning, match="'os.getcwd', which the forward never called"):
        latents(pipe)
    assert diffgraph.report(pipe).signatures[0].breaks > 1


def test_start_up_without_shapes_records_nothing_until_told(pipe):
    diffgraph.accelerate_pipeline(pipe, capture="startup")
    latents(pipe)
    assert diffgraph.report(pipe).reasons == {"unseen_signature": 4}


def test_shapes_and_on_demand_together(pipe):
    diffgraph.accelerate_pipeline(pipe, capture_shapes="64x64", capture="on_demand")
    latents(pipe, width=96)
    assert diffgraph.report(pipe).captures == 2


def test_the_report_is_a_table_and_a_dict(pipe):
    diffgraph.accelerate_pipeline(pipe)
    latents(pipe)
    report = diffgraph.report(pipe)
    table = str(report)
    assert "captures 1, replays 2, eager 1" in table
    assert "unseen_signature: 1" in table
    assert "hidden_states=[1x16x64]" in table
    assert json.loads(json.dumps(report.to_dict()))["signatures"][0]["captured"] is True
    assert report.memory_bytes > 0


def test_a_number_that_changes_at_each_call_does_not_fill_the_table():
    module = diffgraph.accelerate_module(Net().eval())
    x = torch.randn(2, 4, 8)
    with torch.no_grad():
        for scale in [float(i) for i in range(40)] * 2:
            with diffgraph.paused(module):
                want = module(x, scale)
            assert torch.equal(module(x, scale), want)
    report = diffgraph.report(module)
    assert report.captures == 0
    assert report.reasons["host_value_changed"] >= 40
    assert len(report.signatures) <= 16


def test_a_lost_recording_is_told_in_the_log(pipe, caplog):
    diffgraph.accelerate_pipeline(pipe)
    latents(pipe)
    pipe.transformer.double()
    pipe.transformer.float()
    with caplog.at_level(logging.INFO, "diffgraph"):
        latents(pipe)
    assert "weights_changed" in caplog.text


def test_no_more_than_max_graphs_are_kept_and_the_survivors_stay_right(pipe):
    sizes = (64, 96, 128)
    want = {width: latents(pipe, width=width) for width in sizes}
    diffgraph.accelerate_pipeline(pipe, max_graphs=2, poison=True)
    for width in sizes * 3:
        assert torch.equal(latents(pipe, width=width), want[width])
        assert sum(s.captured for s in diffgraph.report(pipe).signatures) <= 2
    assert diffgraph.report(pipe).reasons["evicted"] == 6  # at each return, which records it again


def test_a_memory_limit_holds_on_the_cpu_too(pipe):
    want = latents(pipe)
    diffgraph.accelerate_pipeline(pipe, memory_limit=1024)
    assert torch.equal(latents(pipe), want)
    report = diffgraph.report(pipe)
    assert report.memory_bytes <= 1024
    assert report.reasons["out_of_memory"] > 0
    diffgraph.restore_pipeline(pipe)
    diffgraph.accelerate_pipeline(pipe, memory_limit="1GiB")
    assert torch.equal(latents(pipe), want)
    assert 0 < diffgraph.report(pipe).memory_bytes <= 2**30
