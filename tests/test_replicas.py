"""The example of replicas under Ray Serve, on the embedded model: one dies under load, and no request is lost."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

import pipelines
from diffgraph.prompts.buckets import AUTO

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

SHAPES = ["64x64", "64x96"]
BUCKETS = AUTO  # a prompt may be of any length
ROOT = os.path.dirname(os.path.dirname(pipelines.__file__))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def urls():
    """Of two replicas, and of their metrics."""
    import ray
    from ray import serve

    from examples.replicas import create

    ports = free_port(), free_port()
    path = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        _metrics_export_port=ports[1],
        _system_config={"metrics_report_interval_ms": 1000},
        runtime_env={"env_vars": {"PYTHONPATH": path, "MODEL": "embedded", "OMP_NUM_THREADS": "1"}},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": ports[0]})
        serve.run(create(shapes=SHAPES, replicas=2))
        yield [f"http://127.0.0.1:{port}" for port in ports]
    finally:
        serve.shutdown()
        ray.shutdown()


def test_a_replica_dies_under_load_and_no_request_is_lost(urls):
    import ray

    url, metrics = urls
    done = []

    def draw(i):
        size = dict(zip(("height", "width"), map(int, SHAPES[i % 2].split("x")), strict=True))
        answer = httpx2.post(f"{url}/pictures", json={"prompt": "a red cat", "steps": 2, **size}, timeout=100)
        done.append(i)
        if len(done) == 100:
            name = next(n["name"] for n in ray.util.list_named_actors(all_namespaces=True) if "#Replica#" in n["name"])
            ray.kill(ray.get_actor(name, namespace="serve"))
        return answer

    with ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(draw, range(200)))
    assert [answer.status_code for answer in answers] == [200] * 200
    for i in (0, 1):  # the same picture from every replica
        assert len({answer.content for answer in answers[i::2]}) == 1
    told = [line for line in httpx2.get(f"{metrics}/metrics").text.splitlines() if line.startswith("ray_diffgraph_calls{")]
    (captures,) = {line.split()[-1] for line in told if 'route="captures"' in line}  # at start-up, and no more
    assert captures == str(float(len(SHAPES) * len(BUCKETS)))
    assert any('route="replays"' in line for line in told)
    unforeseen = {"prompt": "a red cat", "height": 96, "width": 96, "steps": 2}
    assert httpx2.post(f"{url}/pictures", json=unforeseen, timeout=100).status_code == 200
    assert httpx2.post(f"{url}/pictures", json={**unforeseen, "steps": 0}, timeout=100).status_code == 422
