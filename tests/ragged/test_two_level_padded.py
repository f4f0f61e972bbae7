"""Two levels as a rectangle and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Counter
from two_levels import LENGTHS, OTHERS, batch, documents, same

import tdc
from tdc.ragged import TwoLevelPadded

NAN = float("nan")


def images() -> Any:
    """Documents of images: two ragged dims each."""
    first = tdc.pack([torch.rand(2, 3), torch.rand(1, 4)], ragged_dim=(1, 2))
    return tdc.pack([first, tdc.pack([torch.rand(3, 3)], ragged_dim=(1, 2)), first[:0]])


@pytest.mark.parametrize("lengths", [LENGTHS, *OTHERS, [[], []], [[0, 0], [0]]])
def test_a_rectangle_and_back(lengths: list[list[int]]):
    docs = documents(lengths)
    x = batch(docs)
    padded = x.to_padded(NAN)
    count, length = max(map(len, lengths)), max([n for document in lengths for n in document], default=0)
    assert padded.data.shape == (len(lengths), count, length, 4)
    assert torch.equal(padded.mask, ~padded.data[..., :1].isnan())
    assert padded.lengths.tolist() == [len(document) for document in lengths]
    assert padded.inner_mask.sum(1).tolist() == padded.lengths.tolist()
    for row, document in zip(padded.data, docs, strict=True):
        for sentence, s in zip(row, document, strict=False):
            assert torch.equal(sentence[: len(s)], s)
    same(padded.to_packed(), docs)
    same(tdc.nested_like(padded.data, x), docs)


def test_images():
    x = images()
    padded = x.to_padded(NAN)
    assert padded.data.shape == (3, 2, 3, 4)
    assert padded.inner_lengths.tolist() == [[[2, 3], [1, 4]], [[3, 3], [0, 0]], [[0, 0], [0, 0]]]
    assert torch.equal(padded.mask, ~padded.data.isnan())
    tdc.testing.assert_close(padded.to_packed(), x)
    tdc.testing.assert_close(tdc.nested_like(padded.data, x), x)


def test_what_is_longer_is_cut():
    docs = documents()
    with pytest.warns(UserWarning, match="so that it is cut"):
        cut = batch(docs).to_padded(length=(2, 3))
    assert cut.data.shape == (4, 2, 3, 4)
    same(cut.to_packed(), [[s[:3] for s in document[:2]] for document in docs])
    wide = batch(docs).to_padded(1.0, length=(4, 6))
    assert wide.data.shape == (4, 4, 6, 4)
    assert (wide.data.masked_fill(wide.mask, 1) == 1).all()
    same(wide.to_packed(), docs)


def test_lengths_of_others_may_count_padding():
    """What a program says of sentences that are not there makes no difference."""
    padded = TwoLevelPadded(torch.rand(2, 2, 3), torch.tensor([1, 2]), torch.tensor([[2, 3], [1, 3]]))
    assert padded.to_packed().inner_lengths.tolist() == [[2], [1, 3]]
    assert padded.mask.sum((1, 2)).tolist() == [2, 4]


@pytest.mark.slow
def test_one_graph_with_gradients():
    def run(x: Any) -> Any:
        padded = x.to_padded(NAN)
        return tdc.nested_like(torch.where(padded.mask, padded.data * 2, 0), x), padded.to_packed(), padded

    counter = Counter("aot_eager")
    graph = torch.compile(run, fullgraph=True, backend=counter)
    for lengths in (LENGTHS, *OTHERS):
        x = batch(documents(lengths)).requires_grad_()
        doubled, back, padded = graph(x)
        for got, want in zip(padded, x.to_padded(), strict=True):
            assert torch.equal(got.nan_to_num() if got.is_floating_point() else got, want)
        assert torch.equal(doubled.values.values, 2 * x.values.values)
        assert torch.equal(back.values.values, x.values.values)
        (doubled.sum() + 3 * back.sum()).backward()
        assert x.grad is not None
        assert (x.grad.values.values == 5).all()
    assert counter.graphs == 1


def test_what_is_refused():
    data, lengths, sizes = batch(documents()).to_padded()
    for parts, error, text in (
        ((data, lengths, sizes.float()), tdc.DtypeError, "int64 lengths"),
        ((data, lengths[:2], sizes), tdc.ShapeError, "inner_lengths"),
        ((data, lengths, sizes[:, :1]), tdc.ShapeError, "inner_lengths"),
        ((data[:, :, 0, 0], lengths, sizes), tdc.ShapeError, "inner_lengths"),
        ((data, lengths, [[1]]), tdc.DtypeError, "inner_lengths"),
    ):
        with pytest.raises(error, match=text):
            TwoLevelPadded(*parts).to_packed()  # type: ignore[arg-type]  # wrong kinds on purpose
    x: Any = batch(documents())
    for rectangle in (data[:3], data[:, :1], data[:, :, :2]):
        with pytest.raises(tdc.TdcError):
            tdc.nested_like(rectangle, x)
    with pytest.raises(tdc.ShapeError, match="length with 2 sizes"):
        x.to_padded(length=3)
