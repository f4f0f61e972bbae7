"""Joining and splitting by keys: several TensorDicts as one, several leaves as one, and one TensorDict as several.

    merge(a, b)                    the entries of both
    cat_keys(td, ["x", "y"], "xy") two leaves as one, along a feature dim
    partition(td, ["x"])           what is at some keys, and what is not
    ravel(td)                      all leaves as one tensor, and the way back

Leaves are also chosen by pattern, a `Select`:

    "encoder.*"                         each key that begins with `encoder.`, a glob on the key with dots
    ["*.bias", "norm*"]                 keys that match one of them
    lambda key, leaf: leaf.ndim == 2    leaves for which it is true; keys are str at the top, tuples below

Invariants:
  - leaves that are not joined are passed on as they are; all functions are traceable;
  - globs look at keys alone, so that in a graph they cost nothing for each leaf;
  - `merge(*partition(td, keys))` has the entries of `td`, and `unravel(ravel(td)) == td`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tdc.core.arguments import expect_number, keys_of, normal_dim
from tdc.core.container import Container
from tdc.core.dynamo import constant
from tdc.core.errors import (
    DtypeError,
    KeyPathError,
    ShapeError,
    StructureError,
    describe,
    message,
    refuse_wrong,
    show_sizes,
)
from tdc.core.keys import is_key, show
from tdc.core.typing import KeyPath, NestedKey, OpName
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.mapping import existing_path
from tdc.tensordict.nodes import Nodes, Static, statics
from tdc.tensordict.shared import Shared, like
from tdc.tensordict.storage import is_tensordict, same_size
from tdc.tensordict.tensordict import TensorDict, build_td

Layout = tuple[tuple[KeyPath, tuple[int, ...], torch.dtype], ...]


def merge(*tds: TensorDict, on_conflict: str | Callable[[Any, Any], Any] = "error") -> TensorDict:
    """The entries of several TensorDicts of one batch size in one. Inner nodes are merged key by key.

    Args:
        tds: at least one; the result has the device of the first.
        on_conflict: what to do with a key that several have: "error", "last" (take the last one), or a function of
            both leaves. One and the same tensor, or equal Static values, are no conflict.

    Raises:
        KeyPathError: keys that several have; all are named. With a function only a leaf that meets an inner node.
        ShapeError: different batch sizes.
        DtypeError: something else than TensorDicts, or another `on_conflict`.

    Example:
        >>> a, b = TensorDict({"x": torch.ones(2)}, [2]), TensorDict({"y": torch.ones(2)}, [2])
        >>> merge(a, b).keys()
        ('x', 'y')
        >>> merge(a, a + 1, b, on_conflict=torch.add)["x"]
        tensor([3., 3.])
    """
    if on_conflict not in ("error", "last") and not callable(on_conflict):
        hint = "on_conflict='last', or lambda a, b: a + b"
        raise DtypeError(message("merge", "'error', 'last' or a function", f"{on_conflict!r}", hint=hint))
    check_tensordicts("merge", tds)
    same_size("merge", *tds)
    out = tds[0]
    for td in tds[1:]:
        out = merge_two(out, td, on_conflict)
    return out


def cat_keys(td: TensorDict, keys: Iterable[NestedKey], out: NestedKey, dim: int = -1) -> TensorDict:
    """With one leaf at `out` in place of several, joined by `torch.cat`.

    Args:
        keys: a list; each a leaf. `out` may be one of them.
        dim: of the leaves, a feature dim.

    Raises:
        KeyPathError: a key that is not there, or no leaf.
        ShapeError: leaves that differ in another dim, or a batch dim.

    Example:
        >>> td = TensorDict({"pos": torch.zeros(3, 2), "vel": torch.ones(3, 1)}, [3])
        >>> cat_keys(td, ["pos", "vel"], "state")["state"][0]
        tensor([0., 0., 1.])
    """
    paths, leaves = named_leaves("cat_keys", td, keys)
    d = feature_dim("cat_keys", td, dim, leaves[0].ndim, "stack_keys makes one feature of leaves without features")
    check_alike("cat_keys", paths, leaves, d)
    return td.exclude(*paths).set(out, unwrap(torch.cat(leaves, d)))


def stack_keys(td: TensorDict, keys: Iterable[NestedKey], out: NestedKey, dim: int = -1) -> TensorDict:
    """With one leaf at `out` in place of several of one shape, joined by `torch.stack`.

    Args:
        keys: a list; each a leaf. `out` may be one of them.
        dim: the new dim of the leaf, behind the batch dims.

    Raises:
        KeyPathError: a key that is not there, or no leaf.
        ShapeError: leaves of different shapes, or a dim among the batch dims.

    Example:
        >>> td = TensorDict({"x": torch.zeros(3), "y": torch.ones(3)}, [3])
        >>> stack_keys(td, ["x", "y"], "xy")["xy"].shape
        torch.Size([3, 2])
    """
    paths, leaves = named_leaves("stack_keys", td, keys)
    d = feature_dim("stack_keys", td, dim, leaves[0].ndim + 1, "torch.stack(tds) adds a batch dim")
    check_alike("stack_keys", paths, leaves, None)
    return td.exclude(*paths).set(out, unwrap(torch.stack(leaves, d)))


def partition(td: TensorDict, where: NestedKey | Iterable[NestedKey] | Callable[[Any, Any], bool]) -> tuple[Any, Any]:
    """Split into the entries at some keys, and all others. `merge(*partition(td, where))` has all of it again.

    Args:
        where: a list of keys of leaves or inner nodes, one key (a str or a tuple of them), or a function of key and
            leaf. Static values and empty inner nodes, which a function does not see, are in the second.

    Raises:
        KeyPathError: a key that is not there, or something that is no key, list or function.

    Example:
        >>> td = TensorDict({"x": torch.ones(2), "id": torch.arange(2)}, [2])
        >>> [part.keys() for part in partition(td, lambda key, leaf: leaf.is_floating_point())]
        [('x',), ('id',)]
    """
    check_tensordicts("partition", [td])
    given: Any = where
    if callable(where):
        paths = [p for p, v in td._leaves.items() if where(p, unwrap(v))]
    else:
        hint = "tdc.partition(td, ['a', 'b']), or a function of key and leaf"
        keys = keys_of("partition", [given] if is_key(given) else given, "a list of keys or a function", hint)
        paths = [existing_path(td, "partition", key) for key in keys]
    return td.select(*paths), td.exclude(*paths)


def ravel(
    td: TensorDict, keep_batch: bool = True, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Callable[[Tensor], TensorDict]]:
    """All leaves as one tensor, and the function that takes such a tensor apart again.

    Shapes:
        leaves `(*batch_size, *features)` -> `(*batch_size, F)`, F the features of all leaves, in order; `(N,)` for all
        elements where `keep_batch` is False.

    Args:
        dtype: to convert all leaves to; `unravel` converts each back. Needed where leaves differ.

    Returns:
        The tensor, and `unravel(tensor) -> TensorDict`. With `keep_batch` that takes tensors of any batch size.

    Raises:
        DtypeError: leaves of different dtypes and no `dtype`, or leaves that are no tensors; all are named.
            A `dtype` that is none.
        ShapeError: by `unravel`, a tensor of another size.

    Compile:
        Traceable, both ways; differentiable.

    Example:
        >>> td = TensorDict({"a": torch.zeros(3, 2), "b": {"c": torch.ones(3)}}, [3])
        >>> flat, unravel = ravel(td)
        >>> flat.shape, unravel(flat * 2)["b", "c"]
        (torch.Size([3, 3]), tensor([2., 2., 2.]))

    Source:
        `jax.flatten_util.ravel_pytree`.
    """
    check_tensordicts("ravel", [td])
    given: Any = dtype
    if dtype is not None and not isinstance(given, torch.dtype):
        raise DtypeError(message("ravel", "a torch.dtype", f"{dtype!r}", hint="dtype=torch.float32"))
    wrong = {show(p): describe(x) for p, x in td._leaves.items() if not isinstance(x, Tensor)}
    hint = "tdc.partition(td, keys) first, or x.to_padded().data of ragged leaves"
    refuse_wrong(DtypeError, "ravel", "leaves that are all tensors", wrong, "others", hint)
    dtypes = {x.dtype for x in td._leaves.values()}
    if len(dtypes) > 1 and dtype is None:
        at, hint = {show(p): describe(x) for p, x in td._leaves.items()}, "dtype=torch.float32, or tdc.partition first"
        raise DtypeError(message("ravel", "leaves of one dtype", f"{len(dtypes)} dtypes", at, hint))
    k = len(td._size) if keep_batch else 0
    size = td.batch_size[:k]
    one_device("ravel", td._leaves)
    layout = tuple([(p, tuple(x.shape[k:]), x.dtype) for p, x in td._leaves.items()])
    parts = [x.reshape((*size, math.prod(x.shape[k:]))).to(dtype or x.dtype) for x in td._leaves.values()]
    flat = torch.cat(parts, -1) if parts else torch.zeros(*size, 0, dtype=dtype, device=td._device)
    rest = None if keep_batch else tuple(td.batch_size)
    return flat, partial(unravel, layout, td._nodes, k, rest, dtype is not None, td._device)


# -- leaves by pattern

Select: TypeAlias = "str | Sequence[str] | Callable[[Any, Any], bool]"
HINT = "'*.bias', ['*.bias', 'norm*'], or lambda key, leaf: leaf.ndim == 2"


def check_select(op: str, select: Any) -> None:
    """Refuse what chooses no leaves, with a DtypeError."""
    given: Any = select
    listed = isinstance(select, (tuple, list)) and len(given) > 0 and all([isinstance(x, str) for x in given])
    if not (isinstance(select, str) or listed or (callable(given) and not isinstance(given, type))):
        expected = "a pattern of keys, several, or a function of key and leaf"
        raise DtypeError(message(op, expected, describe(select), hint=HINT))


def chosen(leaves: Any, select: Select) -> list[bool]:
    """True for each leaf of a table that is chosen, in order."""
    if isinstance(select, str):
        return list(matched(list(leaves), (select,)))
    if callable(select):
        return [bool(select(p, unwrap(x))) for p, x in leaves.items()]
    return list(matched(list(leaves), tuple(select)))


@constant
def matched(paths: Sequence[KeyPath], patterns: Sequence[str]) -> tuple[bool, ...]:
    """True for each path that matches one of the patterns.

    Example:
        >>> matched(["a", ("a", "b"), "c"], ["a.*", "c"])
        (False, True, True)
    """
    return tuple([any([fnmatchcase(show(p), pattern) for pattern in patterns]) for p in paths])


def refuse_unused(op: str, leaves: Any, select: Select, flags: Sequence[bool]) -> None:
    """Refuse a selection that chooses nothing: most often a pattern with a slip."""
    if not any(flags):
        some = ", ".join([repr(show(p)) for p in list(leaves)[:5]]) or "none"
        got = f"none that {select!r} chooses" if not callable(select) else "none that the function chooses"
        raise KeyPathError(message(op, "at least one leaf", got, hint=f"keys are {some}"))


# -- helpers


def check_tensordicts(op: OpName, tds: Sequence[Any]) -> None:
    """Check that there is at least one operand, and that all are TensorDicts."""
    wrong = {f"operand {i}": type(td).__name__ for i, td in enumerate(tds) if not is_tensordict(td)}
    if wrong or not tds:
        got = f"{len(wrong)} others" if wrong else "none"
        listed = len(tds) == 1 and isinstance(tds[0], (list, tuple))
        hint = f"tdc.{op}(*tds)" if listed else "TensorDict(mapping, batch_size) makes one"
        raise DtypeError(message(op, "TensorDicts", got, wrong, hint))


def leaves_and_statics(td: TensorDict) -> dict[KeyPath, Any]:
    """Leaves and Static values by path."""
    return td._leaves | statics(td._nodes)


def merge_two(a: TensorDict, b: TensorDict, on_conflict: Any) -> TensorDict:
    """The entries of two TensorDicts."""
    here, there = leaves_and_statics(a), leaves_and_statics(b)
    both = [p for p in here if p in there and not is_same(here[p], there[p])]
    mixed = [p for p in here if p in b and p not in there] + [p for p in there if p in a and p not in here]
    static = [p for p in both if type(here[p]) is Static or type(there[p]) is Static]
    refused = [*both, *mixed] if on_conflict == "error" else [] if on_conflict == "last" else [*mixed, *static]
    if refused:
        at = {show(p): f"{described_at(a, p)} and {described_at(b, p)}" for p in refused}
        hint = "on_conflict='last', or a function of both leaves; a.exclude(key) first"
        raise KeyPathError(message("merge", "keys that only one has", f"{len(at)} that several have", at, hint))
    if on_conflict == "last":
        return a.exclude(*mixed, *static).update(b)
    fn: Any = on_conflict
    combined = {p: like(here[p], fn(unwrap(here[p]), unwrap(there[p]))) for p in both}
    return a.update(b).update(combined) if combined else a.update(b)


def is_same(x: Any, y: Any) -> bool:
    """True for the same tensor, or equal Static values."""
    return unwrap(x) is unwrap(y) or (type(x) is Static and x == y)


def described_at(td: TensorDict, path: KeyPath) -> str:
    """The entry at a path, for a message."""
    entry = leaves_and_statics(td).get(path)
    return "an inner node" if entry is None else repr(entry) if type(entry) is Static else describe(entry)


def named_leaves(op: OpName, td: TensorDict, keys: Any) -> tuple[list[KeyPath], list[Any]]:
    """Paths and leaves at some keys, as they are stored."""
    check_tensordicts(op, [td])
    paths = [existing_path(td, op, key) for key in keys_of(op, keys, hint=f"tdc.{op}(td, ['a', 'b'], 'out')")]
    wrong = {show(p): described_at(td, p) for p in paths if p not in td._leaves or type(td._leaves[p]) is Shared}
    if wrong or not paths:
        got = f"{len(wrong)} others" if wrong else "none"
        raise KeyPathError(message(op, "keys of leaves", got, wrong, "name leaves, e.g. ('node', 'leaf')"))
    return paths, [td._leaves[p] for p in paths]


def feature_dim(op: OpName, td: TensorDict, dim: int, ndim: int, hint: str) -> int:
    """A dim of leaves, behind the batch dims, as a non-negative number."""
    if is_key(dim):
        got, spelled = f"{dim!r}", f"keys in one list: tdc.{op}(td, ['a', 'b'], 'out', dim=-1)"
        raise DtypeError(message(op, "an int as dim", got, hint=spelled))
    expect_number(op, dim, whole=True)
    if ndim <= len(td._size):
        raise ShapeError(message(op, "leaves with features", "none beyond the batch", hint=hint))
    d = normal_dim(dim, ndim, op)
    if d < len(td._size):
        expected, got = f"a dim in [{len(td._size)}, {ndim - 1}], behind the batch dims", f"{dim}"
        raise ShapeError(message(op, expected, got, hint="dims are those of the leaf; torch.cat(tds) joins batch dims"))
    return d


def check_alike(op: OpName, paths: list[KeyPath], leaves: list[Any], but: int | None) -> None:
    """Check that leaves have the same kind and, but for one dim, the same shape."""
    shapes = [tuple([n for d, n in enumerate(x.shape) if d != but]) for x in leaves]
    kinds = [type(x) if isinstance(x, Container) else Tensor for x in leaves]
    wrong = [i for i in range(len(leaves)) if kinds[i] is not kinds[0] or shapes[i] != shapes[0]]
    wrong = [i for i in range(len(leaves)) if i in wrong or leaves[i].ndim != leaves[0].ndim]
    one_device(op, dict(zip(paths, leaves, strict=True)))
    if wrong:  # else a graph would take the sizes in the text for constants
        where = f" but for dim {but}" if but is not None else ""
        expected, at = f"leaves like {describe(leaves[0])}{where}", {show(paths[i]): describe(leaves[i]) for i in wrong}
        refuse_wrong(ShapeError, op, expected, at, "that differ", "reshape or convert them first")


def one_device(op: OpName, leaves: dict[KeyPath, Any]) -> None:
    """Check that leaves to be joined are on one device."""
    if len({x.device for x in leaves.values()}) > 1:
        at = {show(p): f"{describe(x)} on {x.device}" for p, x in leaves.items()}
        raise StructureError(message(op, "leaves on one device", "several devices", at, "td.to(device) first"))


def unravel(
    layout: Layout, nodes: Nodes, ndim: int, rest: tuple[int, ...] | None, cast: bool, device: Any, flat: Any
) -> TensorDict:
    """The TensorDict of a tensor that `ravel` made, or one like it.

    Args:
        layout: path, shape and dtype of each leaf.
        ndim: how many dims of the tensor are batch dims.
        rest: the batch size, where the shapes of the layout include it.
        cast: whether leaves get their dtypes back.
    """
    counts = [math.prod(shape) for _, shape, _ in layout]
    if not isinstance(flat, Tensor) or flat.ndim != ndim + 1 or flat.shape[-1] != sum(counts):
        expected = f"a tensor of shape {show_sizes([*['...'] * (ndim > 0), sum(counts)])} with {ndim + 1} dims"
        hint = "the tensor of tdc.ravel, or one of its shape"
        raise ShapeError(message("unravel", expected, describe(flat), hint=hint))
    size = flat.shape[:-1]
    parts = torch.split(flat, counts, -1) if counts else ()
    leaves: dict[KeyPath, Any] = {}
    for (path, shape, dtype), part in zip(layout, parts, strict=True):
        leaf = part.reshape((*size, *shape))
        leaves[path] = leaf.to(dtype) if cast else leaf
    return build_td(leaves, nodes, torch.Size(size if rest is None else rest), device)
