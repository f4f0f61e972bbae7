"""`max_length`: a bound of the longest row, which decides how wide padding is and changes no result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tdc
from tdc import NestedTensor, ShapeError, StructureError
from tdc.layout.structure import Structure, extent_of
from tdc.ragged.nested import build_nested


def assert_rows(x: Any, rows: list[Tensor]) -> None:
    for row, want in zip(x.unbind(), rows, strict=True):
        assert torch.equal(row, want)


def test_validate_what_was_put_together_without_checks():
    x = tdc.pack([torch.ones(2), torch.ones(5)])
    short = Structure(x.offsets, None, extent_of((3,)))
    with pytest.raises(StructureError, match="smaller than the longest row"):
        tdc.validate(build_nested(short, x.values))


def test_a_short_max_length_is_refused_in_graphs_too():
    x = tdc.pack([torch.ones(2), torch.ones(5)])

    def fn(values: Tensor, offsets: Tensor) -> Tensor:
        return NestedTensor(values, offsets, max_length=4).to_padded().data

    with pytest.raises(RuntimeError, match=r"tdc\.NestedTensor: expected max_length at least as long"):
        torch.compile(fn, backend="aot_eager", fullgraph=True)(x.values, x.offsets)
    with pytest.raises(StructureError, match=r"tdc\.NestedTensor: expected max_length at least as long"):
        fn(x.values, x.offsets)


@pytest.mark.parametrize("bound", [5, 8, None])
class TestMaxLengthChangesNoResult:
    rows = (torch.rand(2, 4), torch.rand(0, 4), torch.rand(5, 4))

    def build(self, bound: int | None) -> Any:
        x = tdc.pack(list(self.rows))
        return NestedTensor(x.values, x.offsets, max_length=bound)

    def test_split_has_as_many_parts_as_the_longest_row(self, bound: int | None):
        parts = self.build(bound).split(2, 1)
        assert [part.lengths.tolist() for part in parts] == [[2, 0, 2], [0, 0, 2], [0, 0, 1]]

    @pytest.mark.cases(1, 1)
    def test_a_rectangle_is_as_long_as_the_longest_row_or_as_padding(self, bound: int | None):
        x = self.build(bound)
        for y in (torch.rand(3, 5, 4), x.to_padded().data):
            assert_rows(x + y, [row + other[: len(row)] for row, other in zip(self.rows, y, strict=True)])
            compiled = torch.compile(lambda x, y: x + y, backend="eager", fullgraph=True)
            assert torch.equal(compiled(x, y).values, (x + y).values)

    @pytest.mark.cases(1, 2)
    @pytest.mark.parametrize("size", [2, 4, 6, 9])
    def test_a_rectangle_of_another_length_is_refused(self, bound: int | None, size: int):
        x, y = self.build(bound), torch.rand(3, size, 4)
        with pytest.raises(ShapeError, match=r"tdc\.add: expected an operand that broadcasts against NestedTensor"):
            x + y
        with pytest.raises(RuntimeError, match=r"tdc\.add: expected an operand that broadcasts"):
            torch.compile(lambda x, y: x + y, backend="eager", fullgraph=True)(x, y)


def test_a_rectangle_that_varies_along_one_of_two_ragged_dims():
    rows, y = [torch.rand(2, 3), torch.rand(1, 1)], torch.rand(2, 1, 3)
    x = tdc.pack(rows, ragged_dim=(1, 2))
    for batch in (x, NestedTensor(x.values, x.offsets, shapes=x.sizes)):
        assert_rows(batch * y, [rows[0] * y[0], rows[1] * y[1, :, :1]])


@pytest.mark.slow
def test_a_graph_of_a_slice_that_leaves_nothing():
    """The first rows are all too short, so that the hint of the longest row is 0."""

    def run(x: Any) -> Any:
        return x[:, 3:].to_padded().data

    compiled = tdc.compile.counted(run, backend="aot_eager")
    for lengths in ((3, 1), (6, 2, 1), (2, 2, 2, 2), (9, 1)):
        x = tdc.pack([torch.rand(n, 2) for n in lengths])
        assert torch.equal(compiled(x), run(x))
    assert compiled.counts.compiles == 2
