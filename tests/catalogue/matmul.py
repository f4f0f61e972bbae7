"""Samples of products: matrix products by name, and `einsum` over batch, ragged and static dims."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Call, Draw, Layout, Sample, call

from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Dense, Ragged, loop

LIGHT = ("eager", "grad", "vmap")
HEADS, PLAIN = Layout((2,), (3,)), Layout((), (3,))


def of(
    label: str, draw: Callable[[Draw], Call], dims: Any = (1,), modes: Any = MODES, batch: int = 0, row: Any = None
) -> Sample:
    """A call; the result has ragged dims, or is dense where there are none. `row` is the operation on one example."""

    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        rows = loop(row or ref, args, kwargs)
        return Ragged(rows, dims, batch) if dims else torch.stack(rows, batch)

    return Sample(label, draw, want, modes)


def each(d: Draw, *sizes: int) -> Dense:
    """A dense operand with one matrix or vector for each example."""
    whole = d.tensor(len(d.lengths), *sizes)
    return Dense(whole, list(whole.unbind()))


def turned(d: Draw, *before: int) -> Ragged:
    """A batch with its ragged dim last."""
    return d.ragged(Layout(before, ()))


def pair(d: Draw, second: tuple[int, ...] = (4,)) -> tuple[Ragged, Ragged]:
    """(B, 3, -1) and (B, -1, *second), rows as long."""
    return turned(d, 3), d.ragged(Layout((), second))


def unequal(d: Draw, *before: int) -> Ragged:
    """A batch with its ragged dim last, and rows of other lengths."""
    return d.ragged(Layout(before, ()), lengths=tuple(reversed(d.lengths)))


def matmul(rule: Rule) -> Iterator[Sample]:
    yield of("weights", lambda d: call(d.ragged(), d.tensor(3, 4)))
    yield of("vector", lambda d: call(d.ragged(), d.tensor(3)), modes=LIGHT)
    yield of("weights of each example", lambda d: call(d.ragged(), each(d, 3, 4)))
    yield of("weights in front", lambda d: call(d.tensor(4, 3), turned(d, 3)), (2,), LIGHT)
    yield of("weights of each example in front", lambda d: call(each(d, 4, 3), turned(d, 3)), (2,), LIGHT)
    yield of("over the ragged dim", lambda d: call(*pair(d)), ())
    yield of("ragged by ragged", lambda d: call(d.ragged(), turned(d, 3)), (1, 2))
    yield of("rows of other lengths", lambda d: call(d.ragged(), unequal(d, 3)), (1, 2), LIGHT)
    yield of("two ragged dims by one", lambda d: call(d.ragged(Layout((), (), 2)), columns(d)), modes=LIGHT)
    yield of("heads", lambda d: call(d.ragged(HEADS), d.tensor(2, 3, 4)), (2,), LIGHT)
    heads = lambda d: call(d.ragged(HEADS), d.ragged(Layout((2, 3), ())))  # noqa: E731
    yield of("heads, ragged by ragged", heads, (2, 3), LIGHT)
    yield of("vectors", lambda d: call(d.ragged("flat"), d.ragged("flat")), (), LIGHT)
    yield of("batch second", lambda d: call(d.ragged(batch_dim=1), d.tensor(3, 4)), (0,), LIGHT, 1)
    yield of("matrices by vectors", lambda d: call(d.ragged(Layout((3,), ())), d.ragged("flat")), (), LIGHT)


def columns(d: Draw) -> Ragged:
    """(B, -1, 3), as long as the second ragged dim of a batch that has two."""
    return d.ragged(lengths=tuple([n for _, n in d.sizes(Layout((), (), 2))]))


def bmm(rule: Rule) -> Iterator[Sample]:
    yield of("weights", lambda d: call(d.ragged(), each(d, 3, 4)))
    yield of("dense first", lambda d: call(each(d, 4, 3), turned(d, 3)), (2,), LIGHT)
    yield of("over the ragged dim", lambda d: call(*pair(d)), (), LIGHT)


def baddbmm(rule: Rule) -> Iterator[Sample]:
    yield of("dense", lambda d: call(each(d, 3, 4), *pair(d), beta=0.5), (), row=torch.addmm)
    ragged = lambda d: call(d.ragged(Layout((), (4,))), d.ragged(), each(d, 3, 4), alpha=2.0)  # noqa: E731
    yield of("ragged", ragged, modes=LIGHT, row=torch.addmm)


def addbmm(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        return torch.addmm(args[0], torch.cat(args[1].rows, 1), torch.cat(args[2].rows), **kwargs)

    yield Sample("sum over examples", lambda d: call(d.tensor(3, 4), *pair(d)), want)
    yield Sample("scaled", lambda d: call(d.tensor(3, 4), *pair(d), beta=0.5, alpha=2.0), want, LIGHT)


def einsum(rule: Rule) -> Iterator[Sample]:
    def eq(text: str, dims: Any, *drawn: Any, modes: Any = LIGHT) -> Sample:
        one = text.replace("b", "")
        row = lambda _, *xs: torch.einsum(one, *xs)  # noqa: E731
        return of(text, lambda d: call(text, *[x(d) for x in drawn]), dims, modes, row=row)

    x, w, wb, y = Draw.ragged, lambda d: d.tensor(3, 4), lambda d: each(d, 3, 4), lambda d: d.ragged("features")
    u = lambda d: d.ragged(lengths=tuple(reversed(d.lengths)))  # noqa: E731
    yield eq("bld,de->ble", (1,), x, w, modes=MODES)
    yield eq("bld,bmd->blm", (1, 2), x, u, modes=MODES)
    yield eq("bld,bld->bd", (), x, y, modes=MODES)
    yield eq("bld,bde->ble", (1,), x, wb)
    yield eq("bld,bde->bel", (2,), x, wb)
    yield eq("bld,ble->bde", (), x, y)
    yield eq("bld,bd->bl", (1,), x, lambda d: each(d, 3))
    yield eq("bld->bd", (), x)
    yield eq("bld->bdl", (2,), x)
    yield eq("bld,bmd,bme->ble", (1,), x, u, u)
    yield eq("bld,bmd->bd", (), x, u)
    yield eq("bld,de->be", (), x, w)
    yield eq("blmd->bld", (1,), lambda d: d.ragged("two"))
    yield eq("blmd,bmd->bdl", (2,), lambda d: d.ragged(Layout((), (3,), 2)), columns)
    yield eq("...d,de->...e", (1,), x, w)
    flat = lambda d: d.ragged("flat", lengths=tuple([n for _, n in d.sizes(Layout((), (), 2))]))  # noqa: E731
    yield eq("blm,bm->bl", (1,), lambda d: d.ragged(Layout((), (), 2)), flat)
    yield eq("bhld,bhmd->bhlm", (2, 3), lambda d: d.ragged(HEADS), lambda d: d.ragged(HEADS))

    def over_batch(ref: Any, args: Any, kwargs: Any) -> Any:
        return sum([a.T @ b for a, b in zip(args[1].rows, args[2].rows, strict=True)])

    yield Sample("bld,ble->de", lambda d: call("bld,ble->de", x(d), y(d)), over_batch, LIGHT)
    infinite = lambda d: call("bld,bmd->bd", x(d), Ragged([r / 0 for r in u(d).rows]))  # noqa: E731
    row = lambda _, a, b: torch.einsum("ld,md->d", a, b)  # noqa: E731
    yield of("infinities stay in their rows", infinite, (), ("eager",), row=row)


def simple(*samples: Sample) -> Callable[[Rule], Iterator[Sample]]:
    return lambda rule: iter(samples)


def scaled(d: Draw) -> Call:
    """Scales of one number for each operand."""
    one, kind = d.tensor(1), torch.nn.functional.ScalingType.TensorWise
    return call(d.ragged(), d.tensor(3, 4), one, kind, one, kind)


RAGGED: dict[str, Callable[[Rule], Iterator[Sample]]] = {
    "matmul": matmul, "bmm": bmm, "baddbmm": baddbmm, "addbmm": addbmm, "einsum": einsum,
    "mm": simple(
        of("weights", lambda d: call(d.ragged(), d.tensor(3, 4))),
        of("over the ragged dim", lambda d: call(*pair(d)), (), LIGHT),
    ),
    "mv": simple(
        of("one vector", lambda d: call(d.ragged(), d.tensor(3))),
        of("vectors", lambda d: call(d.ragged(), each(d, 3)), modes=LIGHT),
        of("ragged vectors", lambda d: call(turned(d, 3), d.ragged("flat")), (), LIGHT),
    ),
    "dot": simple(of("ragged", lambda d: call(d.ragged("flat"), d.ragged("flat")), ())),
    "vdot": simple(
        of("real", lambda d: call(d.ragged("flat"), d.ragged("flat")), ()),
        of("complex", lambda d: call(d.ragged("flat", "complex"), d.ragged("flat", "complex")), (), ("eager",)),
    ),
    "outer": simple(
        of("dense", lambda d: call(d.ragged("flat"), d.tensor(3))),
        of("ragged", lambda d: call(d.ragged("flat"), d.ragged("flat")), (1, 2), LIGHT),
    ),
    "inner": simple(
        of("dense", lambda d: call(d.ragged(), d.tensor(4, 3))),
        of("ragged", lambda d: call(d.ragged(), d.ragged()), (1, 2), LIGHT),
    ),
    "addmm": simple(
        of("bias", lambda d: call(d.tensor(4), d.ragged(), d.tensor(3, 4))),
        of("ragged, scaled", lambda d: call(
            d.ragged(Layout((), (4,))), d.ragged(), d.tensor(3, 4), beta=0.5, alpha=2.0), modes=LIGHT),
        of("not read", lambda d: call(d.tensor(4) * torch.nan, d.ragged(), d.tensor(3, 4), beta=0), modes=("eager",)),
    ),
    "addmv": simple(of("ragged", lambda d: call(d.ragged("flat"), d.ragged(), d.tensor(3)))),
    "addr": simple(of("ragged", lambda d: call(d.ragged(), d.ragged("flat"), d.tensor(3)))),
    "tensordot": simple(
        of("last by first", lambda d: call(d.ragged(), d.tensor(3, 4), 1)),
        Sample(
            "batch and ragged dims", lambda d: call(d.ragged(), d.ragged(), ([0, 1], [0, 1])),
            lambda ref, args, kwargs: sum([a.T @ b for a, b in zip(args[0].rows, args[1].rows, strict=True)]), LIGHT,
        ),
    ),
    "bilinear": simple(
        of("bias", lambda d: call(d.ragged(), d.ragged(Layout((), (2,))), d.tensor(4, 3, 2), d.tensor(4))),
        of("no bias", lambda d: call(x := d.ragged(), x, d.tensor(4, 3, 3)), modes=LIGHT),
    ),
    "kron": simple(
        of("matrix", lambda d: call(d.ragged(), d.tensor(2, 4))),
        of("vector", lambda d: call(d.ragged(), d.tensor(2)), modes=LIGHT),
        of("ragged dim last", lambda d: call(turned(d, 3), d.tensor(2, 2)), (2,), LIGHT),
    ),
    "grouped_mm": simple(
        of("weights of each example", lambda d: call(d.ragged(), each(d, 3, 4))),
    ),
    **dict.fromkeys(("scaled_mm", "scaled_grouped_mm"), simple(Sample("weights", scaled, lambda *given: None))),
    "multi_dot": simple(of("weights", lambda d: call([d.ragged(), d.tensor(3, 4), d.tensor(4, 2)]),
                           row=lambda xs: xs[0] @ xs[1] @ xs[2])),
    "chain_matmul": simple(of("weights", lambda d: call(d.ragged(), d.tensor(3, 4), d.tensor(4, 2)),
                              row=lambda *xs: xs[0] @ xs[1] @ xs[2])),
}  # fmt: skip
