"""Tensors of a structure in one buffer, and back.

    buffer    uint8, the tensors of each dtype one behind another, wide elements first, without gaps
    run       neighbours of one shape: one view of the buffer, split at once

Invariant: a tensor of a buffer is no view to autograd: each has a version of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from tdc.compile.shards import joined
from tdc.core.one_storage import Empty, strides
from tdc.dist.form import Described, Form, Run, Sizes

untyped: Any = torch
WIDE = {  # dtypes that torch.cat takes; others go as bytes
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
}


def by_dtype(form: Form, tensors: Sequence[Tensor]) -> Iterator[tuple[torch.dtype, Sequence[Tensor]]]:
    """The tensors of each dtype, in the order of the message."""
    first = 0
    for dtype, n in form.groups.items():
        yield dtype, tensors[first : first + n]
        first += n


def packed(x: Described, device: torch.device) -> Tensor:
    """The bytes of a structure on a device."""
    own = x.tensors[0].device if x.tensors else device
    buffer = torch.empty(x.form.layout(x.sizes).nbytes, dtype=torch.uint8, device=own)
    end = 0
    with torch.no_grad():
        for dtype, tensors in by_dtype(x.form, x.tensors):
            begin, end = end, end + sum([t.numel() for t in tensors]) * dtype.itemsize
            if dtype in WIDE:
                joined(tensors, buffer[begin:end].view(dtype))
            else:
                untyped.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors], out=buffer[begin:end])
    return buffer.to(device)


def empty_buffer(form: Form, sizes: Sizes, device: torch.device) -> Tensor:
    """A buffer to receive into."""
    return torch.empty(form.layout(sizes).nbytes, dtype=torch.uint8, device=device)


def views(buffer: Tensor, runs: Sequence[Run], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors of some runs in a buffer, which they share."""
    found: list[Tensor] = []
    empty = Empty(buffer.device)
    for run, shape, at in placed(buffer, runs, shapes):
        if run.times > 1 and shape and prod(shape):
            found += empty.run(buffer.untyped_storage(), run.dtype, at, shape, strides(shape), run.times)
        else:
            for i in range(run.times):
                found += empty.run(
                    buffer.untyped_storage(), run.dtype, at + i * prod(shape), shape, strides(shape), 1
                )
    return found


def stacked_views(buffer: Tensor, runs: Sequence[Run], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """For each run one view of its tensors in a buffer, `(count, *shape)`."""
    empty, storage = Empty(buffer.device), buffer.untyped_storage()
    found: list[Tensor] = []
    for run, shape, at in placed(buffer, runs, shapes):
        whole = (run.times, *shape)
        found += empty.run(storage, run.dtype, at, whole, strides(whole), 1)
    return found


def placed(
    buffer: Tensor, runs: Sequence[Run], shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[Run, Sequence[int], int]]:
    """Runs, their shapes, and where each begins in the storage of a buffer, in elements of its dtype."""
    at = untyped.Tensor.storage_offset(buffer) * buffer.element_size()
    for run, shape in zip(runs, shapes, strict=True):
        yield run, shape, at // run.dtype.itemsize
        at += run.times * prod(shape) * run.dtype.itemsize


def apart(whole: Tensor) -> list[Tensor]:
    """The tensors in a new `(count, *shape)`, each with a version of its own."""
    count, *shape = whole.shape
    if count > 1 and shape and whole.numel():
        return [*untyped.unsafe_split(whole.view(count * shape[0], *shape[1:]), shape[0])]
    return [whole.view(shape)] if count == 1 else [*whole.unbind()]


def over_ranks(parts: Sequence[Tensor], dim: int | None) -> list[Tensor]:
    """Tensors of a run, joined over the ranks along `dim`, or stacked in front."""
    if dim is None:
        return apart(torch.stack([*parts], 1))
    return apart(torch.cat([*parts], 1 + dim))
