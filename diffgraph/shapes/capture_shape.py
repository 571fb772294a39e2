"""Capture shapes: what a user asks to have recorded, as objects, text, dicts or a file."""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from diffgraph.errors import ShapeError

_TEXT = (
    "accepted is HEIGHTxWIDTH or HEIGHTxWIDTHxFRAMES with options after @, as in '512x512', '480x832x81' or "
    "'512x512@prompt=128,cfg=off,batch=2' (cfg: on, off or a guidance scale)"
)
_SPEC = (
    "accepted are text as in '480x832x81', a CaptureShape, a dict of its fields, (height, width[, num_frames]), "
    "a list of these, or the path of a .json, .yaml or .yml file that holds them"
)
_FILES = (".json", ".yaml", ".yml")
_SIZES = re.compile(r"[0-9]+(?:[xX][0-9]+){1,2}")
_WHOLE = re.compile(r"[0-9]+")
_SCALE = re.compile(r"[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_OPTIONS = {"prompt": "prompt_length", "cfg": "guidance", "batch": "batch"}


@dataclass(frozen=True, eq=False)
class CaptureShape:
    """One shape to record: the arguments of a pipeline call that decide its capture signature.

    height, width: of the picture, in pixels. num_frames: of the video; None is an image, or the pipeline's default.
    prompt_length: of the prompt embeddings, in tokens; None is what the prompt gives.
    guidance: CFG on (True), off (False) or a guidance scale; None is the pipeline's default.
    batch: pictures per call. inputs: further keyword arguments for the pipeline's call, such as a control image.

    Shapes are equal when all of these are; of `inputs`, plain values compare by value, anything else by identity.
    Raises ShapeError for a value that is not accepted.
    """

    height: int
    width: int
    num_frames: int | None = None
    prompt_length: int | None = None
    guidance: bool | float | None = None
    batch: int = 1
    inputs: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self):
        for name in ("height", "width", "num_frames", "prompt_length", "batch"):
            _check_whole(name, getattr(self, name), optional=name in ("num_frames", "prompt_length"))
        object.__setattr__(self, "guidance", _checked_guidance(self.guidance))
        if not isinstance(self.inputs, Mapping) or not all(isinstance(name, str) for name in self.inputs):
            raise ShapeError(f"inputs is a dict of keyword arguments by name, not {self.inputs!r}")
        object.__setattr__(self, "inputs", dict(self.inputs))

    @classmethod
    def parse(cls, text: str) -> "CaptureShape":
        """The shape that a text such as `480x832x81@prompt=128,cfg=off,batch=2` names; ShapeError if it names none."""
        if not isinstance(text, str):
            raise ShapeError(f"{text!r} is not text; {_TEXT}")
        sizes, at, options = text.strip().partition("@")
        if not _SIZES.fullmatch(sizes):
            raise ShapeError(f"{text!r} is not a capture shape; {_TEXT}")
        values: dict[str, Any] = {}
        try:
            values.update(zip(("height", "width", "num_frames"), map(int, re.split("[xX]", sizes)), strict=False))
            for option in options.split(",") if at else ():
                key, _, value = option.partition("=")
                name = _OPTIONS.get(key)
                if name is None:
                    raise ShapeError(f"unknown option {option!r}, not one of {', '.join(_OPTIONS)}")
                if name in values:
                    raise ShapeError(f"option {key!r} is given twice")
                values[name] = _parse_guidance(value) if key == "cfg" else _parse_whole(key, value)
            return cls(**values)
        except ValueError as error:  # also int(): it refuses thousands of digits
            raise ShapeError(f"{text!r} is not a capture shape: {error}; {_TEXT}") from None

    def __str__(self) -> str:
        """The text that `parse` reads; `inputs` is left out."""
        sizes = "x".join(str(n) for n in (self.height, self.width, self.num_frames) if n is not None)
        options = []
        if self.prompt_length is not None:
            options.append(f"prompt={self.prompt_length}")
        if self.guidance is not None:
            switch = "on" if self.guidance else "off"
            options.append(f"cfg={switch if isinstance(self.guidance, bool) else self.guidance}")
        if self.batch != 1:
            options.append(f"batch={self.batch}")
        return sizes + ("@" + ",".join(options) if options else "")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CaptureShape":
        """The shape whose fields `data` holds by name; ShapeError for an unknown field or a missing size."""
        accepted = [f.name for f in fields(cls)]
        if not isinstance(data, Mapping):
            raise ShapeError(f"{data!r} is not a dict with some of {', '.join(accepted)}")
        if unknown := [key for key in data if key not in accepted]:
            raise ShapeError(f"unknown key {', '.join(map(repr, unknown))}; accepted are {', '.join(accepted)}")
        if not {"height", "width"} <= data.keys():
            raise ShapeError(f"height and width are both needed, given {data!r}")
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for `from_dict`, JSON or YAML; the values of `inputs` are not copied."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"inputs": dict(self.inputs)}

    @property
    def size(self) -> tuple[int, int]:
        """How large a call this is, for ordering: pixels x frames x batch, then prompt length."""
        return self.height * self.width * (self.num_frames or 1) * self.batch, self.prompt_length or 0

    def _key(self) -> tuple:
        # The type beside the guidance, because True == 1.0 though CFG "on" is not a guidance scale of 1.
        inputs = frozenset((name, *_value_key(value)) for name, value in self.inputs.items())
        guidance = _value_key(self.guidance)
        return self.height, self.width, self.num_frames, self.prompt_length, guidance, self.batch, inputs

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, CaptureShape) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())


def load_shapes(spec: Any) -> list[CaptureShape]:
    """The unique shapes that `spec` names, largest first, as they are to be recorded.

    spec: text, a CaptureShape, a dict of its fields, `(height, width[, num_frames])`, a list of these, or the path of a
    .json, .yaml or .yml file that holds them. Raises ShapeError, with the file's name if it came from one.
    """
    if not _is_path(spec):
        return _unique_largest_first(spec)
    path = os.fsdecode(spec)
    try:
        return _unique_largest_first(_read(path))
    except ShapeError as error:
        raise ShapeError(f"{path}: {error}") from error.__cause__


def save_shapes(shapes: Any, path: str | os.PathLike) -> None:
    """Write shapes (whatever `capture_shapes` takes) to a .json, .yaml or .yml file that it reads.

    Raises ShapeError for what is no shape, another ending, a path that cannot be written, or `inputs` that are not plain values.
    """
    shapes = load_shapes(shapes)
    try:
        name = os.fspath(path)
    except TypeError:
        raise ShapeError(f"{path!r} is no path; a file of capture shapes ends in .json, .yaml or .yml") from None
    if not name.lower().endswith(_FILES):
        raise ShapeError(f"{name}: a file of capture shapes ends in .json, .yaml or .yml")
    items = [str(shape) if not shape.inputs else shape.to_dict() for shape in shapes]
    try:
        text = json.dumps(items, indent=1)
    except TypeError as error:
        raise ShapeError(f"{name}: inputs that a file cannot hold: {error}") from None
    try:
        with open(name, "w", encoding="utf-8") as file:
            file.write(text + "\n")  # which is YAML, too
    except OSError as error:
        raise ShapeError(f"{name}: cannot be written: {error.strerror}") from error


def _is_path(spec: Any) -> bool:
    return isinstance(spec, os.PathLike) or (isinstance(spec, str) and spec.lower().endswith(_FILES))


def _read(path: str) -> Any:
    """What a JSON or YAML file holds."""
    if not path.lower().endswith(_FILES):
        raise ShapeError("a file of capture shapes ends in .json, .yaml or .yml")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise ShapeError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or no file name at all
        raise ShapeError(f"cannot be read: {error}") from error
    if path.lower().endswith(".json"):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ShapeError(f"malformed JSON: {error}") from error
    try:
        import yaml
    except ImportError as error:
        raise ShapeError("reading YAML needs PyYAML: pip install 'diffgraph[yaml]', or write JSON") from error
    try:
        return yaml.safe_load(text)
    except Exception as error:  # PyYAML lets more than YAMLError out: `!!timestamp x` is an AttributeError
        raise ShapeError(f"malformed YAML: {error}") from error


def _unique_largest_first(spec: Any) -> list[CaptureShape]:
    items = spec if isinstance(spec, (list, tuple)) and not _is_sizes(spec) else [spec]
    if not items:
        raise ShapeError(f"no capture shape in {spec!r}; {_SPEC}")
    return sorted(dict.fromkeys(map(_shape, items)), key=lambda shape: shape.size, reverse=True)


def _is_sizes(spec: Any) -> bool:
    return isinstance(spec, (list, tuple)) and len(spec) > 0 and isinstance(spec[0], (int, float))


def _shape(spec: Any) -> CaptureShape:
    if isinstance(spec, CaptureShape):
        return spec
    if isinstance(spec, str):
        return CaptureShape.parse(spec)
    if isinstance(spec, Mapping):
        return CaptureShape.from_dict(spec)
    if _is_sizes(spec) and len(spec) in (2, 3):
        return CaptureShape(*spec)
    raise ShapeError(f"{spec!r} is not a capture shape; {_SPEC}")


def _parse_whole(key: str, value: str) -> int:
    if not _WHOLE.fullmatch(value):
        raise ShapeError(f"{key} is a whole number of at least 1, not {value!r}")
    return int(value)


def _parse_guidance(value: str) -> bool | float:
    if value in ("on", "off"):
        return value == "on"
    if not _SCALE.fullmatch(value):
        raise ShapeError(f"cfg is on, off or a guidance scale of at least 0, not {value!r}")
    return float(value)


def _check_whole(name: str, value: Any, optional: bool) -> None:
    if optional and value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ShapeError(f"{name} is a whole number of at least 1{', or None' if optional else ''}, not {value!r}")


def _checked_guidance(value: Any) -> bool | float | None:
    if value is None or isinstance(value, bool):
        return value
    try:
        if isinstance(value, (int, float)) and math.isfinite(value) and value >= 0:
            return abs(float(value))  # -0.0 is 0.0
    except OverflowError:  # a whole number beyond any float
        pass
    raise ShapeError(f"guidance is True, False, a finite scale of at least 0, or None, not {value!r}")


def _value_key(value: Any) -> tuple[type, Any]:
    """What stands for a value when shapes are compared: plain values themselves, anything else its identity."""
    return type(value), value if isinstance(value, (str, int, float, type(None))) else id(value)
