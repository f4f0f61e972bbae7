"""Methods and properties of ragged batches that are not in the class bodies; one loop attaches them.

Those here answer as a tensor does (bytes, contiguity, autograd, pinned memory): for the values of a NestedTensor and
the data of a MaskedBatch, without offsets and lengths. Methods of operations come from the rules.

Invariant: nothing here reads data, except `occupancy`, which reads lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tdc.core.dynamo import is_zero
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.core.frozen import read_only
from tdc.layout.segments import longest, offsets_int32, row_ids
from tdc.layout.structure import Structure
from tdc.ragged.convert import pad_levels, to_packed, to_padded, to_torch
from tdc.ragged.index import index_ragged, picker, same_structure, with_structure_of
from tdc.ragged.masked import MaskedBatch, build_masked
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import R, Ragged, data_of, with_data
from tdc.ragged.two_level import TwoLevelTensor


def is_contiguous(x: Ragged, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """True if the elements are in memory in the order of the dims, rows one after another."""
    return data_of(x).is_contiguous(memory_format=memory_format)


def is_nested(x: Ragged) -> bool:
    """False: this is not a `torch.nested` tensor; see `to_torch`."""
    return False


def of_data(name: str, result: str, what: str, called: bool = False) -> Callable[[Ragged], Any] | property:
    """A method or property of tensors, of the values of a NestedTensor and of the data of a MaskedBatch."""

    def method(x: Ragged) -> Any:
        return getattr(data_of(x), name)()

    def get(x: Ragged) -> Any:
        return getattr(data_of(x), name)

    fn = method if called else get
    fn.__name__, fn.__doc__, fn.__annotations__["return"] = name, what, result
    return fn if called else property(fn)


def nbytes(x: Ragged) -> int:
    """Bytes of the elements; `tdc.nbytes` counts the structure, too."""
    return data_of(x).numel() * data_of(x).element_size()  # a graph has no `nbytes` of sizes that vary


def requires_grad_(x: R, requires_grad: bool = True) -> R:
    """Make the elements a leaf of autograd. Returns this object, as torch does."""
    data_of(x).requires_grad_(requires_grad)
    return x


def grad(x: R) -> R | None:
    """Gradient of the elements, as a batch of the same lengths."""
    found = data_of(x).grad
    return None if found is None else with_data(x, found)


def pin_memory(x: R) -> R:
    """A copy in page-locked memory, for a copy to a GPU that need not wait; `DataLoader(pin_memory=True)` calls it."""
    if isinstance(x, MaskedBatch):
        return build_masked(x.data.pin_memory(), x.lengths.pin_memory(), x.ragged_dims, x.batch_dim, new_lengths=True)
    s = x.structure
    shapes = None if s.shapes is None else s.shapes.pin_memory()
    structure = Structure(s.offsets.pin_memory(), shapes, s.extent, s.packed_dim, s.batch_dim, s.ragged_ndim)
    return build_nested(structure.marked(), x.values.pin_memory())


def tolist(x: Ragged) -> list[Any]:
    """Examples as nested Python lists, without padding."""
    return [row.tolist() for row in x.unbind()]


def iterate(x: Ragged) -> Iterator[Any]:
    """The parts along dim 0, which are the examples as a rule, one after another."""
    return iter(x.unbind())


def contains(x: Ragged, element: Any) -> bool:
    """True if a real element is equal to a number, as `element in tensor`; reads the answer on the host.

    Raises:
        DtypeError: not a number, nor a tensor of one.
    """
    if not isinstance(element, (Tensor, int, float, complex)) or (isinstance(element, Tensor) and element.numel() != 1):
        hint = "any([row.equal(r) for r in x.unbind()]) looks for a row"
        raise DtypeError(message("__contains__", "a number", describe(element), hint=hint))
    return bool((x == element).any())  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]  # of the rules


def cu_seqlens(x: NestedTensor) -> Tensor:
    """Offsets as flash-style kernels take them: starts of rows, and N, (B+1,) int32."""
    return offsets_int32(x.structure)


def row_ids_of(x: NestedTensor) -> Tensor:
    """The example that each packed element belongs to, (N,) int64: `batch` of PyTorch Geometric, `value_rowids` of
    TensorFlow."""
    return row_ids(x.structure, x.values.shape[x.structure.packed_dim])


def occupancy(x: Ragged) -> float:
    """Real part of the padded batch, from 0 to 1: of `x.to_padded().data`, or of `x.data`; 1 of nothing.

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


def mT(x: R) -> R:  # torch's name
    """Each matrix, the last two dims, transposed.

    Raises:
        ShapeError: one of these is the batch.
    """
    if x._batch_dim >= x.ndim - 2:
        raise ShapeError(message("mT", "matrices", describe(x), hint="x.transpose(0, 1) moves the batch"))
    return x.transpose(-2, -1)


def mH(x: R) -> R:  # torch's name
    """Each matrix, the last two dims, transposed and conjugated."""
    return mT(x).conj()


OF_DATA = {
    "element_size": of_data("element_size", "int", "Bytes of one element.", called=True),
    "nelement": of_data("numel", "int", "Number of elements in memory, as `x.numel()`.", called=True),
    "get_device": of_data("get_device", "int", "Number of the CUDA device, -1 on CPU.", called=True),
    "retain_grad": of_data("retain_grad", "None", "Keep the gradient of a batch that is not a leaf.", called=True),
    "is_pinned": of_data("is_pinned", "bool", "True if the elements are in page-locked memory.", called=True),
    "itemsize": of_data("itemsize", "int", "Bytes of one element."),
    "is_cpu": of_data("is_cpu", "bool", "True if the batch is in the memory of the host."),
    "is_cuda": of_data("is_cuda", "bool", "True if the elements are on a CUDA device."),
    "requires_grad": of_data("requires_grad", "bool", "True if the elements require grad."),
    "is_leaf": of_data("is_leaf", "bool", "True if the elements are a leaf of autograd."),
    "grad_fn": of_data("grad_fn", "Any", "The node of autograd that made the elements."),
}
SHARED: dict[str, Any] = {
    **OF_DATA,
    "nbytes": property(nbytes),
    "__contains__": contains,
    "__iter__": iterate,
    "is_contiguous": is_contiguous,
    "tolist": tolist,
    "requires_grad_": requires_grad_,
    "pin_memory": pin_memory,
    "is_nested": property(is_nested),
    "grad": property(grad),
    "occupancy": property(occupancy),
    "mT": property(mT),
    "mH": property(mH),
    "__getitem__": index_ragged,
    "_picker": picker,
    "_same_structure": same_structure,
    "_with_structure_of": with_structure_of,
}
NESTED: dict[str, Any] = {
    "to_padded": to_padded,
    "to_torch": to_torch,
    "cu_seqlens": property(cu_seqlens),
    "max_seqlen": NestedTensor.max_length,
    "row_ids": property(row_ids_of),
}
MASKED: dict[str, Any] = {"to_packed": to_packed}
TWO_LEVEL: dict[str, Any] = {"to_padded": pad_levels, "__contains__": contains, "is_nested": property(is_nested)}

for _cls, _table in (
    (NestedTensor, SHARED | NESTED), (MaskedBatch, SHARED | MASKED), (TwoLevelTensor, TWO_LEVEL),
):  # fmt: skip
    for _name, _value in _table.items():
        setattr(_cls, _name, read_only(_name, _value) if isinstance(_value, property) else _value)
