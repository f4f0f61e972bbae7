"""Names the sizes that do not fit in a call that goes wrong: features of a layer, channels, classes.

    nn.Linear(5, 2)(x)    tdc.linear: expected 5 features, got 4 in NestedTensor float32[2, -1, 4]

Each operation may have a check, a function of its arguments that raises where they do not fit. A call that works never
asks: eagerly dispatch asks when torch has refused the call. A graph asks while it is traced, before torch sees the
call, since Dynamo catches no error of torch; a compiled call asks nothing.

Invariant: a check reads no data, unless torch has just refused it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

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
)
from tdc.core.kinds import refuse_kinds
from tdc.core.rules import ROWS, name_of
from tdc.core.typing import Op

Check = TypeVar("Check", bound=Callable[..., None])
CHECKS: dict[Op, Callable[..., None]] = {}
PLAIN: dict[type[Exception], type[TdcError]] = {  # subclasses are those of CUDA, vmap and export, which say more
    RuntimeError: CallError, TypeError: DtypeError, ValueError: ShapeError, IndexError: IndexingError,
    NotImplementedError: UnsupportedError,
}  # fmt: skip


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
