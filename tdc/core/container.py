"""The base of the containers: dispatch to the rule table, operators, and the names that a container lacks.

    torch.relu(x)    `Container.__torch_function__`, which torch calls where an argument is a container
    x.relu()         a method that runs the row of `torch.relu`; `install_methods` makes one for each row
    x + y            an operator that runs the row of `torch.add`; it also refuses other types

All three look up the name of the row with `row_of` and run its entry in `ROWS`.

Invariants: where several kinds of container meet, the row of the kind with the highest rank runs; without a row there
is an error that says what to do instead, never a loop over examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NoReturn, overload

import torch

from tdc.core.arguments import normal_dim
from tdc.core.calls import CHECKS, checked, refuse_call
from tdc.core.dynamo import constant, trace_as, traced_for
from tdc.core.errors import (
    DtypeError,
    MethodError,
    StructureError,
    TdcError,
    UnsupportedError,
    describe,
    is_dict,
    message,
)
from tdc.core.frozen import Frozen, immutable
from tdc.core.rules import (
    CALLERS,
    CLASS_NAMES,
    CONVERSIONS,
    DISPATCH,
    IMPLS,
    INSTEAD,
    KINDS,
    OPERATORS,
    REFLECTED,
    ROWS,
    RULES,
    SELF_SECOND,
    SWAPPED,
    UNARY_OPERATORS,
    Rule,
    method_of,
    name_of,
)
from tdc.core.signatures import run_named
from tdc.core.slow_paths import BLOCKS, watched
from tdc.core.torch_functions import find_in_tuples, operate_on, when_read
from tdc.core.typing import Op


class Container(Frozen):
    """Base of the containers: dispatch, operators, and what all say of their shape. It has no fields of its own."""

    __slots__ = ()
    _kind: str = ""
    _rank: int = 0
    _content: Any = None  # the tensor that holds the elements, of a container that has one
    _picker: Any = None  # of a ragged batch: a function that indexes all batches of its structure
    _same_structure: Any = None  # of a ragged batch: whether another one shares its structure
    _with_structure_of: Any = None  # of a ragged batch: the same with the structure of an equal one
    __array_ufunc__ = None  # `array + x` is for `x.__radd__`; numpy would go through x element by element

    @classmethod
    def __torch_function__(cls, func: Op, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        row = row_of(func, cls, types)
        try:
            return run_named(row, func, args, kwargs) if kwargs else getattr(ROWS, row)(*args)
        except TdcError:
            raise
        except Exception as error:
            refuse_call(func, func, error, args, kwargs or {})
            if isinstance(error, AttributeError):
                refuse_dense(func, args)
            raise

    @property
    def _is_param(self) -> bool:
        """False; `nn.Parameter(x)` assigns it."""
        return False

    @_is_param.setter
    def _is_param(self, value: Any) -> NoReturn:
        hint = f"x.with_{'data' if self._kind == 'masked' else 'values'}(nn.Parameter(...)) of its tensor"
        raise DtypeError(message("Parameter", "a tensor", describe(self), hint=hint))

    if TYPE_CHECKING:  # what every container has of its own; operations are in the stubs beside the containers

        @property
        def shape(self) -> torch.Size: ...
        @property
        def ndim(self) -> int: ...
        def to(self, *args: Any, **kwargs: Any) -> Container: ...
        def unbind(self, dim: int = 0) -> tuple[Any, ...]: ...
        def movedim(self, source: Any, destination: Any) -> Container: ...

    @overload
    def size(self, dim: None = None) -> torch.Size: ...
    @overload
    def size(self, dim: int) -> int: ...
    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape, or its entry at `dim`: of a TensorDict the batch size, on a ragged dim a `RaggedSize`, -1."""
        shape = shape_of(self)
        return shape if dim is None else shape[normal_dim(dim, dims_of(self), "size")]

    def dim(self) -> int:
        """Number of dims, as `ndim`."""
        return dims_of(self)

    ndimension = dim

    def _repr_html_(self) -> str:
        """The text of a batch, for notebooks."""
        return f"<pre>{escape(repr(self))}</pre>"

    def __dir__(self) -> list[str]:
        absent = {n for base in type(self).__mro__ for n, v in vars(base).items() if isinstance(v, Absent)}
        return [n for n in object.__dir__(self) if n not in absent]

    def __float__(self) -> float:
        raise DtypeError(message("float", "one number", describe(self), hint="x.sum().item()"))

    def __int__(self) -> int:
        raise DtypeError(message("int", "one number", describe(self), hint="x.sum().item()"))

    def __round__(self, ndigits: int | None = None) -> NoReturn:
        raise DtypeError(message("round", "one number", describe(self), hint="x.round(decimals=0)"))

    def __divmod__(self, other: Any) -> NoReturn:
        raise DtypeError(message("divmod", "one number", describe(self), hint="x // y, x % y"))

    def __format__(self, spec: str) -> str:
        if spec == "":
            return str(self)
        raise DtypeError(message("format", "one number", describe(self), hint="f'{x.sum().item():.2f}'"))

    def __dlpack_device__(self) -> NoReturn:
        """Refuse what `torch.tensor`, `torch.as_tensor` and `from_dlpack` ask for; a container is no tensor."""
        expected, hint = "a tensor, an array or numbers", ONE_TENSOR[self._kind]
        raise DtypeError(message("tensor", expected, describe(self), hint=hint))

    def __dlpack__(self, **kwargs: Any) -> NoReturn:
        self.__dlpack_device__()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse what numpy asks for, which would make an array of objects of the examples."""
        raise DtypeError(message("asarray", "a tensor", describe(self), hint=ARRAYS[self._kind]))

    def __bool__(self) -> bool:
        name = type(self).__name__
        got, hint = f"the truth value of a {name}", "x.all() or x.any() for its elements, len(x) > 0 for its rows"
        raise DtypeError(message("bool", "one number", got, hint=hint))


ONE_TENSOR = {  # what a container has of a tensor
    "nested": "x.values, or x.to_padded().filled(0) with padding", "masked": "x.data, or x.filled(0)",
    "two_level": "x.values.values", "leaf": "x.value", "tensordict": "td['key'], or torch.stack of leaves of one shape",
}  # fmt: skip

OF_ROWS = "[row.numpy() for row in x.unbind()], or the numbers of x.to_padded().filled(0)"
ARRAYS = {  # what numpy takes of a container
    "nested": OF_ROWS, "masked": OF_ROWS, "two_level": OF_ROWS, "leaf": "x.value.numpy()",
    "tensordict": "td['key'].numpy(), or tdc.interop.to_struct_array(td), an array of records",
}  # fmt: skip


def shape_of(x: Any) -> Any:
    """The shape of a tensor or container; of a TensorDict its batch size, whatever its fields are called."""
    return x._size if is_dict(x) else x.shape


def dims_of(x: Any) -> int:
    """Number of dims of a tensor or container; of a TensorDict its batch dims, as `shape_of`."""
    return len(x._size) if is_dict(x) else x.ndim


def refuse_dense(op: Op, args: tuple[Any, ...]) -> None:
    """Refuse a dense first operand of an operation on batches."""
    batches = [x for x in args if isinstance(x, Container) and x._rank < 2]
    if batches and isinstance(args[0], torch.Tensor):
        like, got = batches[0], describe(args[0])
        packs = "tdc.nested_like(dense, x) of a padded tensor, x.with_values(dense) of a packed one"
        hint = {"nested": packs, "masked": "x.with_data(dense)"}[like._kind]
        raise StructureError(message(op, f"a {type(like).__name__} first", got, hint=hint)) from None


def row_of(op: Op, cls: Any, types: Sequence[type] = ()) -> str:
    """Name of the row that runs `op` for a container class, or the outermost of several types; else an
    UnsupportedError."""
    kind = (cls if len(types) < 2 else outermost(types))._kind
    row = DISPATCH[kind].get(op) if kind in DISPATCH else None  # a leaf has no rows
    if row is None:
        missing(op, kind)
    return watched(row, op) if BLOCKS else row


@traced_for(row_of)
@constant
def traced_row(op: Op, cls: Any, types: Sequence[type] = ()) -> str:
    """Replace `row_of` in graphs: the row checks sizes first, since Dynamo catches no error of torch.

    As a constant it leaves a guard on the row and none on the table, whose size thus costs nothing.
    """
    extend_dynamo()
    row = row_of(op, cls, types)
    if op not in CHECKS:
        return row
    name = f"{row}_checked"
    if name not in IMPLS:
        IMPLS[name] = checked(op, row)
    return name


def extend_dynamo() -> None:
    """Make the changes to Dynamo that containers need, once."""
    find_in_tuples()
    operate_on(Container)


when_read(extend_dynamo)


@constant
def operator_row(op: Op, cls: Any, other: Any) -> str | None:
    """Name of the row of an operator between a container and an object of another type; None where that is refused."""
    if issubclass(other, Container):
        return row_of(op, other if other._rank > cls._rank else cls)
    foreign = hasattr(other, "dtype") and not hasattr(other, "__array__")
    if issubclass(other, (torch.Tensor, int, float, complex, torch.SymInt, torch.SymFloat)) or foreign:
        return row_of(op, cls)
    return None


@traced_for(operator_row)
@constant
def traced_operator_row(op: Op, cls: Any, other: Any) -> str | None:
    extend_dynamo()
    return operator_row(op, cls, other)


def outermost(types: Iterable[type]) -> type[Container]:
    """The container class that decides when several kinds meet: a TensorDict maps over what it holds."""
    best = Container
    for t in types:
        if issubclass(t, Container) and t._rank > best._rank:
            best = t
    return best


def missing(op: Op, kind: str) -> NoReturn:
    """Raise for a function without a row, naming the kinds that have one and the way there."""
    others = [k for k in KINDS if op in DISPATCH[k]]
    name = name_of(op)
    if name in CALLERS and kind != "tensordict":
        caller, expected, got, hint = CALLERS[name]
        raise UnsupportedError(message(caller, expected, got, hint=hint))
    bare = name[:-1]
    hint = CONVERSIONS[kind]
    if others:
        hint = f"{' and '.join(CLASS_NAMES[k] for k in others)} can; " + hint
    elif kind != "tensordict" and name in INSTEAD:
        hint = INSTEAD[name]
    elif name.endswith("_") and hasattr(torch, bare):  # of a dense tensor: that of a batch is no function
        hint = f"torch.{bare}(...), which returns a new batch"
    got = f"{name!r}, which has none"
    raise UnsupportedError(message(name, f"an operation with a rule for {CLASS_NAMES[kind]}", got, hint=hint))


def as_method(op: Op, name: str) -> Op:
    """A method that runs the row of `op`, not `op` itself: torch functions take no sizes one by one, methods do."""

    def method(self: Container, *args: Any, **kwargs: Any) -> Any:
        cls = type(self)
        for a in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(a, Container) and a._rank > cls._rank:
                cls = type(a)
        row = row_of(op, cls)
        try:
            return run_named(row, spelled, (self, *args), kwargs) if kwargs else getattr(ROWS, row)(self, *args)
        except TdcError:
            raise
        except Exception as error:
            refuse_call(op, spelled, error, (self, *args), kwargs)
            raise

    spelled: Op = getattr(torch.Tensor, name, op)
    method.__name__ = method.__qualname__ = name
    method.__doc__ = f"`torch.Tensor.{name}` of this batch."
    return method


def as_operator(op: Op, name: str, reflected: bool = False) -> Op:
    """An operator: `x - 2` runs the row of `op` on (x, 2), reflected `2 - x` on (2, x); an array is a tensor here."""

    def method(self: Any, other: Any) -> Any:
        row = operator_row(op, type(self), type(other))
        if row is None:
            return method(self, converted(op, other)) if has_cure(name, other) else NotImplemented
        run = getattr(ROWS, row)
        try:
            return run(other, self) if reflected else run(self, other)
        except TdcError:
            raise
        except Exception as error:
            refuse_call(op, op, error, (other, self) if reflected else (self, other), {})
            raise

    method.__name__ = method.__qualname__ = name
    return method


def has_cure(name: str, other: Any) -> bool:
    """True of arrays, and of builtins that no operator takes; those are equal to no batch."""
    return hasattr(other, "__array__") or (type(other) in CURES and name not in ("__eq__", "__ne__"))


CURES: dict[type, str] = {
    dict: "tdc.as_tensordict(d), a TensorDict of the same keys", list: "torch.tensor(x)", tuple: "torch.tensor(x)",
    str: "a number, a tensor or a batch", type(None): "a number, a tensor or a batch",
}  # fmt: skip


def converted(op: Op, other: Any) -> torch.Tensor:
    """An operand that numpy made as a tensor; a DtypeError where it holds no numbers, and for another type."""
    if type(other) in CURES:
        expected = "a number, a tensor or a batch"
        raise DtypeError(message(op, expected, describe(other), hint=CURES[type(other)]))
    try:
        return torch.as_tensor(other)
    except (TypeError, ValueError, RuntimeError):
        raise DtypeError(message(op, "an array of numbers", describe(other), hint="torch.as_tensor(array)")) from None


LAYOUT = "for torch.masked, which counts by shape: x.sum(dim), or torch.where(mask, x, 0).sum(dim) and the like"


def error_of(text: str) -> AttributeError:
    """The error for a name that is not there."""
    return MethodError(text)


trace_as(error_of, lambda *args: AttributeError(*args))  # `hasattr` knows no other class in graphs (torch 2.11-2.13)


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
        hint = LAYOUT if self.name == "layout" and owner._kind != "tensordict" else CONVERSIONS[owner._kind]
        raise MethodError(message(self.name, expected, got, hint=hint))

    def __set__(self, x: Frozen, value: Any) -> NoReturn:
        raise immutable(x, f"`x.{self.name} = {type(value).__name__}`")


def install_methods(classes: dict[str, type], rules: Iterable[Rule] = RULES) -> None:
    """Give each container a method for each row whose function is a Tensor method, too, and for every other Tensor
    method an attribute that says what to do instead."""
    for rule in rules:
        cls, name, method = classes[rule.kind], rule.name, method_of(rule.op)
        if name.isidentifier() and method is not None and not hasattr(cls, name):
            setattr(cls, name, as_method(method if rule.op in SELF_SECOND else rule.op, name))
    for name in dir(torch.Tensor):
        absent = Absent(name)
        for cls in classes.values() if not name.startswith("_") else ():
            if not hasattr(cls, name):
                setattr(cls, name, absent)


for _name, _op in OPERATORS.items():
    setattr(Container, f"__{_name}__", as_operator(_op, f"__{_name}__"))
for _name, _op in UNARY_OPERATORS.items():
    setattr(Container, f"__{_name}__", as_method(_op, f"__{_name}__"))
for _name in REFLECTED:  # torch, too, computes 0.1 * x as x * 0.1: in half precision the other way rounds 0.1 first
    setattr(Container, f"__r{_name}__", as_operator(OPERATORS[_name], f"__r{_name}__", _name in SWAPPED))
