"""Parts of a TensorDict along a batch dim, and whether the results of parts go together.

Invariant: an error names the part by its number and by the range of examples in it, and all keys that are wrong.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.container import dims_of
from tdc.core.dynamo import eager
from tdc.core.errors import DtypeError, ShapeError, StructureError, describe, message, refuse_wrong
from tdc.core.keys import show
from tdc.interop.spec import differences, spec_of
from tdc.io.origin import origin_of
from tdc.ops.copy import copy_
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.storage import BATCHES
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.storage import is_tensordict
from tdc.tensordict.tensordict import TensorDict

OP = "map"


class Chunk(NamedTuple):
    """One part: its number, and the examples in it; `single` for one example, without the dim."""

    number: int
    start: int
    stop: int
    single: bool = False

    def __str__(self) -> str:
        return f"example {self.start}" if self.single else f"chunk {self.number}, examples [{self.start}:{self.stop}]"

    def spelled(self, dim: int) -> str:
        """The index of this part, as it is written."""
        return ":, " * dim + (f"{self.start}" if self.single else f"{self.start}:{self.stop}")

    def of(self, td: TensorDict, dim: int) -> TensorDict:
        """This part of a TensorDict, which shares its memory."""
        return td[(*[slice(None)] * dim, self.start if self.single else slice(self.start, self.stop))]


class Chunks(NamedTuple):
    """All parts of `length` examples: `size` in each but the last, or `single` ones."""

    length: int
    size: int
    single: bool = False

    @property
    def total(self) -> int:
        """How many there are. Of no examples there is one part, which is empty."""
        return self.length if self.single else max(1, -(-self.length // self.size))

    def at(self, number: int) -> Chunk:
        """One of them."""
        if self.single:
            return Chunk(number, number, number + 1, True)
        return Chunk(number, number * self.size, min((number + 1) * self.size, self.length))


def chunks_of(length: int, chunksize: int | None, num_chunks: int) -> Chunks:
    """Parts of a size, or as many parts as `torch.chunk` makes of that number."""
    if chunksize == 0:
        return Chunks(length, 1, True)
    return Chunks(length, max(1, -(-length // num_chunks)) if chunksize is None else chunksize)


def check_result(result: Any, number: int, chunks: Chunks) -> None:
    """Refuse a result that can be joined to none."""
    if not is_tensordict(result) and not isinstance(result, (Tensor, *BATCHES)):
        hint = "td.update({'y': y}), a tensor for each example, or None everywhere"
        got = f"{describe(result)} of {chunks.at(number)}"
        raise DtypeError(message(OP, "a TensorDict, a tensor or a ragged batch", got, hint=hint))


def check_alike(results: list[Any], dim: int, chunks: Chunks) -> None:
    """Refuse results with other keys, dtypes or features than those of the first part; each wrong key is named."""
    check_result(results[0], 0, chunks)
    first = as_dict(results[0], dim, chunks.single)
    if dims_of(results[0]) + chunks.single <= dim:
        expected = f"results with dim {dim}, along which they are joined"
        hint = "chunksize=0 for one example at a time, whose results are stacked; result.unsqueeze(dim) of a part"
        if chunks.single:
            expected = f"results of at least {dim} dim{'s' * (dim > 1)}, to be stacked along dim {dim}"
            hint = f"tdc.map(fn, td.movedim({dim}, 0), chunksize=0) stacks them along dim 0"
        got = f"{describe(results[0])} of {chunks.at(0)}"
        raise ShapeError(message(OP, expected, got, hint=hint))
    form = spec_of(OP, first).with_device(None)
    if not chunks.single:
        form = form.with_batch_size([None if d == dim else n for d, n in enumerate(first.batch_size)])
    for number, result in enumerate(results):
        check_result(result, number, chunks)
        wrong = [] if result is first else unlike(result, form, dim, chunks)
        if wrong:
            expected, got = "results that are alike", f"{counted(wrong)} in {chunks.at(number)}"
            hint = "the same keys, dtypes and features in each; td.to(dtype, where=...) converts"
            hint += "; chunksize=1 keeps the dim, along which ragged results are joined" if chunks.single else ""
            raise StructureError(message(OP, expected, got, wrong, hint))


def counted(wrong: list[str]) -> str:
    """How many differences there are."""
    return f"{len(wrong)} difference{'s' * (len(wrong) > 1)}"


def unlike(result: Any, form: Any, dim: int, chunks: Chunks) -> list[str]:
    """The differences between a result and the form of the first, one line each."""
    found = as_dict(result, dim, chunks.single)
    if len(found._size) != len(form.batch_size):
        return [f"batch dims: {len(found._size)} instead of {len(form.batch_size)}"]
    return differences(found, form)


def as_dict(result: Any, dim: int, single: bool) -> TensorDict:
    """A result as a TensorDict; of a tensor or ragged batch the dims up to the joined one are batch dims."""
    if not is_tensordict(result):
        size = () if single else result.shape[: dim + 1]
        return TensorDict({"result": result}, size)
    return result


def joined(results: list[Any], dim: int, chunks: Chunks) -> Any:
    """The results of all parts as one; None where all are None."""
    if not results:
        hint = "chunksize=1 keeps the dim, so that a batch of no examples is one part"
        raise StructureError(message(OP, "examples to stack the results of", "a batch of none", hint=hint))
    nothing = [r is None for r in results]
    if any(nothing):
        if all(nothing):
            return None
        hint = "return the part itself where nothing changes"
        raise StructureError(message(OP, "results of all parts, or none", "None for some", hint=hint))
    check_alike(results, dim, chunks)
    return torch.stack(results, dim) if chunks.single else torch.cat(results, dim)


def check_out(out: Any, td: TensorDict, dim: int) -> None:
    """Refuse what results cannot be written into."""
    if not is_tensordict(out):
        hint = "tdc.io.memmap_empty(spec, path, batch_size), or tdc.interop.zeros(spec, batch_size)"
        raise DtypeError(message(OP, "a TensorDict for out", describe(out), hint=hint))
    if len(out._size) <= dim or out._size[dim] != td._size[dim]:
        expected, got = f"out with {td._size[dim]} examples along dim {dim}", describe(out)
        raise ShapeError(message(OP, expected, got, hint="out has the batch size of all results together"))
    wrong = {show(p): describe(unwrap(x)) for p, x in out._leaves.items() if not isinstance(x, (Tensor, MaskedBatch))}
    hint = "leave out= away, and save the result: it has no place before all sizes are known"
    refuse_wrong(DtypeError, OP, "tensors and padded batches to write into", wrong, "others", hint)
    closed = [show(p) for p, x in out._leaves.items() if eager() and is_closed(x)]
    hint = "tdc.io.load(path, mode='r+'); what is written into one of mode 'r' never reaches its files"
    refuse_wrong(StructureError, OP, "out open for writing", closed, "leaves of a store of mode 'r'", hint)


def is_closed(x: Any) -> bool:
    """Whether a leaf is mapped from a store that was opened for reading alone."""
    found = origin_of(x.data if isinstance(x, MaskedBatch) else x)
    return found is not None and not found.source.shared


def write(result: Any, target: TensorDict, chunk: Chunk) -> None:
    """Write the result of a part into its place; it has exactly the keys, dtypes and shapes that are there."""
    if not is_tensordict(result):
        hint = "return td.select('y') or TensorDict({'y': y}, td.batch_size)"
        raise DtypeError(message(OP, "a TensorDict to write into out", f"{describe(result)} of {chunk}", hint=hint))
    form = spec_of(OP, target).with_device(None)
    wrong = differences(result, form)
    if wrong:
        expected, got = "results of the form of out", f"{counted(wrong)} in {chunk}"
        raise StructureError(message(OP, expected, got, wrong, "return what out has, or make out of what fn returns"))
    copy_(target, result)
