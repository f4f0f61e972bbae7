"""The arguments of operations by torch's names: a keyword reaches the parameter that stands where torch has it.

    torch.flip(input=x, dims=(1,))         a rule flip(x, *dims)           gets  flip(x, (1,))
    torch.addbmm(c, batch1=a, batch2=b)    a rule addbmm(input, a, b)      gets  addbmm(c, a, b)

The names are those of torch's own schemas and signatures, and numpy's `axis`, `keepdims`, `x`. A rule may call its
parameters as it likes, as long as it takes them in torch's order.

Invariants:
  - a call without keywords costs nothing; one with keywords looks up how they go, and a graph holds the answer;
  - a keyword that the operation does not have, or the rule does not take, is refused here, never by Python.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from tdc.core.annotations import python_signature
from tdc.core.dynamo import constant
from tdc.core.errors import DtypeError, UnsupportedError, message
from tdc.core.rules import IMPLS, ROWS, SELF_SECOND, name_of
from tdc.core.torch_functions import own_name, schemas
from tdc.core.typing import Op

Form = tuple[tuple[str, bool], ...]  # the parameters that a function takes: their names, and whether by position, too
Renaming = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]  # keywords that go by position, and by another name
NUMPY = {"axis": "dim", "keepdims": "keepdim", "x": "input", "a": "input", "x1": "input", "x2": "other"}
FREE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
KNOWN: dict[tuple[str, Op, int, tuple[str, ...]], Renaming | None] = {}


def run_named(row: str, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a row for a call of `op` with keywords.

    Raises:
        DtypeError: `op` has no such argument.
        UnsupportedError: the row does not take it; `out=` none does.
    """
    if "out" in kwargs:
        if kwargs["out"] is not None:
            raise UnsupportedError(message(op, "no out=", "out=", hint="use the returned object"))
        kwargs = {name: a for name, a in kwargs.items() if name != "out"}
    plan = renaming(row, op, len(args), tuple(kwargs))
    if plan is not None:
        args = (*args, *[kwargs[name] for name in plan[0]])
        kwargs = {own: kwargs[name] for name, own in plan[1]}
    return getattr(ROWS, row)(*args, **kwargs)


@constant
def renaming(row: str, op: Op, count: int, names: tuple[str, ...]) -> Renaming | None:
    """How a row takes keywords behind `count` other arguments; None where it takes them as they are."""
    key = (row, op, count, names)
    if key not in KNOWN:
        KNOWN[key] = renamed(op, list(python_signature(IMPLS[row]).parameters.values()), count, names)
    return KNOWN[key]


def renamed(op: Op, own: list[inspect.Parameter], count: int, names: tuple[str, ...]) -> Renaming | None:
    """`renaming` for a rule with these parameters."""
    takes = {p.name for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any([p.kind is p.VAR_KEYWORD for p in own])
    if takes.issuperset(names):
        return None
    by_torch, form = form_for(op, count, names)
    order = [name for name, free in form if free]
    given = {by_torch[name]: name for name in names}
    positional: list[str] = []
    while (at := count + len(positional)) < len(order) and order[at] in given:
        p = own[min(at, len(own) - 1)]
        variable = p.kind is p.VAR_POSITIONAL and (not takes_any or p is own[0])
        if not variable and (p.kind not in FREE or (p.name != order[at] and order[at] in takes)):
            break
        positional.append(given[order[at]])
    named: list[tuple[str, str]] = []
    for theirs, name in given.items():
        at = order.index(theirs) if theirs in order else len(own)
        if name in positional:
            continue
        if theirs not in takes and at < len(own) and own[at].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            named.append((name, own[at].name))
        elif theirs in takes or name in takes or takes_any:
            named.append((name, theirs if theirs in takes or takes_any else name))
        else:
            raise UnsupportedError(message(op, "arguments that a batch takes", f"{name}=", hint=f"leave out {name}="))
    as_given = not positional and all([name == theirs for name, theirs in named])
    return None if as_given else (tuple(positional), tuple(named))


def form_for(op: Op, count: int, names: tuple[str, ...]) -> tuple[dict[str, str], Form]:
    """torch's own names of keywords, and the form of `op` that has them all; a DtypeError for a name that none has."""
    forms = forms_of(op)
    known = {name for form in forms for name, _ in form}
    theirs = {name: name if name in known or not known else NUMPY.get(name, name) for name in names}
    for form in forms:
        left = {name for name, _ in form[count:]}
        if left.issuperset(theirs.values()):
            return theirs, form
    for name in names:
        if known and theirs[name] not in known:
            hint = "arguments have the names that torch gives them"
            raise DtypeError(message(name_of(op), f"an argument of {name_of(op)}", f"{name}=", hint=hint))
    return theirs, ()


def forms_of(op: Op) -> tuple[Form, ...]:
    """The parameters of a function of torch, in each of its forms; none where torch does not tell."""
    return tuple([tuple([(name, free) for name, free, _ in form]) for form in typed_forms(op)])


def typed_forms(op: Op) -> list[tuple[tuple[str, bool, str], ...]]:
    """`forms_of`, with what torch writes for the type of each parameter; `... = ...` where it has a default."""
    try:
        found = list(inspect.signature(op).parameters.values())
        unknown = any([p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in found])
        return [] if unknown else [tuple([(p.name, p.kind in FREE, declared(p)) for p in found])]
    except (ValueError, TypeError):
        forms = schemas(own_name(op))
    if op in [getattr(torch.Tensor, own_name(f), None) for f in SELF_SECOND]:
        return [tuple(sorted(form, key=lambda p: p[0] != "input")) for form in forms]
    return forms


def declared(p: inspect.Parameter) -> str:
    """The annotation of a parameter, and whether it has a default."""
    said = "" if p.annotation is p.empty else str(p.annotation)
    return said if p.default is p.empty else f"{said} = ..."
