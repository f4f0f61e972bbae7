"""How a TensorDict goes through the queues and pipes of `torch.multiprocessing`: as one storage, not as one per leaf.

torch sends the memory of a tensor as a file descriptor, some 0.3 ms for each. Here the tensors of a TensorDict are
taken out of its pickle, and go as a few numbers each beside the storages that they lie in:

    (pickle of the rest, storages, [(storage, dtype, offset, shape, strides, requires_grad, count), ...])

A count is of tensors of one form that lie one behind another.

Those in shared memory are sent as that memory, so that both processes see what either writes; after
`td.share_memory()` that is one storage. All others are copied into one new shared storage.

Invariants: the rest is pickled as `pickle` does it, so what a class says of its own pickle holds here, too; a tensor
that is more than its elements (of a subclass, on a device, with a graph) is sent as torch sends it.
"""

from __future__ import annotations

import io
import pickle
from collections import ChainMap
from collections.abc import Callable, MutableMapping, Sequence
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.multiprocessing import reductions  # which tells Python's pickler of processes about tensors

from tdc.core.dynamo import storage_id
from tdc.core.one_storage import Empty, copies, shared_buffer

Meta = tuple[int, torch.dtype, int, tuple[int, ...], tuple[int, ...], bool]
PLAIN: dict[type, Callable[[Any], Any]] = {}  # of the classes that `reduce` is for, what a pickle of their own would do
STARTING: MutableMapping[Any, list[Tensor]] = WeakKeyDictionary()  # copies for processes that are being started
untyped: Any = torch
reduce_storage: Callable[[Any], Any] = getattr(reductions, "reduce_storage")  # noqa: B009  # whose types are open


class Rest(ForkingPickler):
    """Pickles everything but plain tensors, which it collects."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.dispatch_table = ChainMap(PLAIN, self.dispatch_table)  # type: ignore[assignment]  # any mapping will do
        self.tensors: list[Tensor] = []
        self.known: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        """The number of a tensor; the same one each time that it is met."""
        if type(obj) is not Tensor:
            return None
        number = self.known.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)
        return number


class Whole(pickle.Unpickler):
    """Puts tensors back into a pickle."""

    def __init__(self, data: bytes, tensors: Sequence[Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self.tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self.tensors[pid]


class Handle:
    """A storage that was turned into what is sent of it."""

    def __init__(self, reduced: tuple[Any, ...]) -> None:
        self.reduced: tuple[Any, ...] = reduced

    def __reduce__(self) -> tuple[Any, ...]:
        return self.reduced


def reduce(td: Any) -> tuple[Any, ...]:
    """Reduce a TensorDict to the function and arguments that make it again."""
    file = io.BytesIO()
    rest = Rest(file)
    rest.dump(td)
    storages: list[Any] = []
    metas: list[Any] = []  # a `Meta` each, or the tensor itself
    copied: dict[int, Tensor] = {}
    numbers: dict[int, int] = {}  # of the storages that are sent, by their identity; -1 of those to be copied
    for x in rest.tensors:
        graph = x.requires_grad
        if not x.is_cpu or x.layout is not torch.strided or x.is_nested or (graph and not x.is_leaf):
            metas.append(x)  # which torch sends, or refuses
            continue
        if (key := storage_id(x)) not in numbers:
            handle = shared_handle(x) if x.is_shared() else None
            numbers[key] = len(storages) if handle is not None else -1
            storages += [] if handle is None else [handle]
        number, lazy = numbers[key], x.is_neg() or x.is_conj()  # which torch would forget
        if (number >= 0 and not lazy) or not x.numel():
            metas.append((number, x.dtype, x.storage_offset(), (*x.shape,), x.stride(), graph))
        elif 0 in x.stride() and not lazy:  # a copy of an expanded one would grow
            metas.append(x)
        else:
            copied[len(metas)] = x
            metas.append(None)
    if copied:
        own = copies([*copied.values()], shared_buffer)
        for (i, x), copy in zip(copied.items(), own, strict=True):
            metas[i] = len(storages), x.dtype, copy.storage_offset(), tuple(x.shape), copy.stride(), x.requires_grad
        storages.append(shared_handle(own[0]))
        if (child := get_spawning_popen()) is not None:  # which inherits descriptors that are open when it starts
            STARTING.setdefault(child, []).append(own[0])
    return rebuild, (file.getvalue(), storages, in_runs(metas))


def in_runs(metas: list[Meta | Tensor]) -> list[Any]:
    """Tensors of one form that lie one behind another as one entry, the last number of which counts them."""
    found: list[Any] = []
    before, end = None, -1
    for meta in metas:
        if isinstance(meta, Tensor):
            found.append(meta)
            end = -1
            continue
        number, dtype, at, shape, stride, graph = meta
        form = number, dtype, shape, stride, graph
        if at == end and form == before:
            found[-1][-1] += 1
        else:
            found.append([*meta, 1])
            before = form
        end = at + shape[0] * stride[0] if shape and shape[0] and number >= 0 else -1
    return found


def shared_handle(x: Tensor) -> Handle | None:
    """The handle of the shared storage of a tensor; None if it is a map of a file."""
    try:
        return Handle(reduce_storage(x.untyped_storage()))
    except OSError:
        return None


def rebuild(rest: bytes, storages: list[Any], runs: list[Any]) -> Any:
    """The TensorDict that was sent."""
    empty = Empty()
    tensors: list[Tensor] = []
    for run in runs:
        if isinstance(run, Tensor):
            tensors.append(run)
            continue
        number, dtype, at, shape, stride, graph, count = run
        if number < 0:
            made: Sequence[Tensor] = (untyped.empty_strided(shape, stride, dtype=dtype, device="cpu"),)
        else:
            made = empty.run(storages[number], dtype, at, shape, stride, count)
        tensors += [x.requires_grad_() for x in made] if graph else made
    return Whole(rest, tensors).load()


def send_as_one(cls: type) -> type:
    """Let instances of a class, a TensorDict, be sent as one storage."""
    PLAIN[cls] = lambda x: x.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    ForkingPickler.register(cls, reduce)
    return cls
