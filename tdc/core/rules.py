"""The rule table: what every operation does to every container.

A rule is one row: a torch function, the kind of container it is for, and a plain traceable function that says what
happens to the fields. `torch.relu(x)`, `x.relu()` and `relu` inside a stock `nn.Module` all run the same row; the
containers look it up in `core/container.py`.

An operation that takes dims writes its arguments once, by torch's names in torch's order:

    "input dim**=None keepdim dtype"     ** one dim or several; without one all elements
    "input k dim*=-1 largest sorted"     * one dim; without one the last
    "input dim* index+ src+"             a dim that must be given; + operands with the dims of the first

A TensorDict counts these dims among its batch dims, a batch of two levels among those of an inner example, and
`tdc.batch` among those of one example.

Rows are data. From them come dispatch, the methods of the containers, the conformance matrix in `tests/`, and the
support table in the docs. A pair that cannot be served is a row as well: `unsupported(...)` says why and what to do.

Invariants:
  - one row for each (function, kind); a second one is an error at import;
  - a row's `ref` is the operation on one dense example, so that a loop over examples checks any rule;
  - there is no fallback: a function without a row raises `UnsupportedError`, it never loops over examples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from tdc.core.dtypes import floating, under_autocast
from tdc.core.errors import UnsupportedError, message, op_name
from tdc.core.torch_functions import own_name
from tdc.core.typing import Op

NEEDED: Any = object()  # the default of a dim that must be given
MARKS = "*+"


@dataclass(frozen=True, slots=True)
class Dims:
    """The arguments of an operation, and which of them are dims.

    Attributes:
        names: all arguments; the first is the batch.
        defaults: each dim with its default: a number, None for all elements, or NEEDED.
        operands: the arguments that have the dims of the batch.
        several: True if torch takes a tuple of dims.
    """

    names: tuple[str, ...]
    defaults: tuple[tuple[str, Any], ...]
    operands: tuple[str, ...]
    several: bool

    @property
    def default(self) -> Any:
        """The default of the first dim."""
        return self.defaults[0][1]

    @property
    def position(self) -> int:
        """Position of the first dim behind the batch."""
        return self.names.index(self.defaults[0][0]) - 1


def read_dims(text: str) -> Dims:
    """The arguments that a row is written as."""
    names: list[str] = []
    operands: list[str] = []
    defaults: list[tuple[str, Any]] = []
    for word in text.split():
        marked, _, default = word.partition("=")
        names.append(marked.rstrip(MARKS))
        if "*" in marked:
            value = NEEDED if not default else None if default == "None" else int(default)
            defaults.append((names[-1], value))
        elif "+" in marked:
            operands.append(names[-1])
    return Dims(tuple(names), tuple(defaults), tuple(operands), "**" in text)


KINDS = ("tensordict", "nested", "masked")
MODES = ("eager", "compile", "vmap", "grad", "export")


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table.

    Attributes:
        op: the torch function users call.
        kind: "tensordict", "nested" or "masked".
        family: the file of `tdc/ops/` it belongs to.
        impl: what runs; takes the arguments of `op`.
        ref: the same operation on one dense example.
        identity: for reductions, the value that changes nothing and that padding is filled with.
        modes: the modes in which the matrix proves the row.
        reason: why the operation is refused; empty where it is implemented.
        syncs: the data that each call reads on the host, or copies to the GPU from pageable memory, although the sizes
            of the examples are known on the host; empty without such data. `docs/syncs.md` lists them.
        dims: its arguments, where dims are among them; the rows of other containers are derived from it.
        broadcasts: True if its tensors broadcast, example by example.
    """

    op: Op
    kind: str
    family: str
    impl: Op
    ref: Op
    identity: float | None = None
    modes: tuple[str, ...] = MODES
    reason: str = ""
    syncs: str = ""
    dims: Dims | None = None
    broadcasts: bool = False

    @property
    def name(self) -> str:
        return op_name(self.op)

    def __repr__(self) -> str:
        return f"Rule({self.name}, {self.kind})"


RULES: list[Rule] = []
METHOD, REFLECTED_ROW = "_method", "_reflected"  # how the names of an operation's further rows end
DISPATCH: dict[str, dict[Op, str]] = {kind: {} for kind in (*KINDS, "two_level")}
ROWS = SimpleNamespace()  # an attribute for each row: of a dict Dynamo would wrap every entry to read one, in 15 ms
IMPLS: dict[str, Op] = vars(ROWS)


def add_rule(rule: Rule, aliases: Iterable[Op] = (), rows: list[Rule] = RULES) -> Rule:
    """Put a row into the table, for its function, its Tensor method, and the given aliases.

    Args:
        rows: the list that the row joins.
    """
    impl, table = floating(rule.op, rule.impl), DISPATCH[rule.kind]
    impl = impl if rule.kind == "tensordict" else under_autocast(rule.op, impl)  # of leaves torch or a row
    rule = rule if impl is rule.impl else replace(rule, impl=impl)
    if rule.op in table:
        raise ValueError(message("add_rule", "one rule for each function and kind", f"a second one for {rule}"))
    row = f"{rule.kind}_{rule.name}_{len(IMPLS)}".replace(".", "_")
    IMPLS[row] = rule.impl
    if rule.op in SELF_SECOND:
        IMPLS[row + METHOD] = swapped(rule.impl)
        table.setdefault(getattr(torch.Tensor, rule.name), row + METHOD)
    operator = TENSOR_OPERATORS.get(rule.op)
    for op in (rule.op, method_of(rule.op), operator, *aliases):
        if op is not None:
            table.setdefault(op, row)
    if rule.op in TENSOR_REFLECTED:  # Dynamo traces `x - tensor` as `Tensor.__rsub__(tensor, x)` (torch 2.11-2.13)
        IMPLS[row + REFLECTED_ROW] = swapped(rule.impl)
        table.setdefault(TENSOR_REFLECTED[rule.op], row + REFLECTED_ROW)
    rows.append(rule)
    return rule


def method_of(op: Op) -> Op | None:
    """The Tensor method of an operation: that of its name where torch itself, not a module below it, has the function.

    `F.unfold` differs from `Tensor.unfold`, `torch.linalg.svd` from `Tensor.svd`.
    """
    name = op_name(op)
    method = getattr(torch.Tensor, name, None)
    return method if method is op or getattr(torch, name, None) is op else None


def define(
    op: Op, family: str, *, ragged: Op | None = None, nested: Op | None = None, masked: Op | None = None,
    tensordict: Op | None = None, ref: Op | None = None, dims: str = "", aliases: Iterable[Op] = (), **facts: Any,
) -> None:  # fmt: skip
    """Put the rows of an operation into the table, one for each kind that has an implementation.

    Args:
        ragged: the implementation for NestedTensor and MaskedBatch alike.
        dims: the arguments as above, of an operation that takes dims.
        facts: further fields of `Rule`.
    """
    takes = read_dims(dims) if dims else None
    for kind, impl in (("nested", nested or ragged), ("masked", masked or ragged), ("tensordict", tensordict)):
        if impl is not None:
            add_rule(Rule(op, kind, family, impl, ref or op, dims=takes, **facts), aliases)


def note_syncs(text: str, *ops: Op, kinds: Iterable[str] = KINDS) -> None:
    """State in the rows of operations what each call reads on the host, see `Rule.syncs`."""
    for n, rule in enumerate(RULES):
        if rule.op in ops and rule.kind in kinds and not rule.reason:
            RULES[n] = replace(rule, syncs=text)


def swapped(impl: Op) -> Op:
    """An implementation that takes its first two operands the other way round."""

    def run(x: Any, first: Any, *others: Any) -> Any:
        return impl(first, x, *others)

    return run


def unsupported(
    op: Op, kinds: Iterable[str], reason: str, *, family: str, hint: str, aliases: Iterable[Op] = ()
) -> None:
    """State that `op` has no meaning, or none yet, for `kinds`: calling it raises `UnsupportedError` with this text."""
    aliases = tuple(aliases)
    for kind in kinds:
        add_rule(Rule(op, kind, family, refuse(op, kind, reason, hint), op, modes=(), reason=reason), aliases)


def refuse(op: Op, kind: str, reason: str, hint: str) -> Op:
    """An implementation that always raises."""

    def impl(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(message(op, f"an operation with a rule for {CLASS_NAMES[kind]}", reason, hint=hint))

    return impl


def name_of(op: Op) -> str:
    """The name of an operation, of foreign ones, too, without their namespace; outside traced code."""
    known = op_name(op)
    return known if known != "operation" else (own_name(op) or known).rpartition("::")[2].partition(".")[0]


CLASS_NAMES = {
    "tensordict": "TensorDict", "nested": "NestedTensor", "masked": "MaskedBatch", "two_level": "TwoLevelTensor",
    "leaf": "a leaf",
}  # fmt: skip
CONVERSIONS = {
    "tensordict": "apply it leaf by leaf with td.apply(fn)",
    "nested": "convert with x.to_padded(), or loop over x.unbind()",
    "masked": "convert with x.to_packed(), or use x.data and x.mask",
    "two_level": "x.with_values(fn(x.values)), where dim 1 of x.values counts the elements of an inner example",
    "leaf": "x.value + 1, or td[key] of the TensorDict that holds it",
}
INSTEAD = {  # of functions that no kind of ragged batch has a rule for
    "_pack_padded_sequence": "nn.LSTM(..., batch_first=True) and the like take the batch itself",
    "copy_": "dense.copy_(packed.to_padded().filled(0)), or tdc.copy_(packed, src)",
    "__getitem__": "F.embedding(ids, table), or table[ids.values]",
    "__setitem__": "table[ids.values] = v.values; of padded batches x.to_packed().values",
}
CALLERS = {  # private functions: who in torch calls them, and what to say of that
    "_is_all_true": (
        "distributions", "parameters that are dense or numbers", "a ragged batch",
        "tdc.ops.distribution(Normal, x, 1.0), whose results are ragged as well",
    ),
    "_nested_tensor_from_mask_left_aligned": (
        "nn.TransformerEncoder", "whole rows", "src_key_padding_mask",
        "lengths are known, leave src_key_padding_mask out",
    ),
}  # fmt: skip
OPERATORS: dict[str, Op] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div, "floordiv": torch.floor_divide,
    "mod": torch.remainder, "pow": torch.pow, "matmul": torch.matmul, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge":
    torch.ge, "lshift": torch.bitwise_left_shift, "rshift": torch.bitwise_right_shift,
}  # fmt: skip
SELF_SECOND = (torch.where, torch.polygamma)  # methods of their second argument
REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
UNARY_OPERATORS: dict[str, Op] = {
    "neg": torch.neg, "pos": torch.positive, "abs": torch.abs, "invert": torch.bitwise_not,
}  # fmt: skip
TENSOR_OPERATORS = {op: getattr(torch.Tensor, f"__{name}__") for name, op in (OPERATORS | UNARY_OPERATORS).items()}
SWAPPED = [name for name in REFLECTED if name not in ("add", "mul", "and", "or", "xor")]
TENSOR_REFLECTED: dict[Op, Op] = {OPERATORS[name]: getattr(torch.Tensor, f"__r{name}__") for name in SWAPPED}
