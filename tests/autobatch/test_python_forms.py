"""Comprehensions, Python's functions of several values, masks as indices, lambdas and names that hide others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import tdc
from tdc.testing import assert_batched_equal

W = torch.randn(3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()


def scaled(x: Tensor) -> Tensor:
    return x * 2


@tdc.batch
def positive(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x @ W
    return x.tanh()


@tdc.batch
def cell(x: Tensor) -> Tensor:
    """Hidden by a local name below."""
    return x * 100


def of_rows(xs: Any) -> Tensor:
    return torch.stack([x * 2 for x in xs])


def with_test_and_calls(xs: Any) -> Any:
    ys = [positive(x) for x in xs if x[0] > -0.5]
    return sum([y.sum() for y in ys]), len(ys)


def in_each_other(xs: Any) -> Any:
    return sum([(x * y).sum() for x in xs for y in xs if x[0] > y[0]])


def calls_along_what_all_share(x: Tensor, n: Tensor) -> Any:
    """Found by hand: the function that is called asked its examples for one truth."""
    ys = [positive(x * i - 1) for i in range(3) if i != 1]
    return sum(ys), [positive(x + k) * n for k in (1, 2)], max(positive(x - i).sum() for i in range(2))


def targets_are_not_seen_outside(xs: Any) -> Tensor:
    x = xs.sum()
    ys = [x * i for i, x in enumerate(xs)]
    return torch.stack(ys).sum(0) + x


def targets_that_hide_others(x: Tensor, n: Tensor) -> Any:
    """On Python 3.12 and later, the code of a function has the names of comprehensions among its own."""
    ys = [W for W in range(3)]
    at = {positive: cell for positive, cell in ((1, 2), (3, 4))}
    table = [[math + k for k in range(2)] for math in range(2)]
    if n > 1:
        k = x
    else:
        k = positive(-x)
    return x @ W, k, sum(ys), at[1], table[1][1], math.pi * x


def generators(xs: Any) -> Any:
    if any(x.sum() > 1 for x in xs) and not all(x[0] > -1 for x in xs):
        return sum(x.sum() for x in xs) + 0
    return xs.mean()


def furthest(xs: Any) -> Any:
    most, i = xs[0, 0], 0
    for k, x in enumerate(xs):
        most, i = max(most, x.sum()), max(i, k - 1)
    return most, min(most, xs.sum(), 1.0 + most), i


def of_python(x: Tensor, n: Tensor) -> Any:
    pair = [x, x * 2]
    return torch.stack([v + n for v in pair]), sum(v.sum() for v in (x, x + 1)), [v * i for i, v in enumerate(pair)]


def ranges(x: Tensor, n: Tensor) -> Any:
    return sum([x * i for i in range(n)]) + x, any([n > 1, x[0] > 3]), all((n > 0, x[0] > 0))


def masked(x: Tensor, n: Tensor) -> Tensor:
    y = x * n
    y[x > 0.5] = 0
    y[y < -1] = n
    z = torch.stack([y, x])
    z[z.sum(1) > 0] = x * 3
    return z


def lambdas(x: Tensor, n: Tensor) -> Tensor:
    cell = lambda v: v * 0.5 + 1  # noqa: E731  # what is tested
    for f in [lambda v, k=k: v * k for k in (1, 2)]:
        if x.sum() > 1:
            x = cell(f(x))
    return x


def names_set_in_arms(x: Tensor, n: Tensor) -> Any:
    """Found by hand: every example set them."""
    k = m = s = x.sum()
    while n > 0 and (s := s + 1) < 3:
        n = n - 1
    first = x[0] > 0 or (k := k + 2) > 0
    y = s if s > 2 else (m := m - 1)
    return 0 < m < (k := k + 1), k, m, s, n, y, first


def spans_set(x: Tensor, n: Tensor) -> Any:
    """Found by hand: `z[n - 1 : n]` was the element `z[n - 1, n]`."""
    y, z = x * 1, torch.zeros(4, 4)
    y[n:] = 0
    z[n - 1 : n] = 5
    z[:-1] = z[:-1] + 1
    z[-n:] = z[-n]
    y[0] = x[:1].reshape(1, 1)
    z[n, :3] = x.reshape(1, 1, 3)
    return y, z


def sought(x: Tensor, n: Tensor) -> Any:
    """Found by hand: Python looked tensors up in sets by their identity."""
    k = 0
    while k < n:
        k = k + 2
    items = [1, 2, 3, 4]
    items[k // 2] = n * 10
    return n in (1, 2), n not in [0], n in x, k in {2, 3}, k in {4: 0}, 0 < k in (2, 9), items[k // 2 - 1], items[-1]


def in_place(x: Tensor, n: Tensor) -> Any:
    """Found by random programs: `y` got the wider dtype."""
    y, z = x.half(), torch.arange(3, dtype=torch.int32)
    if n > 0:
        y += x
        z *= n
        z -= torch.tensor([1, 2, 3])
    return y, z


def numbers_and_tensors(x: Tensor, n: Tensor) -> Any:
    """Found by random programs: 0.5 became 0, infinity the least whole number, 2 True, -1 255 and 1j 0."""
    best, flag, label, root, y = math.inf, 2, -1, 1j, n.double()
    if n == 1:
        best, flag, label, root, y = n, x[0] > 2, n.to(torch.uint8), x[0], 0.5
    return y, best * 1.0, flag + 0, label + n, root * 1j, 0.5 if n == 1 else n * 1.0


def tensors_of_numbers(x: Tensor, n: Tensor) -> Any:
    """Found by random programs: torch said that it cannot detach views in place."""
    k, q = 0, 0.5
    while k < n:
        k, q = k + 1, q * 2
    return torch.tensor(k) * x, torch.tensor(q, dtype=torch.float32), torch.tensor([1, 2]) * n


def args_that_share_memory(x: Tensor, n: Tensor) -> Any:
    """Found by hand: `cond` takes no tensor twice, and `k` had two names."""
    k = 0
    while k < n:
        k += 2
    return x * (k // 2), divmod(k, 2)[0] if False else k, k % 3


GENERATOR = torch.Generator().manual_seed(1)
ROWS = [torch.randn(n, 3, generator=GENERATOR) for n in (2, 3, 4, 3)]
PAIRS = [
    (torch.tensor(x, dtype=torch.float32), torch.tensor(n))
    for x, n in (([1.0, 2, 3], 2), ([-1, 0.5, 2], 0), ([4, -2, 1], 3), ([0.2, 0, -1], 1))
]
OF_PAIRS: tuple[Callable[..., Any], ...] = (
    of_python, ranges, masked, lambdas, names_set_in_arms, spans_set, sought, in_place, numbers_and_tensors,
    tensors_of_numbers, calls_along_what_all_share, args_that_share_memory, targets_that_hide_others,
)  # fmt: skip
CASES: dict[Callable[..., Any], list[Any]] = {
    **dict.fromkeys(
        (of_rows, with_test_and_calls, in_each_other, targets_are_not_seen_outside, generators, furthest), ROWS
    ),
    **dict.fromkeys(OF_PAIRS, PAIRS),
}


@pytest.mark.parametrize("fn", CASES)
def test_eagerly(fn: Callable[..., Any]):
    assert_batched_equal(fn, CASES[fn], backends=())


QUICK = (args_that_share_memory, masked)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("fn", [pytest.param(f, marks=[pytest.mark.slow] * (f not in QUICK)) for f in CASES])
def test_in_one_graph(fn: Callable[..., Any]):
    bounded = tdc.batch(max_iters=64)(fn)  # the list along range(n) has a bound; 64 rounds are not unrolled
    assert_batched_equal(bounded, CASES[fn], backends=("eager",), lowers=("auto",))


def test_a_name_that_a_comprehension_gives_outside():
    @tdc.batch
    def last(x: Tensor) -> Any:
        xs = [x * (k := i) for i in range(3)]
        return xs[-1] + k

    assert last.map(torch.tensor([1.0, -1.0])).tolist() == [4.0, 0.0]


def test_a_comprehension_in_the_tree():
    tree = tdc.batch(of_rows).tree
    assert "for __v2 in xs" in tree
    assert "append __v2 * 2 to __v1" in tree


def test_a_function_that_is_decorated_later(monkeypatch: pytest.MonkeyPatch):
    """Found by reading: a graph was traced from the driver that called the function as it was at first."""

    @tdc.batch
    def calls(x: Tensor) -> Tensor:
        return scaled(x)

    def other(x: Tensor) -> Tensor:
        return x * 3 if x > 0 else x

    x = torch.tensor([1.0, -1.0])
    for fn, want in ((scaled, [2.0, -2.0]), (tdc.batch(other), [3.0, -1.0])):
        monkeypatch.setitem(globals(), "scaled", fn)
        torch.compiler.reset()
        assert torch.compile(calls.map, backend="eager", fullgraph=True)(x).tolist() == want


def either_of_two(a: Tensor, b: Tensor) -> Any:
    low, high = (a, b) if a < b else (b, a)
    kept = {"k": a} if a > 0 else {"k": b}
    return low, high, kept["k"]


def furthest_row(ys: Tensor) -> Any:
    return max(y * 2 for y in ys), min([y for y in ys]), max([y for y in ys if y > -9])


def whole(a: Any, b: Any) -> Any:
    q, r = divmod(a, b)
    return q * 10 + r


def test_either_of_two_pairs():
    """Found by hand: torch said that `where` takes no tuples."""
    examples = [(torch.randn(()), torch.randn(())) for _ in range(4)]
    assert_batched_equal(tdc.batch(either_of_two), examples, backends=("eager",), lowers=("auto",))


def test_max_and_min_along_rows():
    """Found by hand: `max` walked along the rows itself."""
    f = tdc.batch(furthest_row)
    assert_batched_equal(f, [(torch.randn(n),) for n in (2, 4, 1)], backends=())
    odd = [torch.tensor(row) for row in ([math.nan, 1.0], [1.0, math.nan, 2.0])]
    found = f(tdc.pack(odd))
    for got, want in zip(found, zip(*[furthest_row(row) for row in odd], strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(want), equal_nan=True)
    with pytest.raises(ValueError, match="empty"):
        f(tdc.pack([torch.randn(0), torch.randn(2)]))


@pytest.mark.sweep
def test_max_and_min_along_rows_in_one_graph():
    examples = [(torch.randn(n),) for n in (2, 4, 3)]
    assert_batched_equal(tdc.batch(furthest_row), examples, backends=("eager",), lowers=("auto",))


def test_divmod_of_each_example():
    """Found by hand: tensors have no divmod."""
    f, a, b = tdc.batch(whole), torch.tensor([7, -9, 5]), torch.tensor([2, 4, -3])
    want = [10 * (x // y) + x % y for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    assert f.map(a, b).tolist() == want


def test_a_choice_of_what_is_no_tensor_is_refused():
    """Found by hand: torch said that `where` takes no str."""
    f = tdc.batch(named_sign)
    with pytest.raises(tdc.UnsupportedError, match="'neg' and 'pos'"):
        f.map(torch.tensor([1.0, -1.0]))


def named_sign(a: Tensor) -> Any:
    mode = "pos" if a > 0 else "neg"
    return a if mode == "pos" else -a


@dataclass
class State:
    h: Tensor
    n: int


def keeps_an_object(x: Tensor) -> Tensor:
    state = State(x, 0)
    if x > 0:
        state = State(state.h + 1, state.n + 1)
    return state.h * state.n


@pytest.mark.parametrize("backend", [None, "eager"])
def test_an_object_that_holds_an_example_is_refused(backend: str | None):
    """Found by hand: in a graph it was an error of torch."""
    run: Any = tdc.batch(keeps_an_object).map
    run = run if backend is None else torch.compile(run, backend=backend, fullgraph=True)
    with pytest.raises(Exception, match="a State that has such a tensor inside"):
        run(torch.tensor([1.0, -1.0]))


def too_large(x: Tensor) -> Tensor:
    y = x * 1
    y[0] = x
    return y


def too_large_behind_a_mask(x: Tensor) -> Tensor:
    y = x[:, None] * 1
    y[x > 0] = x
    return y


def of_two_shapes(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else x.sum()


def grows_in_place(x: Tensor) -> Tensor:
    y = x[:1]
    y += x
    return y


def halves_in_place(x: Tensor) -> Tensor:
    y = x.long()
    y *= 0.5 * x
    return y


def keyed(x: Tensor) -> Any:
    n, found = 0, {0: x, 1: x}
    while n < x[0]:
        n += 1
    return found[n]


def adds_to_a_span(x: Tensor) -> Tensor:
    y = x * 1
    y[x[0].long() :] += 1
    return y


FIT = "expected a value of shape {} in x\\[\\.\\.\\.\\] = value, got one of \\[3\\]"
REFUSED: dict[Callable[..., Any], str] = {
    too_large: FIT.format(r"\[\]"),
    too_large_behind_a_mask: FIT.format(r"\[1\]"),
    of_two_shapes: r"expected values of one shape where a test chooses, got \[\] and \[3\]",
    grows_in_place: r"expected the shape of x in x \+= y, got \[3\] for \[1\]",
    halves_in_place: r"expected a dtype that x can hold in x \+= y, got torch.float32 for torch.int64",
    adds_to_a_span: r"expected x\[a:b\] = value of a value that all rows can have, got a ragged one",
    keyed: "expected keys that all share, got a key of a dict that differs between examples",
}


@pytest.mark.parametrize("fn", REFUSED)
def test_what_torch_or_a_statement_refuses(fn: Callable[..., Any]):
    """Found by random programs: values were broadcast, or cast, or looked up by identity."""
    with pytest.raises(tdc.TdcError, match=REFUSED[fn]):
        tdc.batch(fn).map(torch.tensor([[1.0, -2.0, 3.0], [0.0, -3.0, 1.0]]))


def test_a_list_of_python_is_asked_for():
    """Found by random programs: torch said that there was no storage."""
    with pytest.raises(tdc.UnsupportedError, match="a number asked of one that differs between examples"):
        tdc.batch(listed).map(torch.ones(2, 3))


def listed(x: Tensor) -> Tensor:
    return x * torch.tensor(x.tolist())


def elements_at_random(x: Tensor) -> Any:
    """Each puts one element, wherever."""
    y, z, w = torch.arange(4.0) * 10, torch.zeros(4, 2), [0, 0]
    y[torch.randint(0, 4, ())] += 1
    z[torch.randint(0, 4, ())][torch.randint(0, 2, ())] = 5.0
    w[torch.randint(0, 2, ())] -= 1
    z[:2, torch.randint(0, 2, ())] *= 2
    return (y % 10).sum() + x, (y // 10).sum(), (z > 0).sum(), w[0] + w[1]


def test_an_index_is_computed_once():
    """Found by hand: `y[torch.randint(4, ())] += 1` read one element and put another."""
    found = tdc.batch(elements_at_random).map(torch.zeros(40))
    assert [x.tolist() for x in found] == [[n] * 40 for n in (1, 6, 1, -1)]


def named_indices(x: Tensor, n: Tensor) -> Any:
    y, k = x * 1, -1
    y[(k := k + 1)] = y[k] * 2
    z = [[x, x], [x, x]]
    z[(i := k)][(j := 1)] = y * n
    a = y[(k := 2)] = n * 3 + k
    return y, z, k, a, i, j


def test_a_value_comes_before_the_place_it_goes_to():
    """Found by hand: the index had given its name another value by then."""
    assert_batched_equal(named_indices, [(torch.arange(3.0) + n, torch.tensor(n)) for n in (2, 3)], backends=())
    assert_batched_equal(
        named_indices, [(torch.arange(3.0) + n, torch.tensor(n)) for n in (2, 3)], backends=("eager",), lowers="auto"
    )


def of_numbers(x: Tensor, n: Tensor) -> Any:
    k, y = 0, 0.5
    for _ in range(n):
        k, y = k + 1, y + 1
    return round(k), round(y), round(y / 4, 2), round(3.7), bool(k), bool(x > 1 and n), bool(3)


@pytest.mark.cases(1)
@pytest.mark.parametrize("backends", [(), ("eager",)])
def test_round_and_bool(backends: tuple[str, ...]):
    examples = [(torch.tensor(x), torch.tensor(n)) for x, n in ((0.5, 0), (1.5, 1), (2.5, 2), (1.5, 3))]
    assert_batched_equal(of_numbers, examples, backends=backends, lowers="auto")
