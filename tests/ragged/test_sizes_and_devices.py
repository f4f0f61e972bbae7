"""Parts of a ragged batch go together: sizes and devices are compared where they meet, by metadata alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tdc
from tdc.compile import counted

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
