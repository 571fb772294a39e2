"""Pictures over HTTP by several replicas, a pipeline and a GPU each, under Ray Serve: `python -m examples.replicas`

On a laptop, with the model in the box: `MODEL=embedded SHAPES=64x64 python -m examples.replicas`
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Response
from ray import serve
from ray.exceptions import RayActorError
from ray.serve import metrics
from ray.serve.handle import DeploymentHandle

import diffgraph
import pipelines
from examples import server
from examples.server import MODEL, SHAPES, Request

EMBEDDED = Path(__file__).resolve().parent.parent / "demo" / "model"
REPLICAS = int(os.environ.get("REPLICAS", "2"))
MAX_SHAPES = 16  # a replica is known to have
TRIES = 5  # of a request whose replica died

app = FastAPI()


def load() -> Any:
    return pipelines.load(EMBEDDED) if MODEL == "embedded" else server.load()


@serve.deployment(max_ongoing_requests=16, health_check_period_s=5)
class Replica:
    """One pipeline. Ray Serve calls it healthy once its shapes are recorded, and sends it requests of shapes that it has."""

    async def __init__(self, load: Callable[[], Any], shapes: Sequence[str]) -> None:
        self.turn = asyncio.Lock()  # the scheduler keeps state between steps
        self.pipe = diffgraph.accelerate_pipeline(load(), capture="startup")
        self.calls = metrics.Gauge("diffgraph_calls", description="Denoiser calls by route.", tag_keys=("route",))
        for shape in shapes:
            await self.recorded(shape)

    @serve.multiplexed(max_num_models_per_replica=MAX_SHAPES)
    async def recorded(self, shape: str) -> str:
        """Called once a shape: Ray Serve keeps in mind who has what."""
        async with self.turn:
            await asyncio.to_thread(diffgraph.capture, self.pipe, shape)
        return shape

    async def draw(self, request: Request) -> bytes:
        shape = serve.get_multiplexed_model_id()
        if shape:
            await self.recorded(shape)
        async with self.turn:
            picture = await asyncio.to_thread(server.draw, self.pipe, request)
        report = diffgraph.report(self.pipe)
        for route in ("replays", "captures", "eager"):
            self.calls.set(getattr(report, route), {"route": route})
        return picture


@serve.deployment
@serve.ingress(app)
class Front:
    def __init__(self, replicas: DeploymentHandle, shapes: Sequence[str]) -> None:
        self.replicas = replicas
        self.shapes = {shape.partition("@")[0]: shape for shape in shapes}  # by size, as requests name them

    @app.post("/pictures")
    async def picture(self, request: Request) -> Response:
        shape = self.shapes.get(f"{request.height}x{request.width}")  # any other than those on offer runs eager, anywhere
        replicas = self.replicas.options(multiplexed_model_id=shape) if shape else self.replicas
        for _ in range(TRIES):
            try:
                return Response(await replicas.draw.remote(request), media_type="image/png")
            except RayActorError:  # it died under the request: another one draws the same picture
                continue
            except ValueError as error:  # sizes that the pipeline does not take
                raise HTTPException(422, str(error)) from None
        raise HTTPException(503, f"{TRIES} replicas died under this request")


def create(load: Callable[[], Any] = load, shapes: Sequence[str] = SHAPES, replicas: int = REPLICAS) -> serve.Application:
    resources = {"num_gpus": 1} if torch.cuda.is_available() else {"num_cpus": 0.5}
    replica = Replica.options(num_replicas=replicas, ray_actor_options=resources)
    front = Front.options(ray_actor_options={"num_cpus": 0.1})
    return front.bind(replica.bind(load, list(shapes)), list(shapes))


if __name__ == "__main__":
    serve.run(create(), blocking=True)
