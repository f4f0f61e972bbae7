"""Samples of operations that move, join, look up or weigh: shape, join, indexing, linalg, norm, loss, attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from harness import Call, Draw, Layout, Sample, call, rowwise

from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Dense, Ragged, loop

LIGHT = ("eager", "grad", "vmap")


def permute(rule: Rule) -> Iterator[Sample]:
    """Batch and ragged dims among the others; `transpose` swaps two of them."""
    orders: dict[str, list[tuple[int, ...]]] = {
        "features": [(0, 2, 1), (1, 0, 2), (2, 1, 0)], "second": [(0, 2, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)],
        "two": [(0, 2, 1, 3), (0, 3, 1, 2), (3, 0, 1, 2)], "last": [(0, -1, -2)],
    }  # fmt: skip
    for layout, lists in orders.items():
        for order in lists:
            swapped = [d for i, d in enumerate(order) if i != d % len(order)]
            if rule.name == "transpose" and len(swapped) != 2:
                continue

            def draw(d: Draw, layout: str = layout, order: Any = order, swapped: Any = swapped) -> Call:
                x = d.ragged(layout)
                return call(x, swapped[1], swapped[0]) if rule.name == "transpose" else call(x, order)

            def want(ref: Any, args: Any, kwargs: Any, order: Any = order) -> Ragged:
                x = args[0]
                places = [d % len(order) for d in order]
                inner = [d - 1 for d in places if d != 0]
                rows = [row.permute(inner) for row in x.rows]
                return Ragged(rows, tuple(sorted(places.index(d) for d in x.dims)), places.index(0))

            yield Sample(f"{layout} {order}", draw, want, MODES if order in lists[:1] else LIGHT)


def index_select(rule: Rule) -> Iterator[Sample]:
    def rows(ref: Any, args: Any, kwargs: Any) -> Ragged:
        return args[0].with_rows([args[0].rows[i] for i in args[2].tolist()])

    def static(ref: Any, args: Any, kwargs: Any) -> Ragged:
        return args[0].with_rows([ref(row, args[1] - 1, args[2]) for row in args[0].rows])

    index = torch.tensor([1, 0, 1])
    for layout in ("features", "two"):
        yield Sample(f"{layout}, batch", lambda d, n=layout: call(d.ragged(n), 0, index), rows)
    yield Sample("features, static", lambda d: call(d.ragged(), 2, index), static)
    yield Sample("second, static", lambda d: call(d.ragged("second"), 1, index), static)
    yield Sample("two, static", lambda d: call(d.ragged("two"), 3, index), static)


def embedding(rule: Rule) -> Iterator[Sample]:
    for layout in ("flat", "last", "two"):
        yield Sample(layout, lambda d, n=layout: call(d.ragged(n, "class"), d.tensor(4, 3)), rowwise)
    yield Sample("padding_idx", lambda d: call(d.ragged("flat", "class"), d.tensor(4, 3), padding_idx=1), rowwise)


def stack(rule: Rule) -> Iterator[Sample]:
    """A new static dim, operands of equal structure."""

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        xs, dim = args
        d = dim % (xs[0].rows[0].ndim + 2)
        rows = [torch.stack(parts, max(d - 1, 0)) for parts in zip(*[x.rows for x in xs], strict=True)]
        return Ragged(rows, tuple(r + (d <= r) for r in xs[0].dims), int(d == 0))

    for layout, dims in {"features": (0, 1, 2, 3, -1), "flat": (1, 2), "second": (1, 3), "two": (0, 1, 3, 4)}.items():
        for dim in dims:
            draw = lambda d, n=layout, at=dim: call([d.ragged(n), d.ragged(n)], at)  # noqa: E731
            yield Sample(f"{layout}, dim {dim}", draw, want, MODES if dim == 1 else LIGHT)
    identity = lambda d: call([x := d.ragged(), d.ragged(like=x)], 1)  # noqa: E731
    yield Sample("one structure", identity, want)


def cat(rule: Rule) -> Iterator[Sample]:
    """Along the batch, a static dim, and the ragged dim."""

    def rows(ref: Any, args: Any, kwargs: Any) -> Ragged:
        return args[0][0].with_rows([row for x in args[0] for row in x.rows])

    def joined(ref: Any, args: Any, kwargs: Any) -> Ragged:
        xs, dim = args
        parts = zip(*[x.rows for x in xs], strict=True)
        return xs[0].with_rows([torch.cat(p, dim % (p[0].ndim + 1) - 1) for p in parts])

    def others(d: Draw, layout: str, extent: bool = True) -> Call:
        lengths = tuple([n + 1 for n in reversed(d.lengths)])
        return call([d.ragged(layout, extent=extent), d.ragged(layout, lengths=lengths[1:])], 0)

    for layout in ("features", "flat", "second", "two"):
        yield Sample(f"{layout}, batch", lambda d, n=layout: others(d, n), rows)
    yield Sample("batch, no extent", lambda d: others(d, "features", False), rows, LIGHT)
    for layout, dim in {"features": 2, "second": 1, "two": -1}.items():
        yield Sample(f"{layout}, static", lambda d, n=layout, k=dim: call([d.ragged(n), d.ragged(n)], k), joined)
    if rule.kind == "nested":
        for layout, dim in {"features": 1, "last": 2}.items():
            draw = lambda d, n=layout, k=dim: call(  # noqa: E731
                [d.ragged(n), d.ragged(n, lengths=tuple(reversed(d.lengths)))], k
            )
            yield Sample(f"{layout}, ragged", draw, joined)
        wide = lambda d, w: Ragged([d.tensor(n % 2 + 1, n + w, 2) for n in d.lengths], (1, 2))  # noqa: E731
        yield Sample("two, second", lambda d: call([wide(d, 0), wide(d, 2), wide(d, 1)], 2), joined)
        yield Sample("two, first", lambda d: call([d.ragged("two"), d.ragged("two")], 1), joined, LIGHT)


def linear(rule: Rule) -> Iterator[Sample]:
    for layout, features in {"features": 3, "second": 3, "two": 2}.items():
        draw = lambda d, n=layout, i=features: call(d.ragged(n), d.tensor(4, i), d.tensor(4))  # noqa: E731
        yield Sample(layout, draw, rowwise)
    yield Sample("no bias", lambda d: call(d.ragged(), d.tensor(4, 3)), rowwise)


def layer_norm(rule: Rule) -> Iterator[Sample]:
    yield Sample("affine", lambda d: call(d.ragged(), (3,), d.tensor(3), d.tensor(3)), rowwise)
    yield Sample("plain", lambda d: call(d.ragged("second"), (3,)), rowwise)
    wide = Layout((), (2, 3))
    yield Sample("two dims", lambda d: call(d.ragged(wide), (2, 3), d.tensor(2, 3), d.tensor(2, 3)), rowwise)


def softmax(rule: Rule) -> Iterator[Sample]:
    """One row after another, whichever dim it is."""

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        x, dim = args
        d = dim % (x.rows[0].ndim + 1)
        return x.with_rows([ref(row, d - (d > x.batch_dim), **kwargs) for row in x.rows])

    dims = {"features": (1, 2, -1), "flat": (1,), "second": (1, 2, 3), "last": (1, 2), "two": (3, 1)}
    for layout, each in dims.items():
        for dim in each:
            draw = lambda d, n=layout, k=dim: call(d.ragged(n), k)  # noqa: E731
            yield Sample(f"{layout}, dim {dim}", draw, want, MODES if layout in ("features", "two") else LIGHT)
    yield Sample("batch second", lambda d: call(d.ragged(batch_dim=1), 0), want, LIGHT)
    yield Sample("dtype", lambda d: call(d.ragged(), 1, dtype=torch.float64), want, LIGHT)
    yield Sample("large", lambda d: call(Ragged([r * 200 for r in d.ragged("flat").rows]), 1), want, LIGHT)
    yield Sample("no elements", lambda d: call(d.ragged(), 1), want, ("eager", "grad"), ((0, 0),))


def cross_entropy(rule: Rule) -> Iterator[Sample]:
    """Classes last, or where torch has them; the mean is over real targets."""

    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        x, target, *rest = args
        classes = [row if x.dims[0] == 1 else row.movedim(0, -1) for row in x.rows]
        pairs = list(zip(classes, target.rows, strict=True))
        if kwargs.get("reduction") == "none":
            return target.with_rows([ref(a, b, *rest, **kwargs) for a, b in pairs])
        joined = [torch.cat([p[i].flatten(0, len(x.dims) - 1) for p in pairs]) for i in (0, 1)]
        return ref(*joined, *rest, **kwargs)

    def draw(d: Draw, layout: Layout, weight: bool = False, **options: Any) -> Call:
        x = d.ragged(layout)
        targets = Layout((), (), layout.ragged)
        return call(x, d.ragged(targets, "class"), *([torch.tensor([0.5, 1.0, 2.0, 1.5])] if weight else []), **options)

    last, first = Layout((), (4,)), Layout((4,), ())
    for reduction in ("mean", "sum", "none"):
        modes = LIGHT if reduction == "sum" else MODES
        yield Sample(f"classes last, {reduction}", lambda d, r=reduction: draw(d, last, reduction=r), want, modes)
        yield Sample(f"classes first, {reduction}", lambda d, r=reduction: draw(d, first, reduction=r), want, LIGHT)
    yield Sample("weight", lambda d: draw(d, last, True), want)
    yield Sample("smoothed", lambda d: draw(d, last, label_smoothing=0.1), want, LIGHT)
    yield Sample("ignored class", lambda d: draw(d, last, ignore_index=2), want, LIGHT)
    yield Sample("two ragged dims", lambda d: draw(d, Layout((), (4,), 2)), want, LIGHT)


def attention(rule: Rule) -> Iterator[Sample]:
    """Self- and cross-attention, causal, scaled; rows without keys give 0."""
    heads = Layout((2,), (4,))

    def draw(d: Draw, crossed: bool, **options: Any) -> Call:
        q = d.ragged(heads)
        lengths = tuple(reversed(d.lengths)) if crossed else None
        k = d.ragged(heads, lengths=lengths)
        return call(q, k, d.ragged(heads, lengths=lengths, like=k), **options)

    yield Sample("self", lambda d: draw(d, False), rowwise)
    yield Sample("cross", lambda d: draw(d, True), rowwise)
    yield Sample("causal", lambda d: draw(d, False, is_causal=True), rowwise)
    yield Sample("scale", lambda d: draw(d, True, scale=0.3), rowwise)
    yield Sample("bool mask", lambda d: masked(d, lambda *n: d.tensor(*n, domain="bool")), rowwise)
    yield Sample("added mask", lambda d: masked(d, lambda *n: d.tensor(*n), enable_gqa=True), rowwise, LIGHT)
    yield Sample("ragged mask", lambda d: pairwise(d, "bool"), rowwise, ("eager", "grad", "compile"))
    yield Sample("ragged mask, added", lambda d: pairwise(d, "real"), rowwise, ("eager", "grad"))
    yield Sample("fewer heads of keys", lambda d: grouped(d, enable_gqa=True), rowwise, LIGHT)

    def grouped(d: Draw, **options: Any) -> Call:
        q, k = d.ragged(Layout((4,), (3,))), d.ragged(Layout((2,), (3,)))
        return call(q, k, d.ragged(Layout((2,), (3,)), like=k), **options)

    def masked(d: Draw, make: Any, **options: Any) -> Call:
        (q, k, v), _ = draw(d, True)
        longest = max(d.lengths) + d.slack
        whole = make(len(d.lengths), 1, longest, longest)
        corners = [m[:, : len(a[0]), : len(b[0])] for m, a, b in zip(whole, q.rows, k.rows, strict=True)]
        return call(q, k, v, attn_mask=Dense(whole, corners, (0, 2, 3)), **options)

    def pairwise(d: Draw, domain: str) -> Call:
        (q, k, v), _ = draw(d, True)
        pairs = [d.tensor(len(a[0]), len(b[0]), domain=domain) for a, b in zip(q.rows, k.rows, strict=True)]
        return call(q, k, v, Ragged(pairs, (1, 2), slack=d.slack))


def multi_head(rule: Rule) -> Iterator[Sample]:
    """The function that `nn.MultiheadAttention` calls: (L, B, E) for a rectangle, (B, -1, E) for packed rows."""
    size, heads, at = 4, 2, 1 if rule.kind == "masked" else 0

    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.pop("is_causal", False):
            kwargs.pop("attn_mask")
            mask = lambda q, k: torch.ones(len(q), len(k), dtype=torch.bool).triu(1)  # noqa: E731
            results = loop(lambda *a, **k: ref(*a, **k, attn_mask=mask(a[0], a[1])), args, kwargs)
        else:
            results = loop(ref, args, kwargs)
        outs, weights = zip(*results, strict=True)
        first = Ragged(list(outs), args[0].dims, args[0].batch_dim)
        dims = (1, 2) if kwargs.get("average_attn_weights", True) else (2, 3)
        return first, None if weights[0] is None else Ragged(list(weights), dims)

    def draw(d: Draw, crossed: bool, causal: bool = False, **options: Any) -> Call:
        layout = Layout((), (size,))
        q = d.ragged(layout, batch_dim=at)
        other = tuple(reversed(d.lengths)) if crossed else None
        k = d.ragged(layout, lengths=other, batch_dim=at) if crossed else q
        weights = d.tensor(3 * size, size), d.tensor(3 * size), None, None, False, 0.0, d.tensor(size, size)
        causal_mask = {"attn_mask": torch.ones(1, 1), "is_causal": True} if causal else {}
        return call(q, k, k, size, heads, *weights, d.tensor(size), **options, **causal_mask)

    plain = tuple(m for m in MODES if m != "vmap")  # which wants every result to be a tensor, not None
    yield Sample("self", lambda d: draw(d, False, need_weights=False), want, ("eager", "grad"))
    yield Sample("cross", lambda d: draw(d, True, need_weights=False), want, plain)
    yield Sample("causal", lambda d: draw(d, False, True, need_weights=False), want, plain)
    yield Sample("weights", lambda d: draw(d, False), want)
    yield Sample("cross, weights of heads", lambda d: draw(d, True, average_attn_weights=False), want, LIGHT)


RAGGED = {
    "permute": permute, "transpose": permute, "index_select": index_select, "embedding": embedding, "stack": stack,
    "cat": cat, "linear": linear, "layer_norm": layer_norm, "softmax": softmax,
    "log_softmax": softmax, "softmin": softmax,
    "cross_entropy": cross_entropy, "attention": attention, "multi_head_attention_forward": multi_head,
}  # fmt: skip
