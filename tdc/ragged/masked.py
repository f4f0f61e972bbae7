"""MaskedBatch: a batch of tensors of different sizes, padded.

    lengths 2, 0, 3          data (B, L, D)     mask
    row 0   ■ ■              ■ ■ ·              1 1 0
    row 1                    · · ·              0 0 0
    row 2   ■ ■ ■            ■ ■ ■              1 1 1

The mask is derived from the lengths wherever it is used (`arange < lengths`), so that a compiler fuses it.

Invariants:
  - immutable; the rectangle's sizes are part of the batch, padding is not;
  - padding is never trusted and never multiplied away: a rule that lets positions meet first fills padding with its own
    identity element, by `torch.where`, so that NaN in padding reaches neither a result nor a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.core.arguments import SWAPPED, expect, expect_devices, expect_number, int_tuple, normal_dim, refuse_to
from tdc.core.asserts import require
from tdc.core.container import Container
from tdc.core.dynamo import certain, has_numbers, hold, is_on_host, known, mark_dynamic
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message
from tdc.core.frozen import constant_of
from tdc.core.pytree import register
from tdc.core.slow_paths import announce
from tdc.core.typing import Dims, OpName
from tdc.layout.padding import valid_mask
from tdc.layout.segments import on_host
from tdc.layout.structure import other_size
from tdc.ragged.display import html, shown, text
from tdc.ragged.unflattened import expect_lengths

if TYPE_CHECKING:
    from tdc.ragged.operations import MaskedOperations as Operations
else:
    Operations = Container


@final
class MaskedBatch(Operations):
    """A padded batch: rectangular data, and how much of each example is real.

    Shapes:
        data `(B, ..., L, ...)`, lengths `(B,)` or `(B, R)` for R ragged dims.

    Dtypes:
        data any; lengths int64.

    Args:
        data: the rectangle, as it is; its padding may hold anything, NaN included. Of data that require grad,
            `from_padded` keeps what padding holds out of gradients.
        lengths: real size of each example in each ragged dim.
        ragged_dims: the dims of `data` in which examples differ; dim 0 is the batch. One dim, or neighbouring dims.

    Raises:
        DtypeError: data or lengths are no tensors, or lengths are not int64.
        ShapeError: lengths do not have one row for each example and one column for each ragged dim.
        StructureError: data and lengths on two devices; a length that is negative or larger than the rectangle, where
            it can be read at no cost: eagerly and on CPU.

    Compile:
        Batch size and padded sizes are marked dynamic; one graph serves all.

    Example:
        >>> x = MaskedBatch(torch.tensor([[1., 2., 0.], [3., 0., 0.]]), torch.tensor([2, 1]))
        >>> x.mask.tolist(), x.sum(1).tolist()
        ([[True, True, False], [True, False, False]], [3.0, 3.0])

    Source:
        The padded batch with `src_key_padding_mask` of `torch.nn.TransformerEncoder`; True means valid here.
    """

    __slots__ = ("__weakref__", "_batch", "_data", "_lengths", "_ragged")
    _constants: ClassVar = {"ragged_dims": constant_of("_ragged"), "batch_dim": constant_of("_batch")}
    _kind = "masked"
    _instead = "x.with_data(data), or torch.where(mask, new, x)"
    _settings: ClassVar = {"lengths": "tdc.MaskedBatch(x.data, lengths)", "requires_grad": "x.requires_grad_()"}
    _rank = 1

    _data: Tensor
    _lengths: Any  # a Tensor, some methods of which torch leaves untyped
    _ragged: tuple[int, ...]
    _batch: int

    def __init__(self, data: Tensor, lengths: Tensor, *, ragged_dims: Dims = 1) -> None:
        dims = int_tuple("MaskedBatch", ragged_dims)
        if not isinstance(data, Tensor) or not isinstance(lengths, Tensor):
            got = f"{describe(data)} and {describe(lengths)}"
            raise DtypeError(message("MaskedBatch", "tensors of data and lengths", got, hint="torch.tensor(lengths)"))
        if lengths.dtype != torch.int64:
            mask = lengths.dtype == torch.bool
            hint = "tdc.from_padded(data, mask=mask)" if mask else "lengths.long()"
            if not mask and data.dtype == torch.int64 and data.ndim <= 2 <= lengths.ndim:
                hint = SWAPPED
            raise DtypeError(message("MaskedBatch", "int64 lengths", describe(lengths), hint=hint))
        if data.device != lengths.device:
            got, hint = f"data on {data.device}, lengths on {lengths.device}", "lengths.to(data.device)"
            raise StructureError(message("MaskedBatch", "data and lengths on one device", got, hint=hint))
        sizes = lengths[:, None] if lengths.ndim == 1 else lengths
        if data.ndim < 1 or sizes.ndim != 2 or tuple(sizes.shape) != (data.shape[0], len(dims)):
            expected = f"lengths of shape (B, {len(dims)}) for data (B, ...)"
            got = f"{describe(lengths)} for {describe(data)}"
            raise ShapeError(message("MaskedBatch", expected, got, hint="one row of lengths for each example"))
        if not dims or dims != tuple(range(dims[0], dims[0] + len(dims))) or not 1 <= dims[0] <= dims[-1] < data.ndim:
            span = f"neighbouring ragged dims in [1, {data.ndim - 1}]"
            expected = span if data.ndim > 1 else "data with a ragged dim"
            got, hint = f"{dims} for {describe(data)}", "dim 0 is the batch, ragged dims come behind it"
            raise ShapeError(message("MaskedBatch", expected, got, hint=hint))
        if is_on_host(sizes) and len(sizes):
            least, most = on_host(torch.stack([sizes.amin(0), sizes.amax(0)]))
            if min(least) < 0 or any([n > data.shape[d] for n, d in zip(most, dims, strict=True)]):
                got, hint = f"others for {describe(data)}", "lengths count the real positions of each row"
                raise StructureError(message("MaskedBatch", "lengths between 0 and the padded size", got, hint=hint))
        set_fields(self, mark_dynamic(data, 0, *dims), mark_dynamic(sizes, 0), dims, 0)

    @property
    def data(self) -> Tensor:
        """The rectangle, padding included."""
        return self._data

    _content = data

    @property
    def lengths(self) -> Tensor:
        """Real sizes of each example, `(B, R)` for R ragged dims."""
        return self._lengths

    @property
    def ragged_dims(self) -> tuple[int, ...]:
        """The dims that are padded."""
        return self._ragged

    @property
    def batch_dim(self) -> int:
        """The batch dim: 0, except between transposes of a stock module."""
        return self._batch

    _batch_dim = batch_dim

    @property
    def mask(self) -> Tensor:
        """True where data is real; has the dims of data, with size 1 on static dims, to broadcast against it."""
        first, dims = self.ragged_dims[0], (self.batch_dim, *self.ragged_dims)
        mask = valid_mask(self.lengths, tuple([self.data.shape[d] for d in self.ragged_dims]))
        if self.batch_dim > first:
            mask = mask.movedim(0, -1)
        return mask.view([self.data.shape[d] if d in dims else 1 for d in range(self.data.ndim)])

    def filled(self, value: float) -> Tensor:
        """The data with `value` in all padding.

        Raises:
            DtypeError: no number.
        """
        expect_number("filled", value)
        return self.data.masked_fill(~self.mask, value)

    def with_data(self, data: Tensor) -> MaskedBatch:
        """A batch of the same lengths and ragged dims with other data: as many examples, and no smaller rectangle.

        Raises:
            DtypeError: the data is no tensor.
            ShapeError: the data has not.
        """
        expect("with_data", data, Tensor)
        b, ragged, old = self.batch_dim, self.ragged_dims, self._data.shape
        lacks = data.ndim <= max(b, *ragged) or known(data.shape[b] != old[b])
        if lacks or any([known(data.shape[d] < old[d]) for d in ragged]):
            raise other_size("with_data", self._data, data)
        return build_masked(data, self._lengths, ragged, b)

    @property
    def batch_size(self) -> torch.Size:
        """The batch dims, `(B,)`."""
        return torch.Size((self.lengths.shape[0],))

    @property
    def shape(self) -> torch.Size:
        """Shape of the rectangle."""
        return self.data.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return self.data.ndim

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the data."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Device of the data."""
        return self.data.device

    def __len__(self) -> int:
        return self.lengths.shape[0]

    def __repr__(self) -> str:
        if not isinstance(self.data, Tensor):
            return f"MaskedBatch({type(self.data).__name__})"
        if not has_numbers(self._data, self._lengths):
            return text(self, {}, None, ragged_dims=self.ragged_dims)
        one = len(self.ragged_dims) == 1
        rows = [crop(self, self._data.select(self._batch, i), self._lengths[i].tolist()) for i in shown(len(self))]
        sizes = {"lengths": self._lengths[:, 0] if one else self._lengths}
        return text(self, sizes, rows, ragged_dims=self.ragged_dims)

    def _repr_html_(self) -> str:
        return html(self, self._lengths if has_numbers(self._data, self._lengths) else None)

    def to(self, *args: Any, **kwargs: Any) -> MaskedBatch:
        """`Tensor.to` for the data; the lengths follow to the device."""
        expect_devices(*args, *kwargs.values())
        try:
            data, lengths = self.data.to(*args, **kwargs), self.lengths
        except (AssertionError, RuntimeError, TypeError):
            refuse_to(*args, **kwargs)
            raise
        moves = data.device != lengths.device
        lengths = lengths.to(data.device) if moves else lengths
        return build_masked(data, lengths, self.ragged_dims, self.batch_dim, new_lengths=moves)

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """The real part of each example, as views; reads lengths on the host. Along a static dim, padded batches."""
        d, b = normal_dim(dim, self.ndim, "unbind"), self.batch_dim
        if d in self.ragged_dims:
            hint = "x.data.unbind(dim) for the rectangle"
            raise ShapeError(message("unbind", f"a static dim or dim {b}, the batch", f"ragged dim {dim}", hint=hint))
        if d != b:
            ragged = tuple([r - (d < r) for r in self.ragged_dims])
            return tuple([build_masked(part, self.lengths, ragged, b - (d < b)) for part in self.data.unbind(d)])
        announce("loops", "unbind")
        rows = zip(self.data.unbind(b), on_host(self._lengths), strict=True)
        return tuple([crop(self, row, sizes) for row, sizes in rows])


def set_fields(x: MaskedBatch, data: Any, lengths: Any, ragged_dims: tuple[int, ...], batch_dim: int) -> MaskedBatch:
    """Write the slots of a new MaskedBatch."""
    x._data = data
    x._lengths = lengths
    x._ragged = ragged_dims
    x._batch = batch_dim
    return x


def build_masked(
    data: Any, lengths: Any, ragged_dims: tuple[int, ...], batch_dim: int = 0, new_lengths: bool = False
) -> MaskedBatch:
    """A MaskedBatch without checks: what operations return. `new_lengths` marks lengths that compile has not seen."""
    data, lengths = mark_dynamic(data, batch_dim, *ragged_dims), mark_dynamic(lengths, 0) if new_lengths else lengths
    return set_fields(object.__new__(MaskedBatch), data, lengths, ragged_dims, batch_dim)


def crop(x: MaskedBatch, row: Tensor, sizes: list[int]) -> Tensor:
    """The real part of one example."""
    for dim, size in zip(x.ragged_dims, sizes, strict=True):
        row = row.narrow(dim - (dim > x.batch_dim), 0, size)
    return row


def in_rectangle(x: MaskedBatch, sizes: Sequence[int], fill: float = 0) -> MaskedBatch:
    """A batch with its ragged dims padded or cut to sizes that hold its examples.

    A graph pads where it does not know that a size stays, and has no guard on that.
    """
    more = {d: size - x.data.shape[d] for d, size in zip(x.ragged_dims, sizes, strict=True)}
    if all([certain(n == 0) for n in more.values()]):
        return x
    data = F.pad(x.data, [n for d in reversed(range(x.data.ndim)) for n in (0, more.get(d, 0))], value=fill)
    return build_masked(data, x.lengths, x.ragged_dims, x.batch_dim)


def fitted_masked(op: OpName, a: MaskedBatch, b: MaskedBatch, fill: float = 0) -> MaskedBatch:
    """`b` in a rectangle of the size of `a`; a StructureError if lengths are neither one tensor nor equal by value."""
    rows, others, hint = a.lengths.shape[0], b.lengths.shape[0], "build both from one batch, e.g. x.with_data(y)"
    if (a.ragged_dims, a.batch_dim) != (b.ragged_dims, b.batch_dim) or known(rows != others):
        got = f"ragged dims {a.ragged_dims} of {rows} rows and {b.ragged_dims} of {others}"
        raise StructureError(message(op, "operands of one ragged structure", got, hint=hint))
    if a.lengths is not b.lengths:
        hold(rows == others)
        text = message(op, "operands of one ragged structure", "rows of different lengths", hint=hint)
        require((a.lengths == b.lengths).all(), text)
    return in_rectangle(b, [a.data.shape[d] for d in a.ragged_dims], fill)


def flatten_masked(x: MaskedBatch) -> tuple[list[Any], tuple[Any, ...]]:
    """Children and context: tensors, and where the axes lie. No sizes."""
    return [x.data, x.lengths], (x.ragged_dims, x.batch_dim)


def unflatten_masked(children: Sequence[Any], context: tuple[Any, ...]) -> MaskedBatch:
    """A MaskedBatch of any children."""
    expect_lengths("MaskedBatch", children[1], children[0], context[1], context[0])
    return set_fields(object.__new__(MaskedBatch), children[0], children[1], context[0], context[1])


register(MaskedBatch, flatten_masked, unflatten_masked, lambda context: ("data", "lengths"))
