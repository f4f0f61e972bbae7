"""Tables filled by nested loops, as dynamic programming has them: right in graphs, or refused in words as eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tdc
from tdc.compile import counted

T = torch.tensor


def common(a: Any, b: Any) -> Any:
    """Length of the longest common subsequence."""
    table = torch.zeros(5, 5)
    for i in range(a.shape[0]):
        for j in range(b.shape[0]):
            best = torch.maximum(table[i, j + 1], table[i + 1, j])
            table[i + 1, j + 1] = torch.maximum(best, table[i, j] + (a[i] == b[j]))
    return table.amax()


def sized(a: Any, b: Any) -> Any:
    """A table whose size differs between examples."""
    return torch.zeros(a.shape[0] + 1, b.shape[0] + 1).sum()


def batch(*lengths: int) -> Any:
    return tdc.pack([torch.randint(0, 3, (n,)) for n in lengths])


@pytest.mark.slow  # nested loops take seconds to trace
def test_a_table_of_one_size_in_one_graph():
    run = counted(tdc.batch(common), backend="eager")
    for a, b in (((3, 2), (2, 4)), ((4, 1), (1, 3)), ((2, 2, 3), (3, 0, 2))):
        x, y = batch(*a), batch(*b)
        expected = torch.stack([common(*rows) for rows in zip(x.unbind(), y.unbind(), strict=True)])
        assert tdc.batch(common)(x, y).equal(expected)
        assert run(x, y).equal(expected)
    assert run.counts.compiles == 1


@pytest.mark.slow  # as above
def test_rounds_beyond_a_table_are_named_where_they_are_unrolled():
    run = counted(tdc.batch(lower="unroll", max_iters=5)(common), backend="eager")
    with pytest.raises(tdc.TdcError, match="expected an index inside of a tensor, got 5 at dim 1 of Tensor float32"):
        run(batch(2, 1), batch(1, 2))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_numbers_beyond_a_tensor_are_refused(mode: str):
    def above(x: Any) -> Any:
        table, total = x.new_ones(3), x.sum()
        for i in range(4):
            total = total + table[i]
        return total

    def below(x: Any) -> Any:
        table = x.new_ones(3, 2)
        for i in range(4):
            table[1, -i] = x.sum()
        return table

    for fn in (above, below):
        run = tdc.batch(fn) if mode == "eager" else counted(tdc.batch(fn), backend="eager")
        with pytest.raises(tdc.IndexingError, match="expected an index inside of a tensor"):
            run(batch(2, 3))


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_size_that_differs_between_examples_is_no_number(mode: str):
    run = tdc.batch(sized) if mode == "eager" else counted(tdc.batch(sized), backend="eager")
    with pytest.raises(tdc.UnsupportedError, match="expected tensors that stay tensors, got a number asked of one"):
        run(batch(2, 3), batch(1, 2))


def test_a_program_may_compile_any_number_of_functions():
    """Graphs of one piece of code are limited in number, by default to 8; a wrapper of torch is such a piece."""
    with torch._dynamo.config.patch(recompile_limit=2):
        for _ in range(3):

            def double(x: Any) -> Any:
                return x.sum() * 2

            run = counted(tdc.batch(double), backend="eager")
            assert run(tdc.pack([T([1, 2]), T([3])])).tolist() == [6, 6]
