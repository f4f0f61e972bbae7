"""Operations along some of several ragged dims: volumes, padded batches across rows, graphs, and what has no place."""

from __future__ import annotations

import math
from itertools import combinations, permutations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import tdc
from tdc import ShapeError, StructureError
from tdc.compile import counted

SIZES = ((2, 3, 4), (1, 2, 5), (3, 1, 1), (2, 0, 3))
SOME = [dims for count in (1, 2) for dims in combinations((2, 3, 4), count)]


def volumes() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, *size, 3) for size in SIZES]


def images(*sizes: tuple[int, int]) -> Any:
    return tdc.pack([torch.randn(size) for size in sizes or ((3, 2), (1, 4), (2, 2))], ragged_dim=(1, 2))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dims", SOME)
def test_volumes(dims: tuple[int, ...], padded: bool):
    rows = volumes()
    x: Any = tdc.pack(rows, ragged_dim=(2, 3, 4))
    x = x.to_padded(fill=math.nan) if padded else x
    inner = tuple(d - 1 for d in dims)
    for got, want in (
        (x.sum(dims), [row.sum(inner) for row in rows]),
        (x.mean((1, *dims)), [row.mean((0, *inner)) for row in rows]),
        (torch.logsumexp(x, (*dims, -1)), [row.logsumexp((*inner, -1)) for row in rows]),
    ):
        assert type(got) is type(x)
        torch.testing.assert_close(list(got.unbind()), want, equal_nan=True)


KEEPING = {
    "sort": lambda x, d: x.sort(dim=d, descending=True, stable=True), "argsort": lambda x, d: torch.argsort(x, dim=d),
    "flip": lambda x, d: x.flip(d), "flip, two": lambda x, d: x.flip((d, -1)),
    "roll": lambda x, d: x.roll((2, 1), (d, -1)), "diff": lambda x, d: x.diff(dim=d),
    "diff, twice": lambda x, d: torch.diff(x, 2, d), "normalize": lambda x, d: F.normalize(x, dim=d),
    "cumsum": lambda x, d: x.cumsum(d), "softmax": lambda x, d: x.softmax(d),
    "cumulative_trapezoid": lambda x, d: torch.cumulative_trapezoid(x, dim=d, dx=0.5),
}  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("op", KEEPING)
def test_orders_and_scans_of_lines(op: str, padded: bool):
    rows, run = [row[:, :3] for row in volumes()[:3]], KEEPING[op]
    x: Any = tdc.pack(rows, ragged_dim=(2, 3, 4))
    x = x.to_padded(fill=math.nan) if padded else x
    for dim in (2, 3, 4):
        got, want = run(x, dim), [run(row, dim - 1) for row in rows]
        results = zip(got, zip(*want, strict=True), strict=True) if isinstance(got, tuple) else [(got, want)]
        for y, examples in results:
            assert (type(y), y.ragged_dims) == (type(x), x.ragged_dims)
            torch.testing.assert_close(list(y.unbind()), list(examples))


@pytest.mark.parametrize("padded", [False, True])
def test_places_of_lines(padded: bool):
    rows = volumes()[:2]
    x: Any = tdc.pack(rows, ragged_dim=(2, 3, 4))
    x = x.to_padded(fill=math.nan) if padded else x
    q = torch.tensor([0.2, 0.6])
    for dim in (2, 4):
        for got, want in (
            (x.topk(1, dim).values, [row.topk(1, dim - 1).values for row in rows]),
            (x.kthvalue(1, dim).values, [row.kthvalue(1, dim - 1).values for row in rows]),
            (x.kthvalue(1, dim, True).indices, [row.kthvalue(1, dim - 1, True).indices for row in rows]),
            (x.quantile(q, dim)[1], [row.quantile(q, dim - 1)[1] for row in rows]),
            (torch.trapezoid(x, dim=dim), [torch.trapezoid(row, dim=dim - 1) for row in rows]),
        ):
            torch.testing.assert_close(list(got.unbind()), want)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("order", list(permutations((2, 3, 4))), ids=str)
def test_ragged_dims_in_another_order(order: tuple[int, ...], padded: bool):
    rows = volumes()
    x: Any = tdc.pack(rows, ragged_dim=(2, 3, 4))
    got = (x.to_padded(fill=math.nan) if padded else x).permute(0, 5, *order, 1)
    want = [row.permute(4, *[d - 1 for d in order], 0) for row in rows]
    torch.testing.assert_close(list(tdc.validate(got).unbind()), want, rtol=0, atol=0)


def test_a_quarter_turn_and_a_product_with_the_transpose():
    x = images()
    for got, want in (
        (x.rot90(1, (1, 2)), [row.rot90() for row in x.unbind()]),
        (x @ x.transpose(1, 2), [row @ row.T for row in x.unbind()]),
    ):
        torch.testing.assert_close(list(got.unbind()), want)


@pytest.mark.parametrize("dim", [2, 3, 4])
def test_joined_lines(dim: int):
    rows = volumes()
    others = [row.repeat_interleave(n, dim - 1) for n, row in zip((1, 2, 0, 3), rows, strict=True)]
    x, y = [tdc.pack(parts, ragged_dim=(2, 3, 4)) for parts in (rows, others)]
    parts: list[Any] = [x, y, x]
    got: Any = tdc.validate(torch.cat(parts, dim))
    want = [torch.cat([a, b, a], dim - 1) for a, b in zip(rows, others, strict=True)]
    torch.testing.assert_close(list(got.unbind()), want, rtol=0, atol=0)


def test_what_cannot_be_joined():
    x = images()
    with pytest.raises(StructureError, match=r"rows that differ in the dim they are joined along only, got others"):
        torch.cat([x, images((3, 2), (1, 3), (2, 2))], 1)
    with pytest.raises(StructureError, match=r"as many rows in each, got batch sizes \[3, 2\]\nhint: along the batch"):
        torch.cat([x, x[:2]], 1)


def test_a_kept_dim_between_ragged_dims_has_no_place():
    x: Any = tdc.pack(volumes(), ragged_dim=(2, 3, 4))
    assert x.sum(4, keepdim=True).shape == (4, 2, -1, -1, 1, 3)
    assert x.sum(2, keepdim=True).shape == (4, 2, 1, -1, -1, 3)
    for batch in (x, x.to_padded()):
        with pytest.raises(ShapeError, match=r"tdc\.sum: expected ragged dims side by side, got a static dim between"):
            batch.sum(3, keepdim=True)


def test_of_a_padded_batch_the_rows_may_go_as_well():
    x = images()
    data = x.to_padded(fill=math.nan)
    want = x.to_padded().data.sum((0, 2))
    torch.testing.assert_close(data.sum((0, 2)), want)
    real = x.with_values(torch.ones_like(x.values)).to_padded().data.sum((0, 2))
    torch.testing.assert_close(data.mean((0, 2)), want / real)
    torch.testing.assert_close(data.logsumexp((0, 2)), x.to_padded(fill=-math.inf).data.logsumexp((0, 2)))


def test_results_share_their_lengths_and_know_the_longest():
    values, places = images().max(1)
    assert values.structure is places.structure
    assert values.max_length == 4
    assert (values + places).lengths.tolist() == [2, 4, 2]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.cases(0, 1)
def test_one_graph_for_the_lines_of_all_sizes(padded: bool):
    def run(x: Any) -> Any:
        return x.sort(1), x.topk(1, 2), x.quantile(0.3, 1), x.diff(dim=2), x.flip(1), x.roll(1, 2)

    fn = counted(run, backend="aot_eager")
    for batch in (images(), images((2, 5), (4, 3)), images((6, 2), (3, 3), (2, 7), (5, 5))):
        x: Any = batch.to_padded() if padded else batch
        got, want = [pytree.tree_leaves(results) for results in (fn(x), run(x))]
        torch.testing.assert_close(got, want, equal_nan=True)
    assert (fn.counts.graphs, fn.counts.compiles) == (1, 1)
