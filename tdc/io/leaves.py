"""Leaves as described tensors, and back: what `save` asks of a TensorDict, and what `load` makes of a manifest.

    NestedTensor   "jagged"    values, offsets, shapes where there are several ragged dims
    MaskedBatch    "padded"    data, lengths
    TwoLevelTensor "two_level" those of its NestedTensor, and outer, its offsets
    ObjectArray    "objects"   no tensor, its objects as JSON
    Static         "json"      no tensor, its value as JSON
    Shared         "shared"    value
    any tensor     "tensor"    itself

A tensor that is there twice, as tied weights or the offsets that ragged leaves share, is stored once and comes back as
one object.

Invariants: nothing here reads or writes a file; content is read of offsets and lengths alone, which kernels trust.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tdc.core.errors import TdcError, UnsupportedError, describe, first_line, refuse_wrong
from tdc.core.keys import parts, path_of
from tdc.core.one_storage import identity
from tdc.io.filenames import Keys, Part, dotted, refuse_damage
from tdc.io.manifest import DTYPES, MOST_DEPTH, Entry, Node, Stored, Table, Tie, stored_at
from tdc.layout.segments import longest
from tdc.layout.structure import Structure
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.two_level import TwoLevelTensor
from tdc.tensordict.leaf import unwrap, wrap_leaf
from tdc.tensordict.nodes import Nodes, Static, Typed, extra_of, is_inner, name_of
from tdc.tensordict.object_array import ObjectArray
from tdc.tensordict.shared import Shared, over
from tdc.tensordict.storage import Leaves, mark_examples
from tdc.tensordict.tensordict import TensorDict, build_td

LONGEST_INT = 10_000  # bits: Python reads no longer number from a text, unless told to
NAMES = {dtype: name for name, dtype in DTYPES.items()}
HINT = "td.exclude(key); tdc.from_torch(x) of torch.nested, x.to_dense() of sparse ones, tdc.io.dcp_save for DTensors"


class Faulty(Exception):
    """A fault of one leaf."""


# -- of a TensorDict


def described(op: str, td: TensorDict, content: bool = True) -> tuple[Table, dict[Part, Tensor]]:
    """A TensorDict as a table and the tensors that are to be stored.

    Args:
        content: tensors have content; without it those of the device "meta" will do.

    Raises:
        UnsupportedError: leaves and values that the format does not hold; all are named.
    """
    size, entries = tuple(td.batch_size), {**td._leaves, **td._nodes}
    table: Table = {(): as_node(entries.get((), 0), size, ())}
    tensors: dict[Part, Tensor] = {}
    wrong: dict[str, str] = {}
    known: dict[Any, Part] = {}
    for path, found in entries.items():
        keys = parts(path)
        node = path in td._nodes and is_inner(found)
        for n in range(1, len(keys) + node):  # the nodes that it lies in, of whose batch dims a leaf knows the sizes
            if keys[:n] not in table:
                known_sizes = tuple(getattr(found, "shape", ()))
                table[keys[:n]] = as_node(entries[path_of(keys[:n])], size, known_sizes)
        if not node:
            try:
                kind, data, own = taken_apart(found)
                if content and any([x.is_meta for x in own.values()]):
                    raise Faulty("which has no content")
                stored = {part: tied_or_stored(x, (keys, part), known, tensors) for part, x in own.items()}
                table[keys] = Entry(kind, data, stored)
            except Faulty as fault:
                wrong[dotted(keys)] = f"{describe(unwrap(found))}, {fault}"
    expected = "tensors in memory, ragged batches, and Python values that JSON holds"
    refuse_wrong(UnsupportedError, op, expected, wrong, "others", HINT)
    return table, tensors


def as_node(entry: Any, size: tuple[int, ...], sizes: tuple[int, ...]) -> Node:
    """A node in a root of batch shape `size`, where `sizes` are those of a leaf in it: all that knows its own."""
    batch = sizes[: len(size) + extra_of(entry)]
    return Node(max(batch, size, key=len), name_of(entry.cls) if type(entry) is Typed else "")


def taken_apart(x: Any) -> tuple[str, dict[str, Any], dict[str, Tensor]]:
    """The kind of a leaf or Static, what describes it, and its tensors."""
    if type(x) is Shared:
        return "shared", {}, {"value": x.value}
    x = unwrap(x)
    if isinstance(x, Tensor):
        return "tensor", {}, {"": x}
    if isinstance(x, NestedTensor):
        s = x.structure
        if s.batch_dim:
            raise Faulty("whose batch is not dim 0")
        bound = {} if s.extent is None else {"max_length": longest(s)}
        shapes = {} if s.shapes is None else {"shapes": s.shapes}
        return "jagged", {"ragged_idx": x.ragged_dims[0], **bound}, {"values": x.values, "offsets": s.offsets, **shapes}
    if isinstance(x, TwoLevelTensor):
        _, data, own = taken_apart(x.values)
        bound = {} if x.structure.extent is None else {"outer_max_length": longest(x.structure)[0]}
        return "two_level", data | bound, own | {"outer": x.offsets}
    if isinstance(x, MaskedBatch):
        if x.batch_dim:
            raise Faulty("whose batch is not dim 0")
        return "padded", {"ragged_dims": x.ragged_dims}, {"data": x.data, "lengths": x.lengths}
    if isinstance(x, ObjectArray):
        objects = [as_json(o) for o in x._items]
        return "objects", {"shape": tuple(x.shape), "values": objects}, {}
    if type(x) is Static:
        return "json", {"value": as_json(lists_of(x.value))}, {}
    raise Faulty("of another library")


def tied_or_stored(x: Tensor, at: Part, known: dict[Any, Part], tensors: dict[Part, Tensor]) -> Stored | Tie:
    """A tensor as one to store, or as a tie where the same memory is stored already."""
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.dtype not in NAMES or x.is_nested:
        raise Faulty("which is no dense tensor of a dtype that files have")
    try:
        key = identity(x)
    except (RuntimeError, NotImplementedError):  # of a transform
        raise Faulty("which has no memory of its own") from None
    if key in known and x.numel():
        return Tie(*known[key])
    known[key], tensors[at] = at, x.detach()
    return Stored(NAMES[x.dtype], tuple(x.shape))


def lists_of(x: Any) -> Any:
    """A hashable value with lists in place of tuples."""
    members: Any = x
    return [lists_of(part) for part in members] if type(x) is tuple else x


def as_json(x: Any, depth: int = 0) -> Any:
    """A value that JSON gives back as it is; anything else is Faulty."""
    members: Any = x
    if depth > MOST_DEPTH:
        raise Faulty(f"which is nested more than {MOST_DEPTH} times")
    if type(x) is list:
        return [as_json(part, depth + 1) for part in members]
    if type(x) is dict and all([type(key) is str for key in members]):
        return {key: as_json(part, depth + 1) for key, part in members.items()}
    number = (type(x) is float and math.isfinite(x)) or (type(x) is int and x.bit_length() <= LONGEST_INT)
    if x is None or type(x) in (str, bool) or number:
        return x
    raise Faulty(f"which holds {f'the float {x}' if type(x) is float else type(x).__name__}, and JSON does not")


# -- of a table


def made(
    op: str, table: Table, keys: Keys, tensors: Mapping[Part, Tensor], classes: Mapping[str, type], some: bool = False
) -> Any:
    """The entry at a key path: a TensorDict, a leaf, or the value of a Static.

    Args:
        classes: tensorclasses by name.
        some: only some keys of the table were chosen, and a node that lacks fields of its class is a plain one.

    Raises:
        FormatError: offsets or lengths that are none, or a class with other fields; all are named.
    """
    structures: dict[Any, Structure] = {}
    wrong: dict[str, str] = {}
    item = table[keys]
    if isinstance(item, Entry):
        leaf = checked_leaf(table, keys, tensors, structures, wrong)
        refuse_faults(op, wrong)
        return leaf.value if type(leaf) is Static else unwrap(leaf)
    size = torch.Size(item.batch_shape)
    names = children(table) if classes else {}
    leaves: Leaves = {}
    nodes: Nodes = {}
    for at, found in table.items():
        if at[: len(keys)] != keys:
            continue
        path = path_of(at[len(keys) :]) if at != keys else ()
        if isinstance(found, Node):
            extra, cls = max(len(found.batch_shape) - len(size), 0), classes.get(found.cls)
            if cls is not None and has_fields(names.get(at, set()), at, cls, {} if some else wrong):
                nodes[path] = Typed(extra, cls)
            elif path != ():
                nodes[path] = extra
        else:
            leaf = checked_leaf(table, at, tensors, structures, wrong)
            target: dict[Any, Any] = nodes if type(leaf) is Static else leaves
            target[path] = over(wrap_leaf(leaf), node_at(table, at[:-1]).batch_shape)
    refuse_faults(op, wrong)
    if size:
        mark_examples(leaves)
    return build_td(leaves, nodes, size)


def node_at(table: Table, keys: Keys) -> Node:
    """The node at a key path."""
    item: Any = table[keys]
    return item  # type: ignore[no-any-return]  # every proper prefix of a path is a node


def children(table: Table) -> dict[Keys, set[str]]:
    """The keys directly below each node."""
    found: dict[Keys, set[str]] = {}
    for keys in table:
        if keys:
            found.setdefault(keys[:-1], set()).add(keys[-1])
    return found


def checked_leaf(
    table: Table, keys: Keys, tensors: Mapping[Part, Tensor], structures: dict[Any, Structure], wrong: dict[str, str]
) -> Any:
    """The leaf at a key path; None, and a line in `wrong`, where its tensors do not go together."""
    entry: Any = table[keys]
    parts = {part: tensors[stored_at(table, keys, part)] for part in entry.parts}
    try:
        return MAKERS[entry.kind](entry.data, parts, structures)
    except (Faulty, TdcError, RuntimeError) as fault:
        wrong[dotted(keys)] = f"{entry.kind} {first_line(fault)}"
        return None


def refuse_faults(op: str, wrong: dict[str, str]) -> None:
    """Raise an error that names all leaves that were found wrong."""
    lines = [f"{p}: {text}" for p, text in wrong.items()]
    refuse_damage(op, "leaves whose tensors go together", lines, "that do not")


def has_fields(own: set[str], keys: Keys, cls: Any, wrong: dict[str, str]) -> bool:
    """True if a node has exactly the fields of a class; a line in `wrong` where it has not."""
    fields = set(cls._fields)
    if own != fields:
        differ = ", ".join(sorted([ascii(name)[1:-1] for name in own ^ fields])[:8])
        wrong[dotted(keys)] = f"other fields than {cls.__name__} has: {differ}; leave it out of classes="
    return own == fields


def make_jagged(data: dict[str, Any], parts: dict[str, Tensor], structures: dict[Any, Structure]) -> NestedTensor:
    """A NestedTensor; those of the same offsets and axes share one structure, as they did before."""
    values, offsets, shapes, dim = parts["values"], parts["offsets"], parts.get("shapes"), data["ragged_idx"]
    bound = data.get("max_length")
    check_offsets(offsets, values.shape[dim - 1], shapes)
    key = (id(offsets), id(shapes), dim, bound)
    if key in structures:
        return build_nested(structures[key], values)
    out = NestedTensor(values, offsets, ragged_dim=dim, shapes=shapes, max_length=bound)
    structures[key] = out.structure
    return out


def check_offsets(offsets: Tensor, total: int, shapes: Tensor | None) -> None:
    """Offsets begin with 0, never decrease and end with the packed size; sizes of examples agree with them."""
    lengths, inside = offsets.diff(), ((offsets >= 0) & (offsets <= total)).all()  # so that no difference wraps around
    if int(offsets[0]) != 0 or int(offsets[-1]) != total or not bool(inside & (lengths >= 0).all()):
        raise Faulty("with offsets that do not begin with 0, decrease, or do not end with the packed size")
    if shapes is not None:  # in float, too, since a product of large integers may wrap around
        agree = (shapes >= 0).all() & (shapes.prod(1) == lengths).all() & (shapes.double().prod(1) == lengths).all()
        if not bool(agree):
            raise Faulty("with sizes of examples that do not agree with its offsets")


def make_two_level(data: dict[str, Any], parts: dict[str, Tensor], structures: dict[Any, Structure]) -> TwoLevelTensor:
    """A TwoLevelTensor around the NestedTensor that the other parts make."""
    inner, outer = make_jagged(data, parts, structures), parts["outer"]
    check_offsets(outer, inner.batch_size[0], None)
    return TwoLevelTensor(inner, outer, max_length=data.get("outer_max_length"))


def make_padded(data: dict[str, Any], parts: dict[str, Tensor], structures: Any) -> MaskedBatch:
    """A MaskedBatch, whose lengths lie inside of its data."""
    x, lengths, dims = parts["data"], parts["lengths"], data["ragged_dims"]
    if bool((lengths < 0).any()) or bool((lengths > lengths.new_tensor([x.shape[d] for d in dims])).any()):
        raise Faulty("with lengths outside of its data")
    return MaskedBatch(x, lengths, ragged_dims=dims)


MAKERS: dict[str, Callable[..., Any]] = {
    "tensor": lambda data, parts, structures: parts[""],
    "jagged": make_jagged,
    "two_level": make_two_level,
    "padded": make_padded,
    "objects": lambda data, parts, structures: ObjectArray(data["values"], data["shape"]),
    "json": lambda data, parts, structures: Static(data["value"]),
    "shared": lambda data, parts, structures: Shared(parts["value"]),
}
