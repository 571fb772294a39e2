"""Recorded training steps on a GPU: with kernels that add in a fixed order, they are eager's to the bit."""

from __future__ import annotations

import copy
import gc
import os

import pytest
import torch
from _training import (  # noqa: F401
    Checkpointed,
    Loop,
    LoraLoop,
    Twins,
    accumulated,
    batch,
    delayed,
    recorded,
    sd3,
    step,
    trained,
)

import diffgraph
from diffgraph.values.compare import same_bits
from diffgraph.values.tensors import map_tensors

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once, before cuBLAS is used

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def fixed_order():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class OnGpu(Loop):
    """The rate on the CPU: a break, which reads it anew at each step."""

    device = DEVICE


class RateOnGpu(OnGpu):
    """Nothing but one segment."""

    def __init__(self):
        super().__init__()
        rate = torch.tensor(1e-2, device=self.device)
        fused = self.device == "cpu"
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=rate, fused=fused, capturable=not fused)


class LoraOnGpu(LoraLoop):
    device = DEVICE


def test_a_hundred_steps_of_a_lora_are_those_of_eager(sd3):  # noqa: F811
    pipe, batches = sd3
    twins = Twins(lambda: LoraOnGpu(pipe))
    for i in range(100):
        for micro in range(2):
            route = twins(*batches[i // 2 % 2], update=micro == 1)
        twins.both(lambda loop: loop.scheduler.step())
    assert route == "replay"
    assert diffgraph.report(twins.step).replays >= 190


def test_the_noise_of_kernels_without_a_fixed_order_is_no_difference(sd3):  # noqa: F811
    torch.use_deterministic_algorithms(False)
    pipe, batches = sd3
    loop = LoraOnGpu(pipe)
    made = recorded(loop)
    latents, conditions = map_tensors(lambda t: t.to(DEVICE), batches[0])
    for i in range(12):
        made(latents, conditions, update=i % 2 == 1)
    assert diffgraph.report(made).replays >= 6 and "verify_failed" not in diffgraph.report(made).reasons


@pytest.mark.parametrize("make, breaks", [(OnGpu, 1), (RateOnGpu, 0)])
def test_the_rate_is_read_anew(make, breaks):
    twins = Twins(make)
    twins.both(lambda loop: setattr(loop, "scheduler", torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.8)))
    for _ in range(10):
        route = twins(batch())
        twins.both(lambda loop: loop.scheduler.step())
    assert route == "replay"
    assert DEVICE == "cpu" or diffgraph.report(twins.step).signatures[0].breaks == breaks


def test_two_shapes_share_a_pool():
    twins = Twins(RateOnGpu)
    for i in range(20):
        route = twins(batch(i, rows=4 + 2 * (i % 2)), update=i % 4 > 1)
    assert route == "replay"


class CheckpointedOnGpu(Checkpointed):
    device = DEVICE


def test_gradient_checkpointing_is_recorded():
    assert Twins(CheckpointedOnGpu).times(5, batch())[-2:] == ["replay"] * 2


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
def test_dropout_that_is_drawn_twice_stays_eager():
    assert Twins(lambda: CheckpointedOnGpu(dropout=0.3)).times(5, batch())[-2:] == ["capture_failed"] * 2


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
def test_a_step_that_fails_to_be_recorded_is_made_once_and_eagerly():
    class Reading(RateOnGpu):
        def step(self, x):
            output = super().step(x)
            self.net.first.bias.data.add_(output["loss"].item())
            return output

    twins = Twins(Reading)
    assert twins.times(6, batch())[-2:] == ["capture_failed"] * 2
    healthy = Twins(RateOnGpu)  # the device is as usable as before
    healthy.settle()


@diffgraph.eager_on_graph
def looked_at(weight):
    return None


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
def test_a_step_that_fails_after_its_first_segment_has_run_is_undone():
    class Late(RateOnGpu):
        def step(self, x):
            output = super().step(x)
            looked_at(self.net.first.bias)
            self.net.first.bias.data.add_(1)
            looked_at(self.net.first.bias)
            self.net.first.bias.data.add_(output["loss"].item())
            return output

    twins = Twins(Late)
    assert twins.times(6, batch())[-2:] == ["capture_failed"] * 2


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
@pytest.mark.parametrize(
    "place, name, reason",
    [
        (torch, "manual_seed", "side_effects"),  # it sets the host's, too, which is what is seen first
        (torch.cuda, "manual_seed", "capture_failed"),
        (torch.cuda, "manual_seed_all", "capture_failed"),
    ],
)
def test_a_step_that_sets_a_generator_stays_eager(place, name, reason):
    class Seeding(RateOnGpu):
        def step(self, x):
            getattr(place, name)(1)
            return super().step(x)

    assert Twins(Seeding).times(5, batch())[-2:] == [reason] * 2


def test_recording_a_module_leaves_its_statistics_as_they_were():
    loop = RateOnGpu()
    loop.net.dropout = torch.nn.BatchNorm1d(16).to(DEVICE)
    eager = copy.deepcopy(loop.net)
    diffgraph.accelerate_module(loop.net, training=True)
    for i in range(6):
        for net in (loop.net, eager):
            net(batch(i).to(DEVICE)).square().mean().backward()
        assert same_bits(list(loop.net.buffers()), list(eager.buffers()))
    assert diffgraph.report(loop.net).replays >= 4


def test_a_scaler_in_half_precision():
    class Scaled(RateOnGpu):
        def __init__(self):
            super().__init__()
            rate = torch.tensor(1e-2, device=self.device)
            self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=rate, fused=True, capturable=self.device == "cuda")
            self.scaler = torch.amp.GradScaler(self.device, growth_interval=3)

        def step(self, x):
            with torch.autocast(self.device, torch.float16 if self.device == "cuda" else torch.bfloat16):
                loss = (self.net(x) - x).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            return loss

    twins = Twins(Scaled)
    assert twins.times(10, batch())[-4:] == ["replay"] * 4
    assert twins(torch.full((4, 8), float("inf"))) == "replay"
    assert twins(batch(1)) == "replay"


def test_a_sample_batch_leaves_nothing_behind():
    loop = OnGpu()
    loop.step(batch().to(DEVICE))
    before = loop.everything()
    diffgraph.record_training_step(loop.step, batch().to(DEVICE), optimizer=loop.optimizer, model=loop.net)
    assert same_bits(loop.everything(), before)


@pytest.mark.parametrize("loop_fn", [step, delayed, accumulated])
@pytest.mark.parametrize("make", [OnGpu, RateOnGpu])
def test_a_loop_of_ones_own_trains_alike(make, loop_fn):
    eager, found, report = trained(make, loop_fn)
    assert same_bits(eager, found)
    assert report.replays >= 5


def test_a_lora_of_ones_own_loop_trains_alike(sd3):  # noqa: F811
    pipe, batches = sd3

    def loop_fn(loop, i):
        latents, conditions = batches[i % 2]
        conditions = {name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in conditions.items()}
        return loop.step(latents.to(DEVICE), conditions, update=i % 2 == 1)

    eager, found, report = trained(lambda: LoraOnGpu(pipe), loop_fn, steps=20)
    assert same_bits(eager, found)
    assert report.replays == 16


def test_twenty_recordings_come_and_go_and_another_model_trains():
    held = []
    for i in range(20):
        loop = RateOnGpu()
        made = recorded(loop)
        for j in range(6):
            made(batch(j).to(DEVICE))
        assert diffgraph.report(made).replays == 3
        if i % 2:
            made.close()
        other = OnGpu()
        diffgraph.accelerate_module(other.net, training=True)
        for j in range(6):
            other.step(batch(j).to(DEVICE))
        if i % 3:
            diffgraph.restore_pipeline(other.net)
        del loop, made, other
        gc.collect()
        if DEVICE == "cuda":
            torch.cuda.empty_cache()  # the allocator keeps the pools of dead graphs until somebody needs their memory
        held.append(torch.cuda.memory_reserved() if DEVICE == "cuda" else 0)
    assert held[-1] <= held[4] + 64 * 2**20
