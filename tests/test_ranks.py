"""Two processes compute one forward together, by diffusers' context parallelism: on the CPU with gloo, on two GPUs with NCCL."""

import multiprocessing
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import _ranks
import pytest
import torch
from _toys import SETTLED
from torch.distributed import HashStore

import diffgraph
from diffgraph.engine.sequence import Break
from diffgraph.parallel import ranks
from diffgraph.parallel.ranks import Intent, Ranks
from diffgraph.routing import runner
from diffgraph.routing.installed import accelerated

#: The first one waits for all acts. Four processes on CI's two cores: in `make test-slow`.
pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def seen(request):
    """What both ranks saw of each act: they are started once, as that takes longer than all acts together."""
    if request.param == "cuda" and torch.cuda.device_count() < _ranks.WORLD:
        pytest.skip(f"needs {_ranks.WORLD} GPUs; here: {torch.cuda.device_count()}")
    context = multiprocessing.get_context("forkserver" if request.param == "cpu" else "spawn")  # CUDA outlives no fork
    if request.param == "cpu":
        context.set_forkserver_preload(["torch", "diffusers.models", "diffusers.hooks", "diffgraph"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = context.Queue()
    given = (port, request.param, answers)
    processes = [context.Process(target=_ranks.run, args=(rank, *given), daemon=True) for rank in range(_ranks.WORLD)]
    for process in processes:
        process.start()
    found = {name: {} for name in _ranks.acts(request.param)}
    for _ in range(_ranks.WORLD * len(found)):
        rank, name, saw = answers.get(timeout=200)
        found[name][rank] = saw
    for process in processes:
        process.join(timeout=30)
    return found


@pytest.mark.parametrize("family, kind", _ranks.PAIRS)
def test_parallel_replays_equal_parallel_eager(seen, family, kind):
    _, recorded = _ranks.EQUAL[kind]
    assert both(seen[f"{family}: {kind}"]) == (SETTLED, [recorded])


def skip_on_gpus(act, seen):
    if act not in seen:
        pytest.skip("an error on GPUs, where the other rank is ahead")


def both(saw):
    """What both ranks saw alike."""
    assert saw[0] == saw[1], f"rank 0 saw {saw[0]}\nrank 1 saw {saw[1]}"
    return saw[0]


@pytest.mark.parametrize(
    "act, before, reason",
    [
        ("out_of_memory_while_recording", ["unseen_signature"], "out_of_memory"),
        ("an_error_while_recording_around_breaks", ["unseen_signature"], "capture_failed"),
        ("an_error_in_a_break_of_the_first_replay", ["unseen_signature", "capture"], "capture_failed"),
        ("a_replay_that_differs", ["unseen_signature", "capture"], "verify_failed"),
    ],
)
def test_when_one_rank_fails_all_go_eager(seen, act, before, reason):
    assert seen[act][1] == before + [reason] * 3
    assert seen[act][0] == before + ["other_rank"] * 3


def test_a_rank_without_room_frees_memory_and_replays_with_the_others(seen):
    assert both(seen["out_of_memory_at_a_replay"]) == ["replay"] * 6


@pytest.mark.parametrize("act", ["out_of_memory_for_good_at_a_replay", "a_change_on_one_rank"])
def test_what_one_rank_alone_has_lost_all_record_again(seen, act):
    """A rank that is ahead replays the call in which the other loses its recording; from the next one on, all do the same."""
    skip_on_gpus(act, seen)
    first, *others = zip(*seen[act].values(), strict=True)
    assert set(first) <= {"eager", "replay"}
    eager = [] if set(first) == {"eager"} else ["eager"]
    assert others == [(route, route) for route in [*eager, "capture", *["replay"] * 4][:5]]


def test_a_change_on_all_ranks_and_new_shapes_need_no_more_than_on_one_gpu(seen):
    assert both(seen["a_change_on_both"]) == ["attributes_changed", *SETTLED[1:3], *SETTLED[:3], "replay", "replay"]


def test_while_one_rank_is_paused_all_are_eager(seen):
    skip_on_gpus("paused_on_one_rank", seen)
    assert both(seen["paused_on_one_rank"]) == ["eager", "eager", "replay"]


def test_eviction_is_the_same_on_all_ranks(seen):
    assert both(seen["evicted_by_a_limit"]) == [*SETTLED[:3], "evicted", *SETTLED[1:3]]


def test_ranks_do_not_speak_while_they_replay(seen):
    assert both(seen["replays_in_a_row"]) == ["replay", "replay"]


def test_several_denoisers_of_the_same_ranks(seen):
    assert both(seen["two_pipelines_of_one_group"]) == ["replay"] * 6


def test_the_example_records_at_start_up(seen):
    assert both(seen["the_example"]) == (3, 0, True)


def test_the_benchmark_measures_and_changes_things_on_the_way(seen):
    printed = seen["the_benchmark"][0].splitlines()
    assert [line.split()[1] for line in printed[2:]] == ["denoiser", "denoiser", "soak"]
    assert all(line.split()[-1] == "yes" for line in printed[2:4])
    assert printed[4].endswith("yes  10 of 10 replays, 3 of 3 at the end, 0 wrong results")


def test_a_rank_that_hangs_while_recording_is_named_with_signature_and_collective(seen):
    told = seen["a_hang_while_recording"]
    assert re.match(r"rank 0 has waited 2 s for rank 1: the capture of Flux\S+ .*=\[1x64x16\].*before \S*all_to_all", told[0])
    assert told[1].startswith("rank 1 ")


def pair():
    """Two ranks of one process, which share a store."""
    store = HashStore()
    return [Ranks(name, [4, 7], store, []) for name in (4, 7)]


def test_who_is_behind_goes_on_until_the_call_that_nobody_has_made():
    behind, ahead = pair()
    for _ in range(3):
        ahead.begin()
        assert ahead.goes_alone()
    behind.begin()
    call = partial(behind.least, Intent.EAGER, "key", "label")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(call)
        while not ahead._announced:
            ahead.listen()
        assert first.result() is None
        for _ in range(2):
            behind.begin()
            assert not behind.goes_alone()
            assert behind.least(Intent.REPLAY, "key", "label") is None
        for rank in (behind, ahead):
            rank.begin()
            assert not rank.goes_alone()
        one, other = pool.submit(call), pool.submit(ahead.least, Intent.REPLAY, "key", "label")
        assert one.result() is other.result() is Intent.EAGER
        # They have parted, so they meet at the next call as well; when they agree to replay, no more.
        for alone in (False, True):
            for rank in (behind, ahead):
                rank.begin()
                assert rank.goes_alone() is alone
            if not alone:
                routes = [pool.submit(rank.least, Intent.REPLAY, "key", "label") for rank in (behind, ahead)]
                assert [route.result() for route in routes] == [Intent.REPLAY] * 2


def test_calls_of_different_signatures_are_eager():
    with ThreadPoolExecutor() as pool:
        routes = []
        for rank, key in zip(pair(), "ab", strict=True):
            rank.begin()
            routes.append(pool.submit(rank.least, Intent.CAPTURE, key, "label"))
        assert [route.result() for route in routes] == [Intent.EAGER] * 2


def test_a_rank_that_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(ranks, "TIMEOUT_S", 0.01)
    first, _ = pair()
    first.begin()
    with pytest.raises(diffgraph.RankError, match=r"rank 4 has waited 0.01 s for rank 7: the meeting about label"):
        first.least(Intent.CAPTURE, "key", "label")


def test_a_replay_that_fails_after_a_collective_is_told_from_one_that_fails_before():
    sequence, fails = diffgraph.GraphSequence(device="cpu"), []

    @diffgraph.eager_on_graph
    def part(x):
        if fails:
            raise ValueError("injected")
        return x + 1

    with diffgraph.breakable_graph(sequence):
        part(part(torch.ones(2)) * 2)
    first, second = [step for step in sequence.steps if isinstance(step, Break)]
    fails.append(True)
    for speaks, told in ((second, None), (first, "break 1: ")):
        speaks.collectives = 1
        with pytest.raises(ValueError, match="injected"):
            sequence.replay()
        assert sequence.failed_halfway is None if told is None else sequence.failed_halfway.startswith(told)


def test_a_rank_of_gpus_that_cannot_replay_with_the_others_raises(monkeypatch):
    module = diffgraph.accelerate_module(torch.nn.Linear(2, 2))
    (found,) = accelerated(module)
    found._check_apart(pair()[0], module, "weights_changed")
    monkeypatch.setattr(runner, "weights_device", lambda _: torch.device("cuda"))
    with pytest.raises(diffgraph.RankError, match=r"rank 4: Linear cannot replay .*: weights_changed"):
        found._check_apart(pair()[0], module, "weights_changed")


def test_options():
    module = torch.nn.Linear(2, 2)
    with pytest.raises(diffgraph.OptionError, match="collectives is 'fast'; accepted: 'record', 'break'"):
        diffgraph.accelerate_module(module, collectives="fast")
    with pytest.raises(diffgraph.OptionError, match="accepted with it: collectives='record'"):
        diffgraph.accelerate_module(module, backend="full", collectives="break")
