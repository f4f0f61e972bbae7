"""A TensorDict in one file, which is a valid safetensors file: for weights, and for many small leaves.

    8 bytes       length of the header
    header        {"__metadata__": {"format": "pt", "tdc": a manifest}, name: {"dtype", "shape", "data_offsets"}, ...}
    data          the tensors without gaps, those of the largest elements first, so that each is aligned

A name is the key path joined by dots, with the part of a ragged leaf behind: "text.values". The manifest is that of a
store (see `manifest`), so everything that a store keeps is kept. Programs that do not know it read plain tensors; a
file of another program is read as nested keys, as a state dict is.

Invariants: as of a store; the file is mapped once, and all tensors are views of that map.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.errors import FormatError, UnsupportedError, message, refuse_wrong
from tdc.interop.pytrees import from_state_dict
from tdc.io.filenames import Keys, Part, dotted, first, not_a_store, refuse_damage
from tdc.io.files import bytes_of, host, map_of, read_up_to, write_all
from tdc.io.leaves import described, made
from tdc.io.load import check_mode, names_of
from tdc.io.manifest import (
    DTYPES,
    MOST_DIMS,
    TOO_LARGE,
    Entry,
    Stored,
    Table,
    dump,
    json_of,
    parse,
    stored,
    strictly,
)
from tdc.io.publish import check_system, path_text, staged
from tdc.io.save import PathLike, check_settings
from tdc.tensordict.tensordict import TensorDict

WRITE, READ = "io.to_safetensors", "io.from_safetensors"
NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "float16": "F16", "bfloat16": "BF16",
    "uint32": "U32", "int32": "I32", "float32": "F32", "uint64": "U64", "int64": "I64", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
KNOWN = {name: dtype for dtype, name in NAMES.items()}
LONGEST_HEADER, ALIGNED, FILE = 100_000_000, 64, "packed"
METADATA = "__metadata__"  # the one name in a header that is no tensor
HINT = "write it again with tdc.io.to_safetensors"


def to_safetensors(td: TensorDict, path: PathLike, *, overwrite: bool = False, sync: bool = True) -> None:
    """Write a TensorDict to one file, which the `safetensors` library and others read.

    It holds what a store holds, tied tensors once. With thousands of small leaves it is far quicker than a store.

    Args:
        path: of the file.
        overwrite: replace a file that is there.
        sync: wait until everything is on the disk.

    Raises:
        UnsupportedError: leaves that a file cannot hold, and dtypes that the format does not have; all are named.
        FormatError: something is at the path; two key paths that join to one name.
        OSError: the system refuses, e.g. a full disk. The path is then as it was.

    Compile:
        Eager only.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     to_safetensors(TensorDict({"fc": {"weight": torch.eye(2)}}), f"{folder}/net.safetensors")
        ...     print(from_safetensors(f"{folder}/net.safetensors")["fc", "weight"])
        tensor([[1., 0.],
                [0., 1.]])

    Source:
        The format of safetensors; `tdc.interop.to_state_dict` for the names.
    """
    expect(WRITE, td, TensorDict, other=path)
    check_settings(WRITE, path, overwrite, sync)
    check_system(WRITE)
    table, tensors = described(WRITE, td)
    names, order = names_in(WRITE, table), sorted(tensors, key=lambda at: -tensors[at].element_size())
    wrong = {dotted(*at): stored(table, *at).dtype for at in order if stored(table, *at).dtype not in NAMES}
    hint = "convert these, td.to(dtype, where=...); tdc.io.save takes every dtype"
    refuse_wrong(UnsupportedError, WRITE, "dtypes that safetensors has", wrong, "others", hint)
    head = header(table, {names[at]: stored(table, *at) for at in order})

    def pieces() -> Iterator[bytes | memoryview]:
        yield head
        for at in order:
            x = host(tensors[at])
            yield bytes_of(x)

    with staged(WRITE, path, overwrite, sync, FILE) as folder:
        write_all(folder, FILE, pieces(), sync)


def from_safetensors(path: PathLike, *, mode: Literal["r", "r+"] = "r", classes: Iterable[type] = ()) -> TensorDict:
    """The TensorDict of a safetensors file, its leaves mapped into memory.

    Args:
        path: of the file; of another program's, names "a.b" become nested keys.
        mode, classes: as of `tdc.io.load`.

    Raises:
        FormatError: no safetensors file, a damaged one, or one whose manifest says something else.
        KeyPathError: another program's names, of which one would be a leaf and an inner node.
        OSError: what the system refuses.

    Compile:
        Leaves are plain tensors.

    Example:
        >>> import tempfile, torch
        >>> net = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     to_safetensors(from_state_dict(net.state_dict()), f"{folder}/net.safetensors")
        ...     net.load_state_dict(dict(from_safetensors(f"{folder}/net.safetensors").items()))
        <All keys matched successfully>
    """
    text, known = path_text(READ, path), names_of(classes, READ)
    check_mode(READ, mode)
    check_system(READ)
    try:
        file = os.open(text, os.O_NONBLOCK | os.O_CLOEXEC | (os.O_RDWR if mode == "r+" else os.O_RDONLY))
    except FileNotFoundError:
        hint = "tdc.io.to_safetensors writes one"
        raise not_a_store(READ, "a file", f"nothing at {text!r}", hint=hint) from None
    except IsADirectoryError:
        raise a_folder(text) from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise a_folder(text)
        top, begin = read_header(file, found.st_size)
        metadata, entries = top.pop(METADATA, {}), check_entries(top, found.st_size - begin)
        whole = map_of(file, found.st_size, Stored("uint8", (found.st_size,)), mode == "r+")
    finally:
        os.close(file)
    if not isinstance(metadata, dict) or not all([isinstance(value, str) for value in metadata.values()]):
        raise not_a_store(READ, "metadata of texts", "others", hint=HINT)
    tensors = {name: view(whole, x, begin + at) for name, (x, at) in entries.items()}
    table, parts = {}, {}
    if "tdc" in metadata:
        table = parse(READ, metadata["tdc"].encode("utf-8", "surrogatepass"))
        parts = matched(table, {name: x for name, (x, _) in entries.items()}, tensors)
    if mode == "r+":
        check_aligned({name: (begin + at) % DTYPES[x.dtype].itemsize for name, (x, at) in entries.items()})
    return made(READ, table, (), parts, known) if table else from_state_dict(tensors)


# -- writing


def names_in(op: str, table: Table) -> dict[Part, str]:
    """The name of each tensor that is stored: its key path and part, joined by dots."""
    names: dict[Part, str] = {}
    taken: dict[str, Keys] = {METADATA: ()}
    wrong: list[str] = []
    for keys, item in table.items():
        for part, x in item.parts.items() if isinstance(item, Entry) else ():
            if isinstance(x, Stored):
                name = ".".join([*keys, *([part] if part else [])])
                names[keys, part] = name
                if taken.setdefault(name, keys) is not keys or not is_text(name):
                    wrong.append(f"{dotted(keys, part)}: {dotted((name,))}")
    hint = "td.rename_keys({...}) of one of them, or tdc.io.save"
    refuse_wrong(
        FormatError, op, "key paths whose keys join to different names, all Unicode", wrong, "that do not", hint
    )
    return names


def is_text(name: str) -> bool:
    """True if other programs can read a name: Python alone has strings with half a character."""
    return not any(["\ud800" <= c <= "\udfff" for c in name])


def header(table: Table, named: Mapping[str, Stored]) -> bytes:
    """The length and the header of a file; spaces at its end align the data."""
    entries: dict[str, Any] = {METADATA: {"format": "pt", "tdc": dump(WRITE, table).decode()}}
    end = 0
    for name, x in named.items():
        entries[name] = {"dtype": NAMES[x.dtype], "shape": x.shape, "data_offsets": (end, end + x.nbytes)}
        end += x.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNED)
    if len(text) > LONGEST_HEADER:
        expected, hint = f"a header of at most {LONGEST_HEADER} bytes", "fewer keys, or tdc.io.save"
        raise FormatError(message(WRITE, expected, f"one of {len(text)}", hint=hint))
    return len(text).to_bytes(8, "little") + text


# -- reading


def a_folder(path: str) -> FormatError:
    """The error for what is no file."""
    got, hint = f"a folder or a device at {path!r}", "tdc.io.load reads the folder of a store"
    return not_a_store(READ, "a file", got, hint=hint)


def read_header(file: int, size: int) -> tuple[dict[str, Any], int]:
    """The header of an open file, and where the data begin."""
    length = int.from_bytes(os.pread(file, 8, 0), "little") if size >= 8 else LONGEST_HEADER + 1
    if length > min(LONGEST_HEADER, size - 8):
        raise not_a_store(READ, "a safetensors file", f"{size} bytes that are not", hint=HINT)
    with strictly(READ, "the header", HINT):
        top = json_of(read_up_to(file, length, 8))
    if type(top) is not dict:
        raise not_a_store(READ, "a header with a name for each tensor", "another one", hint=HINT)
    return top, 8 + length


def check_entries(top: dict[str, Any], size: int) -> dict[str, tuple[Stored, int]]:
    """The description of each tensor in a header, and its position in the data, which has no gaps."""
    found: dict[str, tuple[Stored, int]] = {}
    end = 0
    for name, entry in sorted(top.items(), key=lambda item: begin_of(item[1])):
        x = described_in(entry)
        if x is None or entry["data_offsets"] != [end, end + x.nbytes]:
            line = f"{dotted((name,))}: another dtype or shape than its bytes, or a gap before it"
            raise not_a_store(READ, "tensors that lie one after another", "others", [line], HINT)
        found[name], end = (x, end), end + x.nbytes
    if end != size:
        raise not_a_store(READ, f"{end} bytes of tensors, as the header says", f"{size}", hint=HINT)
    return {name: found[name] for name in top}


def begin_of(entry: Any) -> tuple[int, int]:
    """Position of a tensor in the file, to sort by; an entry that does not say so comes first."""
    at: Any = entry.get("data_offsets") if type(entry) is dict else None
    return tuple(at) if type(at) is list and len(at) == 2 and all([type(n) is int for n in at]) else (-1, -1)


def described_in(entry: Any) -> Stored | None:
    """The tensor that an entry of a header describes; None if it describes none."""
    if type(entry) is not dict or entry.keys() != {"dtype", "shape", "data_offsets"} or begin_of(entry)[0] < 0:
        return None
    dtype, shape = entry["dtype"], entry["shape"]
    if type(dtype) is not str or dtype not in KNOWN or type(shape) is not list or len(shape) > MOST_DIMS:
        return None
    fits = all([type(n) is int and 0 <= n < TOO_LARGE for n in shape]) and math.prod([n or 1 for n in shape]) < 2**58
    return Stored(KNOWN[dtype], tuple(shape)) if fits else None


def view(whole: Tensor, x: Stored, at: int) -> Tensor:
    """A tensor of a mapped file; a copy where another program did not align it."""
    dtype = DTYPES[x.dtype]
    data = whole[at : at + x.nbytes]
    return (data if at % dtype.itemsize == 0 else data.clone()).view(dtype).view(x.shape)


def check_aligned(rests: Mapping[str, int]) -> None:
    """Refuse tensors that had to be copied where they are to be written to."""
    crooked = [dotted((name,)) for name, rest in rests.items() if rest]
    refuse_damage(READ, "tensors that are aligned, for mode='r+'", crooked, "that are not", HINT)


def matched(table: Table, entries: Mapping[str, Stored], tensors: Mapping[str, Tensor]) -> dict[Part, Tensor]:
    """The tensors by key path and part, as in the manifest; the header says the same of each as the manifest."""
    names = names_in(READ, table)
    wrong = [
        f"{dotted(*at)}: not as in the header" for at, name in names.items() if entries.get(name) != stored(table, *at)
    ]
    if wrong or len(names) != len(entries):
        got = f"{len(wrong)} others, and {len(entries)} names for {len(names)} tensors"
        raise not_a_store(READ, "a manifest that says what the header says", got, first(wrong), HINT)
    return {at: tensors[name] for at, name in names.items()}
