"""Operations on a TwoLevelTensor, documents of sentences for instance, by those of the inner batch.

    torch.relu(x), linear(x)      on every element: that of `x.values`, in the same documents
    x + y                         y of the same structure; NestedTensor (B, -1, 1, D), one entry for each sentence;
                                  dense, (B, 1, 1, D) for each document
    x.mean(2)                     over the elements of each sentence  -> NestedTensor (B, -1, D)
    x.mean((1, 2))                over those of each document         -> (B, D)
    x.sort(2), x.max(2)           of each sentence; positions count within it
    x @ w, x @ y                  of each sentence; w (D, E), or (B, 1, D, E) for each document
    x.flatten(1, 2)               documents of elements               -> NestedTensor (B, -1, D)
    y.unflatten(1, x)             and back

Everything else is an operation on `x.values`, whose result goes to `x.with_values`.

Invariants: dim d of x is dim d - 1 of `x.values`, and no operation here takes dims 0 and 1 for one of these; a batch
with one level never meets the inner batch, whose examples may agree with it by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import int_tuple, normal_dim, shown
from tdc.core.asserts import require
from tdc.core.container import Container
from tdc.core.dynamo import known
from tdc.core.errors import DtypeError, ShapeError, StructureError, UnsupportedError, describe, message, refuse_wrong
from tdc.core.rules import DISPATCH, IMPLS, NEEDED, ROWS, RULES, TENSOR_OPERATORS, Dims, Rule, add_rule
from tdc.core.signatures import run_named
from tdc.core.typing import Op
from tdc.layout.segments import row_ids
from tdc.layout.structure import Structure, require_same
from tdc.ops.reduce.extremes import PAIRED
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import map_results
from tdc.ragged.two_level import TwoLevelTensor, as_levels, build_two_level, inner_at, numbered

LIFTED = ("pointwise", "random", "positionwise", "loss", "norm", "factory")  # families that run on every element
REDUCED = (  # along a dim
    "reduction", "moments", "extremes", "order_statistics", "scan", "sort", "vector_norm", "counts",
)  # fmt: skip
PRODUCTS = (torch.matmul, TENSOR_OPERATORS[torch.matmul], torch.Tensor.matmul)
PICKING = (torch.index_select, torch.narrow, torch.select, torch.split, torch.split_with_sizes, torch.chunk)
LEFT_OUT = (  # sizes or lengths of their own, results with a dim in front of the batch
    "new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "new_tensor", "ctc_loss", "quantile",
    "nanquantile",
)  # fmt: skip
MOVES = ("cuda", "cpu", "to", "type_as")  # these call `x.to`, which takes the structure along
OF_DTYPE = (torch.is_floating_point, torch.is_complex, torch.is_signed)
NESTED_RULES = {rule.op: rule for rule in RULES if rule.kind == "nested" and not rule.reason}
TWO_LEVEL_RULES: list[Rule] = []
HINT = "x.with_values(fn(x.values)), where dim d of x is dim d - 1"


def around(x: TwoLevelTensor, result: Any) -> Any:
    """Results of the inner batch, one or several, in the outer examples of `x`."""
    if isinstance(result, tuple):
        parts = [around(x, part) for part in result]
        return tuple(parts) if type(result) is tuple else type(result)(parts)
    return x.with_values(result) if isinstance(result, (NestedTensor, Tensor)) and result.ndim else result


def nested_row(op: Op) -> Op:
    """The rule that runs `op` on a NestedTensor."""
    row = DISPATCH["nested"][op]

    def run(*args: Any, **kwargs: Any) -> Any:
        return run_named(row, op, args, kwargs) if kwargs else getattr(ROWS, row)(*args)

    return run


def lifted(op: Op, elementwise: bool) -> Op:
    """A rule that runs `op` on inner batches.

    Args:
        elementwise: dense and ragged operands broadcast, as weights and the like do not.
    """
    on_inner = nested_row(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        like = next(a for a in given if isinstance(a, TwoLevelTensor))
        if any([isinstance(a, str) and a == "batchmean" for a in given]):  # of sentences, or of documents
            hint = "reduction='sum', divided by len(x) or by x.values.batch_size[0]"
            raise UnsupportedError(message(op, "another reduction", "'batchmean'", hint=hint))
        own = [inner(op, like, a, elementwise) for a in args]
        return around(like, on_inner(*own, **{name: inner(op, like, a, elementwise) for name, a in kwargs.items()}))

    return run


def inner(op: Op, like: TwoLevelTensor, a: Any, elementwise: bool) -> Any:
    """An argument for the inner batch."""
    if isinstance(a, TwoLevelTensor):
        require_same(like._structure, a._structure, op)
        return a._values
    if isinstance(a, MaskedBatch) or (isinstance(a, NestedTensor) and not elementwise):
        raise StructureError(message(op, "operands of two levels", describe(a), hint=HINT))
    if isinstance(a, NestedTensor):
        return of_each_inner(op, like, a)
    return spread_out(op, like, a) if elementwise and isinstance(a, Tensor) else a


def of_each_inner(op: Op, like: TwoLevelTensor, a: NestedTensor) -> Tensor:
    """A NestedTensor (B, -1, ...) with as many dims as two levels have: one dense entry for each inner example, of a
    product one matrix."""
    ones = [d - 1 for d in like.ragged_dims[1:]]
    s = a.structure
    if s.packed_dim or s.batch_dim or s.ragged_ndim > 1 or a.ndim != like.ndim or a.values.ndim <= ones[-1]:
        got, hint = describe(a), "x.mean(2, keepdim=True), or y.unsqueeze(2): size 1 in the dims of inner examples"
        raise StructureError(message(op, f"an entry for each inner example of {describe(like)}", got, hint=hint))
    require_same(like._structure, s, op)
    if op not in PRODUCTS and not all([known(a.values.shape[d] == 1) for d in ones]):
        got, hint = describe(a), "y.unsqueeze(2)"
        raise ShapeError(message(op, f"size 1 in the dims {like.ragged_dims[1:]}", got, hint=hint))
    return a.values


def spread_out(op: Op, like: TwoLevelTensor, a: Tensor) -> Tensor:
    """A dense operand, which broadcasts against the logical shape, for the inner batch."""
    more = a.ndim - like._values.ndim  # dims in front of the inner examples' own: those of dims 0 and 1, plus 1
    if more < 0:
        return a
    if more > 1 or not known(a.shape[more] == 1):
        got, hint = describe(a), "size 1 in dim 1, or a NestedTensor with one entry for each inner example"
        raise ShapeError(message(op, f"an operand that broadcasts against {describe(like)}", got, hint=hint))
    if more == 0 or known(a.shape[0] == 1):
        return a[0] if more else a
    if known(a.shape[0] != like._structure.batch_size):
        expected = f"1 or {like._structure.batch_size} rows in dim 0"
        raise ShapeError(message(op, expected, describe(a), hint="one for each outer example"))
    return a[:, 0].index_select(0, row_ids(like._structure, like._values.batch_size[0]))


def along(op: Op, takes: Dims) -> Op:
    """A rule that runs `op` along dims of inner examples, or over all elements of each outer one."""
    on_inner, at, default, several = nested_row(op), takes.position, takes.default, takes.several
    needs_dim, takes_k = default is NEEDED, "k" in takes.names

    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(input, TwoLevelTensor):
            raise DtypeError(message(op, "a TwoLevelTensor first", describe(input), hint="x.values has one level"))
        kwargs = {name: a for name, a in kwargs.items() if name != "_stacklevel"}  # of torch.nn.functional
        dim = given_dim(args, kwargs, at, None if needs_dim else default)
        if op in PAIRED and ("other" in kwargs or isinstance(dim, (Tensor, Container))):
            return PAIRED[op](input, kwargs.get("other", dim))
        if dim is None or isinstance(dim, bool):
            if needs_dim:
                raise ShapeError(message(op, "a dim", "none", hint="dim=-1"))
            return on_inner(input._values, *args, **kwargs)
        x, dims = inner_dims(op, input, dim, several)
        if takes_k and dims[0] in x.ragged_dims:
            check_inner_lengths(op, input, args[0] if args else kwargs["k"], dims[0])
        args, kwargs = with_dim(args, kwargs, at, dims if isinstance(dim, (tuple, list)) else dims[0])
        out = on_inner(x, *args, **kwargs)
        if isinstance(x, NestedTensor) and x is input._values:
            return around(input, out)
        return map_results(out, lambda t: t.unsqueeze(1) if t.ndim == x.ndim else t)

    return run


def check_inner_lengths(op: Op, x: TwoLevelTensor, k: Any, dim: int) -> None:
    """A ShapeError unless every inner example has `k` elements: at once on CPU, asynchronously on CUDA."""
    sizes = x._values.sizes[:, x._values.ragged_dims.index(dim)]
    hint = f"drop short ones first: x = x[x.inner_lengths >= {shown(k)}]"
    text = message(op, f"at least {shown(k)} elements in each inner example", "fewer", hint=hint)
    require((sizes >= k).all(), text, ShapeError)


def given_dim(args: tuple[Any, ...], kwargs: dict[str, Any], at: int, default: Any) -> Any:
    """The dim of a call, by name or as argument number `at` behind the batch."""
    return kwargs["dim"] if "dim" in kwargs else args[at] if len(args) > at else default


def with_dim(
    args: tuple[Any, ...], kwargs: dict[str, Any], at: int, dim: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with another dim."""
    return ((*args[:at], dim, *args[at + 1 :]), kwargs) if len(args) > at else (args, kwargs | {"dim": dim})


def picking(op: Op, takes: Dims) -> Op:
    """A rule for examples chosen along a dim: outer ones, inner ones of each, or elements of these."""
    on_inner, at = nested_row(op), takes.position

    def run(input: TwoLevelTensor, *args: Any, **kwargs: Any) -> Any:
        d = normal_dim(given_dim(args, kwargs, at, 0), input.ndim, op)
        args, kwargs = with_dim(args, kwargs, at, d if d < 2 else d - 1)
        if d >= 2:
            return around(input, on_inner(input._values, *args, **kwargs))
        found = on_inner(numbered(input), *args, **kwargs)
        parts = [inner_at(input, which, ()) for which in (found if isinstance(found, tuple) else (found,))]
        return tuple(parts) if isinstance(found, tuple) else parts[0]

    return run


def inner_dims(op: Op, x: TwoLevelTensor, dim: Any, several: bool) -> tuple[NestedTensor, Any]:
    """Place dims of x: among those of the inner batch, or of the flattened one where dim 1 is with dim 2."""
    dims = [normal_dim(d, x.ndim, op) for d in int_tuple(op, dim)]
    if dims and min(dims) >= 2:
        return x._values, tuple([d - 1 for d in dims])
    if 0 not in dims and 1 in dims and 2 in dims and several:
        return flat(op, x), (1, *[d - 1 for d in dims if d > 2])
    if set(dims) == set(range(x.ndim)) and several:
        return x._values, tuple(range(x._values.ndim))
    hint = "x.values, or x.flatten(1, 2) for all elements of an outer example"
    raise ShapeError(message(op, f"dims of inner examples of {describe(x)}", f"dim {dim}", hint=hint))


def flat(op: Op, x: TwoLevelTensor) -> NestedTensor:
    """Documents of elements: both ragged dims as one. Copies nothing."""
    s = x._values.structure
    if s.packed_dim or s.ragged_ndim > 1:
        got, hint = describe(x), "x.values for operations on inner examples"
        raise ShapeError(message(op, "ragged dims 1 and 2", got, hint=hint))
    return build_nested(Structure(s.offsets[x.offsets]).marked(), x._values.values)


def transpose(x: TwoLevelTensor, dim0: int, dim1: int) -> TwoLevelTensor:
    """Two dims of inner examples exchanged."""
    dims = [normal_dim(d, x.ndim, "transpose") for d in (dim0, dim1)]
    if min(dims) < 2:
        got = f"dims {dim0} and {dim1}"
        raise ShapeError(message("transpose", f"two dims of inner examples of {describe(x)}", got, hint=HINT))
    return x.with_values(x._values.transpose(dims[0] - 1, dims[1] - 1))


def flatten(x: TwoLevelTensor, start_dim: int = 0, end_dim: int = -1) -> Any:
    """Neighbouring dims as one: the two levels, those of inner examples, or the outer dims, which leaves `x.values`."""
    first, last = normal_dim(start_dim, x.ndim, "flatten"), normal_dim(end_dim, x.ndim, "flatten")
    if first == last:
        return x
    if first >= 2:
        return around(x, x._values.flatten(first - 1, last - 1))
    if first == 1:
        return flat(torch.flatten, x).flatten(1, last - 1)
    if last == 1:
        return x._values
    got, hint = f"dims {start_dim} to {end_dim}", "x.flatten(1, 2), or x.values.values for all elements"
    raise ShapeError(message("flatten", f"neighbouring dims of {describe(x)}", got, hint=hint))


def unflatten(x: Any, dim: int, sizes: Any) -> Any:
    """A static dim of inner examples into several, or the ragged dim of a NestedTensor into the levels of `sizes`."""
    if isinstance(sizes, TwoLevelTensor) and isinstance(x, NestedTensor):
        return as_levels(x, dim, sizes.inner_lengths, sizes._values.structure)
    if not isinstance(x, TwoLevelTensor) or isinstance(sizes, TwoLevelTensor):
        got, hint = f"{describe(x)} by {describe(sizes)}", "y.unflatten(1, x)"
        raise UnsupportedError(message("unflatten", "a NestedTensor by two levels", got, hint=hint))
    d = normal_dim(dim, x.ndim, "unflatten")
    if d < 2:
        raise ShapeError(message("unflatten", f"a dim of inner examples of {describe(x)}", f"dim {dim}", hint=HINT))
    return around(x, x._values.unflatten(d - 1, sizes))


def unsqueeze(x: TwoLevelTensor, dim: int) -> TwoLevelTensor:
    """A new dim of inner examples."""
    d = normal_dim(dim, x.ndim + 1, "unsqueeze")
    if d < 2:
        got, hint = f"dim {dim}", "tdc.pack([x.values]) is one outer example of them all"
        raise UnsupportedError(message("unsqueeze", f"a new dim of inner examples of {describe(x)}", got, hint=hint))
    return x.with_values(x._values.unsqueeze(d - 1))


def squeeze(x: TwoLevelTensor, dim: Any = None) -> TwoLevelTensor:
    """Inner examples without static dims of size 1."""
    if dim is None:
        raise UnsupportedError(message("squeeze", "a dim", "none", hint="dim=-1"))
    dims = [normal_dim(d, x.ndim, "squeeze") for d in int_tuple("squeeze", dim)]
    if min(dims, default=2) < 2:
        raise UnsupportedError(message("squeeze", f"dims of inner examples of {describe(x)}", f"dim {dim}", hint=HINT))
    return x.with_values(x._values.squeeze(tuple([d - 1 for d in dims])))


def expect_two_levels(op: str, tensors: Sequence[Any]) -> None:
    """Refuse operands of one level."""
    wrong = {f"operand {i}": describe(x) for i, x in enumerate(tensors) if not isinstance(x, TwoLevelTensor)}
    expected, hint = "operands that are all TwoLevelTensors", "tdc.pack([nested]) makes one"
    refuse_wrong(StructureError, op, expected, wrong, "others", hint)


def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Outer examples after outer ones, or the inner ones of each; along a dim of inner examples each goes on in its
    partner."""
    expect_two_levels("cat", tensors)
    first, d = tensors[0], normal_dim(dim, tensors[0].ndim, "cat")
    values = [x._values for x in tensors]
    if d >= 2:
        for x in tensors[1:]:
            require_same(first._structure, x._structure, "cat")
        return first.with_values(torch.cat(values, d - 1))
    joined: Any = torch.cat(values)
    if d == 1:
        numbers, before = [], 0
        for x in tensors:
            numbers.append(numbered(x) + before)
            before = before + x._values.batch_size[0]
        which: Any = torch.cat(numbers, 1)
        return build_two_level(which.structure, joined[which.values])
    outer: Any = torch.cat([x.inner_lengths for x in tensors])
    return build_two_level(outer.structure, joined)


def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Inner examples of the same sizes, one for each operand, along a new dim of them."""
    expect_two_levels("stack", tensors)
    first, d = tensors[0], normal_dim(dim, tensors[0].ndim + 1, "stack")
    if d < 2:
        got, hint = f"dim {dim}", "torch.cat along dim 0 or 1: outer or inner examples after one another"
        raise UnsupportedError(message("stack", f"a new dim of inner examples of {describe(first)}", got, hint=hint))
    for x in tensors[1:]:
        require_same(first._structure, x._structure, "stack")
    return first.with_values(torch.stack([x._values for x in tensors], d - 1))


def arguments_of(op: Op) -> Dims:
    """The arguments of an operation that takes dims, as its row for one level writes them."""
    dims = NESTED_RULES[op].dims
    assert dims is not None
    return dims


def put(op: Op, impl: Op) -> None:
    """A row, under all names that the row of a NestedTensor has. The matrix of tests lists the latter only."""
    table = DISPATCH["two_level"]
    add_rule(Rule(op, "two_level", NESTED_RULES[op].family, impl, op, modes=()), rows=TWO_LEVEL_RULES)
    for name in NAMES_OF[DISPATCH["nested"][op]]:
        table.setdefault(name, table[op])


NAMES_OF: dict[str, list[Op]] = {}  # of rows of a NestedTensor
for _op, _row in DISPATCH["nested"].items():
    NAMES_OF.setdefault(_row, []).append(_op)

for _op in PICKING:
    put(_op, picking(_op, arguments_of(_op)))
for _op, _impl in (
    (torch.flatten, flatten), (torch.unflatten, unflatten), (torch.cat, cat), (torch.transpose, transpose),
    (torch.stack, stack), (torch.unsqueeze, unsqueeze), (torch.squeeze, squeeze),
    (torch.matmul, lifted(torch.matmul, True)),
):  # fmt: skip
    put(_op, _impl)
for _op in PRODUCTS[1:]:  # which have a row of their own, see `matmul`
    IMPLS[f"two_level_{_op.__name__}"] = lifted(_op, True)
    DISPATCH["two_level"][_op] = f"two_level_{_op.__name__}"
for _op, _rule in NESTED_RULES.items():
    if _op in DISPATCH["two_level"] or _rule.name in LEFT_OUT:
        continue
    if _rule.dims is not None and not _rule.dims.operands and _rule.family in (*LIFTED, *REDUCED):
        put(_op, along(_op, _rule.dims))
    elif _rule.name in MOVES:
        put(_op, _rule.impl)
    elif _rule.family in LIFTED or _op in OF_DTYPE:
        put(_op, lifted(_op, _rule.broadcasts or _rule.family == "loss"))
