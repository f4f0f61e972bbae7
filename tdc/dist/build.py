"""Structures from the tensors of a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tdc.core.errors import StructureError, TdcError, message
from tdc.core.keys import parts, path_of
from tdc.dist.form import BARE, BOUNDS, NONE, Form, NoSizes, Sizes, resolved
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
