"""A recorded training step does, to the bit, what the eager one does; and where it cannot, it is the eager one, and says why."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import os
import queue
import random
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import _training
import pytest
import torch
from _training import SETTLED, Checkpointed, Loop, LoraLoop, Twins, batch, recorded, route_of, sd3  # noqa: F401
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

import diffgraph
import pipelines
from diffgraph.devices.cpu import CpuPool, TapeSegment
from diffgraph.engine.recordable import written_by
from diffgraph.engine.recorder import record
from diffgraph.engine.sequence import GraphSequence
from diffgraph.engine.write_log import WriteLog
from diffgraph.finetuning.bytecode import paths_of
from diffgraph.finetuning.step_recording import StepRecording
from diffgraph.values.compare import close, same_bits
from pipelines import finetune

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_fifty_steps_of_a_lora_are_those_of_eager(sd3):  # noqa: F811
    """Accumulated and clipped, with a schedule, batches of two shapes, pictures drawn in between, and a checkpoint taken back."""
    pipe, batches = sd3
    twins = Twins(lambda: LoraLoop(pipe))
    routes, kept = [], {}
    for i in range(50):
        for micro in range(2):
            routes.append(twins(*batches[i // 2 % 2], update=micro == 1))
        twins.both(lambda loop: loop.scheduler.step())
        if i == 20:
            twins.both(lambda loop: kept.update({loop: copy.deepcopy((loop.net.state_dict(), loop.optimizer.state_dict()))}))
        if i == 30:
            pictures = [draw(pipe, loop.net) for loop in (twins.eager, twins.recorded)]
            assert torch.equal(*pictures)
        if i == 40:
            twins.both(lambda loop: take_back(loop, *kept[loop]))
    report = diffgraph.report(twins.step)
    assert report.replays > 80 and set(report.reasons) == {"unseen_signature", "optimizer_changed"}
    assert routes[-8:] == ["replay"] * 8


def draw(pipe, net):
    pipe.transformer, before = net.eval(), pipe.transformer
    diffgraph.accelerate_pipeline(pipe)
    try:
        given = pipelines.inputs("sd3", pipe, height=32, width=32, cfg=False)
        made = pipe(**given, num_inference_steps=4, output_type="latent", generator=torch.Generator().manual_seed(0)).images
        assert diffgraph.report(pipe).replays == 2
        return made
    finally:
        diffgraph.restore_pipeline(pipe)
        pipe.transformer = before
        net.train()


def take_back(loop, weights, state):
    loop.net.load_state_dict(weights)
    loop.optimizer.load_state_dict(copy.deepcopy(state))


def test_a_sample_batch_leaves_nothing_behind():
    loop = Loop()
    before = loop.everything()
    step = recorded(loop, lambda x: loop.step(x))
    assert same_bits(loop.everything(), before)
    step = diffgraph.record_training_step(loop.step, batch(), optimizer=loop.optimizer, model=loop.net)
    assert same_bits(loop.everything(), before)
    for _ in range(2):
        loop.step(batch())
    before = loop.everything()
    step = diffgraph.record_training_step(loop.step, batch(), optimizer=loop.optimizer, model=loop.net)
    assert same_bits(loop.everything(), before)
    assert route_of(step, batch())[1] == "capture"


def test_a_sample_of_an_accumulating_step_is_recorded_at_once():
    loop = Loop()
    loop.step(batch())
    step = diffgraph.record_training_step(lambda x: loop.step(x, update=False), batch(), optimizer=loop.optimizer, model=loop.net)
    assert all(p.grad is None for p in loop.net.parameters())
    assert route_of(step, batch())[1] == "capture"
    assert all(p.grad is not None for p in loop.net.parameters())


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
def test_a_checkpoint_with_a_rate_of_another_kind_stays_eager():
    def number_as_rate(loop):
        state = copy.deepcopy(loop.optimizer.state_dict())
        state["param_groups"][0]["lr"] = 0.003
        loop.optimizer.load_state_dict(state)

    twins = Twins()
    twins.settle()
    twins.recorded.everything = twins.eager.everything = lambda: None
    twins.both(number_as_rate)
    assert twins.times(3, batch()) == ["optimizer_changed"] * 3
    assert same_bits(list(twins.eager.net.parameters()), list(twins.recorded.net.parameters()))


def test_batches_of_new_shapes_run_eagerly_and_then_recorded():
    twins = Twins()
    twins.settle()
    assert [twins(batch(i, rows=6)) for i in range(3)] == ["unseen_signature", "capture", "replay"]
    assert twins(batch(9)) == "replay"


def test_gradients_accumulate_in_one_recording_and_step_in_another():
    twins = Twins()
    for _ in range(4):
        twins.times(3, batch(), update=False)
        last = twins(batch(), update=True)
    assert last == "replay"


def set_rate(loop):
    loop.optimizer.param_groups[0]["lr"].fill_(3e-3)


def use_gradients_of_ones_own(loop):
    for p in loop.net.parameters():
        p.grad = torch.ones_like(p)


@pytest.mark.parametrize("change", [set_rate, lambda loop: loop.optimizer.zero_grad(set_to_none=True)])
def test_what_does_not_matter_is_replayed(change):
    twins = Twins()
    twins.settle()
    twins.both(change)
    assert twins(batch()) == "replay"


def replace_weights(loop):
    loop.net.first.weight.data = loop.net.first.weight.data * 0.5


def freeze(loop):
    loop.net.first.bias.requires_grad_(False)


def reload_optimizer(loop):
    loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))


def decay(loop):
    loop.optimizer.param_groups[0]["weight_decay"] = 0.5


def replace_activation(loop):
    loop.net.dropout.p = 0.5


def add_hook(loop):
    loop.net.second.register_forward_hook(lambda module, args, output: output * 2)


@pytest.mark.parametrize(
    "change, reason, then",
    [
        (replace_weights, "weights_changed", "capture"),
        (freeze, "trainable_changed", "capture"),
        (reload_optimizer, "optimizer_changed", "capture"),
        (decay, "optimizer_changed", "capture"),
        (replace_activation, "attributes_changed", "capture"),
        (add_hook, "hooks_changed", "hooks_changed"),
        (use_gradients_of_ones_own, "unseen_signature", "unseen_signature"),
    ],
)
def test_what_a_recording_relies_on_is_guarded(change, reason, then):
    twins = Twins()
    twins.settle()
    twins.both(change)
    assert twins(batch()) == reason
    if then == "capture":
        assert twins.times(2, batch()) == ["capture", "replay"]


def test_an_adapter_that_is_added_is_seen(sd3):  # noqa: F811
    from peft import LoraConfig

    pipe, batches = sd3
    twins = Twins(lambda: LoraLoop(pipe))
    twins.times(4, *batches[0])

    def another(loop):
        torch.manual_seed(3)
        loop.net.add_adapter(LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False), "second")
        loop.net.set_adapters(["default", "second"])

    twins.both(another)
    assert twins(*batches[0]) in ("adapter_changed", "weights_changed")
    assert "replay" in twins.times(3, *batches[0])


def test_another_optimizer_than_was_given_is_not_stepped_by_a_recording():
    loop = Loop()
    step = recorded(loop)
    for _ in range(4):
        step(batch())
    loop.optimizer = torch.optim.SGD(loop.net.parameters(), lr=torch.tensor(1.0), fused=True)
    before = loop.everything()[0]
    assert route_of(step, batch())[1] == "optimizer_changed"
    assert not same_bits(loop.everything()[0], before)


def test_a_break_between_segments_is_part_of_the_step():
    class Broken(Loop):
        def step(self, x):
            output = super().step(x)
            clamp(self.net.first.bias)
            output["norm"] = self.net.first.bias.detach().norm()
            return output

    twins = Twins(Broken)
    twins.settle()
    assert diffgraph.report(twins.step).signatures[0].breaks == 1


def test_what_a_break_writes_is_part_of_the_step():
    class Counting(Loop):
        def __init__(self):
            super().__init__()
            self.count = torch.zeros(3)

        def step(self, x):
            output = super().step(x)
            count(self.count)
            return output

        def everything(self):
            return super().everything(), self.count.clone()

    Twins(Counting).settle()


@diffgraph.eager_on_graph
def count(tensor):
    tensor.add_(torch.zeros(3).add_(1))


@diffgraph.eager_on_graph
@torch.no_grad()
def clamp(weight):
    weight.clamp_(-0.1, 0.1)


# -- what cannot be recorded


@diffgraph.eager_on_graph
def doubled(x):
    return x * 2


def cuts_the_gradient(loop, x):
    return own_step(loop, doubled(loop.net(x)))


def own_step(loop, y):
    loss = y.square().mean()
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    return loss


def trains_another_module(loop, x):
    return own_step(loop, loop.other(loop.net(x)))


def masks(loop, x):
    y = loop.net(x)
    return own_step(loop, y[y > 0])


def fails_midway(loop, x):
    output = loop.step(x)
    if output["loss"].item() > -1:
        loop.net.first.bias.data.add_(1)
    return output


def steps_the_scheduler(loop, x):
    output = loop.step(x)
    loop.scheduler.step()
    return output


def counts(loop, x):
    loop.count = getattr(loop, "count", 0) + 1
    return loop.step(x)


def keeps_losses(loop, x):
    output = loop.step(x)
    loop.losses.append(output["loss"])
    return output


def changes_by_pythons_own_chance(loop, x):
    return loop.step(x * random.random())


def gives_back_its_batch(loop, x):
    output = loop.step(x)
    x.add_(1)
    return output


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
@pytest.mark.parametrize(
    "step_fn, reason",
    [
        (fails_midway, "capture_failed"),
        (steps_the_scheduler, "side_effects"),
        (counts, "side_effects"),
        (keeps_losses, "side_effects"),
        (changes_by_pythons_own_chance, "side_effects"),
        (gives_back_its_batch, "side_effects"),
        (cuts_the_gradient, "capture_failed"),
        (trains_another_module, "capture_failed"),
        (masks, "capture_failed"),
    ],
)
def test_a_step_that_cannot_be_recorded_is_eager_to_the_bit(step_fn, reason):
    class Made(Loop):
        def __init__(self):
            super().__init__()
            self.losses = []
            self.other = torch.nn.Linear(8, 8)
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    eager, loop = Made(), Made()
    step = recorded(loop, lambda x: step_fn(loop, x))
    results = []
    for trained, fn in ((eager, lambda x: step_fn(eager, x)), (loop, step)):
        torch.manual_seed(5)
        random.seed(5)
        for i in range(8):
            fn(batch(i))
        results.append(trained.everything())
    assert same_bits(*results)
    report = diffgraph.report(step)
    assert report.reasons[reason] >= 1 and report.replays == 0


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
def test_gradients_are_still_there_after_a_recording_that_failed():
    class Reading(Loop):
        def step(self, x, update=True):
            output = super().step(x, update)
            if update:
                self.net.first.bias.data.add_(output["loss"].item())
            return output

    twins = Twins(Reading)
    for _ in range(4):
        twins.times(2, batch(), update=False)
        last = twins(batch(), update=True)
    assert last == "capture_failed"


def test_what_changes_at_each_step_is_not_looked_at_each_time():
    twins = Twins()
    twins.settle()
    routes = []
    for i in range(36):
        if i < 12:
            twins.both(lambda loop, i=i: loop.optimizer.param_groups[0].update(weight_decay=i / 1000))
        routes.append(twins(batch()))
    assert set(routes[:24]) == {"optimizer_changed"} and routes[-3:] == ["replay"] * 3


class OnlyRecorded(TapeSegment):
    """As on a GPU, what the ops write is there after `replay` and not before; while it is open, a copy is one of the future."""

    def __init__(self, pool):
        super().__init__(pool)
        self._before = {}

    def run(self, func, args, kwargs):
        for tensor in written_by(func, args, kwargs):
            storage = tensor.untyped_storage()
            self._before.setdefault(storage._cdata, (storage, storage.clone()))
        return super().run(func, args, kwargs)

    def end(self):
        with _disable_current_modes():
            for storage, before in self._before.values():
                storage.copy_(before)


class OnlyRecording(CpuPool):
    runs_while_recording = False

    def open_segment(self):
        return OnlyRecorded(self)


@pytest.mark.parametrize("is_for_undoing", [False, True])
def test_what_a_segment_will_write_is_kept_before_it_runs_and_not_by_the_segment(is_for_undoing):
    """It failed after its second segment has run, or it was recorded only to be undone."""
    weight, other, shown = torch.zeros(2), torch.zeros(2), []
    log, sequence = WriteLog(is_for_undoing=is_for_undoing), GraphSequence(OnlyRecording(torch.device("cpu")))
    with contextlib.suppress(ZeroDivisionError), record(sequence, weights=[weight, other], log=log):
        for _ in range(2):
            weight += 1
            look = diffgraph.eager_on_graph(lambda *seen: shown.append([float(t[0]) for t in seen]))
            look(weight, other)
            other += 2
        if not is_for_undoing:
            raise ZeroDivisionError
    assert shown == [[1, 0], [2, 2]]
    log.undo()
    assert weight.tolist() == other.tolist() == [0, 0]
    assert len(log.tensors) == 2


# -- the first replay, made twice


def no_memory(*args, **kwargs):
    raise torch.OutOfMemoryError("made up")


def the_first_copy(monkeypatch):
    monkeypatch.setattr(WriteLog, "contents", no_memory)


def the_copy_of(count):
    def fail(monkeypatch):
        made, values = [], WriteLog.values

        def values_or_not(*args, **kwargs):
            made.append(None)
            return no_memory() if len(made) == count else values(*args, **kwargs)

        monkeypatch.setattr(WriteLog, "values", values_or_not)

    return fail


@pytest.mark.parametrize("fail", [the_first_copy, the_copy_of(1), the_copy_of(2)])
def test_without_memory_for_the_comparison_the_step_is_made_once(fail, monkeypatch):
    twins = Twins()
    twins.times(3, batch())
    with monkeypatch.context() as patched:
        fail(patched)
        assert twins(batch()) == "out_of_memory"
    assert twins.times(2, batch()) == ["out_of_memory"] * 2


def test_a_step_that_runs_out_of_memory_itself_is_not_made_again():
    class Late(Loop):
        fails = False

        def step(self, x):
            output = super().step(x, update=False)
            if self.fails:
                no_memory()
            return output

    loop = Late()
    step = recorded(loop, lambda x: loop.step(x))
    for _ in range(2):
        step(batch())
        loop.optimizer.zero_grad()
    twin = copy.deepcopy(loop.net)
    torch.manual_seed(1)
    Late.fails = True
    with pytest.raises(torch.OutOfMemoryError):
        step(batch())
    torch.manual_seed(1)
    x = batch()
    (twin(x + 0.1 * torch.randn_like(x)) - x).square().mean().backward()
    assert same_bits([p.grad for p in loop.net.parameters()], [p.grad for p in twin.parameters()])


def test_a_gradient_that_cannot_be_kept_is_not_added_twice():
    class Sparse(Loop):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Embedding(9, 4, sparse=True)
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=torch.tensor(0.1), fused=True)

        def step(self, x):
            loss = self.net(x.long().abs()).square().mean()
            loss.backward()
            return loss

    twins = Twins(Sparse)
    twins.eager.everything = twins.recorded.everything = lambda: None
    with pytest.warns(diffgraph.CaptureWarning, match="gradient of layout"):
        twins.times(3, batch())
    assert torch.equal(twins.eager.net.weight.grad.to_dense(), twins.recorded.net.weight.grad.to_dense())


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
@pytest.mark.parametrize("share, route", [(1, "replay"), (0, "verify_failed"), (-1, "verify_failed")])
def test_where_kernels_add_in_no_fixed_order_a_wrong_step_is_still_told_from_noise(share, route, monkeypatch):
    """A replay that makes no step, or one the other way."""
    twins = Twins()
    twins.times(3, batch())
    weights, run = list(twins.recorded.net.parameters()), StepRecording.run

    @torch.no_grad()
    def run_a_share(recording, call):
        before = [w.clone() for w in weights]
        output = run(recording, call)
        for weight, then in zip(weights, before, strict=True):
            weight.copy_(torch.lerp(then, weight, share))
        return output

    monkeypatch.setattr(StepRecording, "run", run_a_share)
    monkeypatch.setattr(CpuPool, "runs_while_recording", False)
    assert twins(batch()) == route


def test_results_are_not_close_where_a_dtype_differs_or_one_lacks_a_gradient():
    gradient = torch.ones(3)
    assert close([gradient, None], [gradient * 1.1, None], tolerance=0.25)
    assert not close([gradient, None], [gradient * 1.5, None], tolerance=0.25)
    assert not close([gradient, None], [None, gradient], tolerance=0.25)
    assert not close([gradient], [gradient.bfloat16()], tolerance=0.25)


# -- what else belongs to training


def test_a_scaler_of_gradients_is_recorded():
    class Scaled(Loop):
        def __init__(self):
            super().__init__()
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=3)

        def step(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (self.net(x) - x).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            return loss

        def everything(self):
            return super().everything(), self.scaler._scale is None or self.scaler._scale.clone()

    twins = Twins(Scaled)
    routes = twins.times(10, batch())
    assert routes[-5:] == ["replay"] * 5
    assert twins(torch.full((4, 8), float("inf"))) == "replay"  # skipped, and the scale is halved
    assert twins(batch(1)) == "replay"


def test_weights_that_are_used_twice_under_autocast():
    """Autocast casts them once, so their gradients are added in bf16."""

    class Twice(Loop):
        def step(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = (self.net(self.net(x)) - x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss

    assert Twins(Twice).times(6, batch())[-3:] == ["replay"] * 3


def test_averaged_weights_are_recorded_or_kept_outside():
    from diffusers.training_utils import EMAModel

    class Averaged(Loop):
        def __init__(self):
            super().__init__()
            self.mean = [p.detach().clone() for p in self.net.parameters()]
            self.outside = EMAModel(self.net.parameters())

        def step(self, x):
            output = super().step(x)
            with torch.no_grad():
                torch._foreach_lerp_(self.mean, list(self.net.parameters()), 0.1)
            return output

        def everything(self):
            self.outside.step(self.net.parameters())
            return super().everything(), [t.clone() for t in (*self.mean, *self.outside.shadow_params)]

    twins = Twins(Averaged)
    assert twins.times(8, batch())[-3:] == ["replay"] * 3


def test_gradient_checkpointing_is_recorded():
    assert Twins(Checkpointed).times(5, batch())[-2:] == ["replay"] * 2


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
def test_dropout_that_is_drawn_twice_stays_eager():
    routes = Twins(lambda: Checkpointed(dropout=0.3)).times(5, batch())
    assert routes[-2:] == ["capture_failed"] * 2


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
@pytest.mark.parametrize("at_the_end", [False, True])
@pytest.mark.parametrize(
    "set_it",
    [
        lambda: torch.manual_seed(1),
        torch.seed,
        lambda: torch.default_generator.manual_seed(1),
        lambda: torch.default_generator.set_state(torch.Generator().manual_seed(1).get_state()),
    ],
    ids=["manual_seed", "seed", "of the generator", "state"],
)
def test_a_step_that_sets_a_generator_stays_eager(set_it, at_the_end):
    class Seeding(Loop):
        def step(self, x):
            if not at_the_end:
                set_it()
            output = super().step(x)
            if at_the_end:
                set_it()
            return output

    step = recorded(Seeding())
    assert [route_of(step, batch())[1] for _ in range(5)][-2:] == ["capture_failed"] * 2


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
def test_a_step_that_sets_all_generators_of_gpus_stays_eager():
    class Seeding(Loop):
        def step(self, x):
            torch.cuda.manual_seed_all(1)
            return super().step(x)

    step = recorded(Seeding())
    assert [route_of(step, batch())[1] for _ in range(5)][-2:] == ["capture_failed"] * 2


def test_a_generator_that_is_set_back_between_draws_is_no_matter():
    class Trying(Loop):
        def step(self, x):
            with torch.random.fork_rng(devices=[]):
                pass
            return super().step(x)

    assert Twins(Trying).times(5, batch()) == SETTLED


def test_batch_norm_keeps_its_statistics():
    class Normed(Loop):
        def __init__(self):
            super().__init__()
            self.net.dropout = torch.nn.BatchNorm1d(16)

        def everything(self):
            return super().everything(), [t.clone() for t in self.net.buffers()]

    assert Twins(Normed).times(6, batch())[-2:] == ["replay"] * 2


def test_accelerates_accumulation_chooses_the_recording():
    from accelerate import Accelerator

    class Accelerated(Loop):
        def __init__(self):
            super().__init__()
            self.accelerator = Accelerator(gradient_accumulation_steps=3, cpu=True)
            self.wrapped = self.accelerator.prepare(self.optimizer)

        def step(self, x):
            loss = (self.net(x) - x).square().mean()
            self.accelerator.backward(loss)
            if self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.net.parameters(), 1.0)
            self.wrapped.step()
            self.wrapped.zero_grad()
            return loss

    states = []
    for is_recorded in (False, True):
        loop = Accelerated()
        step = recorded(loop) if is_recorded else loop.step
        torch.manual_seed(2)
        for i in range(18):
            with loop.accelerator.accumulate(loop.net):
                step(batch(i))
        states.append(loop.everything())
    assert same_bits(*states)
    assert diffgraph.report(step).replays >= 8 and diffgraph.report(step).captures == 3


@pytest.mark.parametrize("where", ["closure", "options"])
def test_numbers_that_the_step_reads_by_name_are_part_of_the_signature(where):
    loop, scale, options = Loop(), 1.0, SimpleNamespace(scale=1.0, unread=0)

    def step_fn(x):
        factor = scale if where == "closure" else options.scale
        loss = factor * (loop.net(x) - x).square().mean()
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    step = recorded(loop, step_fn)
    routes = [route_of(step, batch())[1] for _ in range(5)]
    assert routes == SETTLED
    options.unread += 1
    assert route_of(step, batch())[1] == "replay"
    scale = options.scale = 2.0
    assert [route_of(step, batch())[1] for _ in range(3)] == ["unseen_signature", "capture", "replay"]


def weighted(loop, weight):
    def step_fn(x):
        loss = weight() * (loop.net(x) - x).square().mean()
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss

    return step_fn


@pytest.mark.parametrize("way", ["key", "nested", "computed", "iterated", "attribute"])
def test_numbers_in_a_list_or_dict_that_the_step_reads_are_part_of_the_signature(way):
    weights, loop = {"a": [1.0, 2.0], "b": 1.0}, Loop()
    owner = SimpleNamespace(weights=weights)
    ways = {
        "key": lambda: weights["b"],
        "nested": lambda: weights["a"][0],
        "computed": lambda: weights.get("xb"[1:]),
        "iterated": lambda: sum(weights["a"]),
        "attribute": lambda: owner.weights["b"],
    }
    step = recorded(loop, weighted(loop, ways[way]))
    assert [route_of(step, batch())[1] for _ in range(5)] == SETTLED
    weights["a"][0] = weights["b"] = 100.0
    twin = copy.deepcopy(loop.net)
    losses = [route_of(step, batch()) for _ in range(3)]
    assert [route for _, route in losses] == ["unseen_signature", "capture", "replay"]
    torch.manual_seed(0)
    assert torch.isclose(losses[0][0], ways[way]() * (twin.eval()(batch()) - batch()).square().mean(), rtol=0.5)
    weights["a"][0] = weights["b"] = 1.0
    assert route_of(step, batch())[1] == "replay"


def test_a_tensor_in_a_list_that_the_step_reads_must_stay_the_same_one():
    loop, kept = Loop(), [torch.tensor(1.0)]
    step = recorded(loop, weighted(loop, lambda: kept[0]))
    assert [route_of(step, batch())[1] for _ in range(5)] == SETTLED
    kept[0].fill_(2.0)
    assert route_of(step, batch())[1] == "replay"
    kept[0] = torch.tensor(3.0)
    assert [route_of(step, batch())[1] for _ in range(3)] == ["attributes_changed", "capture", "replay"]


@pytest.mark.parametrize("kind", [list, int])
def test_a_step_that_changes_what_it_reads_at_each_call_is_given_up(kind):
    loop, kept, count = Loop(), [], 0

    def changing():
        nonlocal count
        if kind is list:
            kept.append(0.5)
        else:
            count += 1
        return 1.0

    step = recorded(loop, weighted(loop, changing))
    with pytest.warns(diffgraph.CaptureWarning, match="which a replay would not do"):
        routes = [route_of(step, batch())[1] for _ in range(8)]
    assert routes[-2:] == ["side_effects"] * 2


def test_more_values_than_a_signature_holds_are_not_recorded():
    loop, table = Loop(), list(range(5000))
    step = recorded(loop, weighted(loop, lambda: table[1]))
    assert [route_of(step, batch())[1] for _ in range(3)] == ["unsupported_input"] * 3


def test_attributes_are_found_in_the_bytecode_of_every_python():
    """`f(x, self.args.weight)`, as 3.10, 3.13 and 3.14 compile it; and with so many names that one needs a prefix."""
    codes = [
        [("LOAD_FAST", "x"), ("LOAD_FAST", "self"), ("LOAD_ATTR", "args"), ("LOAD_ATTR", "weight")],
        [("LOAD_FAST_LOAD_FAST", ("x", "self")), ("LOAD_ATTR", "args"), ("LOAD_ATTR", "weight")],
        [("LOAD_FAST_BORROW_LOAD_FAST_BORROW", ("x", "self")), ("LOAD_ATTR", "args"), ("LOAD_ATTR", "weight")],
        [("STORE_FAST_LOAD_FAST", ("x", "self")), ("EXTENDED_ARG", 1), ("LOAD_ATTR", "args"), ("LOAD_ATTR", "weight")],
    ]
    for code in codes:
        instructions = [SimpleNamespace(opname=name, argval=argument) for name, argument in code]
        assert list(paths_of(instructions)) == [("self", ("args",)), ("self", ("args", "weight"))]
    cut = [SimpleNamespace(opname=name, argval=argument) for name, argument in [*codes[0][:2], ("CALL", 0), codes[0][2]]]
    assert list(paths_of(cut)) == []


@pytest.mark.parametrize("way", ["closure", "attribute", "list"])
def test_a_module_that_the_step_reads_and_that_was_not_given_is_refused(way):
    """Its attributes would not be guarded."""
    loop, net = Loop(), Loop().net
    nets = [net]
    used = {"closure": lambda: net, "attribute": lambda: loop.other, "list": lambda: nets[0]}[way]
    loop.other = net

    def step_fn(x):
        return own_step(loop, used()(loop.net(x)))

    with pytest.raises(diffgraph.OptionError, match="a module that it was not recorded with; accepted: it in model="):
        recorded(loop, step_fn)
    recorded(loop, step_fn, model=[loop.net, torch.nn.Sequential(net)])


def test_another_module_than_was_given_runs_eagerly():
    twins = Twins()
    twins.settle()
    twins.both(lambda loop: setattr(loop, "net", copy.deepcopy(loop.net)))
    assert twins.times(2, batch()) == ["unsupported_input"] * 2


def test_paused_runs_eagerly():
    twins = Twins()
    twins.settle()
    with diffgraph.paused(twins.step):
        assert twins(batch()) == "paused"
    assert twins(batch()) == "replay"


def test_twenty_recordings_come_and_go():
    freed = []
    for i in range(20):
        loop = Loop()
        step = recorded(loop)
        for _ in range(4):
            step(batch())
        assert diffgraph.report(step).replays == 1
        freed.append(weakref.ref(loop.net))
        if i % 2:
            step.close()
            assert diffgraph.report(step).memory_bytes == 0
            step(batch())
    del loop, step
    gc.collect()
    assert all(ref() is None for ref in freed)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True), r"lr=torch.tensor\(0.001\)"),
        (lambda net: torch.optim.AdamW(net.parameters(), lr=torch.tensor(1e-3)), "fused=True"),
        (lambda net: torch.optim.SGD(net.parameters(), lr=torch.tensor(1e-3)), "fused=True"),
        (lambda net: net, "optimizer is of type Net; accepted: a torch.optim.Optimizer"),
        (lambda net: [], "no optimizer is given; accepted: optimizer="),
        (lambda net: torch.optim.LBFGS(net.parameters(), lr=torch.tensor(1.0)), "LBFGS runs the loss as often as it needs"),
        (lambda net: torch.optim.AdamW([{"params": net.parameters(), "lr": None}]), "lr=None, a rate that its step counts out"),
    ],
)
def test_an_optimizer_that_reads_on_the_host_is_refused_with_what_to_write_instead(make, message):
    loop = Loop()
    with pytest.raises(diffgraph.DiffgraphError, match=message):
        diffgraph.record_training_step(loop.step, optimizer=make(loop.net), model=loop.net)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": "net"}, "model is of type str; accepted: a torch.nn.Module"),
        ({"model": []}, "no model is given; accepted: model="),
        ({"model": torch.nn.DataParallel(torch.nn.Linear(2, 2))}, "wrapped in DataParallel"),
        ({"model": torch.nn.ReLU()}, "no parameter"),
        ({"max_graphs": 0}, "max_graphs is 0"),
        ({"backend": "full"}, "unknown option 'backend'"),
    ],
)
def test_wrong_options_say_what_is_accepted(options, message):
    loop = Loop()
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.1), fused=True) if "no param" in message else loop.optimizer
    with pytest.raises(diffgraph.DiffgraphError, match=message):
        diffgraph.record_training_step(lambda x: x, **{"optimizer": optimizer, "model": loop.net, **options})


def test_a_step_without_its_optimizer_or_of_no_function_is_told_what_is_missing():
    with pytest.raises(diffgraph.OptionTypeError, match="step_fn is of type int; accepted: a function"):
        diffgraph.record_training_step(3)
    with pytest.raises(diffgraph.OptionError, match="no optimizer is given"):
        diffgraph.record_training_step(lambda x: x, model=torch.nn.Linear(2, 2))


def test_a_step_of_another_optimizer_is_refused():
    loop = Loop()
    other = torch.optim.SGD(loop.net.parameters(), lr=torch.tensor(0.1), fused=True)
    with pytest.raises(diffgraph.OptionError, match="'optimizer', an optimizer that it was not recorded with; accepted: it in"):
        diffgraph.record_training_step(loop.step, optimizer=other, model=loop.net)


def test_a_batch_that_eager_refuses_is_refused_and_nothing_is_changed():
    twins = Twins()
    twins.settle()
    before = twins.recorded.everything()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            twins.step(torch.zeros(4, 9))
    assert same_bits(twins.recorded.everything()[:4], before[:4])
    assert twins(batch()) == "replay"


def test_the_script_trains_alike_with_and_without_recording(capsys, tmp_path):
    words = ["sd3", "--shapes", "32x32", "--steps", "6", "--rank", "2", "--save", str(tmp_path)]
    assert finetune.main(words) == 0
    assert "same loss curve, to the bit" in capsys.readouterr().out
    assert list(tmp_path.glob("*.safetensors"))


def thaw(loop):
    loop.net.first.bias.requires_grad_(True)


def evaluate(loop):
    loop.net.eval()
    with torch.no_grad():
        loop.net(batch().to(loop.device))
    loop.net.train()


def new_rate(loop):
    loop.optimizer.param_groups[0]["lr"].mul_(0.7)


def drop_gradients(loop):
    for p in list(loop.net.parameters())[::2]:
        p.grad = None


CHANGES = [replace_weights, freeze, thaw, reload_optimizer, decay, replace_activation, evaluate, new_rate, drop_gradients]
CHANGES += [use_gradients_of_ones_own]
STEPS = st.tuples(st.sampled_from([4, 6]), st.booleans())


@settings(max_examples=40)
@given(st.lists(st.one_of(STEPS, STEPS, STEPS, st.sampled_from(CHANGES)), max_size=30))
def test_whatever_comes_between_steps_they_are_eagers(acts):
    twins = Twins()
    for act in acts:
        if isinstance(act, tuple):
            twins(batch(rows=act[0]), update=act[1])
        else:
            twins.both(act)
    for loop in (twins.eager, twins.recorded):
        loop.optimizer.zero_grad()
    twins.times(2, batch())


@pytest.mark.slow
def test_two_processes_train_one_lora_recorded():
    """What `accelerate launch` starts on two GPUs, on two CPUs."""
    words = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "pipelines.finetune", "sd3", "--steps", "8"]
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, cwd=ROOT, env=alone)
    assert found.returncode == 0, found.stderr
    assert "same loss curve, to the bit" in found.stdout and "replays 10" in found.stdout


def test_autocast_around_a_step_leaves_it_eager():
    """Its cache of weights that are cast outlives the step, and could not be part of the recording."""

    class Twice(Loop):
        def step(self, x):
            loss = (self.net(self.net(x)) - x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss

    eager, loop = Twice(), Twice()
    step = recorded(loop)
    for i in range(5):
        torch.manual_seed(i)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wanted = eager.step(batch(i))
        torch.manual_seed(i)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = step(batch(i))
        assert same_bits((found, loop.everything()), (wanted.detach(), eager.everything()))
    assert diffgraph.report(step).reasons == {"unsupported_input": 5}


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
@pytest.mark.parametrize("has_sample", [False, True])
def test_a_step_that_cannot_be_recorded_runs_once_per_call(has_sample):
    """Of its Python, nothing could be taken back: a batch that it fetched, say."""

    class Fetching(Loop):
        def step(self, _):
            return super().step(fetched.get())["loss"].item()

    fetched = queue.SimpleQueue()
    for i in range(20):
        fetched.put(batch(i))
    loop = Fetching()
    step = diffgraph.record_training_step(loop.step, *[batch()] * has_sample, optimizer=loop.optimizer, model=loop.net)
    for _ in range(5):
        step(batch())
    assert fetched.qsize() == 20 - 5 - has_sample
    assert diffgraph.report(step).reasons["capture_failed"] >= 2


# -- hooks, which are Python that a replay would not run


def zero_gradients(optimizer, *_):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.zero_()


def scale_gradient(p, factor):
    p.grad.mul_(factor)


def patch_step(loop):
    step = loop.optimizer.step
    loop.optimizer.step = lambda: (zero_gradients(loop.optimizer), step())[1]


def exchange_hook(loop):
    loop.hook.remove()
    loop.hook = loop.optimizer.register_step_pre_hook(zero_gradients)


HOOKS = [
    lambda loop: loop.net.first.weight.register_hook(lambda gradient: gradient * 0),
    lambda loop: loop.net.first.weight.register_post_accumulate_grad_hook(lambda p: scale_gradient(p, 0)),
    lambda loop: loop.net.second.register_full_backward_hook(lambda module, inner, outer: (inner[0] * 0,)),
    lambda loop: loop.net.second.register_full_backward_pre_hook(lambda module, outer: (outer[0] * 0,)),
    lambda loop: torch.nn.modules.module.register_module_full_backward_pre_hook(lambda module, outer: (outer[0] * 0,)),
    lambda loop: loop.optimizer.register_step_pre_hook(zero_gradients),
    lambda loop: register_optimizer_step_pre_hook(zero_gradients),
]


@pytest.mark.parametrize("add", HOOKS)
def test_hooks_of_backward_and_of_optimizers_run_eagerly_until_they_are_gone(add):
    twins = Twins()
    twins.settle()
    handles = []
    try:
        twins.both(lambda loop: handles.append(add(loop)))
        assert twins.times(3, batch()) == ["hooks_changed"] * 3
    finally:
        for handle in handles:
            handle.remove()
    assert twins.times(3, batch()) == ["hooks_changed", "capture", "replay"]


def test_a_hook_that_was_there_from_the_start_is_not_recorded():
    class Counting(Loop):
        def __init__(self):
            super().__init__()
            count = iter(range(100))
            self.net.first.weight.register_post_accumulate_grad_hook(lambda p: scale_gradient(p, next(count)))
            self.hook = self.optimizer.register_step_pre_hook(lambda *_: None)

    twins = Twins(Counting)
    assert twins.times(5, batch()) == ["hooks_changed"] * 5
    twins.both(exchange_hook)
    assert twins.times(2, batch()) == ["hooks_changed"] * 2


def test_a_step_of_the_optimizer_that_is_patched_is_recorded_anew():
    twins = Twins()
    twins.settle()
    twins.both(patch_step)
    assert twins.times(3, batch()) == ["optimizer_changed", "capture", "replay"]


@pytest.mark.parametrize("add", HOOKS[2:5])
def test_a_modules_backward_hooks_run_eagerly(add):
    """Those of parameters autograd calls, and those of the optimizer the loop."""
    made = []

    def loop_fn(loop, i):
        if i == 4:
            made.append(add(loop))
        if i == 7:
            made.pop().remove()
        return _training.step(loop, i)

    eager, found, report = _training.trained(Loop, loop_fn, steps=10)
    assert same_bits(eager, found)
    assert report.reasons["hooks_changed"] >= 3 and report.replays >= 3


# -- optimizers that keep count on the host


class Lookahead(torch.optim.AdamW):
    """As it is mostly written, with the count in the groups; pulled back every third step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for group in self.param_groups:
            group["counter"] = [0]

    @torch.no_grad()
    def step(self):
        super().step()
        for group in self.param_groups:
            group["counter"][0] = (group["counter"][0] + 1) % 3
            if group["counter"][0] == 0:
                torch._foreach_mul_(group["params"], 0.5)


class Counting(torch.optim.AdamW):
    count = 0
    pull = 0.5

    @torch.no_grad()
    def step(self):
        super().step()
        self.count += 1
        if self.count % 3 == 0:
            torch._foreach_mul_(self.param_groups[0]["params"], self.pull)


class Pulled(torch.optim.AdamW):
    pull = 0.5

    @torch.no_grad()
    def step(self):
        super().step()
        torch._foreach_mul_(self.param_groups[0]["params"], self.pull)


def optimized_by(kind):
    class Own(Loop):
        def __init__(self):
            super().__init__()
            self.optimizer = kind(self.net.parameters(), lr=torch.tensor(1e-2), fused=True)

    return Own


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
@pytest.mark.parametrize("kind", [Lookahead, Counting])
def test_an_optimizer_that_keeps_count_on_the_host_stays_eager(kind):
    twins = Twins(optimized_by(kind))
    with pytest.warns(diffgraph.CaptureWarning, match="which a replay would not do"):
        twins.times(8, batch())
    report = diffgraph.report(twins.step)
    assert report.captures == report.replays == 0 and report.reasons["side_effects"] >= 1


def test_a_sample_batch_leaves_the_count_of_an_optimizer_as_it_was():
    loop = optimized_by(Counting)()
    diffgraph.record_training_step(loop.step, batch(), optimizer=loop.optimizer, model=loop.net)
    assert loop.optimizer.count == 0


def test_an_attribute_of_the_optimizer_that_is_set_is_seen():
    twins = Twins(optimized_by(Pulled))
    twins.settle()
    twins.both(lambda loop: setattr(loop.optimizer, "pull", 0.25))
    assert twins.times(3, batch()) == ["optimizer_changed", "capture", "replay"]


# -- where gradients are


class Flat(Loop):
    """All gradients in one buffer, which is scaled between the step that accumulates and the one of the optimizer."""

    def __init__(self):
        super().__init__()
        parameters = list(self.net.parameters())
        self.buffer = torch.zeros(sum(p.numel() for p in parameters))
        for p, part in zip(parameters, self.buffer.split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)

    def everything(self):
        assert all(p.grad.untyped_storage().data_ptr() == self.buffer.data_ptr() for p in self.net.parameters())
        return super().everything(), self.buffer.clone()


def scale_buffer_and_step(loop):
    loop.buffer.mul_(0.5)
    loop.optimizer.step()
    loop.buffer.zero_()


def test_gradients_stay_in_the_tensors_they_came_in():
    twins, routes = Twins(Flat), []
    for i in range(6):
        routes += twins.times(2, batch(i), update=False)
        twins.both(scale_buffer_and_step)
    assert routes[-6:] == ["replay"] * 6


@pytest.mark.parametrize("is_accumulated", [False, True])
def test_gradients_that_are_kept_are_not_overwritten(is_accumulated):
    """The step leaves new ones, or adds to those that are there; somebody keeps them, and starts with none."""

    class Kept(Loop):
        def __init__(self):
            super().__init__()
            self.kept = []

        def step(self, x):
            if not is_accumulated:
                self.optimizer.zero_grad()
            return super().step(x, update=False)

        def everything(self):
            return super().everything(), [[g.clone() for g in gradients] for gradients in self.kept]

    def keep(loop):
        loop.kept.append([p.grad for p in loop.net.parameters()])
        loop.optimizer.step()
        loop.optimizer.zero_grad()

    twins, routes = Twins(Kept), []
    for i in range(6):
        routes += twins.times(2, batch(i))
        twins.both(keep)
    assert routes[-6:] == ["replay"] * 6


def losses_of(make, recorded, change=lambda i: None):
    """Of sixteen steps; `make(model, optimizer)` gives the step function."""
    random.seed(3)
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True)
    step = make(model, optimizer)
    if recorded:
        step = diffgraph.record_training_step(step, optimizer=optimizer, model=model)
    found = []
    for i in range(16):
        change(i)
        found.append(step(torch.ones(4, 8)).item())
    return found


def ended(loss, optimizer):
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def by_pythons_generator(model, optimizer):
    return lambda x: ended(((random.random() > 0.25) * model(x) - 1).square().mean(), optimizer)


def by_a_generator_of_its_own(model, optimizer):
    own = random.Random(5)
    return lambda x: ended(((own.random() > 0.25) * model(x) - 1).square().mean(), optimizer)


def by_an_iterator(model, optimizer):
    keeps = itertools.cycle([1.0, 1.0, 0.0])
    return lambda x: ended((next(keeps) * model(x) - 1).square().mean(), optimizer)


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
@pytest.mark.parametrize("make", [by_pythons_generator, by_a_generator_of_its_own, by_an_iterator])
def test_what_a_step_decides_by_python_is_decided_each_time(make):
    assert losses_of(make, recorded=True) == losses_of(make, recorded=False)


class Weights:
    weight = 1.0


class WithSlots:
    __slots__ = ("weight",)


def of_a_class(model, optimizer):
    return lambda x: ended(Weights.weight * model(x).square().mean(), optimizer)


def of_slots(model, optimizer):
    SLOTTED.weight = 1.0
    return lambda x: ended(SLOTTED.weight * model(x).square().mean(), optimizer)


def of_a_default(model, optimizer):
    DEFAULT.weight = 1.0

    def step(x, config=DEFAULT):
        return ended(config.weight * model(x).square().mean(), optimizer)

    return step


class Base:
    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def loss(self, x):
        return INHERITED.weight * self.model(x).square().mean()


class Derived(Base):
    def step(self, x):
        return ended(self.loss(x), self.optimizer)


def of_an_inherited_method(model, optimizer):
    INHERITED.weight = 1.0
    return Derived(model, optimizer).step


SLOTTED, DEFAULT, INHERITED = WithSlots(), SimpleNamespace(weight=1.0), SimpleNamespace(weight=1.0)
PLACES = {of_a_class: Weights, of_slots: SLOTTED, of_a_default: DEFAULT, of_an_inherited_method: INHERITED}


@pytest.mark.parametrize("make", PLACES)
def test_a_plain_value_that_a_step_reads_is_read_each_time(make):
    def change(i):
        PLACES[make].weight = 1.0 if i < 8 else 3.0

    assert losses_of(make, True, change) == losses_of(make, False, change)


def test_an_object_whose_attributes_are_its_items_is_read_as_any():
    class Items(dict):
        __getattr__ = dict.__getitem__

    config = Items(weight=1.0)

    def make(model, optimizer):
        return lambda x: ended(config["weight"] * model(x).square().mean(), optimizer)

    assert losses_of(make, True) == losses_of(make, False)


model = torch.nn.Linear(2, 2)  # which no step touches, though one has an attribute of this name


def test_an_attribute_that_is_called_like_a_global_is_not_it():
    class Trainer:
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer

        def step(self, x):
            return ended(self.model(x).square().mean(), self.optimizer)

    def make(model, optimizer):
        return Trainer(model, optimizer).step

    assert losses_of(make, True) == losses_of(make, False)


@pytest.mark.parametrize(
    "words, told",
    [
        (["sd3", "--shapes", "64"], "'64'"),
        (["sd3", "--steps", "0"], "--steps is 0; accepted: 1 or more"),
        (["sd3", "--size", "no_such_folder"], "--size no_such_folder cannot be loaded"),
    ],
)
def test_the_script_answers_bad_input_in_a_line(words, told, capsys):
    with pytest.raises(SystemExit):
        finetune.main(words)
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("finetune.py: error:") or ": error: " in last
    assert told in last


COUNT = 0


def test_a_global_that_a_step_counts_is_named():
    global COUNT
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=torch.tensor(1e-2), fused=True)

    def counting(x):
        global COUNT
        COUNT += 1
        loss = net(x).sum() * COUNT
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = diffgraph.record_training_step(counting, optimizer=optimizer, model=net)
    with pytest.warns(diffgraph.CaptureWarning, match=r"it changes test_finetuning\.COUNT, which a replay would not do"):
        for _ in range(8):
            step(torch.ones(2, 4))
