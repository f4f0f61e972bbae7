"""Python's operators in a block: on Python values as ever, on tensors for each example of a vmap."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tdc.autobatch.lists import builtin as builtin  # pieces of source reach these here
from tdc.autobatch.lists import cat as cat
from tdc.autobatch.lists import length as length
from tdc.autobatch.lists import stack as stack
from tdc.autobatch.lists import tensor as tensor
from tdc.autobatch.per_example.index import FULL, Span
from tdc.autobatch.per_example.table import refuse
from tdc.autobatch.ragged_example import RaggedExample, first_rows, looked_up, picked_way, put_rows
from tdc.autobatch.source import OP
from tdc.autobatch.values import NUMBER_ASKED, NUMBERS, differing, flatten
from tdc.compile.upstream import traced
from tdc.core.arguments import GAP, NEW_DIM
from tdc.core.dynamo import constant, is_batched
from tdc.core.errors import DtypeError, IndexingError, ShapeError, UnsupportedError, describe, message, show_sizes

VALUES: Any = (Tensor, RaggedExample)  # what an example has
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne", "is_", "is_not")},
    "in_": lambda a, b: contains(b, a),
    "not_in": lambda a, b: not_(contains(b, a)),
}
COLLECTIONS = (list, tuple, set, frozenset, dict, range)


def divided(fn: Any, *args: Any, **options: Any) -> Any:
    """Python's `divmod`, which tensors lack, or a function of the user by that name."""
    return (args[0] // args[1], args[0] % args[1]) if fn is builtins.divmod else fn(*args, **options)


def numbered(x: Any) -> Any:
    """The argument of `float` or the like; UnsupportedError for a tensor of each example."""
    if isinstance(x, Tensor) and is_batched(x):
        hint = "leave out float(...) and .item(): arithmetic and tests take tensors as they are"
        raise UnsupportedError(message(OP, *NUMBER_ASKED, hint=hint))
    return x


def text(fn: Any, *args: Any, **options: Any) -> Any:
    """Python's `str`, `repr`, `ascii`, `format` or `hash`, or a function of the user by that name."""
    python = fn is str or fn is repr or fn is ascii or fn is format or fn is hash
    return fn(*[written(x) for x in args] if python else args, **options)


def written(x: Any) -> Any:
    """A value that goes into a text; UnsupportedError where it differs between examples."""
    for part in flatten(x)[0]:
        if isinstance(part, RaggedExample) or (isinstance(part, Tensor) and is_batched(part)):
            hint = "return the value, and write it down outside"
            refuse("one of a value that differs between examples", hint, "texts of what all examples share")
    return x


def as_bool(fn: Any, *args: Any, **options: Any) -> Any:
    """Python's `bool`, of each example, or a function of the user by that name."""
    return truth(*args) if fn is bool and args else fn(*args, **options)


def rounded(fn: Any, *args: Any, **options: Any) -> Any:
    """Python's `round`, of a number of each example, or a function of the user by that name."""
    x = args[0] if args else None
    if fn is not round or options or not isinstance(x, Tensor) or x.ndim:
        return fn(*args, **options)
    if not x.is_floating_point():
        return x
    return torch.round(x, decimals=args[1]) if len(args) > 1 else torch.round(x).long()


def is_instance(fn: Any, *args: Any, **options: Any) -> Any:
    """Python's `isinstance`, to which a ragged example is a tensor, or a function of the user by that name."""
    ragged = fn is isinstance and len(args) == 2 and isinstance(args[0], RaggedExample)
    return issubclass(Tensor, args[1]) if ragged else fn(*args, **options)


def is_tensor(x: Any) -> bool:
    return isinstance(x, VALUES)


def contains(x: Any, item: Any) -> Any:
    """`item in x`; a bool of each example where tensors are compared."""
    if isinstance(x, Tensor):
        return (x == item).any()
    if type(x) in COLLECTIONS and any([isinstance(part, Tensor) for part in (item, *x)]):
        return builtin(any, [part is item or part == item for part in x])
    return item in x


def truth(x: Any) -> Any:
    """The truth of a value; of a tensor of one element as a 0-d bool."""
    return x.reshape(()).bool() if isinstance(x, Tensor) else bool(x)


def and_(first: Any, *rest: Callable[[], Any]) -> Any:
    """`first and rest()`."""
    return decided(True, first, *rest)


def or_(first: Any, *rest: Callable[[], Any]) -> Any:
    """`first or rest()`."""
    return decided(False, first, *rest)


def decided(by: bool, first: Any, *rest: Callable[[], Any]) -> Any:
    """`first and rest()` where `by` is True, else `first or rest()`. Comparisons meet by an operator."""
    for arm in rest:
        if not isinstance(first, Tensor):
            if by:
                if not first:
                    return first
            elif first:
                return first
            first = arm()
            continue
        second = arm()
        tests = isinstance(second, Tensor) and first.dtype is torch.bool and second.dtype is torch.bool
        if tests and first.ndim == 0 and second.ndim == 0:
            first = first & second if by else first | second
        else:
            first = joined(first, second, truth(first) if by else ~truth(first))
    return first


def joined(old: Any, new: Any, taken: Any) -> Any:
    """`new` where it is taken, else `old`; of tuples, lists and dicts part for part.

    Raises:
        UnsupportedError: they differ, and are neither tensors nor numbers.
    """
    kind = type(old)
    if kind is type(new) and kind in (tuple, list) and len(old) == len(new):
        return kind([joined(a, b, taken) for a, b in zip(old, new, strict=True)])
    if kind is dict and type(new) is dict and old.keys() == new.keys():
        return {key: joined(x, new[key], taken) for key, x in old.items()}
    if isinstance(old, RaggedExample) and isinstance(new, RaggedExample):
        return picked_way(taken, new, old)
    if isinstance(old, (Tensor, *NUMBERS)) and isinstance(new, (Tensor, *NUMBERS)):
        if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape != new.shape:
            got = f"{show_sizes(old.shape)} and {show_sizes(new.shape)}"
            raise ShapeError(message(OP, "values of one shape where a test chooses", got, hint=EXPANDED))
        return torch.where(taken, new, old)
    if kind is type(new) and kind in (str, type(None)) and old == new:
        return old
    hint = "a number for each, such as 0 and 1; torch.nan or -1 for None"
    refuse(differing([old, new]), hint, "tensors or numbers where a test that differs between examples chooses")


EXPANDED = "expand one to the shape of the other"


def update(old: Any, new: Any) -> Any:
    """The new value of `old += ...` or the like. A tensor keeps its shape and dtype; a 0-d one may be a Python number,
    which keeps neither.

    Raises:
        ShapeError, DtypeError: the new value has another shape, or a dtype that cannot be cast.
    """
    if not isinstance(old, VALUES) or not isinstance(new, VALUES) or old.ndim == 0:
        return new
    if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape != new.shape:
        got = f"{show_sizes(new.shape)} for {show_sizes(old.shape)}"
        raise ShapeError(message(OP, "the shape of x in x += y", got, hint=f"x = x + y, or {EXPANDED}"))
    if old.dtype == new.dtype:
        return new
    if not holds(str(old.dtype), str(new.dtype)):
        got = f"{new.dtype} for {old.dtype}"
        raise DtypeError(message(OP, "a dtype that x can hold in x += y", got, hint="x = x + y"))
    return new.to(old.dtype)


@constant
def holds(dtype: str, other: str) -> bool:
    """True if torch casts values of another dtype to this one."""
    to, of = [getattr(torch, name.removeprefix("torch.")) for name in (dtype, other)]
    return torch.can_cast(of, to)


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
    """`a @ b`. Dynamo cannot trace `@` of two examples, and swaps an example and a tensor (torch 2.13)."""
    return torch.matmul(a, b) if isinstance(a, VALUES) and isinstance(b, VALUES) else a @ b


def invert(x: Any) -> Any:
    """`~x`, which Dynamo traces of tensors and numbers only (torch 2.13)."""
    return torch.bitwise_not(x) if isinstance(x, VALUES) else ~x


def turned(x: Any, name: str) -> Any:
    """`x.T` or `x.mT`, by a method: Dynamo takes the attribute for another tensor in the memory of `x` (torch 2.13)."""
    return x.transpose(-2, -1) if isinstance(x, Tensor) and x.ndim == 2 else getattr(x, name)


def slice(start: Any, stop: Any, step: Any) -> Any:
    """A slice as an index; its ends may be numbers of each example."""
    if not any([isinstance(i, Tensor) and is_batched(i) for i in (start, stop, step)]):
        return builtins.slice(start, stop, step)
    if step is not None:
        refuse("a step in x[a:b:c] whose ends differ between examples", "x[a:b][::c]")
    return Span(start, stop)


def is_position(i: Any) -> bool:
    """True of a tensor that stands for one position; UnsupportedError for uint8, which torch takes for a mask."""
    if not isinstance(i, Tensor) or i.ndim or i.dtype is torch.bool:
        return False
    if i.dtype is torch.uint8:
        refuse("one of uint8, which torch takes for a mask", "x[i.long()]", "a position of another dtype")
    return not i.is_floating_point()


def get(x: Any, index: Any) -> Any:
    """`x[index]`, where 0-d tensors are positions as Python numbers are."""
    entries = index if isinstance(index, tuple) and not isinstance(index, Span) else (index,)
    if type(x) in (list, tuple) and is_position(index):
        return item_at(x, index)
    if isinstance(x, dict):
        same_key(index)
    if isinstance(x, Tensor):
        check_numbers(x, entries)
    if isinstance(x, Tensor) and isinstance(entries[0], (RaggedExample, Span)):
        found = looked_up(x, entries[0]) if isinstance(entries[0], RaggedExample) else first_rows(x, entries[0])
        return found[(FULL, *entries[1:])] if len(entries) > 1 else found
    if not isinstance(x, Tensor) or not any([is_position(i) for i in entries]):
        return x[index]
    rest: list[Any] = []
    dim = 0
    for i in after_ellipsis(entries, x.ndim):
        if is_position(i):
            x = x[(*[FULL] * dim, i.reshape(1))]
        rest.append(0 if is_position(i) else i)
        dim += 0 if isinstance(i, NEW_DIM) else i.ndim if isinstance(i, Tensor) and i.dtype == torch.bool else 1
    return x[tuple(rest)]


def check_numbers(x: Tensor, entries: tuple[Any, ...]) -> None:
    """Refuse a Python number beyond a dim: a graph may trace a round that no example runs, to which torch says no more
    than the number."""
    if len([i for i in entries if not isinstance(i, (GAP, NEW_DIM))]) > x.ndim:
        return
    dim = 0
    for i in after_ellipsis(entries, x.ndim):
        if isinstance(i, int) and not isinstance(i, bool) and not -x.shape[dim] <= i < x.shape[dim]:
            got = f"{i} at dim {dim} of {describe(x)}"
            hint = "a larger tensor; with lower='unroll' max_iters= of the longest loop: all of its rounds are traced"
            raise IndexingError(message(OP, "an index inside of a tensor", got, hint=hint))
        dim += 0 if isinstance(i, NEW_DIM) else i.ndim if isinstance(i, Tensor) and i.dtype == torch.bool else 1


def differs(i: Any) -> bool:
    """True of a position that may differ between examples."""
    return is_position(i) and (is_batched(i) or traced())


def same_key(key: Any) -> None:
    """Raise UnsupportedError for a key of a dict that is a tensor, or a number that differs between examples."""
    if isinstance(key, Tensor):
        refuse("a key of a dict that differs between examples", "a list or a tensor: x[i]", "keys that all share")


def item_at(x: Any, i: Any) -> Any:
    """`x[i]` of a list; where `i` differs between examples, items are tensors of one shape, or integers."""
    if not differs(i):
        return x[i]
    items = [torch.as_tensor(item) for item in x if isinstance(item, (Tensor, bool, int))]
    if not items or len(items) < len(x) or any([item.shape != items[0].shape for item in items]):
        got, hint = f"a {type(x).__name__} of others", "torch.tensor(x)[i] of floats; if i == 0: ... of anything"
        refuse(got, hint, "tensors of one shape in what a number indexes that differs between examples")
    return get(torch.stack(items), i)


def after_ellipsis(entries: tuple[Any, ...], ndim: int) -> list[Any]:
    """The entries of an index with `...` written out."""
    used = len([i for i in entries if not isinstance(i, (GAP, NEW_DIM))])
    at = next((k for k, i in enumerate(entries) if isinstance(i, GAP)), None)
    if at is None:
        return list(entries)
    return [*entries[:at], *[FULL] * (ndim - used), *entries[at + 1 :]]


def put(x: Any, index: Any, value: Any) -> Any:
    """The value of `x` after `x[index] = value`, out of place."""
    if isinstance(x, dict):
        same_key(index)
        return {**x, index: value}
    if isinstance(x, list) and differs(index):
        numbers = torch.arange(len(x), device=index.device)
        here = (numbers == numbers[index.reshape(1)]).unbind(0)
        return [joined(old, value, mine) for old, mine in zip(x, here, strict=True)]
    if isinstance(x, list):
        out: list[Any] = list(x)
        out[index] = value
        return out
    if isinstance(x, RaggedExample):
        return put_rows(x, index, value)
    if not isinstance(x, Tensor):
        x[index] = value  # raises an error of its own
        return x
    if isinstance(value, RaggedExample):
        refuse("a ragged one", "torch.where(mask, value, x)", "x[a:b] = value of a value that all rows can have")
    if isinstance(index, Span):
        return put_where(x, rows_in(index, x), value)
    entries = index if isinstance(index, tuple) else (index,)
    if any([isinstance(i, Span) for i in entries]):
        got, hint = "a span of its own for each example beside another entry", "torch.where(mask, value, x)"
        refuse(got, hint, "x[a:b] = value, or an index that all share")
    if len(entries) == 1 and is_mask(entries[0], x):
        return put_where(x, entries[0], value)
    check_numbers(x, entries)
    numbers = torch.arange(x.numel(), device=x.device)
    if x.ndim == len(entries) == 1 and is_position(entries[0]):  # the same, faster to trace
        taken = numbers == numbers[entries[0].reshape(1)]
    else:
        numbers = numbers.reshape(x.shape)
        taken = mask_of(numbers, entries)
    value = value.to(x.dtype) if isinstance(value, Tensor) else torch.as_tensor(value, dtype=x.dtype, device=x.device)
    if taken is not None:
        return torch.where(taken, fitting(value, ()), x)
    where = get(numbers, index)
    if where.numel() == 0:
        return x
    value = fitting(value, where.shape).expand(where.shape)
    own = torch.ones_like(
        value.flatten()[:1], dtype=torch.bool
    )  # torch's rule writes to the one tensor of all examples
    return torch.where(own, x.flatten(), x.flatten()).index_put((where.flatten(),), value.flatten()).reshape(x.shape)


def rows_in(span: Span, x: Tensor) -> Tensor:
    """A mask of the rows in a span, an end of which is a number of each example."""
    count = x.shape[0]
    at, mask = torch.arange(count, device=x.device), torch.ones(count, dtype=torch.bool, device=x.device)
    for end, begins in ((span.start, True), (span.stop, False)):
        if end is not None:
            own = torch.where(torch.as_tensor(end < 0), end + count, end)
            mask = mask & (at >= own if begins else at < own)
    return mask


def is_mask(i: Any, x: Tensor) -> bool:
    """True of a mask of the elements of `x`, or of its rows."""
    return isinstance(i, Tensor) and i.dtype == torch.bool and 0 < i.ndim <= x.ndim and i.shape == x.shape[: i.ndim]


def put_where(x: Tensor, mask: Tensor, value: Any) -> Tensor:
    """The value of `x` after `x[mask] = value`, for one value of all elements or rows."""
    value = value.to(x.dtype) if isinstance(value, Tensor) else torch.as_tensor(value, dtype=x.dtype, device=x.device)
    rest = x.shape[mask.ndim :]
    if value.ndim > len(rest):
        got, hint = "a value for each one that is taken", "torch.where(mask, values, x), with a value for each"
        refuse(got, hint, "one value in x[mask] = value")
    return torch.where(mask.reshape(*mask.shape, *[1] * len(rest)), fitting(value, rest), x)


def fitting(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A value for elements of some shape, without further leading dims of size 1; ShapeError if it does not fit."""
    extra = max(value.ndim - len(shape), 0)
    sizes = value.shape[extra:]
    own = [size for size, n in zip(reversed(sizes), reversed(shape), strict=False) if size not in (1, n)]
    if own or any([size != 1 for size in value.shape[:extra]]):
        got, expected = f"one of {show_sizes(value.shape)}", f"a value of shape {show_sizes(shape)} in x[...] = value"
        raise ShapeError(message(OP, expected, got, hint="x[i] = row, or x[i, j] = number"))
    return value.reshape(sizes)


def mask_of(numbers: Tensor, entries: tuple[Any, ...]) -> Tensor | None:
    """A mask of the element at a position in each dim; None for an index of several elements."""
    if len(entries) != numbers.ndim or not all([is_position(i) or type(i) is int for i in entries]):
        return None
    return numbers == get(numbers, tuple([torch.as_tensor(i, device=numbers.device) for i in entries]))
