"""How long the examples of a batch are: what samplers by length are given.

Invariant: the result is a vector of int64 on the host, none of it negative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.layout.segments import lengths_of
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.ragged.two_level import TwoLevelTensor


def example_lengths(op: str, given: Any) -> Tensor:
    """Lengths of examples as (B,): those of a ragged leaf, or numbers.

    Raises:
        DtypeError: neither a ragged batch nor whole numbers.
        ShapeError: no vector, or a length below 0.
    """
    if isinstance(given, NestedTensor):
        return lengths_of(given.structure).cpu()
    if isinstance(given, TwoLevelTensor):  # elements, as tokens of a document
        return given.values.offsets[given.offsets].diff().cpu()
    if isinstance(given, MaskedBatch):
        return given.lengths.to(torch.int64).prod(1).cpu()
    hint = "td['tokens'] of ragged tokens, or their lengths as a vector of whole numbers"
    expected = "a ragged batch, or lengths (B,)"
    if isinstance(given, (list, tuple)) or (hasattr(given, "__array__") and not isinstance(given, Tensor)):
        try:
            found = torch.as_tensor(given, dtype=None if len(given) else torch.int64, device="cpu")
        except (TypeError, ValueError, RuntimeError):
            raise DtypeError(message(op, expected, describe(given), hint=hint)) from None
    else:
        found = given
    if not isinstance(found, Tensor) or found.dtype.is_floating_point or found.dtype.is_complex:
        raise DtypeError(message(op, expected, describe(found), hint=hint))
    if found.ndim != 1 or found.dtype == torch.bool:
        raise ShapeError(message(op, expected, describe(found), hint=hint))
    found = found.to("cpu", torch.int64)  # unsigned numbers of 16 bits and more are not compared
    if bool((found < 0).any()):
        at = int((found < 0).nonzero()[0, 0])
        got, hint = f"one below 0 at example {at}", "lengths.clamp(min=0)"
        raise ShapeError(message(op, "lengths of 0 or more", got, hint=hint))
    return found
