"""Every row of the rule table, in every mode, against the loop over examples.

The default run has all rows in eager and grad, and one or two rows of each family in the other modes; the full product
is marked slow.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from catalogue import is_representative, samples, title
from harness import case_of, check, check_gap

import tdc
from tdc.core.errors import UnsupportedError
from tdc.core.probes import traces_quantile
from tdc.core.rules import DISPATCH, IMPLS, MODES, Rule
from tdc.ops import RULES
from tdc.testing.conformance import CHECKS

LIVE = [rule for rule in RULES if not rule.reason]
REFUSED = [rule for rule in RULES if rule.reason]


def matrix() -> list[object]:
    """Row × container × mode."""
    params = []
    for rule in LIVE:
        for mode in MODES:
            slow = mode not in ("eager", "grad") and not is_representative(rule)
            name = f"{title(rule)}-{rule.kind}-{mode}"
            params.append(pytest.param(rule, mode, id=name, marks=[pytest.mark.slow] if slow else []))
    return params


@pytest.mark.parametrize(("rule", "mode"), matrix())
def test_row(rule: Rule, mode: str):
    (check if mode in rule.modes else check_gap)(rule, samples(rule), mode)


def test_refused_rows_say_why():
    for rule in REFUSED:
        case = case_of(rule, samples(rule)[0], (3, 1))
        with pytest.raises(UnsupportedError) as error:
            case.run(*case.inputs)
        assert rule.reason in str(error.value)


def test_every_row_has_samples():
    bare = [f"{title(rule)}-{rule.kind} ({rule.family})" for rule in RULES if not samples(rule)]
    assert not bare, "write samples in tests/catalogue/ for " + ", ".join(bare)


def test_families_are_files_of_operations():
    files = {path.stem for path in Path(tdc.ops.__file__).parent.iterdir()}
    assert {rule.family for rule in RULES} <= files


@pytest.mark.parametrize("mode", CHECKS)
def test_every_row_is_sampled_in_every_mode(mode: str):
    bare = [title(rule) for rule in LIVE if not any(mode in sample.modes for sample in samples(rule))]
    lost = ["quantile", "nanquantile"] if mode in ("compile", "export") and not traces_quantile() else []
    assert bare == lost, f"no sample for mode {mode}: " + ", ".join(bare)


def test_labels_differ_within_a_row():
    doubled = [
        f"{title(rule)}-{rule.kind}" for rule in RULES if len({s.label for s in samples(rule)}) < len(samples(rule))
    ]
    assert not doubled


def test_dispatch_reaches_the_row():
    lost = [rule for rule in RULES if IMPLS[DISPATCH[rule.kind][rule.op]] is not rule.impl]
    assert not lost


def test_methods_run_the_function_of_their_name():
    """Not that of a module below torch, as `torch.linalg.svd`, whose results are others."""
    own = {torch.where, torch.polygamma, torch.matmul}  # methods with another order of operands, and an operator
    wrong = []
    for kind, table in DISPATCH.items():
        for name in dir(torch.Tensor):
            op, method = getattr(torch, name, None), getattr(torch.Tensor, name)
            if callable(op) and op in table and op not in own and table[method] != table[op]:
                wrong.append(f"{kind} {name}: {table[method]}, expected {table[op]}")
    assert not wrong
