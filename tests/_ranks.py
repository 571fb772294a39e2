"""What each of two processes does in `test_ranks`: the acts, each a name and what this rank saw of it."""

import traceback
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist

import diffgraph
from diffgraph import ranks as ranks_module
from diffgraph.collectives import arrived
from diffgraph.compare import same_bits
from diffgraph.current import open_recorder
from diffgraph.ranks import ranks_of

ACTS = {}
WORLD = 2


def act(fn):
    ACTS[fn.__name__] = fn
    return fn


def run(rank, port, answers):
    """All acts, on one rank; `answers` takes what it saw of each."""
    torch.set_num_threads(1)
    torch.accelerator.device_count = lambda: 1  # by which diffusers divides, and which is 0 on a CPU
    store = dist.TCPStore("127.0.0.1", port, WORLD, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    ranks_module.TIMEOUT_S = 30.0
    for name, fn in ACTS.items():
        try:
            seen = fn(rank)
        except Exception:
            seen = traceback.format_exc(limit=-6)
        answers.put((rank, name, seen))
    dist.destroy_process_group()


# -- what is computed in parallel


def qwen_image():
    from diffusers import QwenImageTransformer2DModel

    sizes = {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    return QwenImageTransformer2DModel(**sizes, joint_attention_dim=32, axes_dims_rope=(4, 6, 6))


def qwen_image_inputs(seed, side=8, text=8):
    return {
        "hidden_states": noise(seed, 1, side * side, 16),
        "encoder_hidden_states": noise(seed + 1, 1, text, 32),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[(1, side, side)]],
        "return_dict": False,
    }


def flux():
    from diffusers import FluxTransformer2DModel

    sizes = {"in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2}
    return FluxTransformer2DModel(**sizes, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 6, 6))


def flux_inputs(seed, side=8, text=8):
    return {
        "hidden_states": noise(seed, 1, side * side, 16),
        "encoder_hidden_states": noise(seed + 1, 1, text, 32),
        "pooled_projections": noise(seed + 2, 1, 32),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.zeros(side * side, 3),
        "txt_ids": torch.zeros(text, 3),
        "return_dict": False,
    }


FAMILIES = {"qwen_image": (qwen_image, qwen_image_inputs), "flux": (flux, flux_inputs)}


def noise(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ring_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, _parallel_config=None):
    """diffusers' ring, with the CPU's kernel that returns a log-sum-exp: of those that it registers none does on a CPU."""
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    def forward_op(_, q, k, v, *args, **kwargs):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        return out.transpose(1, 2), lse.transpose(1, 2)

    ops = {"forward_op": forward_op, "backward_op": None, "_parallel_config": _parallel_config}
    return _templated_context_parallel_attention(query, key, value, None, 0.0, False, scale, **ops)


def denoiser(family="flux", kind="ulysses", **options):
    from diffusers import ContextParallelConfig

    torch.manual_seed(0)
    module = FAMILIES[family][0]().eval()
    module.enable_parallelism(config=ContextParallelConfig(**{f"{kind}_degree": WORLD}))
    return diffgraph.accelerate_module(module, **{"poison": True, **options})


def called(module, inputs):
    """The route of a call, and whether it gave what parallel eager does."""
    from _toys import route_of

    with torch.no_grad():
        found, route = route_of(module, lambda: module(**inputs)[0])
        with diffgraph.paused(module):
            wanted = module(**inputs)[0]
    return route if same_bits(arrived(found), arrived(wanted)) else f"{route}: not what eager gives"


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
def a_ring_on_the_cpu():
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    native = next(backend for backend in Registry._backends if backend.value == "native")
    found = Registry._backends[native]
    Registry._backends[native] = ring_attention
    try:
        yield
    finally:
        Registry._backends[native] = found


def _equal(family, kind, **options):
    with a_ring_on_the_cpu() if kind == "ring" else nullcontext():
        module = denoiser(family, kind, **options)
        routes = calls(module, range(5), family)
    shape = [(s.segments, s.breaks) for s in diffgraph.report(module).signatures]
    return {"routes": routes, "recorded": shape}


for _family in FAMILIES:
    for _kind, _options in {
        "ulysses": {},
        "ulysses_break": {"collectives": "break"},
        "ulysses_attention": {"breaks": "attention"},
        "ulysses_full": {"backend": "full"},
        "ulysses_eager": {"backend": "eager"},
        "ring": {},
        "ring_attention": {"breaks": "attention"},
    }.items():
        name = f"{_family}_{_kind}"
        ACTS[name] = lambda rank, f=_family, k=_kind.partition("_")[0], o=_options: _equal(f, k, **o)
