"""torchmetrics 1.9: metrics of packed values, and what containers themselves raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

import tdc

metrics: Any = pytest.importorskip("torchmetrics")
classification: Any = pytest.importorskip("torchmetrics.classification")
regression: Any = pytest.importorskip("torchmetrics.regression")
text: Any = pytest.importorskip("torchmetrics.text")

pytestmark = pytest.mark.clients
LENGTHS = (3, 2, 4)
G = torch.Generator().manual_seed(0)
SCORES = tdc.pack([torch.rand(n, 5, generator=G) for n in LENGTHS])
LABELS = tdc.pack([torch.randint(5, (n,), generator=G) for n in LENGTHS])
REAL = tdc.pack([torch.rand(n, generator=G) for n in LENGTHS])
BINARY = (REAL > 0.5).long()
METRICS: dict[str, tuple[Any, tuple[tdc.NestedTensor, ...]]] = {
    "accuracy": (lambda: classification.MulticlassAccuracy(5, average="micro"), (SCORES, LABELS)),
    "F1": (lambda: classification.MulticlassF1Score(5), (SCORES, LABELS)),
    "confusion": (lambda: classification.MulticlassConfusionMatrix(5), (SCORES, LABELS)),
    "AUROC": (lambda: classification.BinaryAUROC(), (REAL, BINARY)),
    "MSE": (regression.MeanSquaredError, (REAL, REAL.square())),
    "Pearson": (regression.PearsonCorrCoef, (REAL, REAL.square())),
    "R2": (regression.R2Score, (REAL, REAL.square())),
    "mean": (metrics.MeanMetric, (REAL,)),
    "maximum": (metrics.MaxMetric, (REAL,)),
}


@pytest.mark.parametrize("name", METRICS)
def test_packed_values(name: str):
    """One update with the values of a batch counts the positions that updates with each example count."""
    make, batches = METRICS[name]
    whole, alone = make(), make()
    whole.update(*[x.values for x in batches])
    for row in zip(*batches, strict=True):
        alone.update(*row)
    assert_close(whole.compute(), alone.compute(), rtol=1e-5, atol=1e-6)


def test_perplexity():
    """It takes a batch of sequences of one length: packed values are one sequence."""
    whole, alone = text.Perplexity(), text.Perplexity()
    whole.update(SCORES.values[None], LABELS.values[None])
    for scores, labels in zip(SCORES, LABELS, strict=True):
        alone.update(scores[None], labels[None])
    assert_close(whole.compute(), alone.compute())


@pytest.mark.parametrize("name", METRICS)
def test_a_container_is_an_error(name: str):
    """Metrics regroup dims, count by shape or go to numpy: none of it is ragged, and no number comes out."""
    make, batches = METRICS[name]
    with pytest.raises((tdc.TdcError, ValueError)):
        make().update(*batches)


def test_a_padded_batch_counts_by_shape():
    """R2 divides by size(0) of what it sums over dim 0: positions across examples, not what anybody means."""
    padded, packed = regression.R2Score(), regression.R2Score()
    padded.update(REAL.to_padded(), REAL.square().to_padded())
    packed.update(REAL.values, REAL.square().values)
    assert not torch.isclose(padded.compute(), packed.compute())
