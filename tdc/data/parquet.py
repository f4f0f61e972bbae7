"""Parquet files and data sets of Hugging Face as TensorDicts and back, by way of Arrow's tables.

Invariants: those of `arrow`; a file appears whole or not at all.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

from tdc.core.arguments import expect, keys_of
from tdc.core.errors import FormatError, KeyPathError, UnsupportedError, first_line, message
from tdc.core.extras import extra
from tdc.data.arrow import arrow, from_arrow, to_arrow
from tdc.io.publish import path_text
from tdc.io.save import PathLike
from tdc.tensordict.tensordict import TensorDict

READ, WRITE, DATASET = "data.from_parquet", "data.to_parquet", "data.to_dataset"
WRITES = "tdc.data.to_parquet writes one"


def from_parquet(path: PathLike, *, columns: Iterable[str] | None = None) -> TensorDict:
    """The TensorDict of a Parquet file, or of a folder of such files.

    Args:
        columns: only these are read; their order is kept.

    Raises:
        FormatError: no Parquet file.
        UnsupportedError, KeyPathError: as `from_arrow`.
        OSError: nothing there, or what the system refuses.

    Compile:
        Eager only; needs pyarrow.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     to_parquet(TensorDict({"x": torch.arange(3), "y": torch.zeros(3, 2)}, [3]), f"{folder}/a.parquet")
        ...     from_parquet(f"{folder}/a.parquet", columns=["x"])["x"]
        tensor([0, 1, 2])
    """
    pa: Any = arrow()
    pq: Any = import_module("pyarrow.parquet")

    text = path_text(READ, path)
    names = None if columns is None else keys_of(READ, columns, "a list of columns", "columns=['a', 'b']")
    try:
        files = pq.ParquetDataset(text)
        if not files.files:
            raise FormatError(message(READ, "a Parquet file", f"a folder without any at {text!r}", hint=WRITES))
        known = files.schema.names
        absent = [name for name in names or () if name not in known]
        if absent:
            hint = f"columns: {', '.join(known)}"
            raise KeyPathError(message(READ, "columns of the file", f"{absent[0]!r}", hint=hint))
        table = pq.read_table(text, columns=names)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise FormatError(message(READ, "a Parquet file", first_line(error), hint=WRITES)) from None
    return from_arrow(table, columns=names)


def to_parquet(td: TensorDict, path: PathLike, *, overwrite: bool = False) -> None:
    """Write a TensorDict to a Parquet file, which every data frame library reads.

    Args:
        overwrite: replace a file that is there.

    Raises:
        UnsupportedError, ShapeError: as `to_arrow`; what Parquet cannot hold of it, such as nodes without leaves.
        FormatError: something is at the path.
        OSError: the system refuses, e.g. a full disk. The path is then as it was.

    Compile:
        Eager only; needs pyarrow.

    Example:
        >>> import tempfile, torch
        >>> from tdc.ragged.pack import pack
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     to_parquet(TensorDict({"x": pack([torch.ones(2), torch.ones(1)])}, [2]), f"{folder}/a.parquet")
        ...     from_parquet(f"{folder}/a.parquet")["x"].tolist()
        [[1.0, 1.0], [1.0]]
    """
    pa: Any = arrow()
    pq: Any = import_module("pyarrow.parquet")

    expect(WRITE, td, TensorDict)
    text = path_text(WRITE, path)
    expect(WRITE, overwrite, bool, of=" for overwrite")
    if os.path.lexists(text) and not (overwrite and os.path.isfile(text)):
        got, hint = f"something at {text!r}", "overwrite=True replaces a file; or choose another path"
        raise FormatError(message(WRITE, "a path where nothing is", got, hint=hint))
    table, hidden = to_arrow(td), f"{text}.{uuid.uuid4().hex}"
    if not table.num_columns:
        got = "no leaves, whose number of rows would be lost"
        raise UnsupportedError(message(WRITE, "what Parquet holds", got, hint="td.set(key, tensor)"))
    try:
        pq.write_table(table, hidden)
        os.replace(hidden, text)
    except pa.ArrowNotImplementedError as error:
        hint = "td.exclude(key) of nodes without leaves"
        raise UnsupportedError(message(WRITE, "what Parquet holds", first_line(error), hint=hint)) from None
    finally:
        with suppress(FileNotFoundError):
            os.remove(hidden)


def to_dataset(td: TensorDict) -> Any:
    """A `datasets.Dataset` of Hugging Face, its columns the memory of the leaves where Arrow can use it.

    `tdc.data.from_arrow(dataset)` is the way back.

    Raises:
        UnsupportedError, ShapeError: as `to_arrow`.

    Compile:
        Eager only; needs datasets.
    """
    datasets: Any = extra(DATASET, "datasets", "datasets")

    expect(DATASET, td, TensorDict)
    return datasets.Dataset(datasets.table.InMemoryTable(to_arrow(td)))
