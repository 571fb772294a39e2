"""Prompts of any length: one recording a bucket, and the picture is that of the prompt itself."""

from __future__ import annotations

from contextlib import nullcontext

import diffusers
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import diffgraph
import pipelines
from diffgraph import Reason, families
from diffgraph.families import rule_of
from diffgraph.options import Options
from diffgraph.prompts.buckets import AUTO, PromptBuckets
from diffgraph.values.compare import close
from tests._toys import some_slow

TOLERANCE = 1e-5  # relative: another matrix shape may take another kernel


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qwen() -> torch.nn.Module:
    return pipelines.build("qwen_image").transformer


def qwen_call(*lengths: int, mask: bool = False, seed: int = 0, size=(4, 4)) -> dict:
    batch, longest, pixels = len(lengths), max(lengths), size[0] * size[1]
    given = {
        "hidden_states": noise(batch, pixels, 64, seed=seed),
        "encoder_hidden_states": noise(batch, longest, 32, seed=seed + 1),
        "timestep": torch.full((batch,), 0.5),
        "img_shapes": [[(1, *size)]] * batch,
        "return_dict": False,
    }
    if mask:
        given["encoder_hidden_states_mask"] = torch.tensor([[i < n for i in range(longest)] for n in lengths])
    return given


def z_image() -> torch.nn.Module:
    return pipelines.build("z_image").transformer


def z_image_call(*lengths: int, seed: int = 0) -> dict:
    return {
        "x": [noise(16, 1, 8, 8, seed=seed) for _ in lengths],
        "t": torch.full((len(lengths),), 0.5),
        "cap_feats": [noise(n, 32, seed=seed + i) for i, n in enumerate(lengths)],
        "return_dict": False,
    }


TWO_LAYERS = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "text_embed_dim": 32,
    "time_embed_dim": 16,
    "condition_dim": 8,
}


def cogview4() -> torch.nn.Module:
    torch.manual_seed(0)
    return diffusers.CogView4Transformer2DModel(**TWO_LAYERS, rope_axes_dim=(16, 16)).eval()


def cogview4_call(*lengths: int, mask: bool = False, seed: int = 0) -> dict:
    batch, longest = len(lengths), max(lengths)
    size = torch.tensor([[64.0, 64.0]] * batch)
    given = {
        "hidden_states": noise(batch, 4, 8, 8, seed=seed),
        "encoder_hidden_states": noise(batch, longest, 32, seed=seed + 1),
        "timestep": torch.full((batch,), 500.0),
        "original_size": size,
        "target_size": size,
        "crop_coords": torch.zeros_like(size),
        "return_dict": False,
    }
    if mask:
        given["attention_mask"] = torch.tensor([[int(i < n) for i in range(longest)] for n in lengths])
    return given


def glm_image() -> torch.nn.Module:
    torch.manual_seed(0)
    return diffusers.GlmImageTransformer2DModel(**TWO_LAYERS, prior_vq_quantizer_codebook_size=16).eval()


def glm_image_call(*lengths: int, mask: bool = False, seed: int = 0) -> dict:
    given = cogview4_call(*lengths, mask=mask, seed=seed)
    del given["original_size"]
    tokens = torch.randint(16, (len(lengths), 16), generator=torch.Generator().manual_seed(seed))
    return {**given, "prior_token_id": tokens, "prior_token_drop": torch.zeros_like(tokens, dtype=torch.bool)}


FAMILIES = {
    "qwen_image": (qwen, qwen_call),
    "cogview4": (cogview4, cogview4_call),
    "glm_image": (glm_image, glm_image_call),
    "z_image": (z_image, z_image_call),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    build, call = FAMILIES[request.param]
    return build(), call


@torch.no_grad()
def check(module: torch.nn.Module, calls: list[dict], **options) -> diffgraph.Report:
    """Every call, made by an accelerated module, is the eager one."""
    want = [module(**call)[0] for call in calls]
    diffgraph.accelerate_module(module, poison=True, **options)
    try:
        for call, expected in zip(calls, want, strict=True):
            got = module(**call)[0]
            pairs = zip(got, expected, strict=True) if isinstance(got, list) else [(got, expected)]
            assert all(distance(a, b) < TOLERANCE for a, b in pairs)
        return diffgraph.report(module)
    finally:
        diffgraph.restore_pipeline(module)


def test_prompts_of_any_length_share_a_bucket(family):
    module, call = family
    lengths = [9, 31, 17, 32, 1, 25]
    report = check(module, [call(n, seed=n) for n in lengths], prompt_buckets=[32, 64])
    assert (report.eager, report.captures, report.replays) == (1, 1, len(lengths) - 2)


def test_as_many_captures_as_buckets():
    report = check(qwen(), [qwen_call(n, seed=n) for n in [1, 5, 19, 47, 64, 65, 132, 726] * 3])
    labels = [next(part for part in s.label.split() if part.startswith("encoder")) for s in report.signatures]
    assert labels == [f"encoder_hidden_states=[1x{n}x32]" for n in (8, 24, 48, 64, 128, 192, 768)]
    assert (report.captures, report.eager, report.replays) == (7, 7, 10)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 100), min_size=3, max_size=8), st.sampled_from(sorted(FAMILIES)))
def test_any_prompts_in_any_order(lengths, name):
    build, call = FAMILIES[name]
    check(build(), [call(n, seed=n) for n in lengths])


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=3, max_size=6))
def test_prompts_of_unequal_length_in_a_batch(pairs):
    check(qwen(), [qwen_call(*pair, mask=True, seed=pair[0]) for pair in pairs])
    check(cogview4(), [cogview4_call(*pair, mask=True, seed=pair[0]) for pair in pairs])
    check(z_image(), [z_image_call(*pair, seed=pair[0]) for pair in pairs])


def test_with_and_without_a_mask_are_two_signatures():
    calls = [qwen_call(n, mask=mask, seed=n) for n in (9, 12, 15) for mask in (True, False)]
    report = check(qwen(), calls)
    assert (report.captures, report.replays) == (2, 2)


def test_a_batch_of_pictures_of_several_layers():
    """As Qwen-Image's edit pipelines call it: the picture's rows and then the condition's."""
    calls = [qwen_call(n, n, seed=n, size=(4, 4)) for n in (9, 12, 15, 10)]
    for call in calls:
        call["hidden_states"] = noise(2, 16 + 24, 64, seed=1)
        call["img_shapes"] = [[(1, 4, 4), (1, 4, 6)]] * 2
    report = check(qwen(), calls)
    assert report.replays == 2


def test_a_longer_caption_of_z_image_takes_the_next_block():
    report = check(z_image(), [z_image_call(n, seed=n) for n in (3, 32, 33, 64, 20, 40)])
    assert (report.captures, report.replays) == (2, 2)


def test_a_prompt_cut_out_of_a_longer_one_shares_the_bucket():
    calls = [qwen_call(40, seed=seed) for seed in range(5)]
    for call, length in zip(calls, (16, 12, 16, 16, 9), strict=True):
        call["encoder_hidden_states"] = call["encoder_hidden_states"][:, :length]
    report = check(qwen(), calls)
    assert (report.captures, report.replays) == (1, 3)


def test_a_mask_of_holes_is_honoured():
    calls = [qwen_call(20, 20, mask=True, seed=seed) for seed in range(4)]
    for call in calls:
        call["encoder_hidden_states_mask"][:, 3:7] = False
    check(qwen(), calls)


def test_a_prompt_longer_than_the_largest_bucket_is_recorded_for_its_length_on_demand():
    report = check(qwen(), [qwen_call(n, seed=s) for s, n in enumerate([40, 41, 42, 40, 10, 12, 10])], prompt_buckets=[16])
    assert report.captures == 2 and report.reasons == {Reason.UNSEEN_SIGNATURE: 4}


def test_and_runs_eager_with_its_reason_where_only_start_up_records():
    report = check(qwen(), [qwen_call(40), qwen_call(9)], prompt_buckets=[16], capture="startup")
    assert report.reasons == {Reason.PROMPT_TOO_LONG: 1, Reason.UNSEEN_SIGNATURE: 1}


def test_without_buckets_each_length_is_recorded_for_itself_to_the_bit():
    module, calls = qwen(), [qwen_call(n, seed=n) for n in (9, 12)]
    with torch.no_grad():
        want = [module(**call)[0] for call in calls]
        diffgraph.accelerate_module(module, prompt_buckets=None)
        for _ in range(3):
            for call, expected in zip(calls, want, strict=True):
                assert torch.equal(module(**call)[0], expected)
    assert diffgraph.report(module).captures == 2


@pytest.mark.parametrize("options", [{"backend": "full"}, {"backend": "eager"}, {"breaks": ["transformer_blocks.0"]}], ids=str)
def test_where_attention_is_no_break_lengths_are_exact(options):
    report = check(qwen(), [qwen_call(n, seed=n) for n in (9, 9, 12, 12)], **options)
    assert report.captures == 2


class Another:
    def __init__(self, processor):
        self.processor = processor

    def __call__(self, attn, hidden_states, encoder_hidden_states, *args, **kwargs):
        return self.processor(attn, hidden_states, encoder_hidden_states.mean(1, keepdim=True), *args, **kwargs)


def test_an_attention_processor_of_ones_own_is_not_given_padded_rows():
    module = qwen()
    assert rule_of(module) is not None
    module.transformer_blocks[0].attn.processor = Another(module.transformer_blocks[0].attn.processor)
    assert rule_of(module) is None


def test_a_class_of_ones_own_with_another_forward_has_no_rule():
    class Mine(diffusers.QwenImageTransformer2DModel):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    class Plain(diffusers.QwenImageTransformer2DModel):
        pass

    config = pipelines.build("qwen_image").transformer.config
    assert rule_of(Mine.from_config(config)) is None and rule_of(Plain.from_config(config)) is not None


def test_a_rule_that_is_wrong_is_found_out(monkeypatch):
    """Padded rows that are attended after all change the result by more than rounding."""
    monkeypatch.setattr(families.RULES["QwenImageTransformer2DModel"], "placed", lambda *_: nullcontext())
    module, call = qwen(), qwen_call(9)
    with torch.no_grad():
        want = module(**call)[0]
        diffgraph.accelerate_module(module)
        for _ in range(3):
            assert torch.equal(module(**call)[0], want)
    assert diffgraph.report(module).reasons[Reason.VERIFY_FAILED] == 2


def test_close_is_half_the_digits():
    a = torch.ones(100)
    assert close(a, a * (1 + 1e-4)) and not close(a, a * (1 + 3e-4))
    assert close(a.bfloat16(), a.bfloat16() * 1.03) and not close(a.bfloat16(), a.bfloat16() * 1.1)
    assert not close(a, a[:50]) and not close(a, torch.full_like(a, torch.nan))


def latents(pipe, prompt: str, **options) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    given = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent", **options}
    return pipe(prompt, generator=generator, **given).images


@pytest.mark.parametrize("name", some_slow(["qwen_image", "z_image"], "z_image"))
def test_start_up_records_every_bucket(name):
    pipe = pipelines.build(name)
    pipe.set_progress_bar_config(disable=True)
    prompts = ["a cat", "a very long story " * 6, "and a longer one " * 25]
    options = {"true_cfg_scale": 4.0, "negative_prompt": "bad"} if name == "qwen_image" else {"guidance_scale": 0.0}
    want = [latents(pipe, prompt, **options) for prompt in prompts]
    diffgraph.accelerate_pipeline(pipe, capture_shapes="64x64@cfg=off" if name == "z_image" else "64x64")
    assert diffgraph.report(pipe).captures == (16 if name == "z_image" else len(AUTO))
    for prompt, expected in zip(prompts, want, strict=True):
        assert distance(latents(pipe, prompt, **options), expected) < TOLERANCE
    assert set(diffgraph.report(pipe).unseen) == set()


def test_a_call_made_shorter_to_record_a_bucket_is_as_one_that_came_so():
    """To the signature, too: a cut that left its tensors spaced in memory was never met again."""
    rule, call = families.RULES["QwenImageTransformer2DModel"], qwen_call(40, 40, mask=True)
    assert all(tensor.is_contiguous() for tensor in rule.resized(call, (16,)).values())
    rule, call = families.RULES["ZImageTransformer2DModel"], z_image_call(40, 10)
    call["controlnet_block_samples"] = {0: noise(2, 32 + 64, 64)}
    changed = rule.resized(call, (20, 10))["controlnet_block_samples"][0]
    assert changed.shape == (2, 32 + 32, 64) and changed.is_contiguous()
    assert rule.resized(call, (64, 32))["controlnet_block_samples"][0] is call["controlnet_block_samples"][0]


def test_the_negative_prompt_of_z_image_stays_as_it_is_however_long():
    assert set(families.RULES["ZImageTransformer2DModel"].every((20, 90), AUTO)) == {(n, 96) for n in range(32, 513, 32)}


def test_with_a_picture_in_the_prompt_start_up_records_what_can_come():
    """Qwen-Image's edit pipeline: 1,369 tokens of a picture of a million pixels, in the negative prompt, too."""
    module = qwen()
    buckets = PromptBuckets.of(module, Options(), ("hidden_states",))
    for picture, first, last in ((0, 8, 1024), (196, 192, 1152), (1369, 1408, 2304)):
        found = [p.prompt.lengths[0] for p in buckets.every((), qwen_call(picture + 20))]
        assert (found[-1], found[0]) == (first, last) and found == sorted(found, reverse=True)
        for length in (picture + 16, picture + 20, picture + 900):
            assert buckets.padded((), qwen_call(length)).prompt.buckets[0] in found
    chosen = PromptBuckets.of(module, Options(prompt_buckets=(16, 2048)), ("hidden_states",))
    assert [p.prompt.lengths[0] for p in chosen.every((), qwen_call(1400))] == [2048, 16]


@pytest.mark.slow
def test_more_shapes_than_max_graphs_are_all_kept_when_asked_for():
    pipe = pipelines.build("qwen_image")
    diffgraph.accelerate_pipeline(pipe, capture_shapes=["64x64", "64x96", "96x64"])
    report = diffgraph.report(pipe)
    assert report.captures == sum(s.captured for s in report.signatures) == 3 * len(AUTO)


@pytest.mark.parametrize(
    ("buckets", "kind"),
    [
        *[([], ValueError), ([64, 32], ValueError), ([32, 32], ValueError), ([0, 64], ValueError), ([-1], ValueError)],
        *[("fine", TypeError), ([64.0], TypeError), ([True], TypeError), (64, TypeError)],
    ],
    ids=str,
)
def test_a_bucket_list_that_makes_no_sense_says_what_is_accepted(buckets, kind):
    module = qwen()
    with pytest.raises(kind, match=r"prompt_buckets is .*; accepted: 'auto', None") as caught:
        diffgraph.accelerate_module(module, prompt_buckets=buckets)
    assert isinstance(caught.value, diffgraph.DiffgraphError) and "_compiled_call_impl" not in vars(module)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_on_cuda_prompts_share_a_bucket(name):
    build, make = FAMILIES[name]
    module = build().to("cuda", torch.bfloat16)
    calls = [_on_cuda(make(n, seed=n)) for n in (40, 55, 33, 64, 45)]
    with torch.no_grad():
        want = [module(**call)[0] for call in calls]
        diffgraph.accelerate_module(module, prompt_buckets=[64])
        for call, expected in zip(calls, want, strict=True):
            assert close(module(**call)[0], expected)
    report = diffgraph.report(module)
    assert (report.captures, report.replays) == (1, 3) and "verify_failed" not in report.reasons


def _on_cuda(value):
    if isinstance(value, dict):
        return {key: _on_cuda(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_on_cuda(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.to("cuda", torch.bfloat16 if value.is_floating_point() else None)
    return value
