"""The loop over examples, spelled out: for a function that has no rule, or works on one example only.

No operation falls back to it. It reads all sizes on the host and calls the function for each example; a graph holds
one copy of the function for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect_function
from tdc.core.container import Container
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message
from tdc.core.slow_paths import announce
from tdc.core.typing import Dims
from tdc.ragged.convert import to_padded
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.pack import pack
from tdc.tensordict.tensordict import TensorDict

OP = "unbatched"
NUMBERS = (bool, int, float, complex)


def unbatched(fn: Callable[..., Any], in_dims: Any = None, *, ragged_dims: Any = 1) -> Callable[..., Any]:
    """Return `fn` as a function of a batch: it runs on one example after another, and results are packed.

    Args:
        fn: takes one example of each batch; returns a tensor, a number, a TensorDict, or a tuple, list or dict of them.
        in_dims: one entry for each positional argument: the dim of its examples, or None for what all share. By default
            containers are taken apart along dim 0 and all else is shared, as keywords always are.
        ragged_dims: dims in which results may differ, the batch being dim 0: `1`, `(1, 2)`, or `()` for results of one
            shape, which are stacked. A list or dict of such for results that are lists, tuples, dicts or TensorDicts.

    Returns:
        A function. Ragged results are a NestedTensor, or a MaskedBatch where the first batch is one; others a Tensor.

    Raises:
        StructureError: batches of different numbers of examples, none at all, or results of different forms.
        ShapeError: results that differ in other dims; a TensorDict without exactly one batch dim.
        DtypeError: results that are no tensors; more entries of in_dims than arguments.

    Compile:
        Unrolled: one copy of `fn` for each example. `tdc.testing.forbid(loops=True)` finds it in tests.

    Example:
        >>> x = pack([torch.tensor([1., 2.]), torch.tensor([4.])])
        >>> unbatched(torch.fft.fft)(x).shape
        torch.Size([2, -1])
        >>> unbatched(torch.std, ragged_dims=())(pack([torch.tensor([1., 3.]), torch.tensor([4., 4.])]))
        tensor([1.4142, 0.0000])
    """
    expect_function(OP, fn)

    def looped(*args: Any, **kwargs: Any) -> Any:
        announce("loops", OP)
        dims = dims_of(args, in_dims)
        columns = [arg if dim is None else rows(arg, dim, i) for arg, dim, i in zip(args, dims, count(), strict=False)]
        mapped = [i for i, dim in enumerate(dims) if dim is not None]
        counts = {f"argument {i}": f"{len(columns[i])} examples" for i in mapped}
        if len(set(counts.values())) != 1:
            got = "none" if not counts else "batches of different sizes"
            hint = "pass a NestedTensor, MaskedBatch or TensorDict, or in_dims=0 for a tensor"
            raise StructureError(message(OP, "batches with as many examples as each other", got, counts, hint))
        calls = [[c[n] if i in mapped else c for i, c in enumerate(columns)] for n in range(len(columns[mapped[0]]))]
        results = [fn(*call, **kwargs) for call in calls]
        if not results:
            hint = "call fn only for batches with rows; their results tell dtypes and sizes"
            raise StructureError(message(OP, "at least one example", "a batch of no rows", hint=hint))
        return joined(results, ragged_dims, isinstance(args[mapped[0]], MaskedBatch), "result")

    return looped


def dims_of(args: tuple[Any, ...], in_dims: Any) -> list[int | None]:
    """For each argument the dim of its examples, or None."""
    if in_dims is None:
        return [0 if isinstance(a, Container) else None for a in args]
    given: list[int | None] = [in_dims] * len(args) if isinstance(in_dims, int) else list(in_dims)
    if len(given) != len(args):
        got, hint = f"{len(given)} for {len(args)}", "None for an argument that all examples share"
        raise DtypeError(message(OP, "one entry of in_dims for each positional argument", got, hint=hint))
    return given


def rows(x: Any, dim: int, i: int) -> Any:
    """The examples of one argument."""
    if isinstance(x, TensorDict):
        if x.ndim != 1 or dim not in (0, -1):
            got, hint = f"batch size {list(x.batch_size)}, dim {dim}", "td.flatten(), or td.with_batch_size([n])"
            raise ShapeError(message(OP, "a TensorDict with one batch dim", got, {f"argument {i}": describe(x)}, hint))
        return [x[n] for n in range(len(x))]
    if not isinstance(x, (Tensor, Container)):
        expected, hint = "a tensor or a container to take apart", "None in in_dims for what all examples share"
        raise DtypeError(message(OP, expected, type(x).__name__, {f"argument {i}": describe(x)}, hint))
    return x.unbind(dim)


def joined(results: list[Any], dims: Any, padded: bool, at: str) -> Any:
    """The results of all examples as one."""
    first = results[0]
    if isinstance(first, (TensorDict, Mapping)):
        paths = tuple(first.keys(True, True)) if isinstance(first, TensorDict) else tuple(first)
        same(results, [type(r) is type(first) and keys_of(r) == keys_of(first) for r in results], at)
        chosen = dims if isinstance(dims, Mapping) else dict.fromkeys(paths, dims)
        entries = {p: joined([r[p] for r in results], chosen.get(p, ()), padded, f"{at} {p!r}") for p in paths}
        return TensorDict(entries, (len(results),)) if isinstance(first, TensorDict) else entries
    if isinstance(first, (tuple, list)):
        same(results, [type(r) is type(first) and len(r) == len(first) for r in results], at)
        chosen = dims if isinstance(dims, list) else [dims] * len(first)
        if len(chosen) != len(first):
            got = f"{len(chosen)} for {len(first)}"
            expected = "one entry of ragged_dims for each result"
            raise StructureError(message(OP, expected, got, hint="() for equal sizes"))
        parts = [joined([r[k] for r in results], d, padded, f"{at} {k}") for k, d in enumerate(chosen)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return joined_tensors(results, dims, padded, at)


def joined_tensors(results: list[Any], dims: Dims, padded: bool, at: str) -> Any:
    """Tensors or numbers as one batch."""
    wrong = others(results, [isinstance(r, (Tensor, *NUMBERS)) for r in results], at)
    if wrong:
        hint = "return tensors, numbers, TensorDicts, or a tuple, list or dict of them"
        raise DtypeError(message(OP, "results that are tensors", f"{len(wrong)} that are not", wrong, hint))
    tensors = [torch.as_tensor(r) for r in results]
    if dims == ():
        unlike = others(tensors, [t.shape == tensors[0].shape for t in tensors], at)
        if unlike:
            expected, hint = f"results of one shape, {describe(tensors[0])}", "name the dims that differ, ragged_dims=1"
            raise ShapeError(message(OP, expected, f"{len(unlike)} others", unlike, hint))
        return torch.stack(tensors)
    if tensors[0].ndim == 0:
        expected, got = f"results with a dim {dims}, the batch being dim 0", f"numbers, {describe(tensors[0])}"
        raise ShapeError(message(OP, expected, got, hint="ragged_dims=() stacks results of one shape"))
    packed = pack(tensors, ragged_dim=dims)
    return to_padded(packed) if padded else packed


def keys_of(x: Any) -> list[Any]:
    """Keys of a result, in a common order."""
    return sorted(x.keys(True, True) if isinstance(x, TensorDict) else x, key=str)


def same(results: list[Any], alike: list[bool], at: str) -> None:
    """All results have the form of the first."""
    wrong = others(results, alike, at)
    if wrong:
        expected, hint = f"results of one form, {describe(results[0])}", "return the same keys, or as many, each time"
        raise StructureError(message(OP, expected, f"{len(wrong)} others", wrong, hint))


def others(results: list[Any], alike: list[bool], at: str) -> dict[str, str]:
    """The results that are not like the first, for a message."""
    return {f"{at} of example {i}": describe(r) for i, r in enumerate(results) if not alike[i]}

