"""The harness can fail: in each mode it rejects rules that are wrong on purpose; right ones are those of the matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from catalogue import samples
from harness import Counter, Draw, Sample, check, check_gap, failure

from tdc import MaskedBatch, NestedTensor, UnsupportedError
from tdc.core.rules import DISPATCH, IMPLS, MODES, Rule
from tdc.ops import RULES
from tdc.testing.batches import Dict, Ragged, build, differences, unbuild
from tdc.testing.conformance import CHECKS

TRACES = ("compile", "export")
GRADIENTS = ("grad", "compile")


def row(name: str, kind: str) -> Rule:
    return next(rule for rule in RULES if (rule.name, rule.kind) == (name, kind))


def first(rule: Rule, label: str = "") -> list[Sample]:
    """The first sample of a row that every mode runs, or the named one."""
    return [s for s in samples(rule) if s.modes == MODES and label in s.label][:1]


def relu(x: Any) -> Any:
    return torch.relu(x.values)


def half_gradient(x: Any) -> Any:
    return x.with_values(relu(x).detach() + (x.values - x.values.detach()) * 0.5)


def mirrored(x: Any) -> Any:
    """Right values, lengths in reverse."""
    return NestedTensor(relu(x), x.offsets[-1] - x.offsets.flip(0))


def unrolled(x: Any) -> Any:
    """One graph for each packed total."""
    for _ in range(x.values.shape[0]):
        pass
    return x.with_values(relu(x))


def broken(x: Any) -> Any:
    torch._dynamo.graph_break()
    return x.with_values(relu(x))


def hosted(x: Any) -> Any:
    """Reads a value on the host."""
    return x.with_values(relu(x) if float(x.values.sum()) < 1e9 else x.values)


def uncut(x: Any, weight: Any, bias: Any = None) -> Any:
    """Padding is filled before the product, not cut off behind it: its gradient reaches the weights."""
    return x.with_data(F.linear(x.filled(0), weight, bias))


def unfilled(x: Any, weight: Any, bias: Any = None) -> Any:
    """Padding is cut off behind the product, not filled before it: NaN times 0 reaches the weights."""
    out = F.linear(x.data, weight, bias)
    return x.with_data(out.masked_fill(~x.mask, 0))


def shuffled(x: Any) -> Any:
    """Keys in place, leaves exchanged between examples."""
    return x.apply(lambda leaf: torch.relu(leaf).flip(0))


FAULTS: tuple[tuple[str, str, str, str, Callable[..., Any], tuple[str, ...]], ...] = (
    ("value", "relu", "nested", "", lambda x: x.with_values(relu(x) + 0.01), MODES),
    ("one element", "relu", "nested", "", lambda x: x.with_values(F.pad(relu(x)[1:], (0, 0, 1, 0))), MODES),
    ("structure", "relu", "nested", "features", mirrored, MODES),
    ("container", "relu", "nested", "", relu, MODES),
    ("other container", "relu", "nested", "", lambda x: MaskedBatch(relu(x)[None], x.offsets[-1:]), MODES),
    ("dtype", "relu", "nested", "", lambda x: x.with_values(relu(x).double()), MODES),
    ("gradient", "relu", "nested", "", half_gradient, GRADIENTS),
    ("no gradient", "relu", "nested", "", lambda x: x.with_values(relu(x).detach()), GRADIENTS),
    ("recompiles", "relu", "nested", "", unrolled, TRACES),
    ("breaks the graph", "relu", "nested", "", broken, ("compile",)),
    ("reads on the host", "relu", "nested", "", hosted, (*TRACES, "vmap")),
    ("over all rows", "softmax", "nested", "features, dim 1", lambda x, d: x.with_values(x.values.softmax(0)), MODES),
    ("reads padding", "sum", "masked", "features, dim 1", lambda x, d: x.data.sum(d), MODES),
    ("multiplies away", "sum", "masked", "features, dim 1", lambda x, d: (x.data * x.mask).sum(d), MODES),
    ("NaN to 0", "mean", "masked", "features, dim 1", lambda x, d: x.data.nan_to_num(0).mean(d), MODES),
    ("gradient of padding, behind", "linear", "masked", "features", uncut, GRADIENTS),
    ("gradient of padding, before", "linear", "masked", "features", unfilled, GRADIENTS),
    ("lengths", "relu", "masked", "features", lambda x: MaskedBatch(x.data.relu(), x.lengths.flip(0)), MODES),
    ("key", "relu", "tensordict", "", lambda x: x.apply(torch.relu).delete("a"), MODES),
    ("batch size", "relu", "tensordict", "", lambda x: x.apply(torch.relu).flatten(), MODES),
    ("examples", "relu", "tensordict", "", shuffled, MODES),
)  # fmt: skip


OF_GRAPHS = ("value", "no gradient", "recompiles", "breaks the graph", "reads on the host")  # and of other modes


def planted() -> list[Any]:
    return [
        pytest.param(
            name, kind, label, impl, mode, id=f"{fault}-{name}-{kind}-{mode}".replace(" ", "_"),
            marks=[pytest.mark.slow] * (mode in TRACES and fault not in OF_GRAPHS),
        )
        for fault, name, kind, label, impl, modes in FAULTS
        for mode in modes
    ]  # fmt: skip


def plant(monkeypatch: pytest.MonkeyPatch, rule: Rule, impl: Callable[..., Any]) -> None:
    """Another implementation in place of a row's."""
    monkeypatch.setitem(IMPLS, DISPATCH[rule.kind][rule.op], impl)


@pytest.mark.cases(slow=12)
@pytest.mark.parametrize(("name", "kind", "label", "impl", "mode"), planted())
def test_wrong_rule_is_rejected(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str, label: str, impl: Callable[..., Any], mode: str
):
    rule = row(name, kind)
    plant(monkeypatch, rule, impl)
    error = failure(rule, first(rule, label), mode)
    assert error is not None
    assert f"{rule} in mode {mode}" in str(error)


def test_every_mode_has_wrong_values_structures_and_gradients():
    for fault in ("value", "structure", "reads padding", "key"):
        assert next(modes for name, *_, modes in FAULTS if name == fault) == MODES
    assert {mode for _, *_, modes in FAULTS for mode in modes} == set(MODES) == set(CHECKS)


def test_wrong_samples_are_all_named(monkeypatch: pytest.MonkeyPatch):
    rule = row("relu", "nested")
    plant(monkeypatch, rule, lambda x: x.with_values(relu(x) + 1))
    text = str(failure(rule, samples(rule), "eager"))
    assert all(f"{label} (3, 0, 5, 1)" in text for label in ("features", "flat", "two"))


def test_row_without_gradient_of_an_empty_batch_is_fine():
    rule = row("amax", "nested")
    check(rule, [s for s in samples(rule) if s.label.startswith("no elements")], "grad")


def refusing(x: Any) -> Any:
    raise UnsupportedError("tdc.relu: expected something else, got this")


def failing(x: Any) -> Any:
    raise RuntimeError("some other error")


@pytest.mark.parametrize("mode", ["eager", "compile", "vmap", "export"])
def test_gap(monkeypatch: pytest.MonkeyPatch, mode: str):
    rule = replace(row("relu", "nested"), modes=())
    with pytest.raises(AssertionError, match="works in mode"):
        check_gap(rule, first(rule), mode)
    plant(monkeypatch, rule, refusing)
    check_gap(rule, first(rule), mode)
    plant(monkeypatch, rule, failing)
    with pytest.raises(AssertionError, match="without an error of its own"):
        check_gap(rule, first(rule), mode)


def test_counter_counts_graphs():
    counter = Counter("eager")
    compiled = torch.compile(lambda x: x + 1, backend=counter, dynamic=False)
    for size in (2, 3, 3):
        compiled(torch.ones(size))
    assert counter.graphs == 2


@pytest.mark.parametrize("kind", ["nested", "masked"])
@pytest.mark.parametrize("layout", ["features", "flat", "second", "last", "two"])
def test_built_batches_come_apart_again(kind: str, layout: str):
    x = Draw(kind, (3, 0, 5, 1)).ragged(layout)
    y = build(x, kind, lambda t: t)
    assert differences(unbuild(y), x, kind) == []
    if kind == "masked":
        padding = y.data.numel() - sum(r.numel() for r in x.rows)
        assert int(y.data.isnan().sum()) == padding > 0


NUMBERS = torch.tensor([1.0, 2.0])
DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "nan": (torch.tensor([1.0, float("nan")]), NUMBERS, "1 NaN"),
    "number for nan": (NUMBERS, torch.tensor([1.0, float("nan")]), "values differ"),
    "infinity": (torch.tensor([1.0, float("inf")]), NUMBERS, "values differ"),
    "bool": (NUMBERS > 1, NUMBERS > 0, "values differ"),
    "shape": (NUMBERS[None], NUMBERS, "shape (1, 2), expected (2,)"),
    "no rows": (Ragged([], kind="nested"), Ragged([NUMBERS]), "batch size 0, expected 1"),
    "ragged dims": (Ragged([NUMBERS], (2,), kind="nested"), Ragged([NUMBERS]), "ragged dims (2,), expected (1,)"),
    "lengths": (Ragged([NUMBERS[:1]], kind="nested"), Ragged([NUMBERS]), "example 0: shape (1,), expected (2,)"),
    "kind": (Ragged([NUMBERS], kind="masked"), Ragged([NUMBERS]), "container masked, expected nested"),
    "type": (NUMBERS, Ragged([NUMBERS]), "type Tensor, expected NestedTensor"),
    "none": (None, NUMBERS, "type NoneType, expected Tensor"), "number": (1, 2, "1, expected 2"),
    "list": ([NUMBERS], (NUMBERS,), "type list, expected tuple"),
    "results": ((NUMBERS,), (NUMBERS, None), "results 1, expected 2"),
    "keys": (Dict({"a": NUMBERS}, (2,)), Dict({"a": NUMBERS, "b": NUMBERS}, (2,)), "keys ['a'], expected ['a', 'b']"),
    "leaf": (Dict({"a": NUMBERS}, (2,)), Dict({"a": NUMBERS + 1}, (2,)), "a: values differ by up to 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", DIFFERENT)
def test_differences_are_told(case: str):
    got, want, text = DIFFERENT[case]
    assert any(text in line for line in differences(got, want, "nested")), differences(got, want, "nested")
    same = want if not isinstance(want, Ragged) else replace(want, kind="nested")
    assert differences(same, want, "nested") == []
