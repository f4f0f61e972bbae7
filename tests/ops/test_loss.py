"""Losses of ragged batches through stock modules: packed and padded agree, padding counts for nothing, wrong calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from texts import T, Texts
from torch import nn

import tdc

LENGTHS = (3, 1, 4)
MODULES = [
    nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss(), nn.SoftMarginLoss(),
    nn.PoissonNLLLoss(), nn.MSELoss(reduction="sum"), nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, 6)),
]  # fmt: skip


def rows() -> list[torch.Tensor]:
    return [torch.randn(n, 5) for n in LENGTHS]


@pytest.mark.parametrize("module", MODULES, ids=repr)
def test_packed_and_padded_modules(module: Any):
    x, y = rows(), [row.sigmoid() for row in rows()]
    want = module(torch.cat(x), torch.cat(y))
    packed = tdc.pack(x), tdc.pack(y)
    torch.testing.assert_close(module(*packed), want)
    torch.testing.assert_close(module(*[b.to_padded(fill=float("nan")) for b in packed]), want)


def test_dense_target_broadcasts():
    x: Any = tdc.pack(rows())
    y = torch.randn(3, 1, 5)
    want = torch.cat([(row - t).square() for row, t in zip(x.unbind(), y, strict=True)]).mean()
    torch.testing.assert_close(F.mse_loss(x, y), want)


def test_targets_of_the_same_structure_compile_once():
    step = tdc.compile.counted(lambda x, y: F.smooth_l1_loss(x, y), backend="aot_eager")
    for lengths in ((2, 3), (4, 2, 5), (3, 3)):
        x = tdc.pack([torch.randn(n, 5) for n in lengths])
        step(x, x.with_values(torch.randn_like(x.values)))
    assert (step.counts.graphs, step.counts.compiles) == (1, 1)


class TestTexts(Texts):
    def test_reduction(self):
        x: Any = tdc.pack(rows())
        self.says(
            lambda: F.mse_loss(x, x, reduction="max"),
            """\
ShapeError
tdc.mse_loss: expected reduction 'mean', 'sum' or 'none', got 'max'
hint: torch has no others""",
        )

    def test_lengths_of_ctc(self):
        frames, labels = tdc.pack([torch.randn(5, 4).log_softmax(-1)]), tdc.pack([T([1, 2])])
        ctc_loss: Any = F.ctc_loss
        self.says(
            lambda: ctc_loss(frames, labels, T([5]), T([2])),
            """\
StructureError
tdc.ctc_loss: expected None for both lengths, got lengths
hint: F.ctc_loss(log_probs, targets, None, None): ragged batches know them""",
        )

    def test_ctc_of_tensors(self):
        labels: Any = tdc.pack([T([1, 2])])
        ctc_loss: Any = F.ctc_loss
        self.says(
            lambda: ctc_loss(torch.randn(5, 1, 4), labels, None, None),
            """\
StructureError
tdc.ctc_loss: expected log_probs and targets that are both NestedTensor, got Tensor float32[5, 1, 4] and NestedTensor \
int64[1, -1]
hint: tdc.pack both""",
        )

    def test_bags_with_offsets(self):
        bags: Any = tdc.pack([T([1, 2])])
        self.says(
            lambda: F.embedding_bag(bags, torch.zeros(4, 2), T([0])),
            """\
ShapeError
tdc.embedding_bag: expected a NestedTensor of indices and no offsets, got NestedTensor int64[1, -1] and offsets
hint: F.embedding_bag(rows, weight): rows are bags""",
        )

    def test_weights_of_a_mean(self):
        bags: Any = tdc.pack([T([1, 2])])
        weights: Any = bags.with_values(torch.ones(2))
        self.says(
            lambda: F.embedding_bag(bags, torch.zeros(4, 2), per_sample_weights=weights, mode="mean"),
            """\
UnsupportedError
tdc.embedding_bag: expected weights with mode='sum', got per_sample_weights with mode='mean'
hint: mode='sum'""",
        )
