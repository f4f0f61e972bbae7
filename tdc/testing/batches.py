"""Batches as lists of examples, which conformance tests draw, build and compare, for every container:

    Ragged(rows, dims)      dense examples that differ in size along `dims`     -> NestedTensor or MaskedBatch
    Dense(tensor, rows)     a dense operand, and what each example sees of it   -> tensor
    Dict(leaves, size)      leaves that share leading dims                      -> TensorDict

`build` makes the containers and `unbuild` takes results apart, both with plain tensor code instead of the library's.
All padding, and the gradient that flows into it, holds NaN (a large number, True).

    B batch, L longest row, D features; dims of a `Ragged` are logical (the batch is among them), those of its rows not
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core import pytree
from tdc.core.dynamo import mark_dynamic
from tdc.core.rules import CLASS_NAMES
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import R
from tdc.tensordict.tensordict import TensorDict

Pairs = list[tuple[str, Tensor, Tensor]]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float64: 1e-9, torch.complex128: 1e-9}  # else 3e-5


@dataclass(frozen=True, eq=False)
class Ragged:
    """Examples that differ in size along the logical dims `dims`.

    Attributes:
        rows: the examples.
        dims: None for an expected result of any layout.
        batch_dim: batch dim of the container.
        like: the batch whose structure object this one shares.
        kind: the container, "nested" or "masked", if not the requested one.
        extent: True if a NestedTensor knows a bound of its lengths.
        slack: number of columns of a MaskedBatch after its longest row.
    """

    rows: list[Tensor]
    dims: tuple[int, ...] | None = (1,)
    batch_dim: int = 0
    like: Ragged | None = None
    kind: str = ""
    extent: bool = True
    slack: int = 0

    def row_dims(self) -> tuple[int, ...]:
        """The ragged dims of one row."""
        return tuple([d - (d > self.batch_dim) for d in self.dims or ()])

    def sizes(self) -> Tensor:
        """The ragged sizes of all rows, `(B, R)`."""
        return torch.tensor([[row.shape[d] for d in self.row_dims()] for row in self.rows], device=self.rows[0].device)

    def with_rows(self, rows: list[Tensor]) -> Ragged:
        """The same layout with other rows."""
        return Ragged(rows, self.dims, self.batch_dim)


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense operand, its part for each example, and the dims that vary with the batch."""

    tensor: Tensor
    rows: list[Tensor]
    follows: tuple[int, ...] = (0,)


@dataclass(frozen=True, eq=False)
class Dict:
    """Leaves by key, and their batch size."""

    leaves: dict[Any, Any]
    size: tuple[int, ...]


def examples(tree: Any) -> list[Any]:
    """The arguments of each example, one after another."""
    parts = [x for x in pytree.tree_leaves(tree) if isinstance(x, (Ragged, Dense))]

    def at(i: int) -> Any:
        return pytree.tree_map(lambda x: x.rows[i] if isinstance(x, (Ragged, Dense)) else x, tree)

    return [at(i) for i in range(len(parts[0].rows))]


def loop(ref: Any, args: Any, kwargs: Any) -> list[Any]:
    """The operation on one example after another."""
    return [ref(*a, **k) for a, k in examples((args, kwargs))]


# -- containers of examples


def build(tree: Any, kind: str, cut: Callable[[Tensor], Tensor], device: str = "cpu") -> Any:
    """Make containers and tensors on a device of each `Ragged`, `Dense` and `Dict`; their data passes through `cut`."""
    made: dict[int, Any] = {}

    def container(x: Ragged) -> NestedTensor | MaskedBatch:
        masked = (x.kind or kind) == "masked"
        there = replace(x, rows=[row.to(device) for row in x.rows])
        y: Any = build_masked(there) if masked else build_nested(there)
        structured = y if x.like is None else made[id(x.like)]
        return structured.with_data(cut(y.data)) if masked else structured.with_values(cut(y.values))

    def one(x: Any) -> Any:
        if isinstance(x, Ragged):
            if id(x) not in made:
                made[id(x)] = container(x)
            return made[id(x)]
        if isinstance(x, Dict):
            return TensorDict({key: one(leaf) for key, leaf in x.leaves.items()}, x.size)
        if isinstance(x, Dense):
            tensor = cut(x.tensor.to(device))
            for dim in x.follows:
                mark_dynamic(tensor, dim)  # as containers mark their own
            return tensor
        return cut(x.to(device)) if isinstance(x, Tensor) else x

    return pytree.tree_map(one, tree)


def build_nested(x: Ragged) -> NestedTensor:
    """Rows one after another."""
    dims, sizes = x.row_dims(), x.sizes()
    first, last = dims[0], dims[-1]
    values = torch.cat([row.flatten(first, last) for row in x.rows], first)
    offsets = torch.cat([sizes.new_zeros(1), sizes.prod(1).cumsum(0)])
    longest = tuple(sizes.amax(0).tolist()) if x.extent else None
    shapes = sizes if last > first else None
    return moved(NestedTensor(values, offsets, ragged_dim=first + 1, shapes=shapes, max_length=longest), x.batch_dim)


def build_masked(x: Ragged) -> MaskedBatch:
    """Rows in a rectangle with poisoned padding."""
    dims, sizes = x.row_dims(), x.sizes()
    longest = (sizes.amax(0) + x.slack).tolist()
    data = torch.stack([grown(row, dims, longest) for row in x.rows])
    return moved(MaskedBatch(data, sizes, ragged_dims=tuple([d + 1 for d in dims])), x.batch_dim)


def grown(row: Tensor, dims: tuple[int, ...], sizes: list[int]) -> Tensor:
    """A row padded to `sizes` with poison."""
    pad = [0] * (2 * row.ndim)
    for d, size in zip(dims, sizes, strict=True):
        pad[2 * (row.ndim - 1 - d) + 1] = size - row.shape[d]
    if row.dtype == torch.bool:
        return F.pad(row, pad, value=True)
    real = row.dtype.is_floating_point or row.dtype.is_complex
    return F.pad(row, pad, value=float("nan") if real else min(77777, torch.iinfo(row.dtype).max))


def moved(x: R, batch_dim: int) -> R:
    """A batch with its batch dim elsewhere."""
    order = list(range(1, x.ndim))
    order.insert(batch_dim, 0)
    return x if batch_dim == 0 else x.permute(order)


def crop(row: Tensor, dims: Any, sizes: Any) -> Tensor:
    """The first `sizes` of some dims."""
    for dim, size in zip(dims, sizes, strict=True):
        row = row.narrow(dim, 0, size)
    return row


class Poison(torch.autograd.Function):
    """The same data; the gradient of its padding is NaN, so that a rule that uses it is found."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return grads[0].masked_fill(~ctx.saved_tensors[0], float("nan")), None

    @staticmethod
    def jvp(ctx: Any, *moves: Any) -> Tensor:
        return moves[0].view_as(moves[0])


def unbuild(x: Any) -> Any:
    """A result as `Ragged`, `Dict` or dense tensors."""
    if isinstance(x, NestedTensor):
        s, e = x.structure, x.structure.packed_dim
        sizes = (s.offsets.diff()[:, None] if s.shapes is None else s.shapes).tolist()
        assert s.offsets[0] == 0, "offsets begin with 0"
        assert s.offsets[-1] == x.values.shape[e], "offsets end with the packed total"
        pieces = x.values.split([torch.Size(z).numel() for z in sizes], e)
        rows = [piece.unflatten(e, z) for piece, z in zip(pieces, sizes, strict=True)]
        if s.extent is not None and sizes:
            longest = [max(column) for column in zip(*sizes, strict=True)]
            assert all(a <= b for a, b in zip(longest, s.extent.shape, strict=False)), "extent below the longest row"
        return Ragged(rows, s.ragged_dims, s.batch_dim, kind="nested")
    if isinstance(x, MaskedBatch):
        dims = tuple([d - (d > x.batch_dim) for d in x.ragged_dims])
        mask = torch.zeros(x.data.shape, dtype=torch.bool, device=x.data.device).movedim(x.batch_dim, 0)
        for row, sizes in zip(mask.unbind(), x.lengths.tolist(), strict=True):
            crop(row, dims, sizes).fill_(True)
        data = Poison.apply(x.data, mask.movedim(0, x.batch_dim)) if x.data.requires_grad else x.data
        rows = [crop(row, dims, n) for row, n in zip(data.unbind(x.batch_dim), x.lengths.tolist(), strict=True)]
        return Ragged(rows, x.ragged_dims, x.batch_dim, kind="masked")
    if isinstance(x, TensorDict):
        return Dict({key: unbuild(leaf) for key, leaf in x.items(True, True)}, tuple(x.batch_size))
    if isinstance(x, (tuple, list)):
        return (list if isinstance(x, list) else tuple)([unbuild(y) for y in x])  # also the named tuples of torch
    return x


def tensors(x: Any) -> list[Tensor]:
    """All tensors of a result of `unbuild`, in order."""
    if isinstance(x, Ragged):
        return x.rows
    parts = x.leaves.values() if isinstance(x, Dict) else x if isinstance(x, (tuple, list)) else None
    return [t for part in parts for t in tensors(part)] if parts is not None else [x] if isinstance(x, Tensor) else []


# -- comparison


def matched(got: Any, want: Any, kind: str, at: str = "") -> tuple[list[str], Pairs]:
    """Differences in form of a result of `unbuild` from the expected one, and pairs of tensors that must be equal."""
    pairs: Pairs = []
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(want, Ragged) and want.dims is None and isinstance(got, Tensor) and got.ndim:
        got = Ragged(list(got.unbind()), kind=kind)
    if isinstance(want, Ragged) and isinstance(got, Ragged):
        facts = {"container": (got.kind, want.kind or kind), "batch size": (len(got.rows), len(want.rows))}
        if want.dims is not None:
            facts |= {"ragged dims": (got.dims, want.dims), "batch dim": (got.batch_dim, want.batch_dim)}
        parts = [(f"example {i}: ", a, b) for i, (a, b) in enumerate(zip(got.rows, want.rows, strict=False))]
    elif isinstance(want, Dict) and isinstance(got, Dict):
        facts = {"batch size": (got.size, want.size), "keys": (list(got.leaves), list(want.leaves))}
        parts = [(f"{key}: ", got.leaves[key], leaf) for key, leaf in want.leaves.items() if key in got.leaves]
    elif (isinstance(want, tuple) and isinstance(got, tuple)) or (isinstance(want, list) and isinstance(got, list)):
        facts = {"results": (len(got), len(want))}
        parts = [(f"result {i}: ", a, b) for i, (a, b) in enumerate(zip(got, want, strict=False))]
    elif isinstance(want, Tensor) and isinstance(got, Tensor):
        facts = {"shape": (tuple(got.shape), tuple(want.shape)), "dtype": (got.dtype, want.dtype)}
        pairs = [(at, got, want)] if got.shape == want.shape else []
    elif type(got) is type(want):
        facts = {} if got == want else {"value": (repr(got), repr(want))}
    else:
        facts = {"type": (type_name(got, kind), type_name(want, kind))}
    wrong = [f"{at}{name} {a}, expected {b}" for name, (a, b) in facts.items() if a != b]
    for name, a, b in parts:
        more, below = matched(a, b, kind, f"{at}{name}")
        wrong, pairs = wrong + more, pairs + below
    return wrong, pairs


def type_name(x: Any, kind: str) -> str:
    """Name of the class of a result of `unbuild`."""
    if isinstance(x, Ragged):
        return CLASS_NAMES[x.kind or kind]
    return "TensorDict" if isinstance(x, Dict) else type(x).__name__


def differences(got: Any, want: Any, kind: str) -> list[str]:
    """All differences of a result of `unbuild` from that of the loop over examples."""
    wrong, pairs = matched(got, want, kind)
    return wrong + unequal(pairs)


def unequal(pairs: Pairs) -> list[str]:
    """Pairs that differ, and by how much."""
    return [f"{at}values differ{by_how_much(a, b)}" for at, a, b in pairs if not is_close(a, b)]


def is_close(a: Tensor, b: Tensor) -> bool:
    """True for equal values up to the order of summation; NaN equals NaN."""
    a, tolerance = a.to(b.dtype), TOLERANCE.get(b.dtype, 3e-5)
    same = b.is_floating_point() and torch.equal(a, b)  # a tenth of the time; torch has none for all complex dtypes
    return same or torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def by_how_much(a: Tensor, b: Tensor) -> str:
    """Size of the difference of two tensors."""
    a, b = [t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b)]
    wrong = int((a.isnan() & ~b.isnan()).sum())
    gap = (a - b).abs().nan_to_num(0.0, posinf=float("inf")).amax().item() if a.numel() else 0.0
    return f": {wrong} NaN" if wrong else f" by up to {gap:.2g}"


# -- gradients


class Cut:
    """Detach the data of containers from the drawn tensors, so that they are leaves like a batch of a loader."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        return self.pairs.setdefault(id(x), (x.detach().requires_grad_(), x))[0] if x.requires_grad else x

    @property
    def inner(self) -> list[Tensor]:
        """The new leaves."""
        return [leaf for leaf, _ in self.pairs.values()]

    def back(self, grads: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
        """Propagate gradients of the new leaves to the drawn tensors."""
        return gradients([x for _, x in self.pairs.values()], grads, leaves, retain=True)


def gradients(
    outputs: list[Tensor], cotangents: list[Tensor], leaves: list[Tensor], retain: bool = False
) -> list[Tensor]:
    """Gradients of the leaves, zeros for unused ones."""
    pairs = [(t, c) for t, c in zip(outputs, cotangents, strict=True) if t.requires_grad]
    if not pairs or not leaves:
        return [torch.zeros_like(x) for x in leaves]
    outs, seeds = [t for t, _ in pairs], [c for _, c in pairs]
    found = torch.autograd.grad(outs, leaves, seeds, retain_graph=retain, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
