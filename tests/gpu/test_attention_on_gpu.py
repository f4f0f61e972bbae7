"""Attention of packed rows by the kernels of a GPU, against the definition example by example."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packed_attention import CASES, KEYS, QUERIES, operands, reference, results, run
from torch import Tensor, nn

import tdc
from tdc.nn import KVCache
from tdc.testing import forbid

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROOM = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4, torch.float64: 1e-9}
LENGTHS = (3, 17, 1, 130, 64)


def on_gpu(dtype: torch.dtype) -> Tensor:
    return torch.empty(0, device="cuda", dtype=dtype)


def assert_near(got: list[Tensor], want: list[Tensor], dtype: torch.dtype) -> None:
    """Relative to the largest element, which is what rounding of sums is."""
    for n, (a, b) in enumerate(zip(got, want, strict=True)):
        off = (a.double().cpu() - b.double().cpu()).abs().max() / b.double().abs().max().cpu().clamp(min=1)
        assert off < ROOM[dtype], f"result {n} is off by {off:.1e}"


def compare(name: str, size: int, groups: int, dtype: torch.dtype, call: Any) -> None:
    """One case of self and cross attention, forward and backward."""
    keys, options = CASES[name]
    parts = operands(QUERIES, keys, groups, on_gpu(dtype), size)
    exact = operands(QUERIES, keys, groups, torch.empty(0, dtype=torch.float64), size)
    if "score_mod" in options:
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=dtype)
        there = slopes.cuda()
        options = {"score_mod": lambda s, b, h, i, j: s - (there if s.is_cuda else slopes)[h] * (i - j).abs()}
    assert_near(results(call, parts, options), results(reference, exact, options), dtype)


@pytest.mark.parametrize("dtype", ROOM, ids=str)
@pytest.mark.parametrize("groups", [4, 2], ids=["heads", "groups"])
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients(name: str, size: int, groups: int, dtype: torch.dtype):
    compare(name, size, groups, dtype, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_of_graphs(name: str, dtype: torch.dtype):
    compare(name, 64, 2, dtype, torch.compile(run, fullgraph=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_windows(dtype: torch.dtype, causal: bool):
    def near(score: Tensor, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return torch.where((i - j).abs() < 7, score, -torch.inf)

    parts, exact = [operands(QUERIES, None, 4, x, 32) for x in (on_gpu(dtype), torch.empty(0, dtype=torch.float64))]
    got = results(run, parts, {"window": 7, "causal": causal})
    assert_near(got, results(reference, exact, {"score_mod": near, "causal": causal}), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("keys", [None, KEYS], ids=["self", "cross"])
def test_dropout_draws_the_same_weights_in_both_directions(dtype: torch.dtype, keys: Any):
    """The output is linear in the values, so that its inner product with a gradient is that of values and theirs."""
    q, k, v = operands(QUERIES, keys, 4, on_gpu(dtype), 32)
    torch.manual_seed(1)
    out = run(q, k, v, dropout=0.5)
    grad = torch.randn_like(out)
    (slope,) = torch.autograd.grad(out, v.values, grad)
    torch.testing.assert_close((out * grad).double().sum(), (v.values * slope).double().sum(), rtol=2e-2, atol=1.0)
    torch.manual_seed(1)
    assert torch.equal(run(q, k, v, dropout=0.5), out)
    assert not torch.equal(run(q, k, v, dropout=0.5), out)
    assert abs(run(q, k, v.with_values(torch.ones_like(v.values)), dropout=0.5)[-1].float().mean() - 1) < 0.5


def stock(kind: str, dropout: float) -> nn.Module:
    if kind == "encoder":
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 2, 64, dropout, batch_first=True), 2)


def called(net: nn.Module, kind: str, x: Any, y: Any) -> Any:
    if kind == "encoder":
        return net(x)
    causal = torch.ones(130, 130, dtype=torch.bool, device=x.values.device).triu(1)
    return net(x, y, tgt_mask=causal, tgt_is_causal=True)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_stock_stacks(kind: str, dtype: torch.dtype, compiled: bool):
    """The numbers of the CPU in double precision, nothing padded, nothing waited for."""
    net = stock(kind, 0.0).to(dtype)
    rows = [torch.randn(n, 32).to(dtype) for n in LENGTHS]
    found = []
    for device, to in (("cuda", dtype), ("cpu", torch.float64)):
        there = stock(kind, 0.0)
        there.load_state_dict(net.state_dict())
        there = there.to(device, to)
        x, y = [tdc.pack([r.to(to) for r in each]).to(device) for each in (rows, rows[::-1])]
        call: Any = torch.compile(called, fullgraph=True) if compiled and device == "cuda" else called
        out = call(there, kind, x, y).values
        found.append([out, *torch.autograd.grad(out.square().mean(), list(there.parameters()))])
        if device == "cuda":
            try:
                torch.cuda.set_sync_debug_mode("error")
                with forbid(padding=True) if not compiled else torch.no_grad():
                    call(there, kind, x, y)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    assert_near(*found, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_stock_stacks_train_with_dropout(kind: str, dtype: torch.dtype):
    net = stock(kind, 0.1).to("cuda", dtype)
    x, y = [tdc.pack([torch.randn(n, 32) for n in each]).to("cuda").to(dtype) for each in (LENGTHS, LENGTHS[::-1])]
    for call in (called, torch.compile(called, fullgraph=True)):
        with forbid(padding=True) if call is called else torch.enable_grad():
            out = call(net, kind, x, y).values
        grads = torch.autograd.grad(out.float().square().mean(), list(net.parameters()))
        assert all(g.isfinite().all() for g in grads)


def test_transforms():
    """Directions, vmap, directions of gradients, and autocast."""
    rows = [torch.randn(n, 2, 16) for n in LENGTHS]

    def attend(values: Tensor) -> Tensor:
        q = tdc.NestedTensor(values, offsets.to(values.device), max_length=max(LENGTHS)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).values

    offsets = tdc.offsets_of(torch.tensor(LENGTHS))
    x, t = torch.cat(rows), torch.randn(2, sum(LENGTHS), 2, 16)
    there = x.cuda(), t.cuda()
    pairs = [
        lambda x, t: torch.func.jvp(attend, (x,), (t[0],))[1],
        lambda x, t: torch.func.vmap(attend)(t),
        lambda x, t: torch.func.vmap(torch.func.grad(lambda v: attend(v).square().sum()))(t),
        lambda x, t: torch.func.jvp(torch.func.grad(lambda v: attend(v).square().sum()), (x,), (t[0],))[1],
    ]
    for fn in pairs:
        torch.testing.assert_close(fn(*there).cpu(), fn(x, t), rtol=1e-3, atol=1e-4)
    with torch.autocast("cuda", torch.bfloat16):
        assert attend(there[0]).dtype == torch.bfloat16


def test_second_derivatives():
    rows, found = torch.randn(40, 2, 16), []
    for device in ("cuda", "cpu"):
        x = rows.to(device).requires_grad_()
        q = tdc.NestedTensor(x, torch.tensor([0, 7, 40], device=device), max_length=33).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q).values
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), x)[0].cpu())
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("window", [None, 3])
def test_cache(dtype: torch.dtype, groups: int, window: int | None):
    """Prompts and then single tokens: what whole rows give on the CPU."""
    found = []
    parts = [[torch.randn(n, h, 32).to(dtype) for n in lengths] for lengths in ((5, 1, 9), (1, 1, 1), (1, 1, 1))
             for h in (2 * groups, 2, 2)]  # fmt: skip
    for device, to in (("cuda", dtype), ("cpu", torch.float32)):
        cache = KVCache.allocate(3, 16, heads=2, head_dim=32, dtype=to, device=device)
        for n in range(0, 9, 3):
            q, k, v = [tdc.pack([x.to(to) for x in rows]).to(device) for rows in parts[n : n + 3]]
            cache = cache.append_(k, v)
            found.append(cache.attend(q, window=window).values)
    assert_near(found[:3], found[3:], dtype)
