"""The size of a ragged dim: no code computes with it unseen, in Python, in C++ or in a graph."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from versions import before

import tdc
from tdc.core.ragged_size import RaggedSize

X: Any = tdc.pack([torch.arange(8.0).view(2, 4), torch.arange(12.0).view(3, 4)])
TABLE: Any = torch.rand(6, 4)
REFUSED: dict[str, Callable[[Any], Any]] = {
    "n > 1": lambda x: x.shape[1] > 1,
    "1 < n": lambda x: 1 < x.shape[1],  # noqa: SIM300
    "n <= m": lambda x: x.shape[1] <= x.shape[1],
    "n + 1": lambda x: x.shape[1] + 1,
    "1 - n": lambda x: 1 - x.shape[1],
    "-n": lambda x: -x.shape[1],
    "n // 2": lambda x: x.size(1) // 2,
    "n % 8": lambda x: x.size(1) % 8,
    "n ** -0.5": lambda x: x.size(1) ** -0.5,
    "1 / n": lambda x: 1 / x.size(-2),
    "not n": lambda x: not x.shape[1],
    "int(n)": lambda x: int(x.shape[1]),
    "float(n)": lambda x: float(x.shape[1]),
    "range(n)": lambda x: [0 for _ in range(x.shape[1])],
    "list[:n]": lambda x: [1, 2, 3][: x.shape[1]],
    "list[n]": lambda x: [1, 2, 3][x.shape[1]],
    "max(n, 3)": lambda x: max(x.shape[1], 3),
    "sum(shape)": lambda x: sum(x.shape),
    "math.prod(shape)": lambda x: math.prod(x.shape),
    "math.sqrt(n)": lambda x: math.sqrt(x.shape[1]),
    "shape.numel()": lambda x: x.shape.numel(),
    "table[:n]": lambda x: TABLE[: x.shape[1]],
    "table[:, n:]": lambda x: TABLE[:, x.shape[1] :],
    "table[n]": lambda x: TABLE[x.shape[1]],
    "table / n": lambda x: TABLE / x.shape[1],
    "n * table": lambda x: x.shape[1] * TABLE,
    "x / n": lambda x: x / x.shape[1],
    "n - x": lambda x: x.shape[1] - x,
    "x ** n": lambda x: x ** x.shape[1],
    "x == n": lambda x: x == x.shape[1],
    "td + n": lambda x: tdc.TensorDict({"x": x}, batch_size=[2]) + x.shape[1],
    "x.sum(1) / n": lambda x: x.sum(1) / x.shape[1],
    "torch.zeros(shape)": lambda x: torch.zeros(x.shape),
    "torch.zeros(*shape)": lambda x: torch.zeros(*x.shape),
    "torch.ones(B, n)": lambda x: torch.ones(x.shape[0], x.shape[1]),
    "torch.full(shape, 1)": lambda x: torch.full(x.shape, 1.0),
    "torch.arange(n)": lambda x: torch.arange(x.shape[1]),
    "torch.arange(0, n)": lambda x: torch.arange(0, x.shape[1]),
    "torch.eye(n)": lambda x: torch.eye(x.shape[1]),
    "table.tril(n)": lambda x: TABLE.tril(x.shape[1]),
    "table.narrow(0, 0, n)": lambda x: TABLE.narrow(0, 0, x.shape[1]),
    "table.repeat(n, 1)": lambda x: TABLE.repeat(x.shape[1], 1),
    "table.new_zeros(shape)": lambda x: TABLE.new_zeros(x.shape),
    "table.topk(n)": lambda x: TABLE.topk(x.shape[1]),
    "table.view(n, n)": lambda x: TABLE.view(x.shape[1], x.shape[1]),
    "nn.LayerNorm(n)": lambda x: nn.LayerNorm(x.shape[1]),
    "torch.ones((n, n))": lambda x: torch.ones((x.shape[1], x.shape[1])),
    "table.sum(n)": lambda x: TABLE.sum(x.shape[1]),
    "torch.broadcast_to(table, shape)": lambda x: torch.broadcast_to(TABLE[:1], x.shape),
    "F.pad(table, (0, n))": lambda x: F.pad(TABLE, (0, x.shape[1])),
    "F.interpolate(size=shape)": lambda x: F.interpolate(TABLE[None], size=x.shape[1:2]),
    "is_causal": lambda x: F.scaled_dot_product_attention(TABLE, TABLE, TABLE, is_causal=x.shape[1] > 1),
}  # fmt: skip
OF_TORCH = {  # in a graph refused by Dynamo, which asks no method and no `__torch_function__`
    "range(n)", "list[:n]", "math.sqrt(n)",
    "table[:n]", "table[:, n:]", "max(n, 3)", "shape.numel()", "math.prod(shape)",
    "torch.zeros(shape)", "torch.full(shape, 1)", "table.new_zeros(shape)", "F.pad(table, (0, n))",
    "F.interpolate(size=shape)", "torch.broadcast_to(table, shape)",
}  # fmt: skip
if torch.__version__ < "2.12":  # torch 2.11 asks still fewer methods
    OF_TORCH |= {"1 < n", "not n", "int(n)", "float(n)", "list[n]"}
    OF_TORCH |= {"torch.arange(n)", "torch.arange(0, n)", "torch.eye(n)"}
if not before(2, 14):
    OF_TORCH -= {"range(n)", "list[:n]"}
TAKEN: dict[str, Callable[[Any], Any]] = {
    "x.view(shape)": lambda x: x.view(x.shape),
    "x.view(*shape)": lambda x: x.view(*x.shape),
    "x.reshape(heads)": lambda x: x.reshape(x.shape[0], x.shape[1], 2, 2).flatten(2),
    "x.view(b, n, h, -1)": lambda x: x.view(x.size(0), x.size(1), 2, -1).flatten(-2),
    "shape[:-1] + (h, d)": lambda x: x.view(*x.shape[:-1], 2, 2).flatten(-2),
    "x.unflatten": lambda x: x.unflatten(2, (2, 2)).flatten(2).expand(x.shape),
    "x.expand(shape)": lambda x: x[:, :, :1].expand(x.shape) * 0 + x,
    "torch.reshape(x, shape)": lambda x: torch.reshape(x, x.shape),
    "x.new_zeros(shape)": lambda x: x.new_zeros(x.shape) + x,
    "n == -1": lambda x: x * 1 if x.shape[1] == -1 and x.shape[1] != 3 and x.shape[1] in (-1, 7) else x * 0,
    "shape == shape": lambda x: x * 1 if x.shape == (x + 1).shape and x.shape == (2, -1, 4) else x * 0,
}


@pytest.mark.parametrize("asked", REFUSED)
def test_a_question_that_it_does_not_answer(asked: str):
    with pytest.raises(tdc.ShapeError) as caught:
        REFUSED[asked](X)
    assert re.fullmatch(r"tdc\.\w+: expected one size, got that of a ragged dim, .*\nhint: .+", str(caught.value))


@pytest.mark.parametrize("asked", REFUSED)
def test_a_graph_refuses_it(asked: str):
    call = REFUSED[asked]
    run = torch.compile(lambda x: (x * 2, call(x)), backend="eager", fullgraph=True)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the class is torch's
        run(X)
    assert ("that of a ragged dim" in str(caught.value)) != (asked in OF_TORCH), str(caught.value)[:500]


@pytest.mark.cases(5)
@pytest.mark.parametrize("taken", TAKEN)
def test_what_takes_it(taken: str):
    call = TAKEN[taken]
    run = torch.compile(call, backend="eager", fullgraph=True)
    for x in (X, tdc.pack([torch.ones(1, 4), torch.ones(7, 4)])):
        assert type(call(x)) is type(run(x)) is tdc.NestedTensor
        tdc.testing.assert_close(call(x), x)
        tdc.testing.assert_close(run(x), x)


def test_a_dense_tensor_takes_it_as_minus_one():
    flat = torch.arange(20.0)
    assert flat.view(1, X.shape[1], 4).shape == flat.reshape(X.shape[1], 4)[None].shape == (1, 5, 4)
    assert TABLE.expand(2, X.shape[1], 4).shape == (2, 6, 4)
    assert torch.reshape(flat, (X.shape[1], 2)).shape == (10, 2)


def test_it_prints_and_copies():
    n = X.shape[1]
    assert f"{n} {X.shape} {n!r}" == "-1 torch.Size([2, -1, 4]) -1"
    assert hash(X.shape) == hash(torch.Size([2, -1, 4]))
    assert {X.shape: 1}[torch.Size([2, -1, 4])] == 1
    for other in (copy.copy(n), copy.deepcopy(n), pickle.loads(pickle.dumps(n)), copy.deepcopy(X.shape)[1]):
        assert isinstance(other, RaggedSize)
        assert other == n
    assert isinstance(X.shape[1:][0], RaggedSize)
    assert not isinstance(n, int)
    assert isinstance(X.shape[0], int)


def test_a_graph_returns_it():
    shape = torch.compile(lambda x: x.shape, backend="eager", fullgraph=True)(X)
    assert shape == X.shape
    assert isinstance(shape[1], RaggedSize)
    with pytest.raises(tdc.ShapeError):
        range(shape[1])


def test_a_graph_that_breaks_goes_on():
    def step(x: Any) -> Any:
        shape = x.shape
        torch._dynamo.graph_break()
        return x.view(shape) * 2

    tdc.testing.assert_close(torch.compile(step, backend="eager")(X), X * 2)


def test_several_ragged_dims_and_a_moved_batch():
    images = tdc.pack([torch.ones(3, 2, 5), torch.ones(3, 4, 2)], ragged_dim=(2, 3))
    assert images.shape == (2, 3, -1, -1)
    with pytest.raises(tdc.ShapeError, match=r"tdc\.mul: expected one size"):
        _ = images.shape[2] * images.shape[3]
    with pytest.raises(tdc.ShapeError, match="expected one size"):
        F.interpolate(torch.ones(1, 1, 3, 3), size=images.shape[-2:])
    assert images.transpose(0, 1).shape == (3, 2, -1, -1)
    assert tuple(X.transpose(1, 2).shape) == (2, 4, -1)


def test_one_graph_for_all_lengths():
    counts: list[int] = []

    def count(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        counts.append(1)
        return gm.forward

    run = torch.compile(lambda x: x.view(*x.shape[:2], 2, 2).sum(-1), backend=count, fullgraph=True)
    for lengths in ((2, 3), (1, 7, 4), (5, 5, 1, 2)):
        x = tdc.pack([torch.ones(n, 4) for n in lengths])
        assert run(x).shape == (len(lengths), -1, 2)
    assert len(counts) == 1
