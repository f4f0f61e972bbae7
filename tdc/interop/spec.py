"""Specs: the keys, shapes, dtypes and devices of a TensorDict without its tensors, to check or to allocate one.

    spec(td)                       Spec(batch_size=[3], {"x": float32[4], "tokens": nested int64[-1]})
    zeros(spec, [8])               a TensorDict of that form, filled with zeros
    check(td, spec)                `td` itself, or an error that names every difference

Invariants:
  - all functions are traceable;
  - a Spec is frozen and hashable and holds no tensors; equal TensorDicts have equal specs, in whatever order of keys;
  - sizes that vary from batch to batch are None in the batch size and -1 among features, on ragged dims only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from tdc.core.arguments import as_device, as_own_device
from tdc.core.errors import (
    DtypeError,
    ShapeError,
    StructureError,
    UnsupportedError,
    dtype_name,
    message,
    refuse_wrong,
    show_sizes,
)
from tdc.core.frozen import Frozen
from tdc.core.keys import as_path, show
from tdc.core.typing import KeyPath, OpName
from tdc.ragged.masked import MaskedBatch
from tdc.ragged.nested import NestedTensor
from tdc.tensordict.leaf import Leaf, unwrap, wrap_leaf
from tdc.tensordict.nodes import Nodes, Static, Typed, extra_of, is_inner
from tdc.tensordict.object_array import ObjectArray
from tdc.tensordict.paths import join, within
from tdc.tensordict.shared import Shared, build_shared
from tdc.tensordict.storage import Leaves, is_tensordict, mark_examples, put_leaf, put_node
from tdc.tensordict.tensordict import TensorDict, build_td

Size = tuple["int | None", ...]


class LeafSpec(NamedTuple):
    """One leaf without its content.

    Attributes:
        kind: "Tensor", "NestedTensor", "MaskedBatch", or the name of a registered class.
        dtype: None where a registered class has none.
        shape: of the features; -1 on ragged dims.
        device: None for any.
    """

    kind: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    device: torch.device | None = None

    def text(self) -> str:
        """As messages show it."""
        kind = "" if self.kind == "Tensor" else f"{self.kind} "
        dtype = "" if self.dtype is None else dtype_name(self.dtype)
        return f"{kind}{dtype}{show_sizes(self.shape)}" + ("" if self.device is None else f" on {self.device}")


@final
class Spec(Frozen):
    """The batch size of a TensorDict, and for each key path kind, dtype, feature shape and device.

    Made by `spec`. Equal where keys and entries are equal, in any order.

    Example:
        >>> spec(TensorDict({"x": torch.zeros(3, 4)}, [3])).with_batch_size([None]).with_device(None)
        Spec(batch_size=[None], {'x': float32[4]})
    """

    __slots__ = ("_batch_size", "_leaves", "_nodes")
    _title = "interop.Spec"
    _instead = "spec.with_batch_size(size), spec.with_device(device), or tdc.interop.spec(td)"
    _batch_size: Size
    _leaves: dict[KeyPath, LeafSpec]
    _nodes: Nodes

    def __init__(self, batch_size: Sequence[int | None], leaves: Mapping[KeyPath, LeafSpec], nodes: Nodes) -> None:
        self._batch_size = tuple(batch_size)
        self._leaves = dict(leaves)
        self._nodes = dict(nodes)

    @property
    def batch_size(self) -> Size:
        """The leading sizes; None for any."""
        return self._batch_size

    @property
    def leaves(self) -> dict[KeyPath, LeafSpec]:
        """Each leaf by its key path, in insertion order."""
        return dict(self._leaves)

    def with_batch_size(self, batch_size: Any) -> Spec:
        """The same entries with another batch size; None in it means any size."""
        return Spec(open_size("with_batch_size", batch_size), self._leaves, self._nodes)

    def with_device(self, device: Any) -> Spec:
        """The same entries, all on one device; None for any."""
        target = None if device is None else as_device("with_device", device)
        return Spec(self._batch_size, {p: e._replace(device=target) for p, e in self._leaves.items()}, self._nodes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Spec):
            return NotImplemented
        mine, others = [(s._batch_size, s._leaves, s._nodes) for s in (self, other)]
        return mine == others

    def __hash__(self) -> int:
        return hash((self._batch_size, frozenset(self._leaves.items()), frozenset(self._nodes.items())))

    def __repr__(self) -> str:
        parts = {p: e.text() for p, e in self._leaves.items()}
        parts |= {p: repr(n) for p, n in self._nodes.items() if type(n) is Static}
        entries = ", ".join([f"{show(p)!r}: {text}" for p, text in parts.items()])
        return f"Spec(batch_size={show_sizes(self._batch_size)}, {{{entries}}})"


def spec(td: TensorDict | Spec | Mapping[Any, Any], batch_size: Any = None) -> Spec:
    """The Spec of a TensorDict, or of a schema.

    Args:
        td: a TensorDict; or a schema, a nested dict of `(feature shape, dtype)`.
        batch_size: in place of that of the TensorDict; None in it means any size. A schema has `()` by default.

    Raises:
        ShapeError: another number of batch dims than the TensorDict has.
        DtypeError: an entry of a schema that is no pair of shape and dtype; every one is named.

    Compile:
        Traceable; a Spec is a constant.

    Example:
        >>> spec({"x": ((4,), torch.float32), "meta": {"id": ((), torch.int64)}}, [None])
        Spec(batch_size=[None], {'x': float32[4], 'meta.id': int64[]})
        >>> from tdc.ragged.pack import pack
        >>> spec(TensorDict({"tokens": pack([torch.ones(2), torch.ones(3)])}, [2]))
        Spec(batch_size=[2], {'tokens': NestedTensor float32[-1] on cpu})
    """
    return spec_of("interop.spec", td, batch_size)


def zeros(schema: TensorDict | Spec | Mapping[Any, Any], batch_size: Any = None, *, device: Any = None) -> TensorDict:
    """A TensorDict of the form of a spec or schema, filled with zeros. Examples of ragged leaves have length 0.

    Args:
        schema: a Spec, a TensorDict to take the form of, or a nested dict of `(feature shape, dtype)`.
        batch_size: in place of that of the spec; needed where that has None.
        device: of all leaves; where the spec says by default.

    Raises:
        ShapeError: a batch size that the spec leaves open.
        UnsupportedError: leaves of registered classes, of which there are no zeros; all are named.

    Example:
        >>> td = zeros({"x": ((4,), torch.float32), "id": ((), torch.int64)}, [3])
        >>> td["x"].shape, td["id"]
        (torch.Size([3, 4]), tensor([0, 0, 0]))
    """
    form = spec_of("interop.zeros", schema, batch_size)
    size = form._batch_size
    if None in size:
        got, hint = f"{show_sizes(size)}", "tdc.interop.zeros(spec, batch_size=[...])"
        raise ShapeError(message("interop.zeros", "a batch size without None", got, hint=hint))
    wrong = {show(p): e.kind for p, e in form._leaves.items() if e.kind not in MAKERS}
    hint = "td.exclude(key) before tdc.interop.spec, and set the key afterwards"
    refuse_wrong(UnsupportedError, "interop.zeros", "leaves that can be filled with zeros", wrong, "others", hint)
    target = as_own_device("interop.zeros", device)
    leaves: Leaves = {}
    for path, entry in form._leaves.items():
        leaves[path] = MAKERS[entry.kind](entry, (*size, *entry.shape), entry.device if target is None else target)
    if size:
        mark_examples(leaves)
    return build_td(leaves, dict(form._nodes), torch.Size(size), target)  # type: ignore[arg-type]  # no None is left


def check(td: TensorDict, schema: TensorDict | Spec | Mapping[Any, Any]) -> TensorDict:
    """The TensorDict itself, if it is as a spec says. Content is not read.

    Args:
        schema: a Spec, or a nested dict of `(feature shape, dtype)`, which leaves batch sizes open.

    Raises:
        StructureError: it is not; every difference is named: missing and unknown keys, batch size, kind, dtype, feature
            shape, device, Static values, classes of inner nodes.

    Compile:
        Traceable; a batch size of None puts no guard on the sizes.

    Example:
        >>> td = TensorDict({"x": torch.zeros(3, 5)}, [3])
        >>> check(td, spec(td).with_batch_size([None])) is td
        True
    """
    if not is_tensordict(td):
        hint = "tdc.as_tensordict(obj) first"
        raise DtypeError(message("interop.check", "a TensorDict", type(td).__name__, hint=hint))
    if isinstance(schema, Spec) or is_tensordict(schema):
        form = spec_of("interop.check", schema)
    else:  # it says nothing of the classes of inner nodes
        form = spec_of("interop.check", schema, [None] * len(td._size))
        nodes = {p: n for p, n in td._nodes.items() if is_inner(n) and (p in form._nodes or p == ())}
        form = Spec(form._batch_size, form._leaves, form._nodes | nodes)
    wrong = differences(td, form)
    which, hint = f"difference{'s' * (len(wrong) > 1)}", "mend the leaves, or state what they are: tdc.interop.spec(td)"
    refuse_wrong(StructureError, "interop.check", "a TensorDict of this spec", wrong, which, hint)
    return td


# -- helpers


def spec_of(op: OpName, td: Any, batch_size: Any = None) -> Spec:
    """`spec`, as part of another operation."""
    if isinstance(td, Spec):
        return td if batch_size is None else Spec(open_size(op, batch_size), td._leaves, td._nodes)
    if is_tensordict(td):
        own: Any = td
        size = tuple(own.batch_size) if batch_size is None else open_size(op, batch_size)
        if len(size) != len(own._size):
            expected, got = f"{len(own._size)} batch dims, as the TensorDict has", f"{show_sizes(size)}"
            raise ShapeError(message(op, expected, got, hint="None stands for any size, e.g. [None, 4]"))
        return Spec(size, {p: leaf_spec(x, len(own._size)) for p, x in own._leaves.items()}, own._nodes)
    leaves: dict[KeyPath, LeafSpec] = {}
    nodes: Nodes = {}
    wrong: dict[str, str] = {}
    if not isinstance(td, Mapping):
        hint = "{'x': ((4,), torch.float32)}, or a TensorDict"
        raise DtypeError(message(op, "a TensorDict, a Spec or a schema", type(td).__name__, hint=hint))
    read_schema(op, td, (), leaves, nodes, wrong)
    hint = "{'x': ((4,), torch.float32)} for a leaf of 4 features, () for none"
    refuse_wrong(DtypeError, op, "entries (feature shape, dtype)", wrong, "others", hint)
    return Spec(() if batch_size is None else open_size(op, batch_size), leaves, nodes)


def open_size(op: OpName, size: Any) -> Size:
    """A batch size as a tuple, in which None stands for any size."""
    sizes = (size,) if isinstance(size, int) else size
    if not isinstance(sizes, (list, tuple)) or not all([n is None or is_size(n) for n in sizes]):
        raise ShapeError(message(op, "a batch size", f"{size!r}", hint="e.g. [3, 4], or [None, 4] for any first size"))
    return tuple(sizes)


def is_size(n: Any) -> bool:
    """True if an entry is a size, an int that is not negative."""
    return isinstance(n, (int, torch.SymInt)) and not isinstance(n, bool) and n >= 0


def leaf_spec(leaf: Any, ndim: int) -> LeafSpec:
    """The spec of one leaf; padded sizes count as ragged."""
    if type(leaf) is Shared:
        return LeafSpec("Shared", leaf.value.dtype, tuple(leaf.value.shape), leaf.device)
    dims: tuple[int, ...] = leaf.ragged_dims if isinstance(leaf, (NestedTensor, MaskedBatch)) else ()
    shape = tuple([-1 if d in dims else n for d, n in enumerate(leaf.shape)])
    kind = "Tensor" if isinstance(leaf, Tensor) else type(unwrap(leaf)).__name__
    return LeafSpec(kind, leaf.dtype, shape[ndim:], leaf.device)


def read_schema(
    op: OpName, source: Mapping[Any, Any], prefix: KeyPath, leaves: dict[KeyPath, LeafSpec], nodes: Nodes,
    wrong: dict[str, str],
) -> None:  # fmt: skip
    """Entries of a schema; those that are no pair of shape and dtype go to `wrong`."""
    if prefix != ():
        put_node(leaves, nodes, prefix)
    for key, value in source.items():
        path = join(prefix, as_path(key, op))
        if isinstance(value, Mapping):
            read_schema(op, value, path, leaves, nodes, wrong)
        elif isinstance(value, Static):
            put_node(leaves, nodes, path, value)
        elif (leaf := leaf_of(value)) is not None:
            put_leaf(leaves, nodes, path, leaf)
        else:
            wrong[show(path)] = f"{value!r}" if isinstance(value, (tuple, list, torch.dtype)) else type(value).__name__


def leaf_of(value: Any) -> LeafSpec | None:
    """The leaf that a feature shape and a dtype stand for; None for any other value."""
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not isinstance(value[1], torch.dtype):
        return None
    sizes = (value[0],) if isinstance(value[0], int) else value[0]
    fits = isinstance(sizes, (tuple, list)) and all([isinstance(n, int) and n >= 0 for n in sizes])
    return LeafSpec("Tensor", value[1], tuple(sizes)) if fits else None


def zero_tensor(entry: LeafSpec, shape: tuple[int, ...], device: Any) -> Tensor:
    return torch.zeros(shape, dtype=entry.dtype, device=device)


def zero_nested(entry: LeafSpec, shape: tuple[int, ...], device: Any) -> NestedTensor:
    """A packed batch of examples of length 0."""
    dims = ragged_in(shape)
    n, e, count = shape[0], dims[0] - 1, len(dims)
    values = zero_tensor(entry, (*shape[1 : e + 1], 0, *shape[e + 1 + count :]), device)
    offsets = torch.zeros(n + 1, dtype=torch.int64, device=device)
    shapes = torch.zeros(n, count, dtype=torch.int64, device=device) if count > 1 else None
    return NestedTensor(values, offsets, ragged_dim=dims[0], shapes=shapes, max_length=(0,) * count)


def zero_masked(entry: LeafSpec, shape: tuple[int, ...], device: Any) -> MaskedBatch:
    """A padded batch of examples of length 0, without padding."""
    dims = ragged_in(shape)
    data = zero_tensor(entry, tuple([0 if d in dims else n for d, n in enumerate(shape)]), device)
    lengths = torch.zeros(shape[0], len(dims), dtype=torch.int64, device=device)
    return MaskedBatch(data, lengths, ragged_dims=dims)


def ragged_in(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dims of a leaf that are ragged."""
    return tuple([d for d, n in enumerate(shape) if n == -1])


def no_objects(entry: LeafSpec, shape: tuple[int, ...], device: Any) -> Leaf:
    """An ObjectArray of None."""
    return wrap_leaf(ObjectArray([None] * torch.Size(shape).numel(), shape))


def differences(td: TensorDict, form: Spec) -> list[str]:
    """The differences between a TensorDict and a spec, one line each."""
    wrong = []
    size, want = td.batch_size, form._batch_size
    if len(size) != len(want) or any([w is not None and n != w for n, w in zip(size, want, strict=True)]):
        wrong.append(f"batch_size: {show_sizes(size)} instead of {show_sizes(want)}")
    for path, entry in form._leaves.items():
        if path not in td._leaves:
            wrong.append(f"{show(path)}: {'no leaf' if path in td else 'missing'} instead of {entry.text()}")
            continue
        got = leaf_spec(td._leaves[path], len(td._size))
        if entry.device is None:
            got = got._replace(device=None)
        if got != entry:
            wrong.append(f"{show(path)}: {got.text()} instead of {entry.text()}")
    wrong += [f"{show(p)}: not in the spec" for p in td._leaves if p not in form._leaves]
    for path in [*form._nodes, *[p for p in td._nodes if p not in form._nodes]]:
        here, there = td._nodes.get(path), form._nodes.get(path)
        leaf = path in td._leaves or path in form._leaves
        if here != there and not leaf and not (here is None and any([within(p, path) for p in form._leaves])):
            wrong.append(f"{show(path) or 'the root'}: {node_text(here)} instead of {node_text(there)}")
    return wrong


def node_text(entry: Any) -> str:
    """An inner node or a Static value as messages show it."""
    if entry is None:
        return "nothing"
    if type(entry) is Static:
        return repr(entry)
    name = entry.cls.__name__ if type(entry) is Typed else "TensorDict"
    return f"{name} with {extra_of(entry)} more batch dims" if extra_of(entry) else name


def zero_shared(entry: LeafSpec, shape: tuple[int, ...], device: torch.device | None) -> Shared:
    value = torch.zeros(entry.shape, dtype=entry.dtype, device=device)
    return build_shared(value, (*shape[: len(shape) - len(entry.shape)], 0))


MAKERS = {
    "Tensor": zero_tensor, "NestedTensor": zero_nested, "MaskedBatch": zero_masked, "ObjectArray": no_objects,
    "Shared": zero_shared,
}  # fmt: skip
