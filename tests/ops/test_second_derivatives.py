"""Derivatives of derivatives through operations with kernels of their own: attention and recurrent networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from versions import refused

import tdc

attend: Any = F.scaled_dot_product_attention
MASK = torch.randn(5, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def recurrent(cls: Any, **options: Any) -> nn.Module:
    return cls(4, 5, batch_first=True, dtype=torch.float64, **options)  # of 4 units a fifth of the gates is a fourth


def first_of(module: nn.Module, params: Any, x: Any) -> Any:
    """The first result of a recurrent network."""
    return torch.func.functional_call(module, params, (x,))[0]


def encoded(module: nn.Module, params: Any, x: Any) -> Any:
    return torch.func.functional_call(module, params, (x,))


def attended(module: nn.Module, params: Any, x: Any) -> Any:
    """With a mask for one example or for a batch."""
    n = x.shape[0] if isinstance(x, Tensor) else 5
    given = {"need_weights": False, "attn_mask": MASK[:n, :n]}
    return torch.func.functional_call(module, params, (x, x, x), given)[0]


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "encoder": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64), encoded,
    ),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64), attended),
    "gru": (lambda: recurrent(nn.GRU, num_layers=2, bidirectional=True), first_of),
    "lstm": (lambda: recurrent(nn.LSTM, bias=False), first_of),
    "projected": (lambda: recurrent(nn.LSTM, proj_size=3), first_of),
    "rnn": (lambda: recurrent(nn.RNN), first_of),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["nested", "masked"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("error")
def test_second_derivative(name: str, kind: str):
    """grad of grad, vjp of grad and create_graph, against the loop over examples."""
    make, run = CASES[name]
    torch.manual_seed(0)
    module, rows = make(), [torch.randn(n, 4, dtype=torch.float64) for n in (3, 1, 5)]
    params = {k: v.detach().requires_grad_() for k, v in module.named_parameters()}
    x: Any = tdc.pack(rows)
    x = x if kind == "nested" else x.to_padded()

    def loss(p: Any) -> Tensor:
        out = run(module, p, x)
        return (out.values if kind == "nested" else out.filled(0)).pow(3).sum()

    def loop(p: Any) -> Tensor:
        return torch.stack([run(module, p, row).pow(3).sum() for row in rows]).sum()

    def penalty(fn: Callable[[Any], Tensor], p: Any) -> Tensor:
        return torch.stack([g.square().sum() for g in torch.func.grad(fn)(p).values()]).sum()

    with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernels have one derivative only
        keys, leaves = list(params), list(params.values())
        theirs = torch.autograd.grad(loop(params), leaves, create_graph=True)
        want = torch.autograd.grad(torch.stack([g.square().sum() for g in theirs]).sum(), leaves)
        nested = torch.func.grad(lambda p: penalty(loss, p))(params)
        pulled = torch.func.vjp(lambda p: penalty(loss, p), params)[1](torch.ones((), dtype=torch.float64))[0]
        ours = torch.autograd.grad(loss(params), leaves, create_graph=True)
        plain = torch.autograd.grad(torch.stack([g.square().sum() for g in ours]).sum(), leaves)
    for found in (nested, pulled, dict(zip(keys, plain, strict=True))):
        torch.testing.assert_close([found[k] for k in keys], list(want))


@pytest.mark.parametrize("name", CASES)
def test_several_gradients_at_once(name: str):
    """`is_grads_batched`, as `torch.autograd.functional.jacobian(vectorize=True)` asks: as one after another."""
    make, run = CASES[name]
    torch.manual_seed(0)
    module, x = make(), tdc.pack([torch.randn(n, 4, dtype=torch.float64) for n in (3, 1, 5)]).requires_grad_()
    wrt = [x.values, *module.parameters()]
    out = run(module, dict(module.named_parameters()), x).values
    grads = torch.randn(3, *out.shape, dtype=torch.float64)
    want = zip(*[torch.autograd.grad(out, wrt, g, retain_graph=True) for g in grads], strict=True)
    found = torch.autograd.grad(out, wrt, grads, is_grads_batched=True)
    torch.testing.assert_close(list(found), [torch.stack(parts) for parts in want])


@pytest.mark.slow
def test_second_derivative_in_a_graph_is_refused():
    """As it is traced under `torch.func`; as it runs where a graph prepares for it."""
    x: Any = tdc.pack([torch.randn(2, 3, 4), torch.randn(2, 1, 4)], ragged_dim=2)

    def loss(values: Tensor) -> Tensor:
        y: Any = x.with_values(values)
        return attend(y, y, y).values.square().sum()

    slope = torch.func.grad(loss)
    compiled = torch.compile(slope, backend="aot_eager", fullgraph=True)
    values = x.values.clone().requires_grad_()
    found = compiled(values)
    torch.testing.assert_close(found, slope(x.values))
    with pytest.raises(tdc.UnsupportedError, match=r"tdc\.attention: expected one derivative"):
        found.square().sum().backward()
    twice = torch.func.grad(lambda v: slope(v).square().sum())
    with pytest.raises(Exception, match=r"tdc\.attention: expected one derivative"):
        torch.compile(twice, backend="aot_eager", fullgraph=True)(x.values)


@pytest.mark.parametrize("ragged", [(1,), (1, 2)])
@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_a_complex_scan_twice(ragged: tuple[int, ...], kind: str):
    """torch's own is NaN where a cotangent is 0, as those of padding are."""
    sizes = [(n, n + 1 if len(ragged) == 2 else 3) for n in (3, 0, 1, 2)]
    rows = [torch.randn(size, dtype=torch.complex64, requires_grad=True) for size in sizes]

    def twice(results: Any) -> list[torch.Tensor]:
        once = torch.autograd.grad(sum([y.abs().square().sum() for y in results]), rows, create_graph=True)
        return list(torch.autograd.grad(sum([g.abs().square().sum() for g in once]), rows))

    x = tdc.pack(rows, ragged_dim=ragged)
    x = x.to_padded() if kind == "padded" else x
    torch.testing.assert_close(twice(x.logcumsumexp(1).unbind()), twice([r.logcumsumexp(0) for r in rows]))


@pytest.mark.parametrize("kind", ["packed", "padded"])
def test_scattered_products_twice(kind: str):
    """torch refuses products of several zeros, of which padding would be one."""
    rows = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in (1, 3)]
    x = tdc.pack(rows) if kind == "packed" else tdc.pack(rows).to_padded()

    def twice(results: Any) -> list[torch.Tensor]:
        once = torch.autograd.grad(sum([y.square().sum() for y in results]), rows, create_graph=True)
        return list(torch.autograd.grad(sum([g.square().sum() for g in once]), rows))

    def product(y: Any) -> Any:
        return y.scatter_reduce(-1, torch.zeros_like(y, dtype=torch.int64), y, "prod")

    torch.testing.assert_close(twice(product(x).unbind()), twice([product(r) for r in rows]))


PADDED: dict[str, Any] = {
    "to_padded": lambda x: x.to_padded().data,
    "cumsum": lambda x: x.cumsum(1).values,
    "avg_pool": lambda x: F.avg_pool1d(x.transpose(1, 2), 2, 1).values,
    "interpolate": lambda x: F.interpolate(x.transpose(1, 2), scale_factor=2.0, mode="linear").values,
    "prod": lambda x: x.prod(1),
    "from padded": lambda x: x.to_padded().softmax(1).to_packed().values,
}


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize(
    "name", [n if n in ("to_padded", "cumsum") else pytest.param(n, marks=pytest.mark.slow) for n in PADDED]
)
def test_twice_in_one_graph(name: str):
    """The gather of padding and packing has a derivative of its derivative there, too."""
    x = tdc.pack([torch.randn(n, 2, dtype=torch.float64) for n in (5, 3)])

    def loss(values: torch.Tensor) -> torch.Tensor:
        return PADDED[name](x.with_values(values)).pow(3).sum()

    def twice(values: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda v: torch.func.grad(loss)(v).sin().sum())(values)

    with refused("isIntList"):
        found = torch.compile(twice, backend="aot_eager", fullgraph=True)(x.values)
        torch.testing.assert_close(found, twice(x.values))
        assert (found != 0).all()
