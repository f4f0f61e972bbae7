"""Numbers of a call that vary: as many graphs as torch takes for the same call on a plain tensor, for each spelling.

torch makes a graph for each number of some calls (the `value` of `F.pad`, the `p` of dropout, an index by `range(i)`):
there a batch takes as many. A size of 0 or 1 takes one of its own. A call that torch begins to serve with two shall do
so here, too. A dim that is an argument is a constant of the graph, whatever values it took before; operators of Python
between containers and with numbers have the numbers of eager calls.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

import tdc
from tdc.compile import counted

Fn = Callable[..., Any]
PACKED = tdc.pack([torch.randn(n, 6) for n in (9, 8, 9, 7, 9, 8, 9, 7)])
DENSE = torch.randn(8, 9, 6)
INTS: dict[str, Fn] = {
    "topk": lambda x, i: torch.topk(x, i, 1).values,
    "topk, smallest": lambda x, i: x.topk(i, 1, largest=False).indices,
    "topk of features": lambda x, i: torch.topk(x, i, 2).values,
    "kthvalue": lambda x, i: torch.kthvalue(x, i, 1).values,
    "repeat": lambda x, i: x.repeat(i, 1, 1),
    "repeat of features": lambda x, i: x.repeat(1, 1, i),
    "repeat_interleave": lambda x, i: x.repeat_interleave(i, 0),
    "pad by i": lambda x, i: F.pad(x, (0, 0, 0, i)),
    "pad with i": lambda x, i: F.pad(x, (1, 1), value=i),
    "range(i)": lambda x, i: x[range(i)] * 2,
    "a list of a range": lambda x, i: x[list(range(i))] * 2,
    "roll": lambda x, i: x.roll(i, 1),
    "round": lambda x, i: torch.round(x, decimals=i),
}
FLOATS: dict[str, Fn] = {
    "dropout": lambda x, p: F.dropout(x, p),
    "pad with p": lambda x, p: F.pad(x, (1, 1), value=p),
    "clamp": lambda x, p: x.clamp(-p, p),
    "masked_fill": lambda x, p: x.masked_fill(x > 0, p),
    "leaky_relu": lambda x, p: F.leaky_relu(x, p),
    "quantile": lambda x, p: x.quantile(p, 2),
    "vector_norm": lambda x, p: torch.linalg.vector_norm(x, p, 1),
}
CASES = [(name, fn, (2, 3, 4, 3, 5)) for name, fn in INTS.items()]
CASES += [(name, fn, (0.1, 0.2, 0.3, 0.2, 0.4)) for name, fn in FLOATS.items()]


def compiles(fn: Fn, x: Any, numbers: tuple[float, ...]) -> int:
    """Compiles for all of the numbers; a graph gives what an eager call does."""
    torch._dynamo.reset()  # which remembers, by line of code, numbers that have varied
    run = counted(fn, backend="eager")
    for n in numbers:
        got = run(x, n)
        if fn is not FLOATS["dropout"]:
            tdc.testing.assert_close(got, fn(x, n))
    return run.counts.compiles


@pytest.mark.cases(7, 40)
@pytest.mark.parametrize("kind", ["nested", "masked"])
@pytest.mark.parametrize(("name", "fn", "numbers"), CASES, ids=[name for name, _, _ in CASES])
def test_as_many_graphs_as_for_a_plain_tensor(kind: str, name: str, fn: Fn, numbers: tuple[float, ...]):
    x = PACKED if kind == "nested" else PACKED.to_padded()
    assert compiles(fn, x, numbers) <= compiles(fn, DENSE, numbers)


@pytest.mark.parametrize("copies", [0, 1, 3])
@pytest.mark.parametrize("lengths", [(2, 0, 3), ()])
def test_copies_of_rows_are_those_of_a_loop(lengths: tuple[int, ...], copies: int):
    rows = [torch.randn(n, 4) for n in lengths]
    x: Any = tdc.pack(rows) if rows else tdc.pack([torch.randn(1, 4)])[:0]
    y = x.repeat(copies, 1, 2)
    assert len(y) == copies * len(rows)
    for got, row in zip(y.unbind(), rows * copies, strict=True):
        assert got.equal(row.repeat(1, 2))
    assert y.sum(1).shape == (copies * len(rows), 8)


LOOPS: dict[str, Any] = {
    "scan": lambda x, k: tdc.scan(lambda c, a: (c * k + a, c), x.sum(), x)[0],
    "while_loop": lambda x, k: tdc.while_loop(lambda v: v.sum() < 20, lambda v: (v * k,), (x,))[0],
    "cond": lambda x, k: tdc.cond(x.sum() > k, lambda a: a * k, lambda a: a / k, (x,)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_float_that_varies_is_named(name: str):
    run: Any = tdc.compile.counted(LOOPS[name], backend="eager")

    def twice() -> None:
        for k in (2.5, 3.5):
            run(torch.ones(3), k)

    with pytest.raises(tdc.UnsupportedError, match=r"got a float that varies\nhint: torch\.tensor\(k\), as an argum"):
        twice()
    k = torch.tensor(2.5)
    torch.testing.assert_close(run(torch.ones(3), k), LOOPS[name](torch.ones(3), k))


# -- dims


OF_DIMS: dict[str, Callable[[Any, int], Any]] = {
    "sum": lambda x, d: x.sum(d), "softmax": lambda x, d: x.softmax(d), "std": lambda x, d: x.std(d),
    "cumsum": lambda x, d: x.cumsum(d), "sort": lambda x, d: x.sort(d).values, "topk": lambda x, d: x.topk(1, d).values,
    "argmax": lambda x, d: x.argmax(d), "flip": lambda x, d: x.flip(d), "transpose": lambda x, d: x.transpose(d, 1),
    "movedim": lambda x, d: x.movedim(d, 1), "unsqueeze": lambda x, d: x.unsqueeze(d),
    "unbind": lambda x, d: x.unbind(d)[0], "cat": lambda x, d: torch.cat([x, x], d),
    "normalize": lambda x, d: F.normalize(x, dim=d),
    "vmap": lambda x, d: tdc.vmap(lambda v: v + 1, in_dims=d, out_dims=d)(x),
}  # fmt: skip
KINDS = {
    "nested": (tdc.pack([torch.rand(n, 6, 4) for n in (2, 4, 3)]), (1, 2, 3, -1, -2)),
    "masked": (tdc.pack([torch.rand(n, 6, 4) for n in (2, 4, 3)]).to_padded(), (1, 2, 3, -1, -2)),
    "tensordict": (tdc.TensorDict({"a": torch.rand(3, 4, 5), "b": torch.rand(3, 4)}, [3, 4]), (0, 1, -1, -2)),
}


QUICK = [("nested", "sum"), ("masked", "sum"), ("tensordict", "sum"), ("masked", "transpose"), ("nested", "vmap")]
CASES_OF_DIMS = [
    pytest.param(kind, name, marks=[] if (kind, name) in QUICK else [pytest.mark.slow])
    for kind in KINDS
    for name in OF_DIMS
]


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize(("kind", "name"), CASES_OF_DIMS)
def test_a_dim_that_varies(kind: str, name: str):
    (x, dims), fn = KINDS[kind], OF_DIMS[name]
    compiled = torch.compile(lambda x, d: fn(x, d), fullgraph=True, backend="eager")
    ran = 0
    for d in dims:
        try:
            want = fn(x, d)
        except tdc.TdcError:
            continue
        got = compiled(x, d)
        assert type(got) is type(want)
        assert got.shape == want.shape
        for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
        ran += 1
    assert ran >= 2


# -- operators of Python


SQUARES = tdc.pack([torch.rand(n, 2, 2) + 1 for n in (3, 0, 2)])
OTHERS = tdc.pack([torch.rand(n, 2, 2) + 1 for n in (1, 4, 2)])
TD = tdc.TensorDict({"x": torch.rand(3, 2, 2) + 1}, [3, 2, 2])
TWO: Any = tdc.pack([SQUARES, OTHERS])
BATCHES: dict[str, Any] = {"nested": SQUARES, "masked": SQUARES.to_padded(), "two levels": TWO, "tensordict": TD}
SLOW = ("masked", "two levels")  # seconds of tracing
OF_FLOATS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "lt", "ge")
OF_INTS = ("and_", "or_", "xor", "lshift", "rshift")
NUMBERS = ("mul", "mod", "pow", "eq", "lt")  # beside a batch: the others go the same way
IN_PLACE = ("iadd", "ipow", "iand")


def all_of(x: Any, y: Any, n: int) -> list[Any]:
    """The results of operators."""
    i, j = x.long(), y.long()
    made = [-x, abs(x), ~i, +x]
    made += [getattr(operator, name)(x, y) for name in OF_FLOATS] + [getattr(operator, name)(i, j) for name in OF_INTS]
    made += [getattr(operator, name)(x, n) for name in NUMBERS] + [n - x, n**x]
    return made + [getattr(operator, name)(i * 1, j) for name in IN_PLACE]


def products(x: Any, y: Any) -> list[Any]:
    """The matrix products of operators."""
    z = x * 1
    z @= y
    return [x @ y, z, x @ x.mT, (x @ y) ** 2]


@pytest.mark.parametrize("kind", ["nested", "tensordict", *[pytest.param(k, marks=pytest.mark.slow) for k in SLOW]])
def test_operators(kind: str):
    x = BATCHES[kind]
    run = counted(all_of, backend="eager")
    tdc.testing.assert_close(run(x, x + 0.5, 2), all_of(x, x + 0.5, 2))
    assert run.counts.graphs == 1


@pytest.mark.parametrize("kind", ["nested", "masked"])
def test_matrix_products(kind: str):
    x = BATCHES[kind]
    run = counted(products, backend="eager")
    for y in (x, x.flip(0)):
        tdc.testing.assert_close(run(y, y + 1), products(y, y + 1))
    assert run.counts.compiles == 1
