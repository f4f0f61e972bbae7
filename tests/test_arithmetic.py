"""Operators of TensorDicts and ragged batches: how operands pair, dtypes, and what autograd sees."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tdc
from tdc import TensorDict

REFLECTED = [operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow]
DTYPES = [torch.float64, torch.float32, torch.float16, torch.int32, torch.int64]


def test_batch_dims_meet_batch_dims():
    a, b = TensorDict({"x": torch.arange(3.0)}, [3]), TensorDict({"x": torch.ones(3, 3)}, [3])
    want = torch.stack([a["x"][i] * b["x"][i] for i in range(3)])
    for out in (a * b, b * a, torch.where(a > 5, b, a * b)):
        assert torch.equal(out["x"], want)


def test_features_broadcast_behind_batch_dims():
    a, b = TensorDict({"x": torch.rand(2, 3)}, [2]), TensorDict({"x": torch.rand(2, 4, 3)}, [2])
    assert torch.equal((a + b)["x"], a["x"][:, None] + b["x"])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", REFLECTED, ids=lambda op: op.__name__)
def test_a_number_is_a_number_on_either_side(op: Callable[..., Any], dtype: torch.dtype):
    x = torch.tensor([1, 2, 3]).to(dtype)
    td, nt = TensorDict({"x": x}, [3]), tdc.pack([x, x[:1]])
    for number in (2, 0.1):
        for want, got in ((op(number, x), op(number, td)["x"]), (op(x, number), op(td, number)["x"])):
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert op(number, nt).dtype == op(number, x).dtype
        torch.testing.assert_close(op(number, nt).values[:3], op(number, x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("op", [operator.and_, operator.or_, operator.xor, operator.lshift], ids=lambda op: op.__name__)
def test_integers_meet_integers(op: Callable[..., Any]):
    x = torch.tensor([1, 2, 3])
    assert torch.equal(op(TensorDict({"x": x}, [3]), 1)["x"], op(x, 1))
    if op is not operator.lshift:
        assert torch.equal(op(1, TensorDict({"x": x}, [3]))["x"], op(1, x))


def test_other_types_are_for_python_to_refuse():
    td = TensorDict({"x": torch.ones(2)}, [2])
    assert (td == None) is False  # noqa: E711  # the operator under test
    assert (td != None) is True  # noqa: E711  # the same
    for other in (None, [1, 2], "x"):
        with pytest.raises(TypeError, match="unsupported operand"):
            td + other


@pytest.mark.parametrize("fn", [
    lambda td: td * 2, lambda td: td + 1, lambda td: td - td, lambda td: td * td, lambda td: td.abs(), lambda td: -td,
    lambda td: td.sign(), lambda td: td / 2, lambda td: td.exp(),
])  # fmt: skip
def test_leaves_that_require_grad_beside_others(fn: Callable[[Any], Any]):
    leaves = {"w": torch.rand(3, 2, requires_grad=True), "x": torch.rand(3), "i": torch.arange(3)}
    out = fn(TensorDict(leaves, [3]))
    for key, leaf in leaves.items():
        want = fn(TensorDict({key: leaf}, [3]))[key]
        assert out[key].dtype == want.dtype
        assert out[key].requires_grad == want.requires_grad == (key == "w")
        assert torch.equal(out[key], want)


def test_gradients_through_all_leaves_at_once():
    x, y = torch.rand(3, requires_grad=True), torch.rand(3, 2, requires_grad=True)
    td = TensorDict({"x": x, "y": y}, [3])
    (td * td + td.exp()).apply(torch.sum, batch_size=[]).sum().to_dict()
    out = td * td + td.exp()
    (out["x"].sum() + out["y"].sum()).backward()
    torch.testing.assert_close(x.grad, (2 * x + x.exp()).detach())
    torch.testing.assert_close(y.grad, (2 * y + y.exp()).detach())


def test_nodes_with_batch_dims_of_their_own_keep_them():
    inner = TensorDict({"a": torch.rand(2, 3), "b": torch.rand(2, 3, 4)}, [2, 3])
    td = TensorDict({"n": inner}, [2])
    assert (td + td)["n"].batch_size == (2, 3)
    wide = TensorDict({"n": TensorDict({"a": torch.rand(2, 3), "b": torch.rand(2, 1)}, [2])}, [2])
    narrow = TensorDict({"n": TensorDict({"a": torch.rand(2, 1), "b": torch.rand(2, 1)}, [2, 1])}, [2])
    with pytest.raises(tdc.ShapeError, match="share 2 batch dims"):
        narrow + wide
