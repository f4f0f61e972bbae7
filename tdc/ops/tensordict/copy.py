"""copy_: the one function that writes into a tensor that it was given, as replay buffers and memory maps need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from tdc.core.arguments import NEW_DIM
from tdc.core.errors import (
    CallError,
    DtypeError,
    ShapeError,
    StructureError,
    UnsupportedError,
    describe,
    first_line,
    message,
    show_sizes,
)
from tdc.core.keys import show
from tdc.ragged.masked import MaskedBatch
from tdc.tensordict.indexing import Numbers, batch_index, is_number, normal_index, with_numbers
from tdc.tensordict.shared import Shared, check_pair
from tdc.tensordict.storage import is_tensordict
from tdc.tensordict.tensordict import TensorDict, index_size


def copy_(dst: Any, src: Any, index: Any = None) -> Any:
    """Write into the memory of `dst`, and return `dst`.

    Shapes:
        TensorDict `dst` of batch size S; `src` of batch size `dst[index].batch_size`, with some of its keys, or a
        number. Tensors: as `dst[index] = src`.

    Args:
        dst: a TensorDict or tensor with memory of its own.
        src: a TensorDict, a mapping of keys, a tensor for a tensor, or a number for everything.
        index: any index of torch on the batch dims; all of it by default.

    Raises:
        StructureError: keys that `dst` does not have; all are named.
        ShapeError: another batch size, or leaves of other shapes.
        UnsupportedError: a packed leaf, whose rows have no memory to spare.

    Compile:
        fullgraph: the graph changes its input in place. Not under `vmap`.

    Example:
        >>> import torch
        >>> buffer = TensorDict({"obs": torch.zeros(3, 2), "done": torch.zeros(3)}, [3])
        >>> _ = copy_(buffer, {"obs": torch.ones(2), "done": torch.tensor(1.0)}, index=1)
        >>> buffer["obs"].tolist(), buffer["done"].tolist()
        ([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]], [0.0, 1.0, 0.0])
    """
    if not is_tensordict(dst):
        write(dst, src, numbers_of(dst, index))
        return dst
    size = dst.batch_size
    if not isinstance(index, NEW_DIM):  # a question by `is` would make constants of numbers in a slice
        size, index = index_size(dst, index), normal_index(dst, index)
    if not is_tensordict(src) and not isinstance(src, Mapping):
        if not isinstance(src, (int, float, complex)):
            got, hint = describe(src), "td.apply(lambda leaf: ...) to choose a value for each leaf"
            raise DtypeError(message("copy_", "a TensorDict, a mapping or a number", got, hint=hint))
        for leaf in dst._leaves.values():
            write(leaf, src, index)
        return dst
    given: Any = src if is_tensordict(src) else TensorDict(src, size)
    if given.batch_size != size:
        expected, got = f"batch size {show_sizes(size)}", show_sizes(given.batch_size)
        raise ShapeError(message("copy_", expected, got, hint="index or expand the source"))
    unknown = [f"{show(p)}: not in the destination" for p in given._leaves if p not in dst._leaves]
    if unknown:
        hint = "the memory is fixed: td.set for a new key"
        raise StructureError(message("copy_", "keys of the destination", f"{len(unknown)} others", unknown, hint))
    fit(dst, given, len(dst.batch_size), len(size))
    for path, leaf in given._leaves.items():
        write(dst._leaves[path], leaf, index)
    return dst


def numbers_of(dst: Any, index: Any) -> Any:
    """An index of one tensor or batch, with numbers in tensors kept on their device."""
    parts = index if type(index) is tuple else (index,)
    if not isinstance(dst, (Tensor, MaskedBatch)) or not any([is_number(part) for part in parts]):
        return index
    return with_numbers(batch_index(parts, dst.shape))


def fit(dst: TensorDict, src: TensorDict, outer: int, inner: int) -> None:
    """A ShapeError unless leaves have the features of those that they are written into; all that do not are named."""
    wrong = {
        show(p): f"{describe(x)} into {describe(dst._leaves[p])}"
        for p, x in src._leaves.items()
        if x.shape[inner:] != dst._leaves[p].shape[outer:]
    }
    if wrong:
        got, hint = f"{len(wrong)} that differ", "pad or reshape the source"
        raise ShapeError(message("copy_", "leaves with the features of the destination", got, wrong, hint))


def write(dst: Any, src: Any, index: Any) -> None:
    """Write into one leaf, a tensor or a padded batch."""
    if isinstance(dst, MaskedBatch) and isinstance(src, MaskedBatch):
        write(dst.data, src.data, index)
        write(dst.lengths, src.lengths, index)
    elif type(dst) is Shared or type(src) is Shared:
        if isinstance(src, (Tensor, Shared)):
            check_pair("copy_", dst, src)
    elif isinstance(dst, Tensor) and type(index) is Numbers:
        index.write(dst, src)
    elif isinstance(dst, Tensor):
        try:
            dst[() if isinstance(index, NEW_DIM) else index] = src.to(dst.dtype) if isinstance(src, Tensor) else src
        except RuntimeError as error:
            got, hint = f"{describe(src)} into {describe(dst)}", f"torch: {first_line(error)}"
            raise CallError(message("copy_", "a source that fits", got, hint=hint)) from None
    else:
        got, hint = describe(dst), "pad it with to_padded(), or td.set a new one"
        raise UnsupportedError(message("copy_", "tensors or padded batches of the same kind", got, hint=hint))
