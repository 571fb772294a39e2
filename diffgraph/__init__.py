"""diffgraph: diffusers pipelines faster where the GPU waits for Python, without changing a pixel."""

from diffgraph.engine.recorder import breakable_graph, eager_on_graph
from diffgraph.engine.sequence import GraphSequence
from diffgraph.errors import (
    AlreadyAcceleratedError,
    CaptureError,
    CaptureWarning,
    DiffgraphError,
    HostValueChanged,
    NoDenoiserError,
    NotAcceleratedError,
    OptionError,
    OptionTypeError,
    RankError,
    ReplayError,
    ShapeError,
)
from diffgraph.finetuning.step import TrainingStep, record_training_step
from diffgraph.pipeline import accelerate_module, accelerate_pipeline, capture, paused, report, restore_pipeline
from diffgraph.reasons import Reason
from diffgraph.reports.explain import Explanation, explain
from diffgraph.reports.report import Report, SignatureReport
from diffgraph.shapes.capture_shape import CaptureShape, save_shapes

__version__ = "0.1.0"

__all__ = [
    "AlreadyAcceleratedError",
    "CaptureError",
    "CaptureShape",
    "CaptureWarning",
    "DiffgraphError",
    "Explanation",
    "GraphSequence",
    "HostValueChanged",
    "NoDenoiserError",
    "NotAcceleratedError",
    "OptionError",
    "OptionTypeError",
    "RankError",
    "Reason",
    "ReplayError",
    "Report",
    "ShapeError",
    "SignatureReport",
    "TrainingStep",
    "accelerate_module",
    "accelerate_pipeline",
    "breakable_graph",
    "capture",
    "eager_on_graph",
    "explain",
    "paused",
    "record_training_step",
    "report",
    "restore_pipeline",
    "save_shapes",
]
