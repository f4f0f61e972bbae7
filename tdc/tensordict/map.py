"""map: a function of a TensorDict part by part, so that only one part is worked on at a time.

Invariant: parts go in order, and their results are joined in that order along the same dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tdc.core.arguments import expect_function, expect_number
from tdc.core.errors import DtypeError, ShapeError, StructureError, UnsupportedError, describe, message
from tdc.tensordict.storage import is_tensordict
from tdc.tensordict.tensordict import TensorDict


def map(
    fn: Callable[..., Any], td: TensorDict, dim: int = 0, *, chunksize: int | None = None,
    num_chunks: int | None = None, num_workers: int = 0,
) -> Any:  # fmt: skip
    """Apply `fn` to parts of a TensorDict along a batch dim, and join the results.

    Args:
        fn: takes a TensorDict, and returns one, or a tensor or ragged batch; always None where only its effects count.
        dim: of the batch.
        chunksize: examples of a part, fewer in the last; 0 for single examples without the dim, whose results are
            stacked.
        num_chunks: how many parts, in place of their size. Without both there is one part.
        num_workers: only 0, this process. A `torch.utils.data.DataLoader` works in processes.

    Raises:
        DtypeError: no function, no TensorDict, or no number.
        ShapeError: a dim that is not there, a chunk size below 0, both `chunksize` and `num_chunks`.
        StructureError: results of which only some are None, or that do not go together.
        UnsupportedError: workers.

    Compile:
        Traceable; the number of parts is a constant of the graph.

    Example:
        >>> td = TensorDict({"x": torch.arange(5)}, [5])
        >>> map(lambda part: part.set("y", part["x"] + len(part)), td, chunksize=2)["y"]
        tensor([2, 3, 4, 5, 5])

    Source:
        RFC torch.dict.TensorDict, "TensorDict.map".
    """
    check_parts(fn, td, dim, chunksize, num_chunks, num_workers)
    batch: Any = td
    if chunksize == 0:
        results = [fn(example) for example in batch.unbind(dim)]
    elif chunksize is not None:
        results = [fn(part) for part in batch.split(chunksize, dim)]
    else:
        results = [fn(part) for part in batch.chunk(1 if num_chunks is None else num_chunks, dim)]
    if not results:
        hint = "chunksize=1 keeps the dim, so that a batch of no examples is one part"
        raise StructureError(message("map", "examples to stack the results of", "a batch of none", hint=hint))
    nothing = [r is None for r in results]
    if any(nothing):
        if all(nothing):
            return None
        hint = "return the part itself where nothing changes"
        raise StructureError(message("map", "results of all parts, or none", "None for some", hint=hint))
    return torch.stack(results, dim) if chunksize == 0 else torch.cat(results, dim)


def check_parts(fn: Any, td: Any, dim: Any, chunksize: int | None, num_chunks: int | None, num_workers: int) -> None:
    """Refuse arguments that `map` does not take."""
    if not is_tensordict(td):
        hint = "tdc.map(fn, td); td.apply(fn) for a function of leaves"
        raise DtypeError(message("map", "a function and a TensorDict", describe(td), hint=hint))
    expect_function("map", fn)
    expect_number("map", dim, chunksize or 0, num_chunks or 0, whole=True)
    if num_workers:
        hint = "num_workers=0, or a torch.utils.data.DataLoader for work in processes"
        raise UnsupportedError(message("map", "work in this process", f"num_workers={num_workers}", hint=hint))
    if (chunksize is not None and num_chunks is not None) or (chunksize or 0) < 0:
        got, hint = f"chunksize={chunksize}, num_chunks={num_chunks}", "chunksize=64, or num_chunks=8"
        raise ShapeError(message("map", "one of both, chunksize of at least 0", got, hint=hint))


def map_of(td: TensorDict, fn: Callable[..., Any], dim: int = 0, **kwargs: Any) -> Any:
    """`tdc.map(fn, td, dim, ...)`: `fn` of parts along a batch dim, joined."""
    return map(fn, td, dim, **kwargs)
