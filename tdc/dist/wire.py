"""Tensors of a structure in one buffer, and structures of the tensors in one.

    buffer    uint8, the tensors of each dtype one behind another, wide elements first, without gaps
    run       neighbours of one shape: one view of the buffer, split at once

Invariant: a tensor of a buffer is no view to autograd: each has a version of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from tdc.compile.shards import joined
from tdc.core.errors import StructureError, TdcError, message
from tdc.core.keys import parts, path_of
from tdc.core.one_storage import Empty, strides
from tdc.dist.form import BARE, BOUNDS, NONE, Described, Form, NoSizes, Run, Sizes, resolved
from tdc.io.filenames import Keys, Part
from tdc.io.files import bytes_of, host
from tdc.io.leaves import MAKERS, Faulty, made
from tdc.io.manifest import Entry, json_of, stored_at, strictly
from tdc.ragged.nested import NestedTensor
from tdc.tensordict.leaf import wrap_leaf
from tdc.tensordict.nodes import Nodes
from tdc.tensordict.object_array import ObjectArray
from tdc.tensordict.storage import Leaves, mark_examples
from tdc.tensordict.tensordict import build_td

untyped: Any = torch
WIDE = {  # dtypes that torch.cat takes; others go as bytes
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
}


def by_dtype(form: Form, tensors: Sequence[Tensor]) -> Iterator[tuple[torch.dtype, Sequence[Tensor]]]:
    """The tensors of each dtype, in the order of the message."""
    first = 0
    for dtype, n in form.groups.items():
        yield dtype, tensors[first : first + n]
        first += n


def packed(x: Described, device: torch.device) -> Tensor:
    """The bytes of a structure on a device."""
    own = x.tensors[0].device if x.tensors else device
    buffer = torch.empty(x.form.layout(x.sizes).nbytes, dtype=torch.uint8, device=own)
    end = 0
    with torch.no_grad():
        for dtype, tensors in by_dtype(x.form, x.tensors):
            begin, end = end, end + sum([t.numel() for t in tensors]) * dtype.itemsize
            if dtype in WIDE:
                joined(tensors, buffer[begin:end].view(dtype))
            else:
                untyped.cat([t.contiguous().view(-1).view(torch.uint8) for t in tensors], out=buffer[begin:end])
    return buffer.to(device)


def empty_buffer(form: Form, sizes: Sizes, device: torch.device) -> Tensor:
    """A buffer to receive into."""
    return torch.empty(form.layout(sizes).nbytes, dtype=torch.uint8, device=device)


def views(buffer: Tensor, runs: Sequence[Run], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors of some runs in a buffer, which they share."""
    found: list[Tensor] = []
    empty = Empty(buffer.device)
    for run, shape, at in placed(buffer, runs, shapes):
        if run.times > 1 and shape and prod(shape):
            found += empty.run(buffer.untyped_storage(), run.dtype, at, shape, strides(shape), run.times)
        else:
            for i in range(run.times):
                found += empty.run(
                    buffer.untyped_storage(), run.dtype, at + i * prod(shape), shape, strides(shape), 1
                )
    return found


def stacked_views(buffer: Tensor, runs: Sequence[Run], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """For each run one view of its tensors in a buffer, `(count, *shape)`."""
    empty, storage = Empty(buffer.device), buffer.untyped_storage()
    found: list[Tensor] = []
    for run, shape, at in placed(buffer, runs, shapes):
        whole = (run.times, *shape)
        found += empty.run(storage, run.dtype, at, whole, strides(whole), 1)
    return found


def placed(
    buffer: Tensor, runs: Sequence[Run], shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[Run, Sequence[int], int]]:
    """Runs, their shapes, and where each begins in the storage of a buffer, in elements of its dtype."""
    at = untyped.Tensor.storage_offset(buffer) * buffer.element_size()
    for run, shape in zip(runs, shapes, strict=True):
        yield run, shape, at // run.dtype.itemsize
        at += run.times * prod(shape) * run.dtype.itemsize


def apart(whole: Tensor) -> list[Tensor]:
    """The tensors in a new `(count, *shape)`, each with a version of its own."""
    count, *shape = whole.shape
    if count > 1 and shape and whole.numel():
        return [*untyped.unsafe_split(whole.view(count * shape[0], *shape[1:]), shape[0])]
    return [whole.view(shape)] if count == 1 else [*whole.unbind()]


def over_ranks(parts: Sequence[Tensor], dim: int | None) -> list[Tensor]:
    """Tensors of a run, joined over the ranks along `dim`, or stacked in front."""
    if dim is None:
        return apart(torch.stack([*parts], 1))
    return apart(torch.cat([*parts], 1 + dim))


# -- structures of tensors


def leaf_of(form: Form, keys: Keys, sizes: Sizes, tensors: Mapping[Part, Tensor], structures: dict[Any, Any]) -> Any:
    """The ragged leaf or ObjectArray at a key path, of its tensors."""
    entry: Any = form.table[keys]
    data = entry.data | {name: resolved(value, sizes) for name, value in form.data[keys].items()}
    data = {name: value for name, value in data.items() if name not in BOUNDS or is_bound(value)}
    if entry.kind == "objects":
        with strictly("dist", "objects"):
            values = json_of(bytes(bytes_of(host(tensors[keys, ""]))))
        return wrap_leaf(ObjectArray(values, data["shape"]))
    own = {part: tensors[stored_at(form.table, keys, part)] for part in entry.parts}
    return MAKERS[entry.kind](data, own, structures)


def is_bound(value: Any) -> bool:
    """True if there is a bound, one number or one for each ragged dim."""
    return NONE not in (value if type(value) is tuple else (value,))


def built(
    op: str, form: Form, sizes: Sizes, tensors: Sequence[Tensor], classes: Mapping[str, type], like: Any = None,
    size: torch.Size | None = None,
) -> Any:  # fmt: skip
    """The structure of a form, of its tensors in the order of the message.

    Args:
        classes: tensorclasses by name.
        like: a TensorDict of this form, whose nodes and order of keys the result has.
        size: batch size of the result, where it is not that of the sizes.

    Raises:
        FormatError: tensors that do not make ragged batches; classes with other fields.
    """
    if form.paths:
        leaves: Leaves = dict(zip(form.paths, tensors, strict=True))
    else:
        leaves = leaves_of(op, form, sizes, dict(zip(form.templates, tensors, strict=True)), like)
    if form.bare:
        return leaves[BARE]
    if like is None:
        key = tuple(classes.values())
        if key not in form.nodes:
            form.nodes[key] = nodes_of(op, form, classes)
        nodes, order = dict(form.nodes[key]), form.keys
    else:
        nodes, order = like._nodes, like._leaves
    leaves = {path: leaves[path] for path in order}
    if form.ndim:
        mark_examples(leaves)
    device = None if like is None else like._device
    return build_td(leaves, nodes, torch.Size(sizes[: form.ndim]) if size is None else size, device)


def leaves_of(op: str, form: Form, sizes: Sizes, at: dict[Part, Tensor], like: Any) -> Leaves:
    """The leaves that tensors make, in the order of the form."""
    if like is not None and not form.is_plain:
        share_offsets(at, like)
    structures: dict[Any, Any] = {}
    leaves: Leaves = {}
    try:
        for keys, entry in form.table.items():
            if isinstance(entry, Entry) and entry.kind == "tensor":
                leaves[path_of(keys)] = at[stored_at(form.table, keys, "")]
            elif isinstance(entry, Entry) and entry.kind != "json":
                leaves[path_of(keys)] = leaf_of(form, keys, sizes, at, structures)
    except (Faulty, TdcError) as fault:
        raise StructureError(message(op, "tensors that make a structure", f"others: {fault}")) from None
    return leaves


def share_offsets(at: dict[Part, Tensor], like: Any) -> None:
    """Let ragged leaves that share a structure here share it again, where offsets that came for them are equal."""
    known: dict[Any, Tensor] = {}
    for path, leaf in like._leaves.items():
        for part in ("offsets", "shapes") if isinstance(leaf, NestedTensor) else ():
            own = at.get((parts(path), part))
            if own is not None:
                first = known.setdefault((id(leaf.structure), part), own)
                if first.shape == own.shape and torch.equal(first, own):
                    at[parts(path), part] = first


def nodes_of(op: str, form: Form, classes: Mapping[str, type]) -> Nodes:
    """The table of nodes of a form."""
    empty = [torch.zeros(resolved(shape, NoSizes()), dtype=dtype) for dtype, shape in form.templates.values()]
    return made(op, form.table, (), dict(zip(form.templates, empty, strict=True)), classes)._nodes
