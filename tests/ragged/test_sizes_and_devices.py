"""Parts of a ragged batch go together: sizes and devices are compared where they meet, by metadata alone; and
`max_length`, a bound of the longest row, decides how wide padding is and changes no result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tdc
from tdc import NestedTensor, ShapeError, StructureError
from tdc.compile import counted
from tdc.layout.structure import Structure, extent_of
from tdc.ragged.nested import build_nested

ROWS = [torch.ones(2, 3), torch.ones(0, 3), torch.ones(4, 3)]
SEVERAL = [torch.ones(2, 3), torch.ones(0, 1), torch.ones(1, 4)]


def nested() -> tdc.NestedTensor:
    return tdc.pack(ROWS)


@pytest.mark.parametrize("values", [torch.ones(5, 3), torch.ones(7, 3), torch.ones(0, 3), torch.ones(())], ids=str)
def test_values_of_another_size(values: torch.Tensor):
    with pytest.raises(
        tdc.ShapeError, match=r"tdc\.with_values: expected data for the lengths of Tensor float32\[6, 3\]"
    ):
        nested().with_values(values)


@pytest.mark.parametrize("shape", [(2, 4, 3), (4, 4, 3), (3, 3, 3), (3,), ()], ids=str)
def test_data_of_another_size(shape: tuple[int, ...]):
    with pytest.raises(
        tdc.ShapeError, match=r"tdc\.with_data: expected data for the lengths of Tensor float32\[3, 4, 3\]"
    ):
        nested().to_padded().with_data(torch.ones(shape))


def test_data_that_fits():
    x = nested()
    assert x.with_values(torch.ones(6)).shape == (3, -1)
    assert x.with_values(torch.ones(6, 5, 1)).shape == (3, -1, 5, 1)
    assert x.to_padded().with_data(torch.ones(3, 4)).shape == (3, 4)
    assert x.to_padded().with_data(torch.ones(3, 6, 2)).to_packed().values.shape == (6, 2)


def test_sizes_in_a_graph():
    """Equal sizes are one size, so the check is no guard; sizes that only data tells are not asked."""

    def other(x: Any) -> Any:
        return x.with_values(x.values.relu()).to_padded().with_data(x.to_padded().data + 1)

    run = counted(other, backend="eager")
    for count in (4, 5, 6):
        run(tdc.pack([torch.ones(n, 3) for n in range(2, count)]))
    assert run.counts.compiles == 1
    with pytest.raises(Exception, match="data for the lengths of"):
        torch.compile(lambda x: x.with_values(x.values[1:]), backend="eager", fullgraph=True)(nested())


@pytest.mark.parametrize("make", [tdc.NestedTensor, tdc.MaskedBatch])
def test_parts_on_several_devices(make: Any):
    second = torch.tensor([0, 2, 3]) if make is tdc.NestedTensor else torch.tensor([2, 1, 0])
    with pytest.raises(tdc.StructureError, match=r"on one device, got (values|data) on meta, (offsets|lengths) on cpu"):
        make(torch.ones(3, 3, device="meta"), second)


@pytest.mark.parametrize("rows", [ROWS, SEVERAL], ids=["one", "several"])
def test_a_move_marks_again(rows: list[torch.Tensor]):
    """One graph serves batches that were moved, as it does those that were made where they are."""
    packed = tdc.pack(rows, ragged_dim=1 if rows is ROWS else (1, 2))
    s = packed.to("meta").structure
    parts: list[Any] = [s.offsets, s.extent, *([] if s.shapes is None else [s.shapes])]
    marks = [getattr(t, "_dynamo_weak_dynamic_indices", set()) for t in parts]
    assert marks[:2] == [{0}, set(range(s.ragged_ndim))]
    assert all(marks)
    x = packed.to_padded().to("meta")
    assert getattr(x.lengths, "_dynamo_weak_dynamic_indices", set()) == {0}


# -- max_length


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
