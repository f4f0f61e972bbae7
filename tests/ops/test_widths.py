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
NAN, WEIGHT = float("nan"), torch.ones(2, 3, 3, dtype=torch.float64)
OF_TWO: dict[str, Callable[[Any, Any], Any]] = {
    "addcmul": lambda a, b: torch.addcmul(a, b, b), "bilinear": lambda a, b: F.bilinear(a, b, WEIGHT),
    "binary_cross_entropy": lambda a, b: F.binary_cross_entropy_with_logits(a, (b > 0).float()),
    "cat": lambda a, b: torch.cat([a, b], 2), "cdist": lambda a, b: torch.cdist(a, b).sum((1, 2)),
    "clamp": lambda a, b: a.clamp(min=b), "cosine_similarity": lambda a, b: F.cosine_similarity(a, b, dim=2),
    "cross_entropy": lambda a, b: F.cross_entropy(a, b.argmax(2), reduction="none"),
    "einsum": lambda a, b: torch.einsum("bld,ble->bde", a, b),
    "einsum of pairs": lambda a, b: torch.einsum("bld,bmd->blm", a, b).sum((1, 2)),
    "fewer dims": lambda a, b: a * b[:, :, 0].unsqueeze(2), "gather": lambda a, b: a.gather(2, b.argsort(2)),
    "gather along the ragged dim": lambda a, b: a.gather(1, torch.zeros_like(b, dtype=torch.int64)),
    "greater": lambda a, b: (a > b).sum(1), "index": lambda a, b: a[b > 0],
    "index_put": lambda a, b: torch.index_put(a, (b > 0,), WEIGHT[0, 0, 0]),
    "kl_div": lambda a, b: F.kl_div(a, b.sigmoid(), reduction="sum"),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 0), "matmul": lambda a, b: a.transpose(1, 2) @ b,
    "mse_loss": lambda a, b: F.mse_loss(a, b), "pairs": lambda a, b: (a[:, :, None, 0] * b[:, None, :, 0]).sum((1, 2)),
    "scaled_dot_product_attention": lambda a, b: F.scaled_dot_product_attention(a, a, b),
    "scatter_add": lambda a, b: a.scatter_add(1, torch.zeros_like(b, dtype=torch.int64), b),
    "stack": lambda a, b: torch.stack([a, b], 2), "sub": lambda a, b: a - b,
    "triplet_margin_loss": lambda a, b: F.triplet_margin_loss(a, b, b + 1),
    "where": lambda a, b: torch.where(a > 0, a, b),
}  # fmt: skip


def packed(x: Any) -> Any:
    return x.to_packed() if isinstance(x, tdc.MaskedBatch) else x


def learned(run: Callable[[Any, Any], Any], x: Any, y: Any) -> tuple[Any, list[Tensor]]:
    """The result, and the gradients of the real positions of both."""
    leaves = [(t.data if isinstance(t, tdc.MaskedBatch) else t.values).clone().requires_grad_() for t in (x, y)]
    pairs = zip((x, y), leaves, strict=True)
    out = packed(run(*[t.with_data(v) if isinstance(t, tdc.MaskedBatch) else t.with_values(v) for t, v in pairs]))
    values = out.values if isinstance(out, tdc.NestedTensor) else out
    if not values.requires_grad:
        return out, []
    found = torch.autograd.grad(
        (values * torch.arange(values.numel()).view_as(values)).sum(), leaves, allow_unused=True
    )
    kept = [torch.zeros_like(v) if g is None else g for g, v in zip(found, leaves, strict=True)]
    masked = [t.with_data(g) if isinstance(t, tdc.MaskedBatch) else t for t, g in zip((x, y), kept, strict=True)]
    return out.detach(), [
        m.to_packed().values if isinstance(m, tdc.MaskedBatch) else g for m, g in zip(masked, kept, strict=True)
    ]


@pytest.mark.parametrize("name", OF_TWO)
def test_rectangles_of_two_sizes(name: str):
    rows = [row.double() for row in ROWS]  # gradients of attention are sums of numbers that processors add in any order
    run, x, y = OF_TWO[name], tdc.pack(rows), tdc.pack([row * 2 + 1 for row in rows])
    want, gradients = learned(run, x, y)
    for widths in ((6, 9), (9, 6)):
        a, b = [t.to_padded(NAN, length=n) for t, n in zip((x, y), widths, strict=True)]
        got, found = learned(run, a, b)
        tdc.testing.assert_close({"result": got}, {"result": want})
        torch.testing.assert_close(found, gradients)


def test_what_is_padded_further_is_inside_the_domain():
    """A quotient of finite numbers has finite gradients, though padding that the library makes lies in the divisor."""
    w, lengths = torch.randn(2, 2, requires_grad=True), torch.tensor([4, 2, 6])
    a = tdc.MaskedBatch(torch.randn(3, 9, 2) @ w, lengths)
    b = tdc.MaskedBatch(torch.rand(3, 6, 2) + 1, lengths.clone())
    assert torch.autograd.grad((a / b).sum(), w)[0].isfinite().all()


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


@pytest.mark.slow
def test_one_graph_for_differences_and_lags():
    """Which of two batches is wider is no guard."""

    def run(x: Any, y: Any) -> Tensor:
        lagged = F.pad(x, (0, 0, 1, 0))[:, :-1]
        alone = (x[:, 1:] - x[:, :-1]).sum(1) + (x - lagged).sum(1) + x[:, -2:].sum(1)
        return alone + (x + y).sum(1) + torch.stack([x, y]).sum((0, 2)) + torch.cat([x, y]).sum((0, 1))

    graph = counted(run, backend="aot_eager")
    for lengths, width, other in (((5, 3, 9), 9, 12), ((7, 2), 12, 9), ((4, 8, 6, 3), 20, 20), ((3, 2), 5, 7)):
        x = tdc.pack([torch.randn(n, 3) for n in lengths])
        got = graph(x.to_padded(NAN, length=width), x.to_padded(NAN, length=other))
        torch.testing.assert_close(got, run(x, x))
    assert graph.counts.compiles == 1
