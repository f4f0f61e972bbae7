"""Every operation reads numbers by their position, in whatever order memory has them."""

from typing import Any

import pytest
from catalogue import samples
from harness import case_of
from torch import Tensor
from torch.utils import _pytree as pytree

from tdc.core.rules import KINDS, RULES, Rule

STRIDED = ("view", "view_as", "view_as_complex")  # views of memory: torch, too, refuses another order


def turned(x: Any) -> Any:
    """The same numbers with the last dim outermost in memory."""
    if not isinstance(x, Tensor) or x.ndim < 2 or not x.is_floating_point():
        return x
    dims = tuple(reversed(range(x.ndim)))
    return x.permute(dims).contiguous().permute(dims)


def differences(rule: Rule, which: slice) -> list[str]:
    """Lines about samples of a row whose results differ."""
    wrong: list[str] = []
    for sample in samples(rule)[which]:
        if "eager" in sample.modes:
            grad = "grad" in sample.modes and "grad" in rule.modes
            case = case_of(rule, sample, sample.batches[0], 0, grad)
            wrong += case.compare(case.run(*[pytree.tree_map(turned, x) for x in case.inputs]))
    return [f"{rule}: {line}" for line in wrong]


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("kind", "which"),
    [("nested", slice(1)), *[pytest.param(kind, slice(None), marks=pytest.mark.slow) for kind in KINDS]],
    ids=str,
)
def test_other_order_in_memory(kind: str, which: slice):
    rules = [r for r in RULES if r.kind == kind and "eager" in r.modes and r.name not in STRIDED]
    assert rules
    assert not [line for rule in rules for line in differences(rule, which)]
