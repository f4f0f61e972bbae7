"""Proofs that a size of a bucket holds the real one, whatever batch is filled up to the bucket.

    s0 + s1, 2 * s0, s0 // 2, Max(s0, 3)    grow with their symbols
    s0 - s0 // 2                            of one symbol: each number up to that of the bucket is tried
    s0 - s1                                 no: where s1 is filled and s0 is not, elements would be lost
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from tdc.compile.filling.values import Expr, evaluate


def holds(expr: Expr, full: Mapping[Expr, int], filled: Collection[Expr]) -> bool:
    """True if no real size is above that of the bucket.

    Args:
        full: the number of each symbol in the bucket.
        filled: symbols whose real number may be smaller.
    """
    own = [s for s in getattr(expr, "free_symbols", ()) if s in filled]
    if not own or expr in filled:
        return True
    if len(own) == 1:
        numbers = torch.arange(full[own[0]] + 1)
        try:
            found = evaluate(expr, {**full, own[0]: numbers})
        except RuntimeError:  # of a division by 0, which no size is found by
            found = evaluate(expr, {**full, own[0]: numbers[1:]})
        return bool((torch.as_tensor(found) <= evaluate(expr, full)).all())
    kind = type(expr).__name__
    if kind == "Add":
        alone = {s: [part for part in expr.args if part.free_symbols & set(own) == {s}] for s in own}
        others = [part for part in expr.args if len(part.free_symbols & set(own)) > 1]
        parts = [expr.func(*found) for found in alone.values() if found] + others
        return all([holds(part, full, filled) for part in parts])
    if kind == "FloorDiv":
        return expr.args[1].is_Integer and expr.args[1] > 0 and holds(expr.args[0], full, filled)
    if kind == "Mul":
        return all([(part >= 0) if part.is_number else holds(part, full, filled) for part in expr.args])
    return kind in ("Max", "Min") and all([holds(part, full, filled) for part in expr.args])
