"""Shared(tensor): a leaf of a TensorDict without batch dims. All examples share the tensor: edges of a graph, a weight.

    td = TensorDict({"x": nodes, "edges": Shared(edges)}, [n])      td["edges"] is edges
    td[:3], td.sum(0), td * 2, torch.stack([td, td])                act on x; the edges stay
    td.to(device), td.detach(), td.half(), tdc.grad(loss)(td)       act on the edges, too

Inside of a TensorDict a Shared has the shape of an empty row, `(*batch_size, 0)`. An operation runs on an empty tensor
of that shape, whose result says the batch dims of the result; only the operations of `OF_TENSOR` run on the tensor.

Invariants: operations on batch dims never touch the tensor; where several meet, they are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from tdc.core.dynamo import has_numbers, is_batched, never, trace_as
from tdc.core.errors import DtypeError, StructureError, describe, message, op_name
from tdc.core.typing import Op, OpName
from tdc.tensordict.leaf import CASTS, Leaf, flat, unwrap
from tdc.tensordict.nodes import Nodes, any_extra

OF_TENSOR = {
    "to", "cpu", "cuda", "clone", "detach", "contiguous", "requires_grad_", "retain_grad", "is_shared", "is_pinned",
    "type", "type_as", *CASTS,
}  # fmt: skip
WRITES = {  # whose result has the batch dims of the first operand, and whose other operands have its dtype
    "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill", "index_put", "masked_fill",
    "masked_scatter",
}  # fmt: skip
NEVER_EMPTY = {"std", "var", "std_mean", "var_mean", "quantile", "nanquantile"}  # refuse no elements, or warn of them
DTYPES: dict[str, torch.dtype] = {  # of the empty rows, where an operation does not take floats
    "where": torch.bool, "imag": torch.complex64, "bitwise_and": torch.int64, "bitwise_or": torch.int64,
    "bitwise_xor": torch.int64, "bitwise_not": torch.int64, "bitwise_left_shift": torch.int64,
    "bitwise_right_shift": torch.int64, "gcd": torch.int64, "lcm": torch.int64,
}  # fmt: skip


@final
class Shared(Leaf):
    """One tensor for a whole TensorDict, not one for each example: the edges of a graph, a weight, a codebook.

    `td[key]` is the tensor. It moves, is cast, detached, copied and differentiated with the TensorDict, and is a child
    of its pytree. Indices, shape operations, reductions and arithmetic leave it as it is. For a Python object see
    `Static`.

    Shapes:
        any; batch dims are not among its dims.

    Dtypes:
        any.

    Args:
        value: a tensor.

    Raises:
        DtypeError: the value is no tensor.
        StructureError: TensorDicts that meet, as in `torch.stack`, with different tensors there.

    Compile:
        fullgraph; one graph for all batch sizes. A graph cannot compare values: TensorDicts that meet there hold one
        and the same tensor.

    Example:
        >>> from tdc.tensordict.tensordict import TensorDict
        >>> edges = torch.tensor([[0, 1], [1, 2]])
        >>> td = TensorDict({"x": torch.zeros(3, 4), "edges": Shared(edges)}, [3])
        >>> td[:2]["edges"] is edges, torch.stack([td, td])["edges"] is edges
        (True, True)
    """

    __slots__ = ("_shape",)
    _shape: torch.Size

    def __init__(self, value: Any) -> None:
        if not isinstance(value, Tensor):
            hint = "torch.as_tensor(x); td.apply(Shared) of a TensorDict; Static(x) for a Python object"
            raise DtypeError(message("Shared", "a tensor", describe(value), hint=hint))
        self._value, self._shape = value, torch.Size((0,))

    @property
    def value(self) -> Tensor:
        """The tensor."""
        return self._value  # type: ignore[no-any-return]  # of any leaf it may be anything

    @property
    def _label(self) -> str:
        return "Shared"

    @property
    def _shown(self) -> Tensor:
        return self.value

    @property
    def shape(self) -> torch.Size:
        """The batch dims of the TensorDict that holds it, and 0."""
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        """That of an empty row."""
        return torch.float32

    def _mark(self, k: int) -> tuple[int, ...]:
        """Its entry in the pytree context of a TensorDict of k batch dims."""
        return (self._value.ndim, *self._shape[k:-1])

    def __repr__(self) -> str:
        return describe(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return build_shared, (self._value, tuple(self._shape))

    def __getitem__(self, index: Any) -> Any:
        return run(Tensor.__getitem__, "getitem", (self, index), {})

    def _run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return run(getattr(Tensor, name), name, args, kwargs)

    @classmethod
    def __torch_function__(cls, func: Op, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return run(func, op_name(func), args, kwargs or {})


def build_shared(value: Any, shape: Sequence[int]) -> Shared:
    """A Shared as it lies in a TensorDict: the shape is the batch size, and 0."""
    out: Shared = object.__new__(Shared)
    out._value, out._shape = value, torch.Size(shape)
    return out


def over(leaf: Any, size: Sequence[int]) -> Any:
    """A leaf for a TensorDict of this batch size: a Shared takes it, any other leaf stays as it is."""
    return build_shared(leaf._value, (*size, 0)) if type(leaf) is Shared else leaf


def seated(leaves: dict[Any, Any], nodes: Nodes, size: Sequence[int]) -> dict[Any, Any]:
    """Leaves `over` a batch size; as they are where some node has more batch dims."""
    some = any([type(x) is Shared for x in leaves.values()])
    return {p: over(x, size) for p, x in leaves.items()} if some and not any_extra(nodes) else leaves


def like(leaf: Any, value: Any) -> Any:
    """A value in place of that of a leaf: a tensor in place of that of a Shared is shared, too."""
    return build_shared(value, leaf._shape) if type(leaf) is Shared and isinstance(value, Tensor) else value


def without_shared(leaves: dict[Any, Any]) -> dict[Any, Any]:
    """The leaves that are rows."""
    return {p: x for p, x in leaves.items() if type(x) is not Shared}


def run(func: Op, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of tensors, of which some are Shared."""
    given = flat((*args, *kwargs.values()))
    found = [x for x in given if type(x) is Shared]
    first = found[0]
    if name in OF_TENSOR:
        return like(first, func(*each(unwrap, args), **{k: unwrap(v) for k, v in kwargs.items()}))
    check_equal(name, found)
    if name in ("stack", "cat"):
        check_all(name, found, len(args[0]))
    if name in WRITES:
        return first
    others = [x for x in given if isinstance(x, Tensor)]
    device = others[0].device if others else first._value.device
    dtype, width = DTYPES.get(name, torch.float32), int(name in NEVER_EMPTY)

    def row(x: Any) -> Any:
        if type(x) is not Shared:
            return x
        return torch.empty((*x.shape[:-1], 1) if width else x.shape, dtype=dtype, device=device)

    return rewrapped(first, width, func(*each(row, args), **{k: row(v) for k, v in kwargs.items()}))


def each(fn: Callable[[Any], Any], args: Sequence[Any]) -> list[Any]:
    """A function of arguments, and of the members of lists and tuples among them."""
    return [type(a)([fn(x) for x in a]) if type(a) in (list, tuple) else fn(a) for a in args]


def rewrapped(first: Shared, width: int, out: Any) -> Any:
    """The results of an operation on rows of a width: Shared ones over the batch dims that these have."""
    parts: Any = out
    if isinstance(out, Tensor):
        return build_shared(first._value, (*out.shape[:-1], 0) if width or not out.ndim else out.shape)
    if isinstance(out, (tuple, list)) and not isinstance(out, torch.Size):
        made = [rewrapped(first, width, x) for x in parts]
        return type(parts)(made)
    return out


def check_equal(op: OpName, found: Sequence[Shared]) -> None:
    """Check that all hold one tensor, or equal ones where values can be compared."""
    first = found[0]._value
    wrong = [describe(x) for x in found[1:] if x._value is not first and not equal(x._value, first)]
    if wrong:
        hint = "td.set(key, Shared(tensor)) with one tensor for all; a graph does not compare values"
        got = f"{wrong[0]} beside {describe(found[0])}, another one"
        raise StructureError(message(op, "one Shared tensor for all TensorDicts", got, hint=hint))


def check_pair(op: OpName, x: Any, y: Any) -> None:
    """Check a Shared that meets another leaf: it is one of an equal tensor."""
    found = [leaf for leaf in (x, y) if type(leaf) is Shared]
    check_all(op, found, 2)
    check_equal(op, found)


def check_all(op: OpName, found: Sequence[Shared], count: int) -> None:
    """Check that there are as many Shared as leaves."""
    if len(found) < count:
        hint = "td.set(key, Shared(tensor)) in all of them"
        raise StructureError(message(op, "a Shared in all TensorDicts", f"rows beside {describe(found[0])}", hint=hint))


def check_shared(x: Any, ndim: int) -> None:
    """Check that no `torch.vmap` took a dim from the tensor of a Shared, which had `ndim` dims."""
    if is_batched(x) and x.ndim == ndim - 1:
        hint = "tdc.vmap(fn), or None for it in in_dims"
        raise StructureError(message("vmap", "a Shared that is not mapped", "one of the examples of it", hint=hint))


def equal(x: Tensor, y: Tensor) -> bool:
    """True if two tensors are known to have equal values; NaN equals NaN."""
    alike = x.shape == y.shape and x.dtype == y.dtype and x.device == y.device and x.layout == y.layout
    if not alike or not has_numbers(x, y):
        return False
    x, y = (x, y) if x.layout == torch.strided else (x.to_dense(), y.to_dense())
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


trace_as(equal, never)
torch.serialization.add_safe_globals([build_shared])  # pyright: ignore[reportUnknownMemberType]  # torch's stub; pickles name it
