"""Functions of no row, compiled: a batch of another size does not compile anew.

A plain tensor compiles twice: torch makes a size dynamic when it changes. Where batches are ragged it is marked before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import tdc
from tdc import TensorDict
from tdc.compile import counted

SIZES = (5, 7, 9)
INDICES = {"int": lambda n: 1, "slice": lambda n: slice(1, 3), "tail": lambda n: slice(1, None),
           "mask": lambda n: torch.arange(n) % 2 == 0, "rows": lambda n: torch.tensor([0, 2])}  # fmt: skip
WRITES: dict[str, Callable[[Any], Any]] = {
    "set": lambda at: at.set(1.0), "add": lambda at: at.add(1.0), "mul": lambda at: at.mul(2.0),
    "max": lambda at: at.max(0.5), "apply": lambda at: at.apply(torch.sin), "mapping": lambda at: at.set({"a": 2.0}),
}  # fmt: skip


def dense(n: int) -> TensorDict:
    g = torch.Generator().manual_seed(n)
    return TensorDict({"a": torch.randn(n, 2, generator=g), "in": {"b": torch.randn(n, generator=g)}}, [n])


def ragged(n: int) -> TensorDict:
    return dense(n).set("rows", tdc.pack([torch.ones(i % 3 + 1) for i in range(n)]))


def compiles(fn: Callable[..., Any], make: Callable[[int], tuple[Any, ...]]) -> int:
    """How often a function compiles for batches of all sizes; its results are those of the eager call."""
    torch._dynamo.reset()
    f = counted(fn, backend="eager")
    for n in SIZES:
        got, want = pytree.tree_leaves(f(*make(n))), pytree.tree_leaves(fn(*make(n)))
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    return f.counts.compiles


def pairs() -> list[object]:
    """Every write with every index; fast are those of `set`, and those at rows."""
    slow = {(w, i): w != "set" and i != "rows" for w in WRITES for i in INDICES}
    return [pytest.param(*pair, marks=[pytest.mark.slow] if off else []) for pair, off in slow.items()]


@pytest.mark.cases(2, 3)
@pytest.mark.parametrize(("write", "index"), pairs())
def test_writes_at_an_index(write: str, index: str):
    if index in ("int", "slice", "tail"):
        fixed = INDICES[index](0)
        assert compiles(lambda td: WRITES[write](td.at[fixed]), lambda n: (dense(n),)) == 2
    else:
        assert compiles(lambda td, i: WRITES[write](td.at[i]), lambda n: (dense(n), INDICES[index](n))) == 2


@pytest.mark.cases(1, 0)
@pytest.mark.parametrize("write", ["set", "add", "mul"])
def test_writes_beside_ragged_leaves(write: str):
    def fn(td: TensorDict, i: torch.Tensor) -> TensorDict:
        at = td.at[i]
        return at.set({"a": 1.0}) if write == "set" else at.add({"a": 1.0}) if write == "add" else at.mul({"a": 2.0})

    assert compiles(fn, lambda n: (ragged(n), torch.tensor([0, 2]))) == 2


PARTS: dict[str, tuple[Callable[..., Any], Callable[[int], Any], int]] = {
    "chunk": (lambda td: td.chunk(2), dense, 2),
    "chunk, beside ragged leaves": (lambda td: td.chunk(2)[0], ragged, 2),
    "chunk, packed": (lambda x: x.chunk(2)[0], lambda n: ragged(n)["rows"], 1),
    "chunk, padded": (lambda x: x.chunk(2)[1], lambda n: ragged(n)["rows"].to_padded(), 1),
    "split, half": (lambda td: td.split((len(td) + 1) // 2), dense, 2),
    "tensor_split": (lambda td: torch.tensor_split(td, 2), dense, 2),
    "tensor_split, packed": (lambda x: torch.tensor_split(x, 2)[0], lambda n: ragged(n)["rows"], 1),
    "tensor_split, padded": (lambda x: torch.tensor_split(x, 2)[1], lambda n: ragged(n)["rows"].to_padded(), 1),
}


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize("name", PARTS)
def test_parts(name: str):
    fn, make, count = PARTS[name]
    assert compiles(fn, lambda n: (make(n),)) == count


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "nbytes": (lambda td: td["a"] * tdc.nbytes(td), dense),
    "nbytes, ragged": (lambda td: td["a"] * tdc.nbytes(td), ragged),
    "param_count": (lambda td: td["a"] * tdc.param_count(td), dense),
    "unflatten_keys": (lambda td: (td * 2).flatten_keys(".").unflatten_keys("."), dense),
    "merge": (lambda td: tdc.merge(td.select("a"), (td * 2).select("in")), dense),
    "stack_keys": (lambda td: tdc.stack_keys(td.set("c", td["a"] * 2), ["a", "c"], "x"), dense),
    "cat_keys": (lambda td: tdc.cat_keys(td.set("c", td["a"] * 2), ["a", "c"], "x"), dense),
    "ravel": (lambda td: tdc.ravel(td)[0] * 2, dense),
    "pad_sequence": (lambda td: tdc.data.pad_sequence([td, td * 2]), dense),
    "ragged_stack": (lambda td: tdc.data.ragged_stack([td, td * 2])["a"], dense),
    "collate": (lambda td: tdc.data.collate([td, td * 2]), dense),
    "copy_": (lambda td: tdc.copy_(td.clone(), td[:2] * 2, slice(1, 3)), dense),
    "to_padded": (lambda td: td["rows"].to_padded(), ragged),
    "index": (lambda td: td[1:], ragged),
}


@pytest.mark.cases(0, 4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str):
    fn, make = FUNCTIONS[name]
    assert compiles(fn, lambda n: (make(n),)) <= 2


def test_bytes_in_a_graph():
    """One tensor twice and expanded dims count once, as in eager; views of one buffer count one by one."""
    x = torch.ones(4, 8)
    td = TensorDict({"x": x, "again": x, "row": torch.ones(8).expand(4, 8)}, [4])
    f = counted(lambda td: td["x"] * tdc.nbytes(td), backend="eager")
    assert f(td)[0, 0] == tdc.nbytes(td) == 160
    views = TensorDict({"x": x, "half": x[:, :4]}, [4])
    assert (tdc.nbytes(views), int(f(views)[0, 0])) == (128, 192)


def test_summary_in_a_graph():
    seen: list[str] = []

    def fn(td: TensorDict) -> torch.Tensor:
        seen.append(td.summary().total)
        return td["a"] * 2

    counted(fn, backend="eager")(dense(5))
    assert seen == [dense(5).summary().total]


@pytest.mark.parametrize("op", [torch.equal, torch.allclose])
def test_a_number_of_python_is_not_in_a_graph(op: Any):
    """torch's own functions end a graph, too; outside of fullgraph they still run."""
    with pytest.raises(Exception, match=rf"tdc\.{op.__name__}: expected values that can be read, got traced"):
        counted(lambda td: op(td, td), backend="eager")(dense(5))
    assert torch.compile(lambda td: op(td, td), backend="eager")(ragged(5)) is True
