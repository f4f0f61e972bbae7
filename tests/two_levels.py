"""What the tests of batches of two levels share: documents as lists of sentences, and the same as a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close

import tdc
from tdc.ragged import TwoLevelTensor

Documents = list[list[Tensor]]
LENGTHS = [[3, 1], [], [2, 0, 4], [5]]  # tokens of each sentence of each document
OTHERS = [[[1], [2, 2], []], [[4, 1, 2, 3], [0, 2], [], [], [6]], [[2], [1, 3]]]


def documents(lengths: list[list[int]] = LENGTHS, width: int = 4, dtype: Any = torch.float64) -> Documents:
    return [[torch.randn(n, width, dtype=dtype) for n in document] for document in lengths]


def nested(sentences: list[Tensor], width: int = 4, dtype: Any = torch.float64) -> tdc.NestedTensor:
    """One document, which may have no sentence."""
    if sentences:
        return tdc.pack(sentences)
    return tdc.NestedTensor(torch.zeros(0, width, dtype=dtype), torch.zeros(1, dtype=torch.int64))


def batch(docs: Documents) -> TwoLevelTensor:
    dtypes = [sentence.dtype for document in docs for sentence in document]
    return tdc.pack([nested(document, dtype=[*dtypes, torch.float64][0]) for document in docs])


def same(x: Any, docs: Documents) -> None:
    """Two levels, document for document and sentence for sentence."""
    assert isinstance(x, TwoLevelTensor)
    tdc.validate(x)
    assert x.lengths.tolist() == [len(document) for document in docs]
    for part, document in zip(x.unbind(), docs, strict=True):
        for row, sentence in zip(part.unbind(), document, strict=True):
            assert_close(row, sentence)


def same_rows(x: Any, rows: list[Any]) -> None:
    """One level: what each document has, a list of an entry for each sentence or one tensor."""
    assert isinstance(x, tdc.NestedTensor)
    tdc.validate(x)
    for part, row in zip(x.unbind(), rows, strict=True):
        assert_close(part, row if isinstance(row, Tensor) else torch.stack(row) if row else part[:0], equal_nan=True)
