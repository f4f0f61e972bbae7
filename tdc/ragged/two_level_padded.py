"""Two levels as one rectangle, documents x sentences x tokens, and back.

    x.to_padded()                   TwoLevelTensor (B, -1, -1, D) -> TwoLevelPadded, data (B, S, T, D)
    p.to_packed()                   and back, by its lengths
    tdc.nested_like(data, x)        a rectangle that a model returned, in the documents and sentences of x

For functions that know rectangles only: a MaskedBatch has one length for each document in each dim, sentences of one
document differ. So the rectangle is a plain tensor beside its lengths, and its masks are made of these.

Invariant: padding is never read on the way back, and gets no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tdc.core.arguments import expect, int_tuple
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.core.typing import Dims
from tdc.layout.padding import valid_mask
from tdc.ragged.convert import to_packed, to_padded
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import build_nested
from tdc.ragged.two_level import TwoLevelTensor, build_two_level


class TwoLevelPadded(NamedTuple):
    """A batch of two levels as a rectangle: documents x sentences x tokens, for instance.

    Shapes:
        data `(B, S, T, *D)`, lengths `(B,)`, inner_lengths `(B, S)`; with R ragged dims of inner examples these are
        `(B, S, *T, *D)` and `(B, S, R)`.

    Dtypes:
        data any; lengths int64.

    Example:
        >>> from tdc.ragged.pack import from_list, pack
        >>> x = pack([from_list([[1, 2, 3], [4]]), from_list([[5, 6]])]).to_padded()
        >>> x.data.tolist(), x.inner_lengths.tolist(), x.inner_mask.tolist()
        ([[[1, 2, 3], [4, 0, 0]], [[5, 6, 0], [0, 0, 0]]], [[3, 1], [2, 0]], [[True, True], [True, False]])
    """

    data: Tensor
    lengths: Tensor
    inner_lengths: Tensor

    @property
    def mask(self) -> Tensor:
        """True where data is real, `(B, S, T, 1, ...)`, to broadcast against data."""
        sizes = self.inner_lengths.flatten(2) if self.inner_lengths.ndim > 2 else self.inner_lengths.unsqueeze(2)
        rows, count, ragged = sizes.shape
        padded = self.data.shape[2 : 2 + ragged]
        inside = valid_mask(sizes.flatten(0, 1), tuple(padded)).view(rows, count, *padded)
        real = inside & self.inner_mask.view(rows, count, *[1] * ragged)
        return real.view(*real.shape, *[1] * (self.data.ndim - real.ndim))

    @property
    def inner_mask(self) -> Tensor:
        """True for inner examples that are real, `(B, S)`."""
        return valid_mask(self.lengths[:, None], (self.data.shape[1],))

    def to_packed(self) -> TwoLevelTensor:
        """Padded to packed; `tdc.nested_like(data, x)` where the packed batch is there already.

        Raises:
            DtypeError: lengths are not int64.
            ShapeError: shapes that do not belong together.

        Compile:
            One graph; how many inner examples and elements there are is read from the lengths.
        """
        data, lengths, sizes = self
        for part, name in zip(self, self._fields, strict=True):
            expect("TwoLevelPadded.to_packed", part, Tensor, of=f" as {name}")
        if lengths.dtype != torch.int64 or sizes.dtype != torch.int64:
            got, hint = f"{describe(lengths)} and {describe(sizes)}", "lengths.long()"
            raise DtypeError(message("TwoLevelPadded.to_packed", "int64 lengths", got, hint=hint))
        ragged = 1 if sizes.ndim == 2 else sizes.shape[-1]
        fits = lengths.ndim == 1 and sizes.ndim in (2, 3) and data.ndim >= 2 + ragged
        if not fits or sizes.shape[:2] != data.shape[:2] or lengths.shape[0] != data.shape[0]:
            at = {name: describe(part) for name, part in zip(self._fields, self, strict=True)}
            expected, hint = "data (B, S, T, ...), lengths (B,), inner_lengths (B, S)", "x.to_padded() gives all three"
            raise ShapeError(message("TwoLevelPadded.to_packed", expected, "others", at, hint))
        outer = to_packed(MaskedBatch(data, lengths))
        total = outer.values.shape[0]
        own = to_packed(MaskedBatch(sizes, lengths), total=total).values
        inner = MaskedBatch(outer.values, own, ragged_dims=tuple(range(1, 1 + ragged)))
        return build_two_level(outer.structure, to_packed(inner))


def pad_levels(x: TwoLevelTensor, fill: float = 0.0, *, length: Dims | None = None) -> TwoLevelPadded:
    """Packed to padded: inner examples of each outer one, and elements of each inner one, behind one another.

    Args:
        fill: what padding holds.
        length: sizes of all ragged dims, that of dim 1 first; the longest by default. What is longer is cut.

    Raises:
        ShapeError: static dims in front of the ragged dims of inner examples; `length` has not one size for each.

    Compile:
        One graph. Without `length` both levels must carry their longest length, as `tdc.pack` sees to.
    """
    expect("to_padded", x, TwoLevelTensor)
    s = x.values.structure
    if s.packed_dim or s.batch_dim:
        got, hint = describe(x), "x.values.to_padded() for inner examples"
        raise ShapeError(message("to_padded", "ragged dims right behind dim 1", got, hint=hint))
    sizes = (None,) if length is None else int_tuple("to_padded", length)
    if length is not None and len(sizes) != 1 + s.ragged_ndim:
        expected, got = f"length with {1 + s.ragged_ndim} sizes", f"{len(sizes)} sizes"
        raise ShapeError(message("to_padded", expected, got, hint=f"the ragged dims are {x.ragged_dims}"))
    inner = to_padded(x.values, fill, length=sizes[1:] or None)
    rows = to_padded(build_nested(x.structure, inner.data), fill, length=sizes[0])
    own = build_nested(x.structure, inner.lengths if s.ragged_ndim > 1 else inner.lengths[:, 0])
    return TwoLevelPadded(rows.data, rows.lengths[:, 0], to_padded(own, length=sizes[0]).data)
