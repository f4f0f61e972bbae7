"""Samples of reading, writing and cutting along every dim of ragged batches, row by row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from harness import Call, Draw, Layout, Sample, call
from torch import Tensor

from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Dense, Ragged

LIGHT = ("eager", "grad", "vmap")


def longer(d: Draw, layout: str | Layout = "features", by: int = 1, **options: Any) -> Ragged:
    """A batch whose rows have so many elements at least."""
    return d.ragged(layout, lengths=tuple([n + by for n in d.lengths]), **options)


def real(length: int, lengths: tuple[int, ...]) -> int:
    """How many places a row of an index has, where its row has any."""
    return length + 1 if length else 0


def places(d: Draw, row: Tensor, dim: int, count: int) -> Tensor:
    """A row of places along a dim of a row, of which there are `count`."""
    sizes = [count if i == dim else n for i, n in enumerate(row.shape)]
    return torch.randint(0, max(row.shape[dim], 1), sizes, generator=d.generator)


def distinct(d: Draw, row: Tensor, dim: int) -> Tensor:
    """Places along a dim of a row, each once."""
    return torch.rand(row.shape, generator=d.generator).argsort(dim)


def rowwise(ref: Any, args: Any, kwargs: Any, dim: int, like: Any) -> Ragged:
    """`ref(row, dim, *others)`, laid out as another argument."""
    x, _, *rest = args
    rows = []
    for i, row in enumerate(x.rows):
        own = [a.rows[i] if isinstance(a, (Ragged, Dense)) else a for a in rest]
        rows.append(ref(row, dim, *own, **kwargs))
    return Ragged(rows, like.dims, like.batch_dim)


def gather(rule: Rule) -> Iterator[Sample]:
    """Along a static dim, and along the ragged one with rows of other lengths or with as many places for all."""
    at = rule.name == "take_along_dim"

    def arguments(x: Ragged, dim: int, index: Any) -> Call:
        return call(x, index, dim) if at else call(x, dim, index)

    def ragged(d: Draw, layout: str, dim: int, grow: bool) -> Call:
        x = d.ragged(layout)
        rows = [places(d, r, dim, real(r.shape[dim], d.lengths) if grow else 2) for r in x.rows]
        return arguments(x, dim + 1, Ragged(rows, x.dims, slack=x.slack))

    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        x, index, dim = (args[0], args[1], args[2]) if at else (args[0], args[2], args[1])
        rows = [torch.gather(r, dim - 1, i) for r, i in zip(x.rows, index.rows, strict=True)]
        return Ragged(rows, index.dims) if isinstance(index, Ragged) else torch.stack(rows)

    def dense(d: Draw, layout: str, dim: int) -> Call:
        x = longer(d, layout)
        rows = [places(d, r, dim, 2) for r in x.rows]
        return arguments(x, dim + 1, Dense(torch.stack(rows), rows))

    yield Sample("ragged", lambda d: ragged(d, "features", 0, True), want)
    yield Sample("second, ragged", lambda d: ragged(d, "second", 1, True), want, LIGHT)
    yield Sample("static", lambda d: ragged(d, "features", 1, False), want)
    yield Sample("second, static", lambda d: ragged(d, "second", 0, False), want, LIGHT)
    yield Sample("dense", lambda d: dense(d, "second", 1), want)
    if at:
        yield Sample("broadcast", lambda d: broadcast(d), along, LIGHT)


def broadcast(d: Draw) -> Call:
    """One place for all features of an element."""
    x = d.ragged()
    rows = [places(d, r[:, :1], 0, len(r)) for r in x.rows]
    return call(x, Ragged(rows, x.dims, slack=x.slack), 1)


def along(ref: Any, args: Any, kwargs: Any) -> Ragged:
    x, index, dim = args
    return x.with_rows([torch.take_along_dim(r, i, dim - 1) for r, i in zip(x.rows, index.rows, strict=True)])


def scatter(rule: Rule) -> Iterator[Sample]:
    """Each place once, or several times where the operation says what then happens."""
    options = ("amax",) if rule.name == "scatter_reduce" else ()

    def ragged(d: Draw, layout: str, dim: int, value: Any = None) -> Call:
        x = d.ragged(layout)
        index = Ragged([distinct(d, r, dim) for r in x.rows], x.dims, slack=x.slack)
        src = d.ragged(layout) if value is None else value
        return call(x, dim + 1, index, src, *options)

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        return rowwise(ref, args, kwargs, args[1] - 1, args[0])

    def dense(d: Draw) -> Call:
        x = longer(d)
        rows = [places(d, r, 0, 1) for r in x.rows]
        return call(x, 1, Dense(torch.stack(rows), rows), stacked(d, len(rows), 1, 3), *options)

    yield Sample("ragged", lambda d: ragged(d, "features", 0), want)
    yield Sample("static", lambda d: ragged(d, "second", 2), want)

    def from_batch(d: Draw) -> Call:
        """A dense table and index, and a ragged source, of which each index takes the first elements."""
        source = longer(d, by=2)
        x, index = stacked(d, len(source.rows), 12, 3), [places(d, r, 0, 2) for r in source.rows]
        return call(x, 1, Dense(torch.stack(index), index), source, *options)

    def written(ref: Any, args: Any, kwargs: Any) -> Tensor:
        x, dim, index, source, *rest = args
        rows = zip(x.rows, index.rows, source.rows, strict=True)
        return torch.stack([ref(r, dim - 1, i, s[:2], *rest) for r, i, s in rows])

    yield Sample("dense", dense, want)
    yield Sample("dense, ragged source", from_batch, written, ("eager", "grad"))
    if rule.name == "scatter":
        yield Sample("number", lambda d: ragged(d, "features", 0, 2.5), want, LIGHT)


def stacked(d: Draw, *shape: int) -> Dense:
    """A dense operand with one entry for each row."""
    whole = d.tensor(*shape)
    return Dense(whole, list(whole.unbind()))


def index_write(rule: Rule) -> Iterator[Sample]:
    """Static places, places of every row, and rows of the batch."""
    options = ("amax",) if rule.name == "index_reduce" else ()
    index, fill = torch.tensor([1, 0]), rule.name == "index_fill"

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        return rowwise(ref, args, kwargs, args[1] - 1, args[0])

    def rows(ref: Any, args: Any, kwargs: Any) -> Ragged:
        x, _, where, source = args[:4]
        out = list(x.rows)
        for k, i in enumerate(where.tolist()):
            part = ref(out[i][None], 0, torch.tensor([0]), source if fill else source.rows[k][None], *options)
            out[i] = part[0]
        return x.with_rows(out)

    def source(d: Draw, x: Ragged, *shape: int) -> Any:
        return 1.5 if fill else stacked(d, len(x.rows), *shape)

    def static(d: Draw) -> Call:
        x = d.ragged("features")
        other = 1.5 if fill else Ragged([d.tensor(len(r), 2) for r in x.rows], slack=x.slack)
        return call(x, 2, index, other, *options)

    def whole(d: Draw) -> Call:
        x = d.ragged("second")
        other = 1.5 if fill else Ragged([d.tensor(*x.rows[i].shape) for i in (1, 0)], x.dims, slack=slack(x, (1, 0)))
        return call(x, 0, index, other, *options)

    yield Sample("static", static, want)
    yield Sample("ragged", lambda d: call(x := longer(d, by=2), 1, index, source(d, x, 2, 3), *options), want)
    modes = LIGHT if rule.kind == "masked" or fill else MODES
    yield Sample("rows", whole, rows, modes)


def slack(x: Ragged, rows: Any) -> int:
    """How much larger than the longest of some rows the rectangle of all of them is."""
    if not x.slack:
        return 0
    sizes = [r.shape[x.dims[0] - 1] for r in x.rows]
    return max(sizes) + x.slack - max([sizes[i] for i in rows])


def index_put(rule: Rule) -> Iterator[Sample]:
    """Rows and places, whole rows, and a mask."""

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        x, indices, value = args[:3]
        rows = list(x.rows)
        for k, i in enumerate(indices[0].tolist()):
            inner = tuple([t[k] for t in indices[1:]])
            part = (
                value
                if isinstance(value, float) or not value.ndim
                else value[k]
                if len(value) == len(indices[0])
                else value
            )
            rows[i] = ref(rows[i], inner, torch.as_tensor(part), **kwargs) if inner else rows[i] * 0 + part
        return x.with_rows(rows)

    def masked(ref: Any, args: Any, kwargs: Any) -> Ragged:
        x, (mask,), value = args
        return x.with_rows([torch.where(m[:, None], value, r) for r, m in zip(x.rows, mask.rows, strict=True)])

    pair = torch.tensor([1, 0]), torch.tensor([-1, 0])
    static = (torch.tensor([0, 1]), torch.tensor([1, 0]), torch.tensor([0, -1]), torch.tensor([2, 0]))
    yield Sample("places", lambda d: call(longer(d), pair, d.tensor(2, 3)), want)
    yield Sample("every dim", lambda d: call(longer(d, "second"), static, d.tensor(2)), want, LIGHT)
    yield Sample("twice", lambda d: call(longer(d), pair, d.tensor(2, 3), accumulate=True), want, LIGHT)
    yield Sample("whole rows", lambda d: call(d.ragged(), pair[:1], torch.tensor(2.0)), want)
    yield Sample("rows and static", lambda d: call(d.ragged("second"), static[:2], torch.tensor(2.0)), want, LIGHT)
    draw = lambda d: call(x := d.ragged(), (mask_of(d, x, False),), torch.tensor(2.0))  # noqa: E731
    yield Sample("mask", draw, masked, LIGHT)


def mask_of(d: Draw, x: Ragged, whole: bool = True) -> Ragged:
    """A mask over all dims of x, or over the first of each row."""
    rows = [torch.rand(r.shape if whole else r.shape[:1], generator=d.generator) > 0.5 for r in x.rows]
    return Ragged(rows, x.dims, slack=x.slack)


def take(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        x, index = args
        if isinstance(index, Ragged):
            return index.with_rows([ref(r, i) for r, i in zip(x.rows, index.rows, strict=True)])
        return torch.stack([ref(r, index) for r in x.rows])

    def ragged(d: Draw) -> Call:
        x = d.ragged()
        rows = [torch.randint(-r.numel(), r.numel(), (len(r) + 1,), generator=d.generator) if len(r) else
                torch.zeros(0, dtype=torch.int64) for r in x.rows]  # fmt: skip
        return call(x, Ragged(rows, (1,), slack=x.slack))

    yield Sample("ragged", ragged, want)
    yield Sample("the same of all", lambda d: call(longer(d), torch.tensor([[0, -1], [2, 1]])), want, LIGHT)


def masked_select(rule: Rule) -> Iterator[Sample]:
    modes = ("eager", "grad") if rule.kind == "nested" else LIGHT

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        x, mask = args
        masks = mask.rows if isinstance(mask, Ragged) else [mask] * len(x.rows)
        return Ragged([ref(r, m) for r, m in zip(x.rows, masks, strict=True)])

    yield Sample("ragged", lambda d: call(x := d.ragged(), mask_of(d, x)), want)
    yield Sample("second", lambda d: call(x := d.ragged("second"), mask_of(d, x)), want, modes)
    yield Sample("two", lambda d: call(x := d.ragged("two"), mask_of(d, x)), want, modes)
    yield Sample("dense", lambda d: call(d.ragged(), torch.tensor([True, False, True])), want, modes)


def masked_scatter(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        x, mask, source = args
        sources = source.rows if isinstance(source, Ragged) else [source] * len(x.rows)
        return x.with_rows([ref(*row) for row in zip(x.rows, mask.rows, sources, strict=True)])

    yield Sample("ragged", lambda d: call(x := d.ragged(), mask_of(d, x), d.ragged()), want)
    yield Sample("dense", lambda d: call(x := d.ragged(), mask_of(d, x), d.tensor(30)), want, LIGHT)


def nonzero(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        return Ragged([ref(r) for r in args[0].rows])

    yield Sample("features", lambda d: call(d.ragged(domain="coin")), want)
    modes = ("eager", "grad") if rule.kind == "nested" else LIGHT
    yield Sample("second", lambda d: call(d.ragged("second", "coin")), want, modes)

    def pairs(d: Draw) -> Call:
        x = d.ragged(domain="coin")
        return call(Ragged([r[:, None, 0] * r[None, :, 0] for r in x.rows], (1, 2), slack=x.slack))

    yield Sample("pairs", pairs, want, modes)


# -- parts


def split(rule: Rule) -> Iterator[Sample]:
    """Neighbouring rows, parts of a static dim, and parts of each row."""
    sizes = rule.name == "split_with_sizes"
    given: dict[str, tuple[Any, Any]] = {
        "split": (2, 1), "chunk": (2, 3), "tensor_split": (2, [1, -1]), "split_with_sizes": ([1, 2], [1, 2])
    }  # fmt: skip
    first, second = given[rule.name]

    def rows(ref: Any, args: Any, kwargs: Any) -> Any:
        x, n = args
        return tuple(x.with_rows([x.rows[i] for i in part.tolist()]) for part in ref(torch.arange(len(x.rows)), n))

    def each(ref: Any, args: Any, kwargs: Any) -> Any:
        x, n, dim = args
        per_row = [list(ref(r, n, dim - 1)) for r in x.rows]
        count = n if rule.name == "chunk" and dim in x.dims else max([len(p) for p in per_row])
        for parts in per_row:
            parts += [parts[-1].narrow(dim - 1, 0, 0)] * (count - len(parts))
        return tuple(x.with_rows(list(part)) for part in zip(*per_row, strict=True))

    three = lambda d, n="features": d.ragged(n, lengths=(*d.lengths, 2, 1)[:3])  # noqa: E731
    yield Sample("rows", lambda d: call(three(d), first), rows)
    yield Sample("static", lambda d: call(d.ragged(), first, 2), each)
    yield Sample("second, static", lambda d: call(d.ragged("second"), [1, 1] if sizes else 1, 1), each, LIGHT)
    if not sizes:
        bound = lambda d: Ragged(d.ragged().rows, slack=d.slack, extent=True)  # noqa: E731
        modes = LIGHT if rule.name == "split" else MODES
        if rule.name != "split" or rule.kind == "nested":
            yield Sample("ragged", lambda d: call(bound(d), second, 1), each, modes)
            yield Sample("second, ragged", lambda d: call(d.ragged("second"), first, 2), each, LIGHT)
            yield Sample("one of two", lambda d: call(d.ragged("two"), second, 2), each, LIGHT)
    else:
        equal = lambda d: Ragged([d.tensor(3, 2) for _ in d.lengths], slack=d.slack)  # noqa: E731
        yield Sample("ragged", lambda d: call(equal(d), first, 1), each, LIGHT)


def split_at(dim: int, rule: Rule) -> Iterator[Sample]:
    """`vsplit`, `hsplit`, `dsplit`."""

    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        x, n = args
        per_row = [torch.tensor_split(r, n, dim - 1) for r in x.rows]
        return tuple(x.with_rows(list(part)) for part in zip(*per_row, strict=True))

    def rows(ref: Any, args: Any, kwargs: Any) -> Any:
        x, n = args
        return tuple(x.with_rows(x.rows[a:b]) for a, b in ((0, n[0]), (n[0], None)))

    yield Sample("places", lambda d: call(d.ragged(), [1, 2] if dim else [1]), want if dim else rows)
    if dim == 2:
        yield Sample("parts", lambda d: call(d.ragged(), 3), want, LIGHT)


def unbind(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        x, dim = args
        dims = tuple(r - (dim < r) for r in x.dims)
        return tuple(Ragged(list(p), dims) for p in zip(*[r.unbind(dim - 1) for r in x.rows], strict=True))

    yield Sample("static", lambda d: call(d.ragged(), 2), want)
    yield Sample("second", lambda d: call(d.ragged("second"), 1), want, LIGHT)
    rows = lambda ref, args, kwargs: tuple(args[0].rows)  # noqa: E731
    yield Sample("rows", lambda d: call(d.ragged()), rows, ("eager", "grad"))


def narrow(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        x, dim, *rest = args
        if dim == 0:
            return x.with_rows(x.rows[rest[0] :][: rest[1]])
        rows = [ref(r, dim - 1, *rest) for r in x.rows]
        left = tuple([d for d in x.dims if d != dim])
        return Ragged(rows, left) if left else torch.stack(rows)

    yield Sample("rows", lambda d: call(d.ragged(), 0, 1, 1), want)
    yield Sample("static", lambda d: call(d.ragged("second"), 3, 1, 2), want)
    yield Sample("ragged", lambda d: call(longer(d), 1, -1, 1), want)
    yield Sample("one of two", lambda d: call(d.ragged("two"), 2, 0, 1), want, LIGHT)


def select(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        x, dim, k = args
        if dim == 0:
            return x.rows[k]
        rows = [ref(r, dim - 1, k) for r in x.rows]
        dims = tuple(r - (dim < r) for r in x.dims if r != dim)
        return Ragged(rows, dims) if dims else torch.stack(rows)

    yield Sample("static", lambda d: call(d.ragged("second"), 1, 1), want)
    yield Sample("ragged", lambda d: call(longer(d, "second"), 2, -1), want)
    yield Sample("one of two", lambda d: call(d.ragged("two"), 2, 0), want, LIGHT)
    yield Sample("row", lambda d: call(d.ragged(), 0, 1), want, ("eager", "grad"))


def fill(rule: Rule) -> Iterator[Sample]:
    want = lambda ref, args, kwargs: args[0].with_rows([ref(r, args[1]) for r in args[0].rows])  # noqa: E731
    yield Sample("number", lambda d: call(d.ragged(), 2.5), want)
    yield Sample("tensor", lambda d: call(d.ragged("two"), d.tensor()), want, LIGHT)


def refused(row: Callable[..., Call]) -> Callable[[Rule], Iterator[Sample]]:
    """A call that says why not."""
    return lambda rule: iter([Sample("refused", row, lambda ref, args, kwargs: args)])
RAGGED = {
    "gather": gather, "take_along_dim": gather, "scatter": scatter, "scatter_add": scatter, "scatter_reduce": scatter,
    "index_add": index_write, "index_copy": index_write, "index_reduce": index_write, "index_fill": index_write,
    "index_put": index_put, "take": take, "masked_select": masked_select, "masked_scatter": masked_scatter,
    "nonzero": nonzero, "argwhere": nonzero, "split": split, "chunk": split, "tensor_split": split,
    "split_with_sizes": split, "vsplit": partial(split_at, 0), "hsplit": partial(split_at, 1),
    "dsplit": partial(split_at, 2), "unbind": unbind, "narrow": narrow, "select": select, "fill": fill,
}  # fmt: skip
