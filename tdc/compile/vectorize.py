"""vmap for functions of containers, with dims counted on the container.

    tdc.vmap(fn, in_dims=1)(x)                            x (B, K, -1, D): fn sees (B, -1, D), K times at once
    tdc.vmap(fn, out_dims=(1,))(td)                       the RFC's spelling of a single result
    tdc.vmap(fn, in_dims=({"a": 0, "b": None},))(td)      a dim for each key

    tdc.vmap(tdc.grad(loss), in_dims=(None, 0))(w, x)     x (B, -1, D): loss sees a row, (n, D); gradients by example

A NestedTensor or MaskedBatch is mapped over one of its static dims; its structure is shared. Rows differ in size: a
function of each row runs by `tdc.batch`, see `autobatch/by_row.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tdc.compile._torch.levels import current_level, level_of
from tdc.compile.any_size import AnySize
from tdc.compile.carries import is_container, put_back, tensors_in
from tdc.compile.gradients import is_whole
from tdc.core import pytree
from tdc.core.arguments import expect_at_least, expect_function, normal_dim
from tdc.core.dynamo import is_batched
from tdc.core.errors import (
    CallError,
    DtypeError,
    ShapeError,
    StructureError,
    TdcError,
    UnsupportedError,
    describe,
    first_line,
    in_words,
    message,
    refuse_wrong,
)
from tdc.core.keys import as_path, missing_key
from tdc.core.typing import MISSING
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import axis_of, data_of, is_ragged, with_static
from tdc.ragged.two_level import TwoLevelTensor
from tdc.tensordict.paths import ancestors, ordered
from tdc.tensordict.shared import Shared, like
from tdc.tensordict.tensordict import TensorDict


def vmap(
    fn: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error", *,
    chunk_size: int | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Map a function over a dim of its arguments, all at once.

    Over the batch dim of ragged rows it sees a row, and runs as `tdc.batch(fn)` does. There it may be `tdc.grad(loss)`
    or `tdc.value_and_grad(loss)`: gradients by example, of shared parameters, too.

    Args:
        in_dims: one for all arguments, or a tuple with one for each: an int, None, a pytree of these, or for a
            TensorDict a mapping or TensorDict of keys to them (other keys are not mapped).
        out_dims: one for all results, or a tuple with one for each.
        randomness, chunk_size: as in `torch.vmap`.

    Returns:
        A function of the same arguments. A result that is None stays None.

    Raises:
        ShapeError: a ragged or missing dim, or mapped dims of different sizes.
        DtypeError: an argument or a result that is neither a tensor nor a container; a result may be None.
        UnsupportedError, CallError: a function with `if` on tensors, `.item()` or random numbers; what torch refused.

    Compile:
        fullgraph; nests with itself and with `grad`.

    Example:
        >>> td = TensorDict({"a": torch.zeros(3, 4, 5)}, [3, 4])
        >>> add = vmap(lambda td, one: td.set("a", td["a"] + one), in_dims=(0, None), out_dims=(1,))
        >>> add(td, torch.ones(4, 5)).shape
        torch.Size([4, 3])

    Source:
        `torch.vmap`; RFC torch.dict.TensorDict, "Functorch compatibility".
    """
    expect_function("vmap", fn)
    check_options("vmap", randomness, chunk_size)

    def mapped(*args: Any, **kwargs: Any) -> Any:
        given = one_for_each("vmap", in_dims, args)
        if any([is_rows(x, d) for x, d in zip((*args, *kwargs.values()), (*given, *[0] * len(kwargs)), strict=True)]):
            return over_rows(fn, given, out_dims, chunk_size, args, kwargs)
        flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=is_ragged)
        dims = [d for arg, dim in zip((*args, kwargs), (*given, 0), strict=True) for d in dims_of(arg, dim)]
        pairs = [for_torch(x, d) for x, d in zip(flat, dims, strict=True)]
        check_mapped(flat, dims)
        at, held = first(out_dims), flat[:0]  # its Shared tensors, as yet none
        form: list[Any] = []

        def inner(*parts: Any) -> Any:
            positional, named = pytree.tree_unflatten(list(parts), spec)
            with AnySize() if torch.compiler.is_compiling() else nullcontext():
                out = shared_in(fn(*positional, **named), held)
            return out if at != 0 else mapped_tensors(out, form)  # what is not mapped may be anything

        run = torch.vmap(inner, tuple([d for _, d in pairs]), at, randomness, chunk_size=chunk_size)
        out = in_words(refused, run, *[x for x, _ in pairs])
        return with_shared(results_at(put_back(out, form) if at == 0 else out, out_dims), held)

    return mapped


BY_ROW: list[Callable[..., Any]] = []  # what maps over ragged rows, in a room above


def is_rows(x: Any, dim: Any) -> bool:
    """True for an argument that is mapped over the batch dim of ragged rows."""
    if not isinstance(dim, int):
        return False
    if isinstance(x, TensorDict):
        return dim in (0, -len(x._size)) and any([is_ragged(leaf) for leaf in pytree.tree_leaves(x, is_leaf=is_ragged)])
    return is_ragged(x) and dim in (x._batch_dim, x._batch_dim - x.ndim)


def over_rows(fn: Any, in_dims: Any, out_dims: Any, chunk_size: int | None, args: Any, kwargs: Any) -> Any:
    """Map over the rows of ragged batches."""
    if chunk_size is not None:
        hint = "x[i : i + n] of some rows at a time"
        raise UnsupportedError(message("vmap", "all ragged rows at once", f"chunk_size={chunk_size}", hint=hint))
    return BY_ROW[0](fn, in_dims, out_dims, args, kwargs)


def one_for_each(op: str, in_dims: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Entry of in_dims for each argument; refuse another number of them."""
    given = tuple(in_dims) if isinstance(in_dims, (tuple, list)) else (in_dims,) * len(args)
    if len(given) != len(args):
        got, hint = f"{len(given)} for {len(args)} arguments", "None for an argument that is not mapped"
        raise ShapeError(message(op, "one entry of in_dims for each argument", got, hint=hint))
    return given


def mapped_tensors(out: Any, form: list[Any]) -> list[Tensor]:
    """Tensors of results; refuse results that are neither tensors, nor containers, nor None."""
    tensors = tensors_in(out, form)
    others = [x for x in form[0] if x is not None and x is not MISSING]
    if others:
        hint = "return a tensor, torch.as_tensor(x), or None"
        raise DtypeError(message("vmap", "tensors as results", describe(others[0]), hint=hint))
    return tensors


def shared_in(out: Any, held: list[Any]) -> Any:
    """A result; its Shared tensors go to `held`. One that differs between the examples is refused."""
    tds = [x for x in pytree.tree_leaves(out, is_leaf=is_container) if isinstance(x, TensorDict)]
    held[:] = [x.value for td in tds for p in ordered(td._leaves) for x in [td._leaves[p]] if type(x) is Shared]
    wrong = [describe(Shared(x)) for x in held if is_mapped(x)]
    hint = "td.set(key, tensor), without Shared, for one of each example"
    refuse_wrong(StructureError, "vmap", "Shared results that all examples share", wrong, "that differ", hint)
    return out


def is_mapped(x: Tensor) -> bool:
    """True if a tensor differs between the examples of the innermost vmap; in a graph of any, since Dynamo knows no
    levels of tensors."""
    return is_batched(x) if torch.compiler.is_dynamo_compiling() else level_of(x) == current_level()


def with_shared(out: Any, held: list[Any]) -> Any:
    """A result with the Shared tensors that it had before torch gave each example one."""
    values = iter(held)

    def put(x: Any) -> Any:
        if not isinstance(x, TensorDict):
            return x
        shared = [p for p in ordered(x._leaves) if type(x._leaves[p]) is Shared]
        return x._with({**x._leaves, **{p: like(x._leaves[p], next(values)) for p in shared}}, x._nodes)

    return pytree.tree_map(put, out, is_leaf=is_container) if len(held) else out


def first(out_dims: Any) -> Any:
    """out_dims for `torch.vmap`: 0, and None where None is asked for."""
    if not isinstance(out_dims, (tuple, list)):
        return None if out_dims is None else 0
    return tuple([first(d) for d in out_dims]) if None in out_dims else 0


def dims_of(arg: Any, dim: Any) -> list[Any]:
    """One dim for each leaf of an argument."""
    if isinstance(arg, TensorDict):
        return dims_in(arg, dim)
    if isinstance(arg, (list, tuple)) and isinstance(dim, (list, tuple)) and len(arg) == len(dim):
        return [d for x, one in zip(arg, dim, strict=True) for d in dims_of(x, one)]
    if isinstance(arg, dict) and isinstance(dim, dict) and arg.keys() == dim.keys():
        return [d for key, x in arg.items() for d in dims_of(x, dim[key])]
    if dim is None or isinstance(dim, int):
        wholes = pytree.tree_leaves(arg, is_leaf=is_container)
        return [d for x in wholes for d in (dims_in(x, dim) if isinstance(x, TensorDict) else [dim])]
    found = pytree.broadcast_to_and_flatten(dim, pytree.tree_structure(arg, is_leaf=is_ragged), is_leaf=is_ragged)
    if found is None:
        got, hint = f"{dim!r} for {describe(arg)}", "an int, None, or a tree of these in the form of the argument"
        raise ShapeError(message("vmap", "in_dims in the form of the arguments", got, hint=hint))
    return found


def dims_in(td: TensorDict, dim: Any) -> list[Any]:
    """One dim for each leaf of a TensorDict, in the order of its pytree."""
    paths = ordered(td._leaves)
    if isinstance(dim, TensorDict):  # its dims are tensors
        named: dict[Any, Any] = {p: int(d) for p, d in dim._leaves.items()}
    elif isinstance(dim, Mapping):
        named = {as_path(key, "vmap"): d for key, d in dim.items()}
    else:
        d = dim if dim is None else normal_dim(dim, len(td._size), "vmap")
        return [None if type(td._leaves[p]) is Shared else d for p in paths]
    for path in named:
        if path not in td._leaves and path not in td._nodes:
            raise missing_key("vmap", path, [*td._leaves, *td._nodes])
    return [next((named[q] for q in (p, *reversed(ancestors(p))) if q in named), None) for p in paths]


def for_torch(x: Any, dim: int | None) -> tuple[Any, Any]:
    """Argument for `torch.vmap`, and its in_dims: of a ragged batch the mapped dim is last, its structure shared."""
    if dim is None:
        return x, dim
    if isinstance(x, Tensor):
        return x, normal_dim(dim, x.ndim, "vmap")
    if not isinstance(x, (NestedTensor, MaskedBatch)):
        hint = "None in in_dims for an argument that is not mapped"
        raise DtypeError(message("vmap", "tensors and containers to map", describe(x), hint=hint))
    d = normal_dim(dim, x.ndim, "vmap")
    ragged = x.ragged_dims
    if d in ragged or d == x._batch_dim:
        kind = "ragged" if d in ragged else "the batch of ragged rows"
        got, hint = f"dim {dim} of {describe(x)}, which is {kind}", "rows differ in size: loop over x.unbind()"
        raise ShapeError(message("vmap", "a static dim", got, hint=hint))
    moved = with_static(x, data_of(x).movedim(axis_of("vmap", x, d), -1), d, -1)
    leaves, spec = pytree.tree_flatten(moved)
    return moved, pytree.tree_unflatten([-1, *[None] * (len(leaves) - 1)], spec)


def check_mapped(leaves: list[Any], dims: list[Any]) -> None:
    """Refuse arguments of which nothing is mapped, or whose mapped dims differ in size."""
    mapped = [(x, d) for x, d in zip(leaves, dims, strict=True) if d is not None]
    if not mapped:
        raise ShapeError(message("vmap", "an argument to map", "none", hint="an int in in_dims; fn(x) maps nothing"))
    first_size = mapped[0][0].shape[mapped[0][1]]
    if any([x.shape[d] != first_size for x, d in mapped]):
        wrong = [f"dim {d}: {describe(x)}" for x, d in mapped]
        hint = "None in in_dims for an argument that is not mapped"
        raise ShapeError(message("vmap", "mapped dims of one size", "different sizes", wrong, hint))


def check_options(op: str, randomness: Any = "error", chunk_size: int | None = None) -> None:
    """Refuse another way to draw random numbers than the three of torch, and chunks of less than one."""
    if not isinstance(randomness, str) or randomness not in ("error", "different", "same"):
        got = f"{randomness!r}" if isinstance(randomness, str) else describe(randomness)
        expected, hint = "randomness 'error', 'different' or 'same'", "randomness='different'"
        raise StructureError(message(op, expected, got, hint=hint))
    if chunk_size is not None:
        expect_at_least(op, 1, "chunk_size", chunk_size)


BY_EXAMPLE = "tdc.batch(fn) runs `if`, `while` and numbers of tensors for each example; torch.where chooses values"
REFUSED = {  # what torch.vmap says: what to say, and the hint
    "data-dependent control flow": ("a function without `if` or `while` on tensors", BY_EXAMPLE),
    ".item()": ("a function without .item(), float() or int() of tensors", BY_EXAMPLE),
    "dynamic shape": ("results of one size for all", "torch.where or a mask; tdc.batch(fn) where sizes vary"),
    "random operation": ("randomness='different' or 'same' for random numbers", "tdc.vmap(fn, randomness='different')"),
    "when out_dim is None": ("out_dims=None for results that nothing mapped goes into", "out_dims=0"),
}


def refused(error: Exception) -> TdcError | None:
    """The error for what torch cannot map; None for one of the function itself."""
    for said, (expected, hint) in REFUSED.items():
        if said in f"{error}" and isinstance(error, (RuntimeError, ValueError)):
            return UnsupportedError(message("vmap", expected, "another one", hint=hint))
    if type(error) is not RuntimeError:
        return None
    hint = f"call fn for one example alone; torch, of sizes with the mapped dim: {first_line(error)}"
    return CallError(message("vmap", "a function that runs on each example", "an error", hint=hint))


def results_at(out: Any, out_dims: Any) -> Any:
    """Results with the mapped dim where it is wanted; it comes first."""
    several = isinstance(out, (tuple, list)) and not hasattr(out, "_fields")
    if isinstance(out_dims, (tuple, list)) and not several and len(out_dims) == 1:
        (out_dims,) = out_dims
    if not isinstance(out_dims, (tuple, list)):
        return pytree.tree_map(lambda x: with_mapped_dim(x, out_dims), out, is_leaf=is_whole)
    if not several or len(out_dims) != len(out):
        count = len(out) if several else 1
        got, hint = f"{len(out_dims)} for {count} results", "one int for all results"
        raise ShapeError(message("vmap", "one entry of out_dims for each result", got, hint=hint))
    results = [results_at(x, dim) for x, dim in zip(out, out_dims, strict=True)]
    return results if isinstance(out, list) else tuple(results)


def with_mapped_dim(x: Any, dim: int | None) -> Any:
    """Move the mapped dim of a result from the front to `dim`. Structures, which are shared, lose their copies."""
    if dim is None:
        return x
    if isinstance(x, TensorDict):
        if any([is_ragged(leaf) for leaf in pytree.tree_leaves(x, is_leaf=is_ragged)]):
            got, hint = "a ragged leaf", "return the ragged leaf beside the TensorDict"
            raise UnsupportedError(message("vmap", "a TensorDict of tensors as result", got, hint=hint))
        d = normal_dim(dim, len(x._size), "vmap") if x._leaves else 0
        moved: Any = torch.movedim(x, 0, d) if d else x  # type: ignore[arg-type]  # it dispatches
        return moved
    if isinstance(x, NestedTensor):
        s = x.structure
        common: list[Any] = [None if t is None else t[0] for t in (s.offsets, s.shapes, s.extent)]
        inner = type(s)(common[0], common[1], common[2], s.packed_dim, s.batch_dim, s.ragged_ndim)
        d = normal_dim(dim, x.ndim, "vmap")
        lower = s.batch_dim + (d <= s.batch_dim)
        k = d - (d > lower)
        axis = k if k <= s.packed_dim else max(s.packed_dim, k - s.ragged_ndim + 1)
        return build_nested(inner.moved(s.packed_dim + (axis <= s.packed_dim), lower), x.values.movedim(0, axis))
    if isinstance(x, MaskedBatch):
        d = normal_dim(dim, x.data.ndim, "vmap")
        ragged = tuple([r + (d <= r) for r in x.ragged_dims])
        return build_masked(x.data.movedim(0, d), x.lengths[0], ragged, x.batch_dim + (d <= x.batch_dim))
    if isinstance(x, TwoLevelTensor):
        hint = "map a function of x.values, the inner examples, and return its result"
        raise UnsupportedError(message("vmap", "results of one level", "a batch of two levels", hint=hint))
    return x.movedim(0, normal_dim(dim, x.ndim, "vmap")) if isinstance(x, Tensor) and dim != 0 else x
