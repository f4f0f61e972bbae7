"""Format version 1 of a store: what its manifest says, written and read strictly.

    store/
      meta.json                 {"format": "tdc.store", "version": 1, "sha256": of the root, "root": NODE}
      obs.memmap                raw bytes, little-endian, in C order, exactly as many as dtype and shape say
      info/id.memmap            a folder for each inner node
      text.values.memmap        a file for each tensor of a ragged leaf
      text.offsets.memmap

    NODE    {"kind": "node", "batch_shape": [..], ["class": name of a tensorclass,] "entries": {key: ENTRY}}
    ENTRY   NODE
            T                                                                           a tensor
            {"kind": "jagged", "ragged_idx": int, ["max_length": [..],]
             "values": T, "offsets": T, ["shapes": T]}                                  a NestedTensor
            {"kind": "two_level", as "jagged", "outer": T, ["outer_max_length": int]}   a TwoLevelTensor
            {"kind": "padded", "ragged_dims": [..], "data": T, "lengths": T}            a MaskedBatch
            {"kind": "objects", "shape": [..], "values": [any JSON]}                    an ObjectArray
            {"kind": "json", "value": any JSON but objects}                             a Static; lists are tuples
            {"kind": "shared", "value": T}                                              a Shared
    T       {"kind": "tensor", "dtype": name, "shape": [..], ["crc32": int]}
            {"kind": "tie", "key": [..], ["part": name]}                                another tensor of the store

In Python a manifest is a flat table from key path to `Node` or `Entry`, outer nodes first. The digest finds accidents;
who forges a manifest forges the digest with it. So everything below holds of a table whoever wrote it.

Invariants of a table that `parse` returns:
  - kinds, fields, dtypes and parts are known ones, and each value has exactly the type it should have;
  - sizes are at least 0, and the bytes of a tensor fit into 62 bits; a tie leads to a tensor that is stored;
  - the parts of a ragged leaf have dtypes and shapes that fit together, and every leaf begins with its batch shapes;
  - it holds no path, no code and no class, only the name of one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch

from tdc.core.errors import FormatError, message
from tdc.io.filenames import Keys, Part, dotted, not_a_store

FORMAT, VERSION = "tdc.store", 1
START = f'{{"format":"{FORMAT}"'.encode()  # every manifest begins with it
MOST_BYTES, MOST_ENTRIES, MOST_DEPTH, MOST_DIMS, TOO_LARGE = 64 << 20, 10**6, 64, 64, 2**62
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "bfloat16",
        "float32", "float64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e4m3fnuz",
        "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    )
}  # fmt: skip


class Stored(NamedTuple):
    """A tensor in a file of its own."""

    dtype: str
    shape: tuple[int, ...]
    crc32: int | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class Tie(NamedTuple):
    """A tensor that is one with another: its key path, and its part of a ragged leaf."""

    keys: Keys
    part: str = ""


class Node(NamedTuple):
    """An inner node, or the root."""

    batch_shape: tuple[int, ...]
    cls: str = ""


class Entry(NamedTuple):
    """A leaf or a Static: its kind, what describes it, and its tensors; that of a plain tensor has the part ''."""

    kind: str
    data: dict[str, Any]
    parts: dict[str, Stored | Tie]


Table = dict[Keys, "Node | Entry"]


def stored_at(table: Mapping[Keys, Any], keys: Keys, part: str) -> Part:
    """The key path and part of a tensor as it is stored: its own, or those of the one that it is tied to."""
    found = table[keys].parts[part]
    return (found.keys, found.part) if type(found) is Tie else (keys, part)


def stored(table: Mapping[Keys, Any], keys: Keys, part: str) -> Stored:
    """The tensor that is stored as a part of a leaf."""
    return table[keys].parts[part]


# -- writing


def dump(op: str, table: Table) -> bytes:
    """The manifest of a table."""
    root = nested(table)
    text = canonical(root)
    head = {"format": FORMAT, "version": VERSION, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    data = f'{canonical(head)[:-1]},"root":{text}}}'.encode()
    deep = max([len(keys) for keys in table])
    if len(data) > MOST_BYTES or len(table) > MOST_ENTRIES or deep > MOST_DEPTH:
        got = f"{len(table)} entries, {deep} deep, described in {len(data)} bytes"
        expected = f"at most {MOST_ENTRIES} entries, {MOST_DEPTH} deep, described in {MOST_BYTES} bytes"
        hint = "fewer keys: torch.stack what is alike, and keep many objects in a file of their own"
        raise FormatError(message(op, expected, got, hint=hint))
    return data


def canonical(data: Any) -> str:
    """JSON text that equal data have in common. The order of keys counts: it is that of the TensorDict."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def nested(table: Table) -> dict[str, Any]:
    """A table as the JSON data of its root."""
    built: dict[Keys, dict[str, Any]] = {}
    for keys, item in table.items():
        built[keys] = node_data(item) if isinstance(item, Node) else entry_data(item)
        if keys:
            built[keys[:-1]]["entries"][keys[-1]] = built[keys]
    return built[()]


def node_data(node: Node) -> dict[str, Any]:
    return {"kind": "node", "batch_shape": node.batch_shape, **({"class": node.cls} if node.cls else {}), "entries": {}}


def entry_data(entry: Entry) -> dict[str, Any]:
    parts = {name: tensor_data(part) for name, part in entry.parts.items()}
    return parts[""] if entry.kind == "tensor" else {"kind": entry.kind, **entry.data, **parts}


def tensor_data(x: Stored | Tie) -> dict[str, Any]:
    if isinstance(x, Tie):
        return {"kind": "tie", "key": x.keys, **({"part": x.part} if x.part else {})}
    checksum = {} if x.crc32 is None else {"crc32": x.crc32}
    return {"kind": "tensor", "dtype": x.dtype, "shape": x.shape, **checksum}


# -- reading


def parse(op: str, data: bytes) -> Table:
    """The table of a manifest.

    Raises:
        FormatError: it is none of this format and version, was changed, or breaks a rule above; says which, and where.
    """
    table: Table = {}
    with strictly(op, "the manifest"):
        top = json_of(data)
        check_head(op, top)
        Reader(op, table).entry((), top["root"])
    check_fit(op, table)
    return table


@contextmanager
def strictly(op: str, what: str, hint: str = "") -> Iterator[None]:
    """Raise a FormatError in place of those that reading JSON raises; `what` is read."""
    try:
        yield
    except FormatError:  # it is a ValueError, too
        raise
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise not_a_store(op, f"strict JSON as {what}", f"invalid JSON: {why}", hint=hint) from None


def json_of(data: bytes) -> Any:
    """The value of a JSON text in which no key is there twice and every number is finite."""
    return json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse_constant, parse_float=finite)


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which no key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON")


def finite(text: str) -> float:
    """A number of JSON that a float can hold."""
    x = float(text)
    if not math.isfinite(x):
        raise ValueError("a number is too large")
    return x


def check_head(op: str, top: Any) -> None:
    """Refuse another format or version, and contents that changed since they were written."""
    if not isinstance(top, dict) or top.get("format") != FORMAT:
        raise not_a_store(op, f"a manifest of the format {FORMAT!r}", "one of another format or of none")
    version: Any = top.get("version")
    if type(version) is not int or version != VERSION:
        got = f"version {version}" if type(version) is int and 0 <= version < 10**6 else "no version"
        raise not_a_store(op, f"version {VERSION} of the format", got, hint="install the version of tdc that wrote it")
    if top.keys() != {"format", "version", "sha256", "root"}:
        raise not_a_store(op, "the four fields of a manifest", "others")
    if top["sha256"] != hashlib.sha256(canonical(top["root"]).encode()).hexdigest():
        hint = "copy or save it again"
        raise not_a_store(op, "the manifest that was written", "one that was changed since", hint=hint)


class Reader:
    """Reads the entries of a manifest into a table, and refuses what is not of the format."""

    def __init__(self, op: str, table: Table) -> None:
        self.op, self.table = op, table

    def entry(self, keys: Keys, data: Any) -> None:
        """Read a node with all that is below it, or a leaf."""
        if len(self.table) >= MOST_ENTRIES or len(keys) > MOST_DEPTH:
            raise self.wrong(keys, f"more than {MOST_ENTRIES} entries, or {MOST_DEPTH} levels")
        kind, found = self.fields(keys, data, KINDS if keys else ("node",))
        if kind == "node":
            self.table[keys] = Node(found["batch_shape"], found.get("class", ""))
            for key, child in found["entries"].items():
                self.entry((*keys, key), child)
        elif kind in ("tensor", "tie"):
            self.table[keys] = Entry("tensor", {}, {"": self.made(keys, kind, found)})
        else:
            parts = {n: x for n, x in found.items() if isinstance(x, (Stored, Tie))}
            self.table[keys] = Entry(kind, {n: x for n, x in found.items() if n not in parts}, parts)

    def fields(self, keys: Keys, data: Any, kinds: Container[str]) -> tuple[str, dict[str, Any]]:
        """The kind of an object of JSON, and its fields as they are read: all that it has to have, and no others."""
        kind: Any = data.get("kind") if type(data) is dict else None
        if type(kind) is not str or kind not in kinds:
            raise self.wrong(keys, "nothing of a known kind")
        reads, names = KINDS[kind], data.keys() - {"kind"}
        missing, unknown = reads.keys() - OPTIONAL - names, names - reads.keys()
        if missing or unknown:
            lines = [f"no {n!r}" for n in sorted(missing)] + [f"{ascii(n)[:40]}, which is unknown" for n in unknown]
            raise self.wrong(keys, f"{kind} with {', '.join(lines[:8])}")
        return kind, {n: read(self, keys, data[n]) for n, read in reads.items() if n in names}

    def tensor(self, keys: Keys, data: Any) -> Stored | Tie:
        """Read the description of one tensor."""
        return self.made(keys, *self.fields(keys, data, ("tensor", "tie")))

    def made(self, keys: Keys, kind: str, found: dict[str, Any]) -> Stored | Tie:
        """The description of one tensor of its fields."""
        if kind == "tie":
            return Tie(tuple(found["key"]), found.get("part", ""))
        out = Stored(found["dtype"], found["shape"], found.get("crc32"))
        if math.prod([n or 1 for n in out.shape]) * DTYPES[out.dtype].itemsize >= TOO_LARGE:  # its strides count, too
            raise self.wrong(keys, "a tensor of 2**62 bytes or more")
        return out

    def sizes(self, keys: Keys, data: Any) -> tuple[int, ...]:
        if type(data) is not list or len(data) > MOST_DIMS:
            raise self.wrong(keys, f"no shape of at most {MOST_DIMS} sizes")
        if not all([type(n) is int and 0 <= n < TOO_LARGE for n in data]):
            raise self.wrong(keys, "a size that is none")
        return tuple(data)

    def size(self, keys: Keys, data: Any) -> int:
        if type(data) is not int or not 0 <= data < TOO_LARGE:
            raise self.wrong(keys, "a number that is no size")
        return data

    def dtype(self, keys: Keys, data: Any) -> str:
        if type(data) is not str or data not in DTYPES:
            raise self.wrong(keys, f"the dtype {ascii(data)[:40]}, which is unknown")
        return data

    def text(self, keys: Keys, data: Any) -> str:
        return self.exactly(keys, data, str, "a name that is no string")

    def strings(self, keys: Keys, data: Any) -> list[str]:
        return [self.text(keys, name) for name in self.exactly(keys, data, list, "a key path that is no list")]

    def entries(self, keys: Keys, data: Any) -> dict[str, Any]:
        return self.exactly(keys, data, dict, "entries that are no object")

    def values(self, keys: Keys, data: Any) -> list[Any]:
        return self.exactly(keys, data, list, "objects that are no list")

    def exactly(self, keys: Keys, data: Any, kind: type, otherwise: str) -> Any:
        if type(data) is not kind:
            raise self.wrong(keys, otherwise)
        return data

    def hashable(self, keys: Keys, data: Any) -> Any:
        if isinstance(data, dict):
            raise self.wrong(keys, "a Static with an object of JSON")
        return tuple([self.hashable(keys, x) for x in data]) if isinstance(data, list) else data

    def wrong(self, keys: Keys, text: str) -> FormatError:
        """The error for an entry that is not of the format."""
        return misfit(self.op, keys, text)


Read = Callable[[Reader, Keys, Any], Any]
JAGGED: dict[str, Read] = {
    "ragged_idx": Reader.size, "max_length": Reader.sizes, "values": Reader.tensor, "offsets": Reader.tensor,
    "shapes": Reader.tensor,
}  # fmt: skip
KINDS: dict[str, dict[str, Read]] = {  # how each field of a kind is read
    "node": {"batch_shape": Reader.sizes, "class": Reader.text, "entries": Reader.entries},
    "tensor": {"dtype": Reader.dtype, "shape": Reader.sizes, "crc32": Reader.size},
    "tie": {"key": Reader.strings, "part": Reader.text},
    "jagged": JAGGED,
    "two_level": {**JAGGED, "outer": Reader.tensor, "outer_max_length": Reader.size},
    "padded": {"ragged_dims": Reader.sizes, "data": Reader.tensor, "lengths": Reader.tensor},
    "objects": {"shape": Reader.sizes, "values": Reader.values},
    "json": {"value": Reader.hashable},
    "shared": {"value": Reader.tensor},
}  # fmt: skip
OPTIONAL = {"class", "crc32", "part", "max_length", "shapes", "outer_max_length"}


def misfit(op: str, keys: Keys, text: str) -> FormatError:
    """The error for an entry that breaks a rule of the format."""
    return not_a_store(op, f"entries of format {VERSION}", "one that is not", [f"{dotted(keys)}: {text}"])


def check_fit(op: str, table: Table) -> None:
    """Refuse ties that lead nowhere, parts that do not fit together, and shapes that break a batch shape."""
    for keys, item in table.items():
        shape = item.batch_shape if isinstance(item, Node) else leaf_shape(op, table, keys, item)
        for n in range(len(keys)):
            batch: Any = table[keys[:n]]
            size = batch.batch_shape
            if shape is not None and shape[: len(size)] != size and not (n and isinstance(item, Node)):
                raise misfit(op, keys, f"shape {list(shape)} in a node of batch shape {list(size)}")


def leaf_shape(op: str, table: Table, keys: Keys, entry: Entry) -> tuple[int, ...] | None:
    """The logical shape of a leaf, -1 on packed ragged dims; None without batch dims. Raises if parts do not fit."""
    forms: dict[str, Stored] = {}
    for part, x in entry.parts.items():
        other = table.get(x.keys) if isinstance(x, Tie) else entry
        at: Any = other.parts.get(x.part if isinstance(x, Tie) else part) if isinstance(other, Entry) else None
        if type(at) is not Stored:
            raise misfit(op, keys, "a tie to no stored tensor")
        forms[part] = at
    fits = FITS.get(entry.kind)
    if fits is None:
        return None
    shape = fits(entry.data, forms)
    if shape is None:
        raise misfit(op, keys, f"{entry.kind} with dtypes or shapes that do not fit together")
    return shape


def fit_tensor(data: dict[str, Any], parts: dict[str, Stored]) -> tuple[int, ...]:
    return parts[""].shape


def fit_jagged(data: dict[str, Any], parts: dict[str, Stored]) -> tuple[int, ...] | None:
    """Values (*S0, N, *S1), offsets (B+1,) and shapes (B, R) as (B, *S0, -1, ..., *S1)."""
    values, offsets, shapes, dim = parts["values"].shape, parts["offsets"], parts.get("shapes"), data["ragged_idx"]
    ragged = 1 if shapes is None else shapes.shape[-1] if len(shapes.shape) == 2 else 0
    fits = offsets.dtype == "int64" and len(offsets.shape) == 1 and offsets.shape[0] > 0 and 1 <= dim <= len(values)
    fits = fits and len(data.get("max_length", [0] * ragged)) == ragged
    if fits and shapes is not None:
        fits = shapes.dtype == "int64" and shapes.shape[0] == offsets.shape[0] - 1 and 2 <= ragged <= MOST_DIMS
    return (offsets.shape[0] - 1, *values[: dim - 1], *[-1] * ragged, *values[dim:]) if fits else None


def fit_two_level(data: dict[str, Any], parts: dict[str, Stored]) -> tuple[int, ...] | None:
    """Inner examples as of `fit_jagged`, and outer offsets (B+1,), as (B, -1, *S0, -1, ..., *S1)."""
    inner, outer = fit_jagged(data, parts), parts["outer"]
    fits = inner is not None and outer.dtype == "int64" and len(outer.shape) == 1 and outer.shape[0] > 0
    return (outer.shape[0] - 1, -1, *inner[1:]) if fits and inner is not None else None


def fit_padded(data: dict[str, Any], parts: dict[str, Stored]) -> tuple[int, ...] | None:
    """Data (B, ..., L, ...) and lengths (B, R)."""
    shape, lengths, dims = parts["data"].shape, parts["lengths"], data["ragged_dims"]
    beside = bool(dims) and dims == tuple(range(dims[0], dims[0] + len(dims))) and 1 <= dims[0] <= dims[-1] < len(shape)
    return shape if beside and lengths.dtype == "int64" and lengths.shape == (shape[0], len(dims)) else None


def fit_objects(data: dict[str, Any], parts: dict[str, Stored]) -> tuple[int, ...] | None:
    return data["shape"] if math.prod(data["shape"]) == len(data["values"]) else None


FITS: dict[str, Callable[..., Any]] = {
    "tensor": fit_tensor, "jagged": fit_jagged, "two_level": fit_two_level, "padded": fit_padded,
    "objects": fit_objects,
}  # fmt: skip
