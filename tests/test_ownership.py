"""Whose a denoiser is: what acceleration leaves alone, who shares a runner, and what undoing brings back."""

import copy
import gc
import inspect
import sys
import weakref

import pytest
import torch
from _toys import accelerated, call, calls, eager, flux, flux_pipe, settle, some_slow
from diffusers import FluxPipeline

import diffgraph
import pipelines
from diffgraph.values.compare import same_bits


def traces(module):
    """Every object's attributes, themselves."""
    objects = [*module.modules(), *module.attn_processors.values()]
    return [(obj, name, value) for obj in objects for name, value in vars(obj).items()]


def same(before, after):
    return len(before) == len(after) and all(a[:2] == b[:2] and a[2] is b[2] for a, b in zip(before, after, strict=True))


def test_restoring_leaves_nothing_of_ours_on_any_object():
    t, inputs = flux()
    with torch.no_grad():
        t(**inputs)  # what diffusers itself sets at the first call
    before = traces(t)
    accelerated(t)
    settle(t, **inputs)
    diffgraph.restore_pipeline(t)
    assert same(before, traces(t))
    with pytest.raises(diffgraph.NotAcceleratedError):
        diffgraph.restore_pipeline(t)


def test_an_accelerated_denoiser_looks_like_itself():
    t, inputs = flux()
    kind, signature, keys = type(t), inspect.signature(t.forward), list(t.state_dict())
    names = [name for name, _ in t.named_modules()]
    accelerated(t)
    settle(t, **inputs)
    assert type(t) is kind
    assert inspect.signature(t.forward) == signature
    assert list(t.state_dict()) == keys
    assert [name for name, _ in t.named_modules()] == names
    assert repr(t) == repr(copy.deepcopy(t))


def test_pipelines_that_share_a_denoiser_share_its_graphs_until_the_last_is_restored():
    first = flux_pipe()
    second = FluxPipeline.from_pipe(first)
    t, inputs = first.transformer, flux()[1]
    assert second.transformer is t
    diffgraph.accelerate_pipeline(first, poison=True)
    diffgraph.accelerate_pipeline(second, poison=True)
    with pytest.raises(diffgraph.AlreadyAcceleratedError):
        diffgraph.accelerate_pipeline(second)
    with torch.no_grad():
        for _ in range(4):
            t(**inputs)
    assert diffgraph.report(first).replays == diffgraph.report(second).replays == 2
    diffgraph.restore_pipeline(first)
    with pytest.raises(diffgraph.NotAcceleratedError):
        diffgraph.report(first)
    with torch.no_grad():
        t(**inputs)
    assert diffgraph.report(second).replays == 3
    diffgraph.restore_pipeline(second)
    assert "_compiled_call_impl" not in vars(t)


@pytest.mark.parametrize("backend", ["breakable", "eager"])
def test_the_memory_of_a_deleted_denoiser_is_free_at_once(backend):
    t, inputs = flux()
    for module in t.modules():
        vars(module).pop("_diffusers_hook", None)  # a cycle of diffusers' own
    accelerated(t, backend=backend)
    with torch.no_grad():
        for _ in range(4):
            t(**inputs)
    pool = next(iter(vars(t)["_compiled_call_impl"].memory._pools.values()))
    assert backend == "eager" or pool.bytes() > 0
    weight = weakref.ref(t.x_embedder.weight)
    gc.collect()
    gc.disable()
    try:
        del t
        assert weight() is None
        assert pool.bytes() == 0
    finally:
        gc.enable()


def test_the_users_own_compiled_call_runs_inside_and_comes_back():
    t, inputs = flux()
    seen = []

    def compiled(*args, **kwargs):
        seen.append(1)
        return t._call_impl(*args, **kwargs)

    t._compiled_call_impl = compiled
    accelerated(t)
    settle(t, **inputs)
    assert diffgraph.report(t).signatures[0].breaks == 0, "one op, which the CPU device's tape runs, and a graph would not"
    assert seen
    diffgraph.restore_pipeline(t)
    assert t._compiled_call_impl is compiled


def test_a_pause_is_eager_and_nests():
    t, inputs = flux()
    accelerated(t)
    settle(t, **inputs)
    before = diffgraph.report(t)
    with torch.no_grad(), diffgraph.paused(t):
        with diffgraph.paused(t):
            t(**inputs)
        t(**inputs)
    after = diffgraph.report(t)
    assert after.reasons["paused"] == before.reasons["paused"] + 2
    assert after.replays == before.replays
    assert call(t, **inputs) == "replay"


def test_at_start_up_a_changed_lora_is_eager_until_captured_again():
    pipe = flux_pipe()
    diffgraph.accelerate_pipeline(pipe, capture_shapes=["32x32"], poison=True)
    t, seen = pipe.transformer, []
    plain = copy.deepcopy(t)
    pipe.set_progress_bar_config(disable=True)

    def draw():
        generator = torch.Generator().manual_seed(0)
        return pipe("a cat", height=32, width=32, num_inference_steps=2, generator=generator, output_type="latent")

    seen = draw().images
    report = diffgraph.report(pipe)
    assert report.eager == report.captures == 1  # of the capture itself
    with torch.no_grad():
        for module in (t, plain):
            module.x_embedder.weight = torch.nn.Parameter(module.x_embedder.weight * 2)
    changed = draw().images
    assert not torch.equal(changed, seen)
    assert diffgraph.report(pipe).reasons["weights_changed"] == 2
    diffgraph.capture(pipe, ["32x32"])
    replays = diffgraph.report(pipe).replays
    assert torch.equal(draw().images, changed)
    assert diffgraph.report(pipe).replays == replays + 2
    diffgraph.restore_pipeline(pipe)
    assert torch.equal(draw().images, changed)


def test_a_failing_accelerate_leaves_the_pipeline_as_it_was():
    pipe = flux_pipe()
    before, ours = traces(pipe.transformer), dict(vars(pipe))
    with pytest.raises(diffgraph.ShapeError):
        diffgraph.accelerate_pipeline(pipe, capture_shapes=["32x32@nonsense=1"])
    with pytest.raises(diffgraph.DiffgraphError):
        diffgraph.accelerate_pipeline(pipe, breaks=["no.such.module"])
    assert same(before, traces(pipe.transformer))
    assert vars(pipe) == ours


def test_denoisers_inside_an_accelerated_one_may_be_accelerated_too():
    t, inputs = flux()
    plain = copy.deepcopy(t)
    accelerated(t.transformer_blocks[0])
    accelerated(t)
    for step in range(6):
        given = {**inputs, "hidden_states": inputs["hidden_states"] + step}
        with torch.no_grad():
            assert same_bits(t(**given), plain(**given))
    assert diffgraph.report(t).replays == 4
    diffgraph.restore_pipeline(t)
    assert calls(t.transformer_blocks[0], 1, **block_inputs(t, inputs)) != []


def block_inputs(t, inputs):
    seen = []
    hook = t.transformer_blocks[0].register_forward_pre_hook(lambda _, a, k: seen.append((a, k)), with_kwargs=True)
    with torch.no_grad():
        t(**inputs)
    hook.remove()
    args, kwargs = seen[0]
    assert not args
    return kwargs


def test_eager_backend_keeps_every_rule_and_records_nothing():
    t, inputs = flux()
    accelerated(t, backend="eager")
    settle(t, **inputs)
    t.x_embedder.weight = torch.nn.Parameter(t.x_embedder.weight.detach() * 2)
    assert call(t, **inputs) == "weights_changed"
    assert diffgraph.report(t).memory_bytes == 0
    assert same_bits(eager(t, **inputs), eager(t, **inputs))


COMPILED_LATER = {
    "torch.compile(denoiser)": lambda pipe: setattr(pipe, "transformer", torch.compile(pipe.transformer, backend="eager")),
    "denoiser.compile()": lambda pipe: pipe.transformer.compile(backend="eager"),
}


@pytest.mark.parametrize("compile_it", COMPILED_LATER.values(), ids=COMPILED_LATER)
def test_a_denoiser_compiled_after_accelerating_is_told_and_can_be_restored(compile_it):
    pipe = diffgraph.accelerate_pipeline(flux_pipe(), poison=True)
    t, inputs = pipe.transformer, flux()[1]
    settle_pipe(pipe, inputs)
    plain = eager_of(pipe, t, inputs)
    compile_it(pipe)
    with torch.no_grad():
        assert same_bits(pipe.transformer(**inputs), plain)
    report = diffgraph.report(pipe)
    assert report.bypassed == ["transformer"]
    assert "was compiled after it was accelerated" in str(report)
    diffgraph.restore_pipeline(pipe)
    with pytest.raises(diffgraph.NotAcceleratedError):
        diffgraph.report(pipe)
    diffgraph.accelerate_pipeline(pipe, poison=True)
    settle_pipe(pipe, inputs)
    assert diffgraph.report(pipe).bypassed == []


def settle_pipe(pipe, inputs):
    with torch.no_grad():
        for _ in range(4):
            pipe.transformer(**inputs)
    assert diffgraph.report(pipe).replays > 0


def eager_of(pipe, t, inputs):
    with torch.no_grad(), diffgraph.paused(pipe):
        return t(**inputs)


def test_accelerating_again_after_the_denoiser_was_compiled_records_the_compiled_one():
    pipe = diffgraph.accelerate_pipeline(flux_pipe(), poison=True)
    inputs = flux()[1]
    settle_pipe(pipe, inputs)
    pipe.transformer.compile(backend="eager")
    diffgraph.accelerate_pipeline(pipe, poison=True)
    settle_pipe(pipe, inputs)
    assert diffgraph.report(pipe).bypassed == []
    diffgraph.restore_pipeline(pipe)
    assert vars(pipe.transformer)["_compiled_call_impl"] is not None


COMPILED_BEFORE = {
    "whole": lambda t: t.compile(backend="eager"),
    "by its blocks": lambda t: [block.compile(backend="eager") for block in t.transformer_blocks],
}


@pytest.mark.parametrize("compile_it", COMPILED_BEFORE.values(), ids=COMPILED_BEFORE)
def test_a_denoiser_compiled_before_accelerating_is_recorded_without_noise(compile_it, monkeypatch):
    t, inputs = flux()
    compile_it(t)
    accelerated(t)
    noise = []
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    settle(t, **inputs)
    assert not noise
    # Attention is part of what was compiled; the single block was not.
    assert diffgraph.report(t).signatures[0].breaks == (1 if compile_it is COMPILED_BEFORE["by its blocks"] else 0)


COMPILED = {
    "whole": lambda t, given: t.compile(**given),
    "blocks": lambda t, given: t.compile_repeated_blocks(**given),
    "a submodule": lambda t, given: [block.ff.compile(**given) for block in t.transformer_blocks],
    "by torch.compile": lambda t, given: [
        t.transformer_blocks.__setitem__(i, torch.compile(block, **given)) for i, block in enumerate(t.transformer_blocks)
    ],
}


@pytest.mark.parametrize("fullgraph", some_slow([True, False], False))
@pytest.mark.parametrize("compile_it", COMPILED.values(), ids=COMPILED)
def test_what_the_user_has_compiled_is_recorded_and_goes_on_to_run(compile_it, fullgraph):
    runs = []

    def backend(graph, _):
        def run(*args):
            runs.append(True)
            return graph.forward(*args)

        return run

    def ran(fn):
        runs.clear()
        with torch.no_grad():
            output = fn()
        return output, len(runs)

    t, inputs = flux()
    compile_it(t, {"backend": backend, "fullgraph": fullgraph})
    ran(lambda: t(**inputs))  # compiled
    wanted, times = ran(lambda: t(**inputs))
    assert times > 0
    accelerated(t)
    for _ in range(4):
        assert same_bits(ran(lambda: t(**inputs))[0], wanted)
    assert diffgraph.report(t).replays == 2
    with diffgraph.paused(t):
        assert ran(lambda: t(**inputs))[1] == times
    diffgraph.restore_pipeline(t)
    assert ran(lambda: t(**inputs))[1] == times


def test_prompts_are_not_padded_for_code_that_the_user_has_compiled():
    """Its attention would see the padded rows."""
    pipe = pipelines.build("qwen_image")
    for block in pipe.transformer.transformer_blocks:
        block.compile(backend="eager")
    pipe.set_progress_bar_config(disable=True)
    diffgraph.accelerate_pipeline(pipe)
    size = {"height": 64, "width": 64, "num_inference_steps": 4, "output_type": "latent"}
    for prompt in ("a", "a red cat"):
        found = pipe(prompt, **size, generator=torch.Generator().manual_seed(0))[0]
        with diffgraph.paused(pipe):
            assert torch.equal(found, pipe(prompt, **size, generator=torch.Generator().manual_seed(0))[0])
    assert diffgraph.report(pipe).captures == 2
