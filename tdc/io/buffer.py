"""A TensorDict as one tensor of bytes and a schema, for what sends one piece of memory: a socket or a collective.

    buffer    uint8 (N,), the tensors of a store one behind another, each at the next multiple of 64, zeros between them
    schema    the manifest of a store (see `manifest`), JSON with a digest

The tensors have the order in which the schema is read, below each node all that lies in it, whenever it came. Nothing
says where a tensor lies but the dtypes and shapes before it, so a schema cannot point anywhere.

Invariants: as of a store; the leaves that come back are the memory of the buffer, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.errors import DtypeError, StructureError, describe, message
from tdc.core.one_storage import Form, join, split, total
from tdc.io.filenames import Part, dotted, not_a_store
from tdc.io.leaves import described, made
from tdc.io.load import names_of
from tdc.io.manifest import DTYPES, Entry, Stored, Table, dump, parse
from tdc.tensordict.tensordict import TensorDict

WRITE, READ = "io.to_buffer", "io.from_buffer"


def to_buffer(td: TensorDict) -> tuple[Tensor, bytes]:
    """The bytes of all tensors in one buffer, and a schema that says what they are.

    It holds what a store holds: ragged leaves, `Static` and `ObjectArray` of JSON values, tensorclasses by name, and
    tied tensors once. A TensorDict of other content and the same form has the same schema, to be sent only once.

    Shapes:
        `-> (N,)` uint8 on the device of the leaves; N is a multiple of 64.

    Raises:
        UnsupportedError: leaves and values that a store cannot hold; all are named.
        StructureError: leaves on different devices; all but those of the first are named.

    Compile:
        Eager only.

    Example:
        >>> td = TensorDict({"x": torch.arange(3), "info": {"done": torch.tensor([True, False, True])}}, [3])
        >>> buffer, schema = to_buffer(td)
        >>> buffer.shape, from_buffer(buffer, schema)["info", "done"]
        (torch.Size([128]), tensor([ True, False,  True]))
    """
    expect(WRITE, td, TensorDict)
    table, tensors = described(WRITE, td)
    devices = [x.device for x in tensors.values()]
    wrong = {dotted(*at): f"{describe(x)} on {x.device}" for at, x in tensors.items() if x.device != devices[0]}
    if wrong:
        expected, got = f"leaves on one device, as the first on {devices[0]}", f"{len(wrong)} elsewhere"
        raise StructureError(message(WRITE, expected, got, wrong, "td.to(device)"))
    return join([tensors[at] for at in in_order(table, tensors)]), dump(WRITE, table)


def in_order(table: Table, parts: Iterable[Part]) -> list[Part]:
    """The parts of leaves in the order in which the schema of a table is read.

    A table has key paths as they came, so a key of a node may stand far behind the others of that node.
    """
    rank = {keys: i for i, keys in enumerate(table)}
    return sorted(parts, key=lambda at: [rank[at[0][: n + 1]] for n in range(len(at[0]))])  # parts stay as they are


def from_buffer(buffer: Tensor, schema: bytes, *, classes: Iterable[type] = ()) -> TensorDict:
    """The TensorDict of `to_buffer`, its leaves the memory of the buffer.

    Args:
        buffer: uint8, as `to_buffer` gave it, on any device; `torch.frombuffer(data, dtype=torch.uint8)` of bytes.
        schema: may be anybody's: what is no schema, or not that of a buffer of this size, is an error. Neither its
            digest nor this function tells whether the bytes in the buffer are the right ones.
        classes: as of `tdc.io.load`.

    Raises:
        DtypeError: the buffer is no uint8 tensor, the schema no bytes.
        FormatError: no schema, a damaged one, one for another buffer, or offsets and lengths that are none.

    Compile:
        Leaves are plain tensors.

    Example:
        >>> buffer, schema = to_buffer(TensorDict({"x": torch.zeros(3)}, [3]))
        >>> td = from_buffer(buffer, schema)
        >>> buffer.view(torch.float32)[1] = 5.0
        >>> td["x"]
        tensor([0., 5., 0.])
    """
    known = names_of(classes, READ)
    expect(READ, buffer, Tensor)
    if buffer.dtype != torch.uint8 or buffer.layout != torch.strided:
        hint = "buffer.view(torch.uint8), or torch.frombuffer(data, dtype=torch.uint8)"
        raise DtypeError(message(READ, "a uint8 tensor", describe(buffer), hint=hint))
    if not isinstance(schema, (bytes, bytearray, memoryview)):
        raise DtypeError(message(READ, "a schema of bytes", describe(schema), hint="the second result of to_buffer"))
    table, places, forms = parsed(bytes(schema))
    hint = "the buffer and the schema of one call of tdc.io.to_buffer"
    if buffer.shape != (total(forms),):
        raise not_a_store(READ, f"a buffer of {total(forms)} bytes", describe(buffer), hint=hint)
    largest = max([form.dtype.itemsize for form in forms], default=1)
    if not buffer.is_contiguous() or buffer.data_ptr() % largest or buffer.storage_offset() % largest:
        got = "one that begins in between, or whose bytes do not lie side by side"
        raise not_a_store(READ, f"a buffer that begins at a multiple of {largest}", got, hint="buffer.clone()")
    tensors = dict(zip(places, split(buffer, forms), strict=True))
    return made(READ, table, (), tensors, known)


def parsed(schema: bytes) -> tuple[Table, list[Part], list[Form]]:
    """The table of a schema, the places of the tensors that are stored, in their order, and the forms of these."""
    table = parse(READ, schema)
    stored: dict[Part, Stored] = {}
    for keys, item in table.items():
        parts: dict[str, Any] = item.parts if isinstance(item, Entry) else {}
        stored |= {(keys, part): x for part, x in parts.items() if isinstance(x, Stored)}
    return table, [*stored], [Form(DTYPES[x.dtype], x.shape) for x in stored.values()]
