"""Tables of Arrow, Parquet files and data sets of Hugging Face as TensorDicts and back.

    numbers (N,)                     tensor (N,)              in place
    bool (N,)                        tensor (N,)              a copy: Arrow keeps bits
    fixed_size_list[k] of numbers    tensor (N, k)            in place, nested ones (N, k, l)
    list, large_list of the above    NestedTensor (N, -1)     values in place, offsets too where they have 64 bits
    struct                           inner node
    strings, and lists of others     ObjectArray (N,)

Invariants:
  - nulls are refused, never filled; in an ObjectArray they are None;
  - a column of several chunks is joined first, which copies it;
  - Arrow's memory never changes: leaves that `tdc.copy_` writes into are made by `copy=True`;
  - a file appears whole or not at all.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect, keys_of
from tdc.core.dtypes import in_numpy
from tdc.core.errors import (
    DtypeError,
    FormatError,
    KeyPathError,
    ShapeError,
    UnsupportedError,
    describe,
    first_line,
    message,
    refuse_wrong,
)
from tdc.core.extras import extra
from tdc.io.publish import path_text
from tdc.io.save import PathLike
from tdc.layout.structure import Structure, extent_of
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.tensordict.leaf import unwrap
from tdc.tensordict.nodes import Static
from tdc.tensordict.object_array import ObjectArray
from tdc.tensordict.paths import top_keys
from tdc.tensordict.shared import Shared
from tdc.tensordict.storage import Leaves, subtree
from tdc.tensordict.tensordict import TensorDict

READ, WRITE = "data.from_arrow", "data.to_arrow"


class Unfit(Exception):
    """A fault of one column or leaf."""


def from_arrow(table: Any, *, columns: Iterable[str] | None = None, copy: bool = False) -> TensorDict:
    """A TensorDict of the columns of a table, without a copy where Arrow's memory allows.

    Columns of lists with equal lengths share one structure, so that tokens, masks and labels combine.

    Shapes:
        `R` rows -> batch size `[R]`.

    Args:
        table: `pyarrow.Table` or `RecordBatch`, or a `datasets.Dataset` of Hugging Face, as it is selected.
        columns: only these; their order is kept.
        copy: own memory for each leaf. Without it leaves may lie in Arrow's memory, which is not to be written to.

    Raises:
        UnsupportedError: columns with nulls, or of types that have no form here; all are named.
        KeyPathError: a column that is not there.
        DtypeError: no table.

    Compile:
        Eager only; needs pyarrow.

    Example:
        >>> import pyarrow as pa
        >>> td = from_arrow(pa.table({"tokens": [[1, 2], [], [3]], "label": [0, 1, 0], "name": ["a", "b", "c"]}))
        >>> td["tokens"].tolist(), td["label"], td["name"].tolist()
        ([[1, 2], [], [3]], tensor([0, 1, 0]), ['a', 'b', 'c'])
    """
    expect(READ, copy, bool, of=" for copy")
    found = as_table(table)
    names = found.column_names if columns is None else keys_of(READ, columns, "a list of columns", "columns=['a', 'b']")
    absent = [name for name in names if name not in found.column_names]
    if absent:
        got, hint = f"{absent[0]!r}", f"columns: {', '.join(found.column_names)}"
        raise KeyPathError(message(READ, "columns of the table", got, hint=hint))
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    refuse_wrong(KeyPathError, READ, "columns of different names", twice, "that are there twice", "rename_columns")
    reader = Reader(copy)
    entries = {name: reader.column(found.column(name), name) for name in names}
    hint = "table.drop_null() or fill_null(value) of nulls, column.cast(type) of other types, or columns=[...]"
    refuse_wrong(UnsupportedError, READ, "columns that tensors can hold", reader.wrong, "others", hint)
    return TensorDict(entries, (found.num_rows,))


def arrow() -> Any:
    """pyarrow, which `import tdc` does without."""
    return extra("data", "pyarrow", "torch-tdc[arrow]")


def as_table(table: Any) -> Any:
    """The argument as a table of Arrow."""
    pa: Any = arrow()

    if isinstance(table, pa.RecordBatch):
        return pa.Table.from_batches([table])
    if isinstance(table, pa.Table):
        return table
    if hasattr(table, "with_format") and hasattr(table, "column_names") and hasattr(table, "num_rows"):
        if isinstance(table, dict):
            got, hint = f"splits {', '.join(table)}", f"dataset[{next(iter(table), 'train')!r}] of one split"
            raise DtypeError(message(READ, "one data set", got, hint=hint))
        return table.with_format("arrow")[:]
    hint = "pyarrow.table(columns), or a datasets.Dataset; tdc.TensorDict takes a dict of arrays"
    raise DtypeError(message(READ, "a table of Arrow", describe(table), hint=hint))


class Reader:
    """Columns as entries of a TensorDict; what is wrong with those that cannot be one, by their paths."""

    def __init__(self, copy: bool) -> None:
        self.copy = copy
        self.wrong: dict[str, str] = {}
        self.structures: list[Structure] = []

    def column(self, column: Any, path: str) -> Any:
        """An entry of a column, which has one chunk or more."""
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
        return self.entry(array, path)

    def entry(self, array: Any, path: str) -> Any:
        """An entry of an array: a leaf, or a dict of a struct."""
        pa: Any = arrow()

        if isinstance(array, pa.ChunkedArray):  # of no chunks
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
        kind = array.type
        if isinstance(kind, pa.BaseExtensionType):
            return permuted(self.entry(shaped(array), path), kind)
        if pa.types.is_dictionary(kind):
            return self.entry(array.dictionary_decode(), path)
        try:
            if is_object(kind):
                return ObjectArray(array.to_pylist(), [len(array)])
            if array.null_count:
                raise Unfit(f"{kind} with {array.null_count} nulls")
            if pa.types.is_struct(kind):
                names = [field.name for field in kind]
                if len(set(names)) < len(names):
                    raise Unfit(f"{kind}, where fields have one name")
                parts = array.flatten()
                return {n: self.entry(part, f"{path}.{n}") for n, part in zip(names, parts, strict=True)}
            if pa.types.is_list(kind) or pa.types.is_large_list(kind):
                return self.ragged(array)
            return self.tensor(array)
        except Unfit as fault:
            self.wrong[path] = str(fault)
            return None

    def ragged(self, array: Any) -> NestedTensor:
        """Lists of numbers; those of the same lengths share one structure."""
        pa: Any = arrow()

        offsets = self.tensor(array.offsets).long()
        if not len(offsets):  # of no rows
            offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
        first, last = int(offsets[0]), int(offsets[-1])
        if first:  # of a slice
            offsets = offsets - first
        inner = array.values.slice(first, last - first)
        kind = inner.type
        if isinstance(kind, pa.BaseExtensionType):
            inner = shaped(inner)
        values = permuted(self.tensor(inner, "a list of "), kind)
        for known in self.structures:
            if torch.equal(known.offsets, offsets):
                return build_nested(known, values)
        longest = int(offsets.diff().max()) if len(offsets) > 1 else 0
        self.structures.append(Structure(offsets, None, extent_of((longest,))).marked())
        return build_nested(self.structures[-1], values)

    def tensor(self, array: Any, prefix: str = "") -> Tensor:
        """An array of numbers, or of fixed lists of numbers."""
        pa: Any = arrow()

        kind, sizes = array.type, [len(array)]
        while pa.types.is_fixed_size_list(array.type):
            sizes.append(array.type.list_size)
            array = array.flatten() if not array.null_count else array
            if array.null_count:
                raise Unfit(f"{prefix}{kind} with {array.null_count} nulls")
        if array.null_count:
            raise Unfit(f"{prefix}{kind} with {array.null_count} nulls")
        if pa.types.is_boolean(array.type):
            return torch.from_numpy(array.to_numpy(zero_copy_only=False).copy()).view(sizes)
        if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            raise Unfit(f"{prefix}{kind}")
        out = torch.from_dlpack(array)
        return (out.clone() if self.copy else out).view(sizes)


def is_object(kind: Any) -> bool:
    """True if values of a type are Python objects: texts, bytes, and lists of these or of records."""
    pa: Any = arrow()

    types = pa.types
    texts = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    views = [getattr(types, name, None) for name in ("is_string_view", "is_binary_view")]
    if any([test(kind) for test in (*texts, *views) if test is not None]):
        return True
    lists = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return lists and (is_object(kind.value_type) or types.is_struct(kind.value_type))


def shaped(array: Any) -> Any:
    """The storage of an extension type; for one with a shape, fixed lists of that shape."""
    pa: Any = arrow()

    storage, shape = array.storage, getattr(array.type, "shape", None)
    if shape is None or array.null_count:
        return storage
    while pa.types.is_list(storage.type) or pa.types.is_fixed_size_list(storage.type):
        storage = storage.flatten()
    for size in reversed(tuple(shape)):
        storage = pa.FixedSizeListArray.from_arrays(storage, size)
    return storage


def permuted(x: Any, kind: Any) -> Any:
    """A tensor with its features in the order that an extension type says they are in, not in that of memory."""
    order = getattr(kind, "permutation", None)
    return x if order is None or not isinstance(x, Tensor) else x.permute(0, *[i + 1 for i in order])


# -- to a table


def to_arrow(td: TensorDict) -> Any:
    """A `pyarrow.Table` of the leaves, without a copy where Arrow can use their memory.

    Tensors of several dims become fixed lists, NestedTensors lists, inner nodes structs, ObjectArrays what Arrow makes
    of their objects. Padded batches are written without their padding.

    Shapes:
        batch size `[R]` -> `R` rows; of several batch dims the first counts rows.

    Raises:
        UnsupportedError: leaves that Arrow has no type for: bfloat16, complex numbers, batches ragged in more dims than
            the first, Static values; all are named.
        ShapeError: no batch dim.

    Compile:
        Eager only; needs pyarrow.

    Example:
        >>> table = to_arrow(TensorDict({"x": torch.zeros(3, 2), "meta": {"id": torch.arange(3)}}, [3]))
        >>> table.schema.field("x").type, table.num_rows
        (FixedSizeListType(fixed_size_list<item: float>[2]), 3)
    """
    pa: Any = arrow()

    expect(WRITE, td, TensorDict)
    if not td._size:
        hint = "batch_size=[n], of the rows of the table; td.unsqueeze(0) for one row"
        raise ShapeError(message(WRITE, "a TensorDict with a batch dim", "batch_size=[]", hint=hint))
    wrong: dict[str, str] = {}
    names, arrays = children(td._leaves, td._nodes, "", td.batch_size[0], wrong)
    hint = "td.exclude(key); td.float() of bfloat16, torch.view_as_real of complex numbers"
    refuse_wrong(UnsupportedError, WRITE, "leaves that Arrow has a type for", wrong, "others", hint)
    if not names:
        return pa.table({"": pa.nulls(td.batch_size[0])}).select([])
    return pa.Table.from_arrays(arrays, names=names)


def children(leaves: Leaves, nodes: Any, prefix: str, rows: int, wrong: dict[str, str]) -> tuple[list[str], list[Any]]:
    """Names and arrays of what lies directly below a node."""
    pa: Any = arrow()

    names: list[str] = []
    arrays: list[Any] = []
    for key in top_keys([*leaves, *[p for p in nodes if p != ()]]):
        path = f"{prefix}{key}"
        names.append(key)
        try:
            if key in leaves:
                leaf = leaves[key]
                arrays.append(array_of(leaf if type(leaf) is Shared else unwrap(leaf), pa))
            elif type(nodes[key]) is Static:
                raise Unfit(repr(nodes[key]))
            else:
                below, inner, _ = subtree(leaves, nodes, key)
                parts = children(below, inner, f"{path}.", rows, wrong)
                empty = pa.array([{}] * rows, pa.struct([]))
                arrays.append(pa.StructArray.from_arrays(parts[1], names=parts[0]) if parts[0] else empty)
        except Unfit as fault:
            wrong[path] = str(fault)
            arrays.append(pa.nulls(rows))
    return names, arrays


def array_of(x: Any, pa: Any) -> Any:
    """A leaf as an array of Arrow."""
    if isinstance(x, MaskedBatch) and not x.batch_dim:
        x = x.to_packed()
    if isinstance(x, NestedTensor):
        if x.ragged_dims != (1,) or x.structure.batch_dim:
            raise Unfit(f"{describe(x)}, ragged in dims {x.ragged_dims}")
        offsets = pa.array(x.offsets.detach().cpu().numpy())
        return pa.LargeListArray.from_arrays(offsets, numbers(x.values, pa))
    if isinstance(x, ObjectArray):
        try:
            out = pa.array(x.tolist())
            return out.cast(pa.string()) if pa.types.is_null(out.type) else out  # which says that they are objects
        except (pa.ArrowException, OverflowError, UnicodeError) as error:  # 2**70, half of a pair of surrogates
            raise Unfit(f"{describe(x)}: {first_line(error)}") from None
    if not isinstance(x, Tensor):
        raise Unfit(describe(x))
    return numbers(x, pa)


def numbers(x: Tensor, pa: Any) -> Any:
    """A tensor as an array of numbers, or of fixed lists of numbers."""
    if x.is_complex() or x.layout != torch.strided or not in_numpy(x.dtype):
        raise Unfit(describe(x))
    out = pa.array(x.detach().cpu().resolve_neg().contiguous().view(-1).numpy())
    for size in reversed(x.shape[1:]):
        if not size:
            raise Unfit(f"{describe(x)}, a list of no numbers")
        out = pa.FixedSizeListArray.from_arrays(out, size)
    return out


READ_FILE, WRITE_FILE, DATASET = "data.from_parquet", "data.to_parquet", "data.to_dataset"
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

    text = path_text(READ_FILE, path)
    names = None if columns is None else keys_of(READ_FILE, columns, "a list of columns", "columns=['a', 'b']")
    try:
        files = pq.ParquetDataset(text)
        if not files.files:
            raise FormatError(message(READ_FILE, "a Parquet file", f"a folder without any at {text!r}", hint=WRITES))
        known = files.schema.names
        absent = [name for name in names or () if name not in known]
        if absent:
            hint = f"columns: {', '.join(known)}"
            raise KeyPathError(message(READ_FILE, "columns of the file", f"{absent[0]!r}", hint=hint))
        table = pq.read_table(text, columns=names)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise FormatError(message(READ_FILE, "a Parquet file", first_line(error), hint=WRITES)) from None
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

    expect(WRITE_FILE, td, TensorDict)
    text = path_text(WRITE_FILE, path)
    expect(WRITE_FILE, overwrite, bool, of=" for overwrite")
    if os.path.lexists(text) and not (overwrite and os.path.isfile(text)):
        got, hint = f"something at {text!r}", "overwrite=True replaces a file; or choose another path"
        raise FormatError(message(WRITE_FILE, "a path where nothing is", got, hint=hint))
    table, hidden = to_arrow(td), f"{text}.{uuid.uuid4().hex}"
    if not table.num_columns:
        got = "no leaves, whose number of rows would be lost"
        raise UnsupportedError(message(WRITE_FILE, "what Parquet holds", got, hint="td.set(key, tensor)"))
    try:
        pq.write_table(table, hidden)
        os.replace(hidden, text)
    except pa.ArrowNotImplementedError as error:
        hint = "td.exclude(key) of nodes without leaves"
        raise UnsupportedError(message(WRITE_FILE, "what Parquet holds", first_line(error), hint=hint)) from None
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
