"""The operations of random programs: what each may be applied to, its arguments, and itself on one example.

A maker takes a program and returns a step for its last value, or None where there is none for this layout. Dims are
drawn as those of an example; those of a batch are one more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import torch
import torch.nn.functional as F
from programs.program import Program, Rows, Step
from torch import Tensor

import tdc

Maker = Callable[[Program], Step | None]


def each(text: str, run: Callable[[Any], Any], row: Callable[[Tensor], Tensor] | None = None) -> Step:
    """An operation on one value; `row` is the same on an example, where it is not the very same."""
    own = row or run
    return Step(text, lambda v, _: run(v[-1]), lambda v, _: [own(r) for r in v[-1]])


def dim_of(p: Program, among: list[int] | None = None) -> int | None:
    """A dim of an example, as a number from the front."""
    dims = list(range(p.last[0].ndim)) if among is None else among
    return p.draw(st.sampled_from(dims)) if dims else None


def spelled(p: Program, d: int) -> int:
    """A dim of the batch, counted from the front or from the end."""
    return d + 1 if p.draw(st.booleans()) else d - p.last[0].ndim


# -- elementwise

UNARY: dict[str, Callable[[Any], Any]] = {
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "sin": torch.sin, "relu": torch.relu, "abs": torch.abs,
    "neg": torch.neg, "silu": F.silu, "gelu": F.gelu, "softplus": F.softplus, "atan": torch.atan, "erf": torch.erf,
    "square": torch.square, "clamp": lambda x: x.clamp(-1, 1.5), "exp of tanh": lambda x: x.tanh().exp(),
    "2 - 3 * x": lambda x: 2 - 3 * x, "1 / (1 + |x|)": lambda x: 1 / (1 + x.abs()), "x ** 2 / 4": lambda x: x**2 / 4,
    "leaky_relu": F.leaky_relu, "log1p of square": lambda x: torch.log1p(x * x), "elu": F.elu,
    "maximum of 0.1": lambda x: torch.maximum(x, torch.tensor(0.1, dtype=torch.float64)),
    "nan_to_num": torch.nan_to_num, "rsub": lambda x: torch.rsub(x, 1.5), "hardtanh": F.hardtanh,
}  # fmt: skip
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "maximum": torch.maximum, "lerp": lambda a, b: a.lerp(b, 0.3),
    "where": lambda a, b: torch.where(a > b, a, b * 2), "atan2": lambda a, b: torch.atan2(a, b.abs() + 1),
    "div": lambda a, b: a / (1 + b.abs()), "reflected sub": lambda a, b: b - a, "addcmul": lambda a, b: a.addcmul(a, b),
    "masked_fill": lambda a, b: a.masked_fill(b > 0.5, -0.25), "hypot": lambda a, b: torch.hypot(a + 3, b),
}  # fmt: skip


def unary(p: Program) -> Step | None:
    name = p.draw(st.sampled_from(sorted(UNARY)))
    return each(name, UNARY[name])


def with_earlier(p: Program) -> Step | None:
    """With a value of the same structure."""
    name, other = p.draw(st.sampled_from(sorted(BINARY))), p.draw(st.sampled_from(p.alike()))
    fn = BINARY[name]
    return Step(
        f"{name} value {other}", lambda v, _: fn(v[-1], v[other]),
        lambda v, _: [fn(a, b) for a, b in zip(v[-1], v[other], strict=True)],
    )  # fmt: skip


def with_dense(p: Program) -> Step | None:
    """With a dense operand: of some features, of each example, or as large as the padded batch."""
    rank, count = p.last[0].ndim, len(p.last)
    name, full = p.draw(st.sampled_from(sorted(BINARY))), p.draw(st.booleans())
    first = 0 if full else p.draw(st.integers(0, rank))
    padded = p.x.to_padded().shape[1:] if isinstance(p.x, tdc.NestedTensor) else p.x.shape[1:]
    wide = full and p.draw(st.booleans())  # along ragged dims
    sizes = [
        n if (d not in p.ragged or wide) and p.draw(st.booleans()) else 1
        for d, n in enumerate(padded) if d >= first
    ]  # fmt: skip
    batch = [p.draw(st.sampled_from([1, count]))] if full else []
    k, fn = p.operand(*batch, *sizes), BINARY[name]

    def rows(v: list[Rows], operands: list[Tensor]) -> Rows:
        return [fn(r, cropped(operands[k], i, r)) for i, r in enumerate(v[-1])]

    def cropped(o: Tensor, i: int, r: Tensor) -> Tensor:
        o = o[min(i, len(o) - 1)] if full else o
        for d, n in enumerate(r.shape[r.ndim - o.ndim :]):
            o = o.narrow(d, 0, n) if o.shape[d] != 1 or n == 0 else o
        return o

    return Step(f"{name} dense {[*batch, *sizes]}", lambda v, o: fn(v[-1], o[k]), rows)


def pair_map(p: Program) -> Step | None:
    """All pairs of positions, two ragged dims."""
    if len(p.ragged) != 1 or p.last[0].ndim > 3:
        return None
    (d,) = p.ragged
    name = p.draw(st.sampled_from(["sub", "mul", "maximum"]))
    fn = BINARY[name]
    return each(
        f"{name} of pairs along {d + 1}", lambda x: fn(x.unsqueeze(d + 1), x.unsqueeze(d + 2)),
        lambda r: fn(r.unsqueeze(d), r.unsqueeze(d + 1)),
    )  # fmt: skip


# -- along dims


def fallback(fn: Callable[..., Tensor], empty: float, dims: Any) -> Callable[[Tensor, bool], Tensor]:
    """A reduction of one example, of nothing the element that changes nothing, which torch has none of."""

    def run(r: Tensor, keepdim: bool) -> Tensor:
        own = (dims,) if isinstance(dims, int) else dims
        if any(r.shape[d] == 0 for d in own):
            sizes = [1 if d in own else n for d, n in enumerate(r.shape)]
            out = r.new_full(sizes, empty)
            return out if keepdim else out.squeeze(own)
        return fn(r, dims, keepdim)

    return run


REDUCTIONS: dict[str, tuple[Callable[..., Any], float | None]] = {
    "sum": (torch.sum, None), "mean": (torch.mean, None), "logsumexp": (torch.logsumexp, None),
    "amax": (torch.amax, float("-inf")), "amin": (torch.amin, float("inf")),
    "vector_norm": (lambda x, d, k: torch.linalg.vector_norm(x, 2, d, k), None),
    "var": (lambda x, d, k: torch.var(x, d, correction=0, keepdim=k), None),
}  # fmt: skip


def reduced(p: Program, dims: list[int]) -> tuple[str, Callable[..., Any], Callable[..., Tensor]]:
    """A reduction of the batch and of an example, with the dims of the batch."""
    name = p.draw(st.sampled_from(sorted(REDUCTIONS)))
    reduce, empty = REDUCTIONS[name]
    own: Any = tuple(dims) if len(dims) > 1 else dims[0]
    ours: Any = tuple([spelled(p, d) for d in dims]) if len(dims) > 1 else spelled(p, dims[0])
    row = fallback(reduce, empty, own) if empty is not None else lambda r, keepdim: reduce(r, own, keepdim)
    return f"{name}({ours})", lambda x, keepdim: reduce(x, ours, keepdim), row


def nothing(p: Program, dims: list[int]) -> bool:
    """Whether a static dim is empty: then torch has no extremes."""
    return any(p.last[0].shape[d] == 0 for d in dims if d in p.static)


def reduce_some(p: Program) -> Step | None:
    """Static dims, ragged ones, or both: a batch, or a dense result."""
    rank = p.last[0].ndim
    dims = p.draw(st.lists(st.integers(0, rank - 1), min_size=1, max_size=rank, unique=True))
    keepdim = p.draw(st.booleans())
    if nothing(p, dims):
        return None
    text, run, row = reduced(p, dims)
    if set(p.ragged) <= set(dims) and p.left > 1:
        return None
    if set(p.ragged) <= set(dims):
        return Step(
            f"{text} dense", lambda v, _: run(v[-1], keepdim),
            lambda v, _: torch.stack([row(r, keepdim) for r in v[-1]]),
        )  # fmt: skip
    return each(f"{text}, keepdim {keepdim}", lambda x: run(x, keepdim), lambda r: row(r, keepdim))


def reduce_beside(p: Program) -> Step | None:
    """A reduction that keeps the dim, and the batch again: `x - x.mean(1, True)`."""
    rank = p.last[0].ndim
    dims = p.draw(st.lists(st.integers(0, rank - 1), min_size=1, max_size=2, unique=True))
    if nothing(p, dims):
        return None
    text, run, row = reduced(p, dims)
    if "am" in text or "var" in text:
        keep = lambda x: x  # noqa: E731
    else:
        keep = torch.tanh
    return each(f"x - f({text})", lambda x: x - keep(run(x, True)), lambda r: r - keep(row(r, True)))


def reduce_all(p: Program) -> Step | None:
    """All elements, or those of a feature over the whole batch."""
    if p.left > 1:
        return None
    if p.draw(st.booleans()):
        return Step("sum()", lambda v, _: v[-1].sum(), lambda v, _: sum([r.sum() for r in v[-1]]))
    own = tuple(p.ragged)
    dims = (0, *[d + 1 for d in own])
    return Step(
        f"sum({dims})", lambda v, _: v[-1].sum(dims), lambda v, _: torch.stack([r.sum(own) for r in v[-1]]).sum(0)
    )


ALONG: dict[str, Callable[[Any, int], Any]] = {
    "softmax": torch.softmax, "log_softmax of tanh": lambda x, d: x.tanh().log_softmax(d), "cumsum": torch.cumsum,
    "cumprod": torch.cumprod, "flip": lambda x, d: x.flip(d), "roll": lambda x, d: x.roll(1, d),
    "sort": lambda x, d: torch.sort(x, dim=d, stable=True).values,
    "sort down": lambda x, d: torch.sort(x, dim=d, stable=True, descending=True)[0],
    "normalize": lambda x, d: F.normalize(x + 2, dim=d), "logcumsumexp": torch.logcumsumexp,
    "cummax": lambda x, d: torch.cummax(x, d).values, "diff": lambda x, d: x.diff(dim=d),
}  # fmt: skip


def along(p: Program) -> Step | None:
    d = dim_of(p)
    name = p.draw(st.sampled_from(sorted(ALONG)))
    if d is None or (name in ("cummax", "cumprod", "logcumsumexp") and any(r.shape[d] == 0 for r in p.last)):
        return None
    ours, fn = spelled(p, d), ALONG[name]
    return each(f"{name}({ours})", lambda x: fn(x, ours), lambda r: fn(r, d))


def features_normed(p: Program) -> Step | None:
    """Layer norm and its kin of the last dims, which are static."""
    last = p.last[0].ndim - 1
    if last not in p.static or last == 0:
        return None
    size = p.last[0].shape[last]
    name = p.draw(st.sampled_from(["layer_norm", "rms_norm"]))
    w = p.operand(size)
    fn = getattr(F, name)
    return Step(
        f"{name}({size})", lambda v, o: fn(v[-1], (size,), o[w], eps=1e-3),
        lambda v, o: [fn(r, (size,), o[w], eps=1e-3) for r in v[-1]],
    )  # fmt: skip


# -- products


def linear(p: Program) -> Step | None:
    last = p.last[0].ndim - 1
    if last not in p.static:
        return None
    size, out, kind = p.last[0].shape[last], p.draw(st.integers(1, 3)), p.draw(st.integers(0, 2))
    if kind == 0:
        w, b = p.operand(out, size), p.operand(out)
        return Step(
            f"linear({size}, {out})", lambda v, o: F.linear(v[-1], o[w], o[b]),
            lambda v, o: [F.linear(r, o[w], o[b]) for r in v[-1]],
        )  # fmt: skip
    if kind == 1 or p.last[0].ndim != 2:
        w = p.operand(size, out)
        return Step(f"matmul({size}, {out})", lambda v, o: v[-1] @ o[w], lambda v, o: [r @ o[w] for r in v[-1]])
    w = p.operand(len(p.last), size, out)
    return Step(
        f"matmul of each ({size}, {out})", lambda v, o: torch.matmul(v[-1], o[w]),
        lambda v, o: [r @ o[w][i] for i, r in enumerate(v[-1])],
    )  # fmt: skip


def attend(p: Program) -> Step | None:
    """Weights of all pairs of positions, and the batch again."""
    if p.last[0].ndim < 2 or p.ragged != (p.last[0].ndim - 2,):
        return None
    if p.draw(st.booleans()):
        return each("x @ x.mT", lambda x: torch.matmul(x, x.transpose(-1, -2)).tanh(), lambda r: (r @ r.mT).tanh())
    return each(
        "softmax(x @ x.mT) @ x", lambda x: torch.matmul(torch.matmul(x, x.transpose(-1, -2)).softmax(-1), x),
        lambda r: (r @ r.mT).softmax(-1) @ r,
    )  # fmt: skip


def similar(p: Program) -> Step | None:
    d, other = dim_of(p), p.draw(st.sampled_from(p.alike()))
    if d is None or d in p.ragged:
        return None
    ours = spelled(p, d)
    return Step(
        f"cosine_similarity value {other}, {ours}", lambda v, _: F.cosine_similarity(v[-1] + 3, v[other], ours),
        lambda v, _: [F.cosine_similarity(a + 3, b, d) for a, b in zip(v[-1], v[other], strict=True)],
    )  # fmt: skip


# -- shapes and positions


def move(p: Program) -> Step | None:
    """Dims in another order."""
    rank = p.last[0].ndim
    if rank < 2:
        return None
    a, b = [p.draw(st.integers(0, rank - 1)) for _ in range(2)]
    if p.draw(st.booleans()):
        return each(f"transpose({a + 1}, {b + 1})", lambda x: x.transpose(a + 1, b + 1), lambda r: r.transpose(a, b))
    return each(f"movedim({a + 1}, {b + 1})", lambda x: x.movedim(a + 1, b + 1), lambda r: r.movedim(a, b))


def reshape(p: Program) -> Step | None:
    """New dims of size 1, and static neighbours as one or as two."""
    rank, name = p.last[0].ndim, p.draw(st.sampled_from(["unsqueeze", "squeeze", "flatten", "unflatten"]))
    if name == "unsqueeze" and rank < 4:
        d = p.draw(st.integers(0, rank))
        return each(f"unsqueeze({d + 1})", lambda x: x.unsqueeze(d + 1), lambda r: r.unsqueeze(d))
    if name == "squeeze":
        one = [d for d in p.static if p.last[0].shape[d] == 1]
        d = dim_of(p, one)
        return None if d is None else each(f"squeeze({d + 1})", lambda x: x.squeeze(d + 1), lambda r: r.squeeze(d))
    if name == "flatten":
        d = dim_of(p, [d for d in p.static if d + 1 in p.static])
        return (
            None if d is None
            else each(f"flatten({d + 1}, {d + 2})", lambda x: x.flatten(d + 1, d + 2), lambda r: r.flatten(d, d + 1))
        )  # fmt: skip
    d = dim_of(p, [d for d in p.static if p.last[0].shape[d] in (2, 3, 4)]) if rank < 4 else None
    if d is None:
        return None
    n = p.last[0].shape[d]
    sizes = (2, 2) if n == 4 else (1, n)
    return each(f"unflatten({d + 1}, {sizes})", lambda x: x.unflatten(d + 1, sizes), lambda r: r.unflatten(d, sizes))


SLICES = (slice(1, None), slice(None, -1), slice(None, 2), slice(-2, None), slice(None, None, 2), slice(1, -1))


def cut(p: Program) -> Step | None:
    """A slice of one dim."""
    d, s = dim_of(p), p.draw(st.sampled_from(SLICES))
    if d is None or (d in p.static and len(range(p.last[0].shape[d])[s]) == 0):
        return None
    index = (*[slice(None)] * d, s)
    return each(f"x[{d + 1}: {s}]", lambda x: x[(slice(None), *index)], lambda r: r[index])


def pick(p: Program) -> Step | None:
    """Examples in another order, some twice or not at all."""
    count = len(p.last)
    index = p.draw(st.lists(st.integers(-count, count - 1), min_size=1, max_size=4))
    if p.draw(st.booleans()):
        start = p.draw(st.integers(0, count - 1))
        return Step(f"x[{start}:]", lambda v, _: v[-1][start:], lambda v, _: v[-1][start:])
    return Step(f"x[{index}]", lambda v, _: v[-1][index], lambda v, _: [v[-1][i] for i in index])


def join(p: Program) -> Step | None:
    """Beside a value of the same structure, along any dim."""
    d, other = p.draw(st.integers(-1, p.last[0].ndim - 1)), p.draw(st.sampled_from(p.alike()))
    if d < 0:
        return Step(
            f"cat value {other}, 0", lambda v, _: torch.cat([v[-1], v[other]]), lambda v, _: [*v[-1], *v[other]]
        )
    ours = spelled(p, d)
    return Step(
        f"cat value {other}, {ours}", lambda v, _: torch.cat([v[-1], v[other]], ours),
        lambda v, _: [torch.cat([a, b], d) for a, b in zip(v[-1], v[other], strict=True)],
    )  # fmt: skip


def pad(p: Program) -> Step | None:
    """More elements around the last dim."""
    first, last = [p.draw(st.integers(0, 2)) for _ in range(2)]
    return each(f"pad({first}, {last})", lambda x: F.pad(x, (first, last), value=0.5))


def select(p: Program) -> Step | None:
    """The largest of the features, or one of them."""
    d = dim_of(p, [d for d in p.static if p.last[0].shape[d] > 0])
    if d is None or p.last[0].ndim < 2:
        return None
    ours, n = spelled(p, d), p.last[0].shape[d]
    k = p.draw(st.integers(1, n))
    if p.draw(st.booleans()):
        if any(len(r.unique()) < r.numel() for r in p.last):
            return None  # which of two equal elements comes first is not said
        return each(f"topk({k}, {ours})", lambda x: x.topk(k, ours).values, lambda r: r.topk(k, d).values)
    return each(f"select({ours}, {k - 1})", lambda x: x.select(ours, k - 1), lambda r: r.select(d, k - 1))


def rearrange(p: Program) -> Step | None:
    """Parts of a static dim: halves, some positions, all of them several times."""
    d = dim_of(p, [d for d in p.static if p.last[0].shape[d] > 0])
    if d is None:
        return None
    ours, n, name = spelled(p, d), p.last[0].shape[d], p.draw(st.sampled_from(["chunk", "index", "repeat", "expand"]))
    if name == "chunk":
        k = p.draw(st.integers(1, n))
        return each(f"chunk({k}, {ours})[-1]", lambda x: x.chunk(k, ours)[-1], lambda r: r.chunk(k, d)[-1])
    if name == "index":
        index = torch.tensor(p.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=3)))
        return each(
            f"index_select({ours}, {index.tolist()})", lambda x: x.index_select(ours, index),
            lambda r: r.index_select(d, index),
        )  # fmt: skip
    if name == "repeat":
        times = [2 if i == d else 1 for i in range(p.last[0].ndim)]
        return each(f"repeat(1, {times})", lambda x: x.repeat(1, *times), lambda r: r.repeat(*times))
    if n != 1:
        return None
    sizes = [3 if i == d else -1 for i in range(p.last[0].ndim)]
    return each(f"expand(-1, {sizes})", lambda x: x.expand(-1, *sizes), lambda r: r.expand(*sizes))


def gate(p: Program) -> Step | None:
    """Half of the features, times the sigmoid of the other."""
    d = dim_of(p, [d for d in p.static if p.last[0].shape[d] in (2, 4)])
    if d is None:
        return None
    ours = spelled(p, d)
    return each(f"glu({ours})", lambda x: F.glu(x, ours), lambda r: F.glu(r, d))


def attention(p: Program) -> Step | None:
    """Heads of their own: torch's function for attention."""
    if p.last[0].ndim != 2 or p.ragged != (0,) or p.last[0].shape[1] == 0:
        return None
    heads, causal = p.draw(st.integers(1, 2)), p.draw(st.booleans())
    fn = F.scaled_dot_product_attention

    def batch(x: Any) -> Any:
        q = x.unsqueeze(2).expand(-1, -1, heads, -1).transpose(1, 2)
        return fn(q, q.tanh(), q.sin(), is_causal=causal).transpose(1, 2).flatten(2, 3)

    def row(r: Tensor) -> Tensor:
        q = r.unsqueeze(1).expand(-1, heads, -1).transpose(0, 1)
        return fn(q, q.tanh(), q.sin(), is_causal=causal).transpose(0, 1).flatten(1, 2)

    return each(f"attention of {heads} heads{', causal' * causal}", batch, row)


def comparison(p: Program) -> Step | None:
    """Numbers of a condition, which has no derivative, and the batch where it holds."""
    d = dim_of(p)
    if d is None or set(p.ragged) <= {d}:
        return each("x * (x > 0)", lambda x: x * (x > 0).double(), lambda r: r * (r > 0).double())
    ours = spelled(p, d)
    return each(
        f"x * (x > 0).any({ours}, True)", lambda x: x * (x > 0).any(ours, True).double(),
        lambda r: r * (r > 0).any(d, True).double(),
    )  # fmt: skip


# -- kinds


def convert(p: Program) -> Step | None:
    if isinstance(p.x, tdc.NestedTensor):
        fill = p.draw(st.sampled_from([float("nan"), 0.0, -1e30]))
        return each(f"to_padded({fill})", lambda x: x.to_padded(fill), lambda r: r)
    return each("to_packed()", lambda x: x.to_packed(), lambda r: r)


TREES: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "(td * 2).tanh()": (lambda td: (td * 2).tanh(), lambda r: (r * 2).tanh()),
    "td + td": (lambda td: td + td, lambda r: r + r),
    "apply": (lambda td: td.apply(torch.sin), torch.sin),
    "torch.where": (lambda td: torch.where(td > 0, td, -td), torch.abs),
}


def through_tensordict(p: Program) -> Step | None:
    """A TensorDict of the batch and an earlier value, worked on and read again."""
    name, other = p.draw(st.sampled_from(sorted(TREES))), p.draw(st.sampled_from(p.alike()))
    run, row = TREES[name]
    rows, count = p.draw(st.booleans()), len(p.last)

    def batch(v: list[Any], _: list[Tensor]) -> Any:
        td = tdc.TensorDict({"a": v[-1], "n": {"b": v[other]}}, batch_size=[len(v[-1])])
        td = run(td)
        td = td[count // 2 :] if rows else td
        return td["a"] - td["n", "b"] * 0.5

    def of_rows(v: list[Rows], _: list[Tensor]) -> Rows:
        pairs = list(zip(v[-1], v[other], strict=True))[count // 2 if rows else 0 :]
        return [row(a) - row(b) * 0.5 for a, b in pairs]

    return Step(f"TensorDict {name}, value {other}{', some examples' * rows}", batch, of_rows)


TABLE: dict[str, Maker] = {
    fn.__name__: fn
    for fn in (
        unary, with_earlier, with_dense, pair_map, reduce_some, reduce_beside, reduce_all, along, features_normed,
        linear, attend, similar, move, reshape, cut, pick, join, pad, select,
        rearrange, gate, attention, comparison, convert, through_tensordict,
    )
}  # fmt: skip
