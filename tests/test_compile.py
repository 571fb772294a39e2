"""`compile_blocks`: blocks are compiled for recordings alone, round otherwise within bounds, and leave the module as it was.

The compiler here is `aot_eager`, or one that rounds otherwise: then a result shows whether compiled code made it.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import pytest
import torch
import torchao.quantization as ao
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer

import diffgraph
import pipelines
from benchmarks._calls import DenoiserCall, relative_difference
from benchmarks._weights import quantize
from diffgraph.compiling import pieces
from diffgraph.compiling.blocks import BlockCompiler, repeated_blocks
from diffgraph.engine.current import open_recorder
from diffgraph.engine.layout import Layout
from diffgraph.values.compare import close, same_bits
from tests._toys import eager, route_of, some_slow


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)

    def heads(self, x):
        return self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)

    def forward(self, x):
        q, k, v = self.heads(x)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(torch.nn.functional.gelu(attended.transpose(1, 2).flatten(2)))


class Net(torch.nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks or [Block() for _ in range(3)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x.transpose(0, 1).contiguous().transpose(0, 1))  # dense, and not contiguous
        return x


@pytest.fixture(autouse=True)
def _nothing_is_compiled():
    """Compiled code stays with the process."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def off(graph, _, by=2.0**-20):
    """A compiler that rounds otherwise."""

    def run(*args):
        return tuple(x * (1 + by) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in graph(*args))

    return run


def strict(graph, given):
    """A compiler that wants its inputs to lie as it was told."""

    def run(*args):
        assert [a.stride() for a in args if a.dim() > 1] == [g.stride() for g in given if g.dim() > 1]
        return graph(*args)

    return run


def accelerated(module, compiler=off, **options):
    return diffgraph.accelerate_module(module.eval(), compile_blocks={"backend": compiler}, poison=True, **options)


def x_of(rows=5, seed=0):
    return torch.randn(2, rows, 16, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def steps(net, x, times=4):
    """Calls of one signature, each close to eager; their routes, and which were made by compiled code."""
    routes, compiled = [], []
    for i in range(times):
        found, route = route_of(net, lambda i=i: net(x + i))
        wanted = eager(net, x + i)
        assert close(found, wanted), route
        routes.append(route)
        compiled.append(not same_bits(found, wanted))
    return routes, compiled


def rows_of(net):
    return diffgraph.report(net).signatures


def test_recordings_are_compiled_and_what_runs_eager_is_not():
    net = accelerated(Net())
    before = pieces.Tally.compiles
    routes, compiled = steps(net, x_of())
    assert routes == ["unseen_signature", "capture", "replay", "replay"]
    # The first replay is compared with eager, and eager's own result returned.
    assert compiled == [False, True, False, True]
    assert pieces.Tally.compiles - before == rows_of(net)[0].compiles == 1, "one for all blocks"
    assert (rows_of(net)[0].segments, rows_of(net)[0].breaks) == (4, 3)
    assert rows_of(net)[0].compile_seconds > 0
    assert "(compiles: 1, " in str(diffgraph.report(net))
    entered = pieces.Tally.entered
    steps(net, x_of(), 2)
    assert pieces.Tally.entered == entered, "a replay calls no compiled block"


def test_a_replay_has_the_bits_of_the_compiled_forward():
    net = accelerated(Net())
    steps(net, x_of())
    (entry,) = net._compiled_call_impl.table.entries.values()
    with torch.no_grad():
        assert same_bits(net(x_of(seed=1)), entry.recording.unrecorded(net, net._call_impl))


def test_a_forward_that_gives_its_blocks_a_mask_only_while_it_is_recorded_is_recorded_uncompiled():
    """As transformers' text encoders do: they ask whether a CUDA graph is being captured."""

    class Masked(Block):
        def forward(self, x, mask=None):
            q, k, v = self.heads(x)
            return x + self.out(torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))

    class Encoder(Net):
        def forward(self, x):
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool) if open_recorder() is not None else None
            for block in self.blocks:
                x = block(x, mask)
            return x

    net = accelerated(Encoder(Masked(), Masked()))
    routes, compiled = steps(net, x_of())
    assert routes[-1] == "replay" and not any(compiled)
    assert rows_of(net)[0].uncompiled == "what was compiled for this forward does not fit it when it is recorded"


def test_an_error_of_ours_that_has_nothing_to_do_with_the_compilers_is_not_told_in_its_place():
    compiler = BlockCompiler({})
    try:
        try:
            raise diffgraph.CaptureError("handled")
        except diffgraph.CaptureError:
            raise RuntimeError("out of disk") from None
    except RuntimeError as error:
        error.__cause__ = error  # nor does a circle hold it up
        assert compiler.failed(Net(), error) == "out of disk"


def test_a_compiler_that_is_wrong_is_not_trusted():
    net = accelerated(Net(), lambda graph, given: off(graph, given, by=0.1))
    with torch.no_grad(), pytest.warns(diffgraph.CaptureWarning, match="differed"):
        assert all(same_bits(net(x_of()), eager(net, x_of())) for _ in range(4))  # that of the capture, too
    assert rows_of(net)[0].reason == "verify_failed"


@pytest.mark.parametrize(
    "config, by, apart, reason",
    [
        (ao.Int8DynamicActivationInt8WeightConfig, 0.03, (0.05, 0.17), None),
        (ao.Int8DynamicActivationInt8WeightConfig, 0.065, (0.18, 0.25), "verify_failed"),
        (ao.Int8WeightOnlyConfig, 0.03, (0.05, 0.17), "verify_failed"),
    ],
)
def test_where_activations_are_rounded_to_eight_bits_a_compiler_may_differ_by_more(config, by, apart, reason):
    """fp8 on an H200: compiled blocks differ from eager ones by 0.08, four times as much as in bf16."""
    torch.manual_seed(0)
    net, x = Net().eval(), x_of()
    ao.quantize_(net, config(set_inductor_config=False))
    for verify in (False, True):
        accelerated(net, lambda graph, given: off(graph, given, by), verify=verify)
        with torch.no_grad():
            found = [net(x) for _ in range(3)][-1]
        if not verify:
            least, most = apart
            assert least < relative_difference(found, eager(net, x)) < most
            diffgraph.restore_pipeline(net)
    assert rows_of(net)[0].reason == reason


def test_new_sizes_compile_once_more_and_no_further():
    net = accelerated(Net())
    for rows in (5, 7, 9, 11):
        steps(net, x_of(rows))
    assert [row.compiles for row in rows_of(net)] == [1, 1, 0, 0]
    diffgraph.capture(net)
    for rows in (11, 5):
        assert steps(net, x_of(rows))[0][-1] == "replay"
    assert [row.compiles for row in rows_of(net)] == [0, 0]


class Tabled(Block):
    def forward(self, x, tables):
        return super().forward(x * tables[0].mean() + tables[1][0].mean())


class TabledNet(Net):
    def forward(self, x, positions):
        for block in self.blocks:
            x = block(x, (positions[0, ..., 0::2], (positions[0],)))  # views, as of a rotary table
        return x


def test_a_table_that_is_a_view_is_compiled_for_any_size_of_what_it_is_a_part_of():
    net = accelerated(TabledNet(Tabled(), Tabled()))
    for rows, frames in ((5, 5), (7, 7), (9, 1), (11, 9)):
        inputs = x_of(rows), torch.ones(frames, 6, 4)
        with torch.no_grad():
            assert all(close(net(*inputs), eager(net, *inputs)) for _ in range(4))
    assert [row.compiles for row in rows_of(net)] == [1, 1, 0, 0]


@pytest.mark.parametrize("family", some_slow(["wan", "pixart", "flux"], "pixart", "flux"))
def test_a_second_size_is_compiled_for_any_prompt_length_too(family):
    """Also the sizes that had not changed when it came."""
    pipe = pipelines.build(family)
    pipe.set_progress_bar_config(disable=True)
    shapes = ["32x32", "48x32", "32x64"] if family != "wan" else ["32x32x1", "48x32x17", "32x64x5"]
    calls = [DenoiserCall.of(pipe, family, shape) for shape in shapes]
    calls += [DenoiserCall.of(pipe, family, shape, prompt_length=rows) for shape, rows in zip(shapes, (24, 40, 56), strict=True)]
    accelerated(calls[0].module, prompt_buckets=None)
    assert all(map(_settles, calls))
    first, second, *others = [row.compiles for row in rows_of(calls[0].module)]
    assert first >= second > 0 and not any(others) and len(others) == 4


def test_a_block_whose_python_wants_plain_numbers_is_compiled_for_what_changes():
    class Named(Block):
        def forward(self, x):
            return super().forward(x) * {"16": 1.0}[str(x.shape[-1])]

    net = accelerated(Net(Named(), Named()))
    for rows in (5, 7, 9):
        assert steps(net, x_of(rows))[1][-1], "compiled"
    assert [row.compiles for row in rows_of(net)] == [1, 1, 0]


def test_what_else_a_forward_compiles_is_compiled_as_its_owner_wants_it():
    seen = []

    def backend(graph, given):
        seen.append([x for x in given if isinstance(x, torch.SymInt)])
        return graph.forward

    class End(torch.nn.Module):
        def forward(self, x):
            return x.tanh()

    class Ends(Net):
        def __init__(self):
            super().__init__()
            self.end = End()
            self.end.compile(backend=backend)

        def forward(self, x):
            return self.end(super().forward(x))

    net = accelerated(Ends(), prompt_buckets=None)
    for rows in (5, 7):
        steps(net, x_of(rows))
    assert [row.compiles for row in rows_of(net)] == [1, 1]
    assert {len(sizes) for sizes in seen} == {0, 1}, "of its sizes, the rows have changed"


def test_each_size_is_compiled_for_itself_where_that_is_asked_for():
    net = diffgraph.accelerate_module(Net().eval(), compile_blocks={"backend": off, "dynamic": False}, poison=True)
    for rows in (5, 7, 9):
        steps(net, x_of(rows))
    assert [row.compiles for row in rows_of(net)] == [1, 1, 1]


def test_blocks_of_several_sizes_in_one_forward_are_compiled_for_each():
    class Two(Net):
        def forward(self, x):
            return super().forward(torch.cat([super().forward(x), x], 1))

    net = accelerated(Two())
    steps(net, x_of())
    assert rows_of(net)[0].compiles == 2
    (entry,) = net._compiled_call_impl.table.entries.values()
    ops = [op for step in entry.recording.sequence.steps for op in getattr(step, "ops", [])]
    compiled = [op for op in ops if not isinstance(op.func, torch._ops.OpOverload)]
    assert len(compiled) == 12
    assert not any(isinstance(arg, int) for op in compiled for arg in op.args), "no size is left open"


def test_restored_nothing_is_left():
    net = Net().eval()
    before = _attributes(net)
    accelerated(net)
    steps(net, x_of())
    diffgraph.restore_pipeline(net)
    assert _attributes(net) == before
    assert torch.nn.Module._compiled_call_impl is None
    from torch.nn.functional import scaled_dot_product_attention

    assert scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_it_keeps_no_module_alive():
    net = accelerated(Net())
    steps(net, x_of())
    gone = weakref.ref(net.blocks[0])
    del net
    gc.collect()
    assert gone() is None


def test_a_compiler_that_always_fails_is_not_asked_for_ever():
    asked = []

    def fails(graph, _):
        asked.append(1)
        raise RuntimeError("no C++ here")

    net = accelerated(Net(), fails)
    for rows in range(5, 12):
        assert steps(net, x_of(rows))[0][-1] == "replay"
    assert len(asked) == 5, "four times, once of them in another way"
    assert all("no C++ here" in row.uncompiled for row in rows_of(net))
    diffgraph.capture(net)
    steps(net, x_of())
    assert len(asked) == 6


def _attributes(net):
    return [{name: id(value) for name, value in vars(m).items()} for m in net.modules()]


def test_another_threads_calls_stay_uncompiled_while_one_records():
    net, seen = Net().eval(), []
    x, wanted = x_of(), []

    def in_another(call):  # whose bits may differ from this thread's: it has fewer threads of its own
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    def compiler(graph, given):  # runs in the midst of a capture
        def other():
            seen.append(same_bits(net.blocks[0](x), wanted[0]))
            seen.append(net._compiled_call_impl.pending_change() is None)

        in_another(other)
        return off(graph, given)

    in_another(lambda: wanted.append(net.blocks[0](x)))
    assert steps(accelerated(net, compiler), x)[0][-1] == "replay"
    assert len(seen) > 0 and all(seen)


@pytest.mark.parametrize("where", ["compiling", "running", "recording"])
def test_where_the_compiler_fails_blocks_are_recorded_as_they_are(where, caplog):
    def fails(graph, _):
        if where == "compiling":
            raise RuntimeError("no C++ here")
        calls = []

        def run(*args):
            calls.append(1)
            if where == "running" or len(calls) > 3:
                raise RuntimeError("no C++ here")
            return graph(*args)

        return run

    net = accelerated(Net(), fails)
    with caplog.at_level(logging.WARNING, "diffgraph"):
        for rows in (5, 7):
            routes, compiled = steps(net, x_of(rows))
            assert routes == ["unseen_signature", "capture", "replay", "replay"]
            assert not any(compiled)
    assert "no C++ here" in rows_of(net)[0].uncompiled
    assert rows_of(net)[0].compiles is None and "not compiled: " in str(diffgraph.report(net))
    assert len([r for r in caplog.records if "no C++ here" in r.getMessage()]) == 1


class Drawing(Block):
    def forward(self, x):
        return super().forward(x) + torch.rand(())


class Reading(Block):
    def forward(self, x):
        return super().forward(x) * x.sum().item()


@pytest.mark.parametrize("kind", [Drawing, Reading])
def test_blocks_that_cannot_be_compiled_whole_are_recorded_as_they_are(kind):
    torch.manual_seed(0)
    net = accelerated(Net(kind(), kind()))
    with torch.no_grad():
        for i in range(3):
            torch.manual_seed(i)
            found = net(x_of())
            torch.manual_seed(i)
            assert same_bits(found, eager(net, x_of()))
    assert rows_of(net)[0].captured and rows_of(net)[0].uncompiled


def test_a_model_without_repeated_blocks_is_recorded_and_the_report_says_why():
    net = accelerated(torch.nn.Sequential(torch.nn.Linear(16, 16)))
    assert steps(net, x_of())[0][-1] == "replay"
    assert "no repeated block of Sequential" in rows_of(net)[0].uncompiled


def test_blocks_with_hooks_or_named_as_breaks_run_as_they_are():
    net = accelerated(Net(), breaks=["blocks.1"])
    assert steps(net, x_of())[0][-1] == "replay"
    assert (rows_of(net)[0].breaks, rows_of(net)[0].compiles) == (1, 1)


def test_one_whole_graph_compiles_attention_with_the_rest():
    net = accelerated(Net(), backend="full")
    assert steps(net, x_of())[1] == [False, True, False, True]
    assert (rows_of(net)[0].segments, rows_of(net)[0].breaks, rows_of(net)[0].compiles) == (1, 0, 1)


def test_what_is_compiled_already_is_refused():
    net = Net()
    net.compile(backend="eager")
    with pytest.raises(diffgraph.OptionError, match="compiled already"):
        accelerated(net)


def test_what_else_the_user_has_compiled_may_stand_in_the_forward():
    """Dynamo refuses to run compiled code under a dispatch mode, and for good."""

    class Last(torch.nn.Module):
        def forward(self, x):
            return x.sin() * 2

    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.last = Net(), Last()
            self.last.compile(backend="eager", fullgraph=True)

        def forward(self, x):
            return self.last(self.net(x))

    module = accelerated(Around())
    assert steps(module, x_of())[0] == ["unseen_signature", "capture", "replay", "replay"]
    assert rows_of(module)[0].compiles == 1 and rows_of(module)[0].uncompiled is None
    diffgraph.restore_pipeline(module)
    with torch.no_grad():
        module(x_of())


def test_what_the_user_has_compiled_inside_a_block_is_taken_in():
    net = Net()
    for block in net.blocks:
        block.out.compile(backend="eager")
    accelerated(net)
    assert steps(net, x_of())[0] == ["unseen_signature", "capture", "replay", "replay"]
    assert rows_of(net)[0].uncompiled is None and rows_of(net)[0].breaks == 3


def test_under_inference_mode_and_autocast():
    net = accelerated(Net())
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for i in range(4):
            net(x_of() + i)
    assert (rows_of(net)[0].replays, rows_of(net)[0].compiles) == (2, 1), diffgraph.report(net)


@pytest.mark.parametrize(
    ("family", "blocks"),
    [
        ("sd3", {"JointTransformerBlock"}),
        ("pixart", {"BasicTransformerBlock"}),
        ("flux", {"FluxTransformerBlock", "FluxSingleTransformerBlock"}),
    ],
)
def test_repeated_blocks_are_declared_or_found(family, blocks):
    module = pipelines.build(family).transformer
    assert {type(block).__name__ for block in repeated_blocks(module)} == blocks
    assert len(repeated_blocks(module)) == len({id(block) for block in repeated_blocks(module)})


def test_a_lora_that_comes_goes_and_is_scaled():
    net = accelerated(Net())

    def layers():
        return [m for m in net.modules() if isinstance(m, LoraLayer)]

    def add():
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["qkv", "out"], init_lora_weights=False), net, "a")

    def scale():
        for layer in layers():
            layer.set_scale("a", 0.25)

    def disable():
        for layer in layers():
            layer.enable_adapters(False)

    for change in (lambda: None, add, scale, disable):
        change()
        routes, compiled = steps(net, x_of())
        assert routes[-3:] == ["capture", "replay", "replay"] and compiled[-1]
        assert rows_of(net)[0].compiles == 1


def test_quantised_weights():
    call = _call("pixart")
    quantize(call.module, "int8")
    module = accelerated(call.module)
    assert _settles(call)
    assert diffgraph.report(module).captures == 1 and rows_of(module)[0].compiles == 1


def test_padded_prompts_share_what_is_compiled():
    call = _call("qwen_image")
    module = accelerated(call.module)
    assert _settles(call)
    short = dict(call.kwargs, encoder_hidden_states=call.kwargs["encoder_hidden_states"][:, 3:].contiguous())
    short["encoder_hidden_states_mask"] = None
    call.kwargs["encoder_hidden_states_mask"] = None
    for kwargs in (call.kwargs, short):
        assert _settles(DenoiserCall(module, call.args, kwargs))
    diffgraph.restore_pipeline(module)


def _call(family):
    pipe = pipelines.build(family)
    pipe.set_progress_bar_config(disable=True)
    call = DenoiserCall.of(pipe, family, "32x32")
    call.module.eval()
    return call


@torch.no_grad()
def _settles(call):
    """Whether calls come to replay, each of them close to eager."""
    for seed in range(4):
        new = call.with_new_inputs(seed)
        found, route = route_of(call.module, new)
        with diffgraph.paused(call.module):
            assert close(found, new())
    return route == "replay"


class Sliced(Block):
    """A part of what attention returns is taken before anything else is done."""

    def forward(self, x):
        q, k, v = self.heads(x)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)[:, :, 1:]
        return x[:, 1:] + self.out(attended.transpose(1, 2).flatten(2).contiguous())


class Expanded(Block):
    """Attention is given a mask that is one row, repeated."""

    def forward(self, x):
        q, k, v = self.heads(x)
        mask = x.mean(-1)[:, None, None, :].expand(-1, 2, x.shape[1], -1)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
        return x + self.out(attended.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("poison", [False, True])
def test_compiled_code_may_return_what_it_has_expanded(poison):
    net = diffgraph.accelerate_module(Net(Expanded(), Expanded()).eval(), compile_blocks={"backend": "aot_eager"}, poison=poison)
    assert steps(net, x_of())[0][-2:] == ["replay", "replay"] and rows_of(net)[0].uncompiled is None


def test_a_slice_of_what_attention_returns_is_no_result_of_its_own():
    net = accelerated(Net(Sliced(), Sliced()), strict)
    assert steps(net, x_of())[0][-1] == "replay" and rows_of(net)[0].uncompiled is None


class Apart(Block):
    together = "heads together"


class Joined(Block):
    """The query is contiguous, as `torch.cat` leaves it."""

    together = "rows together"

    def forward(self, x):
        qkv = self.heads(x)
        q, k, v = torch.cat([qkv[..., :2, :], qkv[..., 2:, :]], dim=-2)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(attended.transpose(1, 2).flatten(2))


RETURNS = {
    "as the query lies": lambda result: result,
    "rows together": lambda result: result.contiguous(),
    "heads together": lambda result: result.transpose(1, 2).contiguous().transpose(1, 2),
}


@pytest.mark.parametrize("kind", [Apart, Joined])
@pytest.mark.parametrize("returns", RETURNS.values(), ids=RETURNS)
def test_attention_may_return_its_results_in_any_layout(kind, returns, monkeypatch):
    attention, copied, of = torch.nn.functional.scaled_dot_product_attention, [], Layout.of
    monkeypatch.setattr(Layout, "of", lambda self, tensor: copied.append(not self.holds(tensor)) or of(self, tensor))
    nets = [accelerated(Net(kind(), kind()), strict) for _ in range(2)]
    for net in nets:  # the second is recorded when attention is another already
        assert steps(net, x_of())[0][-1] == "replay" and rows_of(net)[0].uncompiled is None
        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda *args: returns(attention(*args)))
    assert steps(nets[0], x_of(seed=1), 1)[0] == ["replay"]
    assert any(copied) == (returns is not RETURNS["as the query lies"] and returns is not RETURNS[kind.together])


@pytest.mark.parametrize(
    "given, searches",
    [
        ({}, False),
        ({"mode": "reduce-overhead"}, False),
        ({"mode": "max-autotune-no-cudagraphs"}, True),
        ({"options": {"coordinate_descent_tuning": True}}, True),
    ],
)
def test_the_search_that_torchao_switches_on_is_left_to_who_asks_for_it(given, searches):
    with torch._inductor.config.patch(coordinate_descent_tuning=True):
        config = pieces.Backend(given)._compile.config
    assert (config["coordinate_descent_tuning"], config["triton.cudagraphs"]) == (searches, False)


@torch.no_grad()
@pytest.mark.parametrize("where", ["nowhere", "options", "config"])
def test_a_pass_of_the_users_own_takes_the_place_of_ours(where, monkeypatch):
    def own(graph):
        pass

    def inductor(graph, given, **patches):
        seen.append(patches["config_patches"].get("post_grad_custom_pre_pass"))
        return graph

    seen: list[object] = []
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", inductor)
    options = {"options": {"post_grad_custom_pre_pass": own}} if where == "options" else {}
    net = diffgraph.accelerate_module(Net().eval(), compile_blocks={"backend": "inductor", **options})
    with torch._inductor.config.patch(post_grad_custom_pre_pass=own if where == "config" else None):  # set afterwards, too
        for _ in range(3):
            net(x_of())
    assert seen and rows_of(net)[0].uncompiled is None
    assert all({"nowhere": callable(s) and s is not own, "options": s is own, "config": s is None}[where] for s in seen)
    assert pieces.Backend({}) == pieces.Backend({})


#: To have C++ compiled quickly.
CHEAP = {"cpp.simdlen": 1, "cpp_cache_precompile_headers": False, "compile_threads": 1}


@pytest.mark.slow  # half a minute for a C++ compiler that has never run before
def test_inductor():
    net = diffgraph.accelerate_module(Net().eval(), compile_blocks={"options": CHEAP}, poison=True)
    for rows in (5, 7, 9):
        assert steps(net, x_of(rows))[0][-1] == "replay"
    assert [row.compiles for row in rows_of(net)] == [1, 1, 0], diffgraph.report(net)


@pytest.mark.slow  # as above
def test_products_with_int8_weights_are_not_swapped_for_those_of_language_models():
    from torch._dynamo.utils import counters

    net = Net()
    ao.quantize_(net.to(torch.bfloat16), ao.Int8WeightOnlyConfig(set_inductor_config=False))
    diffgraph.accelerate_module(net.eval(), compile_blocks={"options": CHEAP}, poison=True)
    swapped = counters["inductor"]["woq_matcher_count"]
    assert steps(net, x_of().bfloat16())[0][-1] == "replay" and rows_of(net)[0].uncompiled is None
    assert counters["inductor"]["woq_matcher_count"] == swapped


class Writing(torch.nn.Module):
    """A block that changes what it is given."""

    def __init__(self, change):
        super().__init__()
        self.layer, self.change = torch.nn.Linear(8, 8), change

    def forward(self, x, kept):
        return self.change(x, self.layer(x), kept)


class WritingNet(torch.nn.Module):
    def __init__(self, change, container):
        super().__init__()
        self.blocks, self.container = torch.nn.ModuleList(Writing(change) for _ in range(3)), container

    def forward(self, x):
        kept = self.container([x, 2 * x, 3 * x.transpose(0, 1).contiguous().transpose(0, 1)])
        for block in self.blocks:
            x = block(x.clone().transpose(0, 1), kept).transpose(0, 1)
        return x + sum(kept)


CHANGES = {
    "appends to a list": (list, lambda x, y, kept: kept.append(y.transpose(0, 1)) or y),
    "takes from a list": (list, lambda x, y, kept: y + kept.pop().transpose(0, 1)),
    "writes to a transposed input": (list, lambda x, y, kept: x.add_(y) + y),
    "writes to a tuple's tensor": (tuple, lambda x, y, kept: kept[1].add_(y.transpose(0, 1)).transpose(0, 1) + y),
    "writes to a tuple's transposed tensor": (tuple, lambda x, y, kept: kept[2].add_(y.transpose(0, 1)).transpose(0, 1) + y),
}


@pytest.mark.parametrize(("container", "change"), CHANGES.values(), ids=CHANGES)
def test_a_block_that_changes_what_it_is_given_is_right_at_every_call(container, change):
    net, x = WritingNet(change, container).eval(), torch.randn(4, 2, 8)
    wanted = eager(diffgraph.accelerate_module(net, compile_blocks={"backend": "aot_eager"}), x)
    with torch.no_grad():
        assert all(close(net(x), wanted) for _ in range(4))


class Handing(torch.nn.Module):
    """A block that does something with what it is given that tells a copy from it."""

    def __init__(self, does):
        super().__init__()
        self.layer, self.does = torch.nn.Linear(8, 8), does

    def forward(self, x, skips, kept, flag):
        return x + self.layer(x), self.does(x, skips, kept, flag)


class HandingNet(torch.nn.Module):
    """A ControlNet's residuals, say, are nothing in the first steps: adding them to a copy makes no difference then."""

    def __init__(self, does):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Handing(does) for _ in range(3))

    def forward(self, x, residual):
        for block in self.blocks:
            skip = x.permute(0, 2, 1).contiguous().permute(0, 2, 1)  # dense, and not contiguous
            kept = [skip]
            x, last = block(x.permute(0, 2, 1).contiguous().permute(0, 2, 1), (skip, skip.mT), kept, residual)
            last += residual
            x = x + skip + kept[-1]
        return x


HANDED_ON = {
    "a tuple's tensor": lambda x, skips, kept, flag: skips[0],
    "a view of it": lambda x, skips, kept, flag: skips[1].mT,
    "its input": lambda x, skips, kept, flag: (kept.append(x), x)[1],
    "a view of its input": lambda x, skips, kept, flag: (kept.append(x), x.mT.mT)[1],
    "what it keeps": lambda x, skips, kept, flag: (kept.append(skips[0]), kept[-1])[1],
    "one of two views, written to": lambda x, skips, kept, flag: skips[0].add_(flag) + skips[1].mT,
    "one of a list, written to": lambda x, skips, kept, flag: kept[0].add_(flag) + skips[0],
}


@pytest.mark.parametrize("does", HANDED_ON.values(), ids=HANDED_ON)
@torch.no_grad()
def test_a_block_that_hands_on_what_it_is_given_hands_on_the_callers_own(does):
    net = diffgraph.accelerate_module(HandingNet(does).eval(), compile_blocks={"backend": "aot_eager"})
    routes = []
    for step in range(6):
        inputs = torch.randn(1, 4, 8), torch.full((1, 4, 8), float(step >= 4))
        found, route = route_of(net, lambda inputs=inputs: net(*inputs))
        assert close(found, eager(net, *inputs)), step
        routes.append(route)
    assert routes[-1] == "replay"


def test_a_block_that_changes_inference_mode_around_attention_is_recorded_as_it_is():
    class Inferring(Block):
        @torch.inference_mode()
        def forward(self, x):
            return super().forward(x)

    net = accelerated(Net(Inferring(), Inferring()))
    with torch.no_grad():
        assert all(close(net(x_of()), eager(net, x_of())) for _ in range(4))
    assert "inference mode" in rows_of(net)[0].uncompiled and diffgraph.report(net).replays == 2
    assert torch.ones(2).add(1).sum() == 4, "the thread has gone on"
