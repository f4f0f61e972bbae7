"""The text of every bad input of a ragged batch. `EXPECTTEST_ACCEPT=1` writes them anew."""

from __future__ import annotations

import torch
from texts import Says, T, ragged, says

import tdc
from tdc import MaskedBatch, NestedTensor

SAYS: dict[str, Says] = {
    "offsets of another dtype": (lambda: NestedTensor(torch.zeros(3), T([0, 3], dtype=torch.int32)), """\
DtypeError
tdc.NestedTensor: expected int64 offsets, got Tensor int32[2]
hint: offsets.long() (zero-copy needs int64, torch's jagged layout)"""),
    "offsets of another shape": (lambda: NestedTensor(torch.zeros(3), T([[0, 3]])), """\
ShapeError
tdc.NestedTensor: expected offsets of shape (B+1,), got Tensor int64[1, 2]
hint: tdc.NestedTensor(values, offsets), with offsets = tdc.offsets_of(lengths)"""),
    "values that are no tensor": (lambda: NestedTensor([1.0], [0, 1]), """\
DtypeError
tdc.NestedTensor: expected tensors of values and offsets, got list and list
hint: tdc.pack(rows)"""),
    "a ragged dim that is not there": (lambda: NestedTensor(torch.zeros(3), T([0, 3]), ragged_dim=2), """\
ShapeError
tdc.NestedTensor: expected a ragged dim in [1, 1], got ragged_dim=2 for values with 1 dims
hint: dim 0 is the batch; ragged_dim=1 is the first dim of each row"""),
    "offsets that break every rule": (lambda: tdc.validate(NestedTensor(torch.zeros(5), T([1, 4, 3, 6]))), """\
StructureError
tdc.validate: expected a valid ragged structure, got 3 broken rules
at offsets: do not begin with 0
at offsets: decrease after row 1
at offsets: do not end at N, the 5 packed elements of values
hint: build it with tdc.pack(rows), or from offsets = tdc.offsets_of(lengths)"""),
    "offsets that do not end at n": (lambda: tdc.validate(NestedTensor(torch.zeros(5), T([0, 4]))), """\
StructureError
tdc.validate: expected a valid ragged structure, got 1 broken rule
at offsets: do not end at N, the 5 packed elements of values
hint: build it with tdc.pack(rows), or from offsets = tdc.offsets_of(lengths)"""),
    "pack of nothing": (lambda: tdc.pack([]), """\
StructureError
tdc.pack: expected at least one tensor, got an empty list
hint: NestedTensor(values of shape (0, ...), torch.zeros(1, dtype=torch.int64)) is a batch of no rows"""),
    "pack of other sizes": (lambda: tdc.pack([torch.zeros(2, 3), torch.zeros(1, 4), torch.zeros(5)]), """\
ShapeError
tdc.pack: expected rows like the first, Tensor float32[2, 3], that differ in dim 0 only, got 2 others
at row 1: Tensor float32[1, 4]
at row 2: Tensor float32[5]
hint: name the dims that differ with ragged_dim=, the batch counting as dim 0"""),
    "pack of other sizes with two ragged dims": (
        lambda: tdc.pack([torch.zeros(3, 2, 2), torch.zeros(1, 2, 2)], ragged_dim=(2, 3)), """\
ShapeError
tdc.pack: expected rows like the first, Tensor float32[3, 2, 2], that differ in dims 1, 2 only, got 1 others
at row 1: Tensor float32[1, 2, 2]
hint: name the dims that differ with ragged_dim=, the batch counting as dim 0"""),
    "pack of other dtypes": (lambda: tdc.pack([torch.zeros(2), torch.zeros(1).int(), torch.zeros(1).double()]), """\
DtypeError
tdc.pack: expected rows of torch.float32, as the first, got 2 that differ
at row 1: Tensor int32[1]
at row 2: Tensor float64[1]
hint: convert them with .to(dtype)"""),
    "pack of numbers": (lambda: tdc.pack([T(1.0), T(2.0)]), """\
ShapeError
tdc.pack: expected rows with at least one dim, got Tensor float32[]
hint: stack numbers with torch.stack; rows of one element have shape [1]"""),
    "pack of lists": (lambda: tdc.pack([[1, 2], [3]]), """\
DtypeError
tdc.pack: expected tensors, got 2 rows that are not
at row 0: list
at row 1: list
hint: tdc.from_list(rows)"""),
    "pack with dims apart": (lambda: tdc.pack([torch.zeros(2, 3, 4)], ragged_dim=(1, 3)), """\
ShapeError
tdc.pack: expected neighbouring ragged dims in [1, 3], got (1, 3)
hint: dim 0 is the batch; permute the rows so that ragged dims are neighbours"""),
    "different lengths": (lambda: ragged(2, 0, 3) + ragged(3, 0, 2), """\
StructureError
tdc.add: expected operands of one ragged structure, got rows of different lengths
hint: build both from one structure, e.g. x.with_values(y), or pad both with x.to_padded()"""),
    "different numbers of rows": (lambda: ragged(2, 3) + ragged(2, 3, 1), """\
StructureError
tdc.add: expected operands of one ragged structure, got 2 rows, ragged dims (1,) and 3 rows, ragged dims (1,)
hint: build both from one structure, e.g. x.with_values(y), or pad both with x.to_padded()"""),
    "packed with padded": (lambda: ragged() + ragged().to_padded(), """\
UnsupportedError
tdc.add: expected operands of one kind, got NestedTensor and MaskedBatch
hint: convert with to_packed() or to_padded()"""),
    "a tensor longer than the longest row": (lambda: ragged() * torch.ones(3, 9, 4), """\
ShapeError
tdc.mul: expected an operand that broadcasts against NestedTensor float32[3, -1, 4], got Tensor float32[3, 9, 4]
hint: sizes must be 1 or equal, counted from the last dim"""),
    "a tensor for another number of rows": (lambda: ragged() * torch.ones(2, 1, 4), """\
ShapeError
tdc.mul: expected an operand that broadcasts against NestedTensor float32[3, -1, 4], got Tensor float32[2, 1, 4]
hint: sizes must be 1 or equal, counted from the last dim"""),
    "a tensor for other features": (lambda: ragged() * torch.ones(5), """\
ShapeError
tdc.mul: expected an operand that broadcasts against NestedTensor float32[3, -1, 4], got Tensor float32[5]
hint: sizes must be 1 or equal, counted from the last dim"""),
    "reducing the batch alone": (lambda: ragged().sum(0), """\
ShapeError
tdc.sum: expected the ragged dim reduced together with the batch, got dim 0 of NestedTensor float32[3, -1, 4]
hint: rows differ in length: reduce dim (0, 1), or x.to_padded() first"""),
    "an op without a rule": (lambda: torch.fft.fft(ragged()), """\
UnsupportedError
tdc.fft: expected an operation with a rule for NestedTensor, got 'fft', which has none
hint: convert with x.to_padded(), or loop over x.unbind()"""),
    "an index out of range": (lambda: ragged()[3], """\
IndexingError
tdc.index: expected a row in [-3, 2], got 3
hint: the batch has 3 rows"""),
    "an index vector out of range": (lambda: ragged()[[0, 3]], """\
IndexingError
tdc.index: expected rows in [-3, 2], got one beyond
hint: the batch has 3 rows"""),
    "too many indices": (lambda: ragged()[0, 0, 0, 0], """\
IndexingError
tdc.index: expected at most 3 indices, `...` once, got 4 of them
hint: the logical shape is [3, -1, 4]"""),
    "a static index out of range": (lambda: ragged()[:, :, 4], """\
IndexingError
tdc.index: expected an index in [-4, 3] at dim 2, got 4
hint: the logical shape is [3, -1, 4]"""),
    "a position that some row lacks": (lambda: ragged()[:, 1], """\
IndexingError
tdc.index: expected rows with an element at 1, got a shorter row
hint: drop short rows first: x = x[x.lengths > k]"""),
    "a list behind the batch": (lambda: ragged()[:, [0, 1]], """\
IndexingError
tdc.index: expected rows with an element at each position, got a shorter row
hint: drop short rows first: x = x[x.lengths > k]"""),
    "several vectors": (lambda: ragged()[[0, 1], :, [0, 1]], """\
IndexingError
tdc.index: expected at most one vector, got vectors at dims [0, 2]
hint: one vector at a time: x[rows][..., positions]; rows pair only with positions of the ragged dim"""),
    "ends that are not one for each row": (lambda: ragged()[:, : T([1, 2])], """\
ShapeError
tdc.index: expected one end for each of 3 rows, got Tensor int64[2]
hint: x[:, :lengths] with whole numbers"""),
    "a mask of numbers": (lambda: ragged()[ragged()], """\
DtypeError
tdc.index: expected a bool mask, got NestedTensor float32[3, -1, 4]
hint: x[mask.bool()]"""),
    "a mask of another size": (lambda: ragged()[T([True, False])], """\
IndexingError
tdc.index: expected an int, a slice, a mask of [3] or a vector of rows, got Tensor bool[2]
hint: rows of different lengths stay in one batch dim: index it with one dim"""),
    "a moved batch dim": (lambda: tdc.pack([torch.ones(2, 3)], ragged_dim=(1, 2)).transpose(0, 1).to_padded(), """\
ShapeError
tdc.to_padded: expected ragged dims side by side, got the batch at dim 1 between them
hint: transpose it back first"""),
    "a dim that is not there": (lambda: ragged().unbind(5), """\
ShapeError
tdc.unbind: expected a dim in [-3, 2], got 5
hint: count dims of the logical shape"""),
    "several ragged dims in torch": (lambda: tdc.pack([torch.zeros(2, 2)], ragged_dim=(1, 2)).to_torch(), """\
UnsupportedError
tdc.to_torch: expected one ragged dim and the batch as dim 0, got 2 of them, batch at dim 0
hint: x.unbind()"""),
    "lengths of another dtype": (lambda: MaskedBatch(torch.zeros(2, 3), T([1, 2], dtype=torch.int32)), """\
DtypeError
tdc.MaskedBatch: expected int64 lengths, got Tensor int32[2]
hint: lengths.long()"""),
    "lengths of another shape": (lambda: MaskedBatch(torch.zeros(2, 3), T([1, 2, 3])), """\
ShapeError
tdc.MaskedBatch: expected lengths of shape (B, 1) for data (B, ...), got Tensor int64[3] for Tensor float32[2, 3]
hint: one row of lengths for each example"""),
    "data without a ragged dim": (lambda: MaskedBatch(torch.zeros(2), T([1, 2])), """\
ShapeError
tdc.MaskedBatch: expected data with a ragged dim, got (1,) for Tensor float32[2]
hint: dim 0 is the batch, ragged dims come behind it"""),
    "neither lengths nor mask": (lambda: tdc.from_padded(torch.zeros(2, 3)), """\
ShapeError
tdc.from_padded: expected one of lengths= and mask=, got none
hint: pass lengths=(B,) int64"""),
    "padding in front": (lambda: tdc.from_padded(torch.zeros(1, 3), mask=T([[False, True, True]])), """\
StructureError
tdc.from_padded: expected padding behind each row, got padding elsewhere
hint: move the real positions of each row together, or say side='left' or side='right'"""),
    "different lengths, 2": (lambda: ragged(2, 0, 3).to_padded() + ragged(3, 0, 2).to_padded(), """\
StructureError
tdc.add: expected operands of one ragged structure, got rows of different lengths
hint: build both from one batch, e.g. x.with_data(y)"""),
    "an index behind the batch": (lambda: ragged().to_padded()[:, 0], """\
IndexingError
tdc.index: expected rows with an element at 0, got a shorter row
hint: drop short rows first: x = x[x.lengths > k]"""),
    "an op without a rule, 2": (lambda: torch.fft.fft(ragged().to_padded()), """\
UnsupportedError
tdc.fft: expected an operation with a rule for MaskedBatch, got 'fft', which has none
hint: convert with x.to_packed(), or use x.data and x.mask"""),
}  # fmt: skip
test_says = says(SAYS)
