"""Examples of the RFC "torch.dict.TensorDict": loading batches, and a training loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from tdc import Static, TensorDict


def test_dataloader_fetches_whole_batches():
    data = TensorDict({"x": torch.arange(10), "name": Static("train"), "y": {"z": torch.zeros(10, 2)}}, [10])
    assert data.__getitems__([3, 1])["x"].tolist() == [3, 1]
    loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=lambda batch: batch)
    batches = list(loader)
    assert [b.batch_size for b in batches] == [(4,), (4,), (2,)]
    assert sorted(torch.cat(batches)["x"].tolist()) == list(range(10))
    assert batches[0]["name"] == "train"


def test_training_loop():
    data = TensorDict({"x": torch.randn(32, 3), "y": torch.randn(32, 1)}, [32])
    model = nn.Linear(3, 1)
    optim = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(20):
        for part in data.split(8):
            part = part.to("cpu", non_blocking=True)
            loss = F.mse_loss(model(part["x"]), part["y"])
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
    assert sum(losses[-4:]) < sum(losses[:4])
