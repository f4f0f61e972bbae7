"""The table of docs/migration.md: every spelling in it runs, what is left out says why, and the page is up to date.

And every name that DanLing or torch.nested handles is a row, a method or a refusal with a reason.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = runpy.run_path(str(DOCS / "tools" / "make_migration.py"))
ROWS = [row for rows in PAGE["ROWS"].values() for row in rows]


@pytest.mark.parametrize("row", [row for row in ROWS if row.code], ids=lambda row: row.code)
def test_row_runs(row: Any):
    exec(row.code, PAGE["sample"]())


def test_what_is_left_out_says_why():
    assert [row.theirs for row in ROWS if not (row.code or row.note)] == []


def test_page_is_up_to_date():
    text = (DOCS / "migration.md").read_text(encoding="utf-8")
    assert text == PAGE["render"](), "run python docs/tools/make_migration.py"


# -- names of peers


peers = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "tools" / "peers.py"))
PEERS, find = peers["PEERS"], peers["find"]


@pytest.mark.parametrize("peer", PEERS)
def test_every_name_is_found(peer: str):
    assert len(PEERS[peer]) > 200
    assert not [name for name in PEERS[peer] if not find(name)[1]]


def test_every_refusal_gives_a_reason():
    answers = {name: find(name)[1] for names in PEERS.values() for name in names}
    assert {text for text in answers.values() if text != "yes" and len(text) < len("no: a reason")} == set()
    assert answers["torch.nn.functional.pdist"].startswith("no: ")


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("aten._softmax_backward_data.default", "torch.softmax"), ("aten.linalg_det.default", "torch.linalg.det"),
        ("torch.index_copy", "torch.index_copy"), ("aten.mul_.Tensor", "Tensor.mul_"),
        ("div.floor_rounding", "torch.div"), ("torch.Tensor.__getitem__", "Tensor.__getitem__"),
    ],
)  # fmt: skip
def test_names_are_told_apart(name: str, label: str):
    assert find(name)[0] == label


def test_a_name_that_is_not_found_is_seen():
    assert find("torch.no_such_operation") == ("no_such_operation", "")
    assert find("torch.data_ptr")[1] == ""
