"""Attention by its weights, example by example: dropout, masks that learn, values of another size than keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Counter
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tdc
from tdc.layout.structure import Structure
from tdc.ops import varlen_attention
from tdc.testing import forbid

LENGTHS, KEYS = (3, 0, 5, 1), (2, 4, 5, 0)  # examples without queries and without keys
HEADS, D, E = 2, 4, 6


def structure(lengths: tuple[int, ...] = LENGTHS) -> Structure:
    return tdc.pack([torch.zeros(n, 1) for n in lengths]).structure


def operands(q: tuple[int, ...] = LENGTHS, k: tuple[int, ...] = LENGTHS, heads: int = HEADS) -> list[Tensor]:
    shapes = (sum(q), heads, D), (sum(k), heads, D), (sum(k), heads, E)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def seeded(*rows: Structure, **options: Any) -> Any:
    """Attention that drops the same weights each time."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any = None) -> Tensor:
        torch.manual_seed(3)
        return varlen_attention(q, k, v, *rows, mask=mask, **options)

    return attend


def weights_of(p: float, lengths: tuple[int, ...] = (5, 4), heads: int = 2) -> list[Tensor]:
    """The weights (H, L, L) that values of each example are summed with: those of the unit vectors."""
    q, k, _ = operands(lengths, lengths, heads)
    v = torch.cat([torch.eye(max(lengths), dtype=torch.float64)[:n] for n in lengths])[:, None].expand(-1, heads, -1)
    out = varlen_attention(q, k, v, structure(lengths), structure(lengths), dropout=p)
    return [o.transpose(0, 1)[..., :n] for o, n in zip(out.split(lengths), lengths, strict=True)]


MASKS: dict[str, Any] = {
    "none": None,
    "of all": lambda: torch.randn(5, 5, dtype=torch.float64),
    "of keys": lambda: torch.randn(1, 5, dtype=torch.float64),
    "of heads": lambda: torch.randn(1, HEADS, 5, 5, dtype=torch.float64),
    "of examples": lambda: torch.randn(4, 1, 5, 5, dtype=torch.float64),
}


@pytest.mark.cases(3, 3)
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_cross_attention(name: str, p: float):
    run = seeded(structure(), structure(KEYS), dropout=p)
    given = operands(LENGTHS, KEYS)
    given += [] if MASKS[name] is None else [MASKS[name]().requires_grad_()]
    assert torch.autograd.gradcheck(run, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


@pytest.mark.slow
def test_gradients_of_causal_attention_and_of_a_ragged_mask():
    rows = structure()
    assert torch.autograd.gradcheck(seeded(rows, rows, dropout=0.3, causal=True), operands())
    pairs = tdc.pack([torch.zeros(n, n, dtype=torch.float64) for n in LENGTHS], ragged_dim=(1, 2))

    def run(q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> Tensor:
        return seeded(rows, rows, dropout=0.3)(q, k, v, pairs.with_values(values))

    given = [*operands(), torch.randn(pairs.values.shape, dtype=torch.float64, requires_grad=True)]
    assert torch.autograd.gradcheck(run, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, given, fast_mode=True)


def test_a_mask_that_learns_has_the_gradient_of_each_row():
    q, k, v = operands()
    mask = torch.randn(HEADS, 5, 5, dtype=torch.float64, requires_grad=True)
    found = varlen_attention(q, k, v, structure(), structure(), mask=mask)
    rows = [[x.transpose(0, 1) for x in parts] for parts in zip(*[t.split(LENGTHS) for t in (q, k, v)], strict=True)]
    wanted = [
        F.scaled_dot_product_attention(a, b, c, mask[:, : a.shape[1], : a.shape[1]]).transpose(0, 1)
        for a, b, c in rows
        if a.shape[1]
    ]
    torch.testing.assert_close(found, torch.cat(wanted))
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v, mask)) for x in (found, torch.cat(wanted))]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("mask", [
    None, torch.randn(5, 5, HEADS, dtype=torch.float64).permute(2, 0, 1)[None],
    torch.randn(4, 1, 1, 5, dtype=torch.float64).expand(4, HEADS, 5, 5),
], ids=["none", "permuted", "expanded"])  # fmt: skip
def test_a_graph_is_told_how_gradients_lie_in_memory(mask: Tensor | None):
    (q, k, v), rows = [t.detach() for t in operands()], structure()
    grad, lse = torch.randn_like(v), torch.zeros(q.shape[:2], dtype=torch.float64)
    args: Any = (grad, q, k, v, grad, lse, rows.offsets, None, mask, None, None, False, 1.0, 0.0)
    operator = torch.ops.tdc.varlen_attention_backward.weights
    promised = operator(*[x.to("meta") if isinstance(x, Tensor) else x for x in args])
    assert [(t.shape, t.stride()) for t in operator(*args)] == [(t.shape, t.stride()) for t in promised]


def test_what_is_dropped():
    """About a share of p of the weights, by themselves in each example and head; the others are scaled up."""
    lengths = (40, 60)
    dropped = weights_of(0.25, lengths)
    shares = torch.stack([(w == 0).double().mean() for w in dropped])
    torch.testing.assert_close(shares, torch.full_like(shares, 0.25), atol=0.03, rtol=0)
    zero = [w == 0 for w in dropped]
    assert not torch.equal(zero[0][0], zero[0][1])
    assert not torch.equal(zero[0][0], zero[1][0, :40, :40])
    torch.manual_seed(5)
    plain = weights_of(0.0)
    torch.manual_seed(5)
    some = weights_of(0.5)
    for a, b in zip(plain, some, strict=True):
        torch.testing.assert_close(b[b != 0], 2 * a[b != 0])


@pytest.mark.cases(1)
@pytest.mark.parametrize("p", [0.1, 0.9])
def test_the_mean_is_that_without_dropout(p: float):
    q, k, v = operands((2, 3), (2, 3))
    rows = structure((2, 3))
    runs = torch.stack([varlen_attention(q, k, v, rows, rows, dropout=p) for _ in range(2000)])
    error = runs.std(0) / 2000**0.5
    assert ((runs.mean(0) - varlen_attention(q, k, v, rows, rows)).abs() < 5 * error).all()


def test_a_second_derivative_has_the_digits_of_the_first():
    """What kept weights are scaled by is float64, too; in values attention is linear."""
    run, (q, k, v) = seeded(structure(), structure(), dropout=0.3), operands()

    def slope(q: Tensor) -> Tensor:
        return torch.autograd.grad(run(q, k, v).square().sum(), v, create_graph=True)[0]

    first = slope(q)
    weights = torch.randn_like(first)
    (again,) = torch.autograd.grad(first, v, weights)
    other = torch.autograd.grad(run(q, k, weights).mul(2 * run(q, k, v)).sum(), v)[0]  # linear in v: both are exact
    torch.testing.assert_close(again, other, rtol=1e-12, atol=1e-12)


def test_everything_is_dropped():
    q, k, v = operands()
    out = varlen_attention(q, k, v, structure(), structure(), dropout=1.0)
    assert (out == 0).all()
    assert all([(g == 0).all() for g in torch.autograd.grad(out.sum(), (q, k, v))])
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(tdc.ShapeError, match=r"a dropout in \[0, 1\]"):
            varlen_attention(q, k, v, structure(), structure(), dropout=p)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtypes(dtype: torch.dtype):
    q, k, v = [t.detach().to(dtype).requires_grad_() for t in operands()]
    run = seeded(structure(), structure(), dropout=0.3)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, want = run(q, k, v), run(*wide)
    tolerance: Any = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}
    torch.testing.assert_close(out, want.to(dtype), **tolerance)
    found, truth = torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(want.sum(), wide)
    torch.testing.assert_close(found, tuple([t.to(dtype) for t in truth]), **tolerance)


def test_members_of_vmap():
    """Each with a draw of its own, or all with one, forward and backward."""
    rows, members = structure(), 3
    q, k, v = [torch.randn(members, *t.shape, dtype=torch.float64) for t in operands()]

    def total(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, rows, rows, dropout=0.5).square().sum()

    def grads(randomness: str, *given: Tensor) -> Any:
        each: Any = torch.func.grad(total, (0, 1, 2))
        return torch.vmap(each, randomness=randomness)(*given)

    torch.manual_seed(1)
    same = grads("same", q, k, v)
    torch.manual_seed(1)
    torch.testing.assert_close(same[0][1], torch.func.grad(total)(q[1], k[1], v[1]))
    equal = [t[:1].expand(members, *t.shape[1:]) for t in (q, k, v)]
    alike, apart = grads("same", *equal)[0], grads("different", *equal)[0]
    assert torch.equal(alike[0], alike[1])
    assert not torch.allclose(apart[0], apart[1])
    with pytest.raises(RuntimeError, match="random"):
        grads("error", q, k, v)


def test_a_checkpoint_drops_the_same():
    q, k, v = operands()
    run = seeded(structure(), structure(), dropout=0.5)

    def free(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attention(q, k, v, structure(), structure(), dropout=0.5)

    torch.manual_seed(3)
    again: Any = checkpoint(free, q, k, v, use_reentrant=False)
    found = torch.autograd.grad(again.square().sum(), (q, k, v))
    torch.testing.assert_close(found, torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v)))


def stacks() -> dict[str, Any]:
    """Stock modules with their default arguments, and how each is called."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    decoder = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
    attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    return {
        "encoder": (nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), lambda m, x: m(x)),
        "decoder": (decoder, lambda m, x: m(x, x)),
        "attention": (attention, lambda m, x: m(x, x, x, need_weights=False)[0]),
    }


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", stacks())
def test_default_modules_in_training_never_pad(name: str):
    """Eagerly and in one graph of all lengths, which draws as torch does from its seed."""
    module, run = stacks()[name]
    counter = Counter("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def graph(x: Any) -> Any:
        return run(module, x)

    with forbid():
        for lengths in ((3, 5, 2), (7, 1), (4, 4, 4, 1)):
            x: Any = tdc.pack([torch.randn(n, 8) for n in lengths])
            x = x.with_values(x.values.requires_grad_())
            torch.manual_seed(2)
            out = run(module, x)
            torch.manual_seed(2)
            torch.testing.assert_close(graph(x).values, out.values)
            (grad,) = torch.autograd.grad(out.values.square().sum(), x.values)
            assert grad.isfinite().all()
    assert counter.graphs <= 2  # a batch size of its own at first, then of all
