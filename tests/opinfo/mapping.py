"""torch's own samples as batches: one sample, drawn three times, is three examples of different sizes.

    sample        op(input (4, 5), other (5,), dim=1)
    examples      op((4, 5), (5,), dim=1), op((1, 5), (5,), dim=1), op((2, 5), (5,), dim=1)
    batch         op((3, -1, 5), (3, 1, 5), dim=2)

A `Form` says which dim of the input is ragged and what becomes of the other tensors: those that have the dim, too, are
ragged with it; the others are stacked, one for each example, or shared by all. Dims and sizes among the arguments are
counted from the batch on. Where the operation refuses an example, the form is not mapped, and the reason is kept.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tdc

DIMS = (
    "dim", "dims", "axis", "dim0", "dim1", "dim2", "axis0", "axis1", "start_dim", "end_dim", "source", "destination",
)  # fmt: skip
SIZES = {"reshape": "shape", "view": "size", "expand": "size", "broadcast_to": "size", "unsafe_view": "size"}
ORDERS = {"permute": "dims", "permute_copy": "dims"}
REPEATS = {"repeat": "repeats", "tile": "dims"}
DEFAULTS: dict[str, dict[str, Any]] = {  # of arguments that are dims
    "flatten": {"start_dim": 0}, "rot90": {"dims": (0, 1)}, "diagonal": {"dim1": 0, "dim2": 1},
    "argsort": {"dim": -1}, "diagonal_copy": {"dim1": 0, "dim2": 1}, "unbind": {"dim": 0}, "chunk": {"dim": 0},
    "tensor_split": {"dim": 0}, "unsafe_chunk": {"dim": 0}, "unsafe_split": {"dim": 0}, "split": {"dim": 0},
    "split_with_sizes": {"dim": 0}, "cat": {"dim": 0}, "stack": {"dim": 0}, "repeat_interleave": {},
    "linalg.cross": {"dim": -1}, "nn.functional.cosine_similarity": {"dim": 1},
}  # fmt: skip
PARAMETERS = ("weight", "bias", "running_mean", "running_var", "test_elements", "boundaries")  # shared by all examples
VECTORS = (
    "take",
    "index_select",
    "index_add",
    "index_fill",
    "index_copy",
    "index_reduce",
)  # one index for all examples
IMPLICIT = (  # the dims that they mean are those of the batch
    "flipud", "fliplr", "hsplit", "vsplit", "dsplit", "hstack", "vstack", "dstack", "row_stack", "column_stack",
    "atleast_1d", "atleast_2d", "atleast_3d", "t", "t_copy", "squeeze", "squeeze_copy", "tensordot", "block_diag",
    "cartesian_prod", "broadcast_tensors", "meshgrid", "combinations", "numpy_T", "kron", "inner", "outer", "ger",
)  # fmt: skip

CHANNELS = re.compile(  # dim 0 of these samples is a batch already, dim 1 the channels
    "cross_entropy|nll_loss|conv|pool|interpolate|upsample|batch_norm|instance_norm|group_norm|local_response_norm|grid_sample|functional.unfold"
)
Schemas = tuple[tuple[tuple[str, str, bool], ...], ...]


class NotMapped(Exception):
    """A sample that is no batch in this form; the text says why."""


@dataclass(frozen=True)
class Form:
    """How a sample becomes a batch.

    Attributes:
        ragged: the dim of the input that is ragged, None for none.
        others: "stacked" or "shared", for tensors without the ragged dim; "batched" where dim 0 of the sample is the
            batch already.
        empty: whether one example has length 0 along it.
    """

    ragged: int
    others: str = "stacked"
    empty: bool = False

    def __str__(self) -> str:
        return f"ragged {self.ragged}, others {self.others}{', one empty' * self.empty}"


@dataclass
class Mapped:
    """A sample in a form: the calls of each example, and that of the batch in one kind."""

    examples: list[tuple[tuple[Any, ...], dict[str, Any]]]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    bound: tuple[str, ...]
    names: tuple[str, ...]

    def value(self, name: str, default: Any) -> Any:
        """An argument of the sample by its name."""
        args, kwargs = self.examples[0]
        return kwargs.get(name, default) if name not in self.bound else args[self.bound.index(name)]


def schemas(op: Any) -> Schemas:
    """Parameters of an operation, in each of its forms: names, types, and whether they go by name only."""
    return schemas_of(op.op, op.aten_name or op.name)


@cache
def schemas_of(op: Callable[..., Any], name: str) -> Schemas:
    """Parameters of an operation, in each of its forms: names, types, and whether they go by name only."""
    try:
        known = inspect.signature(op).parameters.values()
        return (tuple((p.name, "", p.kind is p.KEYWORD_ONLY) for p in known),)
    except (ValueError, TypeError):
        pass
    native = torch._C._jit_get_schemas_for_operator(f"aten::{name.replace('.', '_')}")
    found = [
        tuple(("input" if a.name == "self" else a.name, str(a.type), a.kwarg_only) for a in schema.arguments)
        for schema in native
        if not schema.overload_name.endswith("out")
    ]
    stand_in = torch.overrides.get_testing_overrides().get(op)
    if stand_in:
        found.append(tuple((name, "", False) for name in inspect.signature(stand_in).parameters))
    return tuple(found)


def of_batches(
    column: list[Tensor], name: str, form: Form, rank: int, size: int, lengths: tuple[int, ...], kind: str, fill: Any
) -> tuple[list[Tensor], Any]:
    """Tensors whose dim 0 is a batch: one example of each draw, a batch of one, and the batch of them all."""
    if name in PARAMETERS or column[0].ndim != rank:
        return [column[0]] * len(column), column[0]
    own = [c.narrow(0, 0, 1) for c in column]
    cut = [cropped(c, form, rank, size, n) for c, n in zip(own, lengths, strict=True)]
    found = [c for c in cut if c is not None]
    if len(found) < len(cut):
        return own, torch.cat(own)
    return found, join([c[0] for c in found], form.ragged - 1, kind, fill, {})


def all_names(op: Any) -> tuple[str, ...]:
    """Names of all parameters of all forms of an operation."""
    return tuple(dict.fromkeys([name for schema in schemas(op) for name, _, _ in schema]))


def fits(value: Any, kind: str) -> bool:
    """Whether a value may be an argument of a type, as far as samples need to know."""
    if not kind or value is None:
        return True
    if isinstance(value, Tensor):
        return "Tensor" in kind
    if isinstance(value, bool):
        return "bool" in kind or "number" in kind
    if isinstance(value, int):
        return "int" in kind.lower() or "number" in kind or "float" in kind
    if isinstance(value, (list, tuple)):
        return "List" in kind or "[]" in kind
    return "Tensor" not in kind or not isinstance(value, (str, float))


def parameters(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Names of the parameters that positional arguments belong to.

    Raises:
        NotMapped: torch does not tell.
    """
    for schema in schemas(op):
        positional = [(name, kind) for name, kind, named in schema if not named]
        enough = len(args) <= len(positional) and kwargs.keys() <= {name for name, _, _ in schema}
        enough = enough and not kwargs.keys() & {name for name, _ in positional[: len(args)]}
        if enough and all(fits(a, kind) for a, (_, kind) in zip(args, positional, strict=False)):
            return tuple([name for name, _ in positional[: len(args)]])
    if any(isinstance(a, (int, list, tuple)) for a in args[1:]):
        raise NotMapped("the names of its arguments are not known")
    return ()


def forms(op: Any, sample: Any, kind: str) -> Iterator[Form]:
    """The forms that are tried on a sample."""
    x = sample.input
    x = x[0] if isinstance(x, (list, tuple)) and x else x
    if not isinstance(x, Tensor) or x.ndim == 0 or x.is_sparse or x.layout != torch.strided:
        return
    if kind == "tensordict":
        yield Form(x.ndim, "stacked")
        yield Form(x.ndim, "shared")
        return
    if CHANNELS.search(op.name):
        for d in range(2, x.ndim):
            for empty in (False, True):
                yield Form(d, "batched", empty)
        return
    dims = sorted({0, x.ndim - 1})
    others = [t for t in pytree.tree_leaves((sample.args, sample.kwargs)) if isinstance(t, Tensor)]
    for d in dims:
        for empty in (False, True):
            yield Form(d, "stacked", empty)
        if others:
            yield Form(d, "shared")


def cropped(t: Tensor, form: Form, rank: int, size: int, length: int) -> Tensor | None:
    """A tensor with the ragged dim cut to a length; None where it does not have the dim."""
    d = form.ragged - rank + t.ndim  # dims meet from the last
    if d < 0 or t.shape[d] != size or (size == 1 and rank != t.ndim):
        return None
    return t.narrow(d, 0, length)


def lengths_of(size: int, form: Form) -> tuple[int, ...]:
    """Lengths of the three examples."""
    return (size, 0 if form.empty else min(1, size), (size + 1) // 2)


def map_sample(op: Any, draws: list[Any], form: Form, kind: str, fill: Any) -> Mapped:
    """A sample, drawn three times, as a batch.

    Raises:
        NotMapped: it is none in this form.
    """
    flat = [pytree.tree_flatten(((d.input, *d.args), d.kwargs)) for d in draws]
    leaves, spec = [f[0] for f in flat], flat[0][1]
    if kind == "masked" and op.name in SIZES and {-1, draws[0].input.shape[form.ragged]} <= set(draws[0].args[0]):
        raise NotMapped("a size that is the padded length")
    if op.name in IMPLICIT and not (op.name.startswith("squeeze") and (draws[0].args or draws[0].kwargs)):
        raise NotMapped("means dims of the batch")
    known = parameters(op, (draws[0].input, *draws[0].args), draws[0].kwargs)
    names = names_of(known, draws[0])
    if "batch_norm" in op.name and (draws[0].kwargs.get("training") or True in draws[0].args):
        raise NotMapped("counts statistics of the whole batch: see the samples of modules")
    refuse_meanings(op, draws[0])
    if any(f[1] != spec for f in flat) or any(len(f) != len(leaves[0]) for f in leaves):
        raise NotMapped("draws differ in their arguments")
    first = next(t for t in leaves[0] if isinstance(t, Tensor))
    rank, size = first.ndim, first.shape[form.ragged]
    lengths = lengths_of(size, form)
    examples: list[list[Any]] = [[] for _ in draws]
    batch: list[Any] = []
    shared: dict[str, Any] = {}
    for name, *column in zip(names, *leaves, strict=True):
        t = column[0]
        if not isinstance(t, Tensor):
            if any(type(c) is not type(t) for c in column):
                raise NotMapped("draws differ in their arguments")
            for e in examples:
                e.append(t)
            batch.append(t)
            continue
        if any(c.shape != t.shape or c.dtype != t.dtype for c in column):
            raise NotMapped("draws differ in their shapes")
        if form.others == "batched":
            own, joined = of_batches(column, name, form, rank, size, lengths, kind, fill)
            for e, p in zip(examples, own, strict=True):
                e.append(p)
            batch.append(joined)
            continue
        parts = [cropped(c, form, rank, size, n) for c, n in zip(column, lengths, strict=True)]
        if name in PARAMETERS or (name == "index" and op.name in VECTORS):
            parts = [t] * len(draws)
            batch.append(t)
        elif all(p is not None for p in parts):
            d = form.ragged - rank + t.ndim
            joined = join(parts, d, kind, fill, shared)
            batch.append(joined)
        elif form.others == "shared" or t.ndim == 0:
            parts = [t] * len(draws)
            batch.append(t)
        else:
            if op.name == "__rmatmul__" and t.ndim == 1:
                raise NotMapped("a vector for each example, whose dims do not broadcast")
            parts = list(column)
            stacked = torch.stack(parts)
            batch.append(stacked.reshape(len(parts), *[1] * (rank - t.ndim), *t.shape) if t.ndim < rank else stacked)
        for e, p in zip(examples, parts, strict=True):
            e.append(p)
    calls = [pytree.tree_unflatten(e, spec) for e in examples]
    args, kwargs = pytree.tree_unflatten(batch, spec)
    if op.name == "index_put":
        args = (args[0], in_each_example(args[1], len(draws)), *args[2:])
    if form.others != "batched":
        args, kwargs = shifted(op, known, args, kwargs, len(draws))
    return Mapped([(tuple(a), dict(k)) for a, k in calls], tuple(args), dict(kwargs), known, all_names(op))


def in_each_example(indices: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    """Indices into examples as indices into a batch of `count`.

    Raises:
        NotMapped: masks, or indices of which each example has its own.
    """
    if any(not isinstance(i, Tensor) or i.dtype == torch.bool or i.ndim != 1 for i in indices):
        raise NotMapped("an index of its own for each example")
    return (torch.arange(count).unsqueeze(1), *indices)


def refuse_unwritten(op: Any, sample: Any) -> None:
    """
    Raises:
        NotMapped: torch's own call of an example reads memory that nothing was written to, or that is not there, which
            ends the process: `F.conv2d(ones(1, 4, 1, 5), ones(1, 4, 2, 3), padding="same", dilation=3)` in bfloat16.
    """
    if "conv" in op.name and sample.input.dtype == torch.bfloat16 and "same" in sample.kwargs.values():
        raise NotMapped("torch crashes where one position is padded on one side more than on the other")
    if "circular" in (*sample.args, *sample.kwargs.values()) and min(sample.args[0]) < 0:
        raise NotMapped("torch reads memory that nothing was written to")


def refuse_meanings(op: Any, sample: Any) -> None:
    """Leave out samples that mean another thing of a batch than of its examples.

    Raises:
        NotMapped: it does, or torch's own result is no measure.
    """
    refuse_unwritten(op, sample)
    given = (*sample.args, *sample.kwargs.values())
    if op.name == "nn.functional.one_hot" and given in ((), (-1,)):
        raise NotMapped("counts the classes of all examples")
    if op.name == "tile" and len(given[0]) > sample.input.ndim:
        raise NotMapped("repeats dims in front of the batch")
    if op.name in ("linalg.solve", "linalg.solve_ex") and given[0].shape == sample.input.shape[:-1]:
        raise NotMapped("sizes tell vectors from matrices")


def names_of(known: tuple[str, ...], sample: Any) -> list[str]:
    """The name of the parameter that each leaf of a sample's arguments belongs to; empty where torch does not tell."""
    tree = ((sample.input, *sample.args), sample.kwargs)
    found = []
    for path, _ in pytree.tree_flatten_with_path(tree)[0]:
        key: Any = path[1]
        position = getattr(key, "idx", None)
        found.append(key.key if position is None else known[position] if position < len(known) else "")
    return found


def join(parts: list[Any], d: int, kind: str, fill: Any, shared: dict[str, Any]) -> Any:
    """Examples as one batch of a kind, in the structure of the batch that was made before."""
    x = tdc.pack(parts, ragged_dim=d + 1)
    key = f"{d}"
    if key in shared and [p.shape[d] for p in parts] == shared[key][1]:
        known = shared[key][0].structure
        x = tdc.NestedTensor(x.values, known.offsets, ragged_dim=d + 1) if known.packed_dim == d else x
    shared.setdefault(key, (x, [p.shape[d] for p in parts]))
    if kind == "nested":
        return x
    padded = x.to_padded()
    return padded.with_data(padded.data.masked_fill(~padded.mask, fill_of(fill, padded.dtype)))


def fill_of(fill: Any, dtype: torch.dtype) -> Any:
    """A padding value of a dtype: "nan" is the worst the dtype has."""
    if dtype == torch.bool:
        return fill != 0
    if dtype.is_floating_point or dtype.is_complex:
        return {"nan": float("nan"), "max": torch.finfo(dtype).max}.get(fill, fill)
    top = torch.iinfo(dtype)
    return {"nan": top.min, "max": top.max}.get(fill, max(fill, top.min) if isinstance(fill, int) else fill)


def shifted(
    op: Any, names: tuple[str, ...], args: Any, kwargs: Any, count: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with dims counted behind the batch."""
    args, kwargs = list(args), dict(kwargs)
    bound = {name: i for i, name in enumerate(names)}
    for name, value in DEFAULTS.get(op.name, {}).items():
        if name not in bound and name not in kwargs:
            kwargs[name] = value
    size = SIZES.get(op.name)
    repeat, order = REPEATS.get(op.name), ORDERS.get(op.name)
    for name in {*bound, *kwargs}:
        if name == size:
            change: Callable[[Any], Any] = partial(prefixed, count)
        elif name == repeat:
            change = partial(prefixed, 1)
        elif name == order:
            change = reordered
        elif name in DIMS:
            change = behind
        else:
            continue
        if name in kwargs:
            kwargs[name] = change(kwargs[name])
        else:
            args[bound[name]] = change(args[bound[name]])
    return tuple(args), kwargs


def prefixed(size: int, sizes: Any) -> list[int]:
    """Sizes with that of the batch in front."""
    return [size, *sizes]


def reordered(dims: Any) -> tuple[int, ...]:
    """An order of dims with the batch in front."""
    return (0, *behind(tuple(dims)))


def behind(dim: Any) -> Any:
    """A dim, or several, counted behind the batch; from the end as they are."""
    if isinstance(dim, (list, tuple)):
        return type(dim)([behind(d) for d in dim])
    return dim + 1 if isinstance(dim, int) and not isinstance(dim, bool) and dim >= 0 else dim


def map_leaves(op: Any, draws: list[Any], form: Form) -> Mapped:
    """A sample, drawn three times, as leaves of a TensorDict whose batch dims are all dims of the sample.

    Raises:
        NotMapped: it is none in this form.
    """
    flat = [pytree.tree_flatten(((d.input, *d.args), d.kwargs)) for d in draws]
    leaves, spec = [f[0] for f in flat], flat[0][1]
    known = parameters(op, (draws[0].input, *draws[0].args), draws[0].kwargs)
    names = names_of(known, draws[0])
    if any(f[1] != spec for f in flat):
        raise NotMapped("draws differ in their arguments")
    first = next(t for t in leaves[0] if isinstance(t, Tensor))
    examples: list[list[Any]] = [[] for _ in draws]
    batch: list[Any] = []
    for name, *column in zip(names, *leaves, strict=True):
        t = column[0]
        whole = isinstance(t, Tensor) and t.shape == first.shape and name not in PARAMETERS
        if any(type(c) is not type(t) or (isinstance(t, Tensor) and c.shape != t.shape) for c in column):
            raise NotMapped("draws differ in their shapes")
        own = column if t is first or (whole and form.others == "stacked") else [t] * len(draws)
        a, b, c = own
        batch.append(tdc.TensorDict({"a": a, "b": b, "c": {"d": c}}, batch_size=t.shape) if own is column else t)
        for e, part in zip(examples, own, strict=True):
            e.append(part)
    calls = [pytree.tree_unflatten(e, spec) for e in examples]
    args, kwargs = pytree.tree_unflatten(batch, spec)
    return Mapped([(tuple(a), dict(k)) for a, k in calls], tuple(args), dict(kwargs), known, all_names(op))
