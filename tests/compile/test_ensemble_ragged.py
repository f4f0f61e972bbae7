"""Ensembles on ragged batches in one graph: one transform of `torch.func` inside another, of operations that have a
derivative of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from versions import refused

import tdc
from tdc.compile import counted, train_step
from tdc.optim import sgd

LENGTHS = ((3, 5, 2), (4, 1), (1, 6, 2, 2))
WIDTH = 4


class Rows(nn.Module):
    """A number for each example, by a function of one batch of rows."""

    def __init__(self, fn: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.first, self.fn, self.head = nn.Linear(WIDTH, WIDTH), fn, nn.Linear(WIDTH, 1)

    def forward(self, x: Any) -> Tensor:
        return self.head(self.fn(self.first(x)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True)

    def forward(self, x: Any) -> Tensor:
        return self.layer(x).mean(1)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Linear(WIDTH, 1)

    def forward(self, x: Any) -> Tensor:
        return self.head(F.avg_pool2d(F.relu(self.conv(x)), 1).mean((2, 3)))


def rows(lengths: Any) -> Any:
    return tdc.pack([torch.randn(n, WIDTH) for n in lengths])


def images(lengths: Any) -> Any:
    return tdc.pack([torch.randn(3, n, n + 1) for n in lengths], ragged_dim=(2, 3))


NETS: dict[str, Callable[[], nn.Module]] = {
    "attention": Encoder,
    "images": Images,
    "softmax": lambda: Rows(lambda y: (y.softmax(1) * y).sum(1)),
    "cumsum": lambda: Rows(lambda y: y.cumsum(1).mean(1)),  # with sums training diverges, and differences grow
    "prod": lambda: Rows(lambda y: y.prod(1)),
    "amax": lambda: Rows(lambda y: y.amax(1)),
    "sort": lambda: Rows(lambda y: y.sort(1)[0].cumsum(1).mean(1)),
    "to_padded": lambda: Rows(lambda y: y.to_padded(0.0).sum(1)),
    "flip": lambda: Rows(lambda y: (y.flip(1) * y).sum(1)),
    "slice": lambda: Rows(lambda y: y[:, 1:].sum(1)),
}


def batches(name: str) -> list[Any]:
    return [tdc.compile.dynamic((images if name == "images" else rows)(lengths)) for lengths in LENGTHS]


def loss(net: nn.Module, x: Any) -> Tensor:
    return net(x).square().mean()


OLD = "isIntList|Expected FakeTensor"  # what torch 2.11 says where totals are data


FAST = ("attention", "softmax", "slice")


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", NETS)
def test_an_ensemble_trains_in_one_graph(name: str):
    net = NETS[name]()
    one = tdc.from_module(net, buffers=False).apply(lambda p: p.detach())
    params = torch.stack([one, one + 0.1])
    graph, eager = [
        train_step(net, loss, sgd(0.1), backend="aot_eager").vmap(),
        train_step(net, loss, sgd(0.1), compile=False).vmap(),
    ]
    state, want = graph.init(params), eager.init(params)
    with refused(OLD, name in ("images", "slice")):
        for x in batches(name):
            state, found = graph(state, x)
            want, expected = eager(want, x)
            assert_close(found["loss"], expected["loss"])
        assert_close(state["params"].to_dict(), want["params"].to_dict())
        assert (graph.counts.graphs, graph.counts.breaks, graph.counts.compiles) == (1, 0, 1)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in NETS])
def test_gradients_of_each_member_in_one_graph(name: str):
    net = NETS[name]()
    one = tdc.from_module(net, buffers=False).apply(lambda p: p.detach())
    params = torch.stack([one, one * 0.5])

    def gradients(params: Any, x: Any) -> Any:
        return tdc.vmap(tdc.grad(lambda p: loss_at(net, p, x)))(params)

    run = counted(gradients, backend="aot_eager")
    with refused(OLD, name in ("images", "slice")):
        for x in batches(name):
            found = run(params, x)
            for k in range(2):
                assert_close(found[k].to_dict(), tdc.grad(lambda p, x=x: loss_at(net, p, x))(params[k]).to_dict())
        assert (run.counts.graphs, run.counts.breaks, run.counts.compiles) == (1, 0, 1)


def loss_at(net: nn.Module, params: Any, x: Any) -> Tensor:
    return tdc.functional_call(net, params, (x,)).square().mean()
