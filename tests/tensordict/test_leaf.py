"""Leaves of other libraries' classes: registered, indexed, joined, compiled, and what was not registered."""

from __future__ import annotations

import pickle
from typing import Any

import optree
import pytest
import torch
from texts import Says, says
from torch import Tensor
from torch.utils import _pytree as pytree

import tdc
from tdc import TensorDict, UnsupportedError
from tdc.interop import register_leaf


class Jagged:
    """Values of several features, those of one feature after those of another, row by row."""

    def __init__(self, keys: list[str], values: Tensor, lengths: Tensor):
        self.keys, self.values, self.lengths = keys, values, lengths  # lengths (K, B)

    def __getitem__(self, key: str) -> list[Tensor]:
        """Rows of one feature."""
        at = self.keys.index(key)
        return list(self.rows()[at])

    def rows(self) -> list[list[Tensor]]:
        k, b = self.lengths.shape
        pieces = self.values.split(self.lengths.flatten().tolist())
        return [list(pieces[i * b : (i + 1) * b]) for i in range(k)]

    def float(self) -> Jagged:
        return Jagged(self.keys, self.values.float(), self.lengths)


def of_rows(keys: list[str], rows: list[list[Tensor]]) -> Jagged:
    lengths = torch.tensor([[len(row) for row in feature] for feature in rows])
    return Jagged(keys, torch.cat([row for feature in rows for row in feature]), lengths)


def take(x: Jagged, index: Any) -> Jagged:
    picks = torch.arange(x.lengths.shape[1])[index].reshape(-1).tolist()
    return of_rows(x.keys, [[feature[i] for i in picks] for feature in x.rows()])


def join(xs: list[Jagged], dim: int) -> Jagged:
    assert dim == 0
    return of_rows(xs[0].keys, [[row for x in xs for row in x.rows()[k]] for k in range(len(xs[0].keys))])


register_leaf(Jagged, shape=lambda x: x.lengths.shape[1:], index=take, cat=join, ops={"float": lambda x: x.float()})


def jagged() -> TensorDict:
    x = Jagged(["user", "item"], torch.arange(9), torch.tensor([[2, 0, 1], [1, 3, 2]]))
    return TensorDict({"sparse": x, "dense": torch.arange(3)}, [3])


def test_a_registered_leaf_is_read_as_itself():
    td = jagged()
    assert type(td["sparse"]) is Jagged
    assert td.get("sparse") is td["sparse"]
    assert dict(td.items())["sparse"] is td["sparse"]
    assert td.to_dict()["sparse"] is td["sparse"]
    assert [row.tolist() for row in td["sparse"]["item"]] == [[3], [4, 5, 6], [7, 8]]
    assert td.apply(lambda x: x)["sparse"] is td["sparse"]


@pytest.mark.parametrize(("index", "want"), [
    (slice(1, None), [[4, 5, 6], [7, 8]]),
    ([2, 0], [[7, 8], [3]]),
    (torch.tensor([True, False, True]), [[3], [7, 8]]),
])  # fmt: skip
def test_a_registered_leaf_is_indexed_by_row(index: Any, want: Any):
    out = jagged()[index]
    assert [row.tolist() for row in out["sparse"]["item"]] == want
    assert out.batch_size == (len(want),)


def test_a_registered_leaf_is_joined_moved_and_cast():
    td = jagged()
    assert [row.tolist() for row in torch.cat([td, td[:1]])["sparse"]["user"]] == [[0, 1], [], [2], [0, 1]]
    assert td.to("cpu")["sparse"] is td["sparse"]
    assert td.float()["sparse"].values.dtype == torch.float32
    assert td.clone()["sparse"] is td["sparse"]


def test_a_registered_leaf_in_a_pytree():
    td = jagged()
    assert [type(x) for x in pytree.tree_leaves(td)] == [Tensor, Jagged]
    out = pytree.tree_map(lambda x: x, td)
    assert out["sparse"] is td["sparse"]
    assert out[1:].batch_size == (2,)
    assert optree.tree_leaves(td)[1] is td["sparse"]


def test_a_registered_leaf_in_a_tensorclass():
    @tdc.tensorclass
    class Batch:
        sparse: Jagged
        dense: Tensor

    td = jagged()
    x = Batch(td["sparse"], td["dense"], batch_size=[3])
    assert type(x[1:].sparse) is Jagged
    assert [row.tolist() for row in x[1:].sparse["user"]] == [[], [2]]


def test_a_registered_leaf_is_pickled():
    out = pickle.loads(pickle.dumps(jagged()))
    assert out["sparse"].values.tolist() == list(range(9))
    assert type(out[1:]["sparse"]) is Jagged


def test_compile_indexes_a_registered_leaf():
    fn = torch.compile(lambda td: (td["dense"] + 1, td.exclude("sparse")[0]), backend="eager", fullgraph=True)
    assert fn(jagged())[0].tolist() == [1, 2, 3]


class Rows:
    def __init__(self, data: Tensor):
        self.data = data


def test_compile_joins_a_registered_pytree():
    register_leaf(
        Rows, shape=lambda x: x.data.shape[:1], index=lambda x, i: Rows(x.data[i]),
        cat=lambda xs, dim: Rows(torch.cat([x.data for x in xs], dim)),
    )  # fmt: skip
    pytree.register_pytree_node(Rows, lambda x: ([x.data], None), lambda children, _: Rows(*children))
    td = TensorDict({"r": Rows(torch.arange(3)), "x": torch.zeros(3)}, [3])
    assert torch.compile(lambda td: td[1:], backend="eager", fullgraph=True)(td)["r"].data.tolist() == [1, 2]
    joined = torch.cat([td, td])
    assert joined["r"].data.tolist() == [0, 1, 2, 0, 1, 2]


def test_compile_joins_leaves_that_are_no_tensors():
    td = TensorDict({"x": tdc.pack([torch.ones(2), torch.ones(3)])}, [2])
    out = torch.compile(lambda td: torch.cat([td, td]), backend="eager", fullgraph=True)(td)
    assert out.batch_size == (4,)


# -- texts


SAYS: dict[str, Says] = {
    "an operation that was not registered": (lambda: torch.stack([jagged(), jagged()]), """\
UnsupportedError
tdc.stack: expected an operation registered for Jagged, got 'stack', which has none
hint: tdc.interop.register_leaf(Jagged, ..., ops={'stack': fn}), or td.exclude(key) first"""),
    "a method that was not registered": (lambda: jagged().reshape(3, 1), """\
UnsupportedError
tdc.reshape: expected an operation registered for Jagged, got 'reshape', which has none
hint: tdc.interop.register_leaf(Jagged, ..., ops={'reshape': fn}), or td.exclude(key) first"""),
}  # fmt: skip
test_says = says(SAYS)


def test_the_error_of_a_missing_operation_is_of_its_class():
    with pytest.raises(UnsupportedError, match=r"tdc.interop.register_leaf\(Jagged, ..., ops="):
        jagged() * 2
