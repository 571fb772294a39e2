"""Pictures over HTTP: recorded at start-up, with health and metrics. `uvicorn --factory examples.server:create_app`"""

import io
import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from diffusers import DiffusionPipeline
from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel, Field

import diffgraph

MODEL = os.environ.get("MODEL", "black-forest-labs/FLUX.1-dev")
SHAPES = os.environ.get("SHAPES", "512x512;1024x1024").split(";")


class Request(BaseModel):
    prompt: str
    height: int = Field(512, ge=16, le=2048)
    width: int = Field(512, ge=16, le=2048)
    steps: int = Field(28, ge=1, le=100)
    seed: int = 0


def load() -> Any:
    return DiffusionPipeline.from_pretrained(MODEL, torch_dtype=torch.bfloat16).to("cuda")


def draw(pipe: Any, request: Request) -> bytes:
    """A PNG file."""
    generator = torch.Generator().manual_seed(request.seed)
    size = {"height": request.height, "width": request.width}
    found = pipe(request.prompt, **size, num_inference_steps=request.steps, generator=generator)
    file = io.BytesIO()
    found.images[0].save(file, "PNG")
    return file.getvalue()


def create_app(load: Callable[[], Any] = load, shapes: Sequence[str] = SHAPES) -> FastAPI:
    turn = threading.Lock()  # the scheduler keeps state between steps
    served: dict[str, Any] = {}

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        served["pipe"] = diffgraph.accelerate_pipeline(load(), capture_shapes=list(shapes))
        yield  # requests come in only now
        diffgraph.restore_pipeline(served.pop("pipe"))

    app = FastAPI(lifespan=lifespan)

    @app.post("/pictures")
    def picture(request: Request) -> Response:
        try:
            with turn:
                return Response(draw(served["pipe"], request), media_type="image/png")
        except ValueError as error:  # sizes that the pipeline does not take
            raise HTTPException(422, str(error)) from None

    @app.get("/health")
    def health() -> dict[str, Any]:
        report = diffgraph.report(served["pipe"])
        lost = {s.label: s.reason for s in report.signatures if not s.captured}
        return {"ready": True, "as_recorded": not lost and not report.unseen, "lost": lost, "unseen": report.unseen}

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(diffgraph.report(served["pipe"]).to_prometheus(model=MODEL), media_type="text/plain; version=0.0.4")

    return app
