"""Names the argument that is wrong in a call that failed: of another kind, or of sizes that do not fit.

    F.max_pool1d(x, 2, padding="same")    tdc.max_pool1d: expected padding to be an int or ints, got str
    nn.Linear(5, 2)(x)                    tdc.linear: expected 5 features, got 4 in NestedTensor float32[2, -1, 4]

Eagerly dispatch asks here when torch has refused a call, so that a call that works costs nothing. A graph checks sizes
while it is traced, since Dynamo catches no error of torch.

Invariants: arguments that torch takes in any form of the operation are never refused; a check reads no data, unless
torch has just refused it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import as_device, refuse_absent
from tdc.core.dynamo import constant
from tdc.core.errors import (
    CallError,
    DtypeError,
    IndexingError,
    ShapeError,
    TdcError,
    UnsupportedError,
    describe,
    first_line,
    message,
    op_name,
)
from tdc.core.rules import ROWS, name_of
from tdc.core.signatures import typed_forms
from tdc.core.torch_functions import schemas
from tdc.core.typing import Op, OpName

Check = TypeVar("Check", bound=Callable[..., None])
CHECKS: dict[Op, Callable[..., None]] = {}
PLAIN: dict[type[Exception], type[TdcError]] = {  # subclasses are those of CUDA, vmap and export, which say more
    RuntimeError: CallError, TypeError: DtypeError, ValueError: ShapeError, IndexError: IndexingError,
    NotImplementedError: UnsupportedError,
}  # fmt: skip
Parameter = tuple[str, tuple[str, ...]]  # a name, and the kinds that it may have
ANNOTATED = r"<class 'int'>|\bint \|"  # may stand for several, as in F.normalize, and for a dtype, as in F.softmin
KINDS = {  # of arguments: the pattern in a schema or annotation, words for one, what to pass
    "tensor": (r"Tensor\b", "a tensor", "torch.as_tensor(x) makes one"),
    "tensors": (r"[Ll]ist\[.*Tensor", "a list of tensors", "[x, y]"),
    "int": (r"(^|[^\[])\bint\b|List\[int", "an int", "a Python int"),
    "ints": (rf"([Ll]ist|tuple)\[.*int\b|{ANNOTATED}", "ints", "a tuple of ints"),
    "float": (r"\bfloat\b", "a number", "a Python number"),
    "floats": (r"([Ll]ist|tuple)\[.*(float|number|complex)\b", "numbers", "a tuple of numbers"),
    "number": (r"\b(number|complex)\b", "a number", "a Python number"),
    "bool": (r"\bbool\b", "True or False", "True or False"),
    "str": (r"\bstr\b", "a string", "one of the strings that torch knows"),
    "dtype": (rf"ScalarType|\bdtype\b|{ANNOTATED}", "a dtype", "a dtype, e.g. torch.float32"),
    "none": (r"Optional|None\b", "None", ""),
    "unset": (r"List.* = ", "", ""),  # F.max_pool1d hands on stride=None, where its schema has []
}
OF_BATCHES: dict[Op, tuple[str, ...]] = {F.ctc_loss: ("input_lengths", "target_lengths")}  # None: batches know them
PLURAL = {"tensors", "ints", "floats"}


def refuse_kinds(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse the first argument of a call that is of no kind that torch takes there, with a DtypeError; also one that
    is missing or given twice, and a tensor of `torch.nested`."""
    for x in (*args, *kwargs.values()):
        found: Any = x
        if any([isinstance(t, Tensor) and t.is_nested for t in (found if isinstance(x, (list, tuple)) else [x])]):
            raise of_torch_nested(op) from None
    order, named, needed = parameters(op)
    more = len(args) - len(order) if order and PLURAL.intersection(order[-1][1]) else 0  # sizes or operands one by one
    for (name, kinds), x in zip((*order, *order[-1:] * more), args, strict=False):
        refuse_kind(op, name, kinds, x)
        if name in kwargs:
            raise DtypeError(message(op, f"one {name}", "two", hint=f"leave out {name}=")) from None
    for name, kinds in named:
        if name in kwargs:
            refuse_kind(op, name, kinds, kwargs[name])
    for name in needed[len(args) :]:
        if name not in kwargs:
            raise DtypeError(message(op, f"an argument {name}", "none", hint=f"{name}=...")) from None


def of_torch_nested(op: OpName) -> DtypeError:
    """The error for a tensor of `torch.nested` beside a batch of ours."""
    hint = "tdc.from_torch(y), or x.to_torch()"
    return DtypeError(message(op, "batches of one library", "a tensor of torch.nested", hint=hint))


def refuse_kind(op: Op, name: str, kinds: tuple[str, ...], x: Any) -> None:
    """Refuse an argument that is of none of these kinds."""
    if kinds and not any([fits(kind, x) for kind in kinds]):
        wanted = [KINDS[kind] for kind in kinds if KINDS[kind][2]]
        said = " or ".join([words for _, words, _ in wanted] + ["None"] * ("none" in kinds))
        raise DtypeError(message(op, f"{name} to be {said}", describe(x), hint=wanted[-1][2])) from None


def fits(kind: str, x: Any) -> bool:
    """True if an argument is of a kind; a tensor without dims is a number, and None among ints a size that stays."""
    if kind in ("none", "unset"):
        return x is None
    if kind in ("tensors", "ints", "floats"):
        given: Any = x
        return isinstance(x, (tuple, list)) and all([one is None or fits(kind[:-1], one) for one in given])
    if kind in ("bool", "str", "dtype"):
        return isinstance(x, {"bool": bool, "str": str, "dtype": torch.dtype}[kind])
    if kind == "tensor":
        return hasattr(x, "dtype") or hasattr(x, "_kind")
    if hasattr(x, "dtype"):
        return not x.ndim and not (kind == "int" and isinstance(x, Tensor) and x.is_floating_point())
    if kind == "int":
        return isinstance(x, int) and not isinstance(x, bool)
    return isinstance(x, (int, float, complex))


@constant
def parameters(op: Op) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...], tuple[str, ...]]:
    """Parameters of a function by position, all of them by name, and names of those without a default; none where torch
    does not tell."""
    forms = typed_forms(op)
    if not any([text.removesuffix(" = ...") for form in forms for _, _, text in form]):
        forms = schemas(op_name(op))
    free = [[p for p in form if p[1]] for form in forms]
    columns = [[form[i] for form in free if i < len(form)] for i in range(max(map(len, free), default=0))]
    names: dict[str, list[str]] = {}
    for name, _, text in [p for form in forms for p in form]:
        names.setdefault(name, []).append(text)
    order = tuple([(column[0][0], kinds_of([text for _, _, text in column])) for column in columns])
    least = min([len([p for p in form if not p[2].endswith("= ...")]) for form in free], default=0)
    needed = [column[0][0] for column in columns[:least] if len({name for name, _, _ in column}) == 1]
    by_name = [(name, kinds_of(texts)) for name, texts in names.items()]
    known = OF_BATCHES.get(op, ())
    first, named = [tuple([(n, (*kinds, *["none"] * (n in known))) for n, kinds in own]) for own in (order, by_name)]
    return first, named, tuple(needed)


def kinds_of(texts: list[str]) -> tuple[str, ...]:
    """The kinds that a parameter has in one form or another; none where one of them may be anything."""
    found = [[kind for kind, (pattern, _, _) in KINDS.items() if re.search(pattern, text)] for text in texts]
    if any([not kinds or kinds == ["none"] for kinds in found]):
        return ()
    return tuple(dict.fromkeys([kind for kinds in found for kind in kinds]))


def checks(*ops: Op) -> Callable[[Check], Check]:
    """Make a function the check of these operations; it takes the operation, then the arguments by torch's names."""

    def mark(check: Check) -> Check:
        for op in ops:
            CHECKS[op] = check
        return check

    return mark


def refuse_call(op: Op, spelled: Op, error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Name what is wrong with a call that torch refused: kinds of arguments, then sizes, else torch's own words.

    Args:
        spelled: the function or Tensor method that the user called, whose parameters the arguments are.
        error: that of torch.

    Raises:
        TdcError: unless the error has a class of its own.
    """
    refuse_kinds(spelled, args, kwargs)
    check = CHECKS.get(op)
    if check is not None:
        try:
            check(op, *args, **kwargs)
        except TdcError as wrong:
            raise wrong from None  # of torch's; a check is traced, too, where Dynamo (2.11) knows no `from`
    if isinstance(error, AssertionError) and kwargs.get("device") is not None:
        refuse_absent(spelled, as_device(spelled, kwargs["device"]))
    ours = PLAIN.get(type(error))
    if ours is not None:
        given = ", ".join([describe(x) for x in (*args, *kwargs.values())])
        text = message(name_of(op), "a call that torch takes", given, hint=f"torch: {first_line(error)}")
        raise ours(text) from error


def checked(op: Op, row: str) -> Op:
    """A row that asks first. It looks the other up in each trace, since a user may give it another function."""
    check = CHECKS[op]

    def run(*args: Any, **kwargs: Any) -> Any:
        check(op, *args, **kwargs)
        return getattr(ROWS, row)(*args, **kwargs)

    return run
