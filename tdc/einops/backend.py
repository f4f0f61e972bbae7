"""The backend by which einops works on batches: `rearrange`, `reduce`, `repeat`, `pack`, `unpack` and `einsum`.

    x (B, C, -1, -1)   "b c h w -> b c (h w)"          sizes b, c, h*w        -> x.flatten(2, 3)
    x (B, -1, D)       "b (t p) d -> b t (p d)", p=4   sizes b, t/4, 4, D     -> x.unflatten(1, (-1, 4))

einops asks a backend for the shape of its operand, computes the sizes of the result from it and calls reshape, permute,
reductions, expand and cat. All but the shape and the reshape of a ragged batch is einops' own backend for torch. The
size of a ragged dim is no number, and that of the batch varies in a graph: both are an `Axis`, a product of such sizes,
times a number and by another. The sizes of a reshape then say which dims were multiplied, where -1 would not.

Invariant: a reshape is a flatten and an unflatten of neighbouring dims, or is refused; no size is read or guessed.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch

from tdc.core.container import Container
from tdc.core.errors import ShapeError, describe, message
from tdc.core.extras import extra
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.storage import Ragged, is_ragged
from tdc.tensordict.tensordict import TensorDict

HINT = "a pattern for each example, as 'b t (h d) -> b h t d'; the batch stays as it is"


class Axis:
    """The size of the batch or of a ragged dim, several of them multiplied, times a number, by another.

    Attributes:
        count: how many sizes are multiplied; dims keep their order, so the number tells which.
    """

    def __init__(self, count: int = 1, times: int = 1, by: int = 1) -> None:
        self.count, self.times, self.by = count, times, by

    def __mul__(self, other: Any) -> Axis:
        o = other if isinstance(other, Axis) else Axis(0, other)
        return Axis(self.count + o.count, self.times * o.times, self.by * o.by)

    __rmul__ = __mul__

    def __floordiv__(self, other: int) -> Axis:
        return Axis(self.count, self.times, self.by * other)

    def __add__(self, other: Any) -> NoReturn:
        """`einops.unpack` adds sizes of parts up, to positions that differ from example to example."""
        hint = "x[:, :2] and x[:, 2:] of each example"
        raise ShapeError(message("einops", "parts of a static dim", "parts of the batch or a ragged dim", hint=hint))

    __radd__ = __sub__ = __add__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axis) and same(self, other)

    def __hash__(self) -> int:
        return hash((self.count, self.times, self.by))

    def __repr__(self) -> str:
        return " * ".join(["?"] * self.count + [f"{self.times}"] * (self.times != 1)) + f" / {self.by}" * (self.by != 1)


def axes_of(x: Ragged) -> tuple[Any, ...]:
    """The shape of a batch, with an Axis for the batch and for each ragged dim."""
    named = (x._batch_dim, *x.ragged_dims)
    return tuple([Axis() if d in named else n for d, n in enumerate(x.shape)])


class Step(NamedTuple):
    """Dims from `first` to `last`, not included, that become others of the given sizes."""

    first: int
    last: int
    sizes: list[Any]


def reshaped(x: Any, sizes: list[Any]) -> Ragged:
    """A batch in the shape of `sizes`, whose entries are products of those of `axes_of(x)`.

    Raises:
        ShapeError: no flatten and unflatten of neighbouring dims leads there.
    """
    for first, last, new in reversed(steps_to(x, with_rest(x, sizes))):
        if first == last:
            x = x.unsqueeze(first)
        elif not new:
            x = x.squeeze(first)
        else:
            x = x.flatten(first, last - 1) if last - first > 1 else x
            x = x.unflatten(first, [-1 if isinstance(n, Axis) else n for n in new]) if len(new) > 1 else x
    return x


def with_rest(x: Ragged, sizes: list[Any]) -> list[Any]:
    """The sizes, with the product of the other dims in place of a -1, as `einops.pack` gives it."""
    at = [k for k, n in enumerate(sizes) if not isinstance(n, Axis) and n == -1]
    if not at:
        return sizes
    k, own = at[0], axes_of(x)
    rest = product(own[k : len(own) - (len(sizes) - k - 1)])
    return [*sizes[:k], rest if rest.count else rest.times, *sizes[k + 1 :]]


def steps_to(x: Ragged, sizes: list[Any]) -> list[Step]:
    """The steps that lead to a shape: neighbouring dims and neighbouring sizes of one product."""
    own, i, j, steps = axes_of(x), 0, 0, []
    if product(own).times == product(sizes).times:  # the dims are divided already
        sizes = [Axis(n.count, n.times) if isinstance(n, Axis) else n for n in sizes]
    while i < len(own) or j < len(sizes):
        drop, add = is_one(own[i : i + 1]), is_one(sizes[j : j + 1])
        first, begin, i, j = i, j, i + (drop or not add), j + (add or not drop)
        have, want = product(own[first:i]), product(sizes[begin:j])
        while not same(have, want):
            if i > len(own) or j > len(sizes):
                got = f"sizes {list(sizes)} of {list(own)}"
                raise ShapeError(message("einops", f"neighbouring dims of {describe(x)}", got, hint=HINT))
            if comes_before(have, want):
                i, have = i + 1, product(own[first : i + 1])
            else:
                j, want = j + 1, product(sizes[begin : j + 1])
        steps.append(Step(first, i, list(sizes[begin:j])))
    return steps


def is_one(size: Any) -> bool:
    """True for one size, a static 1."""
    return len(size) == 1 and not isinstance(size[0], Axis) and size[0] == 1


def product(sizes: Any) -> Axis:
    """Sizes multiplied, static ones too."""
    out = Axis(0)
    for n in sizes:
        out = out * n
    return out


def same(a: Axis, b: Axis) -> bool:
    """True if two products are equal; Dynamo has no `!=` of objects whose numbers are symbols (torch 2.13)."""
    return a.count == b.count and a.times * b.by == b.times * a.by


def comes_before(a: Axis, b: Axis) -> bool:
    """True if the first of two products lacks a factor."""
    return a.count < b.count if a.count != b.count else a.times * b.by < b.times * a.by


NAME = "tdc"  # by which einops looks for a loaded module


class Batches:
    """The methods of a backend that are not those of tensors."""

    framework_name = NAME

    def is_appropriate_type(self, tensor: Any) -> bool:
        """True for a batch of this library."""
        return isinstance(tensor, Container)

    def shape(self, x: Any) -> tuple[Any, ...]:
        """Sizes to compute with: of a TensorDict its batch size, of a ragged batch with an `Axis` for what varies."""
        return axes_of(x) if is_ragged(x) else tuple(x.shape)

    def reshape(self, x: Any, shape: Any) -> Any:
        """A batch in another shape, whose sizes are products of those of `shape`."""
        return reshaped(x, list(shape)) if is_ragged(x) else x.reshape(tuple(shape))

    def is_float_type(self, x: Any) -> bool:
        """True if there are means: for a TensorDict its leaves decide."""
        return isinstance(x, TensorDict) or x.dtype.is_floating_point


def register() -> None:
    """Make einops take TensorDict, NestedTensor and MaskedBatch, in this process; a second call does nothing.

    Raises:
        UnsupportedError: einops is not installed.

    Compile:
        `rearrange`, `reduce`, `repeat`, `pack` and `einsum` are traced in one piece, one graph for all lengths.

    Example:
        >>> import einops, tdc, tdc.einops
        >>> tdc.einops.register()
        >>> x = tdc.pack([torch.ones(2, 6), torch.ones(3, 6)])
        >>> einops.rearrange(x, "b t (h d) -> b h t d", h=2).shape, einops.reduce(x, "b t d -> b d", "mean").shape
        (torch.Size([2, 2, -1, 3]), torch.Size([2, 6]))

    Source:
        The functions of einops, https://einops.rocks.
    """
    backends: Any = extra("einops.register", "einops._backends", "torch-tdc[einops]")
    if NAME in [backend.framework_name for backend in backends.TorchBackend.__subclasses__()]:
        return

    class Backend(Batches, backends.TorchBackend):
        """Found by einops among the subclasses of its own."""

    for x in (
        NestedTensor(torch.empty(0), torch.zeros(1, dtype=torch.int64)),
        MaskedBatch(torch.empty(0, 0), torch.zeros(0, dtype=torch.int64)),
        TensorDict(),
    ):
        backends.get_backend(x)  # einops remembers the backend of a type, so that a graph need not look for it
