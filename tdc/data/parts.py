"""Parts of a TensorDict along a batch dim: cutting, joining and writing results, and an executor that does the work.

Any `concurrent.futures.Executor` serves: threads and processes of Python, `loky`, `Client.get_executor()` of dask. Only
`submit` is called. Whether a part is tried again when its process dies is up to the executor.

Invariants:
  - an error names the part by its number and by the range of examples in it, and all keys that are wrong;
  - no part is submitted after an error; those that wait are cancelled, those that run are not waited for.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.container import dims_of
from tdc.core.dynamo import eager
from tdc.core.errors import (
    ChunkError,
    DtypeError,
    ShapeError,
    StructureError,
    TdcError,
    UnsupportedError,
    describe,
    message,
    refuse_wrong,
)
from tdc.core.keys import show
from tdc.core.pytree import tree_map
from tdc.interop.spec import differences, spec_of
from tdc.io.by_path import Alone, Parcel, Sealed, is_open_store
from tdc.io.files import origin_of
from tdc.ops.tensordict.copy import copy_
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.storage import BATCHES
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
        """Number of parts. Of no examples there is one, which is empty."""
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
    """Number of differences."""
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
    wrong = {show(p): describe(x) for p, x in out._leaves.items() if not isinstance(x, (Tensor, MaskedBatch))}
    hint = "leave out= away, and save the result: it has no place before all sizes are known"
    refuse_wrong(DtypeError, OP, "tensors and padded batches to write into", wrong, "others", hint)
    closed = [show(p) for p, x in out._leaves.items() if eager() and is_closed(x)]
    hint = "tdc.io.load(path, mode='r+'); what is written into one of mode 'r' never reaches its files"
    refuse_wrong(StructureError, OP, "out open for writing", closed, "leaves of a store of mode 'r'", hint)


def is_closed(x: Any) -> bool:
    """True if a leaf is mapped from a store that was opened for reading alone."""
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


MOST = 128  # parts that are submitted and not done
UNSENT = ("pickle", "get local object")  # words of errors of pickle; the latter are those of Python 3.13
IMPORTED_IN = os.getpid()  # another one than that of this process where it was forked since
Done = Callable[[], None]


def check_executor(op: str, executor: Any) -> None:
    """Refuse what is no executor."""
    if not isinstance(executor, Executor):
        hint = "concurrent.futures.ProcessPoolExecutor(2), or client.get_executor() of a dask Client"
        raise DtypeError(message(op, "a concurrent.futures.Executor", describe(executor), hint=hint))


class Told(Exception):
    """The name and the traceback of an error that cannot be sent itself, which would end a pool of processes."""

    def __str__(self) -> str:
        return str(self.args[1])


def run(fn: Callable[..., Any], part: Any, target: Any, chunk: Chunk, caller: int) -> Any:
    """Run a function on one part, in a worker. The result is written where it belongs, or sent back.

    Args:
        caller: the process that submitted it.
    """
    if os.getpid() not in (IMPORTED_IN, caller):  # forked: an operation that wants OpenMP's threads would wait for ever
        torch.set_num_threads(1)
    opened = part.open()
    try:
        result = fn(opened)
    except Exception as error:
        if os.getpid() != caller and not is_picklable(error):
            raise Told(type(error).__name__, "".join(traceback.format_exception(error))) from None
        raise
    if target is not None:
        write(result, target.open(), chunk)
        return None
    if is_batch(result):
        return Parcel(result)
    return result if os.getpid() == caller else tree_map(sendable, result, is_leaf=is_batch)


def is_batch(x: Any) -> bool:
    """True if a result is sent as a Parcel."""
    return is_tensordict(x) or isinstance(x, (Tensor, *BATCHES))


def sendable(x: Any) -> Any:
    """An entry of a list or dict of results; tensors and ragged batches may be those of a store."""
    return Alone(x) if is_batch(x) and not is_tensordict(x) else x


class Work:
    """A function of the parts of a TensorDict, done by an executor.

    Args:
        out: where results are written, if anywhere. Workers write into a store that is open for writing themselves.
        done: called as parts are done, in whatever order.
    """

    def __init__(
        self, op: str, executor: Executor, fn: Callable[..., Any], td: TensorDict, dim: int,
        out: TensorDict | None = None, done: Done = lambda: None,
    ) -> None:  # fmt: skip
        self.op, self.executor, self.fn, self.td, self.dim, self.out, self.done = op, executor, fn, td, dim, out, done
        self.by_workers = out is not None and is_open_store(out)

    def submit(self, chunk: Chunk) -> Future[Any]:
        """Hand a part to the executor."""
        part = Parcel(chunk.of(self.td, self.dim))
        target = Parcel(chunk.of(self.out, self.dim)) if self.out is not None and self.by_workers else None
        try:
            return self.executor.submit(run, self.fn, part, target, chunk, os.getpid())
        except Exception as error:
            if isinstance(error, RuntimeError) and "shutdown" in str(error):
                raise self.closed(chunk) from error
            raise self.failure(chunk, error) from error

    def results(self, chunks: Iterable[Chunk], ahead: int) -> Iterator[Any]:
        """The results of parts in their order, of which at most `ahead` are submitted before they are asked for."""
        left = iter(chunks)
        waiting: deque[tuple[Chunk, Future[Any]]] = deque()
        running: dict[Future[Any], Chunk] = {}
        try:
            while True:
                while len(waiting) < ahead and len(running) < MOST and (chunk := next(left, None)) is not None:
                    future = self.submit(chunk)
                    running[future] = chunk
                    waiting.append((chunk, future))
                if not waiting:
                    return
                if not waiting[0][1].done():
                    wait(running, return_when=FIRST_COMPLETED)
                for future in [future for future in running if future.done()]:
                    self.check(future, running.pop(future))
                while waiting and waiting[0][1] not in running:
                    chunk, future = waiting.popleft()
                    yield self.received(future.result(), chunk)
        finally:
            for _, future in waiting:
                future.cancel()

    def check(self, future: Future[Any], chunk: Chunk) -> None:
        """Raise the error of a part that has failed."""
        if future.cancelled():
            raise self.closed(chunk)
        error = future.exception()
        if error is not None:
            failure = self.failure(chunk, error)
            if failure is error:
                raise error
            raise failure from error
        self.done()

    def closed(self, chunk: Chunk) -> ChunkError:
        """The error of a part that an executor no longer does."""
        got = f"{chunk} refused or cancelled by an executor that was shut down"
        hint = "keep the executor open until all is done"
        return ChunkError(message(self.op, "a result of every part", got, hint=hint))

    def received(self, result: Any, chunk: Chunk) -> Any:
        """The result of a part, as it is or written into its place."""
        result = result.open() if isinstance(result, (Parcel, Sealed)) else result
        if self.out is not None and not self.by_workers:
            write(result, chunk.of(self.out, self.dim), chunk)
            return None
        return result

    def failure(self, chunk: Chunk, error: BaseException) -> BaseException:
        """The error that says in which part another one was raised; our own says it already."""
        text = str(error)
        unsent = any([word in text.lower() for word in UNSENT])
        if isinstance(error, TdcError) and text.startswith(f"tdc.{OP}: "):
            return error
        got = f"{error.args[0] if isinstance(error, Told) else type(error).__name__} in {chunk}"
        if isinstance(error, BrokenExecutor) or type(error).__name__ == "KilledWorker":  # of dask
            hint = "smaller chunks take less memory; processes need `if __name__ == '__main__':`, and fn in a file"
            return ChunkError(message(self.op, "workers that live", got, hint=hint))
        if unsent and not is_picklable(self.fn):
            hint = "a function of a module, functools.partial(fn, setting=1); loky and dask take a lambda, too"
            return UnsupportedError(message(self.op, "a function that can be pickled", describe(self.fn), hint=hint))
        hint = f"the error above says why; fn(td[{chunk.spelled(self.dim)}]) shows it in this process"
        if unsent or "serialize" in text.lower():  # torch's word for it
            hint = "parts and results are pickled: td.detach() where they have a graph, no lambdas and no generators"
        return ChunkError(message(self.op, "a result of every part", got, hint=hint))


def is_picklable(x: Any) -> bool:
    """True if a function or an error can go to another process and back."""
    try:
        pickle.loads(pickle.dumps(x))
    except Exception:
        return False
    return True
