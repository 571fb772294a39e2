"""How others failed at this (notes on public reports): what the user would have seen, once a case.

`ROWS` says which test stands for which report; some stand in other files.
"""

import copy
import functools
import gc
import io
import pickle
import pkgutil
import re
from pathlib import Path

import pytest
import torch
from _toys import SETTLED, accelerated, call, calls, eager, flux, flux_pipe, settle
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from diffusers import FasterCacheConfig, FirstBlockCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.guiders import SkipLayerGuidance
from diffusers.hooks import LayerSkipConfig, apply_group_offloading, apply_layer_skip
from diffusers.models import attention_dispatch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from peft import LoraConfig
from peft.utils.hotswap import hotswap_adapter_from_state_dict, prepare_model_for_compiled_hotswap

import diffgraph
from diffgraph.devices.cpu import CpuPool
from diffgraph.recording.capture import Recording
from diffgraph.values.compare import close, same_bits


def lora(r=4):
    return LoraConfig(r=r, lora_alpha=r, target_modules=["to_q", "to_v", "proj_mlp"], init_lora_weights=False)


def two_loras(t):
    torch.manual_seed(1)
    t.add_adapter(lora(), "a")
    t.add_adapter(lora(), "b")
    t.set_adapters(["a"], [0.3])


class ScaledProcessor(FluxAttnProcessor):
    """As the IP-adapter's: scales in a list on the processor."""

    def __init__(self, scale=1.0):
        self.scale = [scale]

    def __call__(self, attn, hidden_states, *args, **kwargs):
        return super().__call__(attn, hidden_states * self.scale[0], *args, **kwargs)


def first_attention(t):
    return t.transformer_blocks[0].attn


def scaled_processors(t):
    t.set_attn_processor(ScaledProcessor())


def set_ip_adapter_scale(t):
    for processor in t.attn_processors.values():
        processor.scale = [0.5]


def replace_parameter(t):
    t.x_embedder.weight = torch.nn.Parameter(t.x_embedder.weight.detach() * 2)


def replace_data(t):
    t.x_embedder.weight.data = t.x_embedder.weight.data * 2


def doubled(t):
    return {name: value * 1.5 for name, value in t.state_dict().items()}


def twice(layer):
    layer = copy.deepcopy(layer)
    layer.weight.data *= 2
    return layer


def patch_forward(t):
    forward = first_attention(t).forward
    first_attention(t).forward = lambda hidden_states, **kw: forward(hidden_states=hidden_states * 2, **kw)


CHANGES = {
    "a LoRA is loaded": (None, lambda t: t.add_adapter(lora()), "adapter_changed"),
    "the LoRA's scale goes from 0.3 to 0.9": (two_loras, lambda t: t.set_adapters(["a"], [0.9]), "adapter_changed"),
    "another LoRA is chosen": (two_loras, lambda t: t.set_adapters(["b"], [0.3]), "adapter_changed"),
    "both LoRAs are chosen": (two_loras, lambda t: t.set_adapters(["a", "b"], [0.3, 0.3]), "adapter_changed"),
    "the LoRAs are disabled": (two_loras, lambda t: t.disable_adapters(), "adapter_changed"),
    "the LoRA is deleted": (two_loras, lambda t: t.delete_adapters("a"), "adapter_changed"),
    "the LoRAs are unloaded": (two_loras, lambda t: t.unload_lora(), "adapter_changed"),
    "the IP-adapter's scale is set": (scaled_processors, set_ip_adapter_scale, "adapter_changed"),
    "a processor is set": (None, lambda t: t.set_attn_processor(ScaledProcessor(0.5)), "processors_changed"),
    "a parameter is replaced": (None, replace_parameter, "weights_changed"),
    "a parameter's data is replaced": (None, replace_data, "weights_changed"),
    "weights are loaded with assign=True": (
        None,
        lambda t: t.load_state_dict(doubled(t), assign=True),
        "weights_changed",
    ),
    "weights are loaded in place": (None, lambda t: t.load_state_dict(doubled(t)), "replay"),
    "a submodule is replaced": (
        None,
        lambda t: t.single_transformer_blocks[0].__setattr__("proj_out", twice(t.single_transformer_blocks[0].proj_out)),
        "weights_changed",
    ),
    "a block's forward is patched": (None, patch_forward, "hooks_changed"),
}


@pytest.mark.parametrize("setup, change, reason", CHANGES.values(), ids=CHANGES)
def test_the_picture_follows_when(setup, change, reason):
    t, inputs = flux()
    if setup is not None:
        setup(t)
    accelerated(t)
    settle(t, **inputs)
    before = eager(t, **inputs)
    change(t)
    assert call(t, **inputs) == reason
    assert not same_bits(before, eager(t, **inputs)), "the change has no effect to see"
    assert calls(t, 3, **inputs)[-1] == "replay"


def test_an_unfused_lora_is_gone_and_a_fused_one_stays():
    t, inputs = flux()
    two_loras(t)
    accelerated(t)
    settle(t, **inputs)
    before = eager(t, **inputs)
    t.fuse_lora(lora_scale=2.0)
    assert call(t, **inputs) == "adapter_changed"
    assert not same_bits(before, eager(t, **inputs))
    assert calls(t, 3, **inputs)[-1] == "replay"
    t.unfuse_lora()
    assert call(t, **inputs) == "adapter_changed"
    assert calls(t, 3, **inputs)[-1] == "replay"


def prepared_for_hotswap():
    t, inputs = flux()
    torch.manual_seed(1)
    t.add_adapter(lora(), "a")
    accelerated(t)
    prepare_model_for_compiled_hotswap(t, target_rank=8)
    settle(t, **inputs)
    return t, inputs, eager(t, **inputs)


def test_hot_swapped_lora_weights_are_followed_without_a_new_capture():
    t, inputs, before = prepared_for_hotswap()
    other, _ = flux()
    torch.manual_seed(2)
    other.add_adapter(lora(r=2), "a")
    weights = {k: v for k, v in other.state_dict().items() if "lora_" in k}
    hotswap_adapter_from_state_dict(t, weights, "a", lora(r=2))
    assert calls(t, 2, **inputs) == ["replay", "replay"]
    assert not same_bits(before, eager(t, **inputs))


def test_a_lora_scale_is_followed_without_a_new_capture_once_prepared_for_hotswap():
    t, inputs, before = prepared_for_hotswap()
    for module in t.modules():
        if hasattr(module, "scaling"):
            module.scaling["a"].fill_(0.25)
    assert calls(t, 2, **inputs) == ["replay", "replay"]
    assert not same_bits(before, eager(t, **inputs))
    t.set_adapters(["a"], [0.9])
    call(t, **inputs)
    assert calls(t, 3, **inputs)[-1] == "replay"


def test_fused_projections_give_the_same_picture():
    t, inputs = flux()
    accelerated(t)
    settle(t, **inputs)
    t.fuse_qkv_projections()
    assert call(t, **inputs) in ("weights_changed", "processors_changed")
    t.unfuse_qkv_projections()
    call(t, **inputs)
    assert calls(t, 3, **inputs)[-1] == "replay"


def test_a_chosen_attention_backend_is_used():
    t, inputs = flux()
    accelerated(t)
    settle(t, **inputs)
    registry = attention_dispatch._AttentionBackendRegistry
    active = registry._active_backend  # diffusers sets it for all models, and resets it for none
    try:
        with attention_dispatch.attention_backend("_native_math"):
            assert calls(t, 3, **inputs) == ["unseen_signature", "capture", "replay"]
        assert call(t, **inputs) == "replay"
        registry._active_backend = attention_dispatch.AttentionBackendName("_native_math")
        assert call(t, **inputs) == "replay"
        t.set_attention_backend("_native_math")
        assert call(t, **inputs) == "processors_changed"
        assert calls(t, 3, **inputs)[-1] == "replay"
    finally:
        registry._active_backend = active
    t.reset_attention_backend()
    assert call(t, **inputs) == "processors_changed"
    assert calls(t, 3, **inputs)[-1] == "replay"


MOVES = {
    "offloaded to run and back": (lambda t: cpu_offload(t, execution_device="cpu"), "offload"),
    "group offloaded": (
        lambda t: apply_group_offloading(
            t, onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), offload_type="leaf_level"
        ),
        "offload",
    ),
    "cast layer by layer": (
        lambda t: t.enable_layerwise_casting(storage_dtype=torch.float16, compute_dtype=torch.float32),
        "layerwise_casting",
    ),
    "skipping a layer": (
        lambda t: apply_layer_skip(t, LayerSkipConfig(indices=[0], fqn="transformer_blocks", skip_attention=True)),
        "hooks_changed",
    ),
    "cached by First-Block": (lambda t: t.enable_cache(FirstBlockCacheConfig(threshold=0.2)), "step_cache"),
    "cached by Pyramid Attention Broadcast": (
        lambda t: t.enable_cache(
            PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=2, current_timestep_callback=lambda: 500)
        ),
        "step_cache",
    ),
    "cached by FasterCache": (
        lambda t: t.enable_cache(
            FasterCacheConfig(
                spatial_attention_block_skip_range=2,
                tensor_format="BFCHW",
                is_guidance_distilled=True,
                current_timestep_callback=lambda: 900,
            )
        ),
        "step_cache",
    ),
}


@pytest.mark.parametrize("move, reason", MOVES.values(), ids=MOVES)
def test_a_denoiser_runs_eager_while_it_is(move, reason):
    t, inputs = flux()
    accelerated(t)
    settle(t, **inputs)
    plain = copy.deepcopy(t)
    move(t)
    move(plain)
    for _ in range(4):
        before = diffgraph.report(t)
        with torch.no_grad(), t.cache_context("cond"), plain.cache_context("cond"):
            assert same_bits(t(**inputs), plain(**inputs))
        after = diffgraph.report(t)
        assert after.eager == before.eager + 1
        assert after.reasons[reason] == before.reasons.get(reason, 0) + 1
    if t.is_cache_enabled:
        t.disable_cache()
        call(t, **inputs)
        assert calls(t, 3, **inputs)[-1] == "replay"
    if reason == "offload" and hasattr(t, "_hf_hook"):
        remove_hook_from_module(t, recurse=True)
        call(t, **inputs)
        assert calls(t, 3, **inputs)[-1] == "replay"


HOOKED = {
    "the denoiser": lambda t: t,
    "a block": lambda t: t.transformer_blocks[0],
    "a layer": lambda t: t.transformer_blocks[0].attn.to_q,
}


@pytest.mark.parametrize("where", HOOKED.values(), ids=HOOKED)
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_is_called_every_time_on(where, kind):
    t, inputs = flux()
    accelerated(t)
    settle(t, **inputs)
    seen = []
    hook = getattr(where(t), kind)(lambda *_: seen.append(1))
    assert calls(t, 3, **inputs) == ["hooks_changed"] * 3
    assert len(seen) == 6  # each call is compared with eager, which calls the hook too
    hook.remove()
    call(t, **inputs)
    assert calls(t, 3, **inputs)[-1] == "replay"


def test_weights_that_were_moved_and_came_back_are_read_where_they_are():
    t, inputs = flux()
    accelerated(t)
    settle(t, **inputs)
    t.to(torch.float64).to(torch.float32)
    assert call(t, **inputs) == "weights_changed"
    assert calls(t, 3, **inputs)[-1] == "replay"


@pytest.mark.parametrize("return_dict", [False, True])
def test_an_output_that_is_kept_survives_the_next_call(return_dict):
    t, inputs = flux()
    accelerated(t)
    inputs["return_dict"] = return_dict
    settle(t, **inputs)
    with torch.no_grad():
        first = t(**inputs)
        kept = copy.deepcopy(first)
        second = t(**{**inputs, "hidden_states": inputs["hidden_states"] + 1})
    assert type(first) is type(eager(t, **inputs))
    assert same_bits(first, kept)
    assert not same_bits(first, second)


def test_a_picture_under_model_offload_is_right_each_time_and_the_runner_stays():
    pipe, plain = flux_pipe(), flux_pipe()
    pipe.enable_model_cpu_offload(device="cpu")
    diffgraph.accelerate_pipeline(pipe, poison=True)

    def draw(p):
        generator = torch.Generator().manual_seed(0)
        return p("a cat", height=32, width=32, num_inference_steps=2, generator=generator, output_type="np").images

    for _ in range(3):
        assert (draw(pipe) == draw(plain)).all()
    report = diffgraph.report(pipe)
    assert report.eager + report.replays + report.captures == 6


def test_the_survivors_of_an_eviction_replay_right():
    t, inputs = flux()
    accelerated(t, max_graphs=2)
    wider = [{**inputs, "hidden_states": inputs["hidden_states"].repeat(n, 1, 1)} for n in (1, 2, 3)]
    for batch in wider:
        for name in ("encoder_hidden_states", "pooled_projections", "timestep", "guidance"):
            if batch.get(name) is not None:
                n = batch["hidden_states"].shape[0]
                batch[name] = batch[name].repeat(n, *[1] * (batch[name].dim() - 1))
        settle(t, **batch)
    assert [s.captured for s in diffgraph.report(t).signatures] == [False, True, True]
    assert calls(t, 2, **wider[2]) == calls(t, 2, **wider[1]) == ["replay"] * 2
    assert calls(t, 4, **wider[0]) == ["evicted", *SETTLED[1:]]
    assert [s.captured for s in diffgraph.report(t).signatures] == [True, True, False]
    assert call(t, **wider[1]) == "replay"


class WithTables(torch.nn.Module):
    """Keeps a table for each length, as rotary embeddings do, and may drop them all."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.table = functools.lru_cache(lambda n: torch.arange(float(n))[:, None] * 0.1)

    def forward(self, x):
        return self.layer(x) + self.table(x.shape[0])


def test_an_older_recording_is_right_when_the_models_tables_are_dropped():
    module = accelerated(WithTables())
    a, b = torch.randn(3, 8), torch.randn(5, 8)
    for x in (a, b):
        calls(module, 3, x)
        assert call(module, x) == "replay"
    module.table.cache_clear()
    hog = [torch.full((n, 1), float("nan")) for n in (3, 5) for _ in range(100)]
    assert call(module, a) == call(module, b) == "replay"
    del hog


def test_a_replay_is_right_after_much_garbage_and_allocation():
    t, inputs = flux()
    accelerated(t)
    settle(t, **inputs)
    for _ in range(3):
        gc.collect()
        hog = [torch.full((n,), float("nan")) for n in range(1, 2000, 3)]
        assert call(t, **inputs) == "replay"
        del hog


def test_a_denoiser_with_a_weight_that_was_never_loaded_runs_eager():
    """On the meta device, where some loaders leave what they do not find."""
    module = torch.nn.Sequential(torch.nn.Linear(8, 8))
    module.spare = torch.nn.Linear(8, 8, device="meta")
    module.forward = lambda x: module[0](x)
    accelerated(module)
    assert calls(module, 3, torch.randn(2, 8)) == ["offload"] * 3


def test_a_guider_that_skips_layers_at_some_steps_gives_its_own_picture_at_each():
    t, inputs = flux()
    accelerated(t)
    settle(t, **inputs)
    config = LayerSkipConfig(indices=[0], fqn="transformer_blocks", skip_attention=True)
    guider = SkipLayerGuidance(skip_layer_guidance_start=0.0, skip_layer_guidance_stop=0.5, skip_layer_config=config)
    routes = []
    for step in range(6):
        guider.set_state(step=step, num_inference_steps=6, timestep=torch.tensor(500))
        for _ in range(guider.num_conditions):  # the last of which may have the hooks
            guider.prepare_models(t)
            routes.append(call(t, **inputs))
            guider.cleanup_models(t)
    assert routes.count("hooks_changed") >= 2
    assert routes[0] == "replay"
    assert calls(t, 12, **inputs)[-1] == "replay"


def test_weights_that_are_trained_no_more_are_seen():
    """A matrix product is computed another way where a weight asks for gradients, even if none are recorded."""
    t, inputs = flux()
    accelerated(t)
    settle(t, **inputs)
    t.requires_grad_(False)
    assert call(t, **inputs) == "weights_changed"
    assert calls(t, 3, **inputs)[-1] == "replay"


def test_no_room_for_graphs_means_eager_and_says_so():
    t, inputs = flux()
    accelerated(t, memory_limit=1024)
    assert calls(t, 2, **inputs)[0] == "unseen_signature"
    assert calls(t, 3, **inputs) == ["out_of_memory"] * 3
    assert diffgraph.report(t).memory_bytes == 0


def test_graphs_can_be_made_again_after_restoring():
    t, inputs = flux()
    for _ in range(2):
        accelerated(t)
        settle(t, **inputs)
        diffgraph.restore_pipeline(t)


def test_a_huge_argument_costs_no_more_than_its_refusal():
    values = CountedList(range(100_000))
    ours = torch.nn.Linear(2, 2)
    ours.forward = lambda x, junk: x * 2
    accelerated(ours)
    with torch.no_grad():
        ours(torch.ones(2), junk=[values, list(values)])
    assert diffgraph.report(ours).reasons == {"unsupported_input": 1}
    nested = [[float(i)] for i in range(100_000)]
    with torch.no_grad():
        ours(torch.ones(2), junk=nested)
    assert diffgraph.report(ours).reasons == {"unsupported_input": 2}


class CountedList(list):
    pass


def test_an_error_in_a_break_at_replay_still_gives_the_picture():
    t, inputs = flux()
    accelerated(t)
    settle(t, **inputs)
    processor = t.transformer_blocks[0].attn.processor
    fail = iter([True])
    original = torch.nn.functional.scaled_dot_product_attention

    def fragile(*args, **kwargs):
        if next(fail, False):
            raise RuntimeError("a break failed")
        return original(*args, **kwargs)

    assert processor is not None
    torch.nn.functional.scaled_dot_product_attention = fragile
    try:
        with pytest.warns(diffgraph.CaptureWarning, match="a break failed"):
            assert call(t, **inputs) == "capture_failed"
    finally:
        torch.nn.functional.scaled_dot_product_attention = original
    assert calls(t, 2, **inputs) == ["capture_failed"] * 2
    assert diffgraph.report(t).memory_bytes == 0
    diffgraph.capture(t)
    assert calls(t, 4, **inputs)[-1] == "replay"


COMPARED = {  # tensors made in inference mode have no version: warm-up keeps copies of them
    "before warm-up": ("side_effects._contents", 1, ["out_of_memory", "out_of_memory"]),
    "after warm-up": ("side_effects._contents", 2, ["unseen_signature", "out_of_memory"]),
    "at the first replay": ("verification.same_bits", 1, ["unseen_signature", "capture", "out_of_memory", "out_of_memory"]),
}


@pytest.mark.parametrize("place, nth, routes", COMPARED.values(), ids=COMPARED)
def test_running_out_of_memory_in_a_comparison_still_gives_the_picture(place, nth, routes, monkeypatch):
    t, inputs = flux()
    accelerated(t)
    place = f"diffgraph.recording.{place}"
    real, seen = pkgutil.resolve_name(place), []

    def fragile(*args):
        seen.append(1)
        if len(seen) == nth:
            raise torch.OutOfMemoryError("out of memory (injected)")
        return real(*args)

    monkeypatch.setattr(place, fragile)
    assert calls(t, len(routes), **inputs) == routes
    assert diffgraph.report(t).memory_bytes == 0
    diffgraph.capture(t)
    settle(t, **inputs)


def test_an_error_in_a_replay_that_is_made_to_be_timed_still_gives_the_picture(monkeypatch):
    t, inputs = flux()
    accelerated(t)
    monkeypatch.setattr(CpuPool, "timed", lambda self, fn: (fn(), 1.0 if "eager" in fn.__code__.co_names else 2.0))
    real, seen = Recording.run, []

    def fragile(recording, leaves):
        seen.append(1)
        if len(seen) == 2:  # the first was verified; a slow one is tried again
            raise RuntimeError("a replay failed")
        return real(recording, leaves)

    monkeypatch.setattr(Recording, "run", fragile)
    assert calls(t, 2, **inputs) == ["unseen_signature", "capture"]
    with pytest.warns(diffgraph.CaptureWarning, match="a replay failed"):
        assert call(t, **inputs) == "capture_failed"
    assert diffgraph.report(t).memory_bytes == 0


def copies(t):
    yield copy.deepcopy(t)
    yield pickle.loads(pickle.dumps(t))
    stream = io.BytesIO()
    torch.save(t, stream)
    stream.seek(0)
    yield torch.load(stream, weights_only=False)


def test_copies_of_a_denoiser_are_plain_eager_ones():
    t, inputs = flux()
    accelerated(t)
    settle(t, **inputs)
    for other in copies(t):
        with pytest.raises(diffgraph.NotAcceleratedError):
            diffgraph.report(other)
        with torch.no_grad():
            assert same_bits(other(**inputs), eager(t, **inputs))
    assert call(t, **inputs) == "replay"


def test_a_saved_pipeline_loads_again_and_draws_the_same(tmp_path):
    pipe = flux_pipe()
    pipe.save_pretrained(tmp_path / "before")
    diffgraph.accelerate_pipeline(pipe, poison=True)

    def draw(p):
        generator = torch.Generator().manual_seed(0)
        return p("a cat", height=32, width=32, num_inference_steps=3, generator=generator, output_type="latent").images

    picture = draw(pipe)
    pipe.save_pretrained(tmp_path / "after")
    before, after = ((tmp_path / name / "model_index.json").read_text() for name in ("before", "after"))
    assert after == before
    # Both from a file: weights lie there off the addresses that kernels like, and a CPU may round otherwise for it.
    drawn = [draw(type(pipe).from_pretrained(tmp_path / name)) for name in ("before", "after")]
    assert same_bits(*drawn) and close(drawn[0], picture)
    assert same_bits(draw(pipe), picture)


def test_a_saved_denoiser_loads_again(tmp_path):
    t, inputs = flux()
    keys = list(t.state_dict())
    accelerated(t)
    settle(t, **inputs)
    assert list(t.state_dict()) == keys
    t.save_pretrained(tmp_path)
    loaded = type(t).from_pretrained(tmp_path)
    assert all(torch.equal(v, t.state_dict()[k]) for k, v in loaded.state_dict().items())
    assert call(t, **inputs) == "replay"


def test_a_signature_measured_slower_than_eager_is_demoted_and_its_memory_freed(monkeypatch):
    module = accelerated(torch.nn.Linear(8, 8))
    replay_ms = [2.0]

    def timed(self, fn):
        in_eager = "eager" in fn.__code__.co_names
        return fn(), 1.0 if in_eager else replay_ms[0]

    monkeypatch.setattr(CpuPool, "timed", timed)
    x = torch.randn(2, 8)
    assert calls(module, 5, x) == ["unseen_signature", "capture", "not_faster", "not_faster", "not_faster"]
    report = diffgraph.report(module)
    assert report.memory_bytes == 0
    assert report.signatures[0].reason == "not_faster"
    replay_ms[0] = 0.5
    settle(module, torch.randn(4, 8))


# Who reported it, and which tests show that it does not happen here.
ROWS = {
    "stable-fast #143, #144; ComfyUI #5375: a LoRA switch has no effect": "test_the_picture_follows_when",
    "diffusers #9279; sglang #32703: a LoRA loaded later is dropped": (
        "test_the_picture_follows_when",
        "test_an_unfused_lora_is_gone_and_a_fused_one_stays",
    ),
    "onediff #997: the IP-adapter's scale is frozen": "test_ip_adapters.test_the_adapters_scale_is_followed",
    "sglang #36008: a flag toggled later is ignored": "test_guards.test_a_change_is_followed_of",
    "sglang #23664; diffusers #4399: offload moves the weights": (
        "test_a_picture_under_model_offload_is_right_each_time_and_the_runner_stays"
    ),
    "onediff #1017: to the CPU and back": (
        "test_weights_that_were_moved_and_came_back_are_read_where_they_are",
        "test_gpu.test_weights_moved_to_the_cpu_and_back_are_seen",
    ),
    "librediffusion #14: a parameter replaced by one of the same shape": "test_the_picture_follows_when",
    "diffusers #7420, #8879; sglang #31852: an output is overwritten": "test_an_output_that_is_kept_survives_the_next_call",
    "sglang #34183, #34210: a model's cache is dropped": (
        "test_an_older_recording_is_right_when_the_models_tables_are_dropped",
        "test_gpu.test_a_cache_that_the_model_keeps_is_never_overwritten",
    ),
    "sglang #30584, #37606: memory of breaks is reused": (
        "test_a_replay_is_right_after_much_garbage_and_allocation",
        "test_engine.test_what_is_read_lives_although_nobody_else_keeps_it",
    ),
    "vllm-omni #6457; pytorch #193402: evicting one breaks the rest": (
        "test_the_survivors_of_an_eviction_replay_right",
        "test_gpu.test_eviction_leaves_the_survivors_right_and_memory_flat",
    ),
    "stable-fast #22: a pool outlives its graphs": "test_graphs_can_be_made_again_after_restoring",
    "sglang #33885, #36485: the real call misses what start-up recorded": (
        "test_door.test_a_capture_shape_comes_true_in_the_real_call"
    ),
    "sglang #33989: a huge dead argument": "test_a_huge_argument_costs_no_more_than_its_refusal",
    "sglang #34929; pytorch #91302: a host tensor built in the forward": (
        "test_gpu.test_ops_that_cannot_be_recorded_become_breaks",
        "test_gpu.test_a_staging_buffer_is_copied_as_it_was_and_the_models_own_as_it_is",
    ),
    "sglang #34182: an error while replaying": "test_an_error_in_a_break_at_replay_still_gives_the_picture",
    "unsloth #10537: graphs survive running out of memory": (
        "test_guards.test_out_of_memory_anywhere_still_gives_the_picture",
        "test_gpu.test_running_out_of_memory_during_capture_gives_the_eager_result",
    ),
    "diffusers #7851, #12104: concurrent calls": "test_threads.test_threads_with_two_signatures_each_get_their_own_picture",
    "unsloth; pytorch #193982: another thread's event query": "test_gpu.test_other_threads_work_while_a_capture_is_open",
    "diffusers #2709, #5617: saving a wrapped pipe": "test_a_saved_pipeline_loads_again_and_draws_the_same",
    "nunchaku #729: deepcopy crashes": "test_copies_of_a_denoiser_are_plain_eager_ones",
    "diffusers #11766: isinstance and adapters break": "test_ownership.test_an_accelerated_denoiser_looks_like_itself",
    "xDiT #717; sglang #34242: step caches off or baked": "test_a_denoiser_runs_eager_while_it_is",
    "ACE-Step #613: random numbers after a failure": "test_gpu.test_a_failed_capture_leaves_the_device_usable",
    "Protenix #285; sglang #36470: slower than eager": (
        "test_a_signature_measured_slower_than_eager_is_demoted_and_its_memory_freed",
        "test_gpu.test_a_forward_too_small_to_gain_is_demoted",
    ),
    "KJNodes #142; ComfyUI #16002: cudaMallocAsync aborts": "test_gpu.test_another_allocator_is_refused",
    "accelerate #2592: parameters on two devices": (
        "test_a_denoiser_with_a_weight_that_was_never_loaded_runs_eager",
        "test_gpu.test_weights_on_two_devices_run_eager",
    ),
}


@pytest.mark.parametrize("tests", ROWS.values(), ids=ROWS)
def test_each_report_has_its_test(tests):
    for name in [tests] if isinstance(tests, str) else tests:
        file, _, function = name.rpartition(".")
        text = (Path(__file__).parent / f"{file or 'test_known_failures'}.py").read_text()
        assert re.search(rf"^def {function}\(", text, re.MULTILINE), f"no test {name}"
