"""Samples of convolution, pooling and resampling: channels are dim 1, the dims behind them have neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from harness import DEVICE, Call, Draw, Layout, Sample, call
from torch import Tensor

from tdc.core.rules import Rule
from tdc.testing.batches import Ragged

CHANNELS = Layout((4,), ())
IMAGE = Layout((4,), (), 2)
ROWS = Layout((4,), (6,))
VOLUME = Layout((4, 3), (), 2)
CUBE = Layout((4,), (), 3)
FRAMES = {1: Layout((), (4, 5)), 2: Layout((), (4, 3, 5)), 3: Layout((), (4, 3, 3, 3))}
PLAIN = ("eager", "grad")
NEW = torch.__version__ >= "2.12"  # torch 2.11 makes a graph for sizes that the stride of a pool divides, and one more
STRIDE = None if NEW else 1
TRACED = (*PLAIN, "compile") if NEW else PLAIN
FEW = ((3, 1, 5), (2, 4))
LAYOUTS = {1: CHANNELS, 2: IMAGE, 3: VOLUME}


def spans(d: Draw) -> tuple[int, ...]:
    """Lengths that a kernel fits into, whatever the harness asks for."""
    return tuple(n + 3 for n in d.lengths)


def batch(d: Draw, layout: Layout, domain: str = "real") -> Ragged:
    """Images are at least 3 x 3."""
    lengths = spans(d)
    if layout.ragged == 1:
        return d.ragged(layout, domain, lengths=lengths)
    sizes = [(n, n % 3 + 3, n % 2 + 3)[: layout.ragged] for n in lengths]
    rows = [d.tensor(*layout.before, *size, *layout.after, domain=domain) for size in sizes]
    return Ragged(rows, layout.dims, extent=True, slack=d.slack)


def alone(ref: Any, args: Any, kwargs: Any) -> Any:
    """Expect each example by itself; a tensor where all of them come out alike by the layout of the operation."""
    x, *rest = args
    results = [ref(row, *[r.rows[i] if isinstance(r, Ragged) else r for r in rest], **kwargs)
               for i, row in enumerate(x.rows)]  # fmt: skip
    if isinstance(results[0], tuple):
        return tuple([x.with_rows(list(column)) for column in zip(*results, strict=True)])
    return x.with_rows(results)


def conv(rule: Rule) -> Iterator[Sample]:
    """Strides, dilation, groups, both kinds of padding, and every layout of the dims."""
    n = int(rule.name[-2])
    turned = "transpose" in rule.name

    def weight(d: Draw, *kernel: int, groups: int = 1) -> Tensor:
        return d.tensor(4, 2, *kernel) if turned else d.tensor(2, 4 // groups, *kernel)

    def plain(d: Draw) -> Call:
        return call(batch(d, LAYOUTS[n]), weight(d, *[2] * n), d.tensor(2))

    def strided(d: Draw) -> Call:
        bias = d.tensor(4 if turned else 2)
        more: dict[str, Any] = {"output_padding": 1} if turned else {"dilation": 2}
        return call(batch(d, LAYOUTS[n]), weight(d, *[3] * n, groups=2), bias, stride=2, padding=2, groups=2, **more)

    yield Sample("plain", plain, alone, (*PLAIN, "vmap", "compile"))
    yield Sample("strided", strided, alone)
    if not turned:
        for padding in ("same", "valid"):
            draw = lambda d, p=padding: call(batch(d, LAYOUTS[n]), weight(d, *[3] * n), padding=p)  # noqa: E731
            yield Sample(padding, draw, alone, PLAIN)
    if n == 2:
        yield Sample("one ragged", lambda d: call(batch(d, ROWS), weight(d, 3, 2), stride=(1, 2)), alone, PLAIN)
    frames = lambda d: call(d.ragged(FRAMES[n]), weight(d, *[2] * n))  # noqa: E731
    yield Sample("frames", frames, alone, PLAIN, batches=FEW)


def max_pool(rule: Rule) -> Iterator[Sample]:
    """Windows with and without ceil_mode, indices, ties."""
    n = int(rule.name.split("pool")[1][0])
    layout = LAYOUTS[n]
    more: dict[str, Any] = {} if "indices" in rule.name else {"return_indices": True}
    plain = lambda d: call(batch(d, layout), 2, STRIDE)  # noqa: E731
    yield Sample("plain", plain, alone)
    padded = lambda d: call(batch(d, layout), 3, 2, 1, 1, True, **more)  # noqa: E731
    yield Sample("ceil", padded, alone, TRACED)
    yield Sample("dilated", lambda d: call(batch(d, layout), 2, 1, 0, 2, **more), alone, PLAIN)
    yield Sample("same", lambda d: call(batch(d, layout), 3, 1, 1), alone, PLAIN)
    yield Sample("frames", lambda d: call(d.ragged(FRAMES[n]), 2, **more), alone, PLAIN, batches=FEW)
    if n == 2:
        yield Sample("one ragged", lambda d: call(batch(d, ROWS), 2, (1, 2), **more), alone, PLAIN)
        yield Sample("whole numbers", lambda d: call(batch(d, layout, "int"), 2, 2, 1, **more), alone, PLAIN)


def avg_pool(rule: Rule) -> Iterator[Sample]:
    """What a window counts: padding, the place behind it that ceil_mode adds, a given divisor."""
    n = int(rule.name[-2])
    layout = LAYOUTS[n]
    yield Sample("plain", lambda d: call(batch(d, layout), 2, STRIDE), alone)
    uncounted = lambda d: call(batch(d, layout), 3, 2, 1, True, False)  # noqa: E731
    yield Sample("uncounted", uncounted, alone, TRACED)
    yield Sample("ceil", lambda d: call(batch(d, layout), 3, 2, 1, True), alone, PLAIN)
    yield Sample("ceil 2", lambda d: call(batch(d, layout), 2, 2, 0, True), alone, PLAIN)
    yield Sample("padding", lambda d: call(batch(d, layout), 3, 1, 1, False, False), alone, PLAIN)
    if n < 3:  # torch has no average of half precision in three dims on CPU
        yield Sample("half", lambda d: call(batch(d, layout, "half"), 3, 2, 1, True), alone, ("eager",))
    yield Sample("frames", lambda d: call(d.ragged(FRAMES[n]), 2), alone, PLAIN, batches=FEW)
    if n > 1:
        divisor = lambda d: call(batch(d, layout), 2, 2, 1, True, divisor_override=3)  # noqa: E731
        yield Sample("divisor", divisor, alone, PLAIN)
    if n == 3:
        yield Sample("three ragged", lambda d: call(batch(d, CUBE), 3, 2, 1, True, False), alone, PLAIN)


def lp_pool(rule: Rule) -> Iterator[Sample]:
    n = int(rule.name[-2])
    yield Sample("plain", lambda d: call(batch(d, LAYOUTS[n], "positive"), 2, 2, STRIDE), alone)
    draw = lambda d: call(batch(d, LAYOUTS[n], "positive"), 3, 3, 2, True)  # noqa: E731
    yield Sample("ceil", draw, alone, PLAIN)
    if n == 3:
        yield Sample("three ragged", lambda d: call(batch(d, CUBE, "positive"), 3, 3, 2), alone, PLAIN)


def adaptive(rule: Rule) -> Iterator[Sample]:
    """More bins than elements, fewer, and dims that are kept."""
    n = int(rule.name.split("pool")[1][0])
    layout = LAYOUTS[n]
    more: dict[str, Any] = {"return_indices": True} if "max" in rule.name and "indices" not in rule.name else {}
    yield Sample("few", lambda d: call(batch(d, layout), 2), stacked)
    yield Sample("many", lambda d: call(batch(d, layout), 7, **more), stacked, (*PLAIN, "compile"))
    frames = lambda d: call(d.ragged(FRAMES[n]), 2, **more)  # noqa: E731
    yield Sample("frames", frames, alone, PLAIN, batches=FEW)
    if "indices" not in rule.name:  # which of several NaN is found is nobody's promise
        special = lambda d: call(batch(d, layout, "special"), 3)  # noqa: E731
        yield Sample("special", special, stacked, ("eager",))
    if n > 1:
        size = (None, 2) if n == 2 else (3, None, 2)
        yield Sample("kept", lambda d: call(batch(d, layout), size, **more), kept, PLAIN)
    if n == 3:
        yield Sample("three ragged", lambda d: call(batch(d, CUBE), 2, **more), stacked, PLAIN)


def stacked(ref: Any, args: Any, kwargs: Any) -> Any:
    """Expect examples of one size: a dense result."""
    out = alone(ref, args, kwargs)
    return tuple([torch.stack(part.rows) for part in out]) if isinstance(out, tuple) else torch.stack(out.rows)


def kept(ref: Any, args: Any, kwargs: Any) -> Any:
    """Expect rows that are ragged along the dims without an output size only."""
    x, size = args
    out = alone(ref, args, kwargs)
    dims = tuple(d for d in x.dims if size[d - 2] is None)
    parts = [Ragged(part.rows, dims) for part in (out if isinstance(out, tuple) else (out,))]
    return tuple(parts) if isinstance(out, tuple) else parts[0]


def max_unpool(rule: Rule) -> Iterator[Sample]:
    """Places as max_pool finds them."""
    n = int(rule.name[-2])
    pool = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]

    def draw(d: Draw, kernel: int, stride: int, padding: int) -> Call:
        x = batch(d, LAYOUTS[n])
        whole = [torch.randn(4, *[(m - 1) * stride + kernel - 2 * padding for m in row.shape[1:]]) for row in x.rows]
        found = [pool(row, kernel, stride, padding, return_indices=True)[1] for row in whole]
        return call(x, replace(x, rows=found), kernel, stride, padding)

    yield Sample("plain", lambda d: draw(d, 2, 2, 0), alone)
    yield Sample("stride", lambda d: draw(d, 2, 3, 1), alone, PLAIN)
    if DEVICE == "cpu":  # elsewhere any of the elements that have one position may be the last
        yield Sample("overlap", lambda d: draw(d, 3, 2, 1), alone, PLAIN)


def random(rule: Rule) -> Iterator[Sample]:
    n = int(rule.name.split("pool")[1][0])
    yield Sample("any", lambda d: call(batch(d, LAYOUTS[n]), 2, output_ratio=(0.5,) * n), alone)


NAMES = ("{}1d", "{}2d", "{}3d")
RAGGED: dict[str, Callable[[Rule], Iterator[Sample]]] = {
    "conv": conv, "pool": random,
    **{form.format("max_pool") + tail: max_pool for form in NAMES for tail in ("", "_with_indices")},
    **{form.format("adaptive_max_pool") + tail: adaptive for form in NAMES for tail in ("", "_with_indices")},
    **{form.format("adaptive_avg_pool"): adaptive for form in NAMES},
    **{form.format("avg_pool"): avg_pool for form in NAMES},
    **{form.format("lp_pool"): lp_pool for form in NAMES},
    **{form.format("max_unpool"): max_unpool for form in NAMES},
}  # fmt: skip
