"""Sizes that are symbols: what torch.export calls `s0 + 1` (torch 2.11-2.15)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from tdc.compile._torch.patches import patched
from tdc.core.dynamo import certain_symbol
from tdc.core.private import find, optional

ANY_SIZE, SMALLER = "sizes 0 and 1 like others", "the smaller of two sizes without a guard"


class Line(NamedTuple):
    """A size as a multiple of a symbol and a number."""

    factor: int
    symbol: Any
    plus: int


@optional(ANY_SIZE, lost="a recompile where a size crosses a threshold", instead=nullcontext)
def any_size(flag: bool = True) -> AbstractContextManager[None]:
    """A context in which sizes 0 and 1 are like others: no guard, no special code."""
    return setting("torch.fx.experimental._config", backed_size_oblivious=flag)


def setting(module: str, **settings: Any) -> AbstractContextManager[Any]:
    """A context with other settings of a module of torch; Gone if it lacks one."""
    for name in settings:
        find(f"{module}:{name}")
    found: AbstractContextManager[Any] = find(f"{module}:patch")(settings)
    return found


@optional(SMALLER, lost="exports in which one size is the smaller of two", instead=nullcontext)
def order_of_sizes(guards: bool) -> AbstractContextManager[Any]:
    """A context in which Inductor knows more about the smaller of two sizes.

    The largest number is larger than any size, as in `x[1:]`. Sizes that it cannot compare, as of the sides of a
    diagonal, it compares in the example, with a guard; without `guards` this is an error.
    """
    sizes = find("torch._inductor.sizevars:SizeVarAllocator")
    evaluate: Callable[..., Any] = find("torch._inductor.sizevars:SizeVarAllocator.evaluate_min")

    def least(own: Any, left: Any, right: Any) -> Any:
        known = [x for x in (left, right) if x != sys.maxsize]
        if len(known) == 1:
            return known[0]
        try:
            return evaluate(own, left, right)
        except TypeError:
            if not guards:
                raise
        with any_size(False):
            return evaluate(own, left, right)

    return patched((sizes, "evaluate_min", least))


def fixed(size: Any) -> int | None:
    """Number of a size; None for a size that varies."""
    return int(size) if isinstance(size, int) or not size.node.expr.free_symbols else None


def same_size(a: Any, b: Any) -> bool:
    """True if two sizes are known to be equal, without a guard."""
    return bool(certain_symbol(a == b))


def same_strides(x: Any, y: Any) -> bool:
    """True if the tensors of two nodes are known to have equal strides."""
    strides = zip(x.meta["val"].stride(), y.meta["val"].stride(), strict=True)
    return all([same_size(a, b) for a, b in strides])


def line_of(size: Any) -> Line | None:
    """Read a size as `factor * symbol + plus`; None for another form."""
    expr = size.node.expr
    if len(expr.free_symbols) != 1:
        return None
    (symbol,) = expr.free_symbols
    plus = expr.subs(symbol, 0)
    factor = expr.subs(symbol, 1) - plus
    if (factor * symbol + plus - expr).expand() != 0 or not (plus.is_Integer and factor.is_Integer and factor > 0):
        return None
    return Line(int(factor), symbol, int(plus))


def limits(found: Any) -> tuple[int | None, int | None]:
    """Ends of one of torch's ranges; None for infinity."""
    ends = [int(x) if getattr(x, "is_Integer", False) or type(x) is int else None for x in (found.lower, found.upper)]
    return ends[0], ends[1]


def size_text(size: Any, names: Mapping[tuple[int, Any], tuple[str, int]]) -> str:
    """A size in terms of names, `{(factor, symbol): (name, plus)}`; `?` where it depends on data."""
    if isinstance(size, int):
        return str(size)
    expr, sympy = size.node.expr, find("sympy")
    meaning = {symbol: (sympy.Symbol(name) - plus) / factor for (factor, symbol), (name, plus) in names.items()}
    return str(sympy.expand(expr.xreplace(meaning))) if expr.free_symbols <= meaning.keys() else "?"
