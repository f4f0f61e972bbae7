"""KVCache: what decoding reads of a cache is what attention of the whole rows gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_kernels import Efficient, Flash
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import tdc
from tdc.kernels.attention import cached, efficient
from tdc.kernels.attention.rectangle import shared_heads
from tdc.nn import KVCache

B, G, D = 4, 2, 4
Rows = list[Tensor]


def draw(lengths: Any, heads: int, size: int) -> Rows:
    return [torch.randn(n, heads, size) for n in lengths]


def alone(q: Rows, k: Rows, v: Rows, causal: bool = True, window: int | None = None) -> Rows:
    """Each row by itself: its queries are its last positions."""
    out: Rows = []
    for x, y, z in zip(q, k, v, strict=True):
        n, m = len(x), len(y)
        back = torch.arange(m - n, m)[:, None] - torch.arange(m)
        mask = (back >= 0) & (back < (window or m + 1)) if causal else torch.ones(n, m, dtype=torch.bool)
        y, z = (t.repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (y, z))
        parts = [t.transpose(0, 1)[None] for t in (x, y, z)]
        found = F.scaled_dot_product_attention(*parts, attn_mask=mask)[0].transpose(0, 1)
        out.append(found if n and m else x.new_zeros(n, x.shape[1], z.shape[2]))
    return out


def joined(a: Rows, b: Rows) -> Rows:
    return [torch.cat([x, y]) for x, y in zip(a, b, strict=True)]


def close(found: Any, expected: Rows) -> None:
    torch.testing.assert_close(found.unbind(), expected)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("value_dim", [None, 6])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_prompts_tokens_and_pieces(groups: int, value_dim: int | None, window: int | None):
    """Of queries that share heads of keys, values of another size, and sliding windows; NaN stands behind the rows."""
    size = value_dim or D
    cache = KVCache.allocate(B, 16, heads=G, head_dim=D, value_dim=value_dim)
    for part in (cache.key, cache.value):
        part.fill_(torch.nan)
    keys, values = draw([0] * B, G, D), draw([0] * B, G, size)
    for lengths in ((3, 1, 5, 2), (1, 1, 1, 1), (2, 0, 1, 3), (0, 0, 4, 0)):
        q, k, v = draw(lengths, groups * G, D), draw(lengths, G, D), draw(lengths, G, size)
        keys, values = joined(keys, k), joined(values, v)
        cache = cache.append_(tdc.pack(k), tdc.pack(v))
        close(cache.attend(tdc.pack(q), window=window), alone(q, keys, values, window=window))
    q, k, v = draw([2] * B, groups * G, D), draw([2] * B, G, D), draw([2] * B, G, size)
    cache = cache.append_(torch.stack(k), torch.stack(v))
    found = cache.attend(torch.stack(q), window=window)
    torch.testing.assert_close(found, torch.stack(alone(q, joined(keys, k), joined(values, v), window=window)))
    assert cache.length.tolist() == [8, 4, 13, 8]


@pytest.mark.parametrize("kernel", ["flash", "efficient"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_kernels_of_cuda(monkeypatch: pytest.MonkeyPatch, kernel: str, groups: int, causal: bool):
    """What they are asked for, of rows with NaN behind their positions."""
    stand_in = Flash() if kernel == "flash" else Efficient()
    monkeypatch.setattr(cached, "flash_forward", stand_in.forward)
    monkeypatch.setattr(efficient, "efficient_forward", stand_in.forward)
    lengths, new, size = torch.tensor([7, 0, 3, 16]), (3, 0 if causal else 1, 1, 2), 8
    k, v = torch.full((2, B, 16, G, size), torch.nan)
    for b, n in enumerate(lengths.tolist()):
        k[b, :n], v[b, :n] = torch.randn(2, n, G, size)
    q = tdc.pack(draw(new, groups * G, size))
    if kernel == "flash":
        out = cached.flash_rows(q.values, k, v, q.offsets, lengths, causal, 0, 0.3)
    else:
        keys = [shared_heads(x.flatten(0, 1), groups * G) for x in (k, v)]
        out = efficient.used_rows(q.values, *keys, q.offsets, lengths, causal, 0.3)
    (want,) = cached.forward_rows(q.values, k, v, q.offsets, lengths, causal, 0, 0.3)
    torch.testing.assert_close(out, want)
    assert len(stand_in.calls) == 1


def test_every_query_sees_the_whole_row():
    keys, values, q = draw((3, 0, 5, 2), G, D), draw((3, 0, 5, 2), G, D), draw((4, 2, 0, 1), G, D)
    cache = KVCache.allocate(B, 8, heads=G, head_dim=D).append_(tdc.pack(keys), tdc.pack(values))
    close(cache.attend(tdc.pack(q), is_causal=False), alone(q, keys, values, causal=False))


def test_positions_of_new_tokens():
    k = tdc.pack(draw((3, 1, 5, 2), G, D))
    cache = KVCache.allocate(B, 8, heads=G, head_dim=D).append_(k, k)
    ids: Any = tdc.pack([torch.zeros(n, dtype=torch.int64) for n in (2, 0, 1, 1)])
    assert [x.tolist() for x in cache.positions(ids).unbind()] == [[3, 4], [], [5], [2]]
    assert cache.positions(torch.zeros(B, 2)).tolist() == [[3, 4], [1, 2], [5, 6], [2, 3]]


def test_a_guess_is_taken_back_and_a_row_begins_anew():
    """Speculative decoding keeps what was right; a row that ended makes place for another prompt."""
    keys, values = draw((3, 1, 5, 2), G, D), draw((3, 1, 5, 2), G, D)
    cache = KVCache.allocate(B, 9, heads=G, head_dim=D).append_(tdc.pack(keys), tdc.pack(values))
    guess = torch.randn(B, 3, G, D)
    guessed = cache.append_(guess, guess)
    right = torch.tensor([4, 1, 7, 0])
    kept = guessed.truncate_to(right)
    assert kept.length.tolist() == [4, 1, 7, 0]
    keys, values = ([torch.cat([a, b])[:n] for a, b, n in zip(x, guess, right, strict=True)] for x in (keys, values))
    q, new = draw((1, 0, 1, 2), G, D), draw((1, 0, 1, 2), G, D)
    found = kept.append_(tdc.pack(new), tdc.pack(new)).attend(tdc.pack(q))
    close(found, alone(q, joined(keys, new), joined(values, new)))
    assert cache.length.tolist() == [3, 1, 5, 2]  # the cache before the guess is as it was


def test_beams_exchange_their_rows():
    k = tdc.pack(draw((3, 1, 5, 2), G, D))
    cache = KVCache.allocate(B, 8, heads=G, head_dim=D).append_(k, k)
    before, address = cache.clone(), cache.key.data_ptr()
    parents = torch.tensor([2, 2, 0, 1])
    cache = tdc.copy_(cache, cache[parents])
    assert cache.key.data_ptr() == address
    q = torch.randn(B, 1, G, D)
    torch.testing.assert_close(cache.attend(q), before[parents].attend(q))


@pytest.mark.slow
def test_one_graph_for_prompts_and_one_for_tokens():
    """A TensorDict of caches, one for each layer, goes through a graph that writes into their memory."""
    count = CompileCounterWithBackend("aot_eager")

    def layers(caches: Any, q: Any, k: Any, v: Any) -> Any:
        kept = {name: cache.append_(k, v) for name, cache in caches.items()}
        return tdc.TensorDict(kept, [B]), [cache.attend(q) for cache in kept.values()]

    step = torch.compile(layers, backend=count, fullgraph=True)
    with torch.no_grad():
        caches: Any = tdc.TensorDict({n: KVCache.allocate(B, 20, heads=G, head_dim=D) for n in ("0", "1")}, [B])
        address = caches["1"].key.data_ptr()
        for lengths in ((3, 1, 5, 2), (1, 4, 0, 2), (2, 2, 2, 1)):
            k, v, q = (tdc.pack(draw(lengths, heads, D)) for heads in (G, G, 2 * G))
            expected, (first, _) = layers(caches.clone(), q, k, v)
            caches, (found, _) = step(caches, q, k, v)
            torch.testing.assert_close(found.values, first.values)
            assert (caches == expected).all()
        for _ in range(3):
            k, v, q = (torch.randn(B, 1, heads, D) for heads in (G, G, 2 * G))
            expected, (first, _) = layers(caches.clone(), q, k, v)
            caches, (found, _) = step(caches, q, k, v)
            torch.testing.assert_close(found, first)
            assert (caches == expected).all()
    assert caches["1"].key.data_ptr() == address
    assert count.frame_count == 2


def test_members_of_an_ensemble_have_their_own_cache():
    q, k = torch.randn(3, B, 2, 2 * G, D), torch.randn(3, B, 5, G, D)
    length = torch.tensor([5, 2, 4, 3])

    def one(q: Tensor, k: Tensor) -> Tensor:
        return KVCache(k, k, length, batch_size=[B]).attend(q)

    torch.testing.assert_close(torch.vmap(one)(q, k), torch.stack([one(*x) for x in zip(q, k, strict=True)]))
    shared = torch.vmap(one, in_dims=(0, None))(q, k[0])
    torch.testing.assert_close(shared, torch.stack([one(x, k[0]) for x in q]))


def test_no_rows_and_no_positions():
    cache = filled()
    assert cache[:0].attend(torch.ones(0, 1, G, D)).shape == (0, 1, G, D)
    nothing = tdc.pack(draw([0] * B, G, D))
    assert cache.append_(nothing, nothing).attend(nothing).values.shape == (0, G, D)
    assert cache.attend(torch.ones(B, 0, G, D)).shape == (B, 0, G, D)


@pytest.mark.parametrize("n", [1, 3])
def test_features_that_do_not_lie_one_behind_the_other(n: int):
    q, k, v = (torch.randn(B, D, heads, n).permute(0, 3, 2, 1) for heads in (2 * G, G, G))
    found = KVCache.allocate(B, 4, heads=G, head_dim=D).append_(k, v).attend(q)
    torch.testing.assert_close(found, torch.stack(alone(list(q), list(k), list(v))))


def test_queries_of_another_dtype_are_answered_in_theirs():
    k = torch.randn(B, 3, G, D)
    cache = KVCache.allocate(B, 4, heads=G, head_dim=D, dtype=torch.bfloat16).append_(k, k)
    found = cache.attend(k)
    assert (cache.key.dtype, found.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(found, torch.stack(alone(list(k), list(k), list(k))), rtol=0.02, atol=0.02)


def test_a_derivative_is_refused():
    q = torch.randn(B, 1, G, D, requires_grad=True)
    cache = KVCache.allocate(B, 4, heads=G, head_dim=D)
    cache = cache.append_(torch.ones(B, 1, G, D), torch.ones(B, 1, G, D))
    with pytest.raises(Exception, match=r"torch\.no_grad\(\)"):
        cache.attend(q).sum().backward()


def filled() -> KVCache:
    return KVCache.allocate(B, 4, heads=G, head_dim=D).append_(torch.ones(B, 3, G, D), torch.ones(B, 3, G, D))


WRONG: dict[str, tuple[Any, type[tdc.TdcError], str]] = {
    "no room": (lambda c: c.append_(torch.ones(B, 2, G, D), torch.ones(B, 2, G, D)), tdc.ShapeError, "capacity"),
    "other heads": (lambda c: c.append_(torch.ones(B, 1, 3, D), torch.ones(B, 1, 3, D)), tdc.ShapeError, "heads, size"),
    "values of other rows": (
        lambda c: c.append_(torch.ones(B, 1, G, D), torch.ones(B, 2, G, D)), tdc.ShapeError, "heads, size"
    ),
    "values of other lengths": (
        lambda c: c.append_(tdc.pack(draw((1, 0, 1, 0), G, D)), tdc.pack(draw((0, 1, 1, 0), G, D))),
        tdc.StructureError, "append_",
    ),
    "one of them ragged": (
        lambda c: c.append_(tdc.pack(draw([1] * B, G, D)), torch.ones(B, 2, G, D)), tdc.ShapeError, "heads, size"
    ),
    "ragged keys, dense values of the same total": (
        lambda c: c.append_(tdc.pack(draw((2, 0, 1, 1), G, D)), torch.ones(B, 1, G, D)), tdc.DtypeError, "both ragged"
    ),
    "complex ones": (
        lambda c: c.append_(*[torch.ones(B, 1, G, D, dtype=torch.complex64)] * 2), tdc.DtypeError, "real numbers"
    ),
    "other rows": (lambda c: c.append_(torch.ones(3, 1, G, D), torch.ones(3, 1, G, D)), tdc.ShapeError, "4 rows"),
    "a row alone": (lambda c: c[0].append_(torch.ones(1, G, D), torch.ones(1, G, D)), tdc.ShapeError, "one row"),
    "two batch dims": (lambda c: torch.stack([c, c]).attend(torch.ones(2, B, 1, G, D)), tdc.ShapeError, "of rows"),
    "other ragged rows": (lambda c: c.attend(tdc.pack(draw((1, 1), G, D))), tdc.ShapeError, "4 ragged rows"),
    "a padded batch": (lambda c: c.attend(tdc.pack(draw([1] * B, G, D)).to_padded()), tdc.DtypeError, "tdc.pack"),
    "a list": (lambda c: c.positions([1, 2]), tdc.DtypeError, "tdc.pack"),
    "queries before they are appended": (lambda c: c.attend(torch.ones(B, 4, G, D)), tdc.ShapeError, "append_"),
    "one of them": (
        lambda c: c.truncate_to(torch.tensor([3, 0, 3, 3])).attend(torch.ones(B, 1, G, D)), tdc.ShapeError, "in row 1"
    ),
    "heads that share none": (lambda c: c.attend(torch.ones(B, 1, 3, D)), tdc.ShapeError, "multiple of 2 heads"),
    "features": (lambda c: c.attend(torch.ones(B, 1, G, 5)), tdc.ShapeError, "4 features"),
    "a window of all": (
        lambda c: c.attend(torch.ones(B, 1, G, D), window=2, is_causal=False), tdc.ShapeError, "window=None"
    ),
    "window": (lambda c: c.attend(torch.ones(B, 1, G, D), window=0), tdc.ShapeError, "window=1"),
    "lengths": (lambda c: c.truncate_to(torch.ones(B)), tdc.ShapeError, "whole number"),
    "who is done, for lengths": (lambda c: c.truncate_to(torch.ones(B) > 0), tdc.ShapeError, "whole number"),
    "no heads": (lambda c: c.attend(torch.ones(B, 1)), tdc.ShapeError, "of each head"),
    "ragged without heads": (lambda c: c.attend(tdc.pack([torch.ones(1)] * B)), tdc.ShapeError, "of each head"),
    "whole numbers": (lambda c: c.attend(torch.ones(B, 1, G, D).long()), tdc.DtypeError, "real numbers"),
    "one length": (lambda c: c.truncate_to(2), tdc.DtypeError, "length"),
    "capacity": (lambda c: KVCache.allocate(B, 0, heads=G, head_dim=D), tdc.ShapeError, "capacity"),
    "a float": (lambda c: KVCache.allocate(B, 4.5, heads=G, head_dim=D), tdc.DtypeError, "an int"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str):
    call, error, text = WRONG[name]
    with pytest.raises(error, match=text):
        call(filled())
