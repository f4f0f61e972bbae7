"""The table of operators is what is registered, and each line says what the operator is for."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
import torch

import tdc
from tdc.kernels import OPERATORS

pytestmark = pytest.mark.architecture

MOST = 22


def registered() -> set[str]:
    """Names of the operators of tdc, without their overloads, once all of it is imported."""
    for module in pkgutil.walk_packages(tdc.__path__, "tdc."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    names = torch._C._dispatch_get_all_op_names()
    return {name.removeprefix("tdc::").partition(".")[0] for name in names if name.startswith("tdc::")}


def test_the_table_is_what_is_registered():
    assert registered() == {*OPERATORS}
    assert len(OPERATORS) <= MOST


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_exact_where_a_rule_is_not_or_has_a_figure(name: str):
    entry = OPERATORS[name]
    assert entry.why
    assert entry.plain or not entry.figure
