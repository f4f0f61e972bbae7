"""Pickles of TensorDicts whose leaves are those of a store: paths instead of bytes.

A leaf that is mapped from a store, whole or as a view (`td[a:b]`, an inner node, other strides), goes into the pickle
as the path of the store, its key, its range and the version of the store, and is mapped again where it is unpickled.
All other leaves go as they are, those of dtypes that torch cannot unpickle as integers of their size. So a worker
process gets a few hundred bytes, whatever the size of its part.

    pickle, multiprocessing, cloudpickle    protocols from 4 on: by path
    torch.save, and protocols below 4       the data: a file that is kept must not depend on another
    copy.deepcopy                           the data, in memory of its own

A leaf of mode "r" that this process has written to, or whose store was replaced since, goes as data, too: its file
holds something else. One of mode "r+" is its file, and always goes by path.

Invariant: what is unpickled has the content that was pickled, or there is a FormatError.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.core.dynamo import storage_id
from tdc.core.errors import FormatError, message
from tdc.io.filenames import Keys, Part
from tdc.io.files import Origin, Source, bytes_of, host, is_written, origin_of, read_manifest
from tdc.io.leaves import MAKERS, NAMES, Faulty, taken_apart
from tdc.io.load import OP, map_all, open_store
from tdc.io.manifest import parse, stored
from tdc.layout.structure import Structure
from tdc.ragged.storage import BATCHES
from tdc.tensordict.methods import register
from tdc.tensordict.nodes import Nodes
from tdc.tensordict.storage import is_tensordict
from tdc.tensordict.tensordict import TensorDict, build_td

LEAST_PROTOCOL = 4  # torch.save has 2
ALONE = "result"
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
LOADED = {  # what torch 2.13 can unpickle; of others it writes a storage that it cannot read
    *INTEGERS.values(), torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex64, torch.complex128,
}  # fmt: skip


class View(NamedTuple):
    """A tensor of a store, or a view of one."""

    source: Source
    keys: Keys
    part: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Raw(NamedTuple):
    """A tensor as bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    data: bytes

    def tensor(self) -> Tensor:
        if not self.data:
            return torch.empty(self.shape, dtype=self.dtype, device="cpu")
        return torch.frombuffer(bytearray(self.data), dtype=torch.uint8).view(self.dtype).view(self.shape)


class Cast(NamedTuple):
    """A tensor of another dtype of the same size, which is the same memory."""

    x: Tensor
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        return self.x.view(self.dtype)


class Apart(NamedTuple):
    """A ragged leaf, each of its tensors by itself."""

    kind: str
    data: dict[str, Any]
    parts: dict[str, Any]


class Sender:
    """Makes of leaves what a pickle holds of them.

    Args:
        compact: of a tensor that goes as data only the bytes that it shows, not all of the storage behind it; and not
            through shared memory, of which a process can have so many open at once.
    """

    def __init__(self, compact: bool = False) -> None:
        self.compact = compact
        self.there: dict[Source, bool] = {}
        self.known: dict[int, tuple[Tensor, Any]] = {}  # a tensor that is there twice is one again
        self.origins: dict[int, Origin | None] = {}  # of storages, of which all tensors may have one
        self.mapped = self.cast = False

    def leaf(self, x: Any) -> Any:
        """A leaf, or what stands for it."""
        if isinstance(x, Tensor):
            return self.tensor(x)
        if isinstance(x, BATCHES):
            try:
                kind, data, parts = taken_apart(x)
            except Faulty:
                return x.clone() if self.compact else x
            return Apart(kind, data, {name: self.tensor(part) for name, part in parts.items()})
        return x

    def tensor(self, x: Tensor) -> Any:
        """A tensor, or the place that it is mapped from."""
        if id(x) not in self.known:
            found = self.origin(x)
            self.mapped |= found is not None
            self.known[id(x)] = x, (self.own(x) if found is None else self.view(x, found) or self.own(copy_of(x)))
        return self.known[id(x)][1]

    def origin(self, x: Tensor) -> Origin | None:
        """`origin_of`, asked once for each storage."""
        if type(x) is not Tensor:
            return None
        try:
            key = storage_id(x)
        except (RuntimeError, NotImplementedError):  # of a transform, or of sparse tensors
            return None
        if key not in self.origins:
            self.origins[key] = origin_of(x)
        return self.origins[key]

    def view(self, x: Tensor, origin: Origin) -> View | None:
        """The place in a store that a tensor is, if it holds what its file holds."""
        if x.requires_grad or x.is_conj() or x.is_neg():
            return None
        source, keys, part = origin
        if not source.shared:
            if source not in self.there:
                self.there[source] = source.is_there()
            if not self.there[source] or is_written(x):
                return None
        return View(source, keys, part, x.dtype, int(x.storage_offset()), tuple(x.shape), x.stride())

    def own(self, x: Tensor) -> Tensor | Raw | Cast:
        """A tensor that goes as data."""
        if x.dtype in LOADED and not self.compact:
            return x
        plain = type(x) is Tensor and x.layout == torch.strided and not x.is_nested and x.dtype in NAMES
        if self.compact and plain and x.device.type == "cpu" and not x.requires_grad:
            own = host(x)  # whose memory is read behind this line
            return Raw(x.dtype, tuple(x.shape), bytes(bytes_of(own)))
        if plain and x.dtype not in LOADED and not x.requires_grad and not x.is_conj():
            self.cast = True
            return Cast(x.view(INTEGERS[x.element_size()]), x.dtype)
        return x


def copy_of(x: Tensor) -> Tensor:
    """A tensor in memory of its own: queues of torch.multiprocessing take no memory map."""
    return x.detach().clone().requires_grad_(x.requires_grad)


def reduced(td: TensorDict, protocol: Any) -> Any:
    """Reduce a TensorDict for a pickle of some protocol."""
    return td.__reduce__() if protocol < LEAST_PROTOCOL else sent(td)


def sent(td: TensorDict, compact: bool = False) -> Any:
    """Reduce a TensorDict for a pickle, by path where that is possible."""
    sender = Sender(compact)
    leaves = {path: sender.leaf(leaf) for path, leaf in td._leaves.items()}
    if not (sender.mapped or sender.cast or compact):
        return td.__reduce__()
    return reopened, (leaves, td._nodes, td._size, td._device)


def reopened(leaves: dict[Any, Any], nodes: Nodes, size: Any, device: Any) -> TensorDict:
    """The TensorDict of a pickle, its leaves mapped again.

    Raises:
        FormatError: the path of a store has nothing, another version, or a damaged one.
    """
    parts = [part for x in leaves.values() for part in parts_of(x)]
    tensors = mapped_again(dict.fromkeys([part for part in parts if type(part) is View]))
    structures: dict[Any, Structure] = {}
    known: dict[int, Tensor] = {}

    def made(x: Any) -> Any:
        if type(x) is View:
            return tensors[x]
        if isinstance(x, (Raw, Cast)):
            if id(x) not in known:
                known[id(x)] = x.tensor()
            return known[id(x)]
        if type(x) is Apart:
            return MAKERS[x.kind](x.data, {name: made(part) for name, part in x.parts.items()}, structures)
        return x

    return build_td({path: made(x) for path, x in leaves.items()}, nodes, size, device)


def mapped_again(views: dict[View, Any]) -> dict[View, Tensor]:
    """The tensor of each view; those of one store from the store opened once."""
    found: dict[View, Tensor] = {}
    for source in dict.fromkeys([view.source for view in views]):
        own = [view for view in views if view.source == source]
        tensors = mapped_of(source, [(view.keys, view.part) for view in own])
        found |= {view: shown(tensors[view.keys, view.part], view) for view in own}
    return found


def mapped_of(source: Source, places: list[Part]) -> dict[Part, Tensor]:
    """Tensors of a store, if its path still has the version that was pickled."""
    folder = open_store(OP, source.path)
    try:
        data, version = read_manifest(OP, folder)
        if version != source.version:
            got, hint = f"another version at {source.path!r}", "pickle what tdc.io.load gives now; td.clone() for data"
            raise FormatError(message(OP, "the store that was pickled", got, hint=hint))
        table = parse(OP, data)
        return map_all(OP, folder, {at: stored(table, *at) for at in places}, source)
    finally:
        os.close(folder)


def shown(x: Tensor, view: View) -> Tensor:
    """The view of the tensor of a file."""
    if view.dtype == x.dtype and view.shape == x.shape and view.stride == x.stride() and not view.offset:
        return x
    out = torch.empty(0, dtype=view.dtype, device="cpu")
    return out.set_(x.untyped_storage(), view.offset, view.shape, view.stride)  # also where x is no multiple of dtype


class Alone:
    """A tensor or ragged batch within lists and dicts, on its way to another process: it arrives as itself. torch sends
    no memory of files, a TensorDict takes it along."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __reduce__(self) -> Any:
        return leaf_of, (TensorDict({ALONE: self.x}),)


def leaf_of(td: TensorDict) -> Any:
    """A tensor or ragged batch that was sent in a TensorDict of its own."""
    return td[ALONE]


class Parcel:
    """A result or a part of a TensorDict on its way to another process, by path where it can be.

    It is opened where it is asked for: a store that is gone is then an error of the work, not of the queue that brings
    it, which would end the worker. Of a view that goes as data only what it shows goes.
    """

    def __init__(self, x: Any) -> None:
        self.x = x

    def __reduce__(self) -> Any:
        whole = is_tensordict(self.x)
        return Sealed, (whole, *sent(self.x if whole else TensorDict({ALONE: self.x}), True))

    def open(self) -> Any:
        """Return what was sent."""
        return self.x


class Sealed:
    """A Parcel that was sent."""

    def __init__(self, whole: bool, make: Any, args: Any) -> None:
        self.whole, self.make, self.args = whole, make, args

    def open(self) -> Any:
        """Return what was sent, its leaves mapped again. Raises a FormatError as `reopened`."""
        td = self.make(*self.args)
        return td if self.whole else td[ALONE]


def source_of(td: TensorDict) -> Source | None:
    """The store that the first of the mapped tensors comes from; None where there is none."""
    for leaf in td._leaves.values():
        ragged = isinstance(leaf, BATCHES)
        for x in taken_apart(leaf)[2].values() if ragged else (leaf,):
            found = origin_of(x)
            if found is not None:
                return found.source
    return None


def is_open_store(td: TensorDict) -> bool:
    """True if other processes can write into the leaves: all are those of a store of mode "r+"."""
    sender = Sender()
    found = [part for leaf in td._leaves.values() for part in parts_of(sender.leaf(leaf))]
    return bool(found) and all([type(x) is View and x.source.shared for x in found])


def parts_of(x: Any) -> list[Any]:
    """The tensors, or what stands for them, that a leaf is made of."""
    return list(x.parts.values()) if type(x) is Apart else [x]


register("reduce", reduced)
