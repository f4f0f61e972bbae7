"""Padded batches of the same lengths in rectangles of different sizes: what padding holds, and how much, never matters.

The reference is the same operation on packed batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tdc
from tdc.compile import counted

ROWS = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 6)]
NAN = float("nan")
OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "addcmul": lambda a, b: torch.addcmul(a, b, b),
    "bilinear": lambda a, b: F.bilinear(a, b, torch.ones(2, 3, 3)),
    "binary_cross_entropy": lambda a, b: F.binary_cross_entropy_with_logits(a, (b > 0).float()),
    "cat": lambda a, b: torch.cat([a, b], 2),
    "cdist": lambda a, b: torch.cdist(a, b).sum((1, 2)),
    "clamp": lambda a, b: a.clamp(min=b),
    "cosine_similarity": lambda a, b: F.cosine_similarity(a, b, dim=2),
    "cross_entropy": lambda a, b: F.cross_entropy(a, b.argmax(2), reduction="none"),
    "einsum": lambda a, b: torch.einsum("bld,ble->bde", a, b),
    "einsum of pairs": lambda a, b: torch.einsum("bld,bmd->blm", a, b).sum((1, 2)),
    "fewer dims": lambda a, b: a * b[:, :, 0].unsqueeze(2),
    "gather": lambda a, b: a.gather(2, b.argsort(2)),
    "gather along the ragged dim": lambda a, b: a.gather(1, torch.zeros_like(b, dtype=torch.int64)),
    "greater": lambda a, b: (a > b).sum(1),
    "index": lambda a, b: a[b > 0],
    "index_put": lambda a, b: torch.index_put(a, (b > 0,), torch.tensor(0.0)),
    "kl_div": lambda a, b: F.kl_div(a, b.sigmoid(), reduction="sum"),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 0),
    "matmul": lambda a, b: a.transpose(1, 2) @ b,
    "mse_loss": lambda a, b: F.mse_loss(a, b),
    "pairs": lambda a, b: (a[:, :, None, 0] * b[:, None, :, 0]).sum((1, 2)),
    "scaled_dot_product_attention": lambda a, b: F.scaled_dot_product_attention(a, a, b),
    "scatter_add": lambda a, b: a.scatter_add(1, torch.zeros_like(b, dtype=torch.int64), b),
    "stack": lambda a, b: torch.stack([a, b], 2),
    "sub": lambda a, b: a - b,
    "triplet_margin_loss": lambda a, b: F.triplet_margin_loss(a, b, b + 1),
    "where": lambda a, b: torch.where(a > 0, a, b),
}


def packed(x: Any) -> Any:
    return x.to_packed() if isinstance(x, tdc.MaskedBatch) else x


@pytest.mark.parametrize("name", OF_TWO)
def test_rectangles_of_two_sizes(name: str):
    run, x, y = OF_TWO[name], tdc.pack(ROWS), tdc.pack([row * 2 + 1 for row in ROWS])
    for widths in ((6, 9), (9, 6)):
        a, b = [t.to_padded(NAN, length=n) for t, n in zip((x, y), widths, strict=True)]
        leaf = a.data.clone().requires_grad_()
        got, want = packed(run(a.with_data(leaf), b)), run(x, y)
        tdc.testing.assert_close({"result": got.detach()}, {"result": want})
        if got.dtype.is_floating_point and got.requires_grad:
            torch.autograd.grad(got.values.sum() if isinstance(got, tdc.NestedTensor) else got.sum(), leaf)


def test_equal_batches_of_two_sizes():
    x = tdc.pack(ROWS)
    a, b = x.to_padded(NAN), x.to_padded(1.0, length=9)
    assert torch.equal(a, b)
    assert torch.allclose(b, a)
    assert not torch.equal(a, b * 2)


def test_slices_are_no_wider_than_their_longest_row():
    x = tdc.pack(ROWS).to_padded(NAN)
    assert [x[:, at].data.shape[1] for at in (slice(None, -1), slice(1, None), slice(-2, None), slice(-9, None))] == [
        5, 5, 2, 6,
    ]  # fmt: skip
    assert x[:, :-9].data.shape[1] == 0


def test_one_graph_for_differences_and_lags():
    def run(x: Any, y: Any) -> Tensor:
        lagged = F.pad(x, (0, 0, 1, 0))[:, :-1]
        return (x[:, 1:] - x[:, :-1]).sum(1) + (x - lagged).sum(1) + (x + y).sum(1) + torch.stack([x, y]).sum((0, 2))

    graph = counted(run, backend="aot_eager")
    for lengths, width in (((5, 3, 9), 12), ((7, 2), 9), ((4, 8, 6, 3), 20)):
        x = tdc.pack([torch.randn(n, 3) for n in lengths])
        got = graph(x.to_padded(NAN), x.to_padded(NAN, length=width))
        torch.testing.assert_close(got, run(x, x))
    assert graph.counts.compiles == 1
