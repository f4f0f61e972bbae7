"""Every change of representation: packed <-> padded, of one level and of two, and ours <-> torch's jagged layout.

Conversions are explicit: no operation changes the type of a container on its own, and no type depends on data.

    TwoLevelTensor (B, -1, -1, D) <-> TwoLevelPadded, data (B, S, T, D)    documents x sentences x tokens

A MaskedBatch has one length for each document in each dim; sentences of one document differ. So the rectangle of two
levels is a plain tensor beside its lengths, from which its masks follow.

Invariants:
  - `to_packed(to_padded(x)) == x`, and gradients pass both ways without touching padding;
  - `to_torch` and `from_torch` share memory.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from tdc.core.arguments import expect, expect_number, int_tuple
from tdc.core.asserts import require
from tdc.core.dynamo import jagged_layout
from tdc.core.errors import DtypeError, ShapeError, StructureError, UnsupportedError, describe, message, show_sizes
from tdc.core.typing import Dims
from tdc.layout.padding import pack_rows, pad_rows, shift_rows, valid_mask
from tdc.layout.segments import (
    gather_spans,
    known_sizes,
    longest,
    longest_on_host,
    structure_of_sizes,
    take_spans,
    total_of,
)
from tdc.layout.structure import Structure
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.two_level import TwoLevelTensor, build_two_level


def to_padded(x: NestedTensor, fill: float = 0.0, *, length: Dims | None = None) -> MaskedBatch:
    """Packed to padded.

    Shapes:
        `(B, *S0, -1, *S1) -> (B, *S0, L, *S1)`; the batch may be at another dim, and stays there.

    Args:
        fill: what padding holds. Rules never rely on it.
        length: padded size of each ragged dim; the longest row by default. Longer rows are cut, with a warning where
            lengths are known on the host; `tdc.truncate(x, length)` before says that they shall be.

    Returns:
        MaskedBatch with data and the real lengths.

    Raises:
        ShapeError: the batch is between ragged dims, or `length` does not have one size for each ragged dim.

    Warns:
        UserWarning: rows are cut.

    Compile:
        One graph. Without `length` the batch must carry its longest length, as `pack` and `from_padded` see to.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> to_padded(pack([torch.ones(1), torch.ones(2)])).data
        tensor([[1., 0.],
                [1., 1.]])
    """
    expect("to_padded", x, NestedTensor)
    expect_number("to_padded", fill)
    s = x.structure
    b, ragged = s.batch_dim, s.ragged_dims
    if ragged[0] < b < ragged[-1]:
        got, hint = f"the batch at dim {b} between them", "transpose it back first"
        raise ShapeError(message("to_padded", "ragged dims side by side", got, hint=hint))
    padded = longest(s) if length is None else int_tuple("to_padded", length)
    if len(padded) != s.ragged_ndim:
        expected, got = f"length with {s.ragged_ndim} sizes", f"{len(padded)} sizes"
        raise ShapeError(message("to_padded", expected, got, hint=f"the ragged dims are {s.ragged_dims}"))
    if length is not None and any([n < 0 for n in padded]):
        raise ShapeError(message("to_padded", "a length of 0 or more", "one below", hint="length=x.max_length"))
    if length is not None:
        warn_of_cut(s, padded)
    data = pad_rows(x.values.movedim(s.packed_dim, 0), s, padded, fill, cut=length is not None)
    dims = tuple(range(s.packed_dim + 1, s.packed_dim + 1 + s.ragged_ndim))
    cut = [n if length is None else n.clamp(max=m) for n, m in zip(x.sizes.unbind(1), padded, strict=True)]
    sizes = torch.stack(cut, 1)  # not the kept ones
    out = build_masked(data.movedim(tuple(range(1, s.ragged_ndim + 1)), dims), sizes, dims, new_lengths=True)
    return out if b == 0 else build_masked(out.data.movedim(0, b), out.lengths, ragged, b)


def warn_of_cut(s: Structure, padded: tuple[int, ...]) -> None:
    """Warn where examples are larger than what they are padded to, and that is known without a sync."""
    sizes = known_sizes(s)
    if sizes is not None and any([n > m for n, m in zip(longest_on_host(s), padded, strict=True)]):
        got, hint = f"{show_sizes(padded)}, so that it is cut", "tdc.truncate(x, length) before, where that is meant"
        warnings.warn(message("to_padded", "a length that holds the longest row", got, hint=hint), stacklevel=3)


def to_packed(x: MaskedBatch, *, total: int | None = None) -> NestedTensor:
    """Padded to packed. Padding is never read.

    Shapes:
        `(B, *S0, L, *S1) -> (B, *S0, -1, *S1)`; the batch may be at another dim, and stays there.

    Args:
        total: number of real positions, N. Read from the lengths (on the host) where it is not given.

    Example:
        >>> x = MaskedBatch(torch.tensor([[1., 9.], [2., 3.]]), torch.tensor([1, 2]))
        >>> to_packed(x).values
        tensor([1., 2., 3.])
    """
    expect("to_packed", x, MaskedBatch)
    b, count, data = x.batch_dim, len(x.ragged_dims), x.data.movedim(x.batch_dim, 0)
    dims = tuple([d + (d < b) for d in x.ragged_dims])
    padded = tuple([data.shape[d] for d in dims])
    structure = structure_of_sizes(x.lengths, padded, dims[0] - 1, b)
    total = total_of(structure) if total is None else total
    values = pack_rows(data.movedim(dims, tuple(range(1, count + 1))), structure, total).movedim(0, dims[0] - 1)
    return build_nested(structure, values)


def from_padded(
    data: Tensor, lengths: Tensor | None = None, *, mask: Tensor | None = None, side: str = "right"
) -> MaskedBatch:
    """A padded batch from a rectangle `(B, L, ...)` and its lengths `(B,)` or its mask `(B, L)`.

    Args:
        mask: True where data is real, without gaps.
        side: where the padding is: "right", behind the real positions of each row, or "left", in front of them; then
            the rows are moved to the front. `to_packed()` of the result packs either.

    Returns:
        A batch of `data` itself; where `data` requires grad, of a copy with zeros in padding, so that the gradient of
        padding is 0, whatever it holds. The gradient of a leaf is then that of `data`, not of the batch.

    Raises:
        ShapeError: neither or both of lengths and mask are given, the mask does not fit the data, or an unknown side.
        DtypeError: the mask is not bool.
        StructureError: padding on the other side or between real positions; lengths that are negative or larger than L.
            Immediate on CPU, asynchronous on CUDA.

    Example:
        >>> mask = torch.tensor([[False, True, True], [False, False, True]])
        >>> from_padded(torch.tensor([[0, 1, 2], [0, 0, 3]]), mask=mask, side="left").to_packed().tolist()
        [[1, 2], [3]]
    """
    if (lengths is None) == (mask is None):
        got = "none" if lengths is None else "both"
        raise ShapeError(message("from_padded", "one of lengths= and mask=", got, hint="pass lengths=(B,) int64"))
    expect("from_padded", data, Tensor)
    if mask is not None:
        expect("from_padded", mask, Tensor, of=" as mask")
        if mask.dtype != torch.bool:
            hint = "mask.bool(), True where data is real"
            raise DtypeError(message("from_padded", "a bool mask", describe(mask), hint=hint))
        if mask.ndim != 2 or mask.shape != data.shape[:2]:
            expected, hint = f"a mask of {list(data.shape[:2])}", "the mask is (B, L), the data (B, L, ...)"
            raise ShapeError(message("from_padded", expected, describe(mask), hint=hint))
        lengths, left = mask.sum(1), side == "left"
        hint = "move the real positions of each row together, or say side='left' or side='right'"
        where = "in front of" if left else "behind"
        text = message("from_padded", f"padding {where} each row", "padding elsewhere", hint=hint)
        seen = mask.flip(1) if left else mask
        require((seen == valid_mask(lengths[:, None], (mask.shape[1],))).all(), text, StructureError)
    assert lengths is not None
    if isinstance(lengths, Tensor) and lengths.dtype == torch.int64 and data.ndim > 1:  # MaskedBatch refuses others
        hint = "lengths count the real positions of each row"
        text = message("from_padded", "lengths between 0 and the width of data", "one outside", hint=hint)
        require(((lengths >= 0) & (lengths <= data.shape[1])).all(), text, StructureError)
    x = MaskedBatch(data, lengths)
    x = x if side == "right" else x.with_data(shift_rows(data, x.lengths[:, 0], side, "from_padded"))
    learns = data.requires_grad and torch.is_grad_enabled()
    return x.with_data(x.filled(0)) if learns else x  # else 0 times the derivative of what padding holds


@overload
def nested_like(data: Tensor, like: NestedTensor) -> NestedTensor: ...
@overload
def nested_like(data: Tensor, like: TwoLevelTensor) -> TwoLevelTensor: ...
def nested_like(data: Tensor, like: NestedTensor | TwoLevelTensor) -> NestedTensor | TwoLevelTensor:
    """Cut a rectangle into the examples of a packed batch, such as what a model returned for its padded form.

    Padding is never read, and gets no gradient.

    Shapes:
        `(B, *S0, L, *S1)` with L at the ragged dims of `like -> (B, *S0, -1, *S1)`; features may differ. Of two levels
        `(B, S, T, *D) -> (B, -1, -1, *D)`.

    Raises:
        ShapeError: another number of rows or too few dims; the batch of `like` is not dim 0.
        StructureError: a rectangle shorter than the longest row. Immediate on CPU, asynchronous on CUDA.

    Returns:
        A batch with the structure of `like`.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> x = pack([torch.ones(1), torch.ones(2)])
        >>> nested_like(torch.tensor([[1.0, 9.0], [2.0, 3.0]]), x).tolist()
        [[1.0], [2.0, 3.0]]
    """
    expect("nested_like", data, Tensor, other=like)
    if isinstance(like, TwoLevelTensor):
        return like.with_values(nested_like(nested_like(data, like.inner_lengths).values, like.values))
    expect("nested_like", like, NestedTensor)
    s, dims = like.structure, like.ragged_dims
    if s.batch_dim != 0 or data.ndim <= dims[-1] or data.shape[0] != s.batch_size:
        got, hint = f"{describe(data)} for {describe(like)}", "the batch is dim 0 of both"
        raise ShapeError(message("nested_like", f"{s.batch_size} rows with dims {dims}", got, hint=hint))
    inside = torch.stack([sizes <= data.shape[d] for sizes, d in zip(like.sizes.unbind(1), dims, strict=True)]).all()
    hint = "pad to x.max_length"
    text = message("nested_like", "a rectangle as long as the longest row", "a shorter one", hint=hint)
    require(inside, text)
    moved = data.movedim(dims, tuple(range(1, s.ragged_ndim + 1)))
    total = like.values.shape[s.packed_dim]
    return like.with_values(pack_rows(moved, s, total).movedim(0, s.packed_dim))


def to_torch(x: NestedTensor) -> Tensor:
    """The same batch as `torch.nested` with the jagged layout; shares values and offsets.

    Raises:
        UnsupportedError: several ragged dims, which torch's layout cannot say.

    Example:
        >>> from tdc.ragged.pack import pack
        >>> to_torch(pack([torch.ones(1), torch.ones(2)])).is_nested
        True
    """
    expect("to_torch", x, NestedTensor)
    s = x.structure
    if s.ragged_ndim > 1 or s.batch_dim != 0:
        got = f"{s.ragged_ndim} of them, batch at dim {s.batch_dim}"
        raise UnsupportedError(message("to_torch", "one ragged dim and the batch as dim 0", got, hint="x.unbind()"))
    top = None if s.extent is None else s.extent.shape[0]
    return torch.nested.nested_tensor_from_jagged(
        x.values, s.offsets, jagged_dim=s.packed_dim + 1, min_seqlen=None if top is None else 0, max_seqlen=top
    )


def from_torch(x: Any) -> NestedTensor:
    """A `torch.nested` tensor of the jagged layout as a NestedTensor; shares values and offsets.

    Examples with holes between them (torch's `lengths`) are copied side by side; holes get no gradient.

    Raises:
        UnsupportedError: not a jagged nested tensor.

    Example:
        >>> jagged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
        >>> from_torch(jagged).shape
        torch.Size([2, -1])
    """
    if not (isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged):
        got = "one of layout torch.strided" if isinstance(x, Tensor) and x.is_nested else describe(x)
        expected, hint = "a nested tensor of layout torch.jagged", "tdc.pack(x.unbind())"
        raise UnsupportedError(message("from_torch", expected, got, hint=hint))
    jagged: Any = x
    values, offsets, lengths = jagged.values(), jagged.offsets(), jagged.lengths()
    ragged_dim, longest = jagged_layout(jagged)
    if lengths is not None:
        offsets, gather = take_spans(offsets[: lengths.shape[0]], lengths)
        values = gather_spans(values, ragged_dim - 1, gather)
    return NestedTensor(values, offsets, ragged_dim=ragged_dim, max_length=longest)


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
