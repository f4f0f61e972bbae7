"""Numbers of a call that vary: as many graphs as torch takes for the same call on a plain tensor, for each spelling.

torch makes a graph for each number of some calls (the `value` of `F.pad`, the `p` of dropout, an index by `range(i)`):
there a batch takes as many. A size of 0 or 1 takes one of its own. A call that torch begins to serve with two shall do
so here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

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
