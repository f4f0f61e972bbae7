"""Orders, extremes, scans and products of rows along a ragged dim: numbers, derivatives, transforms and graphs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from versions import refused

import tdc
from tdc.compile import counted

DOUBLE = torch.float64
LENGTHS = (3, 1, 0, 6)
CALLS: dict[str, Callable[[Any, int], Any]] = {  # of a batch, or of one example, along a dim
    "sort": lambda x, d: x.sort(dim=d, stable=True).values,
    "argsort": lambda x, d: x.argsort(dim=d, stable=True, descending=True),
    "cumsum": lambda x, d: x.cumsum(d),
    "cummax": lambda x, d: x.cummax(d),
    "cummin": lambda x, d: x.cummin(d),
    "max": lambda x, d: x.max(d),
    "min": lambda x, d: x.min(d),
    "argmax": lambda x, d: x.argmax(d),
    "prod": lambda x, d: x.prod(d),
    "topk": lambda x, d: x.topk(2, d),
    "median": lambda x, d: x.median(d),
    "logsumexp": lambda x, d: x.logsumexp(d),
}
LOOSE = ("sort", "argsort", "cumsum", "cummax", "cummin", "prod")  # which take empty examples
PADDED = ("cumsum", "cummax", "cummin", "prod")  # which run on a rectangle
SMOOTH = ("sort", "cumsum", "cummax", "max", "prod", "topk", "logsumexp")


def rows_of(name: str, dtype: torch.dtype = DOUBLE, features: tuple[int, ...] = (2,)) -> list[Tensor]:
    """Examples with distinct elements; of an operation that needs elements with two at least."""
    g = torch.Generator().manual_seed(0)
    lengths = LENGTHS if name in LOOSE else (3, 2, 5)
    whole = [torch.randperm(n * math.prod(features), generator=g).view(n, *features) - 2 for n in lengths]
    return [row.to(dtype) / (1 if not dtype.is_floating_point else 4) for row in whole]


def parts(y: Any) -> list[Any]:
    return list(y) if isinstance(y, tuple) else [y]


def alike(name: str, rows: list[Tensor], got: Any) -> None:
    """Results are those of one example after another."""
    want = [parts(CALLS[name](row, 0)) for row in rows]
    for i, one in enumerate(parts(got)):
        torch.testing.assert_close(one.unbind(), [b[i] for b in want], equal_nan=True)


@pytest.mark.parametrize("given", [torch.int32, torch.float16, torch.float64])
@pytest.mark.parametrize("own", [torch.int8, torch.bool, torch.float32])
def test_the_dtype_of_a_scan(own: torch.dtype, given: torch.dtype):
    """torch adds up small whole numbers as int64; the result has the dtype that was asked for."""
    x = tdc.pack([torch.ones(n, dtype=own) for n in (0, 1, 5, 0)])
    for op in (torch.cumsum, torch.cumprod):
        rows = [op(row, 0, dtype=given) for row in x.unbind()]
        torch.testing.assert_close(list(op(x, 1, dtype=given).unbind()), rows)


@pytest.mark.parametrize("dtype", [DOUBLE, torch.float32, torch.bfloat16, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_one_example_after_another(name: str, dtype: torch.dtype):
    rows = [row.abs() for row in rows_of(name, dtype)]
    with tdc.testing.forbid(padding=name not in PADDED, loops=False):
        alike(name, rows, CALLS[name](tdc.pack(rows), 1))


@pytest.mark.parametrize("name", CALLS)
def test_nan_and_infinities(name: str):
    rows = rows_of(name)
    for row, odd in zip([r for r in rows if len(r) > 1], (math.nan, math.inf, -math.inf), strict=False):
        row[1, 0] = odd
    alike(name, rows, CALLS[name](tdc.pack(rows), 1))


def odd_numbers(dtype: torch.dtype) -> Tensor:
    """The ends of a dtype, of 32 bits, and what compares as nothing else does."""
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        ends = [max(info.min, -(2**31)), max(info.min, 1 - 2**31), min(info.max, 2**31 - 1), info.min, info.max]
        return torch.tensor([0, 1, *ends], dtype=dtype)
    info = torch.finfo(dtype)
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 1, -1, info.max, info.min], dtype=dtype)
    return torch.cat([x, -x, info.smallest_normal / 4 * x[6:8]])


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int32, torch.int64, torch.half, torch.bfloat16, torch.float, DOUBLE],
    ids=str,
)
def test_the_order_of_odd_numbers(dtype: torch.dtype, descending: bool):
    """Equal ones stay in order, zeros of two signs and every NaN among them."""
    pool, g = odd_numbers(dtype), torch.Generator().manual_seed(0)
    rows = [pool[torch.randint(len(pool), (n, 3), generator=g)] for n in (0, 40, 1, 0, 9, 0)]
    x = tdc.pack(rows)
    for stable in (False, True):
        values, positions = x.sort(dim=1, descending=descending, stable=stable)
        for row, v, i in zip(rows, values.unbind(), positions.unbind(), strict=True):
            want = row.sort(dim=0, descending=descending, stable=stable)
            assert torch.equal(row.gather(0, i).nan_to_num(7), v.nan_to_num(7))
            torch.testing.assert_close(v, want.values, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(
                i if stable else i.sort(0).values, want.indices if stable else want.indices.sort(0).values
            )


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", ["cumsum", "prod"])
def test_second_derivatives_inside_a_graph(name: str):
    """Of autograd, which Dynamo traces; with zeros among the elements."""
    x = tdc.pack([torch.tensor(row, dtype=DOUBLE) for row in ([2.0, 0.0, 3.0, 0.0], [0.0, 4.0], [1.0, 2.0, 3.0])])

    def run(values: Tensor) -> Tensor:
        y = CALLS[name](x.with_values(values), 1)
        (grad,) = torch.autograd.grad((y if isinstance(y, Tensor) else y.values).sin().sum(), values, create_graph=True)
        return torch.autograd.grad((grad + 1).square().sum(), values)[0]

    torch._dynamo.reset()
    want = run(x.values.clone().requires_grad_())
    with torch._dynamo.config.patch(trace_autograd_ops=True), refused("does not require grad", name == "prod"):
        got = torch.compile(run, backend="aot_eager", fullgraph=True)(x.values.clone().requires_grad_())
        torch.testing.assert_close(got, want)


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("cumsum", "topk", "prod")]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", ["max", *OTHERS])
def test_transforms_in_graphs(name: str):
    """A second derivative, one in a direction and one of all members take the ways that have them there."""
    x = tdc.pack(rows_of(name))

    def total(values: Tensor) -> Tensor:
        y = parts(CALLS[name](x.with_values(values), 1))[0]
        return (y if isinstance(y, Tensor) else y.values).square().sum()

    def hessian(values: Tensor) -> Tensor:
        return torch.func.grad(lambda v: torch.func.grad(total)(v).square().sum())(values)

    def direction(values: Tensor) -> Tensor:
        return torch.func.jvp(total, (values,), (torch.ones_like(values),))[1]

    for fn in (hessian, direction, torch.func.grad(total)):
        torch._dynamo.reset()
        got = torch.compile(fn, backend="aot_eager", fullgraph=True)(x.values)
        torch.testing.assert_close(got, fn(x.values))


@pytest.mark.parametrize("count", [0, 1])
def test_no_examples_and_no_features(count: int):
    x = tdc.NestedTensor(torch.zeros(0, 2), torch.zeros(count + 1, dtype=torch.int64))
    assert x.cumsum(1).values.shape == x.cummax(1).values.values.shape == x.sort(1).values.values.shape == (0, 2)
    assert x.argmax(1).shape == x.prod(1).shape == (count, 2)
    none = tdc.pack([torch.zeros(3, 0), torch.zeros(1, 0)])
    assert none.cumsum(1).values.shape == none.sort(1).values.values.shape == (4, 0)
    assert none.argmax(1).shape == none.prod(1).shape == (2, 0)


def test_a_row_shorter_than_k():
    x = tdc.pack([torch.ones(3), torch.ones(1)])
    with pytest.raises(tdc.ShapeError, match=r"tdc\.topk: expected at least 2 elements in each row"):
        x.topk(2, 1)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="at least 2 elements in each row"):
        torch.compile(lambda x: x.topk(2, 1).values, backend="eager", fullgraph=True)(x)


class TestSharedPositions:
    """An operand with a ragged dim and no batch is one for all examples, read at each position."""

    def test_its_gradient(self):
        rows = [torch.randn(n, 2, dtype=DOUBLE) for n in (3, 0, 2)]
        table = torch.randn(3, 2, dtype=DOUBLE, requires_grad=True)
        x = tdc.pack(rows)

        def run(table: Tensor) -> Tensor:
            return (x * table).values

        with tdc.testing.forbid(loops=False):
            got = run(table)
        torch.testing.assert_close(got, torch.cat([row * table[: len(row)] for row in rows]))
        assert torch.autograd.gradcheck(run, table, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(run, table)

    @pytest.mark.parametrize("shape", [(4, 5), (4, 1), (1, 5), (2, 4, 5), (1, 2, 4, 5)])
    def test_of_two_ragged_dims(self, shape: tuple[int, ...]):
        rows = [torch.randn(2, *size) for size in ((4, 3), (2, 5), (0, 1))]
        plane = torch.randn(shape)
        got = tdc.pack(rows, ragged_dim=(2, 3)) + plane
        for a, row in zip(got.unbind(), rows, strict=True):
            h, w = row.shape[1:]
            own = (plane if plane.ndim < 4 else plane[0])[..., :h, :w]  # 1 stays 1, unless the example has none
            torch.testing.assert_close(a, row + own)

    def test_one_graph(self):
        torch._dynamo.reset()
        call = counted(lambda x, table: x + table, backend="aot_eager", fullgraph=True)
        for lengths in ((3, 4), (5, 2, 6), (7, 7)):
            rows, table = [torch.randn(n, 2) for n in lengths], torch.randn(max(lengths), 2)
            torch._dynamo.maybe_mark_dynamic(table, 0)
            got = call(tdc.pack(rows), table)
            torch.testing.assert_close(got.values, torch.cat([row + table[: len(row)] for row in rows]))
        assert call.counts.compiles == 1
