"""Rows of a TensorDict, and the same rows with two Shared leaves."""

from __future__ import annotations

from typing import Any

import torch

from tdc import Shared, TensorDict

EDGES = torch.tensor([[0, 1, 1], [1, 2, 0]])
WEIGHT = torch.tensor([0.5, -1.0, 2.0, 3.0])


def rows(n: int = 3) -> TensorDict:
    x = torch.arange(4.0 * n).view(n, 4) / 5
    return TensorDict({"x": x, "id": torch.arange(n), "sub": {"y": torch.ones(n, 2)}}, [n])


def with_shared(td: TensorDict, edges: Any = EDGES, weight: Any = WEIGHT) -> TensorDict:
    return td.set("edges", Shared(edges)).set(("sub", "w"), Shared(weight))


def graph(n: int = 3) -> TensorDict:
    return with_shared(rows(n))
