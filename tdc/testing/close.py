"""assert_close for containers and trees of them: all differences, each with its key path."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import describe, message, show_sizes
from tdc.core.keys import parts
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.two_level import TwoLevelTensor
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.nodes import statics
from tdc.tensordict.object_array import ObjectArray
from tdc.tensordict.paths import ordered
from tdc.tensordict.shared import Shared
from tdc.tensordict.tensordict import TensorDict

Found = Iterator[tuple[tuple[str, ...], str]]
Compare = Callable[[Any, Any], None]


def assert_close(
    actual: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None, equal_nan: bool = False,
    check_dtype: bool = True, check_device: bool = True,
) -> None:  # fmt: skip
    """Assert that two TensorDicts, ragged batches, tensors, or trees of these have one form and close values.

    Keys, batch sizes, Static values, classes, lengths, dtypes, devices and shapes must be equal. Padding and the order
    of keys are ignored.

    Args:
        rtol, atol, equal_nan, check_dtype, check_device: as of `torch.testing.assert_close`.

    Raises:
        AssertionError: all differences with their key paths.

    Compile:
        Eager: reads values.

    Example:
        >>> td = TensorDict({"x": torch.ones(3), "n": {"i": torch.arange(3)}}, [3])
        >>> assert_close(td.set("x", td["x"] + 1e-8), td)
        >>> try:
        ...     assert_close(td.set("x", torch.tensor([1.0, 1.0, 2.0])), td)
        ... except AssertionError as error:
        ...     print(error)
        tdc.testing.assert_close: expected one form and close values, got 1 difference
        at x: Mismatched elements: 1 / 3 (33.3%), Greatest absolute difference: 1.0 at index (2,)
        hint: rtol= and atol= say how close values are to be

    Source:
        `torch.testing.assert_close`.
    """
    compare = partial(
        torch.testing.assert_close, rtol=rtol, atol=atol, equal_nan=equal_nan, check_dtype=check_dtype,
        check_device=check_device,
    )  # fmt: skip
    found = list(mismatches(actual, expected, (), compare))
    if found:
        wrong = [f"{'.'.join(path) or 'the whole'}: {text}" for path, text in found]
        got = f"{len(found)} difference{'s' * (len(found) > 1)}"
        hint = "rtol= and atol= say how close values are to be"
        raise AssertionError(message("testing.assert_close", "one form and close values", got, wrong, hint))


def mismatches(a: Any, b: Any, path: tuple[str, ...], compare: Compare) -> Found:
    """All differences between two values, with key paths."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        yield from of_tensors(a, b, path, compare)
    elif isinstance(a, (TensorDict, NestedTensor, MaskedBatch)) and type(a) is type(b):
        by_kind: Any = of_keys if isinstance(a, TensorDict) else of_examples
        yield from by_kind(a, b, path, compare)
    elif isinstance(a, TwoLevelTensor) and isinstance(b, TwoLevelTensor):
        yield from of_tensors(a.offsets, b.offsets, (*path, "offsets"), compare)
        yield from mismatches(a.values, b.values, (*path, "values"), compare)
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        yield from of_entries(dict(a), dict(b), path, compare)
    elif isinstance(a, (list, tuple)) and type(a) is type(b):
        yield from of_entries(dict(enumerate(a)), dict(enumerate(b)), path, compare)
    elif isinstance(a, Number) and isinstance(b, Number):
        yield from of_tensors(a, b, path, compare)
    elif type(a) is not type(b):
        yield path, f"{describe(a)}, expected {describe(b)}"
    elif isinstance(a, ObjectArray):
        if a.shape != b.shape or not bool((a == b).all()):
            yield path, f"{describe(a)}, expected other objects"
    elif a != b:
        yield path, f"another {describe(a)}"


def of_tensors(a: Any, b: Any, path: tuple[str, ...], compare: Compare) -> Found:
    """Differences of tensors or numbers as torch reports them, without its first line."""
    if isinstance(a, Tensor) and a.shape != b.shape:
        yield path, f"{describe(a)}, expected {describe(b)}"
        return
    try:
        compare(a, b)
    except AssertionError as error:
        lines = [line.partition(" (up to")[0] for line in str(error).splitlines() if line.strip()]
        kept = [line for line in lines if line.startswith(("Mismatched", "Greatest absolute", "Absolute"))]
        yield path, ", ".join(kept or lines)


def of_keys(a: TensorDict, b: TensorDict, path: tuple[str, ...], compare: Compare) -> Found:
    """Differences of TensorDicts."""
    if a.batch_size != b.batch_size:
        yield path, f"batch_size {show_sizes(a.batch_size)}, expected {show_sizes(b.batch_size)}"
    here, there = statics(a._nodes), statics(b._nodes)
    for p in ordered({*a._leaves, *b._leaves, *here, *there}):
        name = (*path, *parts(p))
        if p in a._leaves and p in b._leaves:
            x, y = a._leaves[p], b._leaves[p]
            if (type(x) is Shared) != (type(y) is Shared):
                yield name, f"{describe(x)}, expected {describe(y)}"
            else:
                yield from mismatches(unwrap(x), unwrap(y), name, compare)
        elif here.get(p) is None and p not in a._leaves:
            yield name, "missing"
        elif there.get(p) is None and p not in b._leaves:
            yield name, "not expected"
        elif here.get(p) != there.get(p):
            yield name, f"{here.get(p, 'a leaf')}, expected {there.get(p, 'a leaf')}"
    for p in ordered({p for p in {**a._nodes, **b._nodes} if p != () and p not in here and p not in there}):
        if (p in a._nodes) != (p in b._nodes) and p not in a._leaves and p not in b._leaves:
            yield (*path, *parts(p)), "missing" if p in b._nodes else "not expected"
        elif p in a._nodes and p in b._nodes and type(a.get(p)) is not type(b.get(p)):
            yield (*path, *parts(p)), f"{type(a.get(p)).__name__}, expected {type(b.get(p)).__name__}"


def of_examples(a: Any, b: Any, path: tuple[str, ...], compare: Compare) -> Found:
    """Differences of ragged batches of one class: layout and lengths, else real elements."""
    if a.ragged_dims != b.ragged_dims or a._batch_dim != b._batch_dim or a.shape != b.shape:
        yield path, f"{laid_out(a)}, expected {laid_out(b)}"
        return
    here, there = (a.lengths, b.lengths) if isinstance(a, MaskedBatch) else (a.sizes, b.sizes)
    wrong = (here.cpu() != there.cpu()).any(1).nonzero().flatten().tolist()
    if wrong:
        yield path, f"other lengths in {len(wrong)} of {len(here)} examples, the first is example {wrong[0]}"
    elif isinstance(a, MaskedBatch):
        yield from of_tensors(a.filled(0), b.filled(0), path, compare)
    else:
        yield from of_tensors(a.values, b.values, path, compare)


def laid_out(x: Any) -> str:
    """Describe a ragged batch with its batch and ragged dims."""
    return f"{describe(x)} with batch dim {x._batch_dim} and ragged dims {show_sizes(x.ragged_dims)}"


def of_entries(a: dict[Any, Any], b: dict[Any, Any], path: tuple[str, ...], compare: Compare) -> Found:
    """Differences of dicts, lists and tuples."""
    for key in {**b, **a}:
        name = (*path, str(key))
        if key in a and key in b:
            yield from mismatches(a[key], b[key], name, compare)
        else:
            yield name, "not expected" if key in a else "missing"
