"""Batches of two levels in stores, and on their way through loaders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from two_levels import LENGTHS, batch, documents, nested, same, same_rows

import tdc
from tdc.ragged import TwoLevelTensor


def saved(docs: Any) -> tdc.TensorDict:
    return tdc.TensorDict({"text": batch(docs), "label": torch.arange(len(docs))}, [len(docs)])


@pytest.mark.parametrize("lengths", [LENGTHS, [[]], [[0], []]])
def test_a_store_gives_documents_back(tmp_path: Path, lengths: Any):
    docs = documents(lengths)
    tdc.io.save(saved(docs), tmp_path / "store")
    loaded = tdc.io.load(tmp_path / "store")
    same(loaded["text"], docs)
    assert loaded["text"].max_length == max(map(len, docs))
    same_rows(loaded[0]["text"], docs[0])


def test_images_of_documents_and_no_bounds(tmp_path: Path):
    inner = tdc.pack([torch.randn(3, 2, 5), torch.randn(3, 4, 1)], ragged_dim=(2, 3))
    x = TwoLevelTensor(inner, torch.tensor([0, 0, 2]))
    tdc.io.save(tdc.TensorDict({"x": x}, [2]), tmp_path / "store")
    tdc.testing.assert_close(tdc.io.load(tmp_path / "store")["x"], x)


def test_safetensors_and_buffers(tmp_path: Path):
    docs = documents()
    tdc.io.to_safetensors(saved(docs), tmp_path / "x.safetensors")
    same(tdc.io.from_safetensors(tmp_path / "x.safetensors")["text"], docs)
    same(tdc.io.from_buffer(*tdc.io.to_buffer(saved(docs)))["text"], docs)


def test_a_store_with_wrong_offsets_is_refused(tmp_path: Path):
    tdc.io.save(saved(documents()), tmp_path / "store")
    file = tmp_path / "store" / "text.outer.memmap"
    torch.from_file(str(file), shared=True, size=5, dtype=torch.int64)[1] = 9
    with pytest.raises(tdc.FormatError, match="text: two_level with offsets that do not begin with 0"):
        tdc.io.load(tmp_path / "store")


def test_collate_and_loaders():
    torch.manual_seed(0)
    docs = documents()
    samples = [{"text": nested(document), "label": i} for i, document in enumerate(docs)]
    same(tdc.data.collate(samples, ragged_keys=["text"])["text"], docs)
    with pytest.raises(tdc.UnsupportedError, match="tensors in keys to be padded"):
        tdc.data.collate(samples, pad_keys=["text"])
    with pytest.raises(tdc.ShapeError, match="name keys of different sizes in ragged_keys="):
        tdc.data.collate(samples)
    loader: Any = DataLoader([nested(d) for d in docs], batch_size=2, collate_fn=tdc.pack, num_workers=1)  # type: ignore[arg-type]  # a list is a data set
    for x, part in zip(loader, (docs[:2], docs[2:]), strict=True):
        same(x, part)


def test_batches_by_tokens():
    docs = documents([[3, 1], [2, 2], [5], [1, 1, 1], []])
    found = list(tdc.data.loader(saved(docs), max_tokens=8, key="text"))
    assert sum(len(td) for td in found) == 5
    assert all(td["text"].flatten(1, 2).values.shape[0] <= 8 for td in found)
    for td in found:
        same(td["text"], [docs[i] for i in td["label"].tolist()])
