"""Two processes compute one forward together, on the CPU with gloo, by diffusers' own context parallelism."""

import multiprocessing
import socket

import pytest
from _toys import SETTLED

import _ranks


@pytest.fixture(scope="module")
def seen():
    """What both ranks saw of each act: they are started once, as that takes longer than all acts together."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "diffusers.models", "diffusers.hooks", "diffgraph"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = context.Queue()
    processes = [context.Process(target=_ranks.run, args=(rank, port, answers), daemon=True) for rank in range(_ranks.WORLD)]
    for process in processes:
        process.start()
    found = {name: {} for name in _ranks.ACTS}
    for _ in range(_ranks.WORLD * len(_ranks.ACTS)):
        rank, name, saw = answers.get(timeout=120)
        found[name][rank] = saw
    for process in processes:
        process.join(timeout=30)
    return found


@pytest.mark.parametrize("name", [name for name in _ranks.ACTS if name.startswith(("flux", "qwen_image"))])
def test_parallel_replays_equal_parallel_eager(seen, name):
    print(seen[name])
    for rank in range(_ranks.WORLD):
        assert seen[name][rank]["routes"] == [*SETTLED, "replay"]
    assert seen[name][0] == seen[name][1]
