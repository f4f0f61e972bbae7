"""`torch.compiler.nested_compile_region` of functions of containers: values and gradients, in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tdc
from tdc import TensorDict
from tdc.compile import counted
from tdc.testing import assert_close

region: Callable[..., Any] = torch.compiler.nested_compile_region


@tdc.tensorclass
class Point:
    x: Tensor
    name: str


def packed() -> tdc.NestedTensor:
    return tdc.pack([torch.randn(2, 3), torch.randn(4, 3)])


def nested() -> TensorDict:
    return TensorDict({"x": torch.randn(2, 3), "n": {"r": packed()}}, [2])


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "tensordict": (nested, lambda td: td.set("x", td["x"].sin())),
    "ragged leaf": (nested, lambda td: td.set("s", td["n", "r"].sum(1))),
    "packed": (packed, lambda x: x.softmax(1) * 2),
    "padded": (lambda: packed().to_padded(), lambda x: x.sin()),
    "two levels": (lambda: tdc.pack([packed(), packed()[:1]]), lambda x: x.sin() * 2),
    "tensorclass": (lambda: Point(torch.randn(3), "a", batch_size=[3]), lambda p: p.replace(x=p.x * 2)),
    "tuple": (nested, lambda td: (td, td["x"] * 2, None)),
    "dict": (nested, lambda td: {"td": td * 2, "sum": td["x"].sum()}),
    "unchanged": (nested, lambda td: td),
    "a list": (lambda: [packed(), nested()], lambda xs: [xs[0].exp(), xs[1]["x"]]),
}


@pytest.mark.cases(2, 2)
@pytest.mark.parametrize("name", CASES)
def test_a_region_takes_and_returns_containers(name: str):
    make, fn = CASES[name]
    x, inner = make(), region(fn)
    assert_close(counted(lambda x: inner(x), backend="aot_eager", fullgraph=True)(x), fn(x))


def test_two_regions_of_one_form_stay_apart():
    sine, cosine = region(lambda td: td.apply(torch.sin)), region(lambda td: td.apply(torch.cos))
    td = nested()
    found = counted(lambda td: (sine(td), cosine(td), sine(cosine(td))), backend="aot_eager", fullgraph=True)(td)
    assert_close(found, (td.apply(torch.sin), td.apply(torch.cos), td.apply(torch.cos).apply(torch.sin)))


def test_gradients_of_layers_in_regions():
    torch.manual_seed(0)
    net, x = nn.Linear(3, 3), packed()
    layer = region(lambda x: torch.relu(net(x)) + x)

    def loss(x: Any) -> Tensor:
        return layer(layer(x)).mean(1).square().sum()

    wanted = torch.autograd.grad(loss(x), [*net.parameters()])
    found = torch.autograd.grad(counted(loss, backend="aot_eager", fullgraph=True)(x), [*net.parameters()])
    torch.testing.assert_close(found, wanted)


def test_regions_in_a_training_step():
    torch.manual_seed(0)
    net, x = nn.Linear(3, 3), packed()
    layer = region(lambda net, x: torch.tanh(net(x)))

    def loss(net: nn.Module, x: Any) -> Tensor:
        return layer(net, x).square().mean()

    steps = [
        tdc.compile.train_step(net, loss, tdc.optim.sgd(0.1), compile=False),
        tdc.compile.train_step(net, loss, tdc.optim.sgd(0.1), backend="aot_eager"),
    ]
    states = [step(step.init(), x)[0]["params"] for step in steps]
    assert_close(states[1], states[0])
