"""tdc.map, one value of all leaves, and joins of TensorDicts with different keys."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from texts import Says, T, ragged, says
from torch.utils.data import DataLoader

import tdc
from tdc import NestedTensor, Static, TensorDict

lib: Any = tdc


def tree() -> Any:
    return TensorDict({"x": torch.arange(10.0).view(5, 2), "r": ragged(1, 2, 0, 3, 2), "s": Static("a")}, [5])


@pytest.mark.parametrize("how", [{}, {"chunksize": 2}, {"chunksize": 9}, {"num_chunks": 3}], ids=str)
def test_map(how: dict[str, int]):
    seen: list[int] = []

    def fn(part: Any) -> Any:
        seen.append(len(part))
        return part.set("y", part["x"] * 2)

    out = tdc.map(fn, tree(), **how)
    assert torch.equal(out["y"], tree()["x"] * 2)
    assert isinstance(out["r"], NestedTensor)
    assert (out["s"], sum(seen)) == ("a", 5)
    assert seen == {"{}": [5], "{'chunksize': 2}": [2, 2, 1], "{'num_chunks': 3}": [2, 2, 1]}.get(str(how), [5])
    assert torch.equal(tree().map(fn, **how)["y"], out["y"])


def test_map_of_single_examples_and_dims():
    td = TensorDict({"x": torch.arange(12).view(3, 4)}, [3, 4])
    rows = tdc.map(lambda row: row["x"].sum(), td[:, 0], chunksize=0)
    assert rows.tolist() == [0, 4, 8]
    turned = tdc.map(lambda part: part + part.batch_size[1], td, 1, chunksize=3)
    assert turned["x"][0].tolist() == [3, 4, 5, 4]
    assert tdc.map(lambda part: None, td) is None


@pytest.mark.parametrize("fn", [lambda row: row["x"].sum(), lambda row: row.sum(0)], ids=["tensor", "TensorDict"])
def test_results_without_the_dims_to_stack_them_along(fn: Any):
    td: Any = TensorDict({"x": torch.arange(12).view(3, 4)}, [3, 4])
    with pytest.raises(tdc.ShapeError, match=r"tdc.map: expected results of at least 1 dim, to be stacked along dim 1"):
        tdc.map(fn, td, 1, chunksize=0)
    assert len(tdc.map(fn, td.movedim(1, 0), chunksize=0)) == 4


def test_map_in_a_graph():
    fn = torch.compile(lambda td: tdc.map(lambda part: part + 1, td, chunksize=2), backend="eager", fullgraph=True)
    td: Any = TensorDict({"x": torch.arange(5)}, [5])
    assert fn(td)["x"].tolist() == [1, 2, 3, 4, 5]


def total(td: TensorDict) -> Any:
    return reduce(lambda total, leaf: total + leaf.sum(), td.values(True, True), 0.0)


def test_one_value_of_all_leaves():
    td = TensorDict({"x": torch.ones(3), "n": {"y": torch.ones(2, 2)}})
    assert total(td) == 7
    assert reduce(torch.add, td.select("x").values(True, True)) is td["x"]
    assert torch.compile(total, backend="eager", fullgraph=True)(td) == 7


def test_stack_of_common_keys():
    a = TensorDict({"x": torch.ones(2), "s": Static("a"), "n": {"p": torch.ones(2), "q": torch.ones(2)}}, [2])
    b = TensorDict({"x": torch.zeros(2), "s": Static("b"), "n": {"p": torch.zeros(2)}, "z": torch.ones(2)}, [2])
    out = torch.stack([td.select("x", ("n", "p")) for td in (a, b)], 1)
    assert out.keys(True, True) == ("x", ("n", "p"))
    assert (out.batch_size, out["x"].tolist()) == ((2, 2), [[1, 0], [1, 0]])
    with pytest.raises(tdc.StructureError, match=r"at n\.q: only in operand 0"):
        torch.stack([a, b])


def test_ragged_stack_of_common_keys():
    out = tdc.data.ragged_stack([{"x": torch.ones(2), "y": T(1)}, {"x": torch.ones(3)}], strict=False)
    assert (out.keys(), out["x"].shape) == (("x",), (2, -1))
    with pytest.raises(tdc.StructureError, match="at y: only in operand 0"):
        tdc.data.ragged_stack([{"x": torch.ones(2), "y": T(1)}, {"x": torch.ones(3)}])


@pytest.mark.parametrize("join", [tdc.data.pad_sequence, tdc.data.ragged_stack])
def test_trajectories_come_back_with_their_batch_size(join: Any):
    tds = [TensorDict({"x": torch.randn(n, 2), "y": torch.randn(n)}, [n]) for n in (3, 2)]
    for batch in (join(tds), join(tds)[:2]):
        for a, b in zip(tdc.data.unpad_sequence(batch), tds, strict=True):
            assert torch.equal(a, b)  # type: ignore[call-overload]  # torch's types know tensors only
    assert [td.batch_size for td in tdc.data.unpad_sequence(join(tds), batch_dims=0)] == [(), ()]
    other = [TensorDict({"x": torch.ones(n), "y": torch.ones(n + 1)}) for n in (3, 2)]
    assert [td.batch_size for td in tdc.data.unpad_sequence(join(other))] == [(), ()]


def test_a_loader_whose_data_set_is_a_tensordict():
    data: Any = tree()
    batches = list(DataLoader(data, batch_size=2, collate_fn=tdc.data.collate))
    assert [batch.batch_size for batch in batches] == [(2,), (2,), (1,)]
    assert torch.equal(torch.cat(batches)["x"], data["x"])


SAYS: dict[str, Says] = {
    "map of leaves": (lambda: lib.map(torch.neg, T(1)), """\
DtypeError
tdc.map: expected a function and a TensorDict, got Tensor int64[]
hint: tdc.map(fn, td); td.apply(fn) for a function of leaves"""),
    "map with workers": (lambda: tdc.map(torch.neg, tree(), num_workers=-1), """\
ShapeError
tdc.map: expected num_workers of 0 or more, got -1
hint: num_workers=1"""),
    "map by both": (lambda: tdc.map(torch.neg, tree(), chunksize=2, num_chunks=2), """\
ShapeError
tdc.map: expected one of both, chunksize of at least 0, got chunksize=2, num_chunks=2
hint: chunksize=64, or num_chunks=8"""),
    "map with some results": (lambda: tdc.map(lambda p: None if len(p) == 1 else p, tree(), chunksize=2), """\
StructureError
tdc.map: expected results of all parts, or none, got None for some
hint: return the part itself where nothing changes"""),
}  # fmt: skip
test_says = says(SAYS)
