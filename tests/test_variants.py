"""The edit, inpaint, image-to-image, image-to-video and control pipelines, and the ways that calls differ from one another:
pictures are those of eager, calls replay, and a capture shape comes true in the first real call."""

import importlib
import inspect
import warnings

import diffusers
import pytest
import torch
from PIL import ImageOps

import diffgraph
import pipelines
from diffgraph import CaptureShape
from pipelines import variants

#: Their denoiser is told positions that depend on the prompt's exact length, so each length is a signature.
EXACT_LENGTHS = {"ZImageOmniPipeline"}
STEPS = {"SanaSprintPipeline": 2, "SanaSprintImg2ImgPipeline": 2, "StableDiffusionXLImg2ImgPipeline": 12}

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def small_edits(monkeypatch):
    """Qwen-Image's edit pipelines scale every picture to a million pixels; to 4,096, with the same sides' ratio, is quicker."""
    for name in ("edit", "edit_inpaint", "edit_plus"):
        module = importlib.import_module(f"diffusers.pipelines.qwenimage.pipeline_qwenimage_{name}")
        real = module.calculate_dimensions
        monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio, real=real: real(64 * 64, ratio))


def accepted(pipe):
    return inspect.signature(type(pipe).__call__).parameters


def latents(pipe, prompt="a red cat", steps=4, **given):
    """Of one real call. (Some pipelines draw from the global generator, others write into the lists that they are given.)"""
    torch.manual_seed(0)
    size = {name: 64 for name in ("height", "width") if name in accepted(pipe)}
    given = {name: list(value) if isinstance(value, list) else value for name, value in given.items()}
    call = dict(num_inference_steps=steps, output_type="latent", generator=torch.Generator().manual_seed(0))
    return pipe(prompt=list(prompt) if isinstance(prompt, list) else prompt, **{**size, **call, **given})[0]


def inverted(picture):
    return [inverted(one) for one in picture] if isinstance(picture, list) else ImageOps.invert(picture)


def same(got, want):
    return (got - want).norm() <= 1e-5 * want.norm()


def quiet(pipe):
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize("name", variants.VARIANTS)
def test_a_variant_of_a_pipeline(name):
    pipe, given = variants.build(name)
    calls = [dict(prompt="a red cat"), dict(prompt="a blue dog with wings")]
    calls = [dict(call, steps=STEPS.get(name, 4), **given) for call in calls]
    want = [latents(quiet(pipe), **call) for call in calls]
    others = {key: inverted(given[key]) for key in ("image", "control_image", "video") if key in given}
    assert not others or not same(latents(pipe, **{**calls[0], **others}), want[0])
    diffgraph.accelerate_pipeline(pipe, poison=True)
    assert all(same(latents(pipe, **call), expected) for call, expected in zip(calls, want, strict=True))
    report = diffgraph.report(pipe)
    assert report.replays > 0 and report.reasons == {"unseen_signature": report.captures}
    diffgraph.restore_pipeline(pipe)

    shapes = [CaptureShape(64, 64, inputs=given)]
    if name in EXACT_LENGTHS:
        calls, want = calls[:1], want[:1]
        shapes = [CaptureShape(64, 64, prompt_length=89, inputs=given)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", diffgraph.CaptureWarning)
        diffgraph.accelerate_pipeline(pipe, capture_shapes=shapes, prompt_buckets=[64, 192, 320])
    before = diffgraph.report(pipe)
    assert all(same(latents(pipe, **call), expected) for call, expected in zip(calls, want, strict=True))
    after = diffgraph.report(pipe)
    assert after.unseen == {} and (after.eager, after.captures) == (before.eager, before.captures)


UNEQUAL = ["a red cat", "a blue dog with very long wings"]
UGLY = "bad and ugly and blurred and too long, and in more words than the prompt has"


def tiny(family):
    return quiet(pipelines.build(family))


def comes_true(pipe, shapes, *calls, **options):
    """Every call's picture is that of eager, from what the shapes have recorded alone."""
    want = [latents(pipe, **call) for call in calls]
    diffgraph.accelerate_pipeline(pipe, capture_shapes=shapes, poison=True, **options)
    before = diffgraph.report(pipe)
    assert all(same(latents(pipe, **call), expected) for call, expected in zip(calls, want, strict=True))
    after = diffgraph.report(pipe)
    assert after.unseen == {} and (after.eager, after.captures) == (before.eager, before.captures)
    return after


def frames(family):
    return {"num_frames": 5} if family == "wan" else {}


@pytest.mark.parametrize("family", sorted(set(pipelines.FAMILIES) - {"z_image"}))
def test_several_prompts_of_unequal_lengths_and_several_pictures_of_each(family):
    videos, scale = family == "wan", "true_cfg_scale" if family in ("qwen_image", "flux") else "guidance_scale"
    each, more = {"num_videos_per_prompt" if videos else "num_images_per_prompt": 2}, frames(family)
    guided = {scale: 3.0, "negative_prompt": [UGLY, "x"]}
    two = CaptureShape(64, 64, **more, batch=2, guidance=3.0)
    four = CaptureShape(64, 64, **more, batch=4, inputs=each)
    one = dict(more, **{scale: 3.0, "negative_prompt": UGLY}, **each)
    calls = [dict(prompt=UNEQUAL, **more, **guided), dict(prompt="a cat", **one), dict(prompt=UNEQUAL, **more, **each)]
    comes_true(tiny(family), [two, four], *calls, prompt_buckets=[64, 128])


@pytest.mark.parametrize("negative", ["", UGLY], ids=["short", "long"])
@pytest.mark.parametrize("family", ["qwen_image", "z_image", "flux"])
def test_negative_prompts_short_and_long(family, negative):
    """A recording of Z-Image holds both prompts, each in its block: there, a long one is to be named."""
    scale = "guidance_scale" if family == "z_image" else "true_cfg_scale"
    inputs = {"negative_prompt": negative} if family == "z_image" else {}
    call = dict(negative_prompt=negative, **{scale: 4.0})
    shape = CaptureShape(64, 64, guidance=4.0, inputs=inputs)
    comes_true(tiny(family), [shape], dict(prompt="a red cat", **call), dict(prompt=UNEQUAL[1] * 3, **call))


@pytest.mark.parametrize(
    "shapes",
    [
        ["64x64@cfg=on,prompt=28", "64x64@cfg=off,prompt=28"],
        [dict(prompt="a red cat", cfg_truncation=0.4, num_inference_steps=6)],
    ],
    ids=["by two", "by one"],
)
def test_guidance_that_ends_midway_by_itself(shapes):
    shapes = [CaptureShape(64, 64, inputs=shape) if isinstance(shape, dict) else shape for shape in shapes]
    report = comes_true(tiny("z_image"), shapes, dict(cfg_truncation=0.4, steps=6))
    replayed = [s.label.count("cap_feats") for s in report.signatures if s.replays]
    assert sorted(set(replayed)) == [1, 2]


def end_guidance(pipe, step, _, tensors):
    """As diffusers' `SDCFGCutoffCallback`s do."""
    if step != 1:
        return tensors
    pipe._guidance_scale = 0.0
    return {name: tensor if name == "latents" else tensor[-1:] for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("family", "more"),
    [("sd3", ["pooled_prompt_embeds"]), ("sdxl", ["add_text_embeds", "add_time_ids"])],
)
def test_guidance_that_a_callback_ends(family, more):
    names = ["latents", "prompt_embeds", *more]
    call = dict(callback_on_step_end=end_guidance, callback_on_step_end_tensor_inputs=names)
    report = comes_true(tiny(family), ["64x64@cfg=on", "64x64@cfg=off"], call)
    assert [s.replays >= 2 for s in report.signatures] == [True, True]


@pytest.mark.parametrize("family", ["sd3", "qwen_image"])
def test_embeddings_that_a_callback_replaces_by_longer_ones(family):
    def lengthen(pipe, step, _, tensors):
        return {"prompt_embeds": torch.cat([tensors["prompt_embeds"]] * 2, 1)} if step == 1 else {}

    call = dict(callback_on_step_end=lengthen, callback_on_step_end_tensor_inputs=["prompt_embeds"], steps=6)
    pipe = tiny(family)
    want = [latents(pipe, **call) for _ in range(2)]
    diffgraph.accelerate_pipeline(pipe, poison=True)
    assert all(same(latents(pipe, **call), expected) for expected in want)
    report = diffgraph.report(pipe)
    assert (report.captures, report.eager, report.replays) == (2, 2, 8)


def test_what_a_shape_is_given_is_left_as_it_was():
    prompts, generator = list(UNEQUAL), torch.Generator().manual_seed(5)
    state = generator.get_state()
    shape = CaptureShape(64, 64, guidance=False, inputs={"prompt": prompts, "generator": generator})
    comes_true(tiny("z_image"), [shape], dict(prompt=UNEQUAL, guidance_scale=0.0))
    assert prompts == UNEQUAL and torch.equal(generator.get_state(), state)


def test_prompts_that_do_not_share_out_a_batch_are_refused():
    for inputs in ({"prompt": ["a", "b"]}, {"num_images_per_prompt": 2}):
        with pytest.raises(diffgraph.ShapeError, match="3 pictures"):
            diffgraph.accelerate_pipeline(tiny("sd3"), capture_shapes=[CaptureShape(64, 64, batch=3, inputs=inputs)])


def test_a_picture_among_the_prompt_counts_in_its_length():
    pipe, given = variants.build("QwenImageEditPipeline")
    shape = CaptureShape(64, 64, prompt_length=152, inputs=given)
    diffgraph.accelerate_pipeline(quiet(pipe), capture_shapes=[shape], prompt_buckets=None)
    assert "encoder_hidden_states=[1x152x32]" in diffgraph.report(pipe).signatures[0].label


def test_an_edit_of_a_picture_of_another_size():
    pipe, _ = variants.build("QwenImageEditPipeline")
    wide, tall = variants.picture(64, 128), variants.picture(160, 64)
    shapes = [CaptureShape(64, 64, inputs={"image": image}) for image in (wide, tall)]
    calls = [dict(image=image, prompt=prompt) for image in (tall, wide) for prompt in ("a cat", UGLY)]
    comes_true(quiet(pipe), shapes, *calls)
    latents(pipe, image=variants.picture(64, 64), prompt="a cat")
    assert len(diffgraph.report(pipe).unseen) == 1


def test_where_each_length_is_recorded_for_itself_a_variant_says_so():
    pipe, given = variants.build("ZImageOmniPipeline")
    with pytest.warns(diffgraph.CaptureWarning, match="vary in length, and 64x64 names none: recorded for 96 tokens alone"):
        diffgraph.accelerate_pipeline(quiet(pipe), capture_shapes=[CaptureShape(64, 64, inputs=given)])


def test_a_guider_of_a_modular_pipeline_that_stops_midway():
    """With a new guider for each call: in diffusers 0.42.1, one that has stopped leaves out the next call's negative prompt."""
    pipe = diffusers.QwenImageAutoBlocks().init_pipeline()
    pipe.update_components(**tiny("qwen_image").components)

    def pictures():
        pipe.update_components(guider=diffusers.ClassifierFreeGuidance(guidance_scale=4.0, stop=0.7))
        call = dict(prompt="a red cat", negative_prompt="bad", height=64, width=64, num_inference_steps=5, output_type="pt")
        return pipe(**call, generator=torch.Generator().manual_seed(0), output="images")

    want = pictures()
    diffgraph.accelerate_pipeline(pipe, poison=True)
    assert same(pictures(), want) and same(pictures(), want)
    report = diffgraph.report(pipe)
    assert (report.captures, report.eager, report.replays) == (2, 2, 12)
