"""Loops in loops of a graph, in which examples wait for each other, lists that grow there, and ragged values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tdc
from tdc.testing import assert_batched_equal

G = torch.Generator().manual_seed(0)
ROWS = [torch.randn(n, 3, dtype=torch.float64, generator=G) for n in (3, 1, 0, 5, 2)]
NUMBERS = [
    (torch.tensor(s, dtype=torch.float64), torch.tensor(k))
    for s, k in ((0.1, 0), (-0.4, 1), (0.3, 2), (0.9, 3), (-2.0, 4), (0.2, 5))
]


@tdc.batch
def three_deep(s: Tensor, k: Tensor) -> Any:
    i = 0
    t, u = s * 1, s * 2
    while t < 1.5 and i < 3:
        i += 1
        for a in range(2):
            for b in range(k % 3, 2):
                j = 0
                while j < k:
                    t, u = u, t * 0.5 + a + b * 0.125
                    j += 1
                    if j > 3:
                        break
        t = t + 0.25
    return t, u, i


@tdc.batch
def returns_from_within(xs: Tensor) -> Tensor:
    s = xs.new_zeros(())
    for x in xs:
        for y in reversed(xs):
            if (x * y).sum() < -2:
                return s
            s = s + torch.tanh(x * y).sum()
        else:
            s = s * 0.5
    return s - 1


@tdc.batch
def breaks_beside_else(s: Tensor, k: Tensor) -> Tensor:
    """A name that the loop does not change, read behind it by those who broke off and those who did not."""
    i, keep = 0, s * 3
    while s < 1.5 and i < 3:
        i += 1
        if k > 2:
            break
        s = s + 0.5
    else:
        s = s + keep * 0.1
    return s + keep


@tdc.batch
def all_states(xs: Tensor) -> Tensor:
    h = torch.zeros(3, dtype=xs.dtype)
    out = []
    for x in xs:
        h = torch.tanh(torch.cat([x[:1], h])[:3] + x)
        out.append(h)
    return torch.stack(out)


@tdc.batch
def some_rows(xs: Tensor) -> Tensor:
    out = []
    for x in xs:
        if x[0] > 0:
            out.append(x * 2)
    s = xs.new_zeros(3)
    for z in reversed(out):
        s = s * 0.5 + z
    if len(out) > 1:
        s = s + torch.stack(out).sum(0) + out[-1] * len(out)
    return s


@tdc.batch(max_iters=6)
def halved_rows(xs: Tensor) -> Tensor:
    out, s = [xs.new_zeros(3)], xs.new_zeros(3)
    for x in xs:
        while x.abs().sum() > 1:
            x = x / 2
            out.append(x)
    for z in out:
        s = s * 0.5 + z
    return s + torch.cat(out)[0]


@tdc.batch
def whole_examples_on_ways(xs: Tensor) -> Any:
    y = xs * 1
    if xs.min() > 0:
        y = xs.log()
    elif xs.size(0) > 2:
        y = (xs * xs).log()
    else:
        y = y + xs[0, 0]
    return y.sum(0), y


@tdc.batch
def behind_a_break(xs: Tensor) -> Tensor:
    """Code that nobody gets to, found by programs: a driver read a name for it that it had not handed in."""
    s = xs.new_zeros(())
    for a in (0.5, xs.sum() * 0.5):
        for i in range(2):
            s = s * 0.5 if s > 0.2 else s + i
        else:
            if s > 0.3:
                s = s * a
            else:
                s = s + 0.2
            break
        for x in reversed(xs):
            s = s + x.sum()
    return s


@tdc.batch
def goes_on_early(s: Tensor, k: Tensor) -> Any:
    """A test reads a name that no round changes, found by programs: who said continue got the value of another."""
    i, t = 0, s * 2
    while i < k and t > -3:
        i += 1
        if k < 4:
            s = s * 0.5 + i
            if s > 1:
                continue
            s = s - 0.25
        elif k > 4:
            s = s + t
            continue
    return s, i


@tdc.batch
def returns_in_the_end(s: Tensor, k: Tensor) -> Tensor:
    """A loop that only a return ends has nobody behind it, whom a graph does not tell from some; found by programs."""
    i = 0
    while True:
        i += 1
        if s > 1 or i > k:
            return s * i
        s = s + 0.3


CASES: dict[str, tuple[Any, Any]] = {
    "returns in the end": (returns_in_the_end, NUMBERS), "goes on early": (goes_on_early, NUMBERS),
    "behind a break": (behind_a_break, ROWS), "three deep": (three_deep, NUMBERS),
    "returns from within": (returns_from_within, ROWS), "breaks beside else": (breaks_beside_else, NUMBERS),
    "all states": (all_states, [ROWS[0], ROWS[1], ROWS[3], ROWS[4]]), "some rows": (some_rows, ROWS),
    "halved rows": (halved_rows, ROWS),
    "whole examples on ways": (whole_examples_on_ways, [ROWS[0], ROWS[1], ROWS[3].abs() + 1, ROWS[4]]),
}  # fmt: skip
QUICK = ("behind a break",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.sweep] * (n not in QUICK)) for n in CASES])
def test_batches_equal_examples(name: str):
    """Values, gradients, and one graph for all sizes."""
    fn, examples = CASES[name]
    assert_batched_equal(fn, examples, backends=("aot_eager",), lowers=("auto",))


@pytest.mark.slow
def test_a_list_without_bound():
    def halves(x: Tensor) -> Tensor:
        out = []
        while x > 1:
            x = x / 2
            out.append(x)
        return x

    fn = tdc.batch(halves)
    assert fn.map(torch.tensor([0.5, 7.0])).tolist() == [0.5, 0.875]
    with pytest.raises(Exception, match="a bound for a list that grows in a graph"):
        torch.compile(fn.map, backend="eager", fullgraph=True)(torch.tensor([0.5, 7.0]))
    fn = tdc.batch(max_iters=2, lower="while")(halves)
    with pytest.raises(RuntimeError, match="max_iters"):
        torch.compile(fn.map, backend="eager", fullgraph=True)(torch.tensor([0.5, 77.0]))


def along_dense_rows(xs: Tensor, y: Tensor) -> Any:
    out = []
    for x in xs:
        y = torch.tanh(y + x)
        out.append(y)
        if y.sum() > 0:
            y = y * 0.5
    total = y * 0
    for z in reversed(out):
        total = total * 0.5 + z
    twice = [z * 2 for z in out]
    return torch.stack(out) * xs, total + out[-1], torch.cat(out), torch.stack(twice) * len(out)


def stacked_states(xs: Tensor, y: Tensor) -> Tensor:
    out = []
    for x in xs:
        y = torch.tanh(y + x)
        out.append(y)
    return torch.stack(out) * xs


@pytest.mark.slow
def test_a_list_that_grows_in_each_round_is_as_long_as_the_rows():
    xs, y = torch.randn(2, 4, 3), torch.randn(2, 3)
    f = tdc.batch(stacked_states)
    found = torch.compile(f.map, backend="eager", fullgraph=True)(xs, y)
    torch.testing.assert_close(found, torch.stack([f(a, b) for a, b in zip(xs, y, strict=True)]))


@pytest.mark.sweep
def test_a_list_that_grows_once_in_each_round_along_dense_rows():
    """Found by a program: it was ragged, and refused beside a dense tensor."""
    examples = [(torch.randn(4, 3), torch.randn(3)) for _ in range(3)]
    assert_batched_equal(tdc.batch(along_dense_rows), examples, backends=("eager",), lowers=("auto",))


@tdc.batch
def carries_a_tuple(s: Tensor) -> Any:
    """A pair that each round makes anew, and a number that has no value before the first."""
    pair, n = (s, s * 2), 0
    while pair[0] < 4:
        pair = pair[1], pair[0] * 3 + 1
        last = n * 2
        n += 1
        if n > 2:
            break
    else:
        last = n
    return pair, last


@pytest.mark.slow
def test_a_loop_carries_a_tuple():
    """Found by a program: Dynamo does not ask whether two tuples are one object."""
    starts = torch.tensor([0.5, 9.0, -3.0, 2.0])
    found = torch.compile(lambda s: carries_a_tuple.map(s), backend="eager", fullgraph=True)(starts)
    want = [carries_a_tuple(s) for s in starts]
    torch.testing.assert_close(found[0][0], torch.stack([pair[0] for pair, _ in want]))
    torch.testing.assert_close(found[0][1], torch.stack([pair[1] for pair, _ in want]))
    assert found[1].tolist() == [last for _, last in want]
