"""Stock modules on ragged batches: results and gradients of a loop over examples, one graph for all lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_nn import SIZE, plain, rows
from torch import Tensor, nn

import tdc
from tdc import StructureError
from tdc.testing.batches import build


@pytest.mark.parametrize("run", [plain, pytest.param(None, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_training_step(run: Callable[..., Any] | None):
    """Embedding, recurrence, attention and a head in one Sequential: the loss of all real positions falls."""

    class First(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: Any) -> Any:
            return self.module(x)[0]

    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    module = nn.Sequential(nn.Embedding(5, SIZE), First(nn.GRU(SIZE, 8, batch_first=True)), encoder, nn.Linear(8, 5))
    optimizer, losses = torch.optim.Adam(module.parameters(), 0.05), []
    x = build([rows(size=None)], "nested", Tensor.detach)[0]
    with torch._dynamo.config.patch(allow_rnn=True):
        call = run or torch.compile(plain, fullgraph=True, backend="aot_eager")
        for _ in range(6):
            loss = nn.CrossEntropyLoss()(call(module, x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_attention_asks_a_batch_where_its_rows_are(padded: bool, first: bool):
    packed = tdc.pack([torch.randn(n, 8) for n in (2, 1, 4)])
    x: Any = packed.to_padded() if padded else packed
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=first)
    want = [layer.eval()(row.unsqueeze(int(not first))).squeeze(int(not first)) for row in packed.unbind()]
    for got in (layer(x), layer(x.transpose(0, 1)).transpose(0, 1)):
        torch.testing.assert_close(got.unbind(), want)


def test_recurrent_modules_find_the_rows_themselves():
    x = tdc.pack([torch.randn(n, 8) for n in (2, 1, 4)])
    second = nn.GRU(8, 3)
    for got, row in zip(second(x.transpose(0, 1))[0].transpose(0, 1).unbind(), x.unbind(), strict=True):
        torch.testing.assert_close(got, second(row)[0])
    with pytest.raises(tdc.ShapeError, match=r"hint: .* recurrent layers are built with batch_first=True"):
        second(x)
    with pytest.raises(RuntimeError, match=r"Expected hidden size \(1, -1, 3\)"):  # torch's, and in the docs
        second(x, torch.zeros(1, 3, 3))
    with pytest.raises(StructureError, match="build the module with batch_first=True"):
        second(x.to_padded())
