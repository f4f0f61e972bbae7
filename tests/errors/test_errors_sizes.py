"""A feature size that does not fit is named, with what to write: eagerly after torch has refused the call, in a graph
before torch sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from texts import Says, says
from torch import nn

import tdc
from tdc.compile import counted

FEATURES = tdc.pack([torch.ones(n, 4) for n in (3, 0, 5)])
CHANNELS = tdc.pack([torch.ones(4, n) for n in (3, 4, 5)], ragged_dim=2)
IMAGES = tdc.pack([torch.ones(4, n, 5) for n in (3, 4, 5)], ragged_dim=2)
IDS = tdc.pack([torch.tensor([1, 2]), torch.tensor([3, 4, 12])])
ZEROS = FEATURES.sum(-1).long() * 0
WIDE = nn.MultiheadAttention(8, 2, batch_first=True)
WIDE_KEYS = nn.MultiheadAttention(4, 2, kdim=8, vdim=8, batch_first=True)
CALLS: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "linear": (nn.Linear(5, 2), FEATURES, "linear: expected 5 features, got 4 in"),
    "bilinear": (lambda x: F.bilinear(x, x, torch.ones(2, 4, 5)), FEATURES, "bilinear: expected 5 features, got 4 in"),
    "layer_norm": (nn.LayerNorm(5), FEATURES, r"layer_norm: expected \[5\] at the end, got \[4\] in"),
    "layer_norm, weight": (lambda x: F.layer_norm(x, (4,), torch.ones(5)), FEATURES, r"expected a weight of \[4\]"),
    "rms_norm": (nn.RMSNorm(5), FEATURES, r"rms_norm: expected \[5\] at the end, got \[4\] in"),
    "conv1d": (nn.Conv1d(5, 2, 3), CHANNELS, "conv1d: expected 5 channels, got 4 in"),
    "conv1d of one position": (nn.Conv1d(5, 2, 1), CHANNELS, "conv1d: expected 5 channels, got 4 in"),
    "conv1d in groups": (nn.Conv1d(6, 2, 3, groups=2), CHANNELS, "conv1d: expected 6 channels, got 4 in"),
    "conv2d": (nn.Conv2d(3, 2, 3), IMAGES, "conv2d: expected 3 channels, got 4 in"),
    "conv_transpose1d": (nn.ConvTranspose1d(5, 2, 3), CHANNELS, "conv_transpose1d: expected 5 channels, got 4 in"),
    "batch_norm": (nn.BatchNorm1d(5), CHANNELS, "batch_norm: expected one number for each of 4 channels"),
    "group_norm": (nn.GroupNorm(5, 5), CHANNELS, "group_norm: expected one number for each of 4 channels"),
    "prelu": (nn.PReLU(5), CHANNELS, "prelu: expected a slope for each of 4 channels"),
    "attention": (
        lambda x: WIDE(x, x, x), FEATURES,
        "multi_head_attention_forward: expected 8 features, got 4 in",
    ),
    "attention, keys": (
        lambda x: WIDE_KEYS(x, x, x), FEATURES,
        "multi_head_attention_forward: expected 8 features, got 4 in",
    ),
    "encoder": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), FEATURES, "expected 8 features, got 4 in"),
    "dot products": (
        lambda x: F.scaled_dot_product_attention(x.unsqueeze(1), x[..., :3].unsqueeze(1), x.unsqueeze(1)), FEATURES,
        "scaled_dot_product_attention: expected 4 features, got 3 in",
    ),
    "class weights": (
        lambda x: F.cross_entropy(x, ZEROS if isinstance(x, tdc.NestedTensor) else x.with_data(x.data[..., 0].long()),
        weight=torch.ones(5)), FEATURES, "cross_entropy: expected 4 weights, got",
    ),
    "float indices": (nn.Embedding(9, 2), FEATURES, "embedding: expected int64 or int32 indices, got"),
    "target of another size": (lambda x: F.mse_loss(x, x[..., :3]), FEATURES, "mse_loss: expected operands that broad"),
}  # fmt: skip
DATA: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "index": (nn.Embedding(10, 2), IDS, r"embedding: expected indices in \[0, 9\], got 1 outside in"),
    "bag": (nn.EmbeddingBag(10, 2), IDS, r"embedding_bag: expected indices in \[0, 9\], got 1 outside in"),
    "one_hot": (lambda x: F.one_hot(x, 9), IDS, r"one_hot: expected classes in \[0, 8\], got 1 outside in"),
    "target": (
        lambda x: F.cross_entropy(torch.zeros_like(x).unsqueeze(-1) + torch.ones(4), x), IDS,
        r"cross_entropy: expected targets in \[0, 3\], got 2 outside in",
    ),
}  # fmt: skip
CALLS["angles"] = (
    lambda x: F.cosine_similarity(x, x[..., :3], -1),
    FEATURES,
    "cosine_similarity: expected 3 features, got 4",
)


@pytest.mark.parametrize("kind", ["nested", "masked"])
@pytest.mark.parametrize("name", [*CALLS, *DATA])
def test_sizes_are_named(name: str, kind: str):
    call, x, text = (CALLS | DATA)[name]
    with pytest.raises(tdc.TdcError, match=r"^tdc\.[\w.]+: expected .*, got .*(\nat .*)*\nhint: .+$") as error:
        call(x if kind == "nested" else x.to_padded())
    assert error.match(text)


@pytest.mark.cases(6, 4)
@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("class weights",)])
def test_a_graph_names_them(name: str):
    call, x, text = CALLS[name]
    with pytest.raises(tdc.TdcError, match=text):
        counted(call, backend="eager")(x)


def test_a_call_that_works_asks_nothing(monkeypatch: pytest.MonkeyPatch):
    layer: Any = nn.Linear(4, 2)
    with monkeypatch.context() as patch:
        patch.setattr("tdc.core.container.refuse_call", None)
        assert layer(FEATURES).shape == (3, -1, 2)
    f = counted(layer, backend="eager")
    for n in (2, 3):
        f(tdc.pack([torch.ones(n, 4), torch.ones(5, 4)]))
    assert f.counts.compiles == 1


def test_other_errors_stay():
    with pytest.raises(RuntimeError, match="dtype"):
        nn.Linear(4, 2)(FEATURES.double())


SAYS: dict[str, Says] = {
    "linear": (lambda: nn.Linear(5, 2)(FEATURES), """\
ShapeError
tdc.linear: expected 5 features, got 4 in NestedTensor float32[3, -1, 4]
hint: nn.Linear(4, 2), or features of size 5"""),
    "channels": (lambda: nn.Conv1d(5, 2, 3)(CHANNELS), """\
ShapeError
tdc.conv1d: expected 5 channels, got 4 in NestedTensor float32[3, 4, -1]
hint: in_channels=4 of the layer; channels are dim 1"""),
    "an index": (lambda: nn.Embedding(10, 2)(IDS.to_padded()), """\
IndexingError
tdc.embedding: expected indices in [0, 9], got 1 outside in MaskedBatch int64[2, 3]
hint: num_embeddings of the layer is one more than the largest index"""),
}  # fmt: skip
test_says = says(SAYS)
