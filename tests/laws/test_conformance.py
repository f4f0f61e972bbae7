"""Every row of the rule table, in every mode, against the loop over examples.

The fast run has all samples of all rows with their gradients, or eagerly where they have none. One or two rows of each
family stand for it in the other modes; where a graph is made, the first sample of such a row for one kind of container,
in turn. The slow run has the other samples of these, the first sample of the other kinds, and that of all other rows,
where a graph is made for one kind of container, too. The sweep has the rest. First samples share a graph, some rows at
a time: a graph takes a second, and a row in it a fraction.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from catalogue import is_representative, samples, title
from harness import Row, Sample, case_of, check, check_gap, check_together

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
TURNS: dict[str, list[str]] = {}  # the kinds of each operation, in another order for each
for rule in LIVE:
    TURNS.setdefault(title(rule), []).append(rule.kind)
TURNS = {name: kinds[n % len(kinds) :] + kinds[: n % len(kinds)] for n, (name, kinds) in enumerate(TURNS.items())}
SOME = 12  # rows of one graph
FAMILIES = "families"  # rows that stand for one
HEAVY = ("interpolate", "multi_head_attention_forward")  # make the largest graphs: others of their families are fast


def cell(rule: Rule, mode: str, some: list[Sample], more: str = "", *, marks: Any = ()) -> Any:
    """A case of the matrix: samples of a row in one mode."""
    return pytest.param(rule, mode, some, id=f"{title(rule)}-{rule.kind}-{mode}{more}", marks=marks)


def is_its_turn(rule: Rule, mode: str) -> bool:
    """Whether this is the kind of an operation that makes the graph; that of an export is another than of a compile."""
    kinds = TURNS[title(rule)]
    return kinds[GRAPHS.index(mode) % len(kinds)] == rule.kind


def marks_of(rule: Rule, mode: str) -> tuple[Any, Any]:
    """When the first sample of a row is run in a mode, and when the rest."""
    slow, sweep = pytest.mark.slow, pytest.mark.sweep
    if mode == "grad":
        return (), ()
    if mode == "eager":  # the mode of gradients has its samples without gradients, too
        return (), slow
    if not is_representative(rule):
        return sweep if mode in GRAPHS and not is_its_turn(rule, mode) else slow, sweep
    late = mode in GRAPHS and (rule.name in HEAVY or not is_its_turn(rule, mode))
    return (slow, sweep) if late else ((), sweep if mode in GRAPHS else slow)


def parts(rule: Rule, mode: str) -> tuple[list[Sample], list[Sample]]:
    """Samples of a row for a mode: those that run first, and the rest."""
    some = chosen(rule, mode)
    if mode == "eager":
        alone = [sample for sample in some if not ("grad" in rule.modes and "grad" in sample.modes)]
        return alone, [sample for sample in some if sample not in alone]
    return (some[:1], some[1:]) if mode in GRAPHS else (some, [])


def matrix() -> Iterator[Any]:
    """Row × container × mode."""
    for rule in LIVE:
        for mode in MODES:
            marks, (first, rest) = marks_of(rule, mode), parts(rule, mode)
            if mode not in rule.modes:
                yield cell(rule, mode, chosen(rule, mode), marks=marks[0])
                continue
            if first and not shares_graph(rule, mode):
                yield cell(rule, mode, first, marks=marks[0])
            if rest:
                yield cell(rule, mode, rest, "-more", marks=marks[1])


def chosen(rule: Rule, mode: str) -> list[Sample]:
    """The samples of a row for a mode."""
    return [sample for sample in samples(rule) if mode in sample.modes]


def shares_graph(rule: Rule, mode: str) -> bool:
    """True if the first sample of a row is one of several in one graph."""
    return mode in GRAPHS and mode in rule.modes and marks_of(rule, mode)[0] != pytest.mark.sweep


def shared_graphs() -> Iterator[Any]:
    """Rows in one mode, some at a time: those that stand for their families, and then each family.

    A TensorDict compiles twice, and so would a batch beside it.
    """
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for rule in LIVE:
        for mode in GRAPHS:
            if shares_graph(rule, mode) and chosen(rule, mode):
                family = rule.family if marks_of(rule, mode)[0] else FAMILIES
                containers = "leaves" if rule.kind == "tensordict" else "batches"
                groups.setdefault((family, containers, mode), []).append((rule, chosen(rule, mode)[0]))
    for (family, containers, mode), rows in groups.items():
        late = pytest.mark.sweep if mode == "export" and family != FAMILIES else pytest.mark.slow
        marks = () if family == FAMILIES and mode == "compile" else late
        some = SOME // 2 if family == FAMILIES else SOME
        for n, at in enumerate(range(0, len(rows), some)):
            yield pytest.param(rows[at : at + some], mode, id=f"{family}-{containers}-{mode}-{n}", marks=marks)


@pytest.mark.parametrize(("rows", "mode"), list(shared_graphs()))
def test_rows_in_one_graph(rows: list[Row], mode: str):
    check_together(rows, mode)


@pytest.mark.parametrize(("rule", "mode", "some"), list(matrix()))
def test_row(rule: Rule, mode: str, some: list[Sample]):
    (check if mode in rule.modes else check_gap)(rule, some, mode)


def varying() -> list[Any]:
    """Rows of ragged batches that stand for their family, where graphs are made."""
    rows = [rule for rule in LIVE if rule.kind != "tensordict" and "compile" in rule.modes and is_representative(rule)]
    return [pytest.param(rule, id=f"{title(rule)}-{rule.kind}") for rule in rows]


@pytest.mark.cases(0, 7)
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
    files = {path.stem for path in Path(tdc.ops.__file__).parent.rglob("*")}
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
