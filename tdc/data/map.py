"""map: a function of a TensorDict part by part, in this process or by the workers of an executor.

    this process     map(fn, td, chunksize=64)                                 traceable
    processes        map(fn, td, num_workers=2), or executor=ProcessPoolExecutor(2)
    several hosts    map(fn, td, executor=client.get_executor())               of dask

Parts of a store go to workers by path. With `out=`, a store open for writing, workers write their results there; to a
`tdc.io.writer` results are appended in their order.

Invariant: results are in the order of the parts, whoever does them and whenever they are done.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from typing import Any

import torch

from tdc.core.arguments import expect, expect_at_least, expect_function, expect_number, normal_dim
from tdc.core.errors import DtypeError, ShapeError, describe, message
from tdc.core.progress import Progress, check_progress, shown
from tdc.data.epochs import SEEDS
from tdc.data.parts import Work, check_executor, check_out, chunks_of, joined, write
from tdc.io.writer import Writer
from tdc.tensordict.methods import register
from tdc.tensordict.storage import is_tensordict
from tdc.tensordict.tensordict import TensorDict

ITER = "data.map_iter"
AHEAD = 32  # results that wait for those before them to be appended


def map(
    fn: Callable[..., Any], td: TensorDict, dim: int = 0, *, chunksize: int | None = None,
    num_chunks: int | None = None, num_workers: int = 0, executor: Executor | None = None,
    out: TensorDict | Writer | None = None, progress: Progress = False,
) -> Any:  # fmt: skip
    """Apply `fn` to parts of a TensorDict along a batch dim, and join the results.

    Args:
        fn: takes a TensorDict, and returns one, or a tensor or ragged batch; always None where only its effects count.
            An executor may run it again for a part whose worker died.
        dim: of the batch.
        chunksize: examples of a part, fewer in the last; 0 for single examples without the dim, whose results are
            stacked.
        num_chunks: how many parts, in place of their size. Without both there is one part, or 4 for each worker.
        num_workers: processes started for this call; 0 for this process.
        executor: any `concurrent.futures.Executor`; parts of a store go to it by path, others as data.
        out: a TensorDict that results are written into, all of its keys, and that is returned. Where it is a store of
            mode "r+", workers write into the files themselves. Or a `tdc.io.writer`, which takes results of any number
            of rows, ragged ones, too; they are not joined.
        progress: True for a bar, or a function that takes how many parts are done and how many there are.

    Raises:
        DtypeError: no function, no TensorDict, no number; a result that is none.
        ShapeError: a dim that is not there, a chunk size below 0, both `chunksize` and `num_chunks`.
        StructureError: results of which only some are None, or that differ in keys, dtypes or features; an `out` of a
            store of mode "r", whose files would stay as they are.
        ChunkError: `fn` failed in a worker, or the worker died; the error behind it is its `__cause__`. Parts that wait
            are cancelled.
        UnsupportedError: a function that a process cannot get, such as a lambda.

    Compile:
        Traceable without an executor; the number of parts is a constant of the graph.

    Example:
        >>> td = TensorDict({"x": torch.arange(5)}, [5])
        >>> map(lambda part: part.set("y", part["x"] + len(part)), td, chunksize=2)["y"]
        tensor([2, 3, 4, 5, 5])

    Source:
        RFC torch.dict.TensorDict, "TensorDict.map".
    """
    dim = check_parts("map", fn, td, dim, chunksize, num_chunks)
    check_workers(num_workers, executor)
    check_progress("map", progress)
    if isinstance(out, Writer):
        check_appended(dim, chunksize)
    elif out is not None:
        check_out(out, td, dim)
    if num_workers:
        with ProcessPoolExecutor(
            num_workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)
        ) as pool:
            return by_executor(fn, td, dim, chunksize, num_chunks or 4 * num_workers, pool, out, progress)
    if executor is not None:
        return by_executor(fn, td, dim, chunksize, num_chunks or several(), executor, out, progress)
    return in_turn(fn, td, dim, chunksize, num_chunks or 1, out, progress)


def map_iter(
    fn: Callable[..., Any], td: TensorDict, dim: int = 0, *, chunksize: int | None = None,
    num_chunks: int | None = None, executor: Executor | None = None, shuffle: bool = False, seed: int | None = None,
    prefetch: int = 8,
) -> Iterator[Any]:  # fmt: skip
    """An iterator over the results of `fn` for parts of a TensorDict, in their order: `map` that joins nothing.

    Args:
        fn: as of `map`; its results may be anything.
        dim, chunksize, num_chunks, executor: as of `map`.
        shuffle: take the parts in random order. Examples stay with their neighbours: parts are ranges.
        seed: of that order; from torch's own generator by default.
        prefetch: how many parts an executor may be ahead of what was asked for.

    Returns:
        An iterator. When it is dropped, parts that wait are cancelled. Without an executor a part is done when its
        result is asked for.

    Raises:
        as `map`, the errors of `fn` from the iterator.

    Compile:
        Eager only.

    Example:
        >>> td = TensorDict({"x": torch.arange(6)}, [6])
        >>> list(map_iter(lambda part: int(part["x"].sum()), td, chunksize=2))
        [1, 5, 9]
    """
    dim = check_parts(ITER, fn, td, dim, chunksize, num_chunks)
    expect(ITER, shuffle, bool, of=" for shuffle")
    expect_at_least(ITER, 1, "prefetch", prefetch)
    if seed is not None:
        expect_number(ITER, seed, whole=True)
        if abs(seed) >= SEEDS:
            raise ShapeError(message(ITER, "a seed below 2**62", f"{seed}", hint="seed=0"))
    if executor is not None:
        check_executor(ITER, executor)
    chunks = chunks_of(td._size[dim], chunksize, num_chunks or (1 if executor is None else several()))
    order = range(chunks.total)
    if shuffle:
        generator = None if seed is None else torch.Generator().manual_seed(int(seed))
        order = torch.randperm(chunks.total, generator=generator, device="cpu").tolist()
    wanted = (chunks.at(number) for number in order)
    if executor is None:
        return (fn(chunk.of(td, dim)) for chunk in wanted)
    return Work(ITER, executor, fn, td, dim).results(wanted, prefetch)


def several() -> int:
    """Number of parts that an executor gets by default, as it does not tell how many workers it has."""
    return 4 * (os.cpu_count() or 1)


def by_executor(
    fn: Callable[..., Any], td: TensorDict, dim: int, chunksize: int | None, num_chunks: int, executor: Executor,
    out: TensorDict | Writer | None, progress: Progress,
) -> Any:  # fmt: skip
    """`map` by the workers of an executor."""
    chunks = chunks_of(td._size[dim], chunksize, num_chunks)
    wanted = [chunks.at(i) for i in range(chunks.total)]
    with shown(progress, chunks.total, "map") as advance:
        if isinstance(out, Writer):
            for result in Work("map", executor, fn, td, dim, None, advance).results(wanted, AHEAD):
                out.append(result)
            return out
        results = list(Work("map", executor, fn, td, dim, out, advance).results(wanted, chunks.total))
    return joined(results, dim, chunks) if out is None else out


def in_turn(
    fn: Callable[..., Any], td: Any, dim: int, chunksize: int | None, num_chunks: int,
    out: TensorDict | Writer | None, progress: Progress,
) -> Any:  # fmt: skip
    """`map` in this process."""
    chunks = chunks_of(td._size[dim], chunksize, num_chunks)
    parts: Any = torch.unbind(td, dim) if chunks.single else torch.split(td, chunks.size, dim)
    if out is None and progress is False:
        return joined([fn(part) for part in parts], dim, chunks)
    results = []
    with shown(progress, len(parts), "map") as advance:
        for number, part in enumerate(parts):
            result = fn(part)
            if out is None:
                results.append(result)
            elif isinstance(out, Writer):
                out.append(result)
            else:
                write(result, chunks.at(number).of(out, dim), chunks.at(number))
            advance()
    return joined(results, dim, chunks) if out is None else out


def check_parts(op: str, fn: Any, td: Any, dim: Any, chunksize: int | None, num_chunks: int | None) -> int:
    """Refuse arguments that `map` does not take; the dim counted from the front."""
    if not is_tensordict(td):
        hint = f"tdc.{op}(fn, td); td.apply(fn) for a function of leaves"
        raise DtypeError(message(op, "a function and a TensorDict", describe(td), hint=hint))
    expect_function(op, fn)
    expect_number(op, dim, chunksize or 0, num_chunks or 0, whole=True)
    if (chunksize is not None and num_chunks is not None) or (chunksize or 0) < 0:
        got, hint = f"chunksize={chunksize}, num_chunks={num_chunks}", "chunksize=64, or num_chunks=8"
        raise ShapeError(message(op, "one of both, chunksize of at least 0", got, hint=hint))
    if num_chunks is not None and num_chunks < 1:
        raise ShapeError(message(op, "num_chunks of 1 or more", f"{num_chunks}", hint="num_chunks=8"))
    if not td._size:
        hint = "td.with_batch_size([n]), or TensorDict({...}, batch_size=[n])"
        raise ShapeError(message(op, "a TensorDict with a batch dim", describe(td), hint=hint))
    return normal_dim(dim, len(td._size), op)


def check_appended(dim: int, chunksize: int | None) -> None:
    """Refuse parts whose results are no rows to append."""
    if dim or chunksize == 0:
        got = f"dim={dim}" if dim else "chunksize=0"
        raise ShapeError(message("map", "parts of rows for a writer", got, hint="dim=0, chunksize=1 or more"))


def check_workers(num_workers: Any, executor: Any) -> None:
    """Refuse a number of processes that is none, and one beside an executor."""
    expect_at_least("map", 0, "num_workers", num_workers)
    if executor is not None:
        check_executor("map", executor)
        if num_workers:
            hint = "leave num_workers away: the executor has its own workers"
            raise ShapeError(message("map", "an executor or num_workers", "both", hint=hint))


register("map", map)
register("map_iter", map_iter)
