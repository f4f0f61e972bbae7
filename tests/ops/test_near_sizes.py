"""Convolution and attention on a few rectangles: the numbers, and that no device is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fake_cuda import fake_cuda, on_fake_cuda
from torch import Tensor, nn

import tdc
from tdc import NestedTensor, ShapeError
from tdc.core.dynamo import watching
from tdc.layout import rectangles
from tdc.layout.structure import Structure
from tdc.ops.attention import scaled_dot_product
from tdc.ops.attention.scaled_dot_product import varlen_attention
from tdc.ops.images import conv, planes
from tdc.testing import forbid

F: Any = torch.nn.functional
DOUBLE = torch.float64
SIZES = ((7, 5), (7, 5), (8, 9), (6, 6), (9, 7), (12, 6))
QUERIES, KEYS = (3, 17, 0, 9, 30, 31, 5, 2), (4, 0, 6, 9, 29, 40, 5, 3)
HEADS = 4


@pytest.fixture
def several(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rectangles cost next to nothing, and kernels of packed rows do not serve. How many each call had is on record."""
    made: list[int] = []

    def noted(parts: list[Tensor], *rest: Any) -> Tensor:
        made.append(len(parts))
        return rectangles.from_rectangles(parts, *rest)

    for module in (scaled_dot_product, planes):
        monkeypatch.setattr(module, "from_rectangles", noted)
    monkeypatch.setattr(planes, "counts_on_host", lambda s: True)
    monkeypatch.setattr(rectangles, "CALLS", 1)
    monkeypatch.setattr(conv, "on_rows", lambda *given: False)
    monkeypatch.setattr(scaled_dot_product, "backend", lambda call: "padded")
    return made


def check(fn: Callable[[Any], Any], ragged: tuple[int, ...], others: list[Tensor]) -> None:
    """Results of images and all gradients are those of one example after another.

    Args:
        ragged: which of two dims are; 6 positions in the other.
    """
    sizes = [[n if d in ragged else 6 for d, n in enumerate(size)] for size in SIZES]
    rows = [torch.randn(4, *size, dtype=DOUBLE, requires_grad=True) for size in sizes]
    ours = list(fn(tdc.pack(rows, ragged_dim=tuple(d + 2 for d in ragged))).unbind())
    theirs = [fn(row[None])[0] for row in rows]
    torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad([y.square().sum() for y in ys], [*rows, *others]) for ys in (ours, theirs)]
    torch.testing.assert_close(*grads)


BOTH = pytest.mark.parametrize("ragged", [(0, 1), (0,), (1,)], ids=["both", "first", "last"])
CONVS: dict[str, dict[str, Any]] = {
    "plain": {}, "padded": {"padding": 1}, "stride": {"stride": 2, "padding": 1, "groups": 2},
    "dilated": {"stride": (1, 2), "padding": (0, 1), "dilation": (2, 1)}, "same": {"padding": "same"},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@BOTH
@pytest.mark.parametrize("name", CONVS)
def test_convolution(several: list[int], name: str, ragged: tuple[int, ...]):
    options = CONVS[name]
    weight = torch.randn(6, 4 // options.get("groups", 1), 2, 3, dtype=DOUBLE, requires_grad=True)
    bias = torch.randn(6, dtype=DOUBLE, requires_grad=True)
    check(lambda x: F.conv2d(x, weight, bias, **options), ragged, [weight, bias])
    assert several[0] > 1


@pytest.mark.parametrize("n", [1, 3])
def test_sequences_and_volumes(several: list[int], n: int):
    weight = torch.randn(6, 4, *(2, 3, 2)[:n], dtype=DOUBLE, requires_grad=True)
    rows = [torch.randn(4, *(5, *size)[-n:], dtype=DOUBLE) for size in SIZES]
    run = F.conv1d if n == 1 else F.conv3d
    x = tdc.pack(rows, ragged_dim=(2,) if n == 1 else (3, 4))
    found = list(run(x, weight, stride=2).unbind())
    torch.testing.assert_close(found, [run(row[None], weight, stride=2)[0] for row in rows])
    assert several[0] > 1


@BOTH
@pytest.mark.parametrize("options", [{}, {"stride": 2, "padding": 1, "output_padding": 1}], ids=["plain", "stride"])
def test_transposed_convolution(several: list[int], options: dict[str, Any], ragged: tuple[int, ...]):
    weight = torch.randn(4, 3, 2, 3, dtype=DOUBLE, requires_grad=True)
    check(lambda x: F.conv_transpose2d(x, weight, None, **options), ragged, [weight])
    assert several[0] > 1


@BOTH
@pytest.mark.parametrize("name", ["conv2d", "conv_transpose2d"])
def test_kernels_of_one_position_need_no_rectangle(several: list[int], name: str, ragged: tuple[int, ...]):
    weight = torch.randn(4, 4, 1, 1, dtype=DOUBLE, requires_grad=True)
    bias = torch.randn(4, dtype=DOUBLE, requires_grad=True)
    with forbid(padding=True, loops=False):
        check(lambda x: getattr(F, name)(x, weight, bias), ragged, [weight, bias])
    assert not several


MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "of all": lambda: torch.randn(31, 40, dtype=DOUBLE),
    "of examples": lambda: torch.randn(8, 1, 32, 40, dtype=DOUBLE),
    "of keys": lambda: torch.rand(8, 1, 1, 40) < 0.8,
    "bool": lambda: torch.rand(8, HEADS, 31, 40) < 0.7,
    "ragged": lambda: tdc.pack(
        [torch.randn(n, m, dtype=DOUBLE) for n, m in zip(QUERIES, KEYS, strict=True)], ragged_dim=(1, 2)
    ),
    "ragged, of heads": lambda: tdc.pack(
        [torch.rand(HEADS, n, m) < 0.6 for n, m in zip(QUERIES, KEYS, strict=True)], ragged_dim=(2, 3)
    ),
}


def heads(lengths: tuple[int, ...], features: int) -> NestedTensor:
    return tdc.pack([torch.randn(n, HEADS, features, dtype=DOUBLE) for n in lengths])


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("biased", [False, True], ids=["scores", "score_mod"])
@pytest.mark.parametrize("name", MASKS)
def test_attention(several: list[int], monkeypatch: pytest.MonkeyPatch, name: str, biased: bool, causal: bool):
    """Numbers and gradients are those of one rectangle, which other tests compare with each example."""
    q, k, v = heads(QUERIES, 8), heads(KEYS, 8), heads(KEYS, 6)
    slopes = torch.randn(8, HEADS, dtype=DOUBLE, requires_grad=True)
    leaves = [t.values.requires_grad_() for t in (q, k, v)] + [slopes] * biased
    score_mod = (lambda s, b, h, i, j: s + slopes[b, h] * (i - j)) if biased else None
    mask, found = MASKS[name](), []
    for launch in (1, 1 << 60):
        monkeypatch.setattr(rectangles, "CALLS", launch)
        rows = [Structure(t.offsets) for t in (q, k)]  # the best rectangles are kept on a structure
        operands = (q.values, k.values, v.values, *rows)
        out = varlen_attention(*operands, causal=causal, mask=mask, score_mod=score_mod)
        found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    torch.testing.assert_close(*found)
    assert several == [4]


def test_a_mask_that_is_too_small(several: list[int]):
    q, k = heads(QUERIES, 8), heads(KEYS, 8)
    with pytest.raises(ShapeError, match="31 queries and 40 keys"):
        varlen_attention(q.values, k.values, k.values, q.structure, k.structure, mask=torch.randn(30, 40))


def test_a_query_without_keys_reads_no_values(several: list[int]):
    q, k = heads(QUERIES, 8), heads(KEYS, 8)
    score_mod = lambda s, b, h, i, j: torch.where(i > 1, s, -torch.inf)  # noqa: E731
    infinite = torch.full_like(k.values, torch.inf)
    out = varlen_attention(q.values, k.values, infinite, q.structure, k.structure, score_mod=score_mod)
    assert not out[:2].any()


def test_dropout_leaves_the_mean(several: list[int]):
    q, k = heads(QUERIES, 8), heads(KEYS, 8)
    v = torch.ones_like(k.values)
    out = varlen_attention(q.values, k.values, v, q.structure, k.structure, dropout=0.5, mask=torch.zeros(31, 40))
    real = out[q.structure.offsets[2] :]  # the second example has no keys
    assert (real - 1).abs().max() > 0.1
    assert abs(real.mean() - 1) < 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rectangles, "LAUNCH", 1)
    layer = nn.Conv2d(4, 6, 3, stride=2, padding=1, dtype=DOUBLE)
    rows = [torch.randn(4, *size, dtype=DOUBLE) for size in SIZES]
    want = [layer(row[None])[0].cuda() for row in rows]
    x = tdc.pack(rows, ragged_dim=(2, 3)).cuda()
    torch.testing.assert_close(list(layer.cuda()(x).unbind()), want)
    lengths = (3, 17, 9, 30)
    q, mask = tdc.pack([torch.randn(HEADS, n, 16) for n in lengths], ragged_dim=2), torch.randn(30, 30)
    found = [F.scaled_dot_product_attention(t, t, t, mask.to(t.device)) for t in (q, q.cuda())]
    torch.testing.assert_close(found[0].values, found[1].values.cpu(), rtol=1e-4, atol=1e-5)


def watched(fn: Callable[..., Any], *args: Any) -> tuple[Any, list[str]]:
    """The result of a call that waits for no device, and the operations that it runs."""
    ran: list[str] = []
    with forbid(padding=False, loops=False, syncs=True), watching(lambda op, args, kwargs: ran.append(str(op))):
        return fn(*args), ran


@pytest.mark.parametrize(("side", "counts"), [(224, [2, 2, 2]), (40, [1, 1, 1])], ids=["large", "small"])
def test_nothing_is_read_on_a_device(side: int, counts: list[int]):
    """Sizes of results stay known, so that each layer chooses its rectangles; small planes go in one."""
    layers: Any = [nn.Conv2d(256, 256, 3, padding=1), nn.Conv2d(256, 256, 3, stride=2), nn.Conv2d(256, 256, 3)]
    sides = [(side // 4, side // 4), (side // 4, side // 4 - 2), (side, side), (side - 4, side)] * 2
    with fake_cuda():
        x = on_fake_cuda(tdc.pack([torch.zeros(256, *size) for size in sides], ragged_dim=(2, 3)))
        found = []
        for layer in layers:
            weight, bias = on_fake_cuda((layer.weight, layer.bias))
            x, ran = watched(F.conv2d, x, weight, bias, layer.stride, layer.padding)
            found.append(sum("convolution" in op for op in ran))
    assert found == counts


def test_masked_attention_reads_nothing_on_a_device():
    """And layers that share a structure share what says where rectangles lie."""
    x = tdc.pack([torch.zeros(n, 16, 64) for n in (8, 16, 8, 512, 480, 500) * 8]).transpose(1, 2)
    with fake_cuda():
        q, mask = on_fake_cuda((x, torch.zeros(512, 512)))
        q, first = watched(F.scaled_dot_product_attention, q, q, q, mask, 0.1)
        _, second = watched(F.scaled_dot_product_attention, q, q, q, mask, 0.1)
    assert sum("softmax" in op or "attention" in op for op in second) == 2  # by torch's kernel where there is a GPU
    assert any("sort" in op for op in first)
    assert not any("sort" in op or "bucketize" in op for op in second)
