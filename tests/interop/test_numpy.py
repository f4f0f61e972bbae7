"""numpy arrays and numbers beside containers: on either side they are tensors, and Python's operators stay ours."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
import torch
from texts import Says, says
from texts import ragged as rows_of
from texts import tree as tree_of

import tdc
from tdc import MaskedBatch, NestedTensor, TensorDict

tree: Any = tree_of
ragged: Any = rows_of
KINDS = {"tensordict": tree() + 3, "nested": ragged() + 3, "masked": (ragged() + 3).to_padded()}
OPS = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.lt, operator.eq]


def first(x: Any) -> torch.Tensor:
    return x["tokens"] if isinstance(x, TensorDict) else x.values if isinstance(x, NestedTensor) else x.filled(0)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_number_of_numpy_on_either_side(kind: str, op: Any):
    x = KINDS[kind]
    for number in (np.float32(2), np.float64(2), np.int64(2)):
        for got, want in ((op(number, x), op(2, x)), (op(x, number), op(x, 2))):
            assert type(got) is type(x)
            assert torch.equal(first(got), first(want))
            assert first(got).dtype == first(want).dtype


def test_an_array_broadcasts_as_a_tensor():
    td, rows = tree() + 1, np.arange(12, dtype=np.float32).reshape(3, 4)
    for got, want in ((td * rows, td * torch.as_tensor(rows)), (rows - td, torch.as_tensor(rows) - td)):
        assert torch.equal(got["tokens"], want["tokens"])
    x, features = ragged() + 1, np.arange(4.0)
    assert torch.equal((x * features).values, x.values * torch.as_tensor(features))
    assert isinstance(features * x.to_padded(), MaskedBatch)


def test_in_a_graph():
    rows = np.ones((3, 4), dtype=np.float32)
    fn = torch.compile(lambda td: td * np.float32(2) + rows, backend="eager", fullgraph=True)
    assert torch.equal(fn(tree())["tokens"], torch.ones(3, 4, 2))


SAYS: dict[str, Says] = {
    "an array of another size": (lambda: tree() + np.ones((5, 4)), """\
ShapeError
tdc.add: expected a tensor that broadcasts against batch_size [3, 4], got Tensor float64[5, 4]
hint: for features use td.apply(lambda leaf: ...)"""),
    "an array of another size on the left": (lambda: np.ones((2, 1)) * ragged(), """\
ShapeError
tdc.mul: expected an operand that broadcasts against NestedTensor float32[3, -1, 4], got Tensor float64[2, 1]
hint: sizes must be 1 or equal, counted from the last dim"""),
    "an array beside padded rows": (lambda: ragged().to_padded() * np.ones((2, 1)), """\
ShapeError
tdc.mul: expected an operand that broadcasts against MaskedBatch float32[3, 3, 4], got Tensor float64[2, 1]
hint: the padded shape cannot grow"""),
    "an array of objects": (lambda: tree() + np.array(["a", None]), """\
DtypeError
tdc.add: expected an array of numbers, got ndarray object[2]
hint: torch.as_tensor(array)"""),
}  # fmt: skip
test_says = says(SAYS)


def test_what_is_no_number_is_refused():
    with pytest.raises(tdc.DtypeError, match=r"tdc.add: expected a number, a tensor or a batch, got str"):
        tree() + "a"
    assert tdc.TensorDict.__array_ufunc__ is None
