"""Every rule takes all arguments of torch's function, in torch's order, by position and by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tdc
from tdc.core.rules import DISPATCH, IMPLS, NEEDED, RULES
from tdc.core.signatures import Form, forms_of, renamed, typed_forms

SPARED = {  # by the name of the function: what a rule leaves out, and why
    "bmm addmm baddbmm mm _grouped_mm": "out_dtype is for kernels of CUDA alone",
    "norm": "the function has out= before dtype=, the method has not: a dtype by position is told by its type",
    "expand": "implicit is for the old vmap",
    "gru lstm rnn_relu rnn_tanh": "one function with two orders: of a batch, and of PyTorch's PackedSequence",
    "max min std std_mean var var_mean tensor_split repeat_interleave": "several forms, told apart by their types",
}
untyped: Any = torch  # whose stubs leave out the names of numpy
LEFT_OUT = {name for names in SPARED for name in names.split()}


def rows() -> Iterator[tuple[str, str, Any, list[inspect.Parameter], Form]]:
    for kind, table in DISPATCH.items():
        for op, row in table.items():
            own = list(inspect.signature(IMPLS[row]).parameters.values())
            takes_all = {p.kind for p in own} >= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
            for form in forms_of(op) if not takes_all else ():
                yield kind, getattr(op, "__name__", str(op)), op, own, form


def problem(op: Any, own: list[inspect.Parameter], form: Form) -> str:
    """What of a form the rule does not take; empty where it takes all."""
    free = [name for name, by_position in form if by_position]
    names = [p.name for p in own]
    variable = any(p.kind is p.VAR_POSITIONAL for p in own)
    if len(free) > len([p for p in own if p.kind is p.POSITIONAL_OR_KEYWORD]) and not variable:
        return f"takes {names} of {free}"
    moved = [name for i, name in enumerate(free) if name in names and names.index(name) != i]
    if moved:
        return f"has {moved} elsewhere: {names} for {free}"
    try:
        renamed(op, own, 0, tuple(name for name, _ in form))
    except tdc.TdcError as error:
        return str(error).splitlines()[0]
    return ""


def test_every_rule_takes_the_arguments_of_torch() -> None:
    found = [(kind, name, text) for kind, name, op, own, form in rows() if (text := problem(op, own, form))]
    assert [f for f in found if f[1] not in LEFT_OUT] == []
    assert {name for _, name, _ in found} == LEFT_OUT, "an exception that is none any more"


def test_the_law_covers_the_table() -> None:
    assert len(list(rows())) > 900


CALLS: tuple[tuple[Callable[[Any], Any], Callable[[Any], Any]], ...] = (  # by torch's names, and by position
    (lambda x: torch.relu(input=x), lambda x: torch.relu(x)),
    (lambda x: torch.flip(input=x, dims=(2,)), lambda x: torch.flip(x, (2,))),
    (lambda x: x.flip(dims=(2,)), lambda x: x.flip(2)),
    (lambda x: untyped.sum(x, axis=1, keepdims=True), lambda x: torch.sum(x, 1, True)),
    (lambda x: torch.sub(input=x, other=x * 2, alpha=3), lambda x: torch.sub(x, x * 2, alpha=3)),
    (lambda x: untyped.sub(x1=x, x2=x), lambda x: x - x),
    (lambda x: torch.where(condition=x > 0, input=x, other=-x), lambda x: torch.where(x > 0, x, -x)),
    (lambda x: x.where(condition=x > 0, other=-x), lambda x: torch.where(x > 0, x, -x)),
    (lambda x: x.reshape(shape=(2, -1, 2, 2)), lambda x: x.reshape(2, -1, 2, 2)),
    (lambda x: x.permute(dims=(0, 1, 2)), lambda x: x),
    (lambda x: x.tile(dims=(1, 1, 2)), lambda x: x.tile((1, 1, 2))),
    (lambda x: torch.std(x, dim=2, unbiased=False), lambda x: torch.std(x, 2, correction=0)),
    (lambda x: x.split(split_size=2, dim=2)[1], lambda x: x.split(2, 2)[1]),
)


@pytest.mark.parametrize("padded", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["nested", "masked"])
def test_keywords_are_torchs(padded: bool) -> None:
    packed = tdc.pack([torch.randn(3, 4), torch.randn(1, 4)])
    x: Any = packed.to_padded() if padded else packed

    def run(x: Any) -> list[Any]:
        return [named(x) for named, _ in CALLS]

    for found in (run(x), torch.compile(run, backend="eager", fullgraph=True)(x)):
        for got, (_, positional) in zip(found, CALLS, strict=True):
            torch.testing.assert_close(list(got.unbind()), list(positional(x).unbind()))


def test_an_argument_that_torch_does_not_have_is_refused() -> None:
    x: Any = tdc.pack([torch.ones(2), torch.ones(1)])
    with pytest.raises(tdc.DtypeError, match=r"tdc\.relu: expected an argument of relu, got foo="):
        x.relu(foo=1)
    with pytest.raises(tdc.UnsupportedError, match=r"tdc\.add: expected no out=, got out="):
        torch.add(x, 1, out=x)


def test_keywords_cost_no_graph() -> None:
    compiled = torch.compile(lambda x: x.flip(dims=(1,)), backend="eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for n in (2, 3, 4):
        compiled(tdc.pack([torch.ones(n, 4), torch.ones(1, 4)]))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 1


def described(op: Any) -> list[dict[str, str]]:
    """The parameters of torch's function in each of its forms: names, and what it says of each."""
    return [{name: said for name, _, said in form} for form in typed_forms(op)]


def test_rows_write_their_dims_as_torch_does() -> None:
    """The names of arguments in torch's order; a dim without a default where torch has none."""
    wrong = []
    for rule in RULES:
        if rule.dims is None or not (forms := described(rule.op)):
            continue
        names, defaults = rule.dims.names[1:], dict(rule.dims.defaults)
        order = [[n for n in form if n in names] for form in forms if set(names) <= set(form)]
        if list(names) not in order and rule.name not in OTHER_NAMES:
            wrong.append(f"{rule}: {names}, of torch {[list(form) for form in forms]}")
        has_default = {name: any("..." in form.get(name, "...") for form in forms) for name in defaults}
        for name, default in defaults.items():
            if default is not NEEDED and not has_default[name] and rule.name not in LENIENT:
                wrong.append(f"{rule}: {name} has a default that torch has not")
    assert wrong == []


OTHER_NAMES = (  # several forms, told apart by types or by name
    "split", "tensor_split", "std", "var", "std_mean", "var_mean", "sort", "argsort",
)  # fmt: skip
LENIENT = ("logsumexp", "amax", "amin")  # all elements without a dim
