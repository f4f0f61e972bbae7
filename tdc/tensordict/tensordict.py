"""TensorDict: an immutable dictionary of tensors that share their leading (batch) dims.

Storage is flat: one dict from key path to leaf, and one small dict of inner nodes. An operation is one comprehension
over leaves; there is no recursion, and reading a key is one lookup. An inner node may have more batch dims than the
root; it stores how many *extra* ones, relative to the root, so that indexing and vmap of the root keep it right.

    TensorDict({"a": x, "b": {"c": y}}, batch_size=[3])
        leaves   {"a": x, ("b", "c"): y}
        nodes    {"b": 0}

Invariants:
  - never changes; a "write" returns a new TensorDict that shares all other leaves;
  - every leaf's shape begins with the batch size of the root, and of each node it lies in;
  - keys keep insertion order; the pytree context is sorted and holds feature ranks, never sizes, so that equal keys
    give equal treedefs and the batch size is read back from the leaves;
  - a path is a leaf, an inner node, or absent; never two of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch
from torch import Tensor

from tdc.core.arguments import as_device, as_own_device, check_entries, expect_devices, expect_function, refuse_to
from tdc.core.container import error_of
from tdc.core.dtypes import in_numpy
from tdc.core.dynamo import traced_for
from tdc.core.errors import (
    DtypeError,
    ImmutableError,
    IndexingError,
    UnsupportedError,
    describe,
    message,
    refuse_wrong,
)
from tdc.core.keys import is_key, show
from tdc.core.pytree import MappingKey, register
from tdc.core.typing import MISSING
from tdc.tensordict.apply import applied
from tdc.tensordict.builder import Builder
from tdc.tensordict.display import node_html, node_text
from tdc.tensordict.indexing import (
    at,
    indexed,
    is_vector,
    misfit,
    normal_index,
    refuse_beyond,
    refused,
    selected,
    uses_dims,
)
from tdc.tensordict.leaf import PROTOCOLS, unwrap, wrap_leaf
from tdc.tensordict.mapping import IsLeaf, Keyed
from tdc.tensordict.methods import Methods
from tdc.tensordict.nodes import Nodes, extra_of, with_extra
from tdc.tensordict.paths import ordered
from tdc.tensordict.sending import send_as_one
from tdc.tensordict.shared import Shared, build_shared, check_shared, seated
from tdc.tensordict.storage import Leaves, absorb, as_size, check_leaves, common, mark_examples, shape_of

if TYPE_CHECKING:
    from tdc.tensordict.operations import TensorDictOperations as Operations
else:
    Operations = Keyed  # the rule table attaches these


class Unsized(tuple):  # type: ignore[type-arg]  # Dynamo cannot trace a subclass of a generic alias
    """In place of a batch size where leaves are no tensors (vmap's `in_dims`, specs): the pytree context."""

    def __repr__(self) -> str:
        return "unknown"


def found_nowhere(x: TensorDict, name: str) -> Any:
    """Raise what Python raises for a name that is not there, or the descriptor of that name."""
    return object.__getattribute__(x, name)


@traced_for(found_nowhere)
def raised_in_a_graph(x: TensorDict, name: str) -> NoReturn:
    raise AttributeError(f"'TensorDict' object has no attribute {name!r}")


class TensorDict(Methods, Operations):
    """An immutable dictionary of tensors that share their leading dims.

    Shapes:
        every leaf `(*batch_size, *features)`; features differ freely from leaf to leaf.

    Dtypes:
        any, not converted. numpy arrays, numbers and lists become tensors, mappings become inner nodes.

    Args:
        source: mapping of NestedKeys to leaves, mappings or TensorDicts.
        batch_size: the shared leading sizes; always explicit.
        device: where given, every leaf is moved there.
        entries: more keys, as keyword arguments: `TensorDict(a=x, batch_size=[3])`; no flags, str or None.

    Raises:
        ShapeError: leaves that do not begin with the batch size; every one is named.
        KeyPathError: a key that is no NestedKey; a keyword that is a setting, or sizes and nearly `batch_size`.
        DtypeError: a value that is no tensor and cannot become one; a device that torch does not know.
        UnsupportedError: a device that this machine lacks.

    Compile:
        Costs nothing over a plain dict in a compiled call. Reading one key does not look at the others.

    Example:
        >>> td = TensorDict({"x": torch.zeros(3, 4), "meta": {"id": torch.arange(3)}}, batch_size=[3])
        >>> td["meta", "id"], td[0]["x"].shape
        (tensor([0, 1, 2]), torch.Size([4]))

    Source:
        RFC torch.dict.TensorDict.
    """

    __slots__ = ("__weakref__", "_device", "_leaves", "_nodes", "_size")
    _kind = "tensordict"
    _settings: ClassVar = {
        "batch_size": "td = td.with_batch_size(sizes)",
        "shape": "td = td.with_batch_size(sizes)",
        "device": "td = td.with_device(device)",
    }
    _instead = "td = td.set(key, value), which returns a new one"
    _rank = 3

    def __init__(
        self, source: Mapping[Any, Any] | TensorDict | None = None, batch_size: Any = (), *, device: Any = None,
        **entries: Any,
    ) -> None:  # fmt: skip
        size = as_size(batch_size)
        target = as_own_device("TensorDict", device)
        leaves: Leaves = {}
        nodes: Nodes = {}
        if source is not None:
            absorb(leaves, nodes, (), source, size, target)
        if entries:
            check_entries(entries)
            absorb(leaves, nodes, (), entries, size, target)
        check_leaves("TensorDict", leaves, nodes, size)
        if size:
            mark_examples(leaves)
        self._leaves, self._nodes, self._size, self._device = leaves, nodes, size, target

    # -- metadata

    @property
    def batch_size(self) -> torch.Size:
        """The sizes that all leaves begin with."""
        return self._size

    @property
    def device(self) -> torch.device | None:
        """The device of all leaves, where one was asked for; None where leaves may be on any."""
        return self._device

    @property
    def shape(self) -> torch.Size:
        """The batch size."""
        return self._size

    @property
    def ndim(self) -> int:
        """Number of batch dims."""
        return len(self._size)

    batch_dims = ndim

    def numel(self) -> int:
        """Number of examples: the product of the batch size."""
        return math.prod(self._size)  # `torch.Size.numel` would make a constant of it in a graph

    def __len__(self) -> int:
        if not len(self._size):
            hint = "len(td.keys()) counts keys"
            raise DtypeError(message("len", "at least one batch dim", "batch_size=[]", hint=hint))
        return self._size[0]

    if not TYPE_CHECKING:  # to a type checker a name that is not there stays an error

        def __getattr__(self, name: str) -> Any:
            """A key is no attribute. Asked, too, where a descriptor of that name has raised an AttributeError."""
            key = name[0] != "_" and (name in self._leaves or name in self._nodes)
            if key and not any(name in vars(c) for c in type(self).__mro__):
                raise error_of(message(name, "a name of TensorDict", f"td.{name}", hint=f"td[{name!r}]"))
            return found_nowhere(self, name)

    def __iter__(self) -> Iterator[TensorDict]:
        if not len(self._size):  # trainers that look for a batch size go through the rows of a batch, and through a row
            hint = "td.items() for keys and leaves; in Lightning self.log(..., batch_size=len(batch))"
            raise DtypeError(message("iter", "at least one batch dim", "batch_size=[]", hint=hint))
        return iter([self[i] for i in range(len(self))])

    def __repr__(self) -> str:
        return node_text(self._leaves, self._nodes, self._size, self._device)

    def _repr_html_(self) -> str:
        return node_html(self._leaves, self._nodes, self._size)

    # -- reading

    def __getitem__(self, key: Any) -> Any:
        return self.get(key) if is_key(key) else index(self, key)

    def __getitems__(self, indices: list[int]) -> TensorDict:
        """`td[indices]`: what a `torch.utils.data.DataLoader` calls to fetch a batch at once."""
        return index(self, indices)

    def apply(
        self, fn: Callable[..., Any], *others: TensorDict, batch_size: Any = None, device: Any = None,
        is_leaf: IsLeaf = None, default: Any = MISSING,
    ) -> TensorDict:  # fmt: skip
        """`fn` on every leaf, with the leaves of `others` at the same paths. A key whose result is None is dropped.

        Args:
            fn: takes one leaf for each TensorDict and returns a leaf or None.
            others: TensorDicts with the same keys.
            batch_size, device: those of the result, where `fn` changes them.
            is_leaf: takes the class of an inner node and says whether `fn` takes the node itself, as in `keys`.
            default: what `fn` takes where another TensorDict lacks a key; then others may have any keys.

        Raises:
            StructureError: others with different keys.
            KeyPathError: others without a key, where `is_leaf` is given and no default.
            ShapeError: results that do not begin with the batch size.

        Example:
            >>> td = TensorDict({"a": torch.ones(2)}, [2])
            >>> td.apply(lambda x, y: x + y, td)["a"], td.apply(torch.sum, batch_size=[])["a"]
            (tensor([2., 2.]), tensor(2.))
        """
        return build_td(*applied(self, fn, others, batch_size, device, is_leaf, default, False))

    def apply_with_path(
        self, fn: Callable[..., Any], *others: TensorDict, batch_size: Any = None, device: Any = None,
        is_leaf: IsLeaf = None, default: Any = MISSING,
    ) -> TensorDict:  # fmt: skip
        """`apply` of a function that takes the key first: a str at the top, a tuple of str below.

        Example:
            >>> td = TensorDict({"a": torch.ones(2), "b": {"c": torch.ones(2)}}, [2])
            >>> td.apply_with_path(lambda key, x: x * len(key))["b", "c"]
            tensor([2., 2.])
        """
        return build_td(*applied(self, fn, others, batch_size, device, is_leaf, default, True))

    def to(self, *args: Any, where: Callable[[Any], bool] | None = None, **kwargs: Any) -> TensorDict:
        """`Tensor.to` for every leaf; a TensorDict or tensor as argument gives its device.

        Args:
            where: only leaves for which it is True; the others stay as they are.

        Example:
            >>> td = TensorDict({"x": torch.ones(2), "step": torch.tensor(1)})
            >>> half = td.to(torch.float16, where=torch.is_floating_point)
            >>> half["x"].dtype, half["step"].dtype
            (torch.float16, torch.int64)
        """
        if where is not None:
            expect_function("to", where)
        args = tuple([a.device if isinstance(a, TensorDict) else a for a in args])
        given = [a.device if isinstance(a, Tensor) else a for a in (*args, kwargs.get("device"), kwargs.get("other"))]
        devices = [a for a in given if isinstance(a, (str, torch.device)) or type(a) is int]
        chosen = self._leaves if where is None else {p: v for p, v in self._leaves.items() if where(unwrap(v))}
        expect_devices(*given)
        try:
            leaves = {p: v.to(*args, **kwargs) if p in chosen else v for p, v in self._leaves.items()}
        except (AssertionError, RuntimeError, TypeError):
            refuse_to(*args, **kwargs)
            raise
        if self._size:
            mark_examples(leaves)
        all_moved = len(chosen) == len(leaves)
        device = self._device if not devices else as_device("to", devices[0]) if all_moved else None
        return build_td(leaves, self._nodes, self._size, device)

    def _with(self, leaves: Leaves, nodes: Nodes, size: Any = None) -> TensorDict:
        return build_td(leaves, nodes, self._size if size is None else size, self._device)

    def empty(self) -> TensorDict:
        """Without keys: batch size and device stay."""
        return build_td({}, {}, self._size, self._device)

    def with_batch_size(self, batch_size: Any) -> TensorDict:
        """The same leaves with another batch size, which every one of them begins with.

        Raises:
            ShapeError: a leaf does not; every one is named.

        Example:
            >>> TensorDict({"x": torch.zeros(3, 4)}, [3]).with_batch_size([3, 4]).batch_size
            torch.Size([3, 4])
        """
        size = as_size(batch_size)
        lost = len(self._size) - len(size)  # a node with batch dims of its own keeps all of them
        nodes = {p: with_extra(n, max(extra_of(n) + lost, 0) if extra_of(n) else 0) for p, n in self._nodes.items()}
        leaves = seated(self._leaves, nodes, size)
        check_leaves("with_batch_size", leaves, nodes, size)
        return build_td(leaves, nodes, size, self._device)

    def with_device(self, device: Any) -> TensorDict:
        """With leaves on `device` from here on; None lets them stay anywhere."""
        if device is None:
            return build_td(self._leaves, self._nodes, self._size)
        return self.to(as_device("with_device", device))

    def mutate(self) -> Builder:
        """A builder, for a loop that sets many keys: `m[key] = value`, `del m[key]`, then `m.finish()`."""
        return Builder(self)

    @property
    def grad(self) -> TensorDict:
        """Gradients of the leaves that have one."""
        return self.apply(grad_of)

    @property
    def requires_grad(self) -> bool:
        """True if some leaf requires grad."""
        return any([getattr(leaf, "requires_grad", False) for leaf in self._leaves.values()])

    def to_numpy(self) -> dict[str, Any]:
        """Nested plain dicts of numpy arrays, without a copy where torch needs none; other leaves as they are.

        Raises:
            UnsupportedError: dtypes that numpy does not have, such as bfloat16; all are named.
        """
        leaves = {p: unwrap(x) for p, x in self._leaves.items()}
        tensors = {p: x for p, x in leaves.items() if isinstance(x, Tensor)}
        wrong = {show(p): describe(x) for p, x in tensors.items() if not in_numpy(x.dtype)}
        hint = "td.float(), or td.to(dtype, where=...) of some leaves"
        refuse_wrong(UnsupportedError, "to_numpy", "leaves of dtypes that numpy has", wrong, "others", hint)
        found = {p: x.detach().cpu().numpy() if isinstance(x, Tensor) else x for p, x in leaves.items()}
        return build_td(found, self._nodes, Unsized(), None).to_dict()

    def __setitem__(self, key: Any, value: Any) -> None:
        hint = "td = td.at[index].set(value) for a new one, tdc.copy_(td, value, index) to write into a memory map"
        hint = f"td = td.set({key!r}, value)" if is_key(key) else hint
        expected = "no assignment, TensorDicts are immutable"
        raise ImmutableError(message("TensorDict", expected, "td[...] = value", hint=hint))

    def __delitem__(self, key: Any) -> None:
        got, spelling = f"del td[{key!r}]", f"td = td.delete({key!r})"
        raise ImmutableError(message("TensorDict", "no deletion, TensorDicts are immutable", got, hint=spelling))


def build_td(leaves: Leaves, nodes: Nodes, batch_size: Any, device: torch.device | None = None) -> TensorDict:
    """A TensorDict of checked parts, which it owns from here on: what operations return.

    Where the root is a tensorclass, the result is an instance of it.
    """
    root: Any = nodes[()] if nodes and () in nodes else None
    td: Any = object.__new__(TensorDict if root is None else root.cls)
    td._leaves, td._nodes, td._size, td._device = leaves, nodes, batch_size, device
    return td


def grad_of(leaf: Any) -> Any:
    """The gradient of a leaf; None where it has none."""
    return getattr(leaf, "grad", None)


def index(td: TensorDict, idx: Any) -> TensorDict:
    """`td[idx]` on the batch dims, with every index torch has.

    The new batch size is that of one indexed leaf: its shape before the feature dims.
    """
    size = td._size
    k = len(size)
    if k == 0 and uses_dims(idx):
        hint = "index a leaf, td['key'][i], or give the TensorDict a batch size"
        raise IndexingError(message("index", "at least one batch dim", "batch_size=[]", hint=hint))
    vector = is_vector(idx)
    given, idx = idx, idx if vector else normal_index(td, idx)
    refuse_beyond(idx, size)
    try:
        leaves = selected(td._leaves, idx) if vector else indexed(td._leaves, idx)
        new = None if leaves else at(torch.empty(()).expand(size), idx).shape
    except (IndexError, TypeError, ValueError) as error:
        raise misfit(given, size, error) from None
    except (RuntimeError, NotImplementedError) as error:
        raise refused(td._leaves, idx, error) from error
    if vector and k == 1:
        return build_td(leaves, td._nodes, idx.shape, td._device)
    for path, leaf in leaves.items():
        new = leaf.shape[: leaf.ndim - td._leaves[path].ndim + k]
        break
    return build_td(leaves, td._nodes, new, td._device)


def index_size(td: TensorDict, idx: Any) -> torch.Size:
    """The batch size of `td[idx]`, without its leaves."""
    return index(build_td({}, {}, td._size), idx)._size


def flatten(td: Any) -> tuple[list[Any], Any]:
    """Leaves in sorted order, and the context: paths, feature ranks, nodes, device; sizes only without leaves.

    In place of a rank a Shared has a tuple: its dims, and the sizes of batch dims that its node has beyond the root.
    """
    leaves: Leaves = td._leaves
    size: Any = td._size
    if type(td._size) is Unsized:
        return [unwrap(leaves[p]) for p in size[0]], tuple(size)
    paths, k = tuple(ordered(leaves)), len(size)
    found = [leaves[p] for p in paths]
    ranks: Any = tuple([x._mark(k) if type(x) is Shared else len(x.shape) - k for x in found])
    device = None if td._device is None else str(td._device)
    nodes = tuple([(p, td._nodes[p]) for p in ordered(td._nodes)])
    sized = any([isinstance(r, int) for r in ranks])
    children = [x if type(x) is Tensor else unwrap(x) for x in found]
    return children, (paths, ranks, nodes, device, None if sized else tuple(size))


def unflatten(children: Sequence[Any], context: Any) -> TensorDict:
    """A TensorDict of any children. The batch size is what all leaves share before their feature dims."""
    paths, ranks, nodes, device, empty = context
    leaves = dict(zip(paths, children, strict=True))
    size: Any = torch.Size(empty) if empty is not None else Unsized(context)
    shared: dict[Any, Any] = {}
    for i, (leaf, rank) in enumerate(zip(children, ranks, strict=True)):
        shape = leaf.shape if isinstance(leaf, Tensor) else shape_of(leaf)
        if shape is None and type(leaf) in PROTOCOLS:
            leaf = leaves[paths[i]] = wrap_leaf(leaf)
            shape = leaf.shape
        if shape is None:
            size = Unsized(context)
            break
        if not isinstance(rank, int):
            check_shared(leaf, rank[0])
            shared[paths[i]] = rank[1:]
            continue
        own = shape[: max(len(shape) - rank, 0)]
        if own != size:
            size = own if type(size) is Unsized else common(size, own)
    if type(size) is not Unsized:
        leaves |= {p: build_shared(leaves[p], (*size, *more, 0)) for p, more in shared.items()}
    return build_td(leaves, dict(nodes), size, None if device is None else torch.device(device))


def same(x: Any) -> Any:
    return x


def on_rows(fn: Callable[[Any], Any], td: TensorDict, on_shared: Callable[[Any], Any] = same) -> TensorDict:
    """A TensorDict with `fn` of each child of its pytree, and `on_shared` of the tensors that are Shared."""
    children, context = flatten(td)
    ranks = context[1]
    new = [on_shared(x) if isinstance(r, tuple) else fn(x) for x, r in zip(children, ranks, strict=True)]
    return unflatten(new, context)


register(TensorDict, flatten, unflatten, lambda context: context[0], entry=MappingKey)
send_as_one(TensorDict)
