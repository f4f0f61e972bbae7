"""Pointwise operations: the same function of every element, on packed values, on a rectangle or on each leaf.

    unary(torch.relu)        one tensor argument
    nary(torch.add)          several; operands broadcast as one example at a time would

A dense operand broadcasts against the logical shape of a NestedTensor, with 1, the longest length or its bound on the
ragged dim; beside a TensorDict it broadcasts against the batch size and is extended over features.

Invariants: the structure object is passed on; NaN in padding reaches neither valid results nor gradients of dense
operands.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import as_device
from tdc.core.asserts import require
from tdc.core.calls import of_torch_nested
from tdc.core.container import Container
from tdc.core.dtypes import of_examples
from tdc.core.dynamo import eager, is_zero, known
from tdc.core.errors import NAMES, DtypeError, ShapeError, UnsupportedError, describe, message, op_name
from tdc.core.rules import MODES, define, note_syncs
from tdc.core.typing import Op
from tdc.layout.padding import pack_rows
from tdc.layout.segments import coordinates, gather_spans, longest, spread
from tdc.layout.structure import Structure
from tdc.ops.elementwise.pairs import onto, onto_masked, widest, widest_masked
from tdc.ops.tensordict.batch import lift, on_leaves
from tdc.ops.tensordict.leafwise import nary_tensordict, unary_tensordict
from tdc.ragged.masked import MaskedBatch, fitted_masked
from tdc.ragged.nested import NestedTensor, build_result
from tdc.ragged.storage import Ragged, data_of, map_results, with_data
from tdc.tensordict.tensordict import TensorDict


def unary(op: Op, family: str = "pointwise", run: Op | None = None, modes: tuple[str, ...] = MODES) -> None:
    """Rows for a function of one tensor, for all three containers; `run` is called in its place."""
    call = in_new_memory(op, run or op)
    run_tensordict = unary_tensordict(on_leaves(call))
    call = of_examples(call) if op in LAID_OUT else call
    nested, masked = unary_nested(call), unary_masked(call)
    define(op, family, nested=nested, masked=masked, tensordict=run_tensordict, modes=modes)


def nary(op: Op, run: Op | None = None, modes: tuple[str, ...] = MODES) -> None:
    """Rows for a function of several tensors that broadcast, for all three containers; `run` is called in its place."""
    call = run or op
    run_tensordict = nary_tensordict(call, on_leaves(call))
    NAMES.setdefault(call, op_name(op))  # for errors
    nested, masked = nary_nested(call), nary_masked(call)
    define(
        op, "pointwise", nested=nested, masked=masked, tensordict=run_tensordict, broadcasts=True, modes=modes
    )


def in_new_memory(op: Op, run: Op) -> Op:
    """`run` without `inplace=True`, which stock modules pass by name, and by position in a graph."""
    try:
        names = list(inspect.signature(op).parameters)
    except ValueError:
        return run
    if "inplace" not in names:
        return run
    at = names.index("inplace") - 1

    def call(x: Any, *args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("inplace", None)
        return run(x, *args[:at], **kwargs)

    NAMES.setdefault(call, op_name(op))  # for errors
    return call


def unary_nested(op: Op) -> Op:
    """`op` on packed values. A closure: a graph holds two guards on it, and six on a partial."""

    def run(x: NestedTensor, *args: Any, **kwargs: Any) -> NestedTensor:
        return build_result(x._structure, op(x._values, *args, **kwargs))

    return run


def unary_masked(op: Op) -> Op:
    def run(x: MaskedBatch, *args: Any, **kwargs: Any) -> MaskedBatch:
        return x.with_data(op(x.data, *args, **kwargs))

    return run


def frexp(x: Any) -> tuple[Container, ...]:
    """Mantissa and exponent: two batches, in torch's named tuple."""
    if isinstance(x, TensorDict):
        return lift(x, torch.frexp, op="frexp")
    return map_results(torch.frexp(data_of(x)), lambda part: with_data(x, part))


def nary_nested(op: Op) -> Op:
    def run(*args: Any, **kwargs: Any) -> NestedTensor:
        like = widest(op, args, kwargs)
        ready = [packed_operand(a, like, op) for a in args]
        if not kwargs:  # a call with keywords takes longer to trace
            return build_result(like._structure, op(*ready))
        values = op(*ready, **{k: packed_operand(a, like, op) for k, a in kwargs.items()})
        return build_result(like._structure, values)

    return run


def packed_operand(x: Any, like: NestedTensor, op: Op) -> Any:
    """An operand as it broadcasts against the packed values of `like`."""
    if isinstance(x, NestedTensor):
        if x is like or (x._structure is like._structure and x._values.ndim == like._values.ndim):
            return x._values
        return onto(x, like, op)
    if isinstance(x, Tensor) and x.ndim > 0:
        return pack_dense(x, like, op)
    if isinstance(x, MaskedBatch):
        raise mixed(op, like, x)
    return x


def pack_dense(x: Tensor, like: NestedTensor, op: Op) -> Tensor:
    """A dense operand in packed form: gathered along the packed axis where it varies with examples or ragged dims."""
    s, values, given = like._structure, like._values, x
    features = x.ndim < values.ndim - s.packed_dim and s.batch_dim <= s.packed_dim  # neither batch nor ragged dim
    if features and x.shape == values.shape[-x.ndim :]:  # as a bias has it; to ask `fits` takes longer
        return x
    if x.ndim > like.ndim or not fits(x.shape, like.shape):
        raise unbroadcast(op, like, x)
    if features:
        return x
    x = x.view(*[1] * (like.ndim - x.ndim), *x.shape)
    x = x.movedim(s.batch_dim, 0)
    rows, e, count = x.shape[0], s.packed_dim, s.ragged_ndim
    sizes = tuple(x.shape[e + 1 : e + 1 + count])
    total = values.shape[e]
    if rows != s.batch_size and rows != 1:  # in this order, as a graph may not know the number of rows
        raise unbroadcast(op, like, x)
    if all([n == 1 for n in sizes]):
        x = x.flatten(e + 1, e + count).select(e + 1, 0)
        return (spread(x, s, total) if rows == s.batch_size else x).movedim(0, e)
    if not is_zero(s.batch_size):
        require_longest(given, sizes, like, op)
    if known(rows == 1):
        shared = x.select(0, 0).movedim(tuple(range(e, e + count)), tuple(range(count))).flatten(0, count - 1)
        return gather_spans(shared, 0, position_in(sizes, s, total)).movedim(0, e)
    full = tuple([longest(s)[r] if n == 1 else n for r, n in enumerate(sizes)])
    x = x.movedim(tuple(range(e + 1, e + 1 + count)), tuple(range(1, count + 1)))
    x = x.expand(s.batch_size, *full, *x.shape[1 + count :])
    return pack_rows(x, s, total).movedim(0, e)


def position_in(sizes: tuple[int, ...], s: Structure, total: int) -> Tensor:
    """The position of each packed element in a rectangle that all examples share, 1 along some ragged dims, (N,)."""
    index = None
    for size, position in zip(sizes, coordinates(s, total), strict=True):
        if size != 1:
            index = position if index is None else index * size + position
    assert index is not None
    return index


def require_longest(x: Tensor, sizes: tuple[int, ...], like: NestedTensor, op: Op) -> None:
    """A ShapeError unless sizes on ragged dims are 1, those of the longest example, or the bound of the batch."""
    bound = like.structure.extent
    right = []
    for r, (column, n) in enumerate(zip(like.sizes.unbind(1), sizes, strict=True)):
        if n != 1:
            exact = (column == n).any()
            exact = exact if bound is None else exact | (column.new_full((), bound.shape[r]) == n)
            right += [exact, (column <= n).all()]
    got, hint = "another size on a ragged dim", "1, the longest length, or x.max_length, the size of x.to_padded()"
    text = str(unbroadcast(op, like, x)) if eager() else message(op, "an operand that broadcasts", got, hint=hint)
    require(torch.stack(right).all(), text, ShapeError)


def fits(shape: Sequence[int], logical: Sequence[int]) -> bool:
    """True if sizes broadcast against a logical shape, counted from the last dim; a ragged dim (-1) takes any."""
    pairs = zip(reversed(shape), reversed(logical), strict=False)
    return all([m == -1 or n == m or n == 1 or m == 1 for n, m in pairs])  # not n == -1: no trace on torch 2.11


def clash(shape: Sequence[int], rectangle: Sequence[int]) -> bool:
    """True if sizes are known not to broadcast against those of a rectangle, counted from the last dim."""
    pairs = zip(reversed(shape), reversed(rectangle), strict=False)
    return any([known(n != 1) and known(n != m) and known(m != 1) for n, m in pairs])


def unbroadcast(op: Op, like: Ragged, dense: Tensor) -> ShapeError | DtypeError:
    """The error for a dense operand that does not broadcast, or is a tensor of `torch.nested`."""
    if dense.is_nested:
        return of_torch_nested(op)
    packed = isinstance(like, NestedTensor)
    hint = "sizes must be 1 or equal, counted from the last dim" if packed else "the padded shape cannot grow"
    if like._batch_dim == 0 and dense.ndim < like.ndim and known(dense.numel() == like.batch_size[0]):
        hint = f"y.view(-1{', 1' * (like.ndim - 1)}) where y has a number for each example"
    return ShapeError(message(op, f"an operand that broadcasts against {describe(like)}", describe(dense), hint=hint))


def mixed(op: Op, a: Any, b: Any) -> UnsupportedError:
    """The error for operands of different containers."""
    got = f"{type(a).__name__} and {type(b).__name__}"
    return UnsupportedError(message(op, "operands of one kind", got, hint="convert with to_packed() or to_padded()"))


def nary_masked(op: Op) -> Op:
    """`op` on rectangles. Padding is neutral before and cut off behind where a dense operand may require grad, and
    where integers are divided."""
    divides = op in (torch.div, torch.floor_divide, torch.remainder, torch.fmod)

    def run(*args: Any, **kwargs: Any) -> MaskedBatch:
        like = widest_masked(op, args, kwargs)
        everything = (*args, *kwargs.values())
        grows = any([isinstance(a, MaskedBatch) and a.ragged_dims != like.ragged_dims for a in everything])
        exact = divides and not like.dtype.is_floating_point
        for a in everything:
            if isinstance(a, Tensor) and (a.ndim > like.ndim or clash(a.shape, like.shape)):
                raise unbroadcast(op, like, a)
        neutral = grows or exact or any([isinstance(a, Tensor) for a in everything])
        part = neutral_operand if neutral else padded_operand
        out = op(*[part(a, like, op) for a in args], **{k: part(a, like, op) for k, a in kwargs.items()})
        if part is padded_operand:
            return like.with_data(out)
        fixed = (like.batch_dim, *like.ragged_dims)
        if out.ndim != like.ndim or any([out.shape[d] != like.data.shape[d] for d in fixed]):
            raise unbroadcast(op, like, next(a for a in everything if isinstance(a, Tensor)))
        return like.with_data(out.masked_fill(~like.mask, 0))

    return run


def padded_operand(x: Any, like: MaskedBatch, op: Op) -> Any:
    """The data of an operand, which must have the lengths of `like`."""
    if isinstance(x, NestedTensor):
        raise mixed(op, like, x)
    if isinstance(x, MaskedBatch):
        if x.ragged_dims != like.ragged_dims or x.ndim != like.ndim:
            return onto_masked(x, like, op)
        return fitted_masked(op, like, x, fill=1).data  # inside the domain of every function
    return x


def neutral_operand(x: Any, like: MaskedBatch, op: Op) -> Any:
    """As `padded_operand`, with 1 in padding: inside the domain of every pointwise function.

    A dense operand of a steep function is 1 beside padding, too: 0 times an infinite derivative is NaN, and integers
    are not divided by 0. Of a power it is even where it does not vary: its logarithm is in the second derivatives.
    """
    data = padded_operand(x, like, op)
    beside = op in STEEP and isinstance(x, Tensor) and x.ndim > 0 and (op in POWERS or varies(x, like))
    return torch.where(like.mask, data, 1).to(x.dtype) if beside or isinstance(x, MaskedBatch) else data


def varies(x: Tensor, like: MaskedBatch) -> bool:
    """True if a dense operand differs between examples or positions."""
    dims = [d - like.ndim for d in (like.batch_dim, *like.ragged_dims)]
    return any([not known(x.shape[d] == 1) for d in dims if x.ndim >= -d])


def where(condition: Any, input: Any = None, other: Any = None) -> Tensor:
    """`torch.where` of three operands; of one it would be `nonzero`, of which rows have different numbers."""
    if input is None or other is None:
        hint = "torch.where(condition, x, y), or masked_select"
        raise UnsupportedError(message("where", "a condition and two values", "a condition alone", hint=hint))
    return torch.where(condition, input, other)


def sgn(x: Any) -> Tensor:
    """Of real numbers `sign`; torch's derivative of `sgn` makes a graph for each size (2.13)."""
    return torch.sgn(x) if x.dtype.is_complex else torch.sign(x)


def rrelu(x: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Tensor:
    """In evaluation the slope is the mean, for which vmap has a rule."""
    if lower > upper:
        raise ShapeError(message("rrelu", "lower <= upper", f"{lower} and {upper}", hint="the slope is between them"))
    return F.rrelu(x, lower, upper, training) if training else F.leaky_relu(x, (lower + upper) / 2)


def bucketize(x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """torch warns of values that are not contiguous."""
    return torch.bucketize(x.contiguous(), *args, **kwargs)


def beside_table(op: Op, impl: Op) -> Op:
    """A function of a batch and a tensor that all examples share."""

    def run(x: Any, table: Any, *args: Any, **kwargs: Any) -> Container:
        if not isinstance(x, Container) or isinstance(table, Container):
            got, hint = f"{describe(x)} and {describe(table)}", "loop over the examples of both: x.unbind()"
            raise DtypeError(message(op, "a batch and a tensor for all examples", got, hint=hint))
        return impl(x, table, *args, **kwargs)

    return run


def to_cuda(x: Any, device: Any = None, non_blocking: bool = False, **_: Any) -> Container:
    """All tensors of a batch on a CUDA device, its structure as well; an UnsupportedError where there is none."""
    if not torch.cuda.is_available():
        raise UnsupportedError(message("cuda", "a CUDA device", "a machine without", hint="x.to(device)"))
    target = as_device("cuda", "cuda" if device is None else device)
    return x.to(target, non_blocking=non_blocking)


def to_cpu(x: Any, **_: Any) -> Container:
    return x.to("cpu")


def to_ragged(x: Any, *args: Any, **kwargs: Any) -> Container | Tensor:
    """`x.to(other)` where one of them is a batch: dtype and device of the other."""
    if isinstance(x, Container):
        return x.to(*args, **kwargs)
    other, *rest = args
    return x.to(other.device, other.dtype, *rest, **kwargs)


def type_as(x: Any, other: Any) -> Ragged:
    return x.to(other.device, other.dtype)


POWERS = (torch.pow, torch.float_power)
STEEP = (  # with derivatives that some operands make infinite or NaN
    *POWERS, torch.div, torch.floor_divide, torch.remainder, torch.fmod, torch.addcdiv, torch.atan2, torch.hypot,
    torch.copysign, torch.ldexp, torch.logaddexp, torch.logaddexp2, torch.xlogy, torch.special.xlog1py, torch.igamma,
    torch.igammac, torch.polar,
)  # fmt: skip
UNARY: dict[Any, str] = {
    torch: """
        abs neg sign exp expm1 log log1p sqrt rsqrt square reciprocal sin cos tan tanh sigmoid erf floor ceil
        round isnan isfinite logical_not bitwise_not nan_to_num clone detach acos acosh asin asinh atan atanh
        sinh cosh deg2rad rad2deg digamma lgamma erfc erfinv exp2 log2 log10 logit trunc frac signbit positive
        i0 sinc isinf isposinf isneginf isreal angle real imag conj conj_physical resolve_conj resolve_neg
        mvlgamma relu
    """,
    F: """
        relu gelu silu leaky_relu elu softplus hardtanh logsigmoid relu6 mish selu celu softsign tanhshrink
        softshrink hardshrink threshold hardswish hardsigmoid
    """,
    torch.special: """
        entr erfcx i0e i1 i1e ndtr ndtri log_ndtr bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0
        modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 spherical_bessel_j0 scaled_modified_bessel_k0
        scaled_modified_bessel_k1 airy_ai
    """,
    torch.Tensor: """
        float double half bfloat16 int long bool contiguous short char byte cfloat cdouble chalf
    """,
}
LAID_OUT = {torch.clone, *[getattr(torch.Tensor, name) for name in UNARY[torch.Tensor].split()]}  # by a memory format
NARY: dict[Any, str] = {
    torch: """
        add sub mul div floor_divide remainder pow maximum minimum atan2 eq ne lt le gt ge logical_and
        logical_or bitwise_and bitwise_or bitwise_xor clamp lerp masked_fill fill hypot fmod fmax fmin
        copysign nextafter ldexp logaddexp logaddexp2 heaviside xlogy float_power rsub gcd lcm
        bitwise_left_shift bitwise_right_shift logical_xor isclose addcmul addcdiv clamp_min clamp_max igamma
        igammac polygamma complex polar
    """,
    torch.special: """
        xlog1py zeta chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v
        chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l
        legendre_polynomial_p shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
        shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
    """,
}

for _module, _names in UNARY.items():
    for _name in _names.split():
        unary(getattr(_module, _name))
for _op, _run in ((torch.bucketize, bucketize), (torch.isin, torch.isin)):
    _impls = [beside_table(_op, make(_run)) for make in (unary_nested, unary_masked, unary_tensordict)]
    define(_op, "pointwise", nested=_impls[0], masked=_impls[1], tensordict=_impls[2])
define(torch.frexp, "pointwise", ragged=frexp, tensordict=frexp)
unary(F.rrelu, run=rrelu)
unary(torch.sgn, run=sgn)
for _module, _names in NARY.items():
    for _name in _names.split():
        nary(getattr(_module, _name))
nary(torch.where, where)
define(torch.Tensor.cpu, "pointwise", ragged=to_cpu, tensordict=to_cpu)
define(torch.Tensor.to, "pointwise", ragged=to_ragged)
run_type_as = nary_tensordict(torch.Tensor.type_as, on_leaves(torch.Tensor.type_as))
define(torch.Tensor.type_as, "pointwise", ragged=type_as, tensordict=run_type_as)
on_cuda = MODES if torch.cuda.is_available() else ()
define(torch.Tensor.cuda, "pointwise", ragged=to_cuda, tensordict=to_cuda, modes=on_cuda)
for _cls in (NestedTensor, MaskedBatch):  # attributes of a Tensor, not methods
    for _op, _part in ((torch.real, "real"), (torch.imag, "imag")):
        setattr(_cls, _part, property(_op, doc=f"The {_part} part of all elements."))
note_syncs("all elements", torch.Tensor.cpu)
