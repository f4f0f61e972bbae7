"""What code asks of a tensor besides its shape: bytes, contiguity, autograd, pinned memory; how much is padding.

Each answers for the values of a NestedTensor and the data of a MaskedBatch; offsets and lengths do not count.

Invariant: nothing here reads data or depends on it, but for `occupancy`, which reads lengths.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tdc.core.dynamo import is_zero
from tdc.core.frozen import read_only
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.masked import like as masked_like
from tdc.ragged.nested import NestedTensor
from tdc.ragged.nested import like as nested_like
from tdc.ragged.structure import Structure, longest

Ragged: TypeAlias = "NestedTensor | MaskedBatch"


def data_of(x: Ragged) -> Tensor:
    """The one differentiable tensor of a batch."""
    return x.values if isinstance(x, NestedTensor) else x.data


def is_contiguous(x: Ragged, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """Whether the elements lie in memory in the order of the dims, rows one after another."""
    return data_of(x).is_contiguous(memory_format=memory_format)


def element_size(x: Ragged) -> int:
    """Bytes of one element."""
    return data_of(x).element_size()


def itemsize(x: Ragged) -> int:
    """Bytes of one element."""
    return data_of(x).itemsize


def nbytes(x: Ragged) -> int:
    """Bytes of the elements; `tdc.nbytes` counts the structure, too."""
    return data_of(x).nbytes


def nelement(x: Ragged) -> int:
    """Number of elements in memory, as `x.numel()`."""
    return data_of(x).numel()


def get_device(x: Ragged) -> int:
    """Number of the CUDA device, -1 on CPU."""
    return data_of(x).get_device()


def is_cpu(x: Ragged) -> bool:
    """Whether the batch is in the memory of the host."""
    return data_of(x).is_cpu


def is_leaf(x: Ragged) -> bool:
    """Whether the elements are a leaf of autograd."""
    return data_of(x).is_leaf


def grad_fn(x: Ragged) -> Any:
    """The node of autograd that made the elements."""
    return data_of(x).grad_fn


def retain_grad(x: Ragged) -> None:
    """Keep the gradient of a batch that is no leaf, for `x.grad`."""
    data_of(x).retain_grad()


def is_pinned(x: Ragged) -> bool:
    """Whether the elements are in page-locked memory."""
    return data_of(x).is_pinned()


def pin_memory(x: Any) -> Any:
    """A copy in page-locked memory, for a copy to a GPU that need not wait; `DataLoader(pin_memory=True)` calls it."""
    if isinstance(x, MaskedBatch):
        return masked_like(x.data.pin_memory(), x.lengths.pin_memory(), x.ragged_dims, x.batch_dim, fresh=True)
    s = x.structure
    shapes = None if s.shapes is None else s.shapes.pin_memory()
    structure = Structure(s.offsets.pin_memory(), shapes, s.extent, s.packed_dim, s.batch_dim, s.ragged_ndim)
    return nested_like(structure.marked(), x.values.pin_memory())


def masked_tolist(x: MaskedBatch) -> list[Any]:
    """Rows as nested Python lists, without padding."""
    return [row.tolist() for row in x.unbind()]


def cu_seqlens(x: NestedTensor) -> Tensor:
    """Where rows begin, and N: offsets as flash-style kernels take them, (B+1,) int32."""
    return x.offsets.to(torch.int32)


def occupancy(x: Ragged) -> float:
    """How much of the padded batch is real, from 0 to 1: of `x.to_padded().data`, or of `x.data`; 1 of nothing.

    Compile:
        A float that the graph computes anew in each call, one graph for all lengths. Of a NestedTensor that knows its
        longest row it is made of sizes; else lengths are read on the host, and a graph does not ask whether the
        batch is empty.
    """
    if isinstance(x, NestedTensor):
        s = x.structure
        real, whole = x.values.shape[s.packed_dim], s.batch_size * math.prod(longest(s))
    else:
        real = int(x.lengths.prod(1).sum())
        whole = math.prod([x.data.shape[d] for d in (x.batch_dim, *x.ragged_dims)])
    return 1.0 if is_zero(whole) else real / whole


def mT(x: Any) -> Any:  # torch's name
    """Each matrix, the last two dims, transposed."""
    return x.transpose(-2, -1)


def mH(x: Any) -> Any:  # torch's name
    """Each matrix, the last two dims, transposed and conjugated."""
    return x.transpose(-2, -1).conj()


METHODS = (is_contiguous, element_size, nelement, get_device, retain_grad, is_pinned, pin_memory)
PROPERTIES = (itemsize, nbytes, is_cpu, is_leaf, grad_fn, occupancy, mT, mH)

for _cls in (NestedTensor, MaskedBatch):
    for _method in METHODS:
        setattr(_cls, _method.__name__, _method)
    for _fact in PROPERTIES:
        setattr(_cls, _fact.__name__, read_only(_fact.__name__, property(_fact, doc=_fact.__doc__)))
MaskedBatch.tolist = masked_tolist  # type: ignore[attr-defined]  # methods are the functions; no layer calls upwards
_fact = property(cu_seqlens, doc=cu_seqlens.__doc__)
NestedTensor.cu_seqlens = read_only("cu_seqlens", _fact)  # type: ignore[attr-defined]  # as above
NestedTensor.max_seqlen = NestedTensor.max_length  # type: ignore[attr-defined]  # as above
