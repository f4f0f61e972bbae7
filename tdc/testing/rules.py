"""check_rule: a rule against the loop over examples, in every mode that its row promises.

Arguments are drawn as NestedTensors; the other containers are made of them: a MaskedBatch whose padding is NaN, so that
a leak shows, or a TensorDict of two leaves of equal rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tdc.core import pytree
from tdc.core.container import Container
from tdc.core.errors import UnsupportedError, describe, message
from tdc.core.rules import CLASS_NAMES, DISPATCH, KINDS, MODES, RULES, Rule, name_of
from tdc.ops.extend import USER_RULES, spellings
from tdc.ragged.nested import NestedTensor
from tdc.testing.batches import Dict, Ragged, loop, unbuild
from tdc.testing.conformance import CHECKS, LENGTHS, Case, Lengths, is_input

OP = "testing.check_rule"


def check_rule(
    op: Callable[..., Any], make_args: Callable[[tuple[int, ...]], Any], *, kinds: str | Iterable[str] | None = None,
    modes: str | Iterable[str] | None = None, ref: Callable[..., Any] | None = None,
    lengths: tuple[tuple[int, ...], ...] = LENGTHS, backend: str = "aot_eager",
) -> None:  # fmt: skip
    """Prove the rule of an operation as the library proves its own.

    Args:
        op: the operation, called with containers.
        make_args: the arguments for rows of the given lengths, a tuple: NestedTensors with those lengths, and what all
            examples share (tensors, numbers). Called under a fixed seed.
        kinds: "nested", "masked", "tensordict"; every kind with a row by default.
        modes: some of "eager", "grad", "compile", "vmap", "export"; what the row promises by default.
        ref: the operation on one example, with the same arguments; that of the row by default. A dim counts one less
            there: `ref=lambda row, dim: op(row, dim - 1)`, or use negative dims.
        lengths: of the rows of each batch. The first batch serves vmap.
        backend: as of `torch.compile`.

    Raises:
        AssertionError: every difference, with kind, mode, lengths and example.
        UnsupportedError: no row for one of the kinds.

    Compile:
        Calls `torch.compiler.reset()` before it compiles or exports.

    Example:
        >>> from tdc import pack
        >>> check_rule(torch.tanh, lambda lengths: (pack([torch.randn(n, 2) for n in lengths]),), modes="eager")
    """
    given = [kinds] if isinstance(kinds, str) else [k for k in KINDS if op in DISPATCH[k]] if kinds is None else kinds
    found = {kind: rule_of(op, kind) for kind in given}
    for sizes in lengths:
        made_by(make_args, sizes, 0)
    wrong: list[str] = []
    for kind, rule in found.items():
        draw = partial(drawn, op, make_args, ref or rule.ref, kind)
        for mode in (modes,) if isinstance(modes, str) else rule.modes if modes is None else tuple(modes):
            if mode not in CHECKS:
                raise AssertionError(message(OP, f"modes among {', '.join(MODES)}", repr(mode), hint="modes='eager'"))
            try:
                lines = CHECKS[mode](draw, lengths, backend)
            except Exception as error:
                lines = [f"{type(error).__name__}: {error}"]
            wrong += [f"{kind}, {mode}: {line}" for line in lines]
    if wrong:
        results = f"the results of {name_of(op)!r} for each example"
        raise AssertionError(message(OP, results, f"{len(wrong)} differences", wrong, "see tdc.ops.implements"))


def rule_of(op: Any, kind: str) -> Rule:
    """The row that runs an operation."""
    names = {DISPATCH[kind].get(o) for o in spellings(op)} - {None}
    for rule in reversed([*RULES, *USER_RULES]):
        if rule.kind == kind and DISPATCH[kind].get(rule.op) in names:
            return rule
    got, hint = f"none for {name_of(op)!r}", f"@tdc.ops.implements(op, kinds={kind!r})"
    raise UnsupportedError(message(OP, f"a row for {CLASS_NAMES.get(kind, kind)}", got, hint=hint))


def drawn(op: Any, make_args: Any, ref: Any, kind: str, lengths: Lengths, seed: int, grad: bool) -> Case:
    """One call."""
    leaves: list[Tensor] = []
    args = taken_apart(made_by(make_args, lengths, seed), kind, leaves if grad else None)
    return Case(op, (args, {}), expected(ref, args), kind, leaves, f"lengths {lengths}", exact=False)


def made_by(make_args: Callable[[Lengths], Any], lengths: Lengths, seed: int) -> tuple[Any, ...]:
    """The arguments of one call, checked."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = make_args(lengths)
    args: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
    containers: list[Any] = [a for a in args if isinstance(a, Container)]
    if not containers or any(len(c) != len(lengths) for c in containers):
        got = ", ".join([describe(a) for a in args])
        hint = "lambda lengths: (tdc.pack([torch.randn(n, 4) for n in lengths]),)"
        raise AssertionError(message(OP, f"arguments with {len(lengths)} rows of a NestedTensor", got, hint=hint))
    return args


def taken_apart(args: tuple[Any, ...], kind: str, leaves: list[Tensor] | None) -> Any:
    """Arguments in terms of `Ragged` and `Dict`; their floating tensors are added to `leaves`, where it is a list."""
    shared: dict[int, Ragged] = {}

    def leaf(t: Tensor) -> Tensor:
        if leaves is None or not (t.is_floating_point() or t.is_complex()):
            return t
        leaves.append(t.detach().requires_grad_())
        return leaves[-1]

    def part(x: Any) -> Any:
        if isinstance(x, Ragged):
            return replace(x, rows=[leaf(t) for t in x.rows], kind="" if x.kind == "nested" else x.kind, slack=2)
        if isinstance(x, Dict):
            return Dict({key: part(y) for key, y in x.leaves.items()}, x.size)
        return leaf(x) if isinstance(x, Tensor) else x

    def one(x: Any) -> Any:
        if not isinstance(x, NestedTensor):
            return part(unbuild(x) if isinstance(x, Container) else x)
        if kind == "tensordict":
            data = leaf(x.to_padded().data)
            return Dict({"a": data, ("b", "c"): data.flip(0)}, (len(x),))
        y = replace(part(unbuild(x)), like=shared.get(id(x.structure)), extent=x.structure.extent is not None)
        return shared.setdefault(id(x.structure), y) if y.like is None else y

    return pytree.tree_map(one, args, is_leaf=is_input)


def expected(ref: Callable[..., Any], args: Any) -> Any:
    """The loop over examples, in any layout; for a TensorDict the loop of each of its leaves."""
    dicts = [x for x in pytree.tree_leaves(args) if isinstance(x, Dict)]
    if not dicts:
        return in_any_layout(loop(ref, args, {}))

    def leaf_of(x: Any, key: Any) -> Any:
        y = x.leaves[key] if isinstance(x, Dict) else x
        return Ragged(list(y.unbind())) if isinstance(x, Dict) and isinstance(y, Tensor) else y

    columns = {key: pytree.tree_map(lambda x, key=key: leaf_of(x, key), args) for key in dicts[0].leaves}
    return Dict({key: in_any_layout(loop(ref, column, {})) for key, column in columns.items()}, dicts[0].size)


def in_any_layout(results: list[Any]) -> Any:
    """Results of the examples as one batch, or as several where the operation has several results."""
    if isinstance(results[0], (tuple, list)):
        columns = [in_any_layout(list(column)) for column in zip(*results, strict=True)]
        return columns if type(results[0]) is list else tuple(columns)
    return Ragged([torch.as_tensor(r) for r in results], dims=None)
