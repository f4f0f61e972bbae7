"""group_by: the examples of a TensorDict by the value that a leaf has in each.

Invariant: groups are in the order in which their values first appear, and examples keep their order in a group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import DtypeError, ShapeError, describe, message, refuse_wrong
from tdc.core.typing import NestedKey
from tdc.tensordict.combine import named_leaves
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.object_array import ObjectArray
from tdc.tensordict.tensordict import TensorDict


def group_by(td: TensorDict, key: NestedKey) -> dict[Any, TensorDict]:
    """The examples of a TensorDict by the value that a leaf has in each, in order of first appearance.

    Args:
        key: a leaf with one value for each example, a tensor or an ObjectArray; the TensorDict has one batch dim.

    Returns:
        A dict from Python value to the TensorDict of its examples.

    Raises:
        ShapeError: no batch dim, or a leaf with more dims than one.
        KeyPathError: a key that is not there, or no leaf.
        DtypeError: objects that cannot be keys of a dict.

    Compile:
        Eager only: how many groups there are depends on the data, which is read on the host.

    Example:
        >>> td = TensorDict({"x": torch.arange(4), "label": torch.tensor([1, 0, 1, 1])}, [4])
        >>> {label: group["x"].tolist() for label, group in group_by(td, "label").items()}
        {1: [0, 2, 3], 0: [1]}
    """
    _, leaves = named_leaves("data.group_by", td, [key])
    leaf = unwrap(leaves[0])
    if len(td._size) == 0 or not isinstance(leaf, (Tensor, ObjectArray)) or leaf.ndim != 1:
        hint = "td.flatten() for several batch dims; stack features to one code first"
        raise ShapeError(message("data.group_by", "a leaf with one value for each example", describe(leaf), hint=hint))
    found: dict[Any, list[int]] = {}
    values: list[Any] = leaf.tolist()
    wrong = {f"example {i}": type(value).__name__ for i, value in enumerate(values) if not is_hashable(value)}
    expected, hint = "values that can be keys of a dict", "group by a leaf of codes, or by tuples instead of lists"
    refuse_wrong(DtypeError, "data.group_by", expected, wrong, "others", hint)
    for i, value in enumerate(values):
        found.setdefault(value, []).append(i)
    return {value: td[torch.tensor(indices, device=td._device)] for value, indices in found.items()}


def is_hashable(x: Any) -> bool:
    """True if a value can be a key of a dict; a tuple can where what it holds can."""
    try:
        hash(x)
    except TypeError:
        return False
    return True
