"""Indices that are numbers in tensors, such as the position of a replay buffer: they stay on their device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import tdc
from tdc import TensorDict
from tdc.compile import counted
from tdc.core.errors import IndexingError

S = slice
ALL = S(None)
ROWS = torch.tensor([0, 2])


def batch(*size: int) -> Any:
    count = torch.Size(size).numel()
    x = torch.arange(count * 2.0).view(*size, 2)
    return TensorDict({"x": x, "in": {"n": torch.arange(count).view(size)}}, size)


INDICES: dict[str, Callable[[Any], Any]] = {
    "i": lambda i: i, "i,": lambda i: (i,), "..., i": lambda i: (..., i), ":, i": lambda i: (ALL, i),
    "i, 1:": lambda i: (i, S(1, None)), "i, 2": lambda i: (i, 2), "i, i": lambda i: (i, i),
    "i, None": lambda i: (i, None), "None, :, i": lambda i: (None, ALL, i),
    "i, rows": lambda i: (i, ROWS), "rows, i": lambda i: (ROWS, i),
}  # fmt: skip


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("place", [2, 0, -1])
def test_reads_and_writes_as_an_int(index: str, place: int):
    td, of = batch(3, 4), INDICES[index]
    number, known = of(torch.tensor(place)), of(place)
    got, want = td[number], td[known]
    assert torch.equal(got, want)
    assert got.batch_size == want.batch_size == want["in", "n"].shape
    if "None" not in index:
        for a, b in ((td.at[number].set(-1), td.at[known].set(-1)), (td.at[number].add(2), td.at[known].add(2))):
            assert torch.equal(a, b)
    value = got.apply(lambda v: v * 3 + 1)
    assert torch.equal(tdc.copy_(batch(3, 4), value, number), tdc.copy_(batch(3, 4), value, known))
    x = batch(3, 4)["in", "n"]
    x[known] = 7
    assert torch.equal(tdc.copy_(batch(3, 4)["in", "n"], 7, number), x)


GRAPHS: dict[str, Callable[[Any, Tensor], Any]] = {
    "read": lambda td, i: td[i], "read behind": lambda td, i: td[:, i], "read part": lambda td, i: td[i, 1:],
    "set": lambda td, i: td.at[i].set(1), "add": lambda td, i: td.at[:, i].add(td[:, 0]),
    "apply": lambda td, i: td.at[i].apply(lambda x: x * 2), "buffer": lambda td, i: tdc.copy_(td, td[0] * 3, i),
    "cache": lambda td, i: tdc.copy_(td["x"], td["x"][:, 0] * 3, (ALL, i)),
}  # fmt: skip


@pytest.mark.cases(5)
@pytest.mark.parametrize("name", GRAPHS)
def test_one_graph_for_all_places(name: str):
    fn = GRAPHS[name]
    f = counted(fn, backend="aot_eager")
    for place in (2, 0, -1):
        i = torch.tensor(place)
        torch.testing.assert_close(pytree.tree_leaves(f(batch(3, 4), i)), pytree.tree_leaves(fn(batch(3, 4), i)))
    assert f.counts.compiles == 1


class NoReads(TorchDispatchMode):
    """Fails where a number is read on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", GRAPHS)
def test_nothing_is_read_on_the_host(name: str):
    with NoReads():
        GRAPHS[name](batch(3, 4), torch.tensor(1))


def test_the_check_can_fail():
    with pytest.raises(AssertionError), NoReads():
        batch(3, 4)["x"][torch.tensor(1)]


def test_vmap_and_grad():
    td, places = batch(3, 4), torch.tensor([2, 0, -1])
    got = tdc.vmap(lambda row, i: row[i])(td, places)
    assert torch.equal(got["x"], td["x"][torch.arange(3), places])
    grads = tdc.grad(lambda td: td[places[2]]["x"].square().sum())(batch(3))
    assert torch.equal(grads["x"], torch.tensor([[0.0, 0.0], [0.0, 0.0], [8.0, 10.0]]))


def test_rows_of_ragged_leaves():
    """A row has a size of its own, which is read on the host as for an int."""
    x = tdc.pack([torch.ones(n, 2) * n for n in (2, 3, 1)])
    i = torch.tensor(1)
    for batch in (x, x.to_padded()):
        assert torch.equal(batch[i], torch.ones(3, 2) * 3)
        assert torch.equal(TensorDict({"x": batch, "n": torch.arange(3)}, [3])[i]["x"], torch.ones(3, 2) * 3)
    assert counted(lambda x, i: x[i], backend="aot_eager")(x, i).shape == (3, 2)


def test_without_leaves():
    assert TensorDict({}, [5, 3])[torch.tensor(1)].batch_size == (3,)


# Wrong indices


@pytest.mark.parametrize("run", [lambda td, i: td[i], lambda td, i: td.at[i].set(1), lambda td, i: tdc.copy_(td, 1, i)])
def test_a_place_that_is_not_there(run: Callable[[Any, Tensor], Any]):
    with pytest.raises(IndexingError) as error:
        run(batch(3), torch.tensor(9))
    assert str(error.value) == (
        "tdc.index: expected an index into batch_size [3], got td[Tensor int64[]]\n"
        "hint: dim 0 takes -3 to 2; keys are strings: td['key']"
    )


def test_a_number_that_is_no_place():
    with pytest.raises(
        IndexingError, match=r"tdc\.index: expected an index into batch_size \[3\], got td\[Tensor float"
    ):
        batch(3)[torch.tensor(1.0)]
    with pytest.raises(IndexingError, match=r"at most 1 batch dims indexed, got 2"):
        batch(3)[torch.tensor(1), torch.tensor(0)]
