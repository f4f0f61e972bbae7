"""Windows of documents: every token once, in its order, and never beside another document's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tdc
from tdc.data import TokenBudgetSampler, loader, windows

WORD: Any = "yes"


def documents(*lengths: int) -> tdc.TensorDict:
    tokens = tdc.pack([torch.arange(n) + 100 * i for i, n in enumerate(lengths)])
    return tdc.TensorDict(
        {"text": {"tokens": tokens, "labels": -tokens}, "id": torch.arange(len(lengths))}, [len(lengths)]
    )


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 23, 100])
def test_every_batch_has_as_many_tokens(tokens: int) -> None:
    td = documents(7, 0, 3, 12, 1)
    rows = windows(td, tokens, ("text", "tokens"))
    assert list(rows.keys(True, True)) == list(td.keys(True, True))
    for x in (rows["text", "tokens"], rows["text", "labels"]):
        tdc.validate(x)
    assert rows["text", "tokens"].values.data_ptr() == td["text", "tokens"].values.data_ptr()
    assert rows["text", "tokens"].structure is not td["text", "tokens"].structure
    assert torch.equal(rows["text", "labels"].values, -rows["text", "tokens"].values)
    for row, document in zip(rows["text", "tokens"].tolist(), rows["id"].tolist(), strict=True):
        assert row == list(range(row[0], row[0] + len(row)))
        assert row[0] // 100 == document
    batches = list(loader(rows, max_tokens=tokens, key=("text", "tokens"), shuffle=True, consecutive=True))
    assert {len(b["text", "tokens"].values) for b in batches[:-1]} <= {tokens}
    found = torch.cat([b["text", "tokens"].values for b in batches]).sort().values
    assert torch.equal(found, td["text", "tokens"].values.sort().values)


def test_windows_are_shuffled_whole() -> None:
    sampler = TokenBudgetSampler([2] * 40, 8, consecutive=True, seed=3)
    batches = [b for b in sampler]
    assert sorted(batches) == [[i, i + 1, i + 2, i + 3] for i in range(0, 40, 4)] != batches
    again = TokenBudgetSampler([2] * 40, 8, consecutive=True, seed=3)
    again.load_state_dict({**again.state_dict(), "batch": 4})
    assert list(again) == batches[4:]
    with pytest.raises(tdc.StructureError, match="consecutive"):
        TokenBudgetSampler([2] * 40, 8, seed=3).load_state_dict(sampler.state_dict())


def test_ranks_share_out_windows() -> None:
    rows = windows(documents(30, 11, 23), 8, ("text", "tokens"))
    given = {"max_tokens": 8, "key": ("text", "tokens"), "shuffle": True, "consecutive": True, "world_size": 2}
    seen = [b["text", "tokens"].values for r in (0, 1) for b in loader(rows, **given, rank=r)]
    assert {len(v) for v in seen} == {8}
    assert torch.equal(torch.cat(seen).sort().values, rows["text", "tokens"].values.sort().values)


def test_other_leaves_and_no_documents() -> None:
    td = documents(3, 4).set("notes", tdc.pack([torch.ones(2), torch.ones(1)]))
    rows = windows(td, 2, ("text", "tokens"))
    assert rows["notes"].tolist() == [[1.0, 1.0]] * 2 + [[1.0]] * 3
    assert windows(td[:0], 2, ("text", "tokens")).batch_size == (0,)
    assert windows(documents(0, 0), 2, ("text", "tokens")).batch_size == (0,)


def test_a_model_sees_no_other_document() -> None:
    td = documents(9, 5, 6)
    rows = windows(td, 8, ("text", "tokens"))
    assert tdc.positions(rows["text", "tokens"]).tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7], [0], [0, 1, 2, 3, 4], [0, 1], [0, 1, 2, 3],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda td: windows(td, 0, "x"), tdc.ShapeError, "tokens"),
        (lambda td: windows(td, 4, "id"), tdc.DtypeError, "a NestedTensor at 'id'"),
        (lambda td: windows(td, 4, "y"), tdc.KeyPathError, "'y'"),
        (lambda td: windows(td.set("x", td["x"].to_padded()), 4, "x"), tdc.DtypeError, "to_packed"),
        (lambda td: windows(td.set("z", td["x"].to_padded()), 4, "x"), tdc.StructureError, "a padded one at 'z'"),
        (lambda td: windows(td.unsqueeze(0), 4, "x"), tdc.ShapeError, "one batch dim"),
        (lambda td: windows(td.set("x", td["x"].unsqueeze(1)), 4, "x"), tdc.ShapeError, "documents"),
        (lambda td: loader(td, 2, consecutive=True), tdc.DtypeError, "consecutive"),
        (lambda td: loader(td, max_tokens=4, key="x", consecutive=WORD), tdc.DtypeError, "consecutive"),
    ],
)  # fmt: skip
def test_wrong_arguments(call: Any, error: Any, text: str) -> None:
    td = tdc.TensorDict({"x": tdc.pack([torch.arange(3), torch.arange(2)]), "id": torch.arange(2)}, [2])
    with pytest.raises(error, match=text):
        call(td)
