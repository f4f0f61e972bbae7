"""Tensors as arrays of numpy, which tdc neither imports nor depends on: torch hands out the class of its arrays.

`Tensor.numpy` forbids for good that the storage of a tensor is resized, as FSDP does, and lacks dtypes such as bfloat16
(torch 2.11-2.13). So `array_of` reads the memory itself, for copies: to a copy, elements of one size are all alike.

    image (h, w, 3), uint8     array (h, w) of elements of 3 bytes

Invariant: such an array does not keep its memory alive, so it goes no further than the function that asks for it.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

WRITE = 0x200  # PyBUF_WRITE: memory that may be written to
python: Any = ctypes.pythonapi  # whose own functions stay as they are, since all libraries share them
signature = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
memory_at = signature(("PyMemoryView_FromMemory", python))


@cache
def ndarray() -> type[Any]:
    """numpy's class of arrays; a RuntimeError of torch where there is no numpy."""
    return type(torch.empty(0, device="cpu").numpy())


@cache
def has_numpy() -> bool:
    """Whether there is numpy."""
    try:
        return bool(ndarray())
    except RuntimeError:
        return False


def arange(count: int) -> Any:
    """Whole numbers from 0 on as an array, int64; it takes a tenth of the time of a tensor."""
    return sys.modules[ndarray().__module__].arange(count)


@cache
def elements_of(size: int) -> Any:
    """numpy's dtype of elements of so many bytes: of numbers, which it copies faster, where there are such numbers."""
    return ndarray()((0,), f"u{size}" if size in (1, 2, 4, 8) else f"V{size}").dtype


def array_of(x: Tensor, dims: int) -> Any:
    """The first dims of a tensor on CPU as an array, in which all that lies behind them is one element.

    None where there is no numpy; of a tensor whose elements lie apart behind these dims; and of one whose memory does
    not say what it is: of another class, with a conj or neg bit, under a transform, of zeros without memory.

    Shapes:
        x `(*S, *E)` -> `S`.
    """
    if type(x) not in (Tensor, nn.Parameter) or not x.is_cpu or x.is_conj() or x.is_neg():
        return None
    count = 1
    for n, step in zip(reversed(x.shape[dims:]), reversed(x.stride()[dims:]), strict=True):
        if step != count and n != 1:
            return None
        count *= n
    size = x.element_size()
    try:
        storage, dtype = x.untyped_storage(), elements_of(size * count)
        start, length = storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        return None
    memory = memory_at(start, length, WRITE) if start else bytearray()
    steps = [n * size for n in x.stride()[:dims]]
    return ndarray()(x.shape[:dims], dtype, memory, x.storage_offset() * size, steps)
