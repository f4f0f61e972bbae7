"""Rows and arguments of operations on planes: convolution, pooling and resampling.

    (B, -1, C, H, W)  frames: examples of several images of one size, on all of which the operation itself runs
"""

from __future__ import annotations

from operator import index
from typing import Any

from tdc.core.arguments import expect_at_least
from tdc.core.errors import ShapeError, message
from tdc.core.rules import define
from tdc.core.typing import Op, OpName
from tdc.ops.rectangle import repacked
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import Results, is_ragged, map_results


def each(value: Any, n: int, op: OpName) -> tuple[int, ...]:
    """One number for each of n dims, from a number or as many as there are; a ShapeError for another count."""
    given = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if len(given) not in (1, n):
        raise ShapeError(message(op, f"one number for each of {n} dims", f"{given}", hint="one for all, or one each"))
    return given * n if len(given) == 1 else given


def fixed(value: Any, n: int, op: OpName) -> tuple[int, ...]:
    """`each`, with ints as constants of a graph. What is no int is left for checks to refuse."""
    return tuple([index(v) if isinstance(v, int) and not isinstance(v, bool) else v for v in each(value, n, op)])


def reach(op: OpName, n: int, **given: Any) -> list[tuple[int, ...]]:
    """Sizes and steps of windows, an int of at least 1 for each of n dims, and what is put around, 0 or more."""
    found = []
    for name, value in given.items():
        numbers = fixed(value, n, op)
        expect_at_least(op, 0 if name.endswith("padding") else 1, name, *numbers)
        found.append(numbers)
    return found


def kernel_text(kernel: Any) -> str:
    """A kernel's sizes, for errors."""
    return f"a kernel of {' x '.join([f'{index(k)}' for k in kernel])}"


def spatial(op: Op, impl: Op, n: int | None, family: str, *aliases: Op) -> None:
    """Rows for both ragged containers: `impl` of planes with n dims (None for any), `op` itself of frames."""

    def run(input: Any, *args: Any, **kwargs: Any) -> Results:
        rows = is_ragged(input) and input.ragged_dims == (1,) and input._batch_dim == 0
        if not rows or (input.ndim < 4 if n is None else input.ndim != n + 3):
            return impl(input, *args, **kwargs)
        if isinstance(input, NestedTensor):
            return map_results(op(input.values, *args, **kwargs), input.with_values)
        frames, sizes = input.filled(0).flatten(0, 1), input.data.shape[:2]
        return map_results(op(frames, *args, **kwargs), lambda t: repacked(t.view(*sizes, *t.shape[1:]), input))

    define(op, family, ragged=run, aliases=aliases)
