"""The demo's last part: the trained model as an AOTInductor package, loaded back and compared with eager.

The package takes the same TensorDict as the model does, with any number of texts of any lengths.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor

from examples.demo.data import Corpus
from examples.demo.model import Classifier, ragged_batch
from examples.demo.records import ExportRecord
from examples.demo.train import loader, predict
from tdc.compile.export import Exported, load
from tdc.compile.export import export as export_model

TOLERANCE = 1e-4


def export(model: Classifier, corpus: Corpus, indices: tuple[int, ...], path: Path) -> Exported:
    """Write the model as a `.pt2` package with dynamic batch and lengths, and load it back: a function of a batch."""
    (example,) = loader(corpus, [indices], ragged_batch, "cpu")
    return load(export_model(model, (example,)).save(path, format="aoti"))


def compare(model: Classifier, corpus: Corpus, test: tuple[int, ...], path: Path) -> tuple[ExportRecord, Tensor]:
    """Predict the test set with the package and with eager: how far they are apart, and the package's logits."""
    begin = time.perf_counter()
    package = export(model, corpus, test[:8], path)
    seconds = time.perf_counter() - begin
    logits, expected = predict(package, corpus, test, ragged_batch), predict(model, corpus, test, ragged_batch)
    same = int((logits.argmax(1) == expected.argmax(1)).sum())
    apart = float((logits - expected).abs().max())
    torch.testing.assert_close(logits, expected, rtol=TOLERANCE, atol=TOLERANCE)
    return ExportRecord(path.name, path.stat().st_size, apart, same, len(test), seconds), logits
