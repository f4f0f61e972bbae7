"""The rule table: what every operation does to every container.

A rule is one row: a torch function, the kind of container it is for, and a plain traceable function that says what
happens to the fields. `torch.relu(x)`, `x.relu()` and `relu` inside a stock `nn.Module` all reach the same row through
`__torch_function__`, which is written once, in `Container`. Nothing else dispatches.

Rows are data. From them come dispatch, the methods of the containers, the conformance matrix in `tests/`, and the
support table in the docs. A pair that cannot be served is a row as well: `unsupported(...)` says why and what to do.

Invariants:
  - one row for each (function, kind); a second one is an error at import;
  - a row's `ref` is the operation on one dense example, so that a loop over examples checks any rule;
  - there is no fallback: a function without a row raises `UnsupportedError`, it never loops over examples.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from tdc.core.dtypes import floating
from tdc.core.dynamo import constant
from tdc.core.errors import DtypeError, MethodError, UnsupportedError, describe, message, op_name
from tdc.core.frozen import Frozen
from tdc.core.typing import Op

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
        source: what defines the semantics (a torch function, a paper, an issue).
        reason: why there is no implementation; empty where there is one.
    """

    op: Op
    kind: str
    family: str
    impl: Op
    ref: Op
    identity: float | None = None
    modes: tuple[str, ...] = MODES
    source: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        return op_name(self.op)

    def __repr__(self) -> str:
        return f"Rule({self.name}, {self.kind})"


COLLECTS = gc.isenabled()
gc.disable()  # until `install_methods`: filling the table makes thousands of objects that stay, a full search is 60 ms

RULES: list[Rule] = []
DISPATCH: dict[str, dict[Op, str]] = {kind: {} for kind in KINDS}
ROWS = SimpleNamespace()  # an attribute for each row: of a dict Dynamo would wrap every entry to read one, in 15 ms
IMPLS: dict[str, Op] = vars(ROWS)


def add_rule(rule: Rule, aliases: Iterable[Op] = (), rows: list[Rule] = RULES, foreign: bool = False) -> Rule:
    """Put a row into the table, for its function, the Tensor method of the same name, and the given aliases.

    Args:
        rows: the list that it joins.
        foreign: the function is no function of torch, and a Tensor method of its name is another operation.
    """
    impl, table = floating(rule.op, rule.impl), DISPATCH[rule.kind]
    rule = rule if impl is rule.impl else replace(rule, impl=impl)
    if rule.op in table:
        raise ValueError(message("add_rule", "one rule for each function and kind", f"a second one for {rule}"))
    row = f"{rule.kind}_{rule.name}_{len(IMPLS)}".replace(".", "_")
    method: Any = None if foreign else getattr(torch.Tensor, rule.name, None)
    IMPLS[row] = rule.impl
    if rule.op in SELF_SECOND:
        IMPLS[row + "_method"] = self_second(rule.impl, SELF_SECOND[rule.op])
        table.setdefault(method, row + "_method")
    operator = TENSOR_OPERATORS.get(rule.op)
    for op in (rule.op, method, operator, *aliases):
        if op is not None:
            table.setdefault(op, row)
    if rule.op in TENSOR_REFLECTED:  # Dynamo traces `x - tensor` as `Tensor.__rsub__(tensor, x)` (torch 2.11-2.13)
        IMPLS[row + "_reflected"] = swapped(rule.impl)
        table.setdefault(TENSOR_REFLECTED[rule.op], row + "_reflected")
    rows.append(rule)
    return rule


def swapped(impl: Op) -> Op:
    """An implementation that takes its two operands the other way round."""

    def reflected(a: Any, b: Any) -> Any:
        return impl(b, a)

    return reflected


def self_second(impl: Op, first: str) -> Op:
    """An implementation as the method calls it, whose object is the second argument behind one named `first`."""

    def method(x: Any, *args: Any, **kwargs: Any) -> Any:
        if first in kwargs:
            args = (kwargs.pop(first), *args)
        return impl(*args[:1], x, *args[1:], **kwargs)

    return method


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


@constant
def row_of(op: Op, cls: Any, types: Sequence[type] = ()) -> str:
    """Name of the row that runs `op` for a container class, or for the outermost of several types.

    A constant of a compiled call, which looks its rule up by name: the call holds a guard on the rows it uses and
    none on the table, so that neither its cost nor the time to trace it grows with the number of rows.

    Raises:
        UnsupportedError: no row.
    """
    kind = (cls if len(types) < 2 else outermost(types))._kind
    row = DISPATCH[kind].get(op)
    if row is None:
        missing(op, kind)
    return row


@constant
def operator_row(op: Op, cls: Any, other: Any) -> str | None:
    """Name of the row of an operator between a container and an object of another type; None where that is refused."""
    if issubclass(other, Container):
        return row_of(op, other if other._rank > cls._rank else cls)
    foreign = hasattr(other, "dtype") and not hasattr(other, "__array__")
    if issubclass(other, (torch.Tensor, int, float, complex)) or foreign:
        return row_of(op, cls)
    return None


def missing(op: Op, kind: str) -> NoReturn:
    """Raise for a function without a row, naming the kinds that have one and the way there."""
    others = [k for k in KINDS if op in DISPATCH[k]]
    hint = CONVERSIONS[kind]
    if others:
        hint = f"{' and '.join(CLASS_NAMES[k] for k in others)} can; " + hint
    name = name_of(op)
    got = f"{name!r}, which has none"
    raise UnsupportedError(message(name, f"an operation with a rule for {CLASS_NAMES[kind]}", got, hint=hint))


def name_of(op: Op) -> str:
    """The name of an operation, of foreign ones, too, without their namespace; outside traced code."""
    known, found = op_name(op), getattr(op, "__name__", None) or getattr(op, "_name", None)
    return known if known != "operation" else str(found or "operation").rpartition("::")[2].partition(".")[0]


class Absent:
    """Stands in a container class for a Tensor method that it lacks, and raises the text its function would raise."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, x: Any, owner: Any = None) -> NoReturn:
        if self.name.endswith("_"):
            bare = self.name[:-1]
            known = hasattr(owner, bare)
            hint = f"x = x.{bare}(...), which returns a new one" if known else CONVERSIONS[owner._kind]
            raise MethodError(message(self.name, "no change in place", f"x.{self.name}", hint=hint))
        expected, got = f"an operation with a rule for {CLASS_NAMES[owner._kind]}", f"{self.name!r}, which has none"
        raise MethodError(message(self.name, expected, got, hint=CONVERSIONS[owner._kind]))


class Container(Frozen):
    """Base of the three containers: immutability, dispatch, operators. Has no fields of its own."""

    __slots__ = ()
    _kind: str = ""
    _rank: int = 0
    _content: Any = None  # the tensor that holds the elements, of a container that has one
    __array_ufunc__ = None  # `array + x` is for `x.__radd__`; numpy would go through x element by element

    @classmethod
    def __torch_function__(cls, func: Op, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        impl = getattr(ROWS, row_of(func, cls, types))
        return impl(*args, **kwargs) if kwargs else impl(*args)

    if TYPE_CHECKING:  # methods come from the rule table; at run time this would slow down every attribute

        def __getattr__(self, name: str) -> Any: ...

    def __dir__(self) -> list[str]:
        absent = {n for base in type(self).__mro__ for n, v in vars(base).items() if isinstance(v, Absent)}
        return [n for n in object.__dir__(self) if n not in absent]

    def __bool__(self) -> bool:
        name = type(self).__name__
        got, hint = f"the truth value of a {name}", "x.all() or x.any() for its elements, len(x) > 0 for its rows"
        raise DtypeError(message("bool", "one number", got, hint=hint))


def outermost(types: Iterable[type]) -> Any:
    """The container class that decides when several kinds meet: a TensorDict maps over what it holds."""
    best: Any = Container
    for t in types:
        if issubclass(t, Container) and t._rank > best._rank:
            best = t
    return best


def install_methods(classes: dict[str, type]) -> None:
    """Give each container a method for each row whose function is a Tensor method, too: one line that runs its rule.

    For every other Tensor method it gets an attribute that says what to do instead.
    """
    for rule in RULES:
        cls, name = classes[rule.kind], rule.name
        if name.isidentifier() and hasattr(torch.Tensor, name) and not hasattr(cls, name):
            op = getattr(torch.Tensor, name) if rule.op in SELF_SECOND else rule.op
            setattr(cls, name, as_method(op, name))
    for name in dir(torch.Tensor):
        absent = Absent(name)
        for cls in classes.values() if not name.startswith("_") else ():
            if not hasattr(cls, name):
                setattr(cls, name, absent)
    if COLLECTS:
        gc.enable()


def as_method(op: Op, name: str) -> Op:
    """A method that runs the row of `op`, not `op` itself: torch functions take no sizes one by one, methods do."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        cls = type(self)
        for a in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(a, Container) and a._rank > cls._rank:
                cls = type(a)
        return getattr(ROWS, row_of(op, cls))(self, *args, **kwargs)

    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"`torch.Tensor.{name}` of this batch."
    return method


def as_operator(op: Op, name: str, reflected: bool = False) -> Op:
    """An operator: `x - 2` runs the row of `op` on (x, 2), reflected `2 - x` on (2, x); Python refuses other types.

    What numpy has is a tensor here.
    """

    def method(self: Any, other: Any) -> Any:
        row = operator_row(op, type(self), type(other))
        if row is None:
            return method(self, dense(name, other)) if hasattr(other, "__array__") else NotImplemented
        run = getattr(ROWS, row)
        return run(other, self) if reflected else run(self, other)

    method.__name__ = method.__qualname__ = name
    return method


def dense(name: str, array: Any) -> torch.Tensor:
    """An operand that numpy made as a tensor.

    Raises:
        DtypeError: it holds no numbers.
    """
    try:
        return torch.as_tensor(array)
    except (TypeError, ValueError, RuntimeError):
        op = name.strip("_")
        raise DtypeError(message(op, "an array of numbers", describe(array), hint="torch.as_tensor(array)")) from None


CLASS_NAMES = {"tensordict": "TensorDict", "nested": "NestedTensor", "masked": "MaskedBatch"}
CONVERSIONS = {
    "tensordict": "apply it leaf by leaf with td.apply(fn)",
    "nested": "convert with x.to_padded(), or loop over x.unbind()",
    "masked": "convert with x.to_packed(), or use x.data and x.mask",
}
OPERATORS: dict[str, Op] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div, "floordiv": torch.floor_divide,
    "mod": torch.remainder, "pow": torch.pow, "matmul": torch.matmul, "and": torch.bitwise_and, "or": torch.bitwise_or,
    "xor": torch.bitwise_xor, "eq": torch.eq, "ne": torch.ne, "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge":
    torch.ge, "lshift": torch.bitwise_left_shift, "rshift": torch.bitwise_right_shift,
}  # fmt: skip
SELF_SECOND: dict[Op, str] = {torch.where: "condition", torch.polygamma: "n"}  # methods of what comes behind it
REFLECTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
UNARY_OPERATORS: dict[str, Op] = {
    "neg": torch.neg, "pos": torch.positive, "abs": torch.abs, "invert": torch.bitwise_not,
}  # fmt: skip
TENSOR_OPERATORS = {op: getattr(torch.Tensor, f"__{name}__") for name, op in (OPERATORS | UNARY_OPERATORS).items()}
SWAPPED = [name for name in REFLECTED if name not in ("add", "mul", "and", "or", "xor")]
TENSOR_REFLECTED: dict[Op, Op] = {
    OPERATORS[name]: getattr(torch.Tensor, f"__r{name}__") for name in (*SWAPPED, "lshift", "rshift")
}  # fmt: skip

for _name, _op in OPERATORS.items():
    setattr(Container, f"__{_name}__", as_operator(_op, f"__{_name}__"))
for _name, _op in UNARY_OPERATORS.items():
    setattr(Container, f"__{_name}__", as_method(_op, f"__{_name}__"))
for _name in REFLECTED:  # torch, too, computes 0.1 * x as x * 0.1: in half precision the other way rounds 0.1 first
    setattr(Container, f"__r{_name}__", as_operator(OPERATORS[_name], f"__r{_name}__", _name in SWAPPED))
Container.__hash__ = object.__hash__  # type: ignore[method-assign]  # == is elementwise, identity hashes, as for Tensor
