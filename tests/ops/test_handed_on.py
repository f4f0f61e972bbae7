"""Functions that torch leaves out of its list of overridable ones: in a graph they do what they do eagerly."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn

import tdc
from tdc.core.torch_functions import LEFT_OUT
from tdc.ops.reduce.torch_masked import RULES

NAMES = [op.__name__ for op in RULES]
LATER = {(1, True): [pytest.mark.slow], (2, True): [pytest.mark.slow], (2, False): [pytest.mark.sweep]}


# Every third function in one kind along the ragged dim, the kinds in turns; the others, the other kind and dim later.
ROWS = [
    pytest.param(
        name,
        dim,
        bool(n % 2) is not other,
        marks=LATER.get((dim, other), [pytest.mark.slow] * (n % 3 > 0)),
        id=f"{name}-{dim}-{other}",
    )
    for n, name in enumerate(NAMES)
    for dim in (1, 2)
    for other in (False, True)
]


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, backend="eager")


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize(("name", "dim", "padded"), ROWS)
def test_masked_functions_of_ragged_rows(name: str, dim: int, padded: bool):
    warnings.filterwarnings("ignore", ".*degrees of freedom")
    torch.manual_seed(0)
    fn, rows = getattr(torch.masked, name), [torch.randn(n, 4) for n in (2, 3)]
    x, lead = tdc.pack(rows), (2.0,) if name in ("norm", "normalize") else ()
    masks = [torch.rand(n, 4) > 0.3 for n in (2, 3)]
    full = [torch.ones_like(row, dtype=torch.bool) for row in rows]
    for given, kwargs in ((full, {}), (masks, {"mask": tdc.pack(masks)})):
        if padded:
            x, kwargs = tdc.pack(rows).to_padded(fill=math.nan), {k: m.to_padded() for k, m in kwargs.items()}
        out = compiled(lambda x, kw: fn(x, *lead, dim, **kw))(x, kwargs)
        want = [fn(row, *lead, dim - 1, mask=m) for row, m in zip(rows, given, strict=True)]
        got = out.unbind(0) if isinstance(out, (tdc.NestedTensor, tdc.MaskedBatch, torch.Tensor)) else out
        for a, b, m in zip(got, want, given, strict=True):
            a, b = (t.masked_fill(~m, 0) if t.shape == m.shape else t for t in (a, b))
            torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("make", [lambda: x_nested(), lambda: x_nested().to_padded(), lambda: x_td()])
def test_functions_that_are_not_listed(make: Callable[[], Any]):
    x = make()
    for fn in (F.hardsigmoid, F.hardswish, lambda t: torch.fill(t, 2.0), nn.Hardswish(), nn.Hardsigmoid()):
        got, want = compiled(fn)(x), fn(x)
        torch.testing.assert_close(pytree.tree_leaves(got), pytree.tree_leaves(want))
    for fn in (torch.rand_like, torch.randn_like, lambda t: torch.randint_like(t, 5)):
        out = compiled(fn)(x)
        assert type(out) is type(x)
        assert out.shape == x.shape


def x_nested() -> tdc.NestedTensor:
    return tdc.pack([torch.randn(n, 4) for n in (2, 3)])


def x_td() -> tdc.TensorDict:
    return tdc.TensorDict({"a": torch.randn(2, 3)}, [2])


def test_torch_lists_each_function_once():
    for module, ops in {**LEFT_OUT, torch.masked: tuple(RULES)}.items():
        known = torch.overrides.get_overridable_functions()[module]
        assert [known.count(op) for op in ops] == [1] * len(ops)


def test_masked_functions_of_all_elements_and_with_options():
    x = x_nested()
    mask: Any = x.gt(0)
    calls: list[Callable[[Any, Any], Any]] = [
        lambda x, m: torch.masked.sum(x, mask=m), lambda x, m: torch.masked.mean(x, mask=m, dtype=torch.float64),
        lambda x, m: torch.masked.prod(x, mask=m), lambda x, m: torch.masked.amax(x, mask=m),
        lambda x, m: torch.masked.var(x, unbiased=False, mask=m),
        lambda x, m: torch.masked.std(x, correction=2, mask=m),
        lambda x, m: torch.masked.norm(x, math.inf, mask=m), lambda x, m: torch.masked.norm(x, -math.inf, mask=m),
    ]  # fmt: skip
    for fn in calls:
        torch.testing.assert_close(compiled(fn)(x, mask), fn(x.values, mask.values))
