"""What each of two processes does in `test_ranks`: the acts, each a name and what this rank saw of it."""

import gc
import traceback
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
import torch.distributed as dist

import diffgraph
from benchmarks.parallel import one_device_a_rank
from diffgraph.devices.collectives import arrived
from diffgraph.engine.current import open_recorder
from diffgraph.parallel import ranks as ranks_module
from diffgraph.parallel.ranks import ranks_of
from diffgraph.recording import verification
from diffgraph.values.compare import same_bits

ACTS = {}
PLACE = []  # of weights and inputs
WORLD = 2


def act(fn):
    ACTS[fn.__name__] = fn
    return fn


def run(rank, port, device, answers):
    """All acts, on one rank; `answers` takes what it saw of each."""
    torch.set_num_threads(1)
    if device != "cpu":
        torch.cuda.set_device(rank)
        verification.MAX_SLOWER = float("inf")  # toys are faster without breaks
    PLACE.append(torch.device(device))
    store = dist.TCPStore("127.0.0.1", port, WORLD, is_master=rank == 0)
    dist.init_process_group("gloo" if device == "cpu" else "nccl", store=store, rank=rank, world_size=WORLD)
    ranks_module.TIMEOUT_S = 100.0
    with one_device_a_rank(device):
        for name, fn in acts(device).items():
            try:
                seen = fn(rank)
            except Exception:
                seen = traceback.format_exc()
            answers.put((rank, name, seen))
    gc.collect()  # NCCL waits for the graphs that hold its collectives
    dist.destroy_process_group()


def acts(device):
    return {name: fn for name, fn in ACTS.items() if device == "cpu" or name not in CPU_ALONE}


# -- what is computed in parallel


def qwen_image():
    from diffusers import QwenImageTransformer2DModel

    sizes = {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    return QwenImageTransformer2DModel(**sizes, joint_attention_dim=32, axes_dims_rope=(4, 6, 6))


def qwen_image_inputs(seed, side=8, text=8):
    given = {
        "hidden_states": noise(seed, 1, side * side, 16),
        "encoder_hidden_states": noise(seed + 1, 1, text, 32),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, side, side)]],
        "return_dict": False,
    }
    return placed(given)


def flux():
    from diffusers import FluxTransformer2DModel

    sizes = {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    return FluxTransformer2DModel(**sizes, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6))


def flux_inputs(seed, side=8, text=8):
    given = {
        "hidden_states": noise(seed, 1, side * side, 16),
        "encoder_hidden_states": noise(seed + 1, 1, text, 32),
        "pooled_projections": noise(seed + 2, 1, 32),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(side * side, 3),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }
    return placed(given)


FAMILIES = {"qwen_image": (qwen_image, qwen_image_inputs), "flux": (flux, flux_inputs)}


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def placed(inputs):
    return {name: value.to(PLACE[0]) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def ring_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, _parallel_config=None
):
    """diffusers' ring, with a kernel that returns a log-sum-exp: of those that it registers none does on a CPU, or in float32."""
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    def forward_op(_, q, k, v, *args, **kwargs):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if q.device.type == "cpu":
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        else:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True)
            lse = lse[..., : q.shape[-2]]  # of which it makes a multiple of 32
        return out.transpose(1, 2), lse.transpose(1, 2)

    ops = {"forward_op": forward_op, "backward_op": None, "_parallel_config": _parallel_config}
    return _templated_context_parallel_attention(query, key, value, None, 0.0, False, scale, **ops)


def denoiser(family="flux", kind="ulysses", **options):
    from diffusers import ContextParallelConfig

    torch.manual_seed(0)
    module = FAMILIES[family][0]().eval().to(PLACE[0])
    module.enable_parallelism(config=ContextParallelConfig(**{f"{kind}_degree": WORLD}))
    return diffgraph.accelerate_module(module, poison=module.device.type == "cpu", **options)


def called(module, inputs):
    """The route of a call, and whether it gave what parallel eager does."""
    from _toys import route_of

    with torch.no_grad():
        found, route = route_of(module, lambda: arrived(module(**inputs)[0]))
        with diffgraph.paused(module):
            wanted = arrived(module(**inputs)[0])
    return route if same_bits(found, wanted) else f"{route}: not what eager gives"


def calls(module, seeds, family="flux", **shape):
    return [called(module, FAMILIES[family][1](10 * seed, **shape)) for seed in seeds]


def settled(**options):
    module = denoiser(**options)
    calls(module, range(3))
    return module


@contextmanager
def replaced(holder, name, value):
    found = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, found)


def failing(module, when, error):
    """`module` with a forward that raises `error`, once, when `when()` is true."""
    found, left = module.forward, [error]

    def forward(*args, **kwargs):
        if left and when():
            raise left.pop()
        return found(*args, **kwargs)

    return replaced(module, "forward", forward)


# -- the acts


@contextmanager
def a_ring():
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    native = next(backend for backend in Registry._backends if backend.value == "native")
    found = Registry._backends[native]
    Registry._backends[native] = ring_attention
    try:
        yield
    finally:
        Registry._backends[native] = found


def _equal(family, kind, rank, **options):
    with a_ring() if kind == "ring" else nullcontext():
        module = denoiser(family, kind, **options)
        routes = calls(module, range(4), family)
    signatures = diffgraph.report(module).signatures
    return routes, [(signature.segments, signature.breaks) for signature in signatures]


#: Of what is recorded: the segments and breaks that must come of it, for a denoiser with two attentions.
EQUAL = {
    "ulysses": ({}, (1, 0)),
    "ulysses, breaks at collectives": ({"collectives": "break"}, (10, 9)),
    "ulysses, breaks at attention": ({"breaks": "attention"}, (3, 2)),
    "ulysses, full": ({"backend": "full"}, (1, 0)),
    "ulysses, eager": ({"backend": "eager"}, (0, 0)),
    "ring": ({}, (1, 0)),
    "ring, breaks at attention": ({"breaks": "attention"}, (3, 2)),
}
#: Each family in the ways that differ for it, the smaller one in all.
PAIRS = [("qwen_image", name) for name in ("ulysses", "ring")] + [("flux", name) for name in EQUAL]
for _family, _name in PAIRS:
    ACTS[f"{_family}: {_name}"] = partial(_equal, _family, _name.partition(",")[0], **EQUAL[_name][0])


def kinds(routes):
    """Routes without the reasons of eager ones, which each rank has for itself."""
    return [route if route in ("replay", "capture") or ":" in route else "eager" for route in routes]


def out_of_memory():
    return torch.OutOfMemoryError("injected")


@act
def out_of_memory_while_recording(rank):
    module = denoiser()
    with failing(module.single_transformer_blocks[0].norm, lambda: rank == 1 and open_recorder() is not None, out_of_memory()):
        return calls(module, range(4))


@act
def an_error_while_recording_around_breaks(rank):
    module = denoiser(breaks="attention")
    with failing(module.proj_out, lambda: rank == 1 and open_recorder() is not None, ValueError("injected")):
        return calls(module, range(4))


@act
def an_error_in_a_break_of_the_first_replay(rank):
    module = denoiser(breaks="attention")
    found = [calls(module, range(2))]
    functional = torch.nn.functional
    plainly = functional.scaled_dot_product_attention
    left = [ValueError("injected")]

    def fails_once(*args, **kwargs):
        if rank == 1 and left:
            raise left.pop()
        return plainly(*args, **kwargs)

    with replaced(functional, "scaled_dot_product_attention", fails_once):
        return found[0] + calls(module, range(2, 5))


def without_room(rank, times):
    """Calls of a settled denoiser whose memory has run out, on one rank, when it is asked for room for a replay's result."""
    module = settled()
    recording = next(iter(_runner(module).table.entries.values())).recording
    left, room = [out_of_memory()] * times, recording._room

    def no_room():
        if rank == 1 and left:
            raise left.pop()
        return room()

    recording._room = no_room
    return kinds(calls(module, range(6)))


@act
def out_of_memory_at_a_replay(rank):
    return without_room(rank, 1)


@act
def out_of_memory_for_good_at_a_replay(rank):
    return without_room(rank, 2)


@act
def a_replay_that_differs(rank):
    from diffgraph.routing import visit

    with replaced(visit, "is_same", visit.is_same if rank == 0 else lambda *_: False):
        return calls(denoiser(), range(5))


@act
def a_change_on_one_rank(rank):
    module = settled()
    if rank == 1:
        module.time_text_embed.note = "changed"
    return kinds(calls(module, range(6)))


@act
def a_change_on_both(rank):
    module = settled()
    module.time_text_embed.note = "changed"
    return calls(module, range(3)) + calls(module, range(3), side=4) + calls(module, range(2))


@act
def paused_on_one_rank(rank):
    module = settled()
    with diffgraph.paused(module) if rank == 1 else nullcontext():
        calls(module, [0])  # who is ahead may replay it
        meanwhile = kinds(calls(module, [1, 2]))
    return meanwhile + kinds(calls(module, [3]))


@act
def evicted_by_a_limit(rank):
    module = settled(max_graphs=1)
    return calls(module, range(3), side=4) + calls(module, range(3))


@act
def replays_in_a_row(rank):
    module = settled()
    calls(module, range(3), side=4)
    ranks = ranks_of(module)
    inputs = [flux_inputs(0), flux_inputs(0, side=4)]
    with torch.no_grad():
        module(**inputs[0])  # the ranks find that they agree, and speak no more
        spoken = ranks._turn, ranks._meeting
        for i in range(40):
            module(**inputs[i % 2])
    assert (ranks._turn, ranks._meeting) == spoken
    return calls(module, [5]) + calls(module, [5], side=4)


@act
def two_pipelines_of_one_group(rank):
    first, second = settled(), settled(family="flux", breaks="attention")
    return [route for i in range(3) for module in (first, second) for route in calls(module, [i])]


@act
def the_example(rank):
    """Start-up capture through a whole pipeline."""
    import pipelines
    from examples.parallel import create

    pipe = create(lambda: pipelines.build("flux").to(PLACE[0]), ["64x64"])
    pipe.set_progress_bar_config(disable=True)
    given = pipelines.inputs("flux", pipe, height=64, width=64)

    def picture():
        noise = torch.Generator().manual_seed(0)
        return pipe(**given, num_inference_steps=3, output_type="latent", generator=noise).images

    before = diffgraph.report(pipe)
    found = picture()
    after = diffgraph.report(pipe)
    with diffgraph.paused(pipe):
        wanted = picture()
    return after.replays - before.replays, after.eager - before.eager, same_bits(found, wanted)


@act
def the_benchmark(rank):
    from contextlib import redirect_stdout
    from io import StringIO

    from benchmarks import parallel

    options = ["--size", "tiny", "--device", PLACE[0].type, "--repeats", "1", "--families", "flux"]
    with redirect_stdout(StringIO()) as printed:
        assert parallel.main([*options, "--replays", "10"]) == 0
    return printed.getvalue()


#: On a GPU, these end in an error where the other rank is ahead: NCCL wants a collective in a graph on all ranks or on none.
CPU_ALONE = ("out_of_memory_for_good_at_a_replay", "a_change_on_one_rank", "paused_on_one_rank")


@act
def a_hang_while_recording(rank):
    """The last act: the ranks do not find back together. Rank 1 stays away until rank 0 has given up."""
    module = denoiser()
    store = dist.distributed_c10d._get_default_store()

    def stuck():
        if rank == 1 and open_recorder() is not None:
            store.wait(["rank 0 has given up"])
            return True
        return False

    with failing(module.single_transformer_blocks[0].norm, stuck, ValueError("injected")):
        try:
            calls(module, [0])
            ranks_module.TIMEOUT_S = 2.0
            calls(module, [1])
        except diffgraph.RankError as error:
            return str(error)
        finally:
            if rank == 0:
                store.set("rank 0 has given up", "")


def _runner(module):
    from diffgraph.routing.installed import accelerated

    return accelerated(module)[0]
