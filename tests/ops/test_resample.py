"""Stock modules of resampling on batches of signals and images of different sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_conv import batches, rows
from torch import nn

import tdc
from tdc import DtypeError, ShapeError, UnsupportedError

F: Any = torch.nn.functional


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("module", [
    nn.Upsample(scale_factor=2), nn.UpsamplingBilinear2d(scale_factor=1.5), nn.Upsample(scale_factor=(0.5, 2)),
    nn.Upsample(scale_factor=2, mode="bicubic"),
], ids=repr)  # fmt: skip
def test_rows_are_scaled_by_themselves(kind: int, module: nn.Module):
    parts = rows(2)
    out = module(batches(parts)[kind])
    torch.testing.assert_close(list(out.unbind()), [module(row[None])[0] for row in parts])


@pytest.mark.parametrize("kind", [0, 1])
def test_thumbnails_of_one_size(kind: int):
    parts, module = rows(2), nn.Upsample((3, 8), mode="bilinear")
    torch.testing.assert_close(module(batches(parts)[kind]), torch.cat([module(row[None]) for row in parts]))


def test_a_scale_that_is_whole_reads_no_lengths():
    packed = batches(rows(2))[0]
    out = F.interpolate(packed, scale_factor=2)
    assert out.values.shape[1] == 4 * packed.values.shape[1]
    assert out.max_length == 2 * packed.max_length


def test_blocks_of_images():
    parts, unfold = rows(2), nn.Unfold((2, 3), padding=1)
    for x in batches(parts):
        out = unfold(x)
        assert out.ragged_dims == (2,)
        torch.testing.assert_close(list(out.unbind()), [unfold(row) for row in parts])


@pytest.mark.slow
def test_an_autoencoder_is_one_graph_for_all_sizes():
    net = nn.Sequential(nn.Conv1d(4, 3, 2, stride=2), nn.Upsample(scale_factor=2, mode="linear"), nn.Conv1d(3, 1, 1))
    step = tdc.compile.counted(net, backend="aot_eager")
    for lengths in ((7, 9, 6), (11, 8)):
        parts = [torch.randn(4, n) for n in lengths]
        out = step(batches(parts)[0])
        torch.testing.assert_close(list(out.unbind()), [net(row[None])[0] for row in parts])
    assert (step.counts.graphs, step.counts.compiles) == (1, 1)


def test_what_resampling_refuses():
    x = batches(rows(2))[0]
    with pytest.raises(ShapeError, match=r"tdc.interpolate: expected one of size and scale_factor, got none"):
        F.interpolate(x)
    with pytest.raises(ShapeError, match=r"tdc.interpolate: expected one number for each of 2 dims, got \(1, 2, 3\)"):
        F.interpolate(x, (1, 2, 3))
    wrong: Any = "a"
    with pytest.raises(DtypeError, match=r"tdc.interpolate: expected a number, got str"):
        F.interpolate(x, scale_factor=wrong)
    with pytest.raises(ShapeError, match=r"a mode for 2 dims behind the channels, got 'linear' for NestedTensor"):
        F.interpolate(x, 3, mode="linear")
    with pytest.raises(ShapeError, match=r"tdc.interpolate: expected align_corners for a linear or cubic mode"):
        F.interpolate(x, 3, align_corners=True)
    with pytest.raises(UnsupportedError, match=r"tdc.interpolate: expected antialias=False"):
        F.interpolate(x, 3, mode="bilinear", antialias=True)
    with pytest.raises(DtypeError, match=r"tdc.interpolate: expected floating point for 'bilinear', got NestedTensor"):
        F.interpolate(x.long(), 3, mode="bilinear")
    with pytest.raises(ShapeError, match=r"tdc.interpolate: expected rows of at least 10 x 10 for scales 0.1 x 0.1"):
        F.interpolate(x, scale_factor=0.1)
    with pytest.raises(ShapeError, match=r"tdc.grid_sample: expected a dense grid \(B, ..., 2\), got NestedTensor"):
        F.grid_sample(x, x)
    with pytest.raises(UnsupportedError, match=r"tdc.grid_sample: expected bicubic with zeros, got 'border'"):
        F.grid_sample(x, torch.zeros(3, 1, 1, 2), "bicubic", "border", False)
