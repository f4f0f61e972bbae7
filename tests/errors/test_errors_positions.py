"""What reading, writing and cutting ragged batches says of arguments that have no meaning, packed and padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from texts import Says, T, ragged, says

import tdc

CALLS = {
    "gather along the batch": lambda x: x.gather(0, T([[[0]]])),
    "gather beyond a row": lambda x: x.gather(1, torch.full((3, 1, 4), 3)),
    "gather of an index of other dims": lambda x: x.gather(1, T([0])),
    "gather of an index of other rows": lambda x: x.gather(2, other(x).long()),
    "scatter of a list": lambda x: x.scatter(1, [0], 1.0),
    "index_add beyond a row": lambda x: x.index_add(1, T([2]), torch.zeros(3, 1, 4)),
    "index_add of a dense source": lambda x: x.index_add(2, T([0, 1]), torch.zeros(4)),
    "index_copy of other rows": lambda x: x.index_copy(0, T([0]), x[1:2]),
    "index_put of a mask": lambda x: x.index_put((T([True, False, True]),), T(1.0)),
    "index_put beyond a row": lambda x: x.index_put((T([0]), T([2])), T(1.0)),
    "take beyond a row": lambda x: x.take(T([9])),
    "take of an index of other rows": lambda x: x.take(other(x)[:2].long()),
    "take across": lambda x: x.transpose(1, 2).take(T([0])), "masked_select of numbers": lambda x: x.masked_select(x),
    "masked_scatter of too few": lambda x: x.masked_scatter(x.isfinite(), torch.zeros(2)),
    "nonzero as a tuple": lambda x: x.nonzero(as_tuple=True), "split of no length": lambda x: x.split(0, 1),
    "split of lengths that do not add up": lambda x: x.split([1, 1], 1), "chunk into none": lambda x: x.chunk(0, 1),
    "tensor_split of a float": lambda x: x.tensor_split(1.5, 1),
    "hsplit that does not divide": lambda x: torch.hsplit(x, 2),
    "vsplit that does not divide": lambda x: torch.vsplit(x, 2), "narrow too far": lambda x: x.narrow(2, 2, 3),
    "narrow beyond a row": lambda x: x.narrow(1, 0, 3), "select too far": lambda x: x.select(2, 4),
    "movedim without a place": lambda x: x.movedim((0, 1), 0), "t of three dims": lambda x: x.t(),
    "pad of the batch": lambda x: F.pad(x, (0, 0, 0, 0, 1, 1)), "pad of odd numbers": lambda x: F.pad(x, (1,)),
    "pad of another mode": lambda x: F.pad(x, (1, 1), mode="wrap"),
    "pad that mirrors too much": lambda x: F.pad(x.transpose(1, 2), (2, 2), mode="reflect"),
    "unfold of short rows": lambda x: x.unfold(1, 3, 1),
    "repeat_interleave of the ragged dim by rows": lambda x: x.repeat_interleave(T([1, 2, 1]), 1),
    "channel_shuffle that does not divide": lambda x: F.channel_shuffle(x.transpose(1, 2), 3),
    "pixel_shuffle of two dims": lambda x: F.pixel_shuffle(x, 2),
    "flatten of the batch and the ragged dim": lambda x: x.flatten(0, 1),
    "unflatten of the ragged dim into static ones": lambda x: x.unflatten(1, (2, 1)),
    "unflatten of the ragged dim by a number that does not divide": lambda x: x.unflatten(1, (-1, 7)),
    "unflatten of the ragged dim by sizes of others": lambda x: x.unflatten(1, torch.tensor([[7, 1]] * 3)),
    "unflatten of the ragged dim by a batch with one": lambda x: x.unflatten(1, x),
    "unflatten of a static dim by sizes": lambda x: x.unflatten(2, torch.tensor([[7, 1]] * 3)),
    "reshape of the batch and the ragged dim": lambda x: x.reshape(-1, 3),
    "unflatten of other sizes": lambda x: x.unflatten(2, (3, 2)), "reshape of the batch": lambda x: x.reshape(-1),
    "expand of the ragged dim": lambda x: x.expand(3, 9, 4),
    "new_zeros with another -1": lambda x: x.new_zeros(-1, 2, 4),
    "truncate of other rows": lambda x: tdc.truncate(x, T([1, 2])), "F.unfold": lambda x: F.unfold(x, 2),
}  # fmt: skip


def other(x: Any) -> Any:
    """Rows of other lengths, in the same container."""
    y = ragged(3, 1, 2)
    return y if isinstance(x, tdc.NestedTensor) else y.to_padded()


@pytest.mark.parametrize("kind", ["nested", "masked"])
@pytest.mark.parametrize("name", CALLS)
def test_every_refusal_is_of_the_library(name: str, kind: str):
    x = ragged(2, 1, 3)
    with pytest.raises(tdc.TdcError, match=r"tdc\.\w+: expected .*, got .*(\n.*)*\nhint: "):
        CALLS[name](x if kind == "nested" else x.to_padded())


SAYS: dict[str, Says] = {
    "gather beyond a row": (lambda: ragged().gather(1, torch.full((3, 1, 4), 2)), """\
IndexingError
tdc.gather: expected positions inside each example, got one beyond
hint: positions count within each example, from 0"""),
    "a dense index of a static dim": (lambda: ragged().gather(2, T([[0, 1]])), """\
StructureError
tdc.gather: expected an index as ragged as NestedTensor float32[3, -1, 4], got Tensor int64[1, 2]
hint: index[:, None].expand(x.shape), or x.with_values(index)"""),
    "whole rows": (lambda: ragged().gather(0, ragged().long()), """\
UnsupportedError
tdc.gather: expected a static dim or the ragged one, got the batch
hint: x[rows] picks whole examples; each ragged dim of x.to_padded() has positions of its own"""),
    "rows of other lengths": (lambda: ragged().index_copy(0, T([0]), ragged()[2:]), """\
StructureError
tdc.index_copy: expected examples as long as those they meet, got others
hint: x[index] has their lengths"""),
    "narrow of a short row": (lambda: ragged().narrow(1, 0, 2), """\
IndexingError
tdc.index: expected rows with an element at each position, got a shorter row
hint: drop short rows first: x = x[x.lengths > k]"""),
    "padding that cuts more than there is": (lambda: F.pad(ragged(), (0, 0, 1, -1)), """\
ShapeError
tdc.pad: expected rows as long as what is cut off, got a shorter row
hint: cut less, or drop short rows first: x = x[x.lengths > k]"""),
    "mirrored padding of a short row": (lambda: F.pad(ragged().transpose(1, 2), (1, 1), mode="circular"), """\
ShapeError
tdc.pad: expected rows long enough for mode='circular', got a shorter row
hint: mode='constant'"""),
    "blocks of what is no image": (lambda: F.unfold(ragged(), 2), """\
ShapeError
tdc.unfold: expected (B, C, -1, -1), 2 dims behind channels, got NestedTensor float32[3, -1, 4], ragged dims (1,)
hint: x.transpose(1, 2) puts features of sequences first"""),
}  # fmt: skip
test_says = says(SAYS)
