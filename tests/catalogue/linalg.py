"""Samples of linear algebra: matrices at every position, square matrices of every size, pairs of vectors, diagonals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Call, Draw, Layout, Sample, call
from torch import Tensor

from catalogue.matmul import each, simple
from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Ragged, loop

LIGHT = ("eager", "grad", "vmap")
MATRICES, FLAT = Layout((), (3, 3)), Layout((), ())


def definite(x: Tensor) -> Tensor:
    """A symmetric matrix that is easy to invert."""
    return x @ x.mT / (x.shape[-1] + 1) + torch.eye(x.shape[-1])


def matrices(d: Draw, domain: str = "real") -> Ragged:
    """(B, -1, 3, 3)."""
    rows = d.ragged(MATRICES, domain).rows
    return Ragged([definite(r) for r in rows], (1,), slack=d.slack)


def squares(d: Draw, domain: str = "real") -> Ragged:
    """(B, -1, -1), square."""
    return Ragged([definite(d.tensor(n, n, domain=domain)) for n in d.lengths], (1, 2), slack=d.slack)


def triangles(d: Draw) -> Ragged:
    """(B, -1, -1), square, with eigenvalues 1, 2, ... and vectors that rounding leaves as they are."""
    rows = [d.tensor(n, n, domain="constant").tril(-1) / 4 + torch.arange(1.0, n + 1).diag() for n in d.lengths]
    return Ragged(rows, (1, 2), slack=d.slack)


def of(label: str, draw: Callable[[Draw], Call], *dims: Any, modes: Any = MODES, row: Any = None) -> Sample:
    """A call that gives one or several results: ragged dims of each, none for a dense one."""

    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        rows = loop(row or ref, args, kwargs)
        if isinstance(rows[0], Tensor):
            return packed(rows, dims[0] if dims else (1,))
        ends = dims or ((1,),) * len(rows[0])
        return tuple(packed(list(part), d) for part, d in zip(zip(*rows, strict=True), ends, strict=True))

    return Sample(label, draw, want, modes)


def packed(rows: list[Tensor], dims: tuple[int, ...]) -> Any:
    return Ragged(rows, dims) if dims else torch.stack(rows)


def of_each(*args: Any, modes: Any = MODES, domain: str = "real", **kwargs: Any) -> Callable[[Rule], Iterator[Sample]]:
    """A function of the matrix at every position."""
    return simple(of("at every position", lambda d: call(matrices(d, domain), *args, **kwargs), modes=modes))


def of_squares(
    *dims: Any, args: tuple[Any, ...] = (), modes: Any = MODES, domain: str = "real"
) -> Callable[[Rule], Iterator[Sample]]:
    """A function that has a meaning for padded square matrices as well."""
    return simple(
        of("at every position", lambda d: call(matrices(d, domain), *args), modes=LIGHT),
        of("square", lambda d: call(squares(d, domain), *args), *dims, modes=modes),
    )


def lu(rule: Rule) -> Iterator[Sample]:
    """Three matrices as a function, factors and pivots as a method."""
    dims = ((1, 2), (1, 2), (1, 2)) if rule.op is torch.linalg.lu else ((1, 2), (1,))
    return of_squares(*dims)(rule)


def solve(rule: Rule) -> Iterator[Sample]:
    """Static and ragged matrices, dense and ragged right-hand sides."""
    given = {"upper": False} if rule.name == "solve_triangular" else {}
    after = ((1,), ()) if rule.name == "solve_ex" else ()

    def order(a: Any, b: Any) -> Call:
        return call(b, a, **given) if rule.name == "cholesky_solve" else call(a, b, **given)

    static = ((1,), (1,)) if rule.name == "solve_ex" else ()
    yield of("dense sides", lambda d: order(matrices(d), d.tensor(3, 2)), *static)
    sides = Layout((), (3, 2))
    yield of("sides of each position", lambda d: order(matrices(d), d.ragged(sides)), *static, modes=LIGHT)
    yield of("square", lambda d: order(squares(d), d.ragged(Layout((), (2,)))), *after)
    if rule.name == "solve_ex":  # one matrix, one report
        return
    wide = lambda d: order(definite(d.tensor(3, 3)), d.ragged(Layout((3,), ())))  # noqa: E731
    yield of("ragged sides", wide, (2,), modes=LIGHT)


def traced(rule: Rule) -> Iterator[Sample]:
    """Matrices of any form, and wide ones: of a tall one the gradient of torch 2.11 itself is wrong."""
    right = torch.__version__ >= "2.12"
    yield of("one ragged dim", lambda d: call(d.ragged()), (), modes=MODES if right else ("eager", "vmap"))
    yield of("two ragged dims", lambda d: call(d.ragged(Layout((), (), 2))), (), modes=LIGHT if right else ("eager",))
    yield of("wide", lambda d: call(d.ragged(Layout((), (9,)))), ())


def triangle(rule: Rule) -> Iterator[Sample]:
    yield of("at every position", lambda d: call(matrices(d), 1), modes=LIGHT)
    yield of("ragged", lambda d: call(d.ragged()))
    yield of("two ragged dims", lambda d: call(d.ragged(Layout((), (), 2)), -1), (1, 2), modes=LIGHT)


def pairs(rule: Rule) -> Iterator[Sample]:
    """Along a static dim and the ragged one."""

    def along(dim: int) -> dict[str, int]:
        return {} if rule.name == "pairwise_distance" else {"dim": dim}

    def row(*xs: Any, dim: int = -1) -> Tensor:
        inner = {} if rule.name == "pairwise_distance" else {"dim": dim - (dim > 0)}
        return rule.ref(*xs, **inner)

    yield of("features", lambda d: call(d.ragged(), d.ragged(), **along(2)), row=row)
    yield of("dense", lambda d: call(d.ragged(), d.tensor(3), **along(-1)), modes=LIGHT, row=row)
    if rule.name == "pairwise_distance":
        last = Layout((2,), ())
        yield of("ragged", lambda d: call(d.ragged(last), d.ragged(last)), (), row=row)
        yield of("kept", lambda d: call(d.ragged(), d.ragged(), keepdim=True), modes=LIGHT)
    else:
        yield of("ragged", lambda d: call(d.ragged(), d.ragged(), dim=1), (), row=row)


def cross(rule: Rule) -> Iterator[Sample]:
    row = lambda *xs, **_: torch.linalg.cross(*torch.broadcast_tensors(*xs))  # noqa: E731
    yield of("features", lambda d: call(d.ragged(), d.ragged(), dim=2), row=row)
    yield of("dense", lambda d: call(d.ragged(), d.tensor(3), dim=-1), modes=LIGHT, row=row)
    if rule.op is torch.linalg.cross:
        yield of("no dim", lambda d: call(d.ragged(), d.ragged()), modes=LIGHT, row=row)
    else:
        first = lambda d: d.ragged(Layout((3,), (3,)))  # noqa: E731
        along = lambda a, b: torch.linalg.cross(a, b, dim=0)  # noqa: E731
        yield of("no dim", lambda d: call(first(d), first(d)), (2,), modes=LIGHT, row=along)


def cdist(rule: Rule) -> Iterator[Sample]:
    other = lambda d: d.ragged(lengths=tuple(reversed(d.lengths)))  # noqa: E731
    yield of("points", lambda d: call(d.ragged(), d.tensor(4, 3)))
    yield of("ragged", lambda d: call(d.ragged(), other(d)), (1, 2))
    yield of("points of each example", lambda d: call(d.ragged(), each(d, 4, 3), 1.0), modes=LIGHT)
    yield of("points first", lambda d: call(d.tensor(4, 3), d.ragged()), (2,), modes=LIGHT)


def diagonal(rule: Rule) -> Iterator[Sample]:
    """Of static dims, ragged ones, and one of each."""

    def at(offset: int, a: int, b: int) -> Any:
        return {"offset": offset, "dim1": a, "dim2": b}

    def row(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Tensor:
        a, b = [n - (n > 0) for n in (dim1, dim2)]
        empty = min(x.shape[a] + min(offset, 0), x.shape[b] - max(offset, 0)) < 0  # torch wants an offset in reach
        return x.diagonal(0, a, b)[..., :0] if empty else x.diagonal(offset, a, b)

    yield of("static", lambda d: call(matrices(d), **at(1, 2, 3)), row=row)
    yield of("ragged", lambda d: call(d.ragged("two"), **at(0, 1, 2)), (2,), row=row)
    yield of("ragged and static", lambda d: call(d.ragged(), **at(-1, 1, 2)), modes=LIGHT, row=row)


def diag_embed(rule: Rule) -> Iterator[Sample]:
    yield of("static", lambda d: call(d.ragged()), modes=LIGHT)
    yield of("ragged", lambda d: call(d.ragged("flat"), 1), (1, 2))
    yield of("ragged, second", lambda d: call(d.ragged(Layout((2,), ()))), (2, 3), modes=LIGHT)


def diag(rule: Rule) -> Iterator[Sample]:
    yield of("vectors", lambda d: call(d.ragged("flat")), (1, 2))
    if rule.name == "diag":
        yield of("matrices", lambda d: call(d.ragged()), modes=LIGHT, row=lambda x: x.diagonal())


def product_of_reflections(d: Draw) -> Call:
    return call(d.ragged(Layout((), (3, 2))), d.ragged(Layout((), (2,))))


def factors(d: Draw) -> tuple[Any, Any]:
    """LU factors and pivots at every position; tensors of a draw, so not differentiated."""
    found = [torch.linalg.lu_factor(r.detach()) for r in matrices(d).rows]
    return tuple(Ragged([f[k] for f in found], (1,), slack=d.slack) for k in (0, 1))


def factored(rule: Rule) -> Iterator[Sample]:
    """What takes a factorization: pivots and right-hand sides."""

    def draw(sides: Callable[[Draw], Any]) -> Callable[[Draw], Call]:
        def one(d: Draw) -> Call:
            (a, pivots), b = factors(d), sides(d)
            return call(b, a, pivots) if rule.op is torch.lu_solve else call(a, pivots, b)

        return one

    domain = "constant" if rule.name == "ldl_solve" else "real"
    yield of("dense sides", draw(lambda d: d.tensor(3, 2, domain=domain)))
    yield of("sides of each position", draw(lambda d: d.ragged(Layout((), (3, 2)), domain)), modes=LIGHT)


def vander(rule: Rule) -> Iterator[Sample]:
    yield of("ragged", lambda d: call(d.ragged("flat"), N=3))
    if rule.op is torch.linalg.vander:
        yield of("features", lambda d: call(d.ragged()), modes=LIGHT)
    else:
        yield of("increasing", lambda d: call(d.ragged("flat"), 4, True), modes=LIGHT)


def observations(rule: Rule) -> Iterator[Sample]:
    yield of("vectors", lambda d: call(d.ragged("flat", lengths=tuple([n + 2 for n in d.lengths]))), ())
    yield of(
        "rows", lambda d: call(d.ragged(Layout((2,), ()), lengths=tuple([n + 2 for n in d.lengths]))), (), modes=LIGHT
    )


def reflected(d: Draw) -> Call:
    return call(*product_of_reflections(d)[0], d.ragged(Layout((), (3, 4))))


RAGGED: dict[str, Callable[[Rule], Iterator[Sample]]] = {
    "det": of_squares(()), "logdet": of_squares(()), "slogdet": of_squares((), ()),
    "inv": of_squares((1, 2)), "matrix_power": of_squares((1, 2), args=(3,)), "matrix_exp": of_squares((1, 2)),
    "cholesky": of_squares((1, 2)), "cholesky_inverse": of_squares((1, 2)),
    "inv_ex": of_squares((1, 2), ()), "cholesky_ex": of_squares((1, 2), ()),
    "pinv": of_squares((1, 2)), "qr": of_squares((1, 2), (1, 2)), "lu": lu,
    "eigh": of_squares((1,), (1, 2)), "svd": of_squares((1, 2), (1,), (1, 2)),
    "eigvalsh": of_squares((1,)), "svdvals": of_squares((1,)),
    "lu_factor": of_squares((1, 2), (1,)), "lu_factor_ex": of_squares((1, 2), (1,), ()),
    **dict.fromkeys(("matrix_norm", "cond"), of_each()), "ldl_factor": of_each(domain="constant"),
    "matrix_rank": of_squares((), domain="constant"), "eigvals": of_squares((1,), domain="constant"),
    "eig": simple(of("at every position", lambda d: call(matrices(d, "constant")), modes=LIGHT),
                  of("square", lambda d: call(triangles(d)), (1,), (1, 2))),
    "householder_product": simple(of("reflections", product_of_reflections)),
    **dict.fromkeys(("solve", "solve_ex", "solve_triangular", "cholesky_solve"), solve),
    **dict.fromkeys(("ldl_factor_ex", "geqrf"), of_each(domain="constant")), "ormqr": simple(of("dense", reflected)),
    "lu_unpack": simple(of("factors", lambda d: call(*factors(d)))), "vander": vander,
    **dict.fromkeys(("lu_solve", "ldl_solve"), factored), **dict.fromkeys(("cov", "corrcoef"), observations),
    "trace": traced, "tril": triangle, "triu": triangle,
    **dict.fromkeys(("cosine_similarity", "pairwise_distance", "vecdot"), pairs), "cross": cross, "cdist": cdist,
    "diagonal": diagonal, "diag_embed": diag_embed, "diag": diag, "diagflat": diag,
    "lstsq": simple(of("at every position", lambda d: call(matrices(d), d.tensor(3, 2)), modes=LIGHT)),
}  # fmt: skip
