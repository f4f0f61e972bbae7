"""Operators of the library give a graph results as their kernels do: as many, of the same shapes, dtypes and strides.

Inductor goes by what the fake of an operator says, and stops or reads other memory where a kernel does something else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from catalogue import samples
from fakes import fakes_agree
from harness import case_of
from test_strides import STRIDED, turned
from torch.utils import _pytree as pytree

from tdc.core.rules import RULES

LIVE = [rule for rule in RULES if rule.kind != "tensordict" and "eager" in rule.modes]
ORDERS: dict[str, Callable[[Any], Any]] = {"as drawn": lambda x: x, "turned": turned}
FAMILIES = ("attention", "conv", "rnn")  # whose rules call operators, see tdc/kernels


@pytest.mark.cases(3, 3)
@pytest.mark.parametrize("order", ["as drawn", pytest.param("turned", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", FAMILIES)
def test_fakes_are_as_kernels(family: str, order: str):
    """All samples of a family, with gradients, on tensors of an order in memory."""
    for rule in [r for r in LIVE if r.family == family and not (order == "turned" and r.name in STRIDED)]:
        for sample in [s for s in samples(rule) if "eager" in s.modes]:
            case = case_of(rule, sample, sample.batches[0], 0, "grad" in sample.modes and "grad" in rule.modes)
            with fakes_agree():
                case.compare(case.run(*[pytree.tree_map(ORDERS[order], x) for x in case.inputs]))
