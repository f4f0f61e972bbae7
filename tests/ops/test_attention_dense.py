"""Dense queries at ragged memories, and ragged ones at dense contexts, against attention example by example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Counter
from torch import Tensor, nn

import tdc

LENGTHS = (3, 5, 1, 4)
KINDS = ["nested", "masked"]


def rows_of(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 8, generator=generator, requires_grad=True) for n in lengths]


def dense(rows: int = len(LENGTHS), length: int = 6) -> Tensor:
    return torch.randn(rows, length, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)


def batch(rows: list[Tensor], kind: str) -> Any:
    return tdc.pack(rows) if kind == "nested" else tdc.pack(rows).to_padded(float("nan"))


def heads(x: Any) -> Any:
    return x.unflatten(-1, (2, 4)).transpose(-3, -2)


def plain(q: Any, k: Any) -> Any:
    return F.scaled_dot_product_attention(heads(q), heads(k), heads(k))


def one_head(q: Any, k: Any) -> Any:
    return F.scaled_dot_product_attention(q, k, k, is_causal=True)


def multi_head(q: Any, k: Any) -> Any:
    return module(q, k, k, need_weights=False)[0]


def weighed(q: Any, k: Any) -> Any:
    return module(q, k, k)[0]


def decoder(q: Any, k: Any) -> Any:
    return decoding(q, k)


with torch.random.fork_rng():
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    decoding = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)
FORMS = [plain, one_head, multi_head, weighed, decoder]


def close(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["dense", "ragged"])
@pytest.mark.parametrize("run", FORMS)
def test_each_example(run: Callable[[Any, Any], Any], first: str, kind: str):
    """Values and gradients of both sides."""
    rows, other = rows_of(), dense()
    x = batch(rows, kind)
    found = run(other, x) if first == "dense" else run(x, other)
    assert isinstance(found, Tensor) == (first == "dense")
    pairs = zip(other, rows, strict=True)
    want = [run(a, b) if first == "dense" else run(b, a) for a, b in pairs]
    close(list(found.unbind(0)), want)
    sums = [sum([t.square().sum() for t in parts]) for parts in (found.unbind(0), want)]
    close(*[torch.autograd.grad(s, [*rows, other], retain_graph=True) for s in sums])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dense_at", [(0,), (1, 2)])
def test_values_that_are_not_keys(dense_at: tuple[int, ...], kind: str):
    rows = [[torch.randn(6 if i in dense_at else n, 8) for n in LENGTHS] for i in range(3)]
    parts = [torch.stack(r) if i in dense_at else batch(r, kind) for i, r in enumerate(rows)]
    found = F.scaled_dot_product_attention(*[heads(p) for p in parts])
    want = [F.scaled_dot_product_attention(*[heads(p) for p in each]) for each in zip(*rows, strict=True)]
    close(list(found.unbind(0)), want)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_dense_queries(kind: str):
    rows, q = rows_of(), dense()
    found = module(q, *[batch(rows, kind)] * 2)[1]
    close(list(found.unbind(0)), [module(a, b, b)[1] for a, b in zip(q, rows, strict=True)])


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["dense", "ragged"])
def test_one_graph(first: str, kind: str):
    """For all lengths, of either."""
    counter = Counter()
    run = torch.compile(decoding, backend=counter, fullgraph=True)
    for lengths, length in ((LENGTHS, 6), ((2, 6, 1), 3), ((4, 1, 3, 2, 2), 9)):
        x, q = batch([r.detach() for r in rows_of(lengths)], kind), dense(len(lengths), length)
        for dim in (0, 1):
            torch._dynamo.maybe_mark_dynamic(q, dim)
        given = (q, x) if first == "dense" else (x, q)
        found, want = run(*given), decoding(*given)
        close(list(found.unbind(0)), list(want.unbind(0)))
        sums = [sum([t.square().sum() for t in out.unbind(0)]) for out in (found, want)]
        close(*[torch.autograd.grad(s, q) for s in sums])
    assert counter.graphs == 1


@pytest.mark.parametrize("kind", KINDS)
def test_empty_batches_and_memories(kind: str):
    """Queries that may look at nothing get the projection of 0."""
    x = batch(rows_of((0, 2)), kind)
    assert multi_head(dense(2), x)[0].equal(module.out_proj.bias.expand(6, 8))
    assert multi_head(dense(2)[:0], x[:0]).shape == (0, 6, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_refuses(kind: str):
    x = batch(rows_of(), kind)
    with pytest.raises(tdc.StructureError, match="as many examples of queries as of keys, got 2 and 4"):
        multi_head(dense(2), x)
    with pytest.raises(tdc.StructureError, match="or dense ones of as many dims"):
        multi_head(dense()[0], x)
