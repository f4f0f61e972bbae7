"""The programs with control flow and the recurrent ones that Matchbox was tested with, beside the loop.

And Matchbox's conveniences under the names that torch has for them, as docs/coming_from/matchbox.md lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tdc
from tdc.core import pytree
from tdc.testing import assert_batched_equal

LENGTHS = (3, 1, 5, 2)
IN, H = 2, 3
LEAVES = pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads it of arguments


@tdc.batch
def counts_down(x):
    while x > 0:
        x = x - 1
    return x


@tdc.batch
def one_arm_or_nothing(x):
    if x > 0:
        x = x - 1
    else:
        pass
    return x


@tdc.batch
def one_arm(x):
    if x > 0:
        x = x * x
    return x


@tdc.batch
def both_arms(x):
    """Matchbox asked for the test once more after the first arm had changed `x`."""
    if x > 0:
        x = x - 1
    else:
        x = x + 5
    return x


@tdc.batch
def arm_in_arm(x, y):
    """In Matchbox the inner mask took the place of the outer."""
    z = x * 0
    if x > 0:
        if y > 0:
            z = z + x * y
        else:
            z = z - 1
    return z


@tdc.batch
def loop_in_loop(x):
    total = x * 0
    while x > 0:
        y = x
        while y > 0.5:
            y = y / 2
            total = total + y
        x = x - 1
    return total


@tdc.batch
def breaks_and_continues(x):
    """In Matchbox one example's `break` was everybody's."""
    total = x * 0
    for step in range(6):
        x = x - 1
        if x > 2:
            continue
        if x < -1:
            break
        total = total + x * step
    return total, x


@tdc.batch
def returns_early(x):
    for step in range(5):
        if x * step > 3:
            return x * step
    return -x


@tdc.batch
def augments(x):
    """In Matchbox `+=` changed all examples."""
    y = x * 2
    if x > 0:
        y += x
        y *= 3
    return y


NUMBERS = [torch.tensor(v) for v in (0.5, 2.0, -1.0, 3.7)]
SCALARS = [
    counts_down, one_arm_or_nothing, one_arm, both_arms, loop_in_loop, breaks_and_continues, returns_early, augments
]  # fmt: skip


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(IN + H, H)

    @tdc.batch
    def forward(self, x, h):
        return self.linear(torch.cat([x, h])).tanh()


class RNN(nn.Module):
    """Matchbox's class: a cell, and a state that may be given."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    @tdc.batch
    def forward(self, xs, h0=None):
        h = torch.zeros(H) if h0 is None else h0
        for x in xs:
            h = self.cell(x, h)
        return h


class StockRNN(nn.Module):
    """The same with the cell of torch, which has no rule for vmap (torch 2.13) and runs example by example."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(IN, H)

    @tdc.batch
    def forward(self, xs):
        h = torch.zeros(H)
        for x in xs.unbind(0):
            h = self.cell(x, h)
        return h


class LSTMCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(IN + H, 4 * H)

    @tdc.batch
    def forward(self, x, h, c):
        i, f, o, g = self.linear(torch.cat([x, h])).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c


class LSTM(nn.Module):
    def __init__(self, backwards: bool = False) -> None:
        super().__init__()
        self.cell = LSTMCell()
        self.backwards = backwards

    @tdc.batch
    def forward(self, xs):
        h = c = torch.zeros(H)
        if self.backwards:
            for x in reversed(xs.unbind(0)):
                h, c = self.cell(x, h, c)
        else:
            for x in xs.unbind(0):
                h, c = self.cell(x, h, c)
        return h, c


class BiLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.there, self.back = LSTM(), LSTM(backwards=True)

    @tdc.batch
    def forward(self, xs):
        h, _ = self.there(xs)
        g, _ = self.back(xs)
        return torch.cat([h, g])


class AllStates(nn.Module):
    """The states of all steps, in a tensor as long as the longest example."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Cell()

    @tdc.batch
    def forward(self, xs):
        h = torch.zeros(H)
        states = torch.zeros(max(LENGTHS), H)
        for t, x in enumerate(xs):
            h = self.cell(x, h)
            states[t] = h
        return states


class Readme(nn.Module):
    """The RNN of Matchbox's README."""

    def __init__(self) -> None:
        super().__init__()
        self.wx, self.wh = nn.Linear(IN, H), nn.Linear(H, H)

    @tdc.batch
    def forward(self, xs):
        h = torch.zeros(H)
        for x in xs.unbind(0):
            h = torch.tanh(self.wx(x) + self.wh(h))
        return h


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def rows() -> list[Tensor]:
    return drawn(*[(n, IN) for n in LENGTHS])


def scalars() -> list[Tensor]:
    return [x.clone().requires_grad_() for x in NUMBERS]


def batched(column: list[Tensor]) -> Any:
    """The examples as one argument."""
    same = len({x.shape for x in column}) == 1
    return tdc.lanes(torch.stack(column)) if same else tdc.pack(column)


def agrees(fn: Any, columns: list[list[Tensor]], run: Callable[..., Any] | None = None) -> None:
    """The batch has the values and the gradients of the loop; `columns` has the examples of each argument."""
    expected = [pytree.tree_flatten(fn(*row))[0] for row in zip(*columns, strict=True)]
    found = pytree.tree_flatten((run or fn)(*[batched(column) for column in columns]))[0]
    alone = [torch.stack([*column]) for column in zip(*expected, strict=True)]
    assert len(found) == len(alone)
    torch.testing.assert_close(found, alone)
    leaves = [*[x for column in columns for x in column], *(fn.parameters() if isinstance(fn, nn.Module) else ())]
    weights = [torch.randn_like(x) for x in alone]
    ours, theirs = [gradients(outs, weights, leaves) for outs in (found, alone)]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert any([g.abs().sum() > 0 for g in theirs])


def gradients(outs: list[Tensor], weights: list[Tensor], leaves: list[Any]) -> list[Tensor]:
    loss = sum([(x * w).sum() for x, w in zip(outs, weights, strict=True)], torch.zeros(()))
    return list(torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("fn", SCALARS, ids=lambda f: f.__name__)
def test_control_flow(fn: Any):
    agrees(fn, [scalars()])


def test_an_if_in_an_if():
    agrees(arm_in_arm, [scalars(), [x.detach().flip(0).requires_grad_() for x in drawn(*[()] * 4)]])
    assert arm_in_arm.map(torch.tensor([1.0, -1.0]), torch.ones(2)).tolist() == [1, 0]


def test_a_test_is_asked_once():
    assert both_arms.map(torch.tensor([0.5, 2.0, -1.0])).tolist() == [-0.5, 1, 4]


def test_a_cell():
    agrees(Cell(), [drawn(*[(IN,)] * 4), drawn(*[(H,)] * 4)])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("module", [RNN, StockRNN, LSTM, BiLSTM, AllStates, Readme], ids=lambda m: m.__name__)
def test_a_recurrent_module(module: Any):
    agrees(module(), [rows()])


def test_a_state_that_is_given():
    agrees(RNN(), [rows(), drawn(*[(H,)] * len(LENGTHS))])


def test_padded_examples():
    torch.manual_seed(1)
    rnn, given = RNN(), rows()
    padded = tdc.pack(given).to_padded()
    torch.testing.assert_close(rnn(padded), torch.stack([rnn(x) for x in given]))


def test_a_wrong_gradient_is_seen():
    rnn = RNN()
    with pytest.raises(AssertionError):
        agrees(rnn, [rows()], lambda xs: rnn(xs).detach() + 0 * rnn(xs))


def compiled(fn: Any) -> Callable[..., Any]:
    """The function of lanes in one graph."""

    def run(*columns: Any) -> Any:
        given = [x.value if isinstance(x, type(tdc.lanes(0))) else x for x in columns]
        if isinstance(fn, nn.Module):
            return torch.compile(fn, fullgraph=True, backend="aot_eager")(*given)
        return torch.compile(fn.map, fullgraph=True, backend="aot_eager")(*given)

    return run


@pytest.mark.slow
@LEAVES
def test_compiled_control_flow():
    agrees(breaks_and_continues, [scalars()], compiled(breaks_and_continues))


@pytest.mark.sweep
@pytest.mark.slow
@LEAVES
def test_a_compiled_loop_in_a_loop():
    agrees(loop_in_loop, [scalars()], compiled(loop_in_loop))


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("module", [RNN, pytest.param(AllStates, marks=pytest.mark.slow)], ids=lambda m: m.__name__)
@LEAVES
def test_a_compiled_recurrent_module(module: Any):
    fn = module()
    agrees(fn, [rows()], compiled(fn))


@pytest.mark.sweep
@LEAVES
def test_a_compiled_bilstm():
    fn = BiLSTM()
    agrees(fn, [rows()], compiled(fn))


# -- conveniences


HEADS = 2


def batch_ones_and_zeros(xs: Any) -> Any:
    """`batch_ones`, `batch_zeros`: as long as each example."""
    ones, zeros = xs.new_ones(xs.size(0), 2), xs.new_zeros(xs.size(0), 4)
    empty, twos = xs.new_empty(xs.size(0), 4), xs.new_full((4,), 2.0)
    return torch.cat([xs * ones.sum(1, keepdim=True), zeros], 1), torch.where(xs < 9, xs, empty) + twos


def split_and_join_dims(xs: Any) -> Any:
    """`split_dim` and `join_dims`: heads."""
    heads = xs.unflatten(-1, (HEADS, -1)).transpose(0, 1)
    return heads.transpose(0, 1).flatten(1) + xs.view(xs.size(0), HEADS, 2).reshape(xs.size(0), 4)


def size_as_tensor(xs: Any) -> Any:
    """A number of each example."""
    n = xs.size(0)
    return xs.sum(0) / n if n > 2 else xs.sum(0) * n


def causal_mask(xs: Any) -> Tensor:
    """Attention that sees no later position, in words and by `is_causal`."""
    scores = xs @ xs.transpose(0, 1)
    later = torch.ones_like(scores).triu(1) > 0
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    q = xs.unflatten(-1, (HEADS, -1)).transpose(0, 1)
    return weights @ xs + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(0, 1).flatten(1)


GENERATOR = torch.Generator().manual_seed(0)
LAYOUTS = {"ragged": (2, 3, 1, 4), "dense": (3, 3, 3)}
FUNCTIONS = (batch_ones_and_zeros, split_and_join_dims, size_as_tensor, causal_mask)


def examples(layout: str) -> list[Tensor]:
    return [torch.randn(n, 4, generator=GENERATOR) for n in LAYOUTS[layout]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_eagerly(fn: Any, layout: str):
    assert_batched_equal(fn, examples(layout), backends=())


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_in_one_graph(fn: Any, layout: str):
    assert_batched_equal(fn, examples(layout), backends=("eager",), lowers=("auto",))
