"""What Python's operators mean in a block: as ever for Python values, for each example of a vmap for tensors."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.joins import builtin as builtin  # pieces of source reach these here
from tdc.autobatch.joins import cat as cat
from tdc.autobatch.joins import length as length
from tdc.autobatch.joins import stack as stack
from tdc.autobatch.per_example.index import FULL, Span
from tdc.autobatch.per_example.table import refuse
from tdc.autobatch.ragged_example import RaggedExample, first_rows, looked_up, picked_way, put_rows
from tdc.autobatch.values import NUMBERS, differing
from tdc.compile._torch.tracing import is_batched
from tdc.compile.upstream import traced

VALUES: Any = (Tensor, RaggedExample)  # what an example has
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne", "is_", "is_not")},
    "in_": lambda a, b: a in b,
    "not_in": lambda a, b: a not in b,
}


def divided(fn: Any, *args: Any) -> Any:
    """Python's `divmod`, which tensors lack, or a function of the user by that name."""
    return (args[0] // args[1], args[0] % args[1]) if fn is builtins.divmod else fn(*args)


def truth(x: Any) -> Any:
    """A tensor of one element as a 0-d bool; anything else as Python has it. A ragged example says so."""
    return x.reshape(()).bool() if isinstance(x, Tensor) else bool(x)


def and_(first: Any, *rest: Callable[[], Any]) -> Any:
    """`first and rest()`."""
    for arm in rest:
        if not isinstance(first, Tensor):
            if not first:
                return first
            first = arm()
        else:
            second = arm()
            first = first & second if are_tests(first, second) else joined(first, second, truth(first))
    return first


def or_(first: Any, *rest: Callable[[], Any]) -> Any:
    """`first or rest()`."""
    for arm in rest:
        if not isinstance(first, Tensor):
            if first:
                return first
            first = arm()
        else:
            second = arm()
            first = first | second if are_tests(first, second) else joined(first, second, ~truth(first))
    return first


def are_tests(a: Tensor, b: Any) -> bool:
    """Whether two values are 0-d bools, as comparisons give: then an operator does it."""
    return isinstance(b, Tensor) and a.dtype is torch.bool and b.dtype is torch.bool and a.ndim == 0 and b.ndim == 0


def joined(old: Any, new: Any, taken: Any) -> Any:
    """`new` where it is taken; of tuples, lists and dicts part for part.

    Raises:
        UnsupportedError: they differ, and are no tensors or numbers.
    """
    kind = type(old)
    if kind is type(new) and kind in (tuple, list) and len(old) == len(new):
        return kind([joined(a, b, taken) for a, b in zip(old, new, strict=True)])
    if kind is dict and type(new) is dict and old.keys() == new.keys():
        return {key: joined(x, new[key], taken) for key, x in old.items()}
    if isinstance(old, RaggedExample) and isinstance(new, RaggedExample):
        return picked_way(taken, new, old)
    if isinstance(old, (Tensor, *NUMBERS)) and isinstance(new, (Tensor, *NUMBERS)):
        return torch.where(taken, new, old)
    if kind is type(new) and kind in (str, type(None)) and old == new:
        return old
    hint = "a number for each, such as 0 and 1; torch.nan or -1 for None"
    refuse(differing([old, new]), hint, "tensors or numbers where a test that differs between examples chooses")


def not_(x: Any) -> Any:
    return ~truth(x) if isinstance(x, Tensor) else not x


def if_else(test: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
    """`yes() if test else no()`."""
    if not isinstance(test, Tensor):
        return yes() if test else no()
    a, b = yes(), no()
    return a if isinstance(a, Tensor) and a is b else joined(b, a, truth(test))


def chain(first: Any, *pairs: Any) -> Any:
    """`a < b <= c`, each operand evaluated once."""
    found: Any = True
    for name, later in zip(pairs[::2], pairs[1::2], strict=True):
        if not isinstance(found, VALUES) and not found:
            return found
        second = later()
        now = OPERATORS[name](first, second)
        found = now if found is True else found & now if isinstance(found, VALUES) else now
        first = second
    return found


def matmul(a: Any, b: Any) -> Any:
    """`a @ b`. Dynamo has no `@` of two objects that are no tensors, and turns round that of one and a tensor (torch
    2.13)."""
    values = isinstance(a, VALUES) and isinstance(b, VALUES)
    return torch.matmul(a, b) if values else a @ b


def invert(x: Any) -> Any:
    """`~x`, which Dynamo has of tensors and numbers only (torch 2.13)."""
    return torch.bitwise_not(x) if isinstance(x, VALUES) else ~x


def turned(x: Any, name: str) -> Any:
    """`x.T` or `x.mT`. Dynamo takes the attribute for a tensor beside `x`, and no operator takes both (torch 2.13)."""
    return x.transpose(-2, -1) if isinstance(x, Tensor) and x.ndim == 2 else getattr(x, name)


def slice(start: Any, stop: Any, step: Any) -> Any:
    """A slice as an index; its ends may be numbers of each example."""
    if not any([isinstance(i, Tensor) and is_batched(i) for i in (start, stop, step)]):
        return builtins.slice(start, stop, step)
    if step is not None:
        refuse("a step in x[a:b:c] whose ends differ between examples", "x[a:b][::c]")
    return Span(start, stop)


def is_position(i: Any) -> bool:
    """Whether an index is a tensor that stands for one position."""
    return isinstance(i, Tensor) and i.ndim == 0 and i.dtype != torch.bool and not i.is_floating_point()


def get(x: Any, index: Any) -> Any:
    """`x[index]`, where 0-d tensors are positions as Python numbers are."""
    entries = index if isinstance(index, tuple) and not isinstance(index, Span) else (index,)
    if type(x) in (list, tuple) and is_position(index):
        return item_at(x, index)
    if isinstance(x, Tensor) and isinstance(entries[0], RaggedExample):
        found = looked_up(x, entries[0])
        return found[(FULL, *entries[1:])] if entries[1:] else found
    if isinstance(x, Tensor) and isinstance(entries[0], Span):
        found = first_rows(x, entries[0])
        return found[(FULL, *entries[1:])] if entries[1:] else found
    if not isinstance(x, Tensor) or not any([is_position(i) for i in entries]):
        return x[index]
    rest: list[Any] = []
    dim = 0
    for i in after_ellipsis(entries, x.ndim):
        if is_position(i):
            x = x[(*[FULL] * dim, i.reshape(1))]
        rest.append(0 if is_position(i) else i)
        dim += 0 if i is None else i.ndim if isinstance(i, Tensor) and i.dtype == torch.bool else 1
    return x[tuple(rest)]


def item_at(x: Any, i: Any) -> Any:
    """`x[i]` of a list, at a position that may differ between examples: then the items are tensors of one shape, or
    whole numbers."""
    if not is_batched(i) and not traced():
        return x[i]
    items = [torch.as_tensor(item) for item in x if isinstance(item, (Tensor, bool, int))]
    if not items or len(items) < len(x) or any([item.shape != items[0].shape for item in items]):
        got, hint = f"a {type(x).__name__} of others", "torch.tensor(x)[i] of floats; if i == 0: ... of anything"
        refuse(got, hint, "tensors of one shape in what a number indexes that differs between examples")
    return get(torch.stack(items), i)


def after_ellipsis(entries: tuple[Any, ...], ndim: int) -> list[Any]:
    """The entries with `...` written out."""
    used = len([i for i in entries if i is not None and i is not Ellipsis])
    at = next((k for k, i in enumerate(entries) if i is Ellipsis), None)
    if at is None:
        return list(entries)
    return [*entries[:at], *[FULL] * (ndim - used), *entries[at + 1 :]]


def put(x: Any, index: Any, value: Any) -> Any:
    """What `x` is after `x[index] = value`; `x` itself stays as it was."""
    if isinstance(x, dict):
        return {**x, index: value}
    if isinstance(x, list):
        out: list[Any] = list(x)
        out[index] = value
        return out
    if isinstance(x, RaggedExample):
        return put_rows(x, index, value)
    if not isinstance(x, Tensor):
        x[index] = value  # what cannot be set says so itself
        return x
    entries = index if isinstance(index, tuple) else (index,)
    if len(entries) == 1 and is_mask(entries[0], x):
        return put_where(x, entries[0], value)
    numbers = torch.arange(x.numel(), device=x.device)
    if x.ndim == len(entries) == 1 and is_position(entries[0]):  # what is below, faster to trace
        taken = numbers == numbers[entries[0].reshape(1)]
    else:
        numbers = numbers.reshape(x.shape)
        taken = mask_of(numbers, entries)
    value = value.to(x.dtype) if isinstance(value, Tensor) else torch.as_tensor(value, dtype=x.dtype, device=x.device)
    if taken is not None:
        return torch.where(taken, value, x)
    where = get(numbers, index)
    if where.numel() == 0:
        return x
    value = value.expand(where.shape)
    own = torch.ones_like(
        value.flatten()[:1], dtype=torch.bool
    )  # torch's rule writes to the one tensor of all examples
    return torch.where(own, x.flatten(), x.flatten()).index_put((where.flatten(),), value.flatten()).reshape(x.shape)


def is_mask(i: Any, x: Tensor) -> bool:
    """Whether an index says of each element, or of each row, whether it is taken."""
    return isinstance(i, Tensor) and i.dtype == torch.bool and 0 < i.ndim <= x.ndim and i.shape == x.shape[: i.ndim]


def put_where(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    """What `x` is after `x[mask] = value`, for a value that each element or row can have; others say so themselves."""
    value = value.to(x.dtype) if isinstance(value, Tensor) else torch.as_tensor(value, dtype=x.dtype, device=x.device)
    rest = x.shape[mask.ndim :]
    if value.ndim > len(rest):
        got, hint = "a value for each one that is taken", "torch.where(mask, values, x), with a value for each"
        refuse(got, hint, "one value in x[mask] = value")
    return torch.where(mask.reshape(*mask.shape, *[1] * len(rest)), value, x)


def mask_of(numbers: Tensor, entries: tuple[Any, ...]) -> Tensor | None:
    """A mask of the element that positions name for all dims; None where an index takes several."""
    if len(entries) != numbers.ndim or not all([is_position(i) or type(i) is int for i in entries]):
        return None
    return numbers == get(numbers, tuple([torch.as_tensor(i, device=numbers.device) for i in entries]))
