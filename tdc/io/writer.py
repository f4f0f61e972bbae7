"""writer: a data set that grows: batches are appended, and published as stores beside each other.

    corpus/00000000/  corpus/00000001/  ...      stores of `save`, the shards, in the order of their rows

A shard appears whole or not at all, as any store does; see `publish`. One that is there is never changed, so what was
read stays as it was, and a reader needs no lock. A writer holds one on the folder, for as long as it is open.

Invariant: the shards of a data set are numbered from 0 without a gap, and alike in keys, dtypes and features.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import torch

from tdc.core.arguments import expect, expect_at_least
from tdc.core.errors import FormatError, ShapeError, StructureError, UnsupportedError, describe, message
from tdc.interop.spec import differences, spec_of
from tdc.io.filenames import shard_name
from tdc.io.leaves import described
from tdc.io.load import load
from tdc.io.publish import check_system, lock, open_folder
from tdc.io.save import PathLike, check_settings, classes_of, save_as
from tdc.tensordict.shared import Shared, check_pair
from tdc.tensordict.tensordict import TensorDict

OP = "io.writer"


def shard_paths(path: str) -> list[str]:
    """The shards of a data set that are there, in their order."""
    there = set(os.listdir(path))
    found: list[str] = []
    while (name := shard_name(len(found))) in there:
        found.append(os.path.join(path, name))
    return found


def writer(path: PathLike, *, rows: int = 100_000, sync: bool = True, checksums: bool = False) -> Writer:
    """Append batches to a data set on disk, which can be read while it grows.

    Batches are collected until they have `rows` rows, then written as one shard, a store of its own. What is there is
    gone on with, also after the writer was killed: at most the rows that were not in a shard yet are lost, and
    `len(writer)` says how many are there.

    Args:
        path: of a folder; it is made if it is not there.
        rows: of a shard, at least; a batch is never parted. Shards of some 100 MiB read and write at full speed.
        sync, checksums: as of `save`, for each shard.

    Returns:
        A Writer. Use it in a `with` block, at whose end the last shard is written; after an error it is not.

    Raises:
        FormatError: a folder of other things; another writer has it.
        ShapeError, DtypeError: not a positive number of rows, not a bool.
        OSError: what the system refuses.

    Compile:
        Eager only.

    Example:
        >>> import tempfile
        >>> from tdc.ragged.pack import pack
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with writer(f"{folder}/corpus", rows=2) as out:
        ...         for n in range(3):
        ...             out.append(TensorDict({"ids": pack([torch.arange(n)])}, [1]))
        ...     print(out, load(f"{folder}/corpus/00000000")["ids"].tolist())
        Writer(3 rows in 2 shards, closed) [[], [0]]
    """
    return Writer(path, rows, sync, checksums)


class Writer:
    """The result of `writer`."""

    _folder = -1

    def __init__(self, path: PathLike, rows: int, sync: bool, checksums: bool) -> None:
        check_system(OP)
        check_settings(OP, path, sync, checksums)
        expect_at_least(OP, 1, "rows", rows)
        self._path = os.path.abspath(path)
        self._least = rows
        self._settings = sync, checksums
        self._waiting: list[TensorDict] = []
        self._form: Any = None
        self._shared: dict[Any, Any] = {}
        os.makedirs(self._path, exist_ok=True)
        self._folder = open_folder(self._path)
        try:
            self._sizes = [len(load(shard)) for shard in self._shards()]
        except BaseException:
            self._release()
            raise

    def _shards(self) -> list[str]:
        """The shards that are there, in a folder of nothing else that no other writer has."""
        hint = "close it, or choose another path"
        if lock(self._folder) is False:
            raise FormatError(message(OP, "a folder without a writer", f"one at {self._path!r}", hint=hint))
        shards = shard_paths(self._path)
        names = {os.path.basename(shard) for shard in shards}
        others = sorted([name for name in os.listdir(self._path) if name[0] != "." and name not in names])
        if others:
            expected = f"a folder of shards, {shard_name(0)} and on"
            raise FormatError(message(OP, expected, f"{others[0]!r} in it", hint="choose another path"))
        return shards

    def append(self, td: TensorDict) -> None:
        """Add the rows of a batch, which may be written to behind this call.

        Raises:
            ShapeError: no batch dim.
            StructureError: other keys, dtypes, features or Shared tensors than before; all are named. A closed writer.
            UnsupportedError: leaves that a file cannot hold; all are named.
            OSError: what the system refuses. What was collected is there still: `flush()` tries again.
        """
        expect(OP, td, TensorDict)
        self._check_open()
        if not td.batch_size:
            hint = "td.unsqueeze(0) for one row"
            raise ShapeError(message(OP, "a TensorDict with a batch dim", describe(td), hint=hint))
        if self._form is None:
            described(OP, td)
            first = load(self._shard(0), classes=classes_of(td)) if self._sizes else td
            self._form = form_of(first)
            self._shared = {path: x.clone() for path, x in first._leaves.items() if type(x) is Shared}
        wrong = differences(td, self._form)
        if wrong:
            got, hint = f"{len(wrong)} that differ", "td.select(...), td.to(dtype): one form for a data set"
            raise StructureError(message(OP, "batches that are alike", got, wrong, hint))
        for path, x in self._shared.items():
            check_pair(OP, x, td._leaves[path])
        self._waiting.append(td)
        if sum([len(part) for part in self._waiting]) >= self._least:
            self.flush()
        else:
            self._waiting[-1] = td.clone()

    def flush(self) -> None:
        """Publish what was collected, as a shard of fewer rows."""
        self._check_open()
        waiting: Any = [td for td in self._waiting if len(td)]
        if waiting:
            td = torch.cat(waiting) if len(waiting) > 1 else waiting[0]
            sync, checksums = self._settings
            save_as(OP, td, self._shard(len(self._sizes)), False, sync, checksums, False)
            self._sizes.append(len(td))
        self._waiting = []

    def close(self) -> None:
        """Publish what was collected, and let the folder go."""
        if self._folder >= 0:
            self.flush()
            self._release()

    def _shard(self, number: int) -> str:
        return os.path.join(self._path, shard_name(number))

    def _release(self) -> None:
        folder, self._folder = self._folder, -1
        self._waiting = []
        if folder >= 0:
            os.close(folder)

    def _check_open(self) -> None:
        if self._folder < 0:
            hint = f"tdc.io.writer({os.path.basename(self._path)!r}) goes on with it"
            raise StructureError(message(OP, "a writer that is open", "a closed one", hint=hint))

    def __len__(self) -> int:
        """Number of rows that were published or are collected."""
        return sum(self._sizes) + sum([len(td) for td in self._waiting])

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Writer:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                self.close()
        finally:
            self._release()

    def __del__(self) -> None:
        self._release()

    def __reduce__(self) -> Any:
        raise UnsupportedError(message(OP, "a writer in its process", "a pickle", hint="send the path"))

    def __repr__(self) -> str:
        count = len(self._sizes)
        waiting = len(self) - sum(self._sizes)
        state = "closed" if self._folder < 0 else f"{waiting} to be written" if waiting else "open"
        return f"Writer({sum(self._sizes)} rows in {count} shard{'s' * (count != 1)}, {state})"


def form_of(td: TensorDict) -> Any:
    """The structure that batches of a data set have in common."""
    return spec_of(OP, td).with_device(None).with_batch_size([None, *td.batch_size[1:]])
