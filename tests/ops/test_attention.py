"""Attention on ragged batches: masks of all forms, functions of scores, keys behind each row, decoders, kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Counter
from test_nn import KINDS, LENGTHS, OTHERS, SIZE, assert_same, compiled, mha, rows, weighted
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tdc
from tdc.ops import varlen_attention
from tdc.testing.batches import Ragged, build, differences, is_close, unbuild

L, M = 10, 12  # no smaller than the longest rows here, and than the rectangles they are padded to
MASK = torch.randn(L, M, generator=torch.Generator().manual_seed(3))
BAND = (torch.arange(L)[:, None] - torch.arange(M)).abs() > 2  # True forbids; each of the L queries keeps a key
SMALL = (3, 1, 5, 2)


def others(lengths: tuple[int, ...]) -> Ragged:
    """Keys and values of other lengths."""
    return rows(tuple([n + 1 if n else 0 for n in reversed(lengths)]), seed=1)


def masked(mask: Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Cross-attention with one mask for all rows: of the batch, and of one row."""

    def run(module: nn.Module, x: Any, y: Any) -> Any:
        return module(x, y, y, attn_mask=mask, need_weights=False)[0]

    def one(module: nn.Module, x: Tensor, y: Tensor) -> Any:
        return module(x, y, y, attn_mask=mask[: len(x), : len(y)], need_weights=False)[0]

    return run, one


@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["plain", "more keys"])
@pytest.mark.parametrize("mask", [MASK, BAND], ids=["added", "bool"])
@pytest.mark.parametrize("kind", KINDS)
def test_mask_of_multihead_attention(kind: str, mask: Tensor, options: Any):
    run, one = masked(mask)
    assert_same(mha(**options), kind, [rows(SMALL), rows((5, 2, 3, 4), seed=1)], run, one)


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", KINDS)
def test_mask_of_multihead_attention_compiled(kind: str):
    (run, one), module, counter = masked(BAND), mha(add_bias_kv=True), Counter()
    call = compiled(run, counter)
    for lengths in (LENGTHS, *OTHERS):
        assert_same(module, kind, [rows(lengths), others(lengths)], call, one)
    assert counter.graphs == 1


@pytest.mark.parametrize("kind", KINDS)
def test_mask_for_each_row_and_head(kind: str):
    """(B·H, L, M), as torch has it."""
    x, y, module = rows(SMALL), others(SMALL), mha()
    mask = torch.randn(len(SMALL) * 2, L, M)
    each = [mask[2 * i : 2 * i + 2, : len(a), : len(b)] for i, (a, b) in enumerate(zip(x.rows, y.rows, strict=True))]
    want = [module(a, b, b, attn_mask=m)[0] for a, b, m in zip(x.rows, y.rows, each, strict=True)]
    a, b = build((x, y), kind, lambda t: t)
    assert differences(unbuild(module(a, b, b, attn_mask=mask)[0]), x.with_rows(want), kind) == []


def functional(module: Any, x: Any, y: Any, mask: Any) -> Any:
    """What the module calls; the module itself takes masks only that are tensors."""
    first = [t.transpose(0, 1) for t in (x, y)]
    projections = module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0
    linear: Any = module.out_proj
    out, weights = F.multi_head_attention_forward(
        first[0], first[1], first[1], SIZE, 2, *projections, linear.weight, linear.bias, attn_mask=mask
    )
    return out.transpose(0, 1), weights


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", [False, True])
def test_ragged_mask(kind: str, heads: bool):
    """One number for each pair, for all heads or for each; it learns."""
    x, y, module = rows(SMALL), others(SMALL), mha()
    first = (2,) if heads else ()
    sizes = [(*first, len(a), len(b)) for a, b in zip(x.rows, y.rows, strict=True)]
    pairs = [torch.randn(n, requires_grad=True) for n in sizes]
    outs = [module(a, b, b, attn_mask=m) for a, b, m in zip(x.rows, y.rows, pairs, strict=True)]
    mask = Ragged(pairs, (2, 3) if heads else (1, 2), slack=2)
    a, b, m = build((x, y, mask), kind, lambda t: t)
    out, weights = functional(module, a, b, m)
    assert differences(unbuild(out), x.with_rows([o for o, _ in outs]), kind) == []
    assert differences(unbuild(weights), Ragged([w for _, w in outs], (1, 2)), kind) == []
    leaves = [*pairs, *module.parameters()]
    ours, theirs = weighted(unbuild(out).rows, leaves), weighted([o for o, _ in outs], leaves)
    assert all(is_close(g, w) for g, w in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("average", [True, False], ids=["averaged", "of_heads"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_keys_behind_each_row(kind: str, causal: bool, average: bool):
    """bias_k, bias_v and add_zero_attn: weights have a column more for each."""
    x, y, module = rows(SMALL), others(SMALL), mha(add_bias_kv=True, add_zero_attn=True)

    def mask(a: Tensor, b: Tensor) -> Any:
        return {"attn_mask": torch.ones(len(a), len(b), dtype=torch.bool).triu(1)} if causal else {}

    each = zip(x.rows, y.rows, strict=True)
    outs, weights = zip(*[module(a, b, b, **mask(a, b), average_attn_weights=average) for a, b in each], strict=True)
    a, b = build((x, y), kind, lambda t: t)
    options: Any = {"attn_mask": torch.ones(1, 1), "is_causal": True} if causal else {}
    got = unbuild(module(a, b, b, **options, average_attn_weights=average))
    want = x.with_rows(list(outs)), Ragged(list(weights), (1, 2) if average else (2, 3))
    assert differences(got, want, kind) == []
    leaves = [*module.parameters(), *x.rows, *y.rows]
    ours, theirs = weighted([*got[0].rows, *got[1].rows], leaves), weighted([*outs, *weights], leaves)
    assert all(is_close(g, w) for g, w in zip(ours, theirs, strict=True))


def test_both_kernels_agree():
    """Padded rows and one example after another: the same numbers for every mask."""
    x: Any = build([rows()], "nested", Tensor.detach)[0]
    values, structure = x.values.unflatten(1, (2, 4)), x.structure
    pairs = tdc.pack([torch.randn(n, n) for n in LENGTHS], ragged_dim=(1, 2))
    for options in ({}, {"causal": True}, {"mask": MASK}, {"mask": ~BAND}, {"mask": pairs}, {"scale": 2}):
        args: Any = (values, values, values, structure, structure)
        same = varlen_attention(*args, **options, score_mod=lambda score, *at: score)
        assert is_close(varlen_attention(*args, **options), same), options


@pytest.mark.parametrize("kind", KINDS)
def test_query_that_may_attend_to_nothing(kind: str):
    """It gives 0, as torch's operation does, and no NaN reaches a gradient."""
    x = Ragged([torch.randn(2, n, 4).requires_grad_() for n in (3, 0, 2)], (2,), slack=2)
    mask = torch.ones(3 + 2, 3 + 2, dtype=torch.bool)
    mask[1] = False
    batch = build([x], kind, lambda t: t)[0]
    got = unbuild(F.scaled_dot_product_attention(batch, batch, batch, attn_mask=mask))
    want = [F.scaled_dot_product_attention(r, r, r, attn_mask=mask[: r.shape[1], : r.shape[1]]) for r in x.rows]
    assert differences(got, x.with_rows(want), kind) == []
    assert not got.rows[0][:, 1].any()
    assert all(is_close(a, b) for a, b in zip(weighted(got.rows, x.rows), weighted(want, x.rows), strict=True))


def decode(module: nn.Module, x: Any, memory: Any) -> Any:
    return module(x, memory, tgt_mask=torch.ones(1, 1), tgt_is_causal=True)


def decode_row(module: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
    return module(x, memory, tgt_mask=torch.ones(len(x), len(x), dtype=torch.bool).triu(1))


DECODERS: dict[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.TransformerDecoderLayer(SIZE, 2, 16, dropout=0.0, batch_first=True, norm_first=True),
    "decoder": lambda: nn.TransformerDecoder(
        nn.TransformerDecoderLayer(SIZE, 2, 16, dropout=0.0, batch_first=True), 2, nn.LayerNorm(SIZE)
    ),
    "decoder_eval": lambda: DECODERS["decoder"]().eval(),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DECODERS)
def test_decoder(name: str, kind: str):
    assert_same(DECODERS[name](), kind, [rows(SMALL), others(SMALL)], decode, decode_row)


def transform(module: nn.Module, x: Any, y: Any) -> Any:
    return module(y, x)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("training", [True, False])
def test_transformer(training: bool, kind: str):
    module = nn.Transformer(SIZE, 2, 1, 1, 16, dropout=0.0, batch_first=True).train(training)
    assert_same(module, kind, [rows(SMALL), others(SMALL)], transform)


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", ["decoder", "transformer"])
def test_decoder_compiled(name: str):
    counter = Counter()
    if name == "decoder":
        module, run, one = DECODERS["layer"](), decode, decode_row
    else:
        module, run, one = nn.Transformer(SIZE, 2, 1, 1, 16, dropout=0.0, batch_first=True), transform, transform
    call = compiled(run, counter)
    for lengths in (SMALL, (2, 6, 1, 3, 4), (7, 2, 3)):
        assert_same(module, "nested", [rows(lengths), others(lengths)], call, one)
    assert counter.graphs == 1


def batch(count: int = 2, *lengths: int) -> tdc.NestedTensor:
    """Heads of queries (B, count, -1, 4)."""
    return tdc.pack([torch.ones(count, n, 4) for n in lengths or (3, 2)], ragged_dim=2)


sdpa: Any = F.scaled_dot_product_attention
WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "both masks": (
        lambda: sdpa(batch(), batch(), batch(), attn_mask=MASK, is_causal=True),
        tdc.ShapeError,
        "tdc.scaled_dot_product_attention: expected one of attn_mask and is_causal=True, got both",
    ),
    "heads": (
        lambda: sdpa(batch(4), batch(), batch()),
        tdc.ShapeError,
        "tdc.scaled_dot_product_attention: expected as many heads of keys as of queries, got [4, 2, 2]",
    ),
    "multiple of heads": (
        lambda: sdpa(batch(3), batch(), batch(), enable_gqa=True),
        tdc.ShapeError,
        "tdc.attention: expected heads of queries, a multiple of those of keys, got 3 and 2",
    ),
    "small mask": (
        lambda: sdpa(batch(), batch(), batch(), attn_mask=MASK[:2, :2]),
        tdc.ShapeError,
        "tdc.attention: expected a mask (..., Lq, Lk) of at least the longest rows, "
        "got (..., 2, 2) for 3 queries and 3 keys",
    ),
    "ragged mask": (
        lambda: sdpa(
            batch(), batch(), batch(), attn_mask=tdc.pack([torch.ones(2, 2)] * 2, ragged_dim=(1, 2))
        ),
        tdc.StructureError,
        "tdc.attention: expected a mask of the sizes of queries and keys, got other sizes",
    ),
    "dims of a mask": (
        lambda: sdpa(batch(), batch(), batch(), attn_mask=batch()),
        tdc.StructureError,
        "tdc.attention: expected a mask with two ragged dims, got NestedTensor float32[2, 2, -1, 4]",
    ),
    "padding mask": (
        lambda: mha()(*[tdc.pack([torch.ones(2, SIZE)])] * 3, key_padding_mask=torch.zeros(1, 2)),
        tdc.UnsupportedError,
        "tdc.multi_head_attention_forward: expected self- or cross-attention of whole rows, got key_padding_mask",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_message(name: str):
    call, error, text = WRONG[name]
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value).splitlines()[0] == text


@pytest.mark.parametrize(
    "how", [{}, {"is_causal": True}, {"attn_mask": torch.zeros(3, 3)}, {"dropout_p": 0.1}], ids=str
)
def test_autocast_is_followed(how: dict[str, Any]):
    """As torch's own: half precision of float32, and float64 as it is."""
    x: Any = tdc.pack([torch.randn(2, 3, 4), torch.randn(2, 2, 4)], ragged_dim=2)
    dense = torch.randn(2, 2, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        for y in (x, x.to_padded()):
            assert F.scaled_dot_product_attention(y, y, y, **how).dtype == torch.bfloat16
        wide = x.double()
        assert F.scaled_dot_product_attention(wide, wide, wide).dtype == torch.float64
        assert F.scaled_dot_product_attention(dense, dense, dense).dtype == torch.bfloat16
    assert F.scaled_dot_product_attention(x, x, x, **how).dtype == torch.float32


@pytest.mark.sweep
@pytest.mark.slow
def test_autocast_in_a_graph_and_its_gradients():
    x: Any = tdc.pack([torch.randn(2, 3, 4), torch.randn(2, 2, 4)], ragged_dim=2)

    def attend(x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(x, x, x)

    values = x.values.clone().requires_grad_()
    for fn in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = fn(x.with_values(values))
        (grad,) = torch.autograd.grad(out.values.float().sum(), values)
        assert (out.dtype, grad.dtype) == (torch.bfloat16, torch.float32)
        torch.testing.assert_close(
            out.values.float(), F.scaled_dot_product_attention(x, x, x).values, atol=0.05, rtol=0.05
        )


def test_values_have_the_lengths_of_keys():
    """Also where the totals are equal."""
    q, k, v = batch(2, 3, 2), batch(2, 3, 2), batch(2, 2, 3)
    for run in (lambda t: t, lambda t: t.to_padded()):
        with pytest.raises(tdc.StructureError):
            sdpa(run(q), run(k), run(v))
        x, y = (run(tdc.pack([torch.randn(n, SIZE) for n in lengths])) for lengths in ((3, 2), (2, 3)))
        with pytest.raises(tdc.StructureError):
            mha()(x, x, y, need_weights=False)


@pytest.mark.parametrize("kind", KINDS)
def test_mask_of_too_few_examples(kind: str):
    """A mask is for one example or for all."""
    x = batch(2, 3, 2, 1) if kind == "nested" else batch(2, 3, 2, 1).to_padded()
    with pytest.raises(tdc.ShapeError, match="a mask for 1 or 3 examples"):
        sdpa(x, x, x, attn_mask=torch.zeros(2, 1, 3, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_dropout_of_the_result(kind: str):
    """As torch has it: what is returned is what the values were weighted with."""
    x: Any = tdc.pack([torch.randn(n, SIZE) for n in (3, 2)])
    x, module = (x if kind == "nested" else x.to_padded()), mha(dropout=0.5)
    out, weights = module(x, x, x, average_attn_weights=False)
    values = F.linear(x, module.in_proj_weight[2 * SIZE :], module.in_proj_bias[2 * SIZE :])
    for o, w, v in zip(out.unbind(), weights.unbind(), values.unbind(), strict=True):
        heads = (w @ v.unflatten(1, (2, -1)).transpose(0, 1)).transpose(0, 1).flatten(1)
        assert is_close(o, F.linear(heads, module.out_proj.weight, module.out_proj.bias))
    assert any((w == 0).any() for w in weights.unbind())


@pytest.mark.parametrize("kind", KINDS)
def test_features_in_front_in_memory(kind: str):
    """A batch of channels whose dims were moved: the kernel reads features one behind the other."""
    examples = [torch.randn(4, n, dtype=torch.float64, requires_grad=True) for n in (3, 0, 5, 2)]
    x: Any = tdc.pack(examples, ragged_dim=2)
    q = (x if kind == "nested" else x.to_padded(float("nan"))).movedim(1, 2).unsqueeze(1)
    out = F.scaled_dot_product_attention(q, q.sin(), q.tanh())
    want = [F.scaled_dot_product_attention(r, r.sin(), r.tanh()) for r in [e.mT[None] for e in examples]]
    torch.testing.assert_close(out.unbind(), tuple(want))
    found, truth = [
        torch.autograd.grad([o.sum() for o in outs if o.numel()], examples, materialize_grads=True)
        for outs in (out.unbind(), want)
    ]
    torch.testing.assert_close(found, truth)


def test_the_operator_by_itself() -> None:
    """It has a derivative of its own, with which the bodies of loops are traced."""
    offsets = torch.tensor([0, 2, 2, 5])
    q, k, v = [torch.randn(5, 2, 4, requires_grad=True) for _ in range(3)]
    out, _ = torch.ops.tdc.varlen_attention(q, k, v, offsets, None, True, 0.5)
    parts = [x.movedim(1, 0).split([2, 3], 1) for x in (q, k, v)]
    want = [F.scaled_dot_product_attention(*part, is_causal=True, scale=0.5) for part in zip(*parts, strict=True)]
    want = torch.cat(want, 1).movedim(0, 1)
    torch.testing.assert_close(out, want)
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, want)]
    torch.testing.assert_close(*grads)


def test_room_behind_the_last_example() -> None:
    """Nothing is read there; the result is 0, and so is the gradient."""
    x = torch.randn(7, 2, 4).index_fill_(0, torch.tensor([5, 6]), math.nan).requires_grad_()
    offsets = torch.tensor([0, 2, 5])
    out, _ = torch.ops.tdc.varlen_attention(x, x, x, offsets, None, True, 0.5)
    want, _ = torch.ops.tdc.varlen_attention(*[x[:5]] * 3, offsets, None, True, 0.5)
    torch.testing.assert_close(out, F.pad(want, (0, 0, 0, 0, 0, 2)))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert not grad[5:].any()


@pytest.mark.cases(1)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_of_a_graph_whose_backward_has_a_grad_mode(backend: str) -> None:
    """Dynamo's backward runs with it on: what the kernel writes into is no view that autograd knows."""
    offsets = torch.tensor([0, 2, 5])

    def run(values: Tensor) -> Tensor:
        x = tdc.NestedTensor(values, offsets).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x).values.square().sum()

    values = torch.randn(5, 2, 4, requires_grad=True)
    found = torch.compile(run, backend=backend, fullgraph=True)(values)
    torch.testing.assert_close(torch.autograd.grad(found, values), torch.autograd.grad(run(values), values))


@pytest.mark.parametrize("extra", ["nothing", "mask", "score_mod", "dropout"])
@pytest.mark.parametrize("causal", [False, True])
def test_window(causal: bool, extra: str):
    """A query attends to keys that are less than so many positions away."""
    q, k, v = [tdc.pack([torch.randn(n, 2, 4) for n in (6, 0, 3, 9)]) for _ in range(3)]
    near = torch.ones(9, 9, dtype=torch.bool).triu(-2).tril(2)
    mask, options = torch.randn(9, 9), {"causal": causal}
    given: dict[str, Any] = {
        "mask": {"mask": mask}, "score_mod": {"score_mod": lambda s, b, h, i, j: s * 2}, "dropout": {"dropout": 1.0},
    }.get(extra, {})  # fmt: skip
    rows = q.structure, k.structure
    got = varlen_attention(q.values, k.values, v.values, *rows, window=3, **options, **given)
    doubled = 2 if extra == "score_mod" else 1
    allowed = torch.zeros(9, 9).masked_fill(~near, -torch.inf) + (mask if extra == "mask" else 0)
    want = varlen_attention(doubled * q.values, k.values, v.values, *rows, mask=allowed, **options)
    torch.testing.assert_close(got, want * (extra != "dropout"))


def test_window_of_nothing():
    x = tdc.pack([torch.ones(2, 1, 4)])
    with pytest.raises(tdc.ShapeError, match="a window of at least 1, got 0"):
        varlen_attention(x.values, x.values, x.values, x.structure, x.structure, window=0)


@pytest.mark.parametrize("how", ["fused", "dropout", "math"])
def test_second_derivative_of_a_padded_batch(how: str):
    """Of the fused kernel, which torch has none of, it is refused with what has one; a first one never is."""
    packed = tdc.pack([torch.randn(2, n, 8) for n in (3, 0, 5)], ragged_dim=2)
    x = packed.to_padded()
    leaf, values = x.data.clone().requires_grad_(), packed.values.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH) if how == "math" else nullcontext():
        out = F.scaled_dot_product_attention(x.with_data(leaf), x, x, dropout_p=0.5 * (how == "dropout"))
    first = torch.autograd.grad(out.data.square().sum(), leaf, create_graph=True)[0]
    if how == "fused":
        with pytest.raises(tdc.UnsupportedError, match="one derivative of a fused kernel, got a second one"):
            first.square().sum().backward()
        return
    second = torch.autograd.grad(first.square().sum(), leaf)[0]
    if how == "math":
        out = F.scaled_dot_product_attention(packed.with_values(values), packed, packed)
        grad = torch.autograd.grad(out.values.square().sum(), values, create_graph=True)[0]
        of_packed = torch.autograd.grad(grad.square().sum(), values)[0]
        torch.testing.assert_close(x.with_data(second).to_packed().values, of_packed)
