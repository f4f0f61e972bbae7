"""Batches before they are packed or padded: what the conformance matrix draws, builds and compares.

A sample is written once, example by example, and serves every container:

    Ragged(rows, dims)      dense examples that differ in size along `dims`     -> NestedTensor or MaskedBatch
    Dense(whole, rows)      a dense operand, and what each example sees of it   -> whole
    Dict(leaves, size)      leaves that share leading dims                      -> TensorDict

`build` makes the containers with plain tensor code, `unbuild` takes results apart again in the same way, so that
neither trusts the library. All padding holds NaN (a large number, True), and so does the gradient that flows into it.

    B batch, L longest row, D features; dims of a `Ragged` are logical (the batch is among them), those of its rows not
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from tdc import MaskedBatch, NestedTensor, TensorDict
from tdc.core.dynamo import mark_dynamic


@dataclass(frozen=True, eq=False)
class Ragged:
    """Examples that differ in size along the logical dims `dims`; `like` lends its structure, `kind` its container."""

    rows: list[Tensor]
    dims: tuple[int, ...] = (1,)
    batch_dim: int = 0
    like: Ragged | None = None
    kind: str = ""
    extent: bool = True
    slack: int = 0

    def row_dims(self) -> tuple[int, ...]:
        """The ragged dims of one row."""
        return tuple(d - (d > self.batch_dim) for d in self.dims)

    def with_rows(self, rows: list[Tensor]) -> Ragged:
        """The same layout with other rows."""
        return Ragged(rows, self.dims, self.batch_dim)


@dataclass(frozen=True, eq=False)
class Dense:
    """A dense operand, for each example the part that meets it, and the dims whose sizes follow the batch."""

    whole: Tensor
    rows: list[Tensor]
    follows: tuple[int, ...] = (0,)


@dataclass(frozen=True, eq=False)
class Dict:
    """Leaves by key, and the batch size they share."""

    leaves: dict[Any, Any]
    size: tuple[int, ...]


class Layout(NamedTuple):
    """Static dims of a row before and behind its ragged ones."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    ragged: int = 1

    @property
    def dims(self) -> tuple[int, ...]:
        first = len(self.before) + 1
        return tuple(range(first, first + self.ragged))


LAYOUTS = {
    "features": Layout((), (3,)),
    "flat": Layout((), ()),
    "second": Layout((2,), (3,)),
    "last": Layout((2,), ()),
    "two": Layout((), (2,), 2),
}

Domain = Callable[[tuple[int, ...], torch.Generator], Tensor]
DOMAINS: dict[str, Domain] = {
    "real": lambda shape, g: torch.randn(shape, generator=g),
    "positive": lambda shape, g: torch.rand(shape, generator=g) + 0.5,
    "unit": lambda shape, g: torch.rand(shape, generator=g) * 0.8 + 0.1,
    "whole": lambda shape, g: torch.randint(-2, 3, shape, generator=g).float(),
    "int": lambda shape, g: torch.randint(-4, 5, shape, generator=g),
    "natural": lambda shape, g: torch.randint(1, 5, shape, generator=g),
    "class": lambda shape, g: torch.randint(0, 4, shape, generator=g),
    "bool": lambda shape, g: torch.rand(shape, generator=g) < 0.5,
    "special": lambda shape, g: torch.tensor([0.5, float("nan"), float("inf")])[
        torch.randint(0, 3, shape, generator=g)
    ],
    "half": lambda shape, g: torch.randn(shape, generator=g).bfloat16(),
    "above one": lambda shape, g: torch.rand(shape, generator=g) + 1.5,
    "constant": lambda shape, g: torch.rand(shape, generator=g) + 0.5,
    "large": lambda shape, g: torch.rand(shape, generator=g) + 1.5,
    "bit": lambda shape, g: torch.randint(0, 2, shape, generator=g),
    "coin": lambda shape, g: torch.randint(0, 2, shape, generator=g).float(),
    "complex": lambda shape, g: torch.randn(shape, dtype=torch.complex64, generator=g),
}
FIXED = ("constant", "coin", "large")  # torch has no derivative there


@dataclass(eq=False)
class Draw:
    """Draws the operands of one call for rows of the given lengths; `leaves` are the tensors to differentiate."""

    kind: str
    lengths: tuple[int, ...]
    seed: int = 0
    grad: bool = False
    leaves: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.slack = 2 if self.kind == "masked" else 0

    def tensor(self, *shape: int, domain: str = "real") -> Tensor:
        x = DOMAINS[domain](shape, self.generator)
        if self.grad and x.is_floating_point() and domain not in FIXED:
            self.leaves.append(x.requires_grad_())
        return x

    def sizes(self, layout: Layout, lengths: tuple[int, ...] | None = None) -> list[tuple[int, ...]]:
        """Ragged sizes of each row."""
        first = self.lengths if lengths is None else lengths
        second = [n % 3 + 1 for n in reversed(first)]
        return [pair[: layout.ragged] for pair in zip(first, second, strict=True)]

    def ragged(
        self, layout: str | Layout = "features", domain: str = "real", like: Ragged | None = None, batch_dim: int = 0,
        lengths: tuple[int, ...] | None = None, extent: bool = True,
    ) -> Ragged:  # fmt: skip
        """A ragged batch; with `like` its structure is that very object, else only equal by value."""
        shape = LAYOUTS[layout] if isinstance(layout, str) else layout
        rows = [self.tensor(*shape.before, *n, *shape.after, domain=domain) for n in self.sizes(shape, lengths)]
        dims = tuple(d - (d <= batch_dim) for d in shape.dims)
        return Ragged(rows, dims, batch_dim, like, extent=extent, slack=self.slack)

    def dense(self, layout: str, form: str, domain: str = "real") -> Any:
        """A dense operand for a batch of a layout: a number, or a tensor over features, rows or everything."""
        shape = LAYOUTS[layout]
        sizes = self.sizes(shape)
        if form == "scalar":
            return self.tensor(domain=domain)
        if form == "features":
            return self.tensor(*shape.after, domain=domain)
        if form == "rows":
            ones = [1] * shape.ragged
            whole = self.tensor(len(sizes), *shape.before, *ones, *shape.after, domain=domain)
            return Dense(whole, list(whole.unbind()), (0,))
        longest = [max(column) + self.slack for column in zip(*sizes, strict=True)]
        whole = self.tensor(len(sizes), *shape.before, *longest, *shape.after, domain=domain)
        rows = [crop(x, [d - 1 for d in shape.dims], n) for x, n in zip(whole, sizes, strict=True)]
        return Dense(whole, rows, (0, *shape.dims))


def crop(row: Tensor, dims: Any, sizes: Any) -> Tensor:
    """The first `sizes` of some dims."""
    for dim, size in zip(dims, sizes, strict=True):
        row = row.narrow(dim, 0, size)
    return row


def build(tree: Any, kind: str, cut: Callable[[Tensor], Tensor]) -> Any:
    """Containers and tensors in place of `Ragged`, `Dense` and `Dict`; their data passes through `cut`."""
    made: dict[int, Any] = {}

    def container(x: Ragged) -> Any:
        if (x.kind or kind) == "masked":
            y = build_masked(x)
            return (y if x.like is None else made[id(x.like)]).with_data(cut(y.data))
        y = build_nested(x)
        return (y if x.like is None else made[id(x.like)]).with_values(cut(y.values))

    def one(x: Any) -> Any:
        if isinstance(x, Ragged):
            if id(x) not in made:
                made[id(x)] = container(x)
            return made[id(x)]
        if isinstance(x, Dict):
            return TensorDict({key: one(leaf) for key, leaf in x.leaves.items()}, x.size)
        return dynamic(cut(x.whole), x.follows) if isinstance(x, Dense) else cut(x) if isinstance(x, Tensor) else x

    return pytree.tree_map(one, tree)


class Cut:
    """Makes leaves of autograd of data that was made of drawn tensors, as a batch from a loader is one."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        return self.pairs.setdefault(id(x), (x.detach().requires_grad_(), x))[0] if x.requires_grad else x

    @property
    def inner(self) -> list[Tensor]:
        """The new leaves."""
        return [leaf for leaf, _ in self.pairs.values()]

    def back(self, grads: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
        """Gradients of the new leaves, taken on to the drawn tensors."""
        return gradients([x for _, x in self.pairs.values()], grads, leaves, retain=True)


def gradients(
    outputs: list[Tensor], cotangents: list[Tensor], leaves: list[Tensor], retain: bool = False
) -> list[Tensor]:
    """Gradients of the leaves, zeros where none arrives."""
    pairs = [(t, c) for t, c in zip(outputs, cotangents, strict=True) if t.requires_grad]
    if not pairs or not leaves:
        return [torch.zeros_like(x) for x in leaves]
    outs, seeds = [t for t, _ in pairs], [c for _, c in pairs]
    found = torch.autograd.grad(outs, leaves, seeds, retain_graph=retain, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def dynamic(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """A dense operand whose sizes follow the batch says so, as our containers do."""
    for dim in dims:
        mark_dynamic(x, dim)
    return x


def build_nested(x: Ragged) -> NestedTensor:
    """Rows one after another."""
    dims, count = x.row_dims(), len(x.dims)
    sizes = torch.tensor([[row.shape[d] for d in dims] for row in x.rows])
    values = torch.cat([row.flatten(dims[0], dims[-1]) for row in x.rows], dims[0])
    offsets = torch.cat([sizes.new_zeros(1), sizes.prod(1).cumsum(0)])
    longest = tuple(sizes.amax(0).tolist()) if x.extent else None
    shapes = sizes if count > 1 else None
    out = NestedTensor(values, offsets, ragged_dim=dims[0] + 1, shapes=shapes, max_length=longest)
    return moved(out, x.batch_dim)


def build_masked(x: Ragged) -> MaskedBatch:
    """Rows in a rectangle larger than the longest, its padding poisoned."""
    dims = x.row_dims()
    sizes = torch.tensor([[row.shape[d] for d in dims] for row in x.rows])
    longest = (sizes.amax(0) + x.slack).tolist()
    data = torch.stack([padded(row, dims, longest) for row in x.rows])
    return moved(MaskedBatch(data, sizes, ragged_dims=tuple(d + 1 for d in dims)), x.batch_dim)


def padded(row: Tensor, dims: tuple[int, ...], sizes: list[int]) -> Tensor:
    """A row grown to `sizes` with what must never be read."""
    pad = [0] * (2 * row.ndim)
    for d, size in zip(dims, sizes, strict=True):
        pad[2 * (row.ndim - 1 - d) + 1] = size - row.shape[d]
    poison = True if row.dtype == torch.bool else float("nan") if row.is_floating_point() else 77777
    return F.pad(row, pad, value=poison)


def moved(x: Any, batch_dim: int) -> Any:
    """A batch with its batch dim elsewhere."""
    order = list(range(1, x.ndim))
    order.insert(batch_dim, 0)
    return x if batch_dim == 0 else x.permute(order)


class Poison(torch.autograd.Function):
    """The same data; the gradient of its padding is NaN, so that a rule that passes it on is seen."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].masked_fill(~ctx.saved_tensors[0], float("nan")), None


def unbuild(x: Any) -> Any:
    """A result as `Ragged`, `Dict` or dense tensors, taken apart by its fields."""
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
        dims = tuple(d - (d > x.batch_dim) for d in x.ragged_dims)
        mask = torch.zeros(x.data.shape, dtype=torch.bool).movedim(x.batch_dim, 0)
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
    """All tensors of what `unbuild` returns, in order."""
    if isinstance(x, Ragged):
        return x.rows
    parts = x.leaves.values() if isinstance(x, Dict) else x if isinstance(x, (tuple, list)) else None
    return [t for part in parts for t in tensors(part)] if parts is not None else [x] if isinstance(x, Tensor) else []


def differences(got: Any, want: Any, kind: str, at: str = "") -> list[str]:
    """Every way in which a result (as `unbuild` gives it) is not what the loop over examples says."""
    if isinstance(want, Ragged) and isinstance(got, Ragged):
        facts = {
            "container": (got.kind, want.kind or kind), "ragged dims": (got.dims, want.dims),
            "batch dim": (got.batch_dim, want.batch_dim), "batch size": (len(got.rows), len(want.rows)),
        }  # fmt: skip
        pairs = zip(got.rows, want.rows, strict=False)
        below = [p for i, (a, b) in enumerate(pairs) for p in differences(a, b, kind, f"{at}row {i}: ")]
    elif isinstance(want, Dict) and isinstance(got, Dict):
        facts = {"batch size": (got.size, want.size), "keys": (list(got.leaves), list(want.leaves))}
        shared = [key for key in want.leaves if key in got.leaves]
        below = [p for key in shared for p in differences(got.leaves[key], want.leaves[key], kind, f"{at}{key}: ")]
    elif isinstance(want, (tuple, list)) and isinstance(got, (tuple, list)):
        facts = {"results": (len(got), len(want))}
        pairs = zip(got, want, strict=False)
        below = [p for i, (a, b) in enumerate(pairs) for p in differences(a, b, kind, f"{at}result {i}: ")]
    elif isinstance(want, Tensor) and isinstance(got, Tensor):
        facts = {"shape": (tuple(got.shape), tuple(want.shape)), "dtype": (got.dtype, want.dtype)}
        below = (
            [] if tuple(got.shape) != tuple(want.shape) or close(got, want) else [f"{at}values differ{by(got, want)}"]
        )
    else:
        facts, below = {"type": (type(got).__name__, type(want).__name__)}, []
        below = [] if isinstance(want, (Ragged, Dict, Tensor)) or got == want else [f"{at}{got!r}, expected {want!r}"]
    return [f"{at}{name} {a}, expected {b}" for name, (a, b) in facts.items() if a != b] + below


def tolerance(dtype: torch.dtype) -> float:
    """Relative and absolute tolerance for another order of summation."""
    return {torch.bfloat16: 2e-2, torch.float16: 5e-3, torch.float64: 1e-9}.get(dtype, 3e-5)


def close(a: Tensor, b: Tensor) -> bool:
    """Equal up to rounding; NaN equals NaN."""
    tol = tolerance(b.dtype)
    return torch.allclose(a.to(b.dtype), b, rtol=tol, atol=tol, equal_nan=True)


def by(a: Tensor, b: Tensor) -> str:
    """By how much two tensors differ."""
    a, b = a.detach().double(), b.detach().double()
    wrong = int((a.isnan() & ~b.isnan()).sum())
    gap = (a - b).abs().nan_to_num(0.0, posinf=float("inf")).amax().item() if a.numel() else 0.0
    return f": {wrong} NaN" if wrong else f" by up to {gap:.2g}"
