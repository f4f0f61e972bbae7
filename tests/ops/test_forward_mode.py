"""Derivatives in a direction where rows are packed and padded, against those of each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.autograd import forward_ad

import tdc
from tdc import NestedTensor

LENGTHS = (4, 2, 5)
WEIGHT = torch.linspace(-1, 1, 12, dtype=torch.float64).view(2, 3, 2)


def batch(seed: int = 0) -> NestedTensor:
    """Rows (L, 3)."""
    g = torch.Generator().manual_seed(seed)
    return tdc.pack([torch.randn(n, 3, generator=g, dtype=torch.float64) for n in LENGTHS])


def first(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function of (L, 3) from one that wants channels first."""
    return lambda x: fn(x.transpose(-1, -2)).transpose(-1, -2)


# of the batch, and of one row
OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "cumsum": (lambda x: x.cumsum(1), lambda r: r.cumsum(0)),
    "cumprod": (lambda x: x.cumprod(1), lambda r: r.cumprod(0)),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), lambda r: r.logcumsumexp(0)),
    "to_padded": (lambda x: (x.to_padded(7.0) * 2).to_packed(), lambda r: r * 2),
    "matmul": (lambda x: torch.matmul(torch.matmul(x, x.transpose(1, 2)), x), lambda r: r @ r.T @ r),
    "conv1d": (first(lambda x: F.conv1d(x, WEIGHT)), first(lambda r: F.conv1d(r, WEIGHT))),
    "max_pool1d": (first(lambda x: F.max_pool1d(x, 2)), first(lambda r: F.max_pool1d(r[None], 2)[0])),
    "interpolate": (
        first(lambda x: F.interpolate(x, scale_factor=2.0, mode="linear")),
        first(lambda r: F.interpolate(r[None], scale_factor=2.0, mode="linear")[0]),
    ),
}


def direction(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, t: tdc.jvp(fn, (x,), (t,))[1]


def twice(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The Hessian of a sum of squares times a direction, forward over reverse."""

    def square(y: Any) -> Tensor:
        return (y.values if isinstance(y, NestedTensor) else y).square().sum()

    return direction(tdc.grad(lambda x: square(fn(x))))


def check(got: NestedTensor, name: str, order: Callable[..., Any]) -> None:
    """Rows of a result are those of the function of one row."""
    of_row = OPS[name][1]
    want = [order(of_row)(x, t) for x, t in zip(batch().unbind(), batch(1).unbind(), strict=True)]
    torch.testing.assert_close(list(got.unbind()), want)


@pytest.mark.parametrize("order", [direction, twice])
@pytest.mark.parametrize("name", OPS)
def test_eager(name: str, order: Callable[..., Any]):
    check(order(OPS[name][0])(batch(), batch(1)), name, order)


@pytest.mark.parametrize(
    ("name", "order"),
    [("cumsum", twice), *[pytest.param("conv1d", order, marks=pytest.mark.slow) for order in (direction, twice)]],
)
def test_compiled(name: str, order: Callable[..., Any]):
    if order is twice and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 does not trace forward over reverse")
    f = tdc.compile.counted(order(OPS[name][0]), backend="aot_eager")
    check(f(batch(), batch(1)), name, order)
    assert f.counts.compiles == 1


@pytest.mark.parametrize("jac", [tdc.jacfwd, tdc.jacrev])
def test_jacobian(jac: Callable[..., Any]):
    """Of the first element of each row's running sum: one for each element."""
    x = batch()
    s, values = x.structure, x.values
    got = jac(lambda v: x.with_values(v).to_padded(0.5).data.cumsum(1)[:, -1])(values)
    rows = torch.repeat_interleave(x.lengths)
    want = torch.zeros(len(LENGTHS), 3, *values.shape, dtype=values.dtype)
    for n, row in enumerate(rows.tolist()):
        want[row, :, n] = torch.eye(3, dtype=values.dtype)
    torch.testing.assert_close(got, want)
    assert s is x.structure


def test_hessian():
    x = batch()
    got = tdc.hessian(lambda v: x.with_values(v).cumprod(1).values.square().sum())(x.values)
    want = torch.zeros_like(got)
    at = 0
    for row in x.unbind():
        n = len(row)
        of = torch.func.hessian(lambda r: r.cumprod(0).square().sum())(row)
        want[at : at + n, :, at : at + n] = of
        at += n
    torch.testing.assert_close(got, want)


def test_gradients_stay_gathers():
    """A graph of a gradient has no scatter: the traced function brings its own way back."""
    ops: list[str] = []

    def note(graph: Any, inputs: Any) -> Any:
        def inner(g: Any, _: Any) -> Any:
            ops.extend([str(node.target) for node in g.graph.nodes])
            return make_boxed_func(g.forward)

        return aot_autograd(fw_compiler=inner, bw_compiler=inner)(graph, inputs)

    x = batch()
    f = torch.compile(lambda v: x.with_values(v).to_padded().data.square().sum(), backend=note, fullgraph=True)
    v = x.values.clone().requires_grad_()
    f(v).backward()
    torch.testing.assert_close(v.grad, 2 * x.values)
    assert not [op for op in ops if "index_add" in op or "index_put" in op or "scatter" in op]
    assert any(["index" in op for op in ops])


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize(
    "module", [nn.GRU(3, 4, 2, bidirectional=True, batch_first=True), nn.LSTM(3, 4, proj_size=2, batch_first=True)]
)
def test_recurrent(module: nn.Module, kind: str):
    """A direction of rows and of weights."""
    module = module.double().requires_grad_(False)
    params = dict(module.named_parameters())
    moves = {name: torch.ones_like(p) for name, p in params.items()}

    def call(p: dict[str, Tensor], x: Any) -> Any:
        return torch.func.functional_call(module, p, (x,))[0]

    def along(x: Any, t: Any) -> Any:
        return tdc.jvp(call, (params, x), (moves, t))[1]

    x, t = [y if kind == "packed" else y.to_padded() for y in (batch(), batch(1))]
    want = [along(r, d) for r, d in zip(batch().unbind(), batch(1).unbind(), strict=True)]
    torch.testing.assert_close(list(along(x, t).unbind()), want)


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp"])
@pytest.mark.parametrize("rows", [0, 2])
def test_a_scan_of_no_elements(name: str, rows: int):
    x = tdc.pack([torch.zeros(0, 3)] * 2)[:rows]
    with forward_ad.dual_level():
        out = OPS[name][0](x.with_values(forward_ad.make_dual(x.values, x.values)))
        assert forward_ad.unpack_dual(out.values).tangent.shape == (0, 3)
