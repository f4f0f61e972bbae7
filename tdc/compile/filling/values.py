"""Values of a filled graph: tensors some of whose dims are longer than they say, and the numbers of their real sizes.

    dim of 5 real rows in a bucket of 8        r r r r r f f f        real rows first, filling behind them

`Filled.sizes` holds for each dim the expression of its real size, such as `s0` or `2*s0 + 1`, where filling may follow.
What stands in the filling is never defined: whoever mixes elements along such a dim puts something else there first.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from torch import Tensor

from tdc.core import pytree
from tdc.core.errors import UnsupportedError, message

OP = "compile.buckets"
Expr = Any  # a sympy expression of sizes
Node = Any  # a torch.fx.Node, whose target may be called


def larger(a: Any, b: Any) -> Any:
    """The larger of two numbers, or tensors."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a.clamp(min=b) if isinstance(a, Tensor) else b.clamp(min=a)
    return max(a, b)


def smaller(a: Any, b: Any) -> Any:
    """The smaller of two numbers, or tensors."""
    return -larger(-a, -b)


def real(n: Any) -> Any:
    """A whole number as a real one."""
    return n.double() if isinstance(n, Tensor) else float(n)


def power(a: Any, b: Any) -> Any:
    """A power; of whole numbers a whole one, if it is one."""
    return real(a) ** b if isinstance(b, float) or (isinstance(b, int) and b < 0) else a**b


def whole(how: str) -> Callable[[Any], Any]:
    """Rounding to a whole number: "trunc", "ceil" or "floor"."""
    return lambda n: getattr(n.double(), how)().long() if isinstance(n, Tensor) else getattr(math, how)(n)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "Add": operator.add, "Mul": operator.mul, "FloorDiv": operator.floordiv, "CleanDiv": operator.floordiv,
    "Mod": operator.mod, "PythonMod": operator.mod, "Max": larger, "Min": smaller,
    "IntTrueDiv": lambda a, b: real(a) / real(b), "FloatTrueDiv": lambda a, b: real(a) / real(b),
    "Equality": operator.eq, "Unequality": operator.ne, "GreaterThan": operator.ge, "LessThan": operator.le,
    "StrictGreaterThan": operator.gt, "StrictLessThan": operator.lt,
}  # fmt: skip
OF_ONE: dict[str, Callable[[Any], Any]] = {
    "ToFloat": real, "TruncToInt": whole("trunc"), "CeilToInt": whole("ceil"), "FloorToInt": whole("floor"),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Size:
    """A number computed from sizes: in the bucket, and without filling, a tensor without dims."""

    full: Any
    real: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """A tensor, and for each dim the expression of its real size; None where nothing is filled."""

    x: Tensor
    sizes: tuple[Expr | None, ...]

    @property
    def dims(self) -> tuple[int, ...]:
        """Dims with filling."""
        return tuple([d for d, size in enumerate(self.sizes) if size is not None])


def refuse(what: str, hint: str = "leave buckets out, or compute it outside of the function") -> UnsupportedError:
    """The error for a computation whose filling cannot be taken out."""
    return UnsupportedError(message(OP, "operations whose filling can be taken out of their results", what, hint=hint))


def evaluate(expr: Expr, numbers: Mapping[Any, Any]) -> Any:
    """The value of an expression of sizes, with ints or with tensors for its symbols."""
    if isinstance(expr, int):
        return expr
    if expr in numbers:
        return numbers[expr]
    if expr.is_Integer:
        return int(expr)
    if expr.is_Float:
        return float(expr)
    kind, parts = type(expr).__name__, [evaluate(part, numbers) for part in expr.args]
    if kind == "Pow" and isinstance(parts[1], int) and parts[1] > 0:
        return parts[0] ** parts[1]
    if kind in OF_ONE:
        return OF_ONE[kind](parts[0])
    if kind not in OPERATIONS:
        raise refuse(f"a size {expr}")
    return reduce(OPERATIONS[kind], parts)


def expression(size: Any) -> Expr:
    """The expression of a size of a traced graph; an int as it is."""
    return size if isinstance(size, int) else size.node.expr


def shapes_in(val: Any) -> list[Expr]:
    """Sizes of the tensors of a traced value."""
    return [expression(n) for x in pytree.tree_leaves(val) if isinstance(x, Tensor) for n in x.shape]
