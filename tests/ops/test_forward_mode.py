"""Derivatives in a direction where rows are packed and padded, against those of each row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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

DOUBLE = torch.float64
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
    "conv1d": (first(lambda x: F.conv1d(x, WEIGHT)), first(lambda r: F.conv1d(r, WEIGHT))),
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


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "order"),
    [("cumsum", twice), ("conv1d", direction), pytest.param("conv1d", twice, marks=pytest.mark.sweep)],
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


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_an_encoder(kind: str):
    """Also by `forward_ad`, which no transform of `torch.func` is around."""
    net = nn.TransformerEncoderLayer(3, 1, 4, 0.0, batch_first=True, dtype=DOUBLE).requires_grad_(False)
    x, t = [y if kind == "packed" else y.to_padded() for y in (batch(), batch(1))]
    want = [
        (net(r[None] + 1e-6 * d) - net(r[None] - 1e-6 * d))[0] / 2e-6 for r, d in zip(batch(), batch(1), strict=True)
    ]
    torch.testing.assert_close(list(direction(net)(x, t).unbind()), want, atol=1e-7, rtol=1e-5)
    with forward_ad.dual_level():
        storage, moves = [y.values if kind == "packed" else y.data for y in (x, t)]
        dual = forward_ad.make_dual(storage, moves)
        y = net(x.with_values(dual) if kind == "packed" else x.with_data(dual))
        found = [forward_ad.unpack_dual(row).tangent for row in y.unbind()]
    torch.testing.assert_close(found, want, atol=1e-7, rtol=1e-5)


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


def attended(x: Any) -> Any:
    return torch.matmul(torch.softmax(torch.matmul(x, x.mT), -1), x)


def rearranged(x: Any) -> Any:
    return x.to_padded() if isinstance(x, NestedTensor) else x.to_packed()


TWICE: dict[str, tuple[int, Callable[[Any], Any]]] = {  # what has operators with a direction of their own
    "softmax": (2, lambda x: x.softmax(2)), "logsumexp": (2, lambda x: x.logsumexp(2)), "var": (2, lambda x: x.var(2)),
    "amax": (2, lambda x: x.amax(2)), "prod": (1, lambda x: x.prod(1)), "cumsum": (1, lambda x: x.pow(2).cumsum(1)),
    "matmul": (1, attended), "pad": (1, lambda x: rearranged(x.pow(2))),
    "attention": (1, lambda x: F.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3, is_causal=True)),
    "group_norm": (2, lambda x: F.group_norm(x, 1)),
    "conv1d": (2, lambda x: F.conv1d(x.pow(2), torch.ones(2, 2, 3, dtype=DOUBLE), padding=1)),
    "avg_pool1d": (2, lambda x: F.avg_pool1d(x.pow(2), 2)), "max_pool1d": (2, lambda x: F.max_pool1d(x.pow(2), 2)),
    "gru": (1, lambda x: GRU(x)[0]), "lstm": (1, lambda x: LSTM(x)[0]), "rnn": (1, lambda x: RNN(x)[0]),
}  # fmt: skip
GRU, LSTM, RNN = [make(2, 3, batch_first=True).double().requires_grad_(False) for make in (nn.GRU, nn.LSTM, nn.RNN)]


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("name", TWICE)
def test_directions_of_directions(name: str, kind: str):
    """Forward over forward, and over reverse; torch gives 0 of autograd functions, silently (2.11-2.13)."""
    ragged_dim, call = TWICE[name]
    g = torch.Generator().manual_seed(0)
    rows = [torch.randn((n, 2) if ragged_dim == 1 else (2, n), generator=g, dtype=DOUBLE) for n in (3, 2, 4)]
    x = tdc.pack(rows, ragged_dim=ragged_dim)

    def value(values: Tensor, kind: str = kind) -> Tensor:
        y = call(x.with_values(values) if kind == "packed" else x.with_values(values).to_padded())
        return (
            (y if isinstance(y, Tensor) else y.filled(0) if isinstance(y, tdc.MaskedBatch) else y.values).pow(3).sum()
        )

    want = torch.func.jacrev(torch.func.jacrev(partial(value, kind="packed")))(x.values)
    assert want.abs().max() > 0
    for found in (torch.func.jacfwd(torch.func.jacfwd(value)), torch.func.hessian(value)):
        torch.testing.assert_close(found(x.values), want)


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize(
    "module", [nn.GRU(3, 4, 2, bidirectional=True, batch_first=True), nn.LSTM(3, 4, proj_size=2, batch_first=True)]
)
@pytest.mark.parametrize("records", [True, False])
def test_recurrent(module: nn.Module, kind: str, records: bool):
    """A direction of rows and of weights, of torch.func and made by hand, under `no_grad`, too."""
    module = module.double().requires_grad_(False)
    params = dict(module.named_parameters())
    moves = {name: torch.ones_like(p) for name, p in params.items()}

    def call(p: dict[str, Tensor], x: Any) -> Any:
        return torch.func.functional_call(module, p, (x,))[0]

    def along(x: Any, t: Any) -> Any:
        return tdc.jvp(call, (params, x), (moves, t))[1]

    x, t = [y if kind == "packed" else y.to_padded() for y in (batch(), batch(1))]
    want = [along(r, d) for r, d in zip(batch().unbind(), batch(1).unbind(), strict=True)]
    with torch.set_grad_enabled(records):
        torch.testing.assert_close(list(along(x, t).unbind()), want)
        with forward_ad.dual_level():
            dual = {name: forward_ad.make_dual(p, moves[name]) for name, p in params.items()}
            rows = [forward_ad.make_dual(r, d) for r, d in zip(batch().unbind(), batch(1).unbind(), strict=True)]
            y = call(dual, tdc.pack(rows) if kind == "packed" else tdc.pack(rows).to_padded())
            found = [forward_ad.unpack_dual(row).tangent for row in y.unbind()]
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("name", ["cumsum", "cumprod", "logcumsumexp"])
@pytest.mark.parametrize("rows", [0, 2])
def test_a_scan_of_no_elements(name: str, rows: int):
    x = tdc.pack([torch.zeros(0, 3)] * 2)[:rows]
    with forward_ad.dual_level():
        out = OPS[name][0](x.with_values(forward_ad.make_dual(x.values, x.values)))
        assert forward_ad.unpack_dual(out.values).tangent.shape == (0, 3)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap of grad": lambda f: torch.func.vmap(torch.func.grad(f)),
    "vmap of jvp": lambda f: torch.func.vmap(lambda s: torch.func.jvp(f, (s,), (torch.ones_like(s),))[1]),
    "vmap of vmap of grad": lambda f: torch.func.vmap(torch.func.vmap(torch.func.grad(f))),
    "grad of vmap": lambda f: torch.func.grad(lambda s: torch.func.vmap(f)(s).sum()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_assertions_below_several_transforms(name: str):
    """`gather` asserts that positions are inside; a member of `vmap` that `grad` follows hid that they are."""
    x = tdc.pack([torch.tensor([1.0, 3.0, 2.0]), torch.tensor([5.0, 4.0])])

    def best(s: Tensor, beyond: int = 0) -> Tensor:
        y = x * s
        return y.gather(1, y.argmax(1, keepdim=True) + beyond).sum()

    of = torch.ones(3, 2) if "of vmap of" in name else torch.ones(2)
    torch.testing.assert_close(TRANSFORMS[name](best)(of), torch.full_like(of, 8.0))
    with pytest.raises(tdc.IndexingError, match="expected positions inside each example"):
        TRANSFORMS[name](partial(best, beyond=2))(of)
