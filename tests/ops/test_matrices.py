"""Products of a matrix of each example by another: one operator on CPU, without padding, eagerly and in graphs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tdc
from tdc.compile import counted
from tdc.ops import matmul, subrows
from tdc.ops.matrices import cpu
from tdc.testing import forbid

DOUBLE = torch.float64
LENGTHS = ((3, 0, 5), (2, 7), (1, 1, 4, 6))
Run = Callable[[Any, Any, Any], Any]
PRODUCTS: dict[str, tuple[Run, Run]] = {  # of a batch, weights and pair maps; of one example
    "x @ w": (lambda x, w, p: torch.matmul(x, w), lambda x, w, p: x @ w),
    "x.T @ x": (lambda x, w, p: torch.matmul(x.mT, x), lambda x, w, p: x.T @ x),
    "x @ x.T": (lambda x, w, p: torch.matmul(x, x.mT), lambda x, w, p: x @ x.T),
    "p @ x": (lambda x, w, p: torch.matmul(p, x), lambda x, w, p: p @ x),
    "p.T @ x": (lambda x, w, p: torch.matmul(p.mT, x), lambda x, w, p: p.T @ x),
    "x.T @ p": (lambda x, w, p: torch.matmul(x.mT, p), lambda x, w, p: x.T @ p),
    "p @ p": (lambda x, w, p: torch.matmul(p, p), lambda x, w, p: p @ p),
    "columns first": (lambda x, w, p: torch.einsum("bld,bde->bel", x, w), lambda x, w, p: (x @ w).T),
    "weights first": (lambda x, w, p: torch.einsum("bed,bld->lbe", w, x), lambda x, w, p: x @ w.T),
    "the batch last": (lambda x, w, p: torch.einsum("bld,bmd->mlb", x, x * 2), lambda x, w, p: 2 * x @ x.T),
}


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pair maps of any size are large enough."""
    monkeypatch.setattr(subrows, "LEAST", 0)


def given(lengths: tuple[int, ...], dtype: torch.dtype = DOUBLE, features: int = 4) -> list[Any]:
    """A batch, weights of each example, and pair maps."""
    g = torch.Generator().manual_seed(sum(lengths))
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=DOUBLE).to(dtype)  # noqa: E731
    x, p = [draw(n, features) for n in lengths], [draw(n, n) for n in lengths]
    return [tdc.pack(x), draw(len(lengths), features, features), tdc.pack(p, ragged_dim=(1, 2))]


def leaves(args: list[Any]) -> list[Tensor]:
    x, w, p = args
    return [t.detach().requires_grad_() for t in (x.values, w, p.values)]


def of_values(run: Run, args: list[Any]) -> Callable[..., Tensor]:
    """A product as a function of tensors."""
    x, _, p = args

    def call(values: Tensor, w: Tensor, pairs: Tensor) -> Tensor:
        y = run(x.with_values(values), w, p.with_values(pairs))
        return y if isinstance(y, Tensor) else y.values

    return call


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE, torch.complex128, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_each_example_by_itself(name: str, dtype: torch.dtype):
    run, alone = PRODUCTS[name]
    x, w, p = given(LENGTHS[0], dtype)
    with forbid(padding=True):
        y = run(x, w, p)
    want = [alone(*row) for row in zip(x.unbind(), w.unbind(), p.unbind(), strict=True)]
    for one, other in zip(y.unbind(0 if isinstance(y, Tensor) else y.structure.batch_dim), want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", PRODUCTS)
def test_derivatives(name: str):
    args = given(LENGTHS[0])
    run = of_values(PRODUCTS[name][0], args)
    used = leaves(args)
    assert torch.autograd.gradcheck(run, used, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, used, fast_mode=True)


@pytest.mark.parametrize("features", [4, 3])
def test_groups_are_those_of_torch_where_it_takes_them(features: int, monkeypatch: pytest.MonkeyPatch):
    alone: list[str] = []
    one_by_one = cpu.one_by_one
    monkeypatch.setattr(cpu, "one_by_one", lambda *a: alone.append("") or one_by_one(*a))
    x, w, _ = given((3, 0, 5), torch.float32, features)
    weights = w.clone().requires_grad_()
    torch.matmul(x, weights).values.sum().backward()
    want = [row.sum(0).unsqueeze(1).expand(features, features) for row in x.unbind()]
    torch.testing.assert_close(weights.grad, torch.stack(want))
    assert len(alone) == (0 if features == 4 else 2)  # rows of 16 bytes, or not


@pytest.mark.parametrize("name", ["x @ w", "x.T @ x"])
def test_one_call_for_all_examples(name: str, monkeypatch: pytest.MonkeyPatch):
    """With gradients and without; under autocast the way through letters converts the operands."""
    run, alone = PRODUCTS[name]
    x, w, p = given((3, 0, 5), torch.float32)
    want = [alone(*row) for row in zip(x.unbind(), w.unbind(), p.unbind(), strict=True)]
    lower = run(x.with_values(x.values.bfloat16()), w.bfloat16(), p)
    with torch.autocast("cpu"):
        got = run(x, w, p)
    assert all([torch.equal(a, b) for a, b in zip(got.unbind(), lower.unbind(), strict=True)])
    monkeypatch.setattr(matmul, "contract", None)
    learns = x.with_values(x.values.clone().requires_grad_())
    for y in (run(x, w, p), run(learns, w, p)):
        for one, other in zip(y.unbind(), want, strict=True):
            torch.testing.assert_close(one, other)


GROUPS = ("x @ w", "x.T @ x")


def single(name: str, lengths: tuple[int, ...] = (3, 0, 5)) -> tuple[Any, list[Tensor], Any, list[Tensor]]:
    """A product and its operands in single precision, and both in double, which goes through letters."""
    whole, exact = given(lengths, torch.float32), given(lengths)
    used = [t.to(DOUBLE) for t in (whole[0].values, whole[1], whole[2].values)]
    run = PRODUCTS[name][0]
    return of_values(run, whole), [t.to(torch.float32) for t in used], of_values(run, exact), used


@pytest.mark.parametrize("name", GROUPS)
def test_derivatives_of_groups(name: str):
    """First and second ones, backwards, in a direction and for several results at once."""
    found = []
    for f, used in (single(name)[:2], single(name)[2:]):
        x, w, p = [t.requires_grad_() for t in used]
        g = torch.Generator().manual_seed(1)
        noise = lambda t, g=g: torch.randn(t.shape, generator=g, dtype=DOUBLE).to(t.dtype)  # noqa: E731
        y = f(x, w, p)
        of_y, of_x, of_w = noise(y), noise(x), noise(w)
        first = torch.autograd.grad((y * of_y).sin().sum(), (x, w), create_graph=True, materialize_grads=True)
        slopes = [(d * n).sum() for d, n in zip(first, (of_x, of_w), strict=True) if d.requires_grad]
        second = torch.autograd.grad(slopes, (x, w), materialize_grads=True)
        tangent = torch.func.jvp(partial(f, pairs=p), (x, w), (of_x, of_w))[1]
        several = torch.stack([of_y, -of_y, y.detach()])
        batched = torch.autograd.grad(f(x, w, p), x, several, is_grads_batched=True)
        found.append([y, *first, *second, tangent, *batched])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.to(DOUBLE), other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", GROUPS)
def test_groups_under_transforms_and_of_odd_operands(name: str):
    f, (x, w, p), exact, (_, w64, p64) = single(name)
    many = torch.stack([x, 2 * x, -x])
    loss = lambda f: lambda x, w, p: f(x, w, p).sin().sum()  # noqa: E731
    got = torch.vmap(torch.func.grad(loss(f), (0, 1)), (0, None, None))(many, w, p)
    want = torch.vmap(torch.func.grad(loss(exact), (0, 1)), (0, None, None))(many.to(DOUBLE), w64, p64)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.to(DOUBLE), other, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(f(x, w.mT.contiguous().mT, p), f(x, w, p))
    turned, wide = x.t().contiguous().t(), w[:, :1].expand_as(w)
    torch.testing.assert_close(f(turned, wide, p), f(x, wide.clone(), p))


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("lengths", [(), (0, 0), (2,) * 1500])
def test_groups_of_nothing_and_many(name: str, lengths: tuple[int, ...]):
    x = tdc.NestedTensor(torch.randn(sum(lengths), 4), tdc.offsets_of(torch.tensor(lengths, dtype=torch.int64)))
    w = torch.randn(len(lengths), 4, 4)
    run, alone = PRODUCTS[name]
    for learns in (False, True):
        y = run(x.with_values(x.values.clone().requires_grad_(learns)), w, None)
        want = [alone(a, b, None) for a, b in zip(x.unbind(), w, strict=True)]
        assert len(y) == len(want)
        for one, other in zip(y.unbind(), want, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.cases(0, 5)
@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_one_graph_for_all_lengths(name: str, dtype: torch.dtype):
    run = PRODUCTS[name][0]

    def loss(x: Any, w: Tensor, p: Any) -> Tensor:
        y = run(x, w, p)
        return (y if isinstance(y, Tensor) else y.values).sin().sum()

    compiled = counted(lambda *args: loss(*args), backend="aot_eager")
    grads = lambda f, args, used: torch.autograd.grad(  # noqa: E731
        f(args[0].with_values(used[0]), used[1], args[2].with_values(used[2])), used, allow_unused=True
    )
    for lengths in LENGTHS:
        args = given(lengths, dtype)
        torch._dynamo.maybe_mark_dynamic(args[1], 0)
        used = leaves(args)
        torch._dynamo.maybe_mark_dynamic(used[1], 0)
        with forbid(padding=True):
            both = grads(compiled, args, used), grads(loss, args, used)
        for one, other in zip(*both, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other)
    assert compiled.counts.compiles == 1


def test_a_graph_makes_no_index_for_the_size_of_a_result():
    names: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        names.extend([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    (x,) = given((3, 0, 2))[:1]
    found = torch.compile(lambda x: torch.matmul(x, x.mT), backend=backend, fullgraph=True)(x)
    assert found.values.shape == (13,)
    assert any("as_size" in name for name in names)
    assert not any("repeat_interleave" in name for name in names)


def test_members_share_lengths():
    x, w, p = given(LENGTHS[0])
    run = of_values(PRODUCTS["x @ w"][0], [x, w, p])
    many = torch.stack([w, 2 * w, -w])
    for in_dims, values in (((None, 0, None), x.values), ((0, 0, None), torch.stack([x.values] * 3))):
        got = torch.vmap(run, in_dims)(values, many, p.values)
        want = torch.stack([run(x.values, one, p.values) for one in many])
        torch.testing.assert_close(got, want)
    grads = torch.vmap(torch.func.grad(lambda w: run(x.values, w, p.values).sin().sum()))(many)
    alone = [torch.func.grad(lambda w: run(x.values, w, p.values).sin().sum())(one) for one in many]
    torch.testing.assert_close(grads, torch.stack(alone))


def test_autocast():
    x, w, _ = given(LENGTHS[0], torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.matmul(x, w).dtype == torch.matmul(x.mT, x).dtype == torch.bfloat16


def test_operands_that_do_not_fit():
    x, w, _ = given(LENGTHS[0])
    with pytest.raises(tdc.ShapeError, match="one size for dim"):
        torch.bmm(x, torch.cat((w, w)))
    with pytest.raises(RuntimeError, match="dtype"):
        torch.bmm(x, w.float())
