"""flex_attention of batches: functions of scores and masks for one example, against torch's on each example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as flex
from harness import Counter
from torch import Tensor
from torch.testing import assert_close

import tdc
from tdc.ops import flex_attention

LENGTHS = (((3, 0, 5), (3, 0, 5)), ((2, 6, 1, 0), (4, 0, 3, 2)), ((7, 1), (1, 2)))
SLOPES = torch.tensor([[0.5, 0.25, 0.1, 0.3], [0.75, 0.2, 0.4, 0.1]], requires_grad=True)
MODS: dict[str, tuple[Any, Any]] = {
    "score": (lambda s, b, h, i, j: s - SLOPES[h][(i - j).abs() % 4] * b, None),
    "mask": (None, lambda b, h, i, j: (i >= j) & (j != 1)),
    "both": (
        lambda s, b, h, i, j: torch.where(j == 0, s * 2, s + SLOPES[h, 1]).tanh(),
        lambda b, h, i, j: (i - j).abs() < 2 + h + b,
    ),
    "plain": (None, None),
}


def rows(lengths: tuple[int, ...], heads: int, size: int, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(heads, n, size, generator=g, requires_grad=True) for n in lengths]


def batch(parts: list[Tensor], padded: bool) -> tuple[Any, Tensor]:
    """A batch of copies, NaN in padding, and the leaf of autograd that it holds."""
    x: Any = tdc.pack([r.detach() for r in parts], ragged_dim=2)
    x = x.to_padded(float("nan")) if padded else x
    leaf = (x.data if padded else x.values).detach().requires_grad_()
    return (x.with_data(leaf) if padded else x.with_values(leaf)), leaf


def one(b: int, q: Tensor, k: Tensor, v: Tensor, score_mod: Any, mask_mod: Any, scale: float | None = None) -> Tensor:
    """One example (H, L, D), score by score."""
    scores = q @ k.repeat_interleave(len(q) // len(k), 0).mT * (scale or q.shape[-1] ** -0.5)
    out = []
    for h in range(len(q)):
        for i in range(q.shape[1]):
            at = [(torch.tensor(b), torch.tensor(h), torch.tensor(i), torch.tensor(j)) for j in range(k.shape[1])]
            own = [score_mod(s, *a) if score_mod else s for s, a in zip(scores[h, i], at, strict=True)]
            seen = [n for n, a in enumerate(at) if mask_mod is None or bool(mask_mod(*a))]
            values = v[h * len(v) // len(q)]
            weights = torch.stack([own[n] for n in seen]).softmax(0) if seen else values.new_zeros(0)
            out.append(weights @ values[seen])
    return torch.stack(out).unflatten(0, (len(q), -1)) if out else q.new_zeros(len(q), 0, v.shape[2])


def check(run: Callable[..., Any], lengths: Any, mods: tuple[Any, Any], padded: bool, groups: int = 2) -> None:
    """The results and gradients of a loop over examples."""
    parts = [rows(lengths[0], 2, 4, 0), rows(lengths[1], groups, 4, 1), rows(lengths[1], groups, 3, 2)]
    want = [one(b, q, k, v, *mods) for b, (q, k, v) in enumerate(zip(parts[0], parts[1], parts[2], strict=True))]
    leaves = [t for part in parts for t in part] + [SLOPES]
    loss = torch.stack([w.sin().sum() for w in want]).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    made = [batch(part, padded) for part in parts]
    got = run(*[x for x, _ in made], *mods)
    assert_close(list(got.unbind()), want, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad(
        got.sin().sum(), [*[leaf for _, leaf in made], SLOPES], allow_unused=True, materialize_grads=True
    )
    by_row = [
        list((x.with_data(g) if padded else x.with_values(g)).unbind())
        for (x, _), g in zip(made, found[:-1], strict=True)
    ]
    assert_close([r for part in by_row for r in part] + [found[-1]], list(grads), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
@pytest.mark.parametrize("name", MODS)
def test_functions_for_one_example(name: str, padded: bool):
    for lengths in LENGTHS:
        check(flex_attention, lengths, MODS[name], padded)


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_one_graph(padded: bool):
    """Of results and gradients."""
    count = Counter()
    compiled = torch.compile(lambda q, k, v, *mods: flex_attention(q, k, v, *mods), fullgraph=True, backend=count)
    for lengths in LENGTHS:
        check(compiled, lengths, MODS["both"], padded)
    assert count.graphs == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_torchs_own_function():
    """It has no sizes to compare where no mask is given; on CPU it refuses gradients and sums."""
    mod = MODS["score"][0]

    def own(q: Any, k: Any) -> Any:
        return flex.flex_attention(q, k, k, mod, enable_gqa=True)

    compiled = torch.compile(own, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for padded in (False, True):
            q, k = (batch(rows(LENGTHS[1][n], heads, 4, n), padded)[0].detach() for n, heads in ((0, 2), (1, 1)))
            want = [one(b, r, o, o, mod, None) for b, (r, o) in enumerate(zip(q.unbind(), k.unbind(), strict=True))]
            for run in (own, compiled):
                assert_close(list(run(q, k).unbind()), want)
        with pytest.raises(Exception, match="return_aux or return_lse"):
            flex.flex_attention(q, k, k, enable_gqa=True, return_aux=flex.AuxRequest(lse=True))


def test_block_mask_and_shared_heads():
    """The mask_mod of a BlockMask counts, its sizes do not; heads share keys."""
    causal: Any = lambda b, h, i, j: i >= j  # noqa: E731
    mask = flex.create_block_mask(causal, None, None, 9, 9, device="cpu")
    q, k = (batch(rows(LENGTHS[2][0], heads, 4, heads), False)[0] for heads in (2, 1))
    got = flex_attention(q, k, k, block_mask=mask, enable_gqa=True, scale=0.3)
    want = [one(0, a, b, b, None, causal, 0.3) for a, b in zip(q.unbind(), k.unbind(), strict=True)]
    assert_close(list(got.unbind()), want)


def test_data_of_examples():
    """Positions are real ones: a padded table is never read in its padding, a packed one never in another row."""
    parts = rows((3, 5), 2, 4, 0)
    x, ids = batch(parts, False)[0], tdc.pack([torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1, 0, 2])])
    table = ids.to_padded(-7).data
    got: Any = flex_attention(x, x, x, block_mask=lambda b, h, i, j: table[b, i] == table[b, j])
    packed, starts = ids.values, ids.offsets
    same: Any = flex_attention(x, x, x, block_mask=lambda b, h, i, j: packed[starts[b] + i] == packed[starts[b] + j])
    want = [one(b, r, r, r, None, lambda b, h, i, j: ids[b][i] == ids[b][j]) for b, r in enumerate(parts)]
    assert_close(list(got.unbind()), want)
    assert_close(same.values, got.values)


def test_dense_queries_and_half():
    latent, x = torch.randn(2, 2, 3, 4), batch(rows((3, 5), 2, 4, 0), False)[0].detach()
    mod = MODS["both"][0]
    got = flex_attention(latent, x, x, mod)
    want = [one(b, latent[b], r, r, mod, None) for b, r in enumerate(x.unbind())]
    assert_close(list(got), want)
    for dtype in (torch.float16, torch.bfloat16):
        half = x.to(dtype)
        out = flex_attention(half, half, half, mod)
        assert out.dtype == dtype
        want = [one(b, r, r, r, mod, None).to(dtype) for b, r in enumerate(half.float().unbind())]
        assert_close(list(out.unbind()), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_nothing(lengths: tuple[int, ...]):
    values = torch.zeros(2, 0, 4, requires_grad=True)
    x = tdc.NestedTensor(values, tdc.offsets_of(torch.tensor(lengths, dtype=torch.int64)), ragged_dim=2, max_length=0)
    out: Any = flex_attention(x, x, x, *MODS["both"])
    assert out.lengths.tolist() == list(lengths)
    assert not torch.autograd.grad(out.sum(), values)[0].any()


def test_wrong_input():
    x = batch(rows((3, 5), 2, 4, 0), False)[0].detach()
    dense, other = torch.randn(2, 2, 3, 4), batch(rows((3, 4), 2, 4, 0), False)[0]
    blocks = flex.BlockMask.from_kv_blocks(torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1).int())
    wrong: Any = 1.0
    cases: list[tuple[type, str, Any]] = [
        (tdc.DtypeError, "queries, keys or values, got", lambda: flex_attention(dense, dense, dense)),
        (tdc.DtypeError, "a function as score_mod", lambda: flex_attention(x, x, x, wrong)),
        (tdc.DtypeError, "a mask_mod or a BlockMask", lambda: flex_attention(x, x, x, None, dense)),
        (tdc.UnsupportedError, "a BlockMask with a mask_mod", lambda: flex_attention(x, x, x, None, blocks)),
        (tdc.ShapeError, "as many heads of keys", lambda: flex_attention(x, x[:, :1], x[:, :1])),
        (tdc.StructureError, "tdc.flex_attention", lambda: flex_attention(x, x.to_padded(), x)),
        (tdc.StructureError, "as many examples", lambda: flex_attention(x, x[:1], x[:1])),
        (tdc.StructureError, "lengths|structure|sizes", lambda: flex_attention(x, x, other)),
    ]
    for error, text, run in cases:
        with pytest.raises(error, match=text):
            run()
