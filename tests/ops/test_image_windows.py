"""Windows and masked patches of images of different sizes, against a loop over examples."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Counter
from torch import Tensor
from torch.testing import assert_close

import tdc
from tdc.ops import random_masking, window_partition, window_unpartition

functional: Any = F  # whose types know tensors only
SIZES = (((5, 3), (4, 9), (1, 1)), ((8, 8), (3, 2)), ((2, 7), (6, 6), (9, 4), (1, 5)))


def images(sizes: Any, padded: bool, dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], Any, Tensor]:
    """Images that require grad, a batch of copies, NaN in padding, and its leaf."""
    rows = [torch.randn(2, *size).to(dtype).requires_grad_() for size in sizes]
    return rows, *batch(rows, padded, (2, 3))


def batch(rows: list[Tensor], padded: bool, dims: Any = 1) -> tuple[Any, Tensor]:
    x: Any = tdc.pack([r.detach() for r in rows], ragged_dim=dims)
    x = x.to_padded(float("nan")) if padded else x
    leaf = (x.data if padded else x.values).detach().requires_grad_()
    return (x.with_data(leaf) if padded else x.with_values(leaf)), leaf


def by_row(x: Any, grad: Tensor) -> list[Tensor]:
    return list((x.with_data(grad) if isinstance(x, tdc.MaskedBatch) else x.with_values(grad)).unbind())


def one_partition(image: Tensor, h: int, w: int) -> Tensor:
    """(C, H, W) -> (P, C, h, w), as Segment Anything does it."""
    image = F.pad(image, (0, -image.shape[2] % w, 0, -image.shape[1] % h))
    rows = [image[:, i : i + h, j : j + w] for i in range(0, image.shape[1], h) for j in range(0, image.shape[2], w)]
    return torch.stack(rows)


def both(x: Any) -> tuple[Any, Any]:
    windows = window_partition(x, (3, 2))
    return windows, window_unpartition(windows.sin(), x)


@pytest.mark.parametrize("in_graph", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "graph"])
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_windows_and_back(padded: bool, in_graph: bool):
    count = Counter()
    run = torch.compile(both, fullgraph=True, backend=count) if in_graph else both
    for sizes in SIZES:
        rows, x, leaf = images(sizes, padded)
        want = [one_partition(r, 3, 2) for r in rows]
        grads = torch.autograd.grad(torch.stack([w.cos().sum() for w in want]).sum(), rows)
        windows, back = run(x)
        assert_close(list(windows.unbind()), want)
        assert_close(list(back.unbind()), [r.sin() for r in rows])
        assert_close(by_row(x, torch.autograd.grad(windows.cos().sum(), leaf)[0]), list(grads))
        found = torch.autograd.grad(run(x)[1].sum(), leaf)[0]
        assert_close(by_row(x, found), [r.detach().cos() for r in rows])
    assert count.graphs == in_graph


def test_windows_of_one_static_size_and_half():
    rows = [torch.randn(2, 4, n, dtype=torch.float16) for n in (3, 6)]
    x: Any = tdc.pack(rows, ragged_dim=3)
    windows = window_partition(x, 3)
    assert windows.dtype == torch.float16
    assert_close(list(windows.unbind()), [one_partition(r, 3, 3) for r in rows])
    assert_close(list(window_unpartition(windows, x).unbind()), rows)
    more = torch.cat([windows, windows], 2)
    assert_close(list(window_unpartition(more, x).unbind()), [r.repeat(2, 1, 1) for r in rows])


def one_masking(x: Tensor, ratio: float, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(L, D), as masked autoencoders do it."""
    order = noise.argsort()
    restore = order.argsort()
    keep = int(len(x) * (1 - ratio))
    removed = torch.ones(len(x), dtype=torch.bool)
    removed[:keep] = False
    return x[order[:keep]], removed[restore], restore


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])
def test_random_masking_in_one_graph(padded: bool):
    count = Counter()
    compiled = torch.compile(lambda x, noise: random_masking(x, 0.6, noise), fullgraph=True, backend=count)
    for lengths in ((5, 0, 8), (3, 1), (9, 2, 4, 7)):
        rows = [torch.randn(n, 3, requires_grad=True) for n in lengths]
        noises = [torch.rand(n) for n in lengths]
        want = [one_masking(r, 0.6, n) for r, n in zip(rows, noises, strict=True)]
        grads = torch.autograd.grad(torch.cat([w[0] for w in want]).sin().sum(), rows, materialize_grads=True)
        for run in (lambda x, noise: random_masking(x, 0.6, noise), compiled):
            x, leaf = batch(rows, padded)
            found = run(x, batch(noises, padded)[0].detach())
            for n in range(3):
                assert_close(list(found[n].unbind()), [w[n] for w in want])
            assert_close(by_row(x, torch.autograd.grad(found[0].sin().sum(), leaf)[0]), list(grads))
    assert count.graphs == 1


def test_restored_order():
    """Of what is kept, with one token for each position that was removed behind it."""
    x: Any = tdc.pack([torch.randn(n, 3) for n in (5, 1, 8)])
    kept, removed, restore = random_masking(x, 0.5)
    zeros: Any = torch.zeros_like(x)
    tokens = tdc.truncate(zeros, removed.sum(1))
    full = torch.cat([kept, tokens], 1)[:, restore]
    assert_close(full.values, x.values.masked_fill(removed.values[:, None], 0))
    assert not random_masking(x, 0)[1].values.any()
    assert random_masking(x, 1)[0].lengths.tolist() == [0, 0, 0]


def test_wrong_input():
    _, x, _ = images(SIZES[0], False)
    patches: Any = tdc.pack([torch.randn(n, 3) for n in (5, 2)])
    windows = window_partition(x, 2)
    wrong: Any = "2"
    cases: list[tuple[type, str, Any]] = [
        (tdc.DtypeError, "a NestedTensor or a MaskedBatch", lambda: window_partition(torch.ones(1, 2, 3, 3), 2)),
        (tdc.ShapeError, "2 dims behind channels", lambda: window_partition(patches, 2)),
        (tdc.ShapeError, "window_size", lambda: window_partition(x, 0)),
        (tdc.DtypeError, "window_partition", lambda: window_partition(x, wrong)),
        (tdc.DtypeError, "of images", lambda: window_unpartition(windows, x.to_padded())),
        (tdc.ShapeError, "windows .B, -1, D, h, w.", lambda: window_unpartition(x, x)),
        (tdc.StructureError, "as many parts as the images", lambda: window_unpartition(windows, x[:2])),
        (tdc.StructureError, "as many parts as the images", lambda: window_unpartition(windows[:2], x[1:])),
        (tdc.ShapeError, "a mask_ratio in", lambda: random_masking(patches, 1.5)),
        (tdc.DtypeError, "random_masking", lambda: random_masking(patches, wrong)),
        (tdc.ShapeError, "patches .B, -1, D.", lambda: random_masking(x, 0.5)),
        (tdc.StructureError, "", lambda: random_masking(patches, 0.5, tdc.pack([torch.rand(3), torch.rand(2)]))),
    ]
    for error, text, run in cases:
        with pytest.raises(error, match=text or "tdc"):
            run()


# -- blocks


def test_fold_is_the_adjoint_of_unfold():
    x = images(SIZES[0], False)[1].detach()
    blocks = functional.unfold(x, 2, 1, 1)
    other = blocks.with_values(torch.randn_like(blocks.values))
    back = functional.fold(other, x, 2, 1, 1)
    assert_close((blocks * other).values.sum(), (x * back).values.sum())
    assert back.structure is x.structure


@pytest.mark.parametrize(("change", "text"), [
    (lambda x, blocks: (blocks, (4, 4), 2), "a batch of images as output_size, got "),
    (lambda x, blocks: (blocks, x.to_padded(), 2), "a NestedTensor as output_size"),
    (lambda x, blocks: (blocks, x[:1], 2), "as many parts as the images have"),
    (lambda x, blocks: (blocks, x, 2, 1, 1), "as many parts as the images have"),
    (lambda x, blocks: (blocks[:, :7], x, 2), "channels that a kernel of 2 x 2 divides, got 7"),
    (lambda x, blocks: (x, x, 2), "blocks (B, C * k, -1)"),
    (lambda x, blocks: (blocks, x[:, :, :1], 2), "rows of at least 2 x 2"),
], ids=["one size", "padded", "fewer", "other padding", "channels", "images", "small"])  # fmt: skip
def test_wrong_blocks(change: Any, text: str):
    x = images(((5, 3), (4, 9)), False)[1].detach()
    with pytest.raises(tdc.TdcError, match=re.escape(f"tdc.fold: expected {text}")):
        functional.fold(*change(x, functional.unfold(x, 2)))
