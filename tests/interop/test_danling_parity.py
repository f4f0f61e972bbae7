"""What NestedTensor of DanLing does, in our names: `docs/danling.md` is the table, its lines run here with numbers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import tdc

T = torch.tensor
ROWS = [[1, 2, 3], [4, 5]]


def batch() -> Any:
    return tdc.pack([T(row) for row in ROWS])


SPELLINGS: dict[str, tuple[Any, Any]] = {
    "NestedTensor([1, 2, 3], [4, 5]).tolist()": (lambda: tdc.from_list(ROWS).tolist(), ROWS),
    "x.tensor": (lambda: batch().to_padded().filled(0), T([[1, 2, 3], [4, 5, 0]])),
    "x.mask": (lambda: batch().to_padded().mask, T([[True, True, True], [True, True, False]])),
    "x.concat": (lambda: batch().values, T([1, 2, 3, 4, 5])),
    "x.occupancy": (lambda: batch().occupancy, 5 / 6),
    "x[0]": (lambda: batch()[0], T([1, 2, 3])),
    "x[:, 1:]": (lambda: batch()[:, 1:].tolist(), [[2, 3], [5]]),
    "x + 10": (lambda: (batch() + 10).tolist(), [[11, 12, 13], [14, 15]]),
    "x * 2": (lambda: (batch() * 2).tolist(), [[2, 4, 6], [8, 10]]),
    "x.float()": (lambda: batch().float().dtype, torch.float32),
    "x.half()": (lambda: batch().half().dtype, torch.float16),
    "x.cpu()": (lambda: batch().cpu().tolist(), ROWS),
    "x.size(0)": (lambda: batch().size(0), 2),
    "x.shape": (lambda: tuple(batch().shape), (2, -1)),
    "x.to_torch_nested()": (lambda: [t.tolist() for t in batch().to_torch().unbind()], ROWS),
    "NestedTensor.from_tensor_mask(tensor, mask)": (
        lambda: tdc.from_padded(T([[1, 2, 3], [4, 5, 0]]), mask=T([[1, 1, 1], [1, 1, 0]]).bool()).to_packed().tolist(),
        ROWS,
    ),
    "x.nested_like(tensor)": (
        lambda: tdc.nested_like(T([[6, 7, 8], [9, 10, 0]]), batch()).tolist(),
        [[6, 7, 8], [9, 10]],
    ),
    "x.packed_like(values)": (lambda: batch().with_values(T([6, 7, 8, 9, 10])).tolist(), [[6, 7, 8], [9, 10]]),
    "NestedTensor.from_packed(values, offsets, ...)": (
        lambda: tdc.NestedTensor(T([1, 2, 3, 4, 5]), T([0, 3, 5])).tolist(),
        ROWS,
    ),
    "x.packed_offsets()": (lambda: batch().cu_seqlens, T([0, 3, 5], dtype=torch.int32)),
    "x.element_sizes()": (lambda: batch().sizes, T([[3], [2]])),
    "x.packed_local_indices": (lambda: tdc.positions(batch()).tolist(), [[0, 1, 2], [0, 1]]),
    "x.unbind()": (lambda: [row.tolist() for row in batch().unbind()], ROWS),
    "x.sum(1)": (lambda: batch().sum(1), T([6, 9])),
    "x.sum(0)": (lambda: batch().sum(1), T([6, 9])),
    "torch.cat([x, x])": (lambda: torch.cat([batch(), batch()]).tolist(), ROWS + ROWS),
    "pickle.loads(pickle.dumps(x))": (lambda: pickle.loads(pickle.dumps(batch())).tolist(), ROWS),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spelling(spelling: str):
    ours, want = SPELLINGS[spelling]
    got = ours()
    assert torch.equal(got, want) if isinstance(want, Tensor) else got == want


def test_every_spelling_is_on_the_page(request: pytest.FixtureRequest):
    page = (request.config.rootpath / "docs" / "danling.md").read_text(encoding="utf-8")
    assert not [spelling for spelling in SPELLINGS if f"`{spelling}`" not in page]
