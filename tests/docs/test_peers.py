"""Every name that DanLing or torch.nested handles is a row, a method or a refusal with a reason."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

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
