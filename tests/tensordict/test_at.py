"""`td.at[index]` with indices out of range: dropped or clipped, against the same write with indices in range."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from texts import Says, T, says

from tdc import ShapeError, TensorDict
from tdc.compile import counted, dynamic

ROWS = T([0, 5, -1, -9])


def tree() -> Any:
    return TensorDict({"a": torch.arange(12.0).view(3, 4), "b": {"c": torch.ones(3, 4, 2)}}, [3, 4])


def same(a: Any, b: Any) -> bool:
    return all([torch.equal(a[key], b[key]) for key in b.keys(True, True)])


CALLS: dict[str, Any] = {
    "set": lambda at, **k: at.set(9.0, **k), "add": lambda at, **k: at.add(2.0, **k),
    "mul": lambda at, **k: at.mul(3.0, **k), "min": lambda at, **k: at.min(-1.0, **k),
    "max": lambda at, **k: at.max(99.0, **k), "apply": lambda at, **k: at.apply(lambda x: x - 7, **k),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_out_of_range(call: str):
    td, run = tree(), CALLS[call]
    assert same(run(td.at[ROWS], mode="drop"), run(td.at[T([0, -1])]))
    assert same(run(td.at[:, T([9, 1])], mode="drop"), run(td.at[:, T([1])]))
    assert same(run(td.at[..., T([1, -5])], mode="drop"), run(td.at[..., T([1])]))
    assert same(run(td.at[7], mode="drop"), td)
    assert same(run(td.at[-2], mode="drop"), run(td.at[1]))
    assert same(run(td.at[[0, 3], [1, 1]], mode="drop"), run(td.at[0, 1]))
    assert same(run(td.at[T([2, 5])[:1]], mode="clip"), run(td.at[2]))
    assert same(run(td.at[T([7])], mode="clip"), run(td.at[2]))
    assert same(run(td.at[T([-7])], mode="clip"), run(td.at[0]))
    assert same(run(td.at[7, -9], mode="clip"), run(td.at[2, 0]))
    assert same(run(td.at[td["a"] > 3], mode="drop"), run(td.at[td["a"] > 3]))
    assert same(run(td.at[None, 0], mode="drop"), run(td.at[0]))


def test_values_by_key():
    td = tree()
    out = td.at[T([1, 8])].set({"a": T([[1.0] * 4, [2.0] * 4])}, mode="drop")
    assert out["a"].tolist() == [[0, 1, 2, 3], [1] * 4, [8, 9, 10, 11]]
    assert out["b", "c"] is td["b", "c"]


def zeros(*features: int) -> TensorDict:
    return TensorDict({"x": torch.zeros(3, *features), "n": {"y": torch.zeros(3, 2)}}, [3])


def test_rows_are_never_features():
    two = TensorDict({"x": T([1.0, 2.0])}, [2])
    assert zeros().at[[0, 1]].set(two)["x"].tolist() == [1, 2, 0]
    assert zeros(2).at[[0, 1]].set(two)["x"].tolist() == [[1, 1], [2, 2], [0, 0]]  # as many rows as features
    assert zeros(4).at[[0, 2]].add(two)["x"][2].tolist() == [2] * 4
    assert zeros(2).at[[0, 1]].set({"x": T([1.0, 2.0])})["x"].tolist() == [[1, 2], [1, 2], [0, 0]]
    assert zeros(2).at[[0, 1]].set(TensorDict({"x": T([1.0, 2.0])}))["x"].tolist() == [[1, 2], [1, 2], [0, 0]]
    row, one = zeros(2) + 3, (zeros(2) + 4)[:1]
    assert zeros(2).at[1:].set(row[0])["x"].tolist() == [[0, 0], [3, 3], [3, 3]]
    assert zeros(2).at[1:].set(one)["n", "y"].tolist() == [[0, 0], [4, 4], [4, 4]]
    nested = zeros(2).at[[0, 1]].set({"n": TensorDict({"y": T([5.0, 6.0])}, [2])})
    assert nested["n", "y"].tolist() == [[5, 5], [6, 6], [0, 0]]


def test_rows_in_a_graph():
    fn = counted(lambda td, i, rows: td.at[i].set(rows), backend="eager")
    for n in (2, 3, 4):
        rows = TensorDict({"x": torch.arange(1.0, n + 1), "n": {"y": torch.ones(n, 2)}}, [n])
        td, index = TensorDict({"x": torch.zeros(5, 4), "n": {"y": torch.zeros(5, 2)}}, [5]), torch.arange(n)
        assert same(fn(td, dynamic(index), dynamic(rows)), td.at[index].set(rows))
    assert (fn.counts.graphs, fn.counts.compiles) == (1, 1)
    with pytest.raises(Exception, match="spans batch dims"):  # Dynamo's, with this text in it
        torch.compile(lambda td, o: td.at[[0, 1]].set(o), fullgraph=True, backend="eager")(zeros(4), zeros(4))


def test_an_inner_node_keeps_its_own_batch_dims():
    td = TensorDict({"p": TensorDict({"q": torch.zeros(3, 4, 2)}, [3, 4])}, [3])
    inner = TensorDict({"q": torch.ones(4, 2)}, [4])
    assert td.at[1].set({"p": inner})["p", "q"].sum((1, 2)).tolist() == [0, 8, 0]
    assert td.at[[0, 1]].set({"p": (td["p"] + 1)[:2]})["p", "q"].sum((1, 2)).tolist() == [8, 8, 0]


@pytest.mark.parametrize("op", ["set", "add", "mul", "min", "max"])
@pytest.mark.parametrize(
    ("index", "value"),
    [
        ([0, 1], TensorDict({"x": torch.arange(4.0)}, [4])),
        (0, TensorDict({"x": torch.arange(4.0)}, [4])),
        ([0, 1], TensorDict({"x": torch.ones(2, 2, 4)}, [2])),
        ([0, 1], TensorDict({"x": torch.ones(2, 4)}, [2, 4])),
        (slice(None), torch.arange(4.0)),
    ],
)
def test_values_that_do_not_fit_the_indexed_batch(op: str, index: Any, value: Any):
    with pytest.raises(ShapeError, match="spans batch dims"):
        getattr(zeros(4).at[index], op)(value)


@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_in_a_graph_and_mapped(mode: str):
    td = tree()
    fn = torch.compile(lambda td, i: td.at[i].add(1.0, mode=mode), backend="aot_eager", fullgraph=True)
    assert same(fn(td, ROWS), td.at[ROWS].add(1.0, mode=mode))
    mapped = torch.vmap(lambda i: td.at[i].add(1.0, mode=mode)["a"])(ROWS)
    assert torch.equal(mapped[1], td.at[ROWS[1:2]].add(1.0, mode=mode)["a"])


def test_gradients_of_what_is_dropped_are_zero():
    value = torch.ones(4, 4, requires_grad=True)
    tree().at[ROWS].set({"a": value}, mode="drop")["a"].sum().backward()
    assert value.grad is not None
    assert value.grad.sum(1).tolist() == [4, 0, 4, 0]


SAYS: dict[str, Says] = {
    "another mode": (lambda: tree().at[0].set(0, mode="wrap"), """\
DtypeError
tdc.at.set: expected mode 'drop', 'clip' or None, got 'wrap'
hint: None raises, as torch does"""),
}  # fmt: skip
test_says = says(SAYS)
