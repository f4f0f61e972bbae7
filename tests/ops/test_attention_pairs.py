"""Attention with a function of scores on CPU, against a loop over examples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from versions import refused

import tdc
from tdc import NestedTensor
from tdc.compile import counted

H, LONGEST = 4, 90
QUERIES, KEYS = (3, 0, 70, 5, 2), (4, 2, 66, 0, 6)  # rows without queries, without keys
OTHERS = (((9, 7), (3, 12)), ((1, 2, 0, 4), (0, 3, 5, 1)))
SMALL = (3, 0, 5, 2), (4, 2, 0, 6)
generator = torch.Generator().manual_seed(0)
SLOPES = torch.rand(H, generator=generator).requires_grad_()
TABLE = torch.randn(H, 9, generator=generator).requires_grad_()
MASK = torch.randn(LONGEST, LONGEST + 3, generator=generator).requires_grad_()
KEEP = torch.rand(H, LONGEST, LONGEST, generator=generator) > 0.4
ScoreMod = Callable[..., Tensor]

MODS: dict[str, tuple[ScoreMod, list[Tensor]]] = {  # what each learns
    "alibi": (lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(), [SLOPES]),
    "table": (lambda s, b, h, i, j: s + TABLE[h, (i - j).clamp(-4, 4) + 4], [TABLE]),
    "cap": (lambda s, b, h, i, j: torch.tanh(s / 2) * 2, []),
    "window": (lambda s, b, h, i, j: torch.where((i - j).abs() < 2, s, -math.inf), []),
    "nothing for some": (lambda s, b, h, i, j: torch.where(i > 1, s, -math.inf), []),
    "row": (lambda s, b, h, i, j: s * (b + 1), []),
    "no score": (lambda s, b, h, i, j: (i * j) * 0.1, []),
}


def batch(lengths: tuple[int, ...], heads: int, size: int, seed: int, dtype: torch.dtype) -> NestedTensor:
    values = torch.randn(sum(lengths), heads, size, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    offsets = tdc.offsets_of(torch.tensor(lengths, dtype=torch.int64))
    return NestedTensor(values.requires_grad_(), offsets, max_length=max((0, *lengths)))


def operands(
    queries: tuple[int, ...], keys: tuple[int, ...] | None, heads: int = H, dtype: torch.dtype = torch.float32
) -> list[NestedTensor]:
    """Queries (B, -1, H, 6), keys (B, -1, heads, 6) and values (B, -1, heads, 5); of one structure without `keys`."""
    q = batch(queries, H, 6, 0, dtype)
    k, v = batch(keys or queries, heads, 6, 1, dtype), batch(keys or queries, heads, 5, 2, dtype)
    like = q if keys is None else k
    return [q, like.with_values(k.values), like.with_values(v.values)]


def run(q: NestedTensor, k: NestedTensor, v: NestedTensor, **options: Any) -> Tensor:
    return tdc.ops.varlen_attention(q.values, k.values, v.values, q.structure, k.structure, **options)


def mask_of(mask: Any, row: int, queries: int, keys: int) -> Tensor | None:
    """The mask of one example."""
    if mask is None:
        return None
    if isinstance(mask, NestedTensor):
        return mask[row]
    own = mask[row] if mask.ndim == 4 and mask.shape[0] > 1 else mask
    return own[..., :queries, :keys]


def one(q: Tensor, k: Tensor, v: Tensor, row: int, score_mod: ScoreMod, causal: bool = False, mask: Any = None):
    """One example (L, H, D), by the definition, head by head and query by query."""
    out = []
    for h in range(q.shape[1]):
        g = h * k.shape[1] // q.shape[1]
        for i in range(q.shape[0]):
            j = torch.arange(k.shape[0])
            scores = k[:, g] @ q[i, h] / math.sqrt(q.shape[2])
            scores = score_mod(scores, torch.tensor(row), torch.tensor(h), torch.tensor(i), j)
            own = mask_of(mask, row, q.shape[0], k.shape[0])
            if own is not None:
                own = own.expand(q.shape[1], q.shape[0], k.shape[0])[h, i]
                scores = scores.masked_fill(~own, -math.inf) if own.dtype == torch.bool else scores + own
            if causal:
                scores = scores[: i + 1]
            dead = not (scores > -math.inf).any()
            out.append(v.new_zeros(v.shape[2]) if dead else scores.softmax(0) @ v[: len(scores), g])
    if not out:
        return v.new_zeros(0, q.shape[1], v.shape[2])
    return torch.stack(out).unflatten(0, (q.shape[1], -1)).transpose(0, 1)


def reference(q: NestedTensor, k: NestedTensor, v: NestedTensor, **options: Any) -> Tensor:
    rows = zip(*[x.unbind() for x in (q, k, v)], strict=True)
    return torch.cat([one(x, y, z, row, **options) for row, (x, y, z) in enumerate(rows)])


def gradients(out: Tensor, learning: list[Tensor], order: int) -> list[Tensor]:
    """The output, the gradients of a weighted sum of it, and those of a sum of their squares."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(out.dtype)
    found, loss = [out], (out * weights).sum()
    for n in range(order):
        grads = torch.autograd.grad(loss, learning, create_graph=n + 1 < order, materialize_grads=True)
        found += grads
        loss = torch.stack([g.square().sum() for g in grads]).sum()
    return found


def assert_same(fn: Callable[..., Tensor], parts: list[NestedTensor], more: list[Tensor], order: int, **options: Any):
    learning = [x.values for x in parts] + more
    got, want = (gradients(f(*parts, **options), learning, order) for f in (fn, reference))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=3e-4, rtol=3e-4)


@pytest.mark.cases(7, 3)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("name", MODS)
def test_functions_of_scores(name: str, causal: bool):
    score_mod, more = MODS[name]
    for keys in (KEYS, None):
        assert_same(run, operands(QUERIES, keys), more, 1, score_mod=score_mod, causal=causal)


@pytest.mark.parametrize("name", MODS)
def test_second_derivatives(name: str):
    score_mod, more = MODS[name]
    assert_same(run, operands(*SMALL), more, 2, score_mod=score_mod)


@pytest.mark.parametrize("groups", [2, 1])
def test_heads_that_share_keys(groups: int):
    assert_same(run, operands(QUERIES, KEYS, groups), [SLOPES], 1, score_mod=MODS["alibi"][0])


@pytest.mark.parametrize(("queries", "keys"), [((0, 0), (3, 2)), ((3, 2), (0, 0)), ((3, 2), (0, 1)), ((), ())], ids=str)
def test_nothing(queries: tuple[int, ...], keys: tuple[int, ...]):
    """Rows without keys give 0, and gradients of 0."""
    parts = operands(queries, keys)
    out, *grads = gradients(run(*parts, score_mod=MODS["alibi"][0]), [x.values for x in parts], 1)
    assert out.shape == (sum(queries), H, 5)
    assert not out[: 3 if queries else 0].any()
    assert not [g for g in grads if g.isnan().any()]
    assert not grads[0].any()


def ragged(parts: list[NestedTensor], heads: int | None) -> NestedTensor:
    """A mask that learns, of the sizes of queries and keys."""
    sizes = zip(*[x.offsets.diff().tolist() for x in parts[:2]], strict=True)
    lead, g = () if heads is None else (heads,), torch.Generator().manual_seed(7)
    rows = [torch.randn(*lead, n, m, generator=g) for n, m in sizes]
    mask = tdc.pack(rows, ragged_dim=(1 + len(lead), 2 + len(lead)))
    return mask.with_values(mask.values.requires_grad_())


MASKS: dict[str, Callable[[list[NestedTensor]], Any]] = {
    "added": lambda parts: MASK, "bool of heads": lambda parts: KEEP, "of queries": lambda parts: KEEP[0, :, :1],
    "of keys": lambda parts: KEEP[0, :1],
    "of rows": lambda parts: torch.stack([KEEP[:1] ^ bool(i % 2) for i in range(len(parts[0]))]),
    "ragged": lambda parts: ragged(parts, None), "ragged of heads": lambda parts: ragged(parts, H),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str):
    parts = operands(QUERIES, KEYS)
    mask = MASKS[name](parts)
    values = mask.values if isinstance(mask, NestedTensor) else mask
    more = [SLOPES, values] if values.requires_grad else [SLOPES]
    assert_same(run, parts, more, 1, score_mod=MODS["alibi"][0], mask=mask)


def test_padded_mask():
    """Its padding counts for nothing."""
    parts = operands(*SMALL)
    mask = ragged(parts, H)
    padded = mask.detach().to_padded()
    full = padded.with_data(padded.filled(math.nan))
    got, want = (run(*parts, score_mod=MODS["alibi"][0], mask=m) for m in (full, mask))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape", [(4, 6), (5, 5)], ids=str)
def test_mask_that_ends_too_early(shape: tuple[int, int]):
    """The longest rows have 5 queries and 6 keys."""
    with pytest.raises(tdc.ShapeError, match="at least the longest rows"):
        run(*operands(*SMALL), score_mod=MODS["alibi"][0], mask=torch.zeros(shape))


def test_dropout():
    """Weights are dropped and the others scaled; values that are an identity show them."""
    q, k, _ = operands((6, 3), (6, 4))
    v = k.with_values(torch.cat([torch.eye(n, 6) for n in (6, 4)])[:, None].expand(-1, H, -1))
    plain = run(q, k, v, score_mod=MODS["cap"][0])
    torch.manual_seed(0)
    dropped = run(q, k, v, score_mod=MODS["cap"][0], dropout=0.5)
    gone = dropped == 0
    torch.testing.assert_close(dropped, (plain * 2).masked_fill(gone, 0))
    assert 40 < (gone & (plain != 0)).sum() < 150  # of 6·6·4 + 3·4·4 = 192
    assert not run(q, k, v, score_mod=MODS["cap"][0], dropout=1.0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype):
    """Also where the function of scores widens them, and under autocast."""
    parts = operands(QUERIES, KEYS, dtype=dtype)
    exact = [x.with_values(x.values.detach().float().requires_grad_()) for x in parts]
    want = gradients(reference(*exact, score_mod=MODS["alibi"][0]), [x.values for x in exact], 1)
    got = gradients(run(*parts, score_mod=MODS["alibi"][0]), [x.values for x in parts], 1)
    with torch.autocast("cpu", dtype):
        got += gradients(run(*exact, score_mod=MODS["alibi"][0]), [x.values for x in exact], 1)
    assert {t.dtype for t in got[:5]} == {dtype}
    for a, b in zip(got, want * 2, strict=True):
        torch.testing.assert_close(a.float(), b, atol=6e-2, rtol=6e-2)


def test_under_transforms():
    """vmap of a gradient, queries and slopes mapped, keys shared among members; gradients of gradients."""
    q, k, v = operands(*SMALL)
    g = torch.Generator().manual_seed(5)
    many, slopes = torch.randn(3, *q.values.shape, generator=g), torch.rand(3, H, generator=g)

    def loss(fn: Callable[..., Tensor], values: Tensor, slopes: Tensor, keys: Tensor) -> Tensor:
        parts = q.with_values(values), k.with_values(keys), v
        return fn(*parts, score_mod=lambda s, b, h, i, j: s - slopes[h] * (i - j).abs()).square().sum()

    ours: Any = torch.vmap(torch.func.grad(lambda *args: loss(run, *args), (0, 1, 2)), (0, 0, None))
    theirs = [
        torch.autograd.grad(loss(reference, *args, k.values), (*args, k.values))
        for args in zip(many.clone().requires_grad_(), slopes.clone().requires_grad_(), strict=True)
    ]
    for got, want in zip(ours(many, slopes, k.values.detach()), zip(*theirs, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(want), atol=1e-4, rtol=1e-4)

    def slope(fn: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        first: Any = torch.func.grad(lambda values: loss(fn, values, slopes[0], k.values.detach()))
        return lambda values: first(values).square().sum()

    args = (many[0],)
    torch.testing.assert_close(torch.func.grad(slope(run))(*args), torch.func.grad(slope(reference))(*args))


@pytest.mark.slow
def test_in_a_direction():
    """A `torch.func.jvp` goes by rectangles, also in a graph."""
    q, k, v = operands(*SMALL)
    values = q.values.detach()

    def directed(fn: Callable[..., Tensor]) -> Any:
        alone = lambda x: fn(q.with_values(x), k, v, score_mod=MODS["cap"][0])  # noqa: E731
        return torch.func.jvp(alone, (values,), (torch.ones_like(values),))

    call, want = torch.compile(directed, backend="eager", fullgraph=True), directed(reference)
    for a, b in zip(call(run), want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param(None, marks=pytest.mark.slow)], ids=["traced", "inductor"]
)
@pytest.mark.parametrize("name", ["alibi", "table"])
def test_one_graph(name: str, backend: str | None):
    """For all lengths, with a mask and with grouped heads."""
    score_mod, more = MODS[name]
    options: dict[str, Any] = {"score_mod": score_mod, "mask": MASK}
    torch._dynamo.reset()
    how: dict[str, Any] = {"backend": backend} if backend else {}
    call: Any = counted(lambda *parts: run(*parts, **options), **how)

    for queries, keys in (SMALL, *OTHERS):
        assert_same(lambda *parts, **_: call(*parts), operands(queries, keys, 2), [*more, MASK], 1, **options)
    assert (call.counts.graphs, call.counts.compiles) == (1, 1)


@pytest.mark.slow
def test_one_graph_for_padded_masks():
    """Rectangles of other sizes are no reason to compile."""
    how = {"score_mod": MODS["alibi"][0]}
    torch._dynamo.reset()
    call: Any = counted(lambda *parts: run(*parts[:3], mask=parts[3], **how), backend="eager")
    for queries, keys in (SMALL, ((9, 2, 7), (3, 4, 12)), ((1, 2, 3, 6, 4), (5, 3, 5, 1, 2))):
        parts = operands(queries, keys)
        mask = ragged(parts, H).detach()
        torch.testing.assert_close(call(*parts, mask.to_padded()), run(*parts, mask=mask, **how))
    assert (call.counts.graphs, call.counts.compiles) == (1, 1)


@pytest.mark.slow
def test_second_derivatives_of_a_graph():
    """A graph that holds a gradient has its derivative, too."""
    q, k, v = operands(*SMALL)
    values = q.values.detach()

    def slope(fn: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        first: Any = torch.func.grad(lambda x: fn(q.with_values(x), k, v, score_mod=MODS["alibi"][0]).square().sum())
        return lambda values: first(values).square().sum()

    torch._dynamo.reset()
    with refused("Expected FakeTensor"):  # of a size that depends on data
        got = torch.compile(torch.func.grad(slope(run)), backend="aot_eager", fullgraph=True)(values)
        torch.testing.assert_close(got, torch.func.grad(slope(reference))(values), atol=1e-4, rtol=1e-4)
