"""Indices on several ragged dims, `x[:, :, 2:10, -8:]` of images: against the same index of each row."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from harness import Counter
from test_indexing import Module, flipped
from torch import Tensor
from torch.utils import _pytree as pytree

import tdc
from tdc import IndexingError, ShapeError

S, T = slice, torch.tensor
ALL = S(None)
SPANS = [ALL, S(1, None), S(None, 2), S(None, None, -1), S(-2, None), S(None, None, 2), S(-1, 0, -1), S(2, 1)]
POSITIONS = [0, -1, T([0, -1]), T([[0, 1], [1, -1]])]


def images(*sizes: tuple[int, int]) -> Any:
    g = torch.Generator().manual_seed(0)
    return tdc.pack([torch.randn(2, h, w, 3, generator=g) for h, w in sizes], ragged_dim=(2, 3))


def volumes() -> Any:
    g = torch.Generator().manual_seed(0)
    return tdc.pack([torch.randn(n, generator=g) for n in ((3, 2, 4), (2, 4, 2), (5, 3, 3))], ragged_dim=(1, 2, 3))


def indices(count: int) -> list[tuple[Any, ...]]:
    """All entries for ragged dims with at most one vector, and none between slices."""
    found = []
    for parts in product(SPANS + POSITIONS, repeat=count):
        vectors = [i for i, part in enumerate(parts) if isinstance(part, Tensor)]
        inside = count == 3 and vectors == [1] and isinstance(parts[0], S) and isinstance(parts[2], S)
        if len(vectors) < 2 and not inside:
            found.append(parts)
    return found


def by_hand(row: Tensor, parts: Any) -> Tensor:
    for d in range(len(parts) - 1, -1, -1):
        row = flipped(row, d, parts[d])
    return row


def same(got: Any, want: list[Tensor]) -> None:
    if not isinstance(got, Tensor):
        tdc.validate(got)
    assert [(r.shape, r.tolist()) for r in got.unbind()] == [(r.shape, r.tolist()) for r in want]


@pytest.mark.parametrize("channel", [ALL, 1])
def test_images(channel: Any):
    x = images((3, 2), (2, 4), (5, 3))
    y = x.to_padded(math.nan)
    for parts in indices(2):
        want = [by_hand(row, (channel, *parts)) for row in x.unbind()]
        same(x[:, channel, *parts], want)
        same(y[:, channel, *parts], want)


def test_volumes():
    x = volumes()
    for parts in indices(3)[::3]:
        same(x[:, *parts], [by_hand(row, parts) for row in x.unbind()])


def test_rows_and_new_dims():
    x = images((3, 2), (2, 4), (5, 3))
    rows = x.unbind()
    same(x[[2, 0], :, 1:, 0], [rows[i][:, 1:, 0] for i in (2, 0)])
    same(x[[2, 0], :, [4, -1]], [rows[2][:, 4], rows[0][:, -1]])
    same(x[1:, None, :, ::-1, -2:, [2, 0]], [row[None, :, :, -2:, [2, 0]].flip(2) for row in rows[1:]])
    same(x[:, :, 0, None], [row[:, 0, None] for row in rows])
    assert torch.equal(x[1, :, 1:, 0], rows[1][:, 1:, 0])
    assert x.transpose(0, 1)[:, :, 1:, 0].shape == (2, 3, -1, 3)


def test_other_spellings():
    x = images((3, 2), (2, 4), (5, 3))
    rows = x.unbind()
    same(tdc.truncate(x, T([1, 2, 9])), [rows[0][:, :1], rows[1][:, :2], rows[2]])
    same(x.narrow(2, 0, 2), [row[:, :2] for row in rows])
    same(x.select(3, 1), [row[:, :, 1] for row in rows])
    for i, part in enumerate(x.chunk(2, 3)):
        same(part, [row.chunk(2, 2)[i] for row in rows])


def test_the_longest_sizes_stay_known():
    x = images((3, 2), (2, 4))
    extent = x[:, :, 1:, :-1].structure.extent
    assert extent is not None
    assert extent.shape == (2, 3, 0)


INDICES = {
    "crop": lambda x: x[:, :, 1:3, :-1], "line": lambda x: x[:, :, 0], "column": lambda x: x[:, :, :, -1],
    "positions": lambda x: x[:, :, :, [0, -1]], "mirror": lambda x: x[:, :, ::-1, ::2],
    "pixel": lambda x: x[:, 0, 0, 0], "part": lambda x: x.chunk(2, 3)[0],
}  # fmt: skip
BATCHES = (((3, 4), (2, 2)), ((5, 4), (2, 6), (3, 3)), ((2, 3), (7, 2), (3, 3), (4, 4)))


@pytest.mark.slow
def test_one_graph_for_all_sizes():
    def run(x: Any) -> Any:
        return [index(x) for index in INDICES.values()]

    counter = Counter()
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for sizes in BATCHES:
        x = images(*sizes)
        torch.testing.assert_close(pytree.tree_leaves(compiled(x)), pytree.tree_leaves(run(x)))
    assert counter.graphs == 1


@pytest.mark.parametrize("name", ["crop", "positions"])
def test_export(name: str):
    auto = torch.export.Dim.AUTO
    x = images(*BATCHES[0])
    shapes = ([{1: auto}, {0: auto}, {0: auto}, {0: auto, 1: auto}],)
    program = torch.export.export(Module(INDICES[name]), (x,), dynamic_shapes=shapes).module()
    for sizes in BATCHES:
        x = images(*sizes)
        torch.testing.assert_close(pytree.tree_leaves(program(x)), pytree.tree_leaves(INDICES[name](x)))


@pytest.mark.parametrize("name", INDICES)
def test_vmap_and_gradients(name: str):
    x = images((3, 4), (2, 2))

    def run(values: Tensor) -> Tensor:
        return pytree.tree_leaves(INDICES[name](x.with_values(values)))[0]

    several = torch.stack([x.values, x.values * 2])
    assert torch.equal(torch.vmap(run)(several), torch.stack([run(v) for v in several]))
    grad = torch.func.grad(lambda v: run(v).sum())(x.values)
    rows = [row.clone().requires_grad_() for row in x.unbind()]
    out = INDICES[name](tdc.pack(rows, ragged_dim=(2, 3)))
    (out if isinstance(out, Tensor) else out.values).sum().backward()
    want = [torch.zeros_like(row) if row.grad is None else row.grad for row in rows]
    assert torch.equal(grad, torch.cat([g.flatten(1, 2) for g in want], 1))


def test_what_an_index_cannot_be():
    x = images((3, 2), (2, 4))
    with pytest.raises(
        ShapeError, match=r"expected ragged dims side by side, got positions between them\nhint: x.to_pad"
    ):
        volumes()[:, :, [0, 1]]
    with pytest.raises(
        IndexingError, match=r"an element at 2, got a shorter row\nhint: .* x = x\[x.sizes\[:, 1\] > k\]"
    ):
        x[:, :, :, 2]
    with pytest.raises(IndexingError, match=r"expected at most one vector, got vectors at dims \[2, 3\]"):
        x[:, :, [0, 1], [0, 1]]
    with pytest.raises(ShapeError, match=r"expected one end for each of 2 rows, got Tensor int64\[3\]"):
        tdc.truncate(x, T([1, 2, 3]))
