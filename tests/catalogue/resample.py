"""Samples of resampling: interpolate, grid_sample, F.unfold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from harness import Call, Draw, Layout, Sample, call

from catalogue.conv import CHANNELS, FEW, FRAMES, IMAGE, PLAIN, ROWS, VOLUME, alone, batch, stacked
from tdc.core.rules import Rule
from tdc.testing.batches import Dense, Ragged


def sized(rule: Rule) -> Iterator[Sample]:
    """interpolate: rows of one size, scaled rows, and every mode in its dims."""

    def draw(layout: Layout, **kwargs: Any) -> Callable[[Draw], Call]:
        return lambda d: call(batch(d, layout), **kwargs)

    def lone(ref: Any, args: Any, kwargs: Any) -> Any:
        return alone(one_image(ref), args, kwargs)

    def same(ref: Any, args: Any, kwargs: Any) -> Any:
        return stacked(one_image(ref), args, kwargs)

    yield Sample("twice", draw(IMAGE, scale_factor=2, mode="bilinear"), lone)
    yield Sample("size", draw(IMAGE, size=(5, 4), mode="bilinear", align_corners=True), same)
    traced = (*PLAIN, "compile")
    yield Sample("fraction", draw(CHANNELS, scale_factor=0.7, mode="linear"), lone, traced)
    for mode in ("nearest", "nearest-exact", "area", "bicubic", "bilinear"):
        yield Sample(f"{mode} scaled", draw(IMAGE, scale_factor=(1.6, 0.5), mode=mode), lone, PLAIN)
        yield Sample(f"{mode} sized", draw(IMAGE, size=(2, 9), mode=mode), same, PLAIN)
    for mode in ("bicubic", "bilinear"):
        corners = draw(IMAGE, scale_factor=1.5, mode=mode, align_corners=True)
        yield Sample(f"{mode} corners", corners, lone, PLAIN)
        smooth = {"mode": mode, "antialias": True}
        yield Sample(f"{mode} antialias scaled", draw(IMAGE, scale_factor=(0.6, 1.5), **smooth), lone, PLAIN)
        yield Sample(f"{mode} antialias sized", draw(IMAGE, size=(2, 9), **smooth), same, traced)
        corners = draw(IMAGE, scale_factor=1.5, align_corners=True, **smooth)  # to one column torch is wrong
        yield Sample(f"{mode} antialias corners", corners, lone, PLAIN)
    again = draw(IMAGE, scale_factor=1.3, mode="bilinear", recompute_scale_factor=True)
    yield Sample("recomputed", again, lone, PLAIN)
    yield Sample("one place", draw(CHANNELS, size=1, mode="linear", align_corners=True), same, PLAIN)
    yield Sample("volume", draw(VOLUME, scale_factor=2, mode="trilinear"), lone, PLAIN)
    yield Sample("half", lambda d: call(batch(d, IMAGE, "half"), None, 2, "bilinear"), lone, ("eager",))
    frames = lambda d: call(d.ragged(FRAMES[2]), scale_factor=2)  # noqa: E731
    yield Sample("frames", frames, alone, PLAIN, batches=FEW)

    def another(mode: str, layout: Layout, **how: Any) -> Callable[[Draw], Call]:
        def draw(d: Draw) -> Call:
            x = batch(d, layout)
            rows = [d.tensor(2, *[n + 2 for n in r.shape[1:]]) for r in x.rows]
            return call(x, Ragged(rows, x.dims, slack=d.slack), mode=mode, **how)

        return draw

    def as_other(ref: Any, args: Any, kwargs: Any) -> Any:
        pairs = zip(args[0].rows, args[1].rows, strict=True)
        return args[1].with_rows([ref(row[None], other.shape[1:], **kwargs)[0] for row, other in pairs])

    for mode, layout in (("bilinear", IMAGE), ("nearest", IMAGE), ("linear", CHANNELS)):
        drawn = another(mode, layout)
        yield Sample(f"{mode}, of a batch", drawn, as_other, traced if mode == "bilinear" else PLAIN)
    yield Sample("antialias, of a batch", another("bicubic", IMAGE, antialias=True), as_other, PLAIN)


def one_image(ref: Any) -> Any:
    """An operation that knows batches of images only, on one of them."""
    return lambda row, *args, **kwargs: ref(row.unsqueeze(0), *args, **kwargs).squeeze(0)


def grid_sample(rule: Rule) -> Iterator[Sample]:
    """Places inside and outside each row's plane."""

    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        pairs = zip(args[0].rows, args[1].rows, strict=True)
        return torch.cat([ref(row[None], grid[None], *args[2:], **kwargs) for row, grid in pairs])

    def draw(*rest: Any) -> Callable[[Draw], Call]:
        def one(d: Draw) -> Call:
            grid = d.tensor(len(d.lengths), 3, 4, 2)
            return call(batch(d, IMAGE), Dense(grid, list(grid.unbind())), *rest)

        return one

    yield Sample("plain", draw("bilinear", "zeros", False), want)
    for mode in ("bilinear", "nearest"):
        for padding in ("zeros", "border", "reflection"):
            for corners in (False, True):
                yield Sample(f"{mode} {padding} {corners}", draw(mode, padding, corners), want, PLAIN)
    yield Sample("bicubic", draw("bicubic", "zeros", True), want, PLAIN)


def unfold(rule: Rule) -> Iterator[Sample]:
    """Blocks of images of which one dim or both are ragged."""

    def listed(ref: Any, args: Any, kwargs: Any) -> Any:
        return Ragged(alone(ref, args, kwargs).rows, (2,))

    yield Sample("plain", lambda d: call(batch(d, IMAGE), 2), listed)
    yield Sample("padded", lambda d: call(batch(d, IMAGE), (2, 3), 1, 1, (2, 1)), listed, PLAIN)
    yield Sample("one ragged", lambda d: call(batch(d, ROWS), 2, 2), listed, PLAIN)
    yield Sample("static first", lambda d: call(batch(d, Layout((4, 5), ())), 2, 2), listed, PLAIN)


def fold(rule: Rule) -> Iterator[Sample]:
    """Blocks put together to images of which one dim or both are ragged."""

    def draw(layout: Layout, *how: Any) -> Callable[[Draw], Call]:
        def one(d: Draw) -> Call:
            images = batch(d, layout)
            blocks = [d.tensor(*F.unfold(row[None], *how)[0].shape) for row in images.rows]
            return call(Ragged(blocks, (2,), slack=d.slack), images, *how)

        return one

    def put(ref: Any, args: Any, kwargs: Any) -> Any:
        blocks, images, *how = args
        pairs = zip(blocks.rows, images.rows, strict=True)
        return images.with_rows([ref(row, image.shape[1:], *how) for row, image in pairs])

    yield Sample("plain", draw(IMAGE, 2), put)
    yield Sample("padded", draw(IMAGE, (2, 3), 1, 1, (2, 1)), put, PLAIN)
    yield Sample("far apart", draw(IMAGE, 2, (1, 2), 1, 2), put, PLAIN)
    yield Sample("one ragged", draw(ROWS, 2, 1, 0, 2), put, PLAIN)


def affine_grid(rule: Rule) -> Iterator[Sample]:
    """Refused, so that only the call matters."""
    yield Sample("any", lambda d: call(d.ragged("last"), [1, 1, 2, 2]), lambda ref, args, kwargs: args[0])


RAGGED: dict[str, Callable[[Rule], Iterator[Sample]]] = {
    "interpolate": sized, "grid_sample": grid_sample, "affine_grid": affine_grid, "fold": fold,
}  # fmt: skip
