"""Tensors one behind another in one piece of memory, to cross a border of processes, devices or programs at once.

    tensors (any dtype, shape, strides)   ->   buffer uint8 (N,), each begins at a multiple of 64, zeros between them
    buffer, (dtype, shape) of each        ->   tensors whose memory is that of the buffer

Invariants: the place of a tensor follows from the dtypes and shapes of those before it; a tensor of a buffer is no view
to autograd: each has a version of its own, and may require a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tdc.core.dynamo import storage_id

ALIGNED = 64
untyped: Any = torch


class Form(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def aligned(nbytes: int) -> int:
    """The next multiple of 64."""
    return -(-nbytes // ALIGNED) * ALIGNED


def total(forms: Iterable[Form]) -> int:
    """Number of bytes of tensors of these forms."""
    return sum([aligned(form.nbytes) for form in forms])


def join(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Bytes of tensors of one device, one behind another, written to `out` if given, a buffer of the right size."""
    pieces: list[Tensor] = []
    for x in tensors:
        own = x.detach().resolve_conj().resolve_neg().contiguous()
        pieces.append(own.view(-1).view(torch.uint8))
        rest = -pieces[-1].numel() % ALIGNED
        if rest:
            pieces.append(own.new_zeros(rest, dtype=torch.uint8))
    if not pieces:
        return torch.empty(0, dtype=torch.uint8, device="cpu") if out is None else out
    return torch.cat(pieces) if out is None else untyped.cat(pieces, out=out)


def split(buffer: Tensor, forms: Iterable[Form]) -> list[Tensor]:
    """The tensors in a contiguous buffer of bytes, which they share."""
    empty, storage = Empty(buffer.device), buffer.untyped_storage()
    at: int = untyped.Tensor.storage_offset(buffer)
    found: list[Tensor] = []
    for form, equal in groupby(forms):
        dtype, shape = form
        step, count = aligned(form.nbytes), len([*equal])
        whole = count if shape and 0 < form.nbytes == step else 1  # with bytes, and no zeros between them
        for _ in range(0, count, whole):
            found += empty.run(storage, dtype, at // dtype.itemsize, shape, strides(shape), whole)
            at += step * whole
    return found


def copies(tensors: Sequence[Tensor], buffer: Callable[[int], Tensor]) -> list[Tensor]:
    """Copies of tensors in one buffer, made by `buffer(nbytes)`; views of the same elements stay one tensor."""
    keys = [identity(x) for x in tensors]
    unique: dict[Any, Tensor] = {}
    for key, x in zip(keys, tensors, strict=True):
        unique.setdefault(key, x)
    if not unique:
        return []
    forms = [Form(x.dtype, tuple(x.shape)) for x in unique.values()]
    own = split(join([*unique.values()], buffer(total(forms))), forms)
    found = dict(zip(unique, own, strict=True))
    return [found[key] for key in keys]


def shared_buffer(nbytes: int) -> Tensor:
    """A buffer in memory that other processes see."""
    return untyped.empty(nbytes, dtype=torch.uint8, device="cpu").share_memory_()


class Empty(dict[torch.dtype, Any]):
    """An empty tensor of each dtype: `empty[dtype].data.set_(...)` takes two thirds of `torch.empty(0).set_(...)`."""

    def __init__(self, device: Any = "cpu") -> None:
        super().__init__()
        self.device = device

    def __missing__(self, dtype: torch.dtype) -> Any:
        self[dtype] = torch.empty(0, dtype=dtype, device=self.device)
        return self[dtype]

    def run(
        self, storage: Any, dtype: torch.dtype, at: int, shape: Sequence[int], stride: Sequence[int], count: int
    ) -> Sequence[Tensor]:
        """Tensors of one form that lie one behind another in a storage: made in a fifth of the time of one by one."""
        if count == 1:
            return (self[dtype].data.set_(storage, at, shape, stride),)
        rows = self[dtype].data.set_(storage, at, (count * shape[0], *shape[1:]), stride)
        return untyped.unsafe_split(rows, shape[0])  # which makes no views


def strides(shape: Sequence[int]) -> list[int]:
    """Strides of a contiguous tensor."""
    found: list[int] = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        found[i] = found[i + 1] * max(shape[i + 1], 1)
    return found


def is_plain(x: Any) -> bool:
    """True for a dense tensor in the memory of this process without further state."""
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.is_nested or x.device.type != "cpu":
        return False
    try:
        storage_id(x)
    except (RuntimeError, NotImplementedError):  # of a transform
        return False
    return True


def identity(x: Tensor) -> tuple[Any, ...]:
    """Memory of a tensor, and how it is read: equal for tensors of the same elements."""
    return storage_id(x), x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()
