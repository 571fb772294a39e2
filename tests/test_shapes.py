"""Capture shapes: every form of one is the same shape, and whatever is wrong is said."""

import copy
import json
import pickle
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from diffgraph.errors import DiffgraphError, ShapeError
from diffgraph.shapes.capture_shape import CaptureShape, load_shapes

whole = st.integers(min_value=1, max_value=10**12)
scales = st.integers(0, 100) | st.floats(min_value=0, allow_nan=False, allow_infinity=False)
shapes = st.builds(
    CaptureShape,
    height=whole,
    width=whole,
    num_frames=st.none() | whole,
    prompt_length=st.none() | whole,
    guidance=st.none() | st.booleans() | scales,
    batch=whole,
)
# Near misses find more than noise does.
sizes = st.sampled_from(["512x512", "0x8", "8x8x", "8X8X8", " 8x8", "-8x8", "٣x٣"])
options = st.sampled_from(["prompt=8", "cfg=off", "cfg=1.5", "cfg=nan", "cfg=1e999", "batch=0", "batch=", "steps=4", ""])
near_texts = st.builds("{}@{}".format, sizes, st.lists(options).map(",".join))


# The same shape in every form


@given(shapes)
@example(CaptureShape(512, 512, guidance=-0.0))
def test_text_gives_the_shape_back(shape):
    assert CaptureShape.parse(str(shape)) == shape


@given(shapes)
def test_dict_json_and_yaml_give_the_shape_back(shape):
    data = shape.to_dict()
    assert CaptureShape.from_dict(data) == shape
    assert CaptureShape.from_dict(json.loads(json.dumps(data))) == shape
    assert CaptureShape.from_dict(yaml.safe_load(yaml.safe_dump(data))) == shape


@given(st.lists(shapes, min_size=1, max_size=5))
def test_files_give_the_shapes_back(tmp_path_factory, given_shapes):
    dicts, texts = [shape.to_dict() for shape in given_shapes], list(map(str, given_shapes))
    for name, content in {
        "shapes.json": json.dumps(dicts),
        "texts.json": json.dumps(texts),
        "shapes.yaml": yaml.safe_dump(dicts),
        "texts.yml": yaml.safe_dump(texts),
    }.items():
        path = tmp_path_factory.getbasetemp() / name
        path.write_text(content, encoding="utf-8")
        assert load_shapes(path) == load_shapes(str(path)) == load_shapes(given_shapes)


@given(shapes)
def test_copies_are_equal_and_hash_equal(shape):
    for twin in (copy.deepcopy(shape), pickle.loads(pickle.dumps(shape))):
        assert twin == shape and hash(twin) == hash(shape)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("512x768", CaptureShape(512, 768)),
        ("480X832X81", CaptureShape(480, 832, 81)),
        ("  512x512\n", CaptureShape(512, 512)),
        ("512x512@prompt=128,cfg=off,batch=2", CaptureShape(512, 512, prompt_length=128, guidance=False, batch=2)),
        ("512x512@cfg=on", CaptureShape(512, 512, guidance=True)),
        ("512x512@cfg=4.5", CaptureShape(512, 512, guidance=4.5)),
        ("512x512@cfg=1", CaptureShape(512, 512, guidance=1)),
        ("512x512@cfg=1e-07", CaptureShape(512, 512, guidance=1e-07)),
    ],
)
def test_text_height_first_options_after_at(text, shape):
    assert CaptureShape.parse(text) == shape


def test_yaml_written_by_hand(tmp_path):
    path = tmp_path / "shapes.YML"
    path.write_text("- 512x512@cfg=off\n- [480, 832, 81]\n- {height: 1024, width: 1024, guidance: off}\n")
    assert load_shapes(path) == [
        CaptureShape(480, 832, 81),
        CaptureShape(1024, 1024, guidance=False),
        CaptureShape(512, 512, guidance=False),
    ]


# What makes two shapes the same


def test_guidance_on_off_and_numbers_are_all_different():
    guidances = [None, True, False, 1.0, 0.0, 4.5]
    assert len({CaptureShape(512, 512, guidance=guidance) for guidance in guidances}) == len(guidances)


def test_inputs_compare_by_value_if_plain_and_by_identity_otherwise():
    image, twin = bytearray(b"pixels"), bytearray(b"pixels")
    assert CaptureShape(8, 8, inputs={"image": image}) == CaptureShape(8, 8, inputs={"image": image})
    assert CaptureShape(8, 8, inputs={"image": image}) != CaptureShape(8, 8, inputs={"image": twin})
    assert CaptureShape(8, 8, inputs={"scale": 0.5}) == CaptureShape(8, 8, inputs={"scale": float("0.5")})
    assert CaptureShape(8, 8, inputs={"scale": 1}) != CaptureShape(8, 8, inputs={"scale": True})
    assert CaptureShape(8, 8) != "8x8"


def test_inputs_are_not_changed_through_the_callers_dict():
    inputs = {"scale": 0.5}
    shape = CaptureShape(8, 8, inputs=inputs)
    inputs["scale"] = 0.9
    shape.to_dict()["inputs"]["scale"] = 0.7
    assert shape.inputs == {"scale": 0.5}


# Lists


@pytest.mark.parametrize(
    "spec",
    [
        "480x832x81",
        CaptureShape(480, 832, 81),
        (480, 832, 81),
        [480, 832, 81],
        {"height": 480, "width": 832, "num_frames": 81},
    ],
    ids=["text", "shape", "tuple", "list", "dict"],
)
def test_one_shape_or_a_list_of_one(spec):
    assert load_shapes(spec) == load_shapes([spec]) == load_shapes((spec,)) == [CaptureShape(480, 832, 81)]


def test_repeated_shapes_are_loaded_once():
    assert load_shapes(["512x512", (512, 512), "512X512@batch=1"]) == [CaptureShape(512, 512)]


@given(st.lists(shapes, min_size=1))
def test_largest_comes_first(given_shapes):
    loaded = [shape.size for shape in load_shapes(given_shapes)]
    assert loaded == sorted(loaded, reverse=True)


def test_order_is_pixels_frames_batch_then_prompt_length():
    ordered = [
        "128x128x81",
        "512x512@batch=2",
        "512x512@prompt=128",
        "512x512@prompt=64",
        "512x512",
        "512x256",
        "64x64",
    ]
    assert list(map(str, load_shapes(sorted(ordered)))) == ordered


# Bad input


@given(st.text() | near_texts)
@example("1" * 5000 + "x1")
@example("512x512@prompt=" + "1" * 5000)
@example("512x512@cfg=1e999")
def test_any_text_is_a_shape_or_a_shape_error(text):
    try:
        shape = CaptureShape.parse(text)
    except ShapeError:
        return
    assert CaptureShape.parse(str(shape)) == shape


keys = st.sampled_from(["height", "width", "guidance", "inputs"]) | st.text()
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner),
)


@given(json_values)
@example("\0.json")
def test_any_json_value_is_shapes_or_a_shape_error(value):
    try:
        loaded = load_shapes(value)
    except ShapeError:
        return
    assert loaded and all(isinstance(shape, CaptureShape) for shape in loaded)


def refusal(spec):
    """What load_shapes says against `spec`."""
    with pytest.raises(ShapeError) as caught:
        load_shapes(spec)
    assert isinstance(caught.value, DiffgraphError) and isinstance(caught.value, ValueError)
    return str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "512", "512x", "512*512", "512x512x81x2", "-512x512", "512.0x512", "5_12x512", "512 x 512", "٣x٣"]
)
def test_wrong_text_is_named_with_what_is_accepted(text):
    message = refusal(text)
    assert repr(text) in message and "480x832x81" in message


@pytest.mark.parametrize("field", ["height", "width", "num_frames", "prompt_length", "batch"])
@pytest.mark.parametrize("value", [0, -1, 512.0, True, "512"])
def test_sizes_are_whole_numbers_of_at_least_one(field, value):
    message = refusal({"height": 512, "width": 512, field: value})
    assert field in message and repr(value) in message and "at least 1" in message


@pytest.mark.parametrize("text", ["0x512", "512x0", "512x512x0", "512x512@prompt=0", "512x512@batch=0"])
def test_zero_in_text(text):
    message = refusal(text)
    assert repr(text) in message and "is a whole number of at least 1" in message


def test_unknown_option():
    message = refusal("512x512@steps=4")
    assert "unknown option 'steps=4'" in message and "prompt, cfg, batch" in message


@pytest.mark.parametrize("text", ["512x512@", "512x512@batch=2,", "512x512@,batch=2", "512x512@ batch=2", "512x512@@batch=2"])
def test_empty_or_misspelt_option(text):
    assert "unknown option" in refusal(text)


@pytest.mark.parametrize(
    "option",
    ["prompt", "prompt=", "batch=two", "batch=1.5", "batch=-1", "cfg", "cfg=yes", "cfg=nan", "cfg=-1", "cfg=1_0"],
)
def test_wrong_option_value(option):
    message = refusal(f"512x512@{option}")
    assert repr(option.partition("=")[2]) in message


def test_duplicate_option():
    assert "'batch' is given twice" in refusal("512x512@batch=2,batch=2")


@pytest.mark.parametrize("guidance", ["on", -1, -0.5, float("nan"), float("inf"), 10**400, [1.0]])
def test_guidance_is_a_switch_or_a_finite_scale(guidance):
    assert "guidance is True, False" in refusal({"height": 512, "width": 512, "guidance": guidance})


@pytest.mark.parametrize("inputs", [None, ["image"], {1: "image"}])
def test_inputs_are_keyword_arguments(inputs):
    assert "inputs is a dict" in refusal({"height": 512, "width": 512, "inputs": inputs})


def test_unknown_dict_key():
    message = refusal({"height": 512, "width": 512, "heigth": 512})
    assert "'heigth'" in message and "num_frames" in message


def test_missing_size():
    assert "both needed" in refusal({"height": 512})


@pytest.mark.parametrize("spec", [[], (), None, 512, b"512x512", [[]], (512,), (512, 512, 1, 1), {"512x512"}, ["512x512", None]])
def test_what_is_no_shape_at_all(spec):
    assert "accepted are" in refusal(spec)


@pytest.mark.parametrize("call", [CaptureShape.parse, CaptureShape.from_dict])
def test_parse_takes_text_and_from_dict_a_dict(call):
    with pytest.raises(ShapeError, match="512 is not"):
        call(512)


# Bad files: each message begins with the file's name


@pytest.mark.parametrize("name", ["absent.json", "absent.yaml", "absent.yml"])
def test_missing_file(name):
    assert refusal(name) == f"{name}: cannot be read: No such file or directory"


def test_folder_instead_of_a_file(tmp_path):
    (tmp_path / "shapes.json").mkdir()
    assert refusal(tmp_path / "shapes.json").startswith(f"{tmp_path / 'shapes.json'}: cannot be read")


def test_file_of_another_kind():
    assert refusal(Path("shapes.txt")) == "shapes.txt: a file of capture shapes ends in .json, .yaml or .yml"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"[512x512", "malformed JSON"),
        ("a.json", b"", "malformed JSON"),
        ("a.json", b"[" * 100_000, "malformed JSON"),
        ("a.json", b"\xff\xfe", "cannot be read"),
        ("a.json", b"[]", "no capture shape"),
        ("a.json", b'["b.json"]', "'b.json' is not a capture shape"),
        ("a.json", b'[{"height": 512}]', "height and width are both needed"),
        ("a.yaml", b"- [512, 512", "malformed YAML"),
        ("a.yaml", b"2020-99-99", "malformed YAML"),
        ("a.yaml", b"!!timestamp x", "malformed YAML"),
        ("a.yaml", b"", "None is not a capture shape"),
        ("a.yaml", b"&a [*a]", "[[...]] is not a capture shape"),
        ("a.yaml", b"- {height: 512, width: 0}", "width is a whole number"),
    ],
)
def test_malformed_file(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path}: {message}")


def test_yaml_without_pyyaml(tmp_path, monkeypatch):
    path = tmp_path / "shapes.yaml"
    path.write_text("- 512x512\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "pip install 'diffgraph[yaml]'" in refusal(path)
