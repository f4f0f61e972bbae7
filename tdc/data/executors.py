"""Parts of a TensorDict through an executor: a bounded number at once, results in order, the first error ends all.

Any `concurrent.futures.Executor` serves: threads and processes of Python, `loky`, `Client.get_executor()` of dask. Only
`submit` is called. Whether a part is tried again when its process dies is up to the executor: dask does, the others end
with an error. Nothing here kills or restarts a process.

Invariants: no part is submitted after an error; those that wait are cancelled, those that run are not waited for.
"""

from __future__ import annotations

import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import ChunkError, DtypeError, TdcError, UnsupportedError, describe, message
from tdc.core.pytree import tree_map
from tdc.data.chunks import OP, Chunk, write
from tdc.io.by_path import Alone, Parcel, Sealed, is_open_store
from tdc.ragged.storage import BATCHES
from tdc.tensordict.storage import is_tensordict
from tdc.tensordict.tensordict import TensorDict

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
    """What a worker does with one part. The result is written where it belongs, or sent back.

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
    """Whether a result is sent as a Parcel."""
    return is_tensordict(x) or isinstance(x, (Tensor, *BATCHES))


def sendable(x: Any) -> Any:
    """What is in a list or dict of results, tensors and ragged batches so that they may be those of a store."""
    return Alone(x) if is_batch(x) and not is_tensordict(x) else x


class Work:
    """A function of the parts of a TensorDict, done by an executor.

    Args:
        out: where results go, if anywhere. Workers write into a store that is open for writing themselves.
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
    """Whether a function or an error can go to another process and back."""
    try:
        pickle.loads(pickle.dumps(x))
    except Exception:
        return False
    return True
