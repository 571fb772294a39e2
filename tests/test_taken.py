"""A forward that takes items out of a list that it is given does so on every route."""

import pytest
import torch

import diffgraph
from diffgraph.taken import Lists


class Pops(torch.nn.Module):
    """As diffusers' UNets with an adapter's features: as many as there are blocks are popped, first to last."""

    def __init__(self, blocks=2):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(blocks))

    def forward(self, x, residuals=None):
        for layer in self.layers:
            x = torch.nn.functional.scaled_dot_product_attention(*[layer(x)] * 3)
            if residuals:
                x = x + residuals.pop(0)
        return x


class Appends(Pops):
    def forward(self, x, residuals=None):
        residuals.append(x)
        return super().forward(x)


def features(count):
    return [torch.randn(2, 4, 8) for _ in range(count)]


@pytest.mark.parametrize("options", [{}, {"backend": "eager"}, {"verify": False}, {"backend": "full"}], ids=str)
@torch.no_grad()
def test_the_caller_finds_its_list_as_eager_leaves_it(options):
    eager = Pops().eval()
    module = Pops().eval()
    module.load_state_dict(eager.state_dict())
    diffgraph.accelerate_module(module, **options)
    for _ in range(4):
        x, given = torch.randn(2, 4, 8), features(3)
        mine = list(given)
        for left in (1, 0, 0):  # the next call goes on with what is left
            kept = list(given)
            assert torch.equal(module(x, residuals=mine), eager(x, residuals=kept))
            assert len(mine) == len(kept) == left and all(a is b for a, b in zip(mine, kept, strict=True))
            given = kept
    report = diffgraph.report(module)
    assert report.captures == 3 and report.replays >= 5 and set(report.reasons) == {"unseen_signature"}


@torch.no_grad()
def test_what_is_more_than_taking_out_is_a_side_effect():
    module = diffgraph.accelerate_module(Appends().eval())
    for _ in range(3):
        module(torch.randn(2, 4, 8), residuals=features(1))
    assert diffgraph.report(module).reasons["side_effects"] == 2


def test_lists_know_what_is_left():
    first, second = [1, 2, 3], ["a"]
    lists = Lists((first, 5), {"b": second, "c": (1, 2)})
    assert lists.left() == ()
    del first[1]
    assert lists.left() == ((0, 2), (0,))
    with lists.as_given():
        assert first == [1, 2, 3]
    assert first == [1, 3]
    second.append("b")
    assert lists.left() == ()
    lists.put_back()
    assert (first, second) == ([1, 2, 3], ["a"])
    assert Lists((first, first), {}).left() == ()
