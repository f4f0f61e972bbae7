"""Compiled functions of batches whose dims lie elsewhere in each call, and of numbers that vary, as all do under
`dynamic=True`.

Dynamo makes an int of an argument a symbol where it differs between calls. Which dims are ragged must stay a constant:
of a symbol it answered `1 in x.ragged_dims` with False, and a graph computed other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from tdc.compile import counted
from tdc.testing import assert_close

Make = Callable[[int], Any]
SMALL = torch.Generator().manual_seed(0)


def rows(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, generator=SMALL) for shape in shapes]


LAYOUTS: dict[str, Make] = {
    "sequences": lambda k: tdc.pack(rows((3 + k, 4), (2, 4))),
    "channels first": lambda k: tdc.pack(rows((4, 3 + k), (4, 2)), ragged_dim=2),
    "images": lambda k: tdc.pack(rows((4, 5 + k, 3), (4, 3, 5)), ragged_dim=(2, 3)),
    "batch second": lambda k: tdc.pack(rows((3 + k, 4), (2, 4))).transpose(0, 1),
}
PADDED = pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])


def made(layout: str, padded: bool, k: int = 0) -> Any:
    x = LAYOUTS[layout](k)
    return x.to_padded() if padded else x


def mixed(x: Any) -> Any:
    """An operation of each sort: along ragged dims, along features, a view, over everything."""
    first = x.ragged_dims[0]
    features = x.ndim - 1 if x.ndim - 1 not in x.ragged_dims else 1
    return x.softmax(first) * 2, x.sum(x.ragged_dims), x.amax(features), x.unsqueeze(0).relu(), x.mean()


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("dynamic", [None, True])
@PADDED
def test_batches_of_other_layouts_in_turn(padded: bool, dynamic: bool | None):
    f = counted(mixed, backend="eager", dynamic=dynamic)
    for k in range(3):
        for layout in LAYOUTS:
            x = made(layout, padded, k)
            assert_close(f(x), mixed(x))
    assert f.counts.compiles == len(LAYOUTS)


MODULES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "encoder": ("sequences", lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)),
    "norms": ("channels first", lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.BatchNorm1d(4))),
    "convnet": (
        "images",
        lambda: nn.Sequential(nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4), nn.MaxPool2d(2, 1), nn.Upsample(None, 2)),
    ),
}


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", MODULES)
@PADDED
def test_modules_where_all_sizes_vary(name: str, padded: bool):
    """Numbers of modules and of default arguments are symbols, too: `eps` in a derivative, what fills padding."""
    layout, make = MODULES[name]
    torch.manual_seed(0)
    net = make()
    f = counted(net, backend="eager", dynamic=True)
    for k in range(3):
        x = made(layout, padded, k)
        found, wanted = f(x), net(x)
        assert_close(found, wanted)
        weights = list(net.parameters())
        assert_close(*[torch.autograd.grad(y.square().sum(), weights) for y in (found, wanted)], rtol=1e-4, atol=1e-4)
    assert f.counts.compiles == 1


NUMBERS: dict[str, tuple[str, Callable[[Any, int], Any]]] = {
    "topk": ("sequences", lambda x, n: x.topk(n, 1)[0]), "kthvalue": ("sequences", lambda x, n: x.kthvalue(n, 1)[0]),
    "repeat_interleave": ("sequences", lambda x, n: x.repeat_interleave(n, -1)),
    "unfold": ("channels first", lambda x, n: x.unfold(2, n, 1)),
    "norm": ("sequences", lambda x, n: x.norm(n + 0.5, 1)),
    "normalize": ("sequences", lambda x, n: F.normalize(x, n + 0.5, 1)), "max_pool1d": ("channels first", F.max_pool1d),
    "avg_pool2d": ("images", F.avg_pool2d), "lp_pool1d": ("channels first", lambda x, n: F.lp_pool1d(x, 2.0, n)),
    "sum": ("sequences", lambda x, n: x.sum(n)), "stack": ("sequences", lambda x, n: torch.stack([x, x], n)),
    "pad": ("sequences", lambda x, n: F.pad(x, (0, 0, n, 0))), "slice": ("sequences", lambda x, n: x[:, n:]),
}  # fmt: skip


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("name", NUMBERS)
@PADDED
def test_numbers_that_vary(name: str, padded: bool):
    layout, fn = NUMBERS[name]
    x = made(layout, padded)
    f = torch.compile(fn, backend="eager", fullgraph=True)
    numbers = (1, 2, 1) if "norm" not in name else (1.0, 2.0, math.inf, 1.0, -math.inf)
    for n in numbers:
        assert_close(f(x, n), fn(x, n))


@pytest.mark.cases(0, 1)
@PADDED
def test_images_scaled_where_all_sizes_vary(padded: bool):
    x = made("images", padded)
    f = torch.compile(lambda x: F.interpolate(x, scale_factor=1.5), backend="eager", fullgraph=True, dynamic=True)
    assert_close(f(x), F.interpolate(x, scale_factor=1.5))


def test_numbers_of_a_tensordict_where_all_vary():
    td = tdc.TensorDict({"x": torch.arange(3.0)}, [3])
    f = torch.compile(lambda td, low, high: td.clamp(low, high), backend="eager", fullgraph=True, dynamic=True)
    for high in (1.0, 1.5):
        assert_close(f(td, 0.5, high), td.clamp(0.5, high))


@pytest.mark.sweep
@pytest.mark.slow
def test_a_graph_takes_no_bound_that_varies_for_another():
    """A short row is refused where the bound is an argument of the graph."""
    f = torch.compile(lambda x, k: x.topk(k, 1)[0], backend="eager", fullgraph=True)
    x = LAYOUTS["sequences"](0)
    for k in (1, 2):
        f(x, k)
    with pytest.raises((tdc.ShapeError, RuntimeError), match="at least n elements in each row"):
        f(x, 3)
