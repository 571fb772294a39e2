"""A module whose forward and backward are recorded, in a training loop that is not ours: as eager, to the bit."""

from __future__ import annotations

import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from _training import Loop, LoraLoop, accumulated, batch, delayed, sd3, step, trained  # noqa: F401

import diffgraph
from diffgraph.engine.current import RECORDING
from diffgraph.finetuning import module as finetuning_module
from diffgraph.finetuning import pair as finetuning_pair
from diffgraph.values.compare import same_bits

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


def test_threads_get_the_gradients_of_their_own_calls():
    net = Loop().net.eval()
    given = [batch(i) for i in range(8)]
    parameters = list(net.parameters())

    def gradients(x):
        return torch.autograd.grad(net(x).square().sum(), parameters)

    wanted = [gradients(x) for x in given]
    diffgraph.accelerate_module(net, training=True, verify=False)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(gradients, given * 20))
    finally:
        sys.setswitchinterval(interval)
    assert all(same_bits(found[i], wanted[i % 8]) for i in range(len(found)))
    assert diffgraph.report(net).replays > 0


class Normed(Loop):
    """A forward that writes: statistics, and how many batches it has seen."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(self.net, torch.nn.BatchNorm1d(8))

    def loss(self, i):
        torch.manual_seed(i)
        loss = self.net(batch(i)).square().sum()
        loss.backward()
        return loss.detach(), [p.grad for p in self.net.parameters()], [b.clone() for b in self.net.buffers()]


@pytest.mark.parametrize("place", [(finetuning_pair.Pair, "run_backward"), (finetuning_module, "same_bits")])
def test_memory_that_runs_out_while_a_replay_is_verified_costs_nothing_but_the_recording(place, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    eager, recorded = Normed(), Normed()
    diffgraph.accelerate_module(recorded.net, training=True)
    for i in range(4):
        with monkeypatch.context() as patched:
            if i == 2:
                patched.setattr(*place, full)
            assert same_bits(recorded.loss(i), eager.loss(i))
    report = diffgraph.report(recorded.net)
    assert report.captures == 1 and report.reasons == {"unseen_signature": 1, "out_of_memory": 2}


@pytest.mark.parametrize(
    "option",
    [
        dict(backend="eager"),
        dict(backend="full"),
        dict(capture="startup"),
        dict(compile_blocks=True),
        dict(collectives="break"),
        dict(breaks=["first"]),
    ],
)
def test_what_training_would_not_heed_is_refused(option):
    net = Loop().net
    with pytest.raises(diffgraph.OptionError, match=rf"accepted with it: {next(iter(option))}="):
        diffgraph.accelerate_module(net, training=True, **option)
    with pytest.raises(diffgraph.NotAcceleratedError):
        diffgraph.report(net)


def held_by(**options):
    """After three forwards in flight at a time, and evaluation at two batch sizes: the report, and that all was right."""
    loops = Loop(), Loop()
    diffgraph.accelerate_module(loops[1].net, training=True, poison=True, **options)
    for i in range(6):
        losses = [[(loop.net.eval()(batch(i + j)) - 1).square().mean() for j in range(3)] for loop in loops]
        assert same_bits(*losses)
        for loss in (*losses[0], *losses[1]):
            loss.backward()
        with torch.no_grad():
            assert same_bits(*(loop.net(batch(i, rows=4 + i % 2)) for loop in loops))
    assert same_bits(*([p.grad for p in loop.net.parameters()] for loop in loops))
    return diffgraph.report(loops[1].net)


def test_the_memory_limit_is_for_all_forwards_in_flight_and_evaluation_together():
    free = held_by()
    assert sum(s.captured for s in free.signatures) == 5
    one = max(s.memory_bytes for s in free.signatures)
    tight = held_by(memory_limit=one + one // 2)
    assert 0 < tight.memory_bytes <= one + one // 2
    assert tight.replays > 0
    few = held_by(max_graphs=2)
    assert sum(s.captured for s in few.signatures) <= 2


def test_a_module_of_an_accelerated_pipeline_is_not_trained_before_it_is_restored(sd3):  # noqa: F811
    pipe, _ = sd3
    net = pipe.transformer
    diffgraph.accelerate_pipeline(pipe)
    try:
        with pytest.raises(diffgraph.OptionError, match="training=True"):
            diffgraph.accelerate_module(net, training=True)
    finally:
        diffgraph.restore_pipeline(pipe)
    diffgraph.accelerate_module(net, training=True)
    diffgraph.restore_pipeline(net)
    with pytest.raises(diffgraph.OptionTypeError, match="unknown option 'training'"):
        diffgraph.accelerate_pipeline(pipe, training=True)


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
@pytest.mark.parametrize("is_asked", [False, True])
def test_what_failed_is_tried_again_when_its_cause_is_gone(is_asked):
    loop = Loop()
    reads = [True]
    loop.net.dropout.forward = lambda x: x * (2 if reads and x.sum().item() > 0 else 1)
    diffgraph.accelerate_module(loop.net, training=True)
    for i in range(4):
        loop.step(batch(i))
    assert diffgraph.report(loop.net).reasons["capture_failed"] == 3
    if is_asked:
        reads.clear()
        diffgraph.capture(loop.net)
    else:
        del loop.net.dropout.forward
    for i in range(4):
        loop.step(batch(i))
    assert diffgraph.report(loop.net).replays == 2


def test_parameters_have_stand_ins_for_one_recording_at_a_time(monkeypatch):
    """Modules may share parameters."""
    loop, free = Loop(), []
    original = finetuning_pair.as_new_leaves

    def placed(*args):
        other = threading.Thread(target=lambda: free.append(RECORDING.acquire(blocking=False)))
        other.start()
        other.join()
        return original(*args)

    monkeypatch.setattr(finetuning_pair, "as_new_leaves", placed)
    diffgraph.accelerate_module(loop.net, training=True)
    for i in range(2):
        loop.step(batch(i))
    assert free == [False]


@pytest.mark.parametrize("tool", [diffgraph.restore_pipeline, diffgraph.capture, diffgraph.explain])
def test_what_is_for_pipelines_says_what_is_for_training_steps(tool):
    loop = Loop()
    made = diffgraph.record_training_step(loop.step, optimizer=loop.optimizer, model=loop.net)
    with pytest.raises(diffgraph.NotAcceleratedError, match=r"step\.close\(\)"):
        tool(made)


def test_gradients_of_gradients_are_refused_and_not_dropped():
    """The penalty of a WGAN-GP, say."""
    loop = Loop()

    def penalty():
        x = batch().requires_grad_()
        (gradient,) = torch.autograd.grad(loop.net(x).sum(), x, create_graph=True)
        return (gradient.norm(dim=1) - 1).square().mean()

    diffgraph.accelerate_module(loop.net, training=True)
    for i in range(4):
        loop.net(batch(i).requires_grad_()).sum().backward()
    with pytest.raises(diffgraph.ReplayError, match=r"create_graph=True.*accepted: `with diffgraph.paused\(module\)`"):
        penalty()
    with diffgraph.paused(loop.net):
        penalty().backward()
    loop.net(batch().requires_grad_()).sum().backward()
    assert diffgraph.report(loop.net).replays == 4


class Heads(Loop):
    """Three outputs, and a layer that none of them uses."""

    def __init__(self):
        super().__init__()
        self.net = TwoHeads()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=torch.tensor(1e-2), fused=True)


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.two, self.idle = (torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        hidden = torch.relu(self.trunk(x))
        return self.one(hidden), self.two(hidden), self.trunk.bias.square()


@pytest.mark.parametrize("used", [[0], [1], [2], [0, 2], [0, 1, 2]])
def test_what_the_loss_does_not_use_gives_no_gradients(used):
    """Zeros are none: an optimizer moves and decays what has them."""

    def loop_fn(loop, i):
        loop.optimizer.zero_grad()
        outputs = loop.net(batch(i))
        sum(outputs[at].square().mean() for at in used).backward()
        loop.optimizer.step()
        return [p.grad is None for p in loop.net.parameters()]

    eager, recorded, report = trained(Heads, loop_fn)
    assert eager[0] == recorded[0] and same_bits(eager, recorded)
    assert report.replays == 6


def test_an_output_whose_gradient_ends_before_the_module_leaves_it_without():
    class Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    def loop_fn(loop, i):
        loop.optimizer.zero_grad()
        Ends.apply(loop.net(batch(i))[0]).sum().backward()
        return [p.grad is None for p in loop.net.parameters()]

    eager, recorded, _ = trained(Heads, loop_fn)
    assert recorded[0] == eager[0] == [[True] * 8] * 8


def chained(loop, i):
    """Gradients through several forwards, each of what the one before it gave."""
    x = y = batch(i)
    for _ in range(3):
        y = y + 0.1 * loop.net(y)
    loop.optimizer.zero_grad()
    loss = (y - x).square().mean()
    loss.backward()
    loop.optimizer.step()
    return loss.detach()


def test_forwards_in_a_chain_train_alike():
    eager, recorded, report = trained(Loop, chained)
    assert same_bits(eager, recorded)
    assert report.captures == 4 and report.replays > 15
    assert set(report.reasons) == {"unseen_signature"}


def late(loop, i):
    """The optimizer steps between a forward and its backward."""
    loss = (loop.net(batch(i)) - 1).square().mean()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loss.backward()
    return loss.detach()


class Biases(Loop):
    """Backward reads no bias, and may come after they have changed."""

    def __init__(self):
        super().__init__()
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_("bias" in name)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)  # counts its writes; what is fused does not


def test_only_what_backward_reads_may_not_change_before_it():
    eager, recorded, report = trained(Biases, late)
    assert same_bits(eager, recorded)
    assert report.replays == 6

    def frozen_changed(loop, i):
        loss = loop.net(batch(i)).sum()
        with torch.no_grad():
            loop.net.second.weight.mul_(2)  # wants no gradients, and backward reads it
        with pytest.raises(RuntimeError, match=r"inplace operation|changed in place"):
            loss.backward()

    _, _, report = trained(Biases, frozen_changed)
    assert report.replays == 6


@pytest.mark.filterwarnings("ignore::diffgraph.CaptureWarning")
@pytest.mark.parametrize("seed", [1, 2])
def test_layers_that_python_drops_are_dropped_each_time(seed):
    class Drops(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x):
            x = self.a(x)
            return x + self.b(x) if random.random() > 0.2 else x

    def losses(recorded):
        torch.manual_seed(0)
        random.seed(seed)
        net = Drops()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
        if recorded:
            diffgraph.accelerate_module(net, training=True)
        found = []
        for _ in range(12):
            loss = net(torch.ones(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(True) == losses(False)


def test_a_buffer_that_backward_reads_is_not_to_be_written_before_it():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x):
            return self.layer(x) * self.scale

    for recorded in (False, True):
        net = Scaled()
        if recorded:
            diffgraph.accelerate_module(net, training=True)
        for _ in range(5):
            net(torch.ones(4, 8)).sum().backward()
        loss = net(torch.ones(4, 8)).sum()
        net.scale.mul_(100)
        with pytest.raises(RuntimeError, match=r"inplace operation|changed in place"):
            loss.backward()
