"""Random programs; `PYTHONPATH=tests python tests/autobatch/run_programs.py --count 500 --mode while` checks more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from autobatch import check, run_programs
from autobatch.generate import program

from tdc.autobatch.decorator import batch


def test_random_programs_equal_the_loop():
    seen, failed = run_programs.run(25, 0, "eager")
    assert not failed
    assert seen["programs"] == 25
    assert all([seen[word.strip()] > 1 for word in run_programs.WORDS]), seen
    assert seen["gradients that are not zero"] > 100


MORE = [pytest.param(mode, 3, marks=pytest.mark.slow) for mode in ("while", "inference", "unroll", "graph")]


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    ("mode", "count"),
    [("while", 1), ("inference", 1), ("unroll", 1), pytest.param("aot_eager", 1, marks=pytest.mark.slow), *MORE],
)
def test_random_programs_in_graphs_equal_the_loop(mode: str, count: int):
    seen, failed = run_programs.run(count, 7, mode, calls=count > 1, statements=4 if count == 1 else 6)
    assert not failed
    assert seen["programs"] == count


def test_a_seed_always_gives_the_same_program():
    assert program(3) == program(3)
    assert program(3).text != program(4).text


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("fault", ["value", "gradient", "dtype", "lanes"])
def test_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch):
    """A wrong value, a gradient that is cut, another dtype, and examples in another order."""
    right = check.batched

    def wrong(f: Any, p: Any, given: Any, compiler: Any) -> Any:
        def leaf(x: Any) -> Any:
            if not isinstance(x, torch.Tensor) or not x.is_floating_point():
                return x
            to = {"value": x + 1e-5, "gradient": x.detach(), "dtype": x.to(torch.float16), "lanes": x.flip(0)}
            return to[fault]

        return check.pytree.tree_map(leaf, right(f, p, given, compiler))

    monkeypatch.setattr(check, "batched", wrong)
    seeds = [seed for seed in range(40) if program(seed).size == 7 and program(seed).double][:5]
    for seed in seeds:
        with pytest.raises(AssertionError):
            check.check(program(seed))


def test_a_chain_ends_where_it_fails():
    """Found by hand: the third operand was evaluated for all examples."""
    text = "def f(n):\n    return 0 < n < 12 // n\n"
    scope: dict[str, Any] = {}
    exec(text, scope)
    assert batch(scope["f"], source=text).map(torch.tensor([0, 1, 9])).tolist() == [False, True, False]


def test_reversed_range_to_a_number_of_each_example():
    """Found by a program: the bounds were taken for numbers of Python."""
    text = (
        "def f(n, m):\n    t = i = 0\n    for i in reversed(range(n, 9, m)):\n        t = t * 10 + i\n    return t, i\n"
    )
    scope: dict[str, Any] = {}
    exec(text, scope)
    f = batch(scope["f"], source=text)
    n, m = torch.tensor([0, 5, 8, 9, 12]), torch.tensor([2, 1, 3, 1, -1])
    expected = [f.fn(a, b) for a, b in zip(n.tolist(), m.tolist(), strict=True)]
    for found, column in zip(f.map(n, m), zip(*expected, strict=True), strict=True):
        assert found.tolist() == list(column)
