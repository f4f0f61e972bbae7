"""Every row of the rule table, in every mode, against the loop over examples.

The default run has all samples of all rows in eager and grad. One or two rows of each family stand for it in the other
modes, and where a graph is made, which takes a second each, the first sample of such a row for one kind of container,
in turn. The slow run has the other samples of these, the first sample of the other kinds, and that of all other rows;
what samples those have more where a graph is made is marked sweep. So are two of the three kinds of an operation in
`SHARED`: a function for each kind serves the whole family, and the kinds take turns. Where a graph is made, rows of a
family that stand for none share one: a graph takes a second, and a row in it a fraction.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from catalogue import is_representative, samples, title
from harness import Sample, case_of, check, check_gap, check_together

import tdc
from tdc.compile import counted
from tdc.core.errors import UnsupportedError
from tdc.core.probes import traces_quantile
from tdc.core.rules import DISPATCH, IMPLS, MODES, Rule
from tdc.ops import RULES
from tdc.testing.conformance import CHECKS, LENGTHS

LIVE = [rule for rule in RULES if not rule.reason]
REFUSED = [rule for rule in RULES if rule.reason]
GRAPHS = ("compile", "export")  # the modes that make graphs
SHARED = ("pointwise", "linalg", "pool", "loss")  # families whose rows are one function with another operation in it
TURNS: dict[str, list[str]] = {}  # the kinds of each operation, in another order for each
for rule in LIVE:
    TURNS.setdefault(title(rule), []).append(rule.kind)
TURNS = {name: kinds[n % len(kinds) :] + kinds[: n % len(kinds)] for n, (name, kinds) in enumerate(TURNS.items())}
SOME = 12  # rows of one graph
HEAVY = ("interpolate",)  # makes the largest graphs: `tests/ops/test_resample.py` has one of all sizes


def cell(rule: Rule, mode: str, which: slice = slice(None), more: str = "", *, marks: Any = ()) -> Any:
    """A case of the matrix; `which` of the samples that a row has for the mode, all where that is a gap."""
    return pytest.param(rule, mode, which, id=f"{title(rule)}-{rule.kind}-{mode}{more}", marks=marks)


def is_its_turn(rule: Rule, mode: str) -> bool:
    """Whether this is the kind of an operation that makes the graph; that of an export is another than of a compile."""
    kinds = TURNS[title(rule)]
    return kinds[GRAPHS.index(mode) % len(kinds)] == rule.kind


def marks_of(rule: Rule, mode: str) -> tuple[Any, Any]:
    """When the first sample of a row is run in a mode, and when the rest."""
    slow, sweep = pytest.mark.slow, pytest.mark.sweep
    if mode in ("eager", "grad"):
        return (), slow
    if not is_representative(rule):
        return sweep if mode in GRAPHS and rule.family in SHARED and not is_its_turn(rule, mode) else slow, sweep
    late = mode in GRAPHS and (rule.name in HEAVY or not is_its_turn(rule, mode))
    return (slow, sweep) if late else ((), slow)


def matrix() -> Iterator[Any]:
    """Row × container × mode."""
    for rule in LIVE:
        for mode in MODES:
            first, rest = marks_of(rule, mode)
            if shares_graph(rule, mode):
                if len(chosen(rule, mode)) > 1:
                    yield cell(rule, mode, slice(1, None), "-more", marks=rest)
            elif mode not in GRAPHS or mode not in rule.modes or len(chosen(rule, mode)) < 2:
                yield cell(rule, mode, marks=first)
            else:
                yield cell(rule, mode, slice(1), marks=first)
                yield cell(rule, mode, slice(1, None), "-more", marks=rest)


def chosen(rule: Rule, mode: str, which: slice = slice(None)) -> list[Sample]:
    """The samples of a row for a mode."""
    return [sample for sample in samples(rule) if mode in sample.modes][which]


def shares_graph(rule: Rule, mode: str) -> bool:
    """True if the first sample of a row is one of several in one graph."""
    if mode not in GRAPHS or mode not in rule.modes or marks_of(rule, mode)[0] != pytest.mark.slow:
        return False
    return bool(chosen(rule, mode))


def shared_graphs() -> Iterator[Any]:
    """Rows of one family and kind, some at a time, in the modes that make graphs."""
    groups: dict[tuple[str, str, str], list[Rule]] = {}
    for rule in LIVE:
        for mode in GRAPHS:
            if shares_graph(rule, mode):
                groups.setdefault((rule.family, rule.kind, mode), []).append(rule)
    for (family, kind, mode), rules in groups.items():
        for n, at in enumerate(range(0, len(rules), SOME)):
            yield pytest.param(rules[at : at + SOME], mode, id=f"{family}-{kind}-{mode}-{n}")


@pytest.mark.slow
@pytest.mark.parametrize(("rules", "mode"), list(shared_graphs()))
def test_rows_in_one_graph(rules: list[Rule], mode: str):
    check_together([(rule, chosen(rule, mode)[0]) for rule in rules], mode)


@pytest.mark.parametrize(("rule", "mode", "which"), list(matrix()))
def test_row(rule: Rule, mode: str, which: slice):
    (check if mode in rule.modes else check_gap)(rule, chosen(rule, mode, which), mode)


def varying() -> list[Any]:
    """Rows of ragged batches that stand for their family, where graphs are made."""
    rows = [rule for rule in LIVE if rule.kind != "tensordict" and "compile" in rule.modes and is_representative(rule)]
    return [pytest.param(rule, id=f"{title(rule)}-{rule.kind}") for rule in rows]


@pytest.mark.slow
@pytest.mark.parametrize("rule", varying())
def test_where_all_numbers_vary(rule: Rule):
    """Under `dynamic=True` Dynamo makes a symbol of each int and float that it is given."""
    torch.compiler.reset()
    cases = [case_of(rule, chosen(rule, "compile")[0], lengths, 0, True) for lengths in LENGTHS]
    run = counted(cases[0].run, backend="eager", dynamic=True)
    assert not [line for case in cases for line in case.compare(run(*case.inputs))]
    assert run.counts.compiles <= 1


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
