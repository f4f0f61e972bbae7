"""Stock modules of resampling on batches of signals and images of different sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import Counter
from test_conv import batches, rows

import tdc
from tdc import DtypeError, ShapeError, UnsupportedError

F: Any = torch.nn.functional


SCALED = [(1, "linear"), (2, "bilinear"), (3, "trilinear")]
OTHERS = [(1, "nearest"), (2, "nearest"), (3, "nearest"), (2, "nearest-exact"), (2, "bicubic"), (2, "area")]


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("recompute", [None, False, True])
@pytest.mark.parametrize(("n", "mode"), SCALED + OTHERS)
def test_a_scale_that_leaves_or_doubles_some_sizes_is_what_torch_makes_of_each_row(
    kind: int, recompute: bool | None, n: int, mode: str
):
    torch.manual_seed(0)
    sizes = [(5, 3, 2), (2, 12, 5), (9, 9, 9), (11, 2, 8)]
    parts = [torch.randn(2, *size[:n]) for size in sizes]
    x = tdc.pack(parts, ragged_dim=tuple(range(2, 2 + n)))
    batch = x.to_padded(fill=float("nan")) if kind else x
    for scales in ((1.1, 1.1, 1.1), (1.1, 2.1, 0.8), (2.3, 2.3, 2.3), (2, 1.1, 1)):
        given: dict[str, Any] = {"scale_factor": scales[:n], "mode": mode, "recompute_scale_factor": recompute}
        want = [F.interpolate(row[None], **given)[0] for row in parts]
        torch.testing.assert_close(list(F.interpolate(batch, **given).unbind()), want)


def test_nearest_copies_what_stays_only_where_torch_does():
    parts = [torch.randn(1, 64, 64), torch.randn(1, 65, 64), torch.randn(1, 6, 200)]
    out = F.interpolate(tdc.pack(parts, ragged_dim=(2, 3)), scale_factor=1.004)
    torch.testing.assert_close(out.unbind(), [F.interpolate(row[None], scale_factor=1.004)[0] for row in parts])


def test_a_scale_that_leaves_some_sizes_has_the_gradient_of_each_row():
    parts = [torch.randn(2, n, m, requires_grad=True) for n, m in ((5, 12), (11, 3))]
    out = F.interpolate(tdc.pack(parts, ragged_dim=(2, 3)), scale_factor=1.1, mode="bilinear")
    alone = [F.interpolate(row[None], scale_factor=1.1, mode="bilinear")[0] for row in parts]
    got = torch.autograd.grad(sum([row.square().sum() for row in out.unbind()]), parts)
    torch.testing.assert_close(got, torch.autograd.grad(sum([row.square().sum() for row in alone]), parts))


@pytest.mark.slow
def test_one_graph_for_scales_that_leave_some_sizes():
    step = tdc.compile.counted(lambda x: F.interpolate(x, scale_factor=1.1, mode="bilinear"), backend="aot_eager")
    for sizes in (((5, 12), (11, 3)), ((4, 4), (9, 8), (13, 2))):
        parts = [torch.randn(2, *size) for size in sizes]
        out = step(tdc.pack(parts, ragged_dim=(2, 3)))
        alone = [F.interpolate(row[None], scale_factor=1.1, mode="bilinear")[0] for row in parts]
        torch.testing.assert_close(list(out.unbind()), alone)
    assert (step.counts.graphs, step.counts.compiles) == (1, 1)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("padding", ["border", "reflection"])
def test_a_grid_has_no_slope_on_the_ends_of_a_row(kind: int, align: bool, padding: str):
    parts = rows(2)
    ends = [[(at * 2 + 1) / size - 1 for at in (0, size - 1)] for size in (7, 5, 4, 9, 6)]  # the middles of elements
    where = [-1.0, 1.0, 0.13, -0.37, 2.57, -3.41, *[end for pair in ends for end in pair]]
    line = torch.tensor(where, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line).expand(3, 1, -1, 2).clone().requires_grad_()
    batch = batches([row.double() for row in parts])[kind]
    out = F.grid_sample(batch, grid, "bilinear", padding, align)
    alone = torch.cat([
        F.grid_sample(row.double()[None], grid[i : i + 1], "bilinear", padding, align) for i, row in enumerate(parts)
    ])  # fmt: skip
    torch.testing.assert_close(out, alone)
    got, want = [torch.autograd.grad(y.square().sum(), grid)[0] for y in (out, alone)]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_a_grid_of_all_elements_has_the_slopes_of_torch(kind: int, padding: str):
    parts = [torch.randn(2, 6, 8), torch.randn(2, 6, 8)]
    for align in (True, False):
        grid = F.affine_grid(torch.eye(2, 3).expand(2, 2, 3), [2, 1, 6, 8], align_corners=align).requires_grad_()
        out = F.grid_sample(batches(parts)[kind], grid, "bilinear", padding, align)
        alone = F.grid_sample(torch.stack(parts), grid, "bilinear", padding, align)
        got, want = [torch.autograd.grad(y.square().sum(), grid)[0] for y in (out, alone)]
        torch.testing.assert_close(got, want)


def test_a_scale_that_is_whole_reads_no_lengths():
    packed = batches(rows(2))[0]
    out = F.interpolate(packed, scale_factor=2)
    assert out.values.shape[1] == 4 * packed.values.shape[1]
    assert out.max_length == 2 * packed.max_length


def test_what_resampling_refuses():
    x = batches(rows(2))[0]
    with pytest.raises(ShapeError, match=r"tdc.interpolate: expected one of size and scale_factor, got none"):
        F.interpolate(x)
    with pytest.raises(ShapeError, match=r"tdc.interpolate: expected one number for each of 2 dims, got \(1, 2, 3\)"):
        F.interpolate(x, (1, 2, 3))
    for scale in (float("inf"), float("nan"), (2, float("inf"))):
        with pytest.raises(ShapeError, match=r"tdc.interpolate: expected scale_factor above 0 and finite, got \("):
            F.interpolate(x, scale_factor=scale)
    wrong: Any = "a"
    with pytest.raises(DtypeError, match=r"tdc.interpolate: expected a number, got str"):
        F.interpolate(x, scale_factor=wrong)
    with pytest.raises(ShapeError, match=r"a mode for 2 dims behind the channels, got 'linear' for NestedTensor"):
        F.interpolate(x, 3, mode="linear")
    with pytest.raises(ShapeError, match=r"tdc.interpolate: expected align_corners for a linear or cubic mode"):
        F.interpolate(x, 3, align_corners=True)
    with pytest.raises(ShapeError, match=r"tdc.interpolate: expected a mode with a filter for antialias=True"):
        F.interpolate(x, 3, mode="nearest", antialias=True)
    with pytest.raises(DtypeError, match=r"tdc.interpolate: expected floating point for 'bilinear', got NestedTensor"):
        F.interpolate(x.long(), 3, mode="bilinear")
    with pytest.raises(ShapeError, match=r"tdc.interpolate: expected rows of at least 10 x 10 for scales 0.1 x 0.1"):
        F.interpolate(x, scale_factor=0.1)
    with pytest.raises(ShapeError, match=r"tdc.grid_sample: expected a dense grid \(B, ..., 2\), got NestedTensor"):
        F.grid_sample(x, x)
    with pytest.raises(UnsupportedError, match=r"tdc.grid_sample: expected bicubic with zeros, got 'border'"):
        F.grid_sample(x, torch.zeros(3, 1, 1, 2), "bicubic", "border", False)


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialias(kind: int, mode: str):
    """Results and gradients of a loop: sizes in common, scales, recomputed ones, those of a batch, corners."""
    torch.manual_seed(0)
    parts = [torch.randn(2, *size, requires_grad=True) for size in ((5, 3), (2, 12), (9, 9), (11, 2))]
    others = [torch.randn(1, *size) for size in ((2, 7), (3, 3), (4, 2), (1, 3))]
    as_others = tdc.pack(others, ragged_dim=(2, 3))
    x: Any = tdc.pack([p.detach() for p in parts], ragged_dim=(2, 3))
    x = x.to_padded(fill=float("nan")) if kind else x
    leaf = (x.data if kind else x.values).detach().requires_grad_()
    batch = x.with_data(leaf) if kind else x.with_values(leaf)
    cases: list[dict[str, Any]] = [
        {"size": (4, 3)}, {"size": (2, 20), "align_corners": True}, {"scale_factor": (0.55, 1.5)}, {"scale_factor": 2},
        {"scale_factor": 1.3, "recompute_scale_factor": True}, {"size": None},
    ]  # fmt: skip
    for case in cases:
        given = {"mode": mode, "antialias": True, **case}
        if "size" in given and given["size"] is None:
            got = F.interpolate(batch, **{**given, "size": as_others.to_padded() if kind else as_others})
            sizes = [{**given, "size": o.shape[1:]} for o in others]
        else:
            got, sizes = F.interpolate(batch, **given), [given] * 4
        want = [F.interpolate(p[None], **s)[0] for p, s in zip(parts, sizes, strict=True)]
        torch.testing.assert_close(list(got.unbind()), want, atol=1e-5, rtol=1e-5)
        grads = torch.autograd.grad(torch.stack([w.sin().sum() for w in want]).sum(), parts)
        (found,) = torch.autograd.grad(got.sin().sum(), leaf)
        by_row = (x.with_data(found) if kind else x.with_values(found)).unbind()
        torch.testing.assert_close(list(by_row), list(grads), atol=1e-5, rtol=1e-5)


def test_antialias_copies_sizes_that_stay_as_torch_does():
    """Whose gradient torch 2.13 gets wrong there."""
    parts = [torch.randn(2, *size) for size in ((5, 3), (4, 12))]
    for mode in ("bilinear", "bicubic"):
        given: dict[str, Any] = {"scale_factor": (0.55, 1.1), "mode": mode, "antialias": True}
        want = [F.interpolate(p[None], **given)[0] for p in parts]
        torch.testing.assert_close(list(F.interpolate(tdc.pack(parts, ragged_dim=(2, 3)), **given).unbind()), want)


@pytest.mark.sweep
@pytest.mark.slow
def test_antialias_in_one_graph_and_half():
    count = Counter()
    compiled = torch.compile(
        lambda x: F.interpolate(x, scale_factor=0.5, mode="bicubic", antialias=True), fullgraph=True, backend=count
    )
    for sizes in (((5, 4), (2, 12)), ((9, 9), (4, 5), (3, 7)), ((6, 6), (4, 9))):
        parts = [torch.randn(2, *size) for size in sizes]
        want = [F.interpolate(p[None], scale_factor=0.5, mode="bicubic", antialias=True)[0] for p in parts]
        torch.testing.assert_close(list(compiled(tdc.pack(parts, ragged_dim=(2, 3))).unbind()), want)
    assert count.graphs == 1
    half = tdc.pack([p.bfloat16() for p in parts], ragged_dim=(2, 3))
    out = F.interpolate(half, size=(3, 2), mode="bilinear", antialias=True)
    want = torch.cat([F.interpolate(p[None], size=(3, 2), mode="bilinear", antialias=True) for p in parts])
    torch.testing.assert_close(out, want.bfloat16(), atol=2e-2, rtol=2e-2)
