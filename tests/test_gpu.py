"""What only CUDA can show. `make test-gpu` runs it."""

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch

import diffgraph
import pipelines
from diffgraph.values.compare import same_bits

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda():
    if not torch.cuda.is_available():
        pytest.fail("the gpu tests need a CUDA device")
    torch.manual_seed(0)
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def slow_is_fine(request, monkeypatch):
    """Three kernels are faster without us; these tests ask for more than speed."""
    if "demoted" not in request.node.name:
        monkeypatch.setattr("diffgraph.recording.verification.MAX_SLOWER", float("inf"))


def test_a_forward_too_small_to_gain_is_demoted(cuda):
    module = diffgraph.accelerate_module(torch.nn.Identity().to(cuda))
    x = torch.randn(8, device=cuda)
    module.weight = torch.nn.Parameter(torch.ones(1, device=cuda))
    for _ in range(4):
        assert torch.equal(call(module, x), x)
    report = diffgraph.report(module)
    assert report.reasons["not_faster"] == 2
    assert report.memory_bytes == 0


class Net(torch.nn.Module):
    """Two linear layers with attention between them."""

    def __init__(self, dim=64):
        super().__init__()
        self.a, self.b = torch.nn.Linear(dim, dim), torch.nn.Linear(dim, dim)

    def forward(self, x):
        h = self.a(x)
        q = h.reshape(*h.shape[:-1], 4, -1).transpose(1, 2)
        h = torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(h.shape)
        return self.b(torch.nn.functional.gelu(h)) + x


def net(cuda, **options):
    return diffgraph.accelerate_module(Net().to(cuda).eval(), **options)


def eager(module, *args):
    with diffgraph.paused(module), torch.no_grad():
        return module(*args)


def call(module, *args):
    with torch.no_grad():
        return module(*args)


def reserved():
    """Memory that is really in use, without the workspaces that cuBLAS keeps."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_a_replay_reads_new_inputs_and_runs_breaks_on_real_data(cuda):
    x = torch.randn(8, 64, device=cuda)
    layer = torch.nn.Linear(64, 64).to(cuda)
    seen = []

    @diffgraph.eager_on_graph
    def middle(nested):
        seen.append(nested["h"].sum().item())
        return {"h": [nested["h"] * 2, None], "k": 3}

    def forward():
        out = middle({"h": layer(x).relu()})
        return out["h"][0] + out["k"]

    with torch.no_grad():
        expected = forward()
        sequence = diffgraph.GraphSequence(device=cuda)
        with diffgraph.breakable_graph(sequence):
            y = forward()
        assert torch.equal(y, expected)
        assert seen[0] == seen[1]
        assert (sequence.segments, sequence.breaks) == (2, 1)
        for _ in range(3):
            x.normal_()
            sequence.replay()
            assert torch.equal(y, forward())
            assert seen[-2] == seen[-1]


def test_no_break_gives_one_plain_graph(cuda):
    x = torch.randn(8, 64, device=cuda)
    sequence = diffgraph.GraphSequence(device=cuda)
    with diffgraph.breakable_graph(sequence):
        y = x * 2
    x.fill_(4)
    sequence.replay()
    assert (sequence.segments, sequence.breaks) == (1, 0)
    assert torch.equal(y, torch.full_like(x, 8))


def test_ops_that_cannot_be_recorded_become_breaks(cuda):
    x = torch.randn(64, device=cuda)

    def forward():
        table = torch.tensor([1.0, 2.0, 3.0, 4.0], device=cuda)
        positive = x[x > 0].sum()
        y = x * table.repeat(16)
        y[y < 0] = 0.5
        return y + positive + float(table.sum().item()) + sum((x[:2] > 1e9).tolist())

    sequence = diffgraph.GraphSequence(device=cuda)
    with diffgraph.breakable_graph(sequence):
        y = forward()
    assert torch.equal(y, forward())
    assert sequence.breaks >= 5
    x.mul_(1.5)
    sequence.replay()
    assert torch.equal(y, forward())
    x[0] = 2e9
    with pytest.raises(diffgraph.HostValueChanged):
        sequence.replay()


@pytest.mark.parametrize("fault", ["python", "sync", "break"])
def test_a_failed_capture_leaves_the_device_usable(cuda, fault):
    x = torch.randn(16, device=cuda)

    @diffgraph.eager_on_graph
    def broken(t):
        raise ValueError("in the break")

    def forward():
        y = torch.randn(16, device=cuda) + x
        if fault == "python":
            raise ValueError("in the forward")
        if fault == "break":
            broken(y)
        torch.cuda.synchronize()  # not allowed while capturing: invalidates the capture
        return y

    state = torch.cuda.get_rng_state()
    sequence = diffgraph.GraphSequence(device=cuda)
    with pytest.raises((ValueError, RuntimeError)), diffgraph.breakable_graph(sequence):
        forward()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    torch.randn(4, device=cuda)
    torch.cuda.synchronize()
    with diffgraph.breakable_graph(sequence):
        y = torch.randn(16, device=cuda) * 0 + x
    sequence.replay()
    assert torch.equal(y, x)


def test_failed_captures_leave_no_memory_behind(cuda):
    x = torch.randn(1024, 1024, device=cuda)
    sequence = diffgraph.GraphSequence(device=cuda)

    def fail():
        with pytest.raises(RuntimeError), diffgraph.breakable_graph(sequence):
            y = x * 2
            torch.cuda.synchronize()
            y.sum()

    fail()
    before = reserved()
    for _ in range(5):
        fail()
    assert reserved() <= before
    hog = torch.empty(256 * 2**20, device=cuda, dtype=torch.uint8)
    del hog
    assert reserved() <= before  # the allocator does not believe that a capture is under way


def test_an_older_recording_draws_as_eager_does_after_another_capture_failed(cuda):
    x = torch.ones(4096, device=cuda)
    older = diffgraph.GraphSequence(device=cuda)
    with diffgraph.breakable_graph(older):
        y = torch.nn.functional.dropout(x, 0.5)
    with pytest.raises(RuntimeError), diffgraph.breakable_graph(diffgraph.GraphSequence(device=cuda)):
        torch.nn.functional.dropout(x, 0.5)
        torch.cuda.synchronize()
    for seed in (3, 4):
        torch.manual_seed(seed)
        older.replay()
        torch.manual_seed(seed)
        assert torch.equal(y, torch.nn.functional.dropout(x, 0.5))


def test_another_pipe_may_be_restored_while_a_capture_is_open(cuda):
    other = net(cuda)
    x = torch.randn(2, 16, 64, device=cuda)
    for _ in range(3):
        call(other, x)
    failures = []

    def restore():
        try:
            diffgraph.restore_pipeline(other)
        except Exception as error:
            failures.append(error)

    def forward():
        y = x * 2
        thread = threading.Thread(target=restore)
        thread.start()
        thread.join()
        return y + 1

    sequence = diffgraph.GraphSequence(device=cuda)
    with diffgraph.breakable_graph(sequence):
        y = forward()
    x.normal_()
    sequence.replay()
    assert torch.equal(y, x * 2 + 1)
    assert not failures


def test_a_memory_limit_holds(cuda):
    x = torch.randn(16, 1024, 64, device=cuda)
    module = net(cuda, memory_limit="1MiB")
    want = eager(module, x)
    assert all(torch.equal(call(module, x), want) for _ in range(4))
    report = diffgraph.report(module)
    assert (report.memory_bytes, report.signatures[0].reason) == (0, "out_of_memory")
    roomy = net(cuda, memory_limit="1GiB")
    for _ in range(4):
        call(roomy, x)
    assert 0 < diffgraph.report(roomy).memory_bytes <= 2**30
    assert diffgraph.report(roomy).replays == 2


def test_start_up_records_what_inference_mode_asks_for(cuda):
    pipe = pipelines.build("flux", "tiny").to(cuda)
    pipe.set_progress_bar_config(disable=True)
    diffgraph.accelerate_pipeline(pipe, capture_shapes="64x64")
    before = diffgraph.report(pipe)
    with torch.inference_mode():
        pipe("a red cat", height=64, width=64, num_inference_steps=3, output_type="latent")
    after = diffgraph.report(pipe)
    assert (after.eager, after.captures) == (before.eager, before.captures)
    assert after.replays == before.replays + 3


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: (x.t(), x[:, ::2], x),
        lambda x: {"a": x + 1, "b": [None, 3, (x * 2,)]},
    ],
    ids=["conjugate", "negated", "views", "nested"],
)
def test_outputs_of_every_kind(cuda, forward):
    class Any(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return forward(x * self.weight)

    module = diffgraph.accelerate_module(Any().to(cuda).eval())
    for _ in range(5):
        x = torch.randn(8, 16, device=cuda)
        assert same_bits(call(module, x), eager(module, x))
    assert diffgraph.report(module).replays == 3


def test_a_staging_buffer_is_copied_as_it_was_and_the_models_own_as_it_is(cuda):
    table = torch.arange(4.0)

    def forward():
        staging = torch.empty(4)
        staging.fill_(1)
        a = staging.to(cuda)
        staging.fill_(2)
        return a + staging.to(cuda) * 10 + table.to(cuda) * 100

    sequence = diffgraph.GraphSequence(device=cuda)
    with diffgraph.breakable_graph(sequence):
        y = forward()
    for _ in range(2):
        assert torch.equal(y, forward())
        sequence.replay()
        table.add_(1)
        sequence.replay()
    with pytest.raises(diffgraph.CaptureError, match="outlives"), diffgraph.breakable_graph(diffgraph.GraphSequence()):
        table.add_(1)
        table.to(cuda)


def test_dropout_draws_the_same_numbers_as_eager(cuda):
    x = torch.ones(4096, device=cuda)
    sequence = diffgraph.GraphSequence(device=cuda)
    with diffgraph.breakable_graph(sequence):
        y = torch.nn.functional.dropout(x, 0.5)
    for seed in (1, 2):
        torch.manual_seed(seed)
        sequence.replay()
        sequence.replay()
        torch.manual_seed(seed)
        torch.nn.functional.dropout(x, 0.5)
        assert torch.equal(y, torch.nn.functional.dropout(x, 0.5))


@pytest.mark.parametrize("backend", ["breakable", "full", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_replays_the_bits_of_eager(cuda, backend, dtype):
    module = diffgraph.accelerate_module(Net().to(cuda, dtype).eval(), backend=backend)
    for _ in range(5):
        x = torch.randn(2, 16, 64, device=cuda, dtype=dtype)
        assert same_bits(call(module, x), eager(module, x))
    report = diffgraph.report(module)
    assert (report.captures, report.replays) == (1, 3)
    assert report.signatures[0].breaks == (1 if backend == "breakable" else 0)


@pytest.mark.parametrize("family", pipelines.FAMILIES)
@pytest.mark.parametrize("backend", ["breakable", "full"])
def test_every_family_keeps_its_pixels(cuda, family, backend):
    pipe = pipelines.build(family, "tiny").to(cuda)
    pipe.set_progress_bar_config(disable=True)

    def latents(prompt, width, seed):
        frames = {"num_frames": 5} if family == "wan" else {}
        generator = torch.Generator("cuda").manual_seed(seed)
        call = dict(height=64, width=width, num_inference_steps=4, generator=generator, output_type="latent", **frames)
        return pipe(prompt, **call)[0].clone()

    cases = [("a red cat", 64, 0), ("a big dog", 64, 1), ("a red cat", 96, 2), ("a big dog", 96, 3)]
    expected = [latents(*case) for case in cases]
    diffgraph.accelerate_pipeline(pipe, backend=backend)
    for case, want in zip(cases, expected, strict=True):
        assert torch.equal(latents(*case), want)
    report = diffgraph.report(pipe)
    if backend == "breakable" or report.captures:
        assert report.replays > 0
    assert "verify_failed" not in report.reasons
    diffgraph.restore_pipeline(pipe)


def test_threads_and_streams_share_one_pipe(cuda):
    module = net(cuda)
    inputs = [torch.randn(2, n, 64, device=cuda) for n in (16, 32) for _ in range(2)]
    expected = [eager(module, x) for x in inputs]
    for x in inputs:
        call(module, x)
    torch.cuda.synchronize()
    wrong = []

    def work(x, want):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                if not torch.equal(call(module, x), want):
                    wrong.append(x.shape)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(inputs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert diffgraph.report(module).replays > 150


def test_other_threads_work_while_a_capture_is_open(cuda):
    stop, errors, done = threading.Event(), [], [0]
    generator = torch.Generator(cuda).manual_seed(1)

    def disturb():
        try:
            while not stop.is_set():
                event = torch.cuda.Event()
                event.record()
                event.query()
                torch.randn(1024, 1024, device=cuda, generator=generator) @ torch.ones(1024, 1024, device=cuda)
                torch.cuda.current_stream().synchronize()
                done[0] += 1
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        for n in range(8, 40, 8):
            module = net(cuda)
            x = torch.randn(2, n, 64, device=cuda)
            want = eager(module, x)
            assert all(torch.equal(call(module, x), want) for _ in range(4))
            assert diffgraph.report(module).replays == 2
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert done[0] > 0


def test_other_threads_draw_from_the_default_generator_while_a_segment_is_open(cuda):
    x = torch.randn(16, device=cuda)
    drawn = []

    def draw():
        drawn.append(torch.randn(16, device=cuda))

    def forward():
        y = torch.nn.functional.dropout(x * 2, 0.5)
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
        return y + 1

    sequence = diffgraph.GraphSequence(device=cuda)
    with diffgraph.breakable_graph(sequence):
        forward()
    assert len(drawn) == 1
    later = torch.randn(16, device=cuda)
    assert not torch.equal(later, drawn[0])


def test_eviction_leaves_the_survivors_right_and_memory_flat(cuda):
    module = net(cuda, max_graphs=2)
    shapes = [(2, n, 64) for n in (64, 32, 16)]

    def round_of_calls():
        for shape in shapes:
            x = torch.randn(shape, device=cuda)
            for _ in range(3):
                assert torch.equal(call(module, x), eager(module, x))

    for _ in range(3):
        round_of_calls()
    torch.cuda.synchronize()
    flat = torch.cuda.memory_allocated()
    for _ in range(5):
        round_of_calls()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= flat + 2**20  # which two signatures are the survivors differs
    assert sum(s.captured for s in diffgraph.report(module).signatures) <= 2


def test_memory_comes_back_when_restored(cuda):
    before = reserved()
    module = net(cuda)
    x = torch.randn(64, 1024, 64, device=cuda)
    for _ in range(3):
        call(module, x)
    assert diffgraph.report(module).memory_bytes > 0
    diffgraph.restore_pipeline(module)
    del module, x
    assert reserved() <= before


def test_weights_moved_to_the_cpu_and_back_are_seen(cuda):
    module = net(cuda)
    x = torch.randn(2, 16, 64, device=cuda)
    for _ in range(3):
        call(module, x)
    module.cpu()
    hog = [torch.full((64, 64), float("nan"), device=cuda) for _ in range(64)]
    module.to(cuda)
    want = eager(module, x)
    assert all(torch.equal(call(module, x), want) for _ in range(4))
    assert diffgraph.report(module).reasons["weights_changed"] == 1
    del hog


def test_a_cache_that_the_model_keeps_is_never_overwritten(cuda):
    class OneSlot(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)
            self.slot = {}

        def forward(self, x):
            if x.shape[1] not in self.slot:
                self.slot.clear()
                self.slot[x.shape[1]] = torch.arange(x.shape[1], device=x.device)[:, None] * 0.1
            return self.layer(x) + self.slot[x.shape[1]]

    module = diffgraph.accelerate_module(OneSlot().to(cuda).eval())
    inputs = [torch.randn(2, n, 64, device=cuda) for n in (16, 32)]
    expected = [eager(module, x) for x in inputs]
    for _ in range(6):
        for x, want in zip(inputs, expected, strict=True):
            assert torch.equal(call(module, x), want)


def test_no_graph_is_opened_inside_somebody_elses_capture(cuda):
    module = net(cuda)
    x = torch.randn(2, 16, 64, device=cuda)
    for _ in range(3):
        want = call(module, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = module(x)
    graph.replay()
    assert torch.equal(y, want)
    assert diffgraph.report(module).reasons["nested_capture"] == 1


def test_running_out_of_memory_during_capture_gives_the_eager_result(cuda, monkeypatch):
    module = net(cuda)
    x = torch.randn(2, 16, 64, device=cuda)
    want = call(module, x)
    real, armed = torch.nn.functional.gelu, [True]

    def gelu(t):
        if torch.cuda.is_current_stream_capturing() and armed[0]:
            armed[0] = False
            raise torch.OutOfMemoryError("CUDA out of memory (injected)")
        return real(t)

    monkeypatch.setattr(torch.nn.functional, "gelu", gelu)
    assert torch.equal(call(module, x), want)
    report = diffgraph.report(module)
    assert report.reasons["out_of_memory"] == 1
    assert report.memory_bytes == 0


def test_a_hundred_evictions_and_a_thousand_replays_leave_memory_flat(cuda):
    module = net(cuda, max_graphs=1, verify=False)
    xs = [torch.randn(2, n, 64, device=cuda) for n in (16, 32)]
    wants = [eager(module, x) for x in xs]

    def swap():
        for x, want in zip(xs, wants, strict=True):
            for _ in range(12):
                assert torch.equal(call(module, x), want)

    for _ in range(5):
        swap()
    torch.cuda.synchronize()
    flat = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(50):
        swap()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= flat[0]
    assert torch.cuda.memory_reserved() <= flat[1] + 2 * 2**20
    assert diffgraph.report(module).replays >= 1000


ASYNC = """
import torch, diffgraph
module = diffgraph.accelerate_module(torch.nn.Linear(8, 8).cuda())
x = torch.randn(2, 8, device="cuda")
with torch.no_grad():
    found = [module(x) for _ in range(4)]
assert all(torch.equal(found[0], y) for y in found)
print(diffgraph.report(module).reasons, diffgraph.report(module).captures)
"""


def test_another_allocator_is_refused(cuda):
    allocator = "backend:cudaMallocAsync"
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTORCH_ALLOC_CONF": allocator}
    done = subprocess.run([sys.executable, "-c", ASYNC], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("{'allocator': 4} 0")


FIRST = """
import torch, diffgraph

class Attends(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(*[super().forward(x)] * 3)

module = diffgraph.accelerate_module(Attends(16, 16).to("cuda", torch.bfloat16))
with torch.no_grad():
    for _ in range(3):
        module(torch.randn(1, 2, 8, 16, device="cuda", dtype=torch.bfloat16))
report = diffgraph.report(module)
print(report.captures, report.replays, len(report.signatures))
"""


def test_a_process_first_call_has_the_signature_of_all_others(cuda):
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True)
    assert done.stdout.split() == ["1", "1", "1"], done.stderr


def test_weights_on_two_devices_run_eager(cuda):
    class Split(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.here, self.there = torch.nn.Linear(8, 8, device=cuda), torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.there(self.here(x).cpu()).to(cuda)

    module = diffgraph.accelerate_module(Split().eval())
    x = torch.randn(2, 8, device=cuda)
    assert all(torch.equal(call(module, x), eager(module, x)) for _ in range(4))
    assert diffgraph.report(module).reasons["multi_device"] == 4


@torch.library.custom_op("diffgraph_tests::through_the_host", mutates_args=())
def through_the_host(x: torch.Tensor) -> torch.Tensor:
    return (x.cpu() + 1).to(x.device)


class ThroughTheHost(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(through_the_host(self.layer(x)))


def test_an_op_that_turns_out_not_to_be_recordable_becomes_a_break(cuda):
    module = ThroughTheHost().to(cuda).eval()
    x = [torch.randn(4, 8, device=cuda) for _ in range(4)]
    with torch.no_grad():
        want = [module(t) for t in x]
        diffgraph.accelerate_module(module)
        for t, expected in zip(x, want, strict=True):
            assert torch.equal(module(t), expected)
    report = diffgraph.report(module)
    assert (report.captures, report.replays) == (1, 2)
    assert report.signatures[0].breaks == 1
    assert torch.equal(torch.zeros(1, device=cuda) + 1, torch.ones(1, device=cuda))  # nothing of the failure is left
