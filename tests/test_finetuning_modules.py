"""A module whose forward and backward are recorded, in a training loop that is not ours: as eager, to the bit."""

from __future__ import annotations

import pytest
import torch
from _training import Loop, LoraLoop, accumulated, batch, delayed, sd3, step, trained  # noqa: F401

import diffgraph
from diffgraph.compare import same_bits

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.*")


def thrown_away(loop, i):
    """A forward whose backward never comes."""
    loop.net(batch(100 + i))
    return step(loop, i)


def asked_for(loop, i):
    """Gradients of the input, and of the weights by name, which stay what they were."""
    x = batch(i).requires_grad_()
    first = torch.autograd.grad((loop.net(x) * x).sum(), [x, *loop.net.parameters()])
    second = torch.autograd.grad((loop.net(x) + x).sum(), [x, *loop.net.parameters()])
    return first, second


@pytest.mark.parametrize("loop_fn", [step, delayed, accumulated, thrown_away, asked_for])
def test_a_loop_of_ones_own_trains_alike(loop_fn):
    eager, recorded, report = trained(Loop, loop_fn)
    assert same_bits(eager, recorded)
    assert report.replays >= 5 and report.eager <= 2 and set(report.reasons) == {"unseen_signature"}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_lora_trains_alike(sd3, checkpointing):  # noqa: F811
    pipe, batches = sd3

    class OwnLoop(LoraLoop):
        def __init__(self):
            super().__init__(pipe)
            if checkpointing:
                self.net.enable_gradient_checkpointing()

    def loop_fn(loop, i):
        return loop.step(*batches[i % 2], update=i % 2 == 1)

    eager, recorded, report = trained(OwnLoop, loop_fn, steps=10)
    assert same_bits(eager, recorded)
    assert report.captures == 2 and report.replays == 6


def test_evaluation_in_between_is_recorded_as_well(sd3):  # noqa: F811
    pipe, batches = sd3
    latents, conditions = batches[0]

    def loop_fn(loop, i):
        with torch.no_grad():
            seen = loop.net(hidden_states=latents, timestep=torch.tensor([500.0]), **conditions)[0]
        return seen, loop.step(latents, conditions)

    eager, recorded, report = trained(lambda: LoraLoop(pipe), loop_fn, steps=6)
    assert same_bits(eager, recorded)
    assert report.captures == 2 and report.replays == 8


def test_ddp_and_no_sync_work_as_they_are(tmp_path):
    """DDP's hooks sit on the parameters, which get their gradients from autograd."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:

        class Parallel(Loop):
            def __init__(self):
                super().__init__()
                self.parallel = torch.nn.parallel.DistributedDataParallel(self.net)
                self.synced = []
                self.parallel.register_comm_hook(self.synced, note)

        def loop_fn(loop, i):
            with loop.parallel.no_sync():
                (loop.parallel(batch(i)) - 1).square().mean().backward()
            assert len(loop.synced) == i
            (loop.parallel(batch(i + 50)) - 1).square().mean().backward()
            assert len(loop.synced) == i + 1
            loop.optimizer.step()
            loop.optimizer.zero_grad()

        eager, recorded, report = trained(Parallel, loop_fn)
        assert same_bits(eager, recorded)
        assert report.replays >= 13
        with pytest.raises(diffgraph.OptionError, match="wrapped in DistributedDataParallel"):
            made = Parallel()
            diffgraph.record_training_step(made.step, optimizer=made.optimizer, model=made.parallel)
    finally:
        torch.distributed.destroy_process_group()


def note(synced, bucket):
    synced.append(bucket.index())
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def test_a_change_while_a_backward_is_to_come_waits_for_it():
    def loop_fn(loop, i):
        loss = (loop.net(batch(i)) - 1).square().mean()
        if i == 5:
            loop.net.first.bias.requires_grad_(False)
            loop.net(batch(i)).sum().backward()  # drops what is recorded
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss.detach()

    eager, recorded, report = trained(Loop, loop_fn, steps=9)
    assert same_bits(eager, recorded)
    assert report.reasons["trainable_changed"] == 1


def test_a_second_backward_is_refused_with_what_to_do():
    loop = Loop()
    diffgraph.accelerate_module(loop.net, training=True)
    for i in range(3):
        loop.step(batch(i))
    loss = loop.net(batch()).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(diffgraph.ReplayError, match="paused"):
        loss.backward()
    with diffgraph.paused(loop.net):
        loss = loop.net(batch()).sum()
        loss.backward(retain_graph=True)
        loss.backward()


def test_weights_that_change_before_the_backward_are_noticed():
    loop = Loop()
    diffgraph.accelerate_module(loop.net, training=True)
    for i in range(4):
        loss = loop.net(batch(i)).sum()
        if i == 3:
            with torch.no_grad():
                loop.net.second.weight.add_(1)
            with pytest.raises(RuntimeError, match="changed in place"):
                loss.backward()
        else:
            loss.backward()


def test_too_many_forwards_in_flight_run_eagerly():
    loop = Loop()
    diffgraph.accelerate_module(loop.net, training=True)
    kept = [loop.net(batch(i)).sum() for i in range(12)]
    assert diffgraph.report(loop.net).reasons == {"unseen_signature": 1, "in_flight": 3}
    for loss in kept:
        loss.backward()
    del kept, loss
    loop.net(batch()).sum().backward()
    assert diffgraph.report(loop.net).eager == 4


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
def test_what_cannot_be_recorded_is_eager():
    class Reader(Loop):
        def __init__(self):
            super().__init__()
            self.net.dropout.forward = lambda x: x * (2 if x.sum().item() > 0 else 1)

    eager, recorded, report = trained(Reader, step)
    assert same_bits(eager, recorded)
    assert report.reasons["capture_failed"] == 7


def test_autocast_is_part_of_the_signature():
    def loop_fn(loop, i):
        with torch.autocast("cpu", torch.bfloat16, enabled=i % 2 == 0):
            loss = (loop.net(batch(i)) - 1).square().mean()
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        return loss.detach()

    eager, recorded, report = trained(Loop, loop_fn)
    assert same_bits(eager, recorded)
    assert report.captures == 2 and report.replays == 4


def test_nothing_is_left_after_restore():
    loop = Loop()
    before = set(vars(loop.net))
    diffgraph.accelerate_module(loop.net, training=True)
    for i in range(4):
        loop.step(batch(i))
    diffgraph.restore_pipeline(loop.net)
    assert set(vars(loop.net)) == before
    with pytest.raises(diffgraph.OptionTypeError, match="True or False"):
        diffgraph.accelerate_module(loop.net, training="yes")
