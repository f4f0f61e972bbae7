"""Stock modules of convolution and pooling on batches of sequences and images of different sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tdc
from tdc import ShapeError, StructureError, UnsupportedError

F: Any = torch.nn.functional
SIZES = ((7, 5), (4, 9), (6, 6))


def rows(n: int, seed: int = 0) -> list[Tensor]:
    """Examples of 4 channels with n dims behind them; the last two differ from example to example."""
    torch.manual_seed(seed)
    return [torch.randn(4, *(5,) * (n - 2), *size[:n]) for size in SIZES]


def batches(parts: list[Tensor]) -> list[Any]:
    n = parts[0].ndim - 1
    x = tdc.pack(parts, ragged_dim=tuple(range(max(2, n), n + 2)))
    return [x, x.to_padded(fill=float("nan"))]


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(4, 5, 3, padding=1), nn.GroupNorm(1, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(5, 3, 2), nn.GELU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, 2),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [0, 1])
def test_a_network_and_its_gradients(kind: int):
    net, parts = network(), rows(2)
    x = batches(parts)[kind]
    weights = list(net.parameters())
    out, want = net(x), torch.cat([net(row.unsqueeze(0)) for row in parts])
    torch.testing.assert_close(out, want)
    ours, theirs = [torch.autograd.grad(y.square().sum(), weights) for y in (out, want)]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_network_is_one_graph_for_all_sizes():
    net = nn.Sequential(nn.Conv1d(4, 3, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(3, 2, 2, stride=2))
    step = tdc.compile.counted(net, backend="aot_eager")
    for lengths in ((7, 9, 6), (11, 8), (6, 6, 14, 10)):
        parts = [torch.randn(4, n) for n in lengths]
        out = step(batches(parts)[0])
        torch.testing.assert_close(list(out.unbind()), [net(row) for row in parts])
        out.values.sum().backward()
    assert (step.counts.graphs, step.counts.compiles) == (1, 1)


def test_sizes_that_stay_keep_the_structure():
    packed, padded = batches(rows(2))
    same = nn.Conv2d(4, 2, 3, padding=1)
    assert same(packed).structure is packed.structure
    assert same(padded).lengths is padded.lengths
    assert F.max_pool2d(packed, 3, 1, 1).structure is packed.structure


def test_a_row_shorter_than_the_kernel():
    text = r"tdc.conv1d: expected rows of at least 5 for a kernel of 5, got a smaller one"
    for x in batches(rows(1)):
        with pytest.raises(ShapeError, match=text):
            nn.Conv1d(4, 2, 5)(x)
    with pytest.raises(ShapeError, match=r"at least 5 x 1 for a kernel of 5 x 1"):
        F.max_pool2d(batches(rows(2))[0], (5, 1))
    with pytest.raises(ShapeError, match=r"tdc.conv1d: expected rows of at least 40 for a kernel of 40"):
        nn.Conv1d(4, 2, 40)(batches(rows(1))[0])
    empty = tdc.pack([torch.ones(4, 3), torch.ones(4, 0)], ragged_dim=2)
    with pytest.raises(ShapeError, match=r"tdc.adaptive_avg_pool1d: expected rows of at least 1 for adaptive bins"):
        F.adaptive_avg_pool1d(empty, 2)


def test_other_layouts_are_refused():
    sequences = tdc.pack([torch.ones(n, 4) for n in (5, 6)])
    with pytest.raises(ShapeError, match=r"tdc.conv1d: expected \(B, C, -1\), 1 dim behind channels"):
        nn.Conv1d(4, 2, 3)(sequences)
    with pytest.raises(ShapeError, match=r"tdc.conv2d: expected \(B, C, -1, -1\), 2 dims behind channels"):
        nn.Conv2d(4, 2, 3)(batches(rows(1))[0])
    with pytest.raises(ShapeError, match=r"tdc.conv1d: expected a ragged batch as its input, got Tensor"):
        F.conv1d(torch.ones(1, 4, 5), batches(rows(1))[0])


def test_what_pooling_refuses():
    x = batches(rows(2))[0]
    with pytest.raises(UnsupportedError, match=r"tdc.max_unpool2d: expected no output_size"):
        F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=(7, 9))
    with pytest.raises(ShapeError, match=r"tdc.max_unpool2d: expected indices inside the result of each row"):
        F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)
    with pytest.raises(ShapeError, match=r"tdc.max_unpool2d: expected indices as max_pool gave them"):
        F.max_unpool2d(x, torch.zeros(1), 2)
    other = batches(rows(2)[::-1])[0].long()
    with pytest.raises(StructureError, match=r"tdc.max_unpool2d: expected operands of one ragged structure"):
        F.max_unpool2d(x, other, 2)
    with pytest.raises(ShapeError, match=r"tdc.adaptive_avg_pool2d: expected one number for each of 2 dims, got"):
        F.adaptive_avg_pool2d(x, (1, 2, 3))
    cubes = tdc.pack([torch.ones(2, 3, 4, 5)], ragged_dim=(2, 3, 4))
    with pytest.raises(ShapeError, match=r"expected ragged dims side by side, got one between them"):
        F.adaptive_avg_pool3d(cubes, (None, 2, None))
