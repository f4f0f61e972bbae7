"""Reductions and orders where torch's own choices show: zeros, ties, NaN, few elements, odd dtypes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import tdc

Fn = Callable[..., Any]
KINDS = ["nested", "masked"]
LENGTHS = (3, 0, 2, 1)


def batch(rows: list[torch.Tensor], kind: str, **options: Any) -> Any:
    """The rows packed, or padded with the worst that their dtype has."""
    x = tdc.pack(rows, **options)
    if kind == "nested":
        return x
    padded, dtype = x.to_padded(), rows[0].dtype
    worst = math.nan if dtype.is_floating_point or dtype.is_complex else True
    return padded.with_data(padded.data.masked_fill(~padded.mask, worst))


def rows_of(dtype: torch.dtype, *features: int, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    torch.manual_seed(0)
    if dtype.is_floating_point or dtype.is_complex:
        return [torch.randn(n, *features, dtype=dtype) for n in lengths]
    return [torch.randint(0, 2 if dtype == torch.bool else 9, (n, *features)).to(dtype) for n in lengths]


def alike(fn: Fn, rows: list[torch.Tensor], kind: str, dim: Any = 1, order: int = 2) -> None:
    """`fn(x, dim)` of the batch against that of each example: values, dtypes, and derivatives up to an order."""
    smooth = order and (rows[0].is_floating_point() or rows[0].is_complex())
    rows = [r.clone().requires_grad_(bool(smooth)) for r in rows]
    inner: Any = dim - 1 if isinstance(dim, int) else tuple(d - 1 for d in dim)
    got = list(fn(batch(rows, kind), dim).unbind(0))
    want = [fn(r, inner) for r in rows]
    torch.testing.assert_close(got, want, equal_nan=True)
    leaves = rows
    for _ in range(order if smooth else 0):
        pairs = [(a, b) for a, b in zip(got, want, strict=True) if b.requires_grad]
        assert all(a.requires_grad for a, _ in pairs)
        if not pairs:
            return
        weights = [torch.randn_like(b) for _, b in pairs]
        sides = [
            torch.autograd.grad([p[k] for p in pairs], leaves, weights, create_graph=True, materialize_grads=True)
            for k in (0, 1)
        ]
        got, want = list(sides[0]), list(sides[1])
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
class TestDtypes:
    @pytest.mark.parametrize("name", ["amax", "amin", "any", "all"])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
    def test_truth_values_and_bytes(self, name: str, dtype: torch.dtype, kind: str):
        rows = [
            torch.tensor([False, False]).to(dtype),
            torch.tensor([True]).to(dtype),
            torch.tensor([True, False]).to(dtype),
        ]
        alike(getattr(torch, name), rows, kind)
        x, whole = batch(rows, kind), torch.cat(rows)
        out = getattr(x, name)()
        assert out.dtype == getattr(whole, name)().dtype
        assert out.eq(getattr(whole, name)())
        assert x.max().eq(whole.max())
        assert x.min(1).values.tolist() == [int(r.min()) for r in rows]

    @pytest.mark.parametrize("fn", [torch.prod, torch.logsumexp, torch.sum, torch.mean, torch.var])
    def test_complex_numbers(self, fn: Fn, kind: str):
        alike(fn, rows_of(torch.complex128, 2, lengths=(3, 2, 4)), kind)

    def test_norms_have_the_dtype_asked_for(self, kind: str):
        x = batch(rows_of(torch.float32, 2), kind)
        for out in (x.norm(2, 1, False, torch.float64), torch.norm(x, 2, 1, False, None, torch.float64)):
            assert out.dtype == torch.float64

    @pytest.mark.parametrize(
        "fn", [torch.mean, torch.nanmean, lambda x, dim, dtype: torch.linalg.vector_norm(x, 2, dim, dtype=dtype)]
    )
    def test_means_and_norms_are_no_integers(self, fn: Fn, kind: str):
        x = batch(rows_of(torch.float32, 2), kind)
        for dim in (1, 2, None):
            with pytest.raises(tdc.DtypeError, match=r"expected a floating point dtype, got dtype=torch\.int64"):
                fn(x, dim, dtype=torch.int64)

    def test_trapezoids_count_in_the_dtype_of_the_points(self, kind: str):
        rows = rows_of(torch.uint8, lengths=(5, 3, 4))
        points = [200 * torch.arange(len(r), dtype=torch.uint8) for r in rows]
        x, at = batch(rows, kind), batch(points, kind)
        want = [torch.trapezoid(r, p) for r, p in zip(rows, points, strict=True)]
        torch.testing.assert_close(torch.trapezoid(x, at, dim=1), torch.stack(want))
        with pytest.raises(tdc.DtypeError, match="a dtype in which sums fit"):
            torch.trapezoid(x, dim=1)
        with pytest.raises(tdc.DtypeError, match="expected numbers"):
            torch.cumulative_trapezoid(x.bool(), dim=1)


@pytest.mark.parametrize("kind", KINDS)
class TestDerivatives:
    @pytest.mark.parametrize("ord", [0, 0.5, 1, 2, 3, -1, -0.5, math.inf, -math.inf])
    def test_norms_at_zero(self, ord: float, kind: str):
        rows = [torch.tensor([0.0, 2.0, -3.0]), torch.tensor([0.0, 0.0]), torch.tensor([1.0, 4.0])]
        order = 2 if ord in (2, 3) else 1
        rows = rows if order == 1 else rows[::2]
        alike(lambda x, dim: torch.linalg.vector_norm(x, ord, dim), [r.double() for r in rows], kind, order=order)

    @pytest.mark.parametrize("name", ["amax", "amin"])
    def test_ties_share_the_gradient_over_all_dims(self, name: str, kind: str):
        rows = [torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.tensor([[2.0, 2.0]])]
        alike(lambda x, dim: getattr(x, name)(dim), rows, kind, dim=(1, 2), order=1)

    @pytest.mark.parametrize("name", ["median", "nanmedian", "max", "min"])
    def test_ties_share_the_gradient_of_all_elements(self, name: str, kind: str):
        rows = [torch.tensor([1.0, 2.0, 2.0]), torch.tensor([2.0]), torch.tensor([3.0, 1.0])]
        sides = []
        for flat in (False, True):
            leaves = [r.clone().requires_grad_() for r in rows]
            x = torch.cat(leaves) if flat else batch(leaves, kind)
            getattr(x, name)().backward()
            sides.append([r.grad for r in leaves])
        torch.testing.assert_close(*sides)

    @pytest.mark.parametrize("name", ["var", "std"])
    @pytest.mark.parametrize("correction", [-1, 0, 1, 2, 3])
    @pytest.mark.filterwarnings("ignore:.*degrees of freedom")
    def test_more_correction_than_elements(self, name: str, correction: int, kind: str):
        fn = lambda x, dim: getattr(torch, name)(x, dim, correction=correction)  # noqa: E731
        alike(fn, rows_of(torch.float64), kind, order=1)

    def test_second_derivatives_of_variances_of_equal_elements(self, kind: str):
        alike(lambda x, dim: torch.var(x, dim), [torch.ones(3).double(), torch.tensor([1.0, 2.0, 3.0]).double()], kind)

    def test_means_of_nothing_but_nan(self, kind: str):
        rows = [torch.tensor([1.0, math.nan]), torch.tensor([math.nan]), torch.tensor([2.0])]
        alike(lambda x, dim: torch.nanmean(x, dim), rows, kind, order=1)

    def test_products_with_zeros(self, kind: str):
        numbers = [0.0, 2.0, 3.0], [0.0, 0.0], [1.0, 4.0], [0.0, 0.0, 0.0], [math.inf, -2.0], [math.nan, 1.0]
        alike(lambda x, dim: torch.prod(x, dim), [torch.tensor(r).double() for r in numbers], kind)

    def test_products_of_zeros_infinities_and_nan(self, kind: str):
        numbers = itertools.product([0.0, 2.0, math.inf, math.nan], repeat=3)
        alike(lambda x, dim: torch.prod(x, dim), [torch.tensor(r).double() for r in numbers], kind, order=1)

    def test_products_that_are_too_large_beside_a_zero(self, kind: str):
        numbers = [0.0, 1e200, 1e200], [1e200, 0.0, 1e200], [1e200, 1e200]
        rows = [torch.tensor(r, dtype=torch.float64, requires_grad=True) for r in numbers]
        got = batch(rows, kind).prod(1)
        assert got.tolist() == [0.0, 0.0, math.inf]
        got.sum().backward()
        assert rows[0].grad[1:].tolist() == [0.0, 0.0]
        assert rows[0].grad[0] > 1e300

    @pytest.mark.cases(0, 1)
    def test_running_products_of_zeros_infinities_and_nan_in_a_graph(self, kind: str):
        """The gradients that torch has eagerly; one graph for all lengths."""

        def run(x: Any) -> torch.Tensor:
            return (x if kind == "nested" else x.to_padded()).cumprod(1).sum()

        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(run, backend=counter, fullgraph=True)
        for size in (3, 2, 4):
            numbers = [0.0, 2.0, math.nan], [-2.0, math.inf, math.nan]
            rows = [torch.tensor(r) for some in numbers for r in itertools.product(some, repeat=size)]
            got, want = [torch.cat(rows).requires_grad_() for _ in range(2)]
            offsets = torch.arange(0, got.shape[0] + 1, size)
            compiled(tdc.NestedTensor(got, offsets, max_length=4)).backward()
            torch.stack([r.cumprod(0) for r in want.split(size)]).sum().backward()
            torch.testing.assert_close(got.grad, want.grad, equal_nan=True)
        assert counter.frame_count == 1

    @pytest.mark.cases(0, 1)
    def test_second_derivatives_of_running_products_in_a_graph(self, kind: str):
        def run(v: torch.Tensor) -> torch.Tensor:
            x: Any = tdc.NestedTensor(v, offsets, max_length=4)
            return (x if kind == "nested" else x.to_padded()).cumprod(1).square().sum()

        def alone(v: torch.Tensor) -> torch.Tensor:
            return v[:4].cumprod(0).square().sum() + v[4:].cumprod(0).square().sum()

        v, offsets = torch.tensor([1.5, 0.0, -2.0, 0.0, 0.0, 3.0]).double(), torch.tensor([0, 4, 6])
        got = torch.compile(torch.func.hessian(run), backend="aot_eager", fullgraph=True)(v)
        torch.testing.assert_close(got, torch.autograd.functional.hessian(alone, v))

    @pytest.mark.cases(1, 0)
    def test_a_second_derivative_of_compiled_running_products_is_refused(self, kind: str):
        def run(x: Any) -> torch.Tensor:
            return (x if kind == "nested" else x.to_padded()).cumprod(1).sum()

        compiled = torch.compile(run, backend="eager", fullgraph=True)
        leaf = torch.rand(5, requires_grad=True)
        x: Any = tdc.NestedTensor(leaf, torch.tensor([0, 2, 5]), max_length=3)
        (grad,) = torch.autograd.grad(compiled(x), leaf, create_graph=True)
        with pytest.raises(tdc.UnsupportedError, match="one derivative of a compiled function"):
            torch.autograd.grad(grad.square().sum(), leaf)

    @pytest.mark.cases(0, 1)
    @pytest.mark.parametrize("dims", [1, *[pytest.param(d, marks=pytest.mark.slow) for d in (2, (0, 1, 2))]])
    def test_products_in_a_graph_of_lengths_that_are_data(self, kind: str, dims: Any):
        """Backward, too; the product of everything, torch's own of packed values, among them."""

        def run(values: torch.Tensor) -> torch.Tensor:
            y = x.with_values(values)
            out: Any = (y if kind == "nested" else y.to_padded())[:, 1:]
            out = out.prod() if isinstance(dims, tuple) else out.prod(dims)
            return out.sum()

        x = batch([r + 1 for r in rows_of(torch.float64, 2)], "nested")
        want = torch.func.grad(run)(x.values)
        values = x.values.detach().requires_grad_()
        torch.compile(run, backend="aot_eager", fullgraph=True)(values).backward()
        torch.testing.assert_close(values.grad, want)

    @pytest.mark.sweep
    @pytest.mark.cases(0, 1)
    @pytest.mark.parametrize("dim", [1, pytest.param(2, marks=pytest.mark.slow)])
    def test_running_products_in_a_graph_of_a_total_that_is_data(self, kind: str, dim: int):
        def run(values: torch.Tensor) -> torch.Tensor:
            y: Any = x.with_values(values)
            return (y if kind == "nested" else y.to_padded())[:, 1:].cumprod(dim).square().sum()

        x = batch([r + 1 for r in rows_of(torch.float64, 2)], "nested")
        values = x.values.detach().requires_grad_()
        torch.compile(run, backend="aot_eager", fullgraph=True)(values).backward()
        torch.testing.assert_close(values.grad, torch.func.grad(run)(x.values))

    def test_the_quantile_of_one_of_two_ragged_dims(self, kind: str):
        q = torch.tensor(0.3, requires_grad=True)
        x = batch([torch.randn(2, 3), torch.randn(3, 1)], kind, ragged_dim=(1, 2))
        x.quantile(q, 2).sum(1).sum().backward()
        assert q.grad is not None
        assert q.grad.isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_example_at_the_end(kind: str):
    x = batch([torch.tensor([3.0, 1.0]), torch.tensor([])], kind)
    for op in (torch.max, torch.min, torch.median, torch.nanmedian, torch.mode):
        assert op(x, 1).indices[1] == -1
    assert x.quantile(0.5, 1)[1].isnan()


@pytest.mark.parametrize("kind", KINDS)
def test_dense_points_of_each_example(kind: str):
    rows, points = rows_of(torch.float64, 3, lengths=(2, 3)), torch.rand(2, 1, 3, dtype=torch.float64)
    for fn in (torch.trapezoid, torch.cumulative_trapezoid):
        out = fn(batch(rows, kind), points, dim=2).unbind(0)
        torch.testing.assert_close(list(out), [fn(r, p, dim=1) for r, p in zip(rows, points, strict=True)])


@pytest.mark.parametrize("kind", KINDS)
def test_differences_none_times_and_fewer(kind: str):
    x = batch(rows_of(torch.float32, 2), kind)
    assert torch.equal(torch.diff(x, n=0, dim=1, prepend=x), x)
    with pytest.raises(tdc.ShapeError, match="expected n of 0 or more, got -1"):
        torch.diff(x, n=-1, dim=1)


@pytest.mark.parametrize("kind", KINDS)
def test_allclose_beside_a_dense_tensor(kind: str):
    x = batch([torch.ones(2), torch.ones(3)], kind)
    assert torch.allclose(x, torch.ones(2, 1))
    assert torch.allclose(torch.ones(2, 3), x)
    assert not torch.allclose(x, torch.zeros(2, 1))


@pytest.mark.parametrize("op", [torch.floor_divide, torch.remainder, torch.fmod])
def test_padded_integers_are_divided(op: Fn):
    rows = [torch.tensor([5, 6]), torch.tensor([7])]
    x, y = tdc.pack(rows).to_padded(), tdc.pack([r - 3 for r in rows]).to_padded()
    assert torch.equal(op(x, y), tdc.pack([op(r, r - 3) for r in rows]).to_padded())
    assert torch.equal(torch.div(x, y, rounding_mode="floor"), torch.floor_divide(x, y))


@pytest.mark.parametrize("op", [torch.floor_divide, torch.remainder, torch.fmod])
def test_zeros_behind_row_ends_of_a_dense_divisor_divide_nothing(op: Fn):
    rows, dense = [torch.tensor([4, 5, 6]), torch.tensor([7])], torch.tensor([[2, 3, 4], [5, 0, 0]])
    want = [op(row, by[: len(row)]) for row, by in zip(rows, dense, strict=True)]
    for x in (tdc.pack(rows), tdc.pack(rows).to_padded()):
        assert all(map(torch.equal, op(x, dense), want))
        assert all(map(torch.equal, op(x, other=dense), want))
    if op is not torch.fmod:
        assert torch.equal(op(9, x), tdc.pack([op(9, r) for r in rows]).to_padded())


def test_a_ragged_batch_is_no_operand_of_a_tensordict():
    x = tdc.pack([torch.ones(2), torch.ones(3)])
    td = tdc.TensorDict({"a": torch.ones(2)}, [2])
    for run in (lambda: td + x, lambda: x + td, lambda: td * x.to_padded()):
        with pytest.raises(tdc.ShapeError, match=r"expected a tensor that broadcasts against batch_size \[2\]"):
            run()


def test_normalize_of_rows_without_elements():
    alike(lambda x, dim: F.normalize(x, dim=dim), rows_of(torch.float64, 2, lengths=(3, 2)), "nested")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["std", "var", "std_mean", "var_mean"])
def test_the_spread_of_no_features(name: str, kind: str):
    out = getattr(torch, name)(batch(rows_of(torch.float64, 0, 2), kind), 1)
    assert all(t.shape == (len(LENGTHS), 0, 2) for t in (out if isinstance(out, tuple) else (out,)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["linear", "lower", "midpoint"])
def test_the_gradient_of_a_quantile_that_is_nan_goes_to_the_nan(kind: str, how: str):
    rows = rows_of(torch.float64, 2, lengths=(3, 4, 1))
    rows[0][1, 0] = rows[2][0, 1] = math.nan
    alike(lambda x, dim: x.quantile(0.3, dim, interpolation=how), rows, kind, order=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ord", [math.inf, -math.inf])
def test_an_extreme_norm_of_nan_has_derivative_0(ord: float, kind: str):
    nan = math.nan
    rows = [torch.tensor(r) for r in ([1.0, nan, 2.0], [nan], [3.0, -3.0, 1.0, 1.0], [0.0, 0.0], [math.inf, nan])]
    for row in rows:
        row.requires_grad_()
    found = torch.linalg.vector_norm(batch(rows, kind), ord, 1)
    want = torch.stack([torch.linalg.vector_norm(row, ord) for row in rows])
    torch.testing.assert_close(found, want, rtol=0, atol=0, equal_nan=True)
    for a, b in zip(torch.autograd.grad(found.sum(), rows), torch.autograd.grad(want.sum(), rows), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fn", [torch.amax, torch.amin])
@pytest.mark.parametrize("fill", [math.inf, -math.inf])
def test_extremes_of_infinities_share_the_derivative_with_no_padding(fn: Fn, fill: float, kind: str):
    for lengths, dim in itertools.product([(1, 3, 2), (300, 1, 40)], [1, (1, 2)]):
        alike(fn, [torch.full((n, 2), fill) for n in lengths], kind, dim, order=1)
    with torch.no_grad():
        ones = tuple([torch.ones(n) for n in (1, 3, 2)])
        found = torch.func.jvp(lambda *rows: fn(batch(list(rows), kind), 1), tuple([fill * t for t in ones]), ones)
    assert found[1].tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_extremes_of_more_infinities_than_half_precision_counts(kind: str):
    rows = [torch.full((n,), -math.inf, dtype=torch.float16, requires_grad=True) for n in (70000, 140000)]
    found = batch(rows, kind).amax(1)
    assert found.tolist() == [-math.inf, -math.inf]
    assert all([g.isfinite().all() for g in torch.autograd.grad(found.sum(), rows)])
