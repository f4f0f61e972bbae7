"""Dataset: a TensorDict, a store by its path, or a growing data set by its path, as a map-style dataset of torch.

A dataset that was made from a path is pickled as the path, and opened again where it arrives, when it is first asked
for examples: a worker process maps the files, nothing is copied, and a store that is gone is an error of a batch, which
a DataLoader hands on, not one of the start of a worker.

Invariant: a batch is one gather from each part that it has examples of, whatever the number of its examples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils import data as torch_data

from tdc.core.arguments import expect, keys_of
from tdc.core.errors import FormatError, IndexingError, ShapeError, describe, message, show_sizes
from tdc.core.typing import NestedKey
from tdc.io.by_path import source_of
from tdc.io.load import load
from tdc.io.save import PathLike
from tdc.io.writer import shard_paths
from tdc.ragged.storage import BATCHES
from tdc.tensordict.tensordict import TensorDict

OP = "data.Dataset"


class Dataset(torch_data.Dataset[TensorDict]):
    """A map-style dataset over the examples of a TensorDict or of a store.

    Give `collate_fn=tdc.data.collate` to the DataLoader: it leaves a batch that was fetched whole as it is.

    Args:
        source: a TensorDict with a batch dim, whose first dim counts examples; or a path, which is opened for reading:
            that of a store, or that of a data set of `tdc.io.writer`, with the shards that are there now. Worker
            processes get the path, and open it themselves.
        keys: only these keys; on disk, only their files are opened.

    Raises:
        FormatError, OSError: as `tdc.io.load`; in a worker, for its first batch, also where the store was replaced.
        ShapeError: no batch dim.
        KeyPathError: keys that are not there.
        DtypeError: neither a TensorDict nor a path.

    Compile:
        Eager only.

    Example:
        >>> dataset = Dataset(TensorDict({"x": torch.arange(6), "label": torch.arange(6) % 2}, [6]), keys=["x"])
        >>> len(dataset), dataset[2]["x"], dataset.__getitems__([5, 0])["x"]
        (6, tensor(2), tensor([5, 0]))

    Source:
        `torch.utils.data.Dataset`.
    """

    def __init__(self, source: TensorDict | PathLike, keys: Iterable[NestedKey] | None = None) -> None:
        self._path = os.path.abspath(source) if isinstance(source, (str, os.PathLike)) else None
        self._keys = None if keys is None else keys_of(OP, keys)
        self._state: dict[str, Any] = {}  # of a pickle that was not opened yet
        self._parts = [chosen(source, self._keys)] if self._path is None else self._opened(None)
        for part in self._parts:
            check_examples(OP, part)

    def _opened(self, most: int | None) -> list[TensorDict]:
        """The stores of the path; of a data set that grows at most so many."""
        path = str(self._path)
        return [load(found, self._keys) for found in stores_of(path)[:most]]

    @property
    def parts(self) -> list[TensorDict]:
        """All examples as one TensorDict, or of a data set of `tdc.io.writer` as one for each shard."""
        if self._state:
            self._parts = self._opened_again()
        return self._parts

    @property
    def td(self) -> TensorDict:
        """All examples; those of several shards in memory of their own."""
        return joined(self.parts)

    def __len__(self) -> int:
        return sum([len(part) for part in self.parts])

    def __getitem__(self, index: Any) -> TensorDict:
        """One example, or several by a slice, numbers or a mask."""
        parts = self.parts
        if len(parts) == 1:
            return parts[0][index]
        if isinstance(index, int) or (isinstance(index, Tensor) and index.ndim == 0):
            return self.__getitems__([int(index)])[0]
        if isinstance(index, slice) or torch.as_tensor(index).dtype == torch.bool:
            index = torch.arange(len(self))[index]
        return self.__getitems__(index)

    def __getitems__(self, indices: Sequence[int] | Tensor) -> TensorDict:
        """A batch of examples, which a DataLoader fetches at once."""
        index = indices if isinstance(indices, Tensor) else torch.tensor(indices, dtype=torch.int64, device="cpu")
        parts = self.parts
        return parts[0][index.to(index_device(parts[0]))] if len(parts) == 1 else gathered(parts, index)

    def __repr__(self) -> str:
        where = "" if self._path is None else f" of {self._path!r}"
        return f"Dataset({len(self)} examples{where})"

    def __getstate__(self) -> dict[str, Any]:
        if self._state:
            return self._state
        return {"parts": self._parts} if self._path is None else self._described(self._parts)

    def _described(self, parts: list[TensorDict]) -> dict[str, Any]:
        """The state of a dataset of a path, where these examples are there."""
        sources = [source_of(part) for part in parts]
        versions = [None if source is None else tuple(source.version) for source in sources]
        return {"path": self._path, "keys": self._keys, "sizes": sizes_of(parts), "versions": versions}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._path, self._keys, self._parts = state.get("path"), state.get("keys"), state.get("parts", [])
        self._state = {} if self._path is None else state

    def _opened_again(self) -> list[TensorDict]:
        """The shards that a pickle was made of, or an error where they are others now."""
        parts = self._opened(len(self._state["sizes"]))
        if self._described(parts) != self._state:
            expected = f"the store that the dataset was made from, of batch size {show_all(self._state['sizes'])}"
            got = f"another one at {self._path!r}, of {show_all(sizes_of(parts))}"
            hint = "make the dataset again; save new data to another path"
            raise FormatError(message(OP, expected, got, hint=hint))
        self._state = {}
        return parts


def stores_of(path: str) -> list[str]:
    """The shards of a data set that grows, or the path itself, which `load` looks at."""
    try:
        return shard_paths(path) or [path]
    except OSError:
        return [path]


def sizes_of(parts: list[TensorDict]) -> list[tuple[int, ...]]:
    return [tuple(part.batch_size) for part in parts]


def show_all(sizes: list[tuple[int, ...]]) -> str:
    return ", ".join([show_sizes(size) for size in sizes])


def gathered(parts: list[TensorDict], index: Tensor) -> TensorDict:
    """Examples of several parts by their numbers, in the order of these."""
    ends = torch.tensor(list(accumulate([len(part) for part in parts])), device=index.device)
    count = int(ends[-1])
    wrong = (index < -count) | (index >= count)
    if bool(wrong.any()):
        got = f"{int(index[wrong][0])}"
        raise IndexingError(message(OP, f"numbers of examples from -{count} to {count - 1}", got, hint="len(dataset)"))
    index = torch.where(index < 0, index + count, index)
    at = torch.bucketize(index, ends, right=True)
    order = at.argsort(stable=True)
    found: list[TensorDict] = []
    first = 0
    for number, n in enumerate(at.bincount(minlength=len(parts)).tolist()):
        if n or (not found and number == len(parts) - 1):
            local = index[order[first : first + n]] - (ends[number] - len(parts[number]))
            found.append(parts[number][local])
        first += n
    return found[0] if len(found) == 1 else joined(found)[order.argsort()]


def chosen(td: Any, keys: list[NestedKey] | None) -> TensorDict:
    """A TensorDict with these keys alone."""
    expect(OP, td, TensorDict, of=" or the path of a store")
    return td if keys is None else td.select(*keys)


def check_examples(op: str, td: Any) -> None:
    """Refuse what has no first batch dim that counts examples."""
    expect(op, td, TensorDict)
    if not td._size:
        hint = "td.with_batch_size([n]), or TensorDict({...}, batch_size=[n])"
        raise ShapeError(message(op, "a TensorDict with a batch dim", describe(td), hint=hint))


def index_device(td: TensorDict) -> torch.device:
    """Device on which positions of examples are looked up: the one of all leaves, or the host, which suits all."""
    devices = {x.device for x in td._leaves.values() if isinstance(x, (Tensor, *BATCHES))}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def dataset_of(op: str, source: Any) -> Dataset:
    """A Dataset, or that of a TensorDict or a path."""
    if isinstance(source, Dataset):
        return source
    if not isinstance(source, (str, os.PathLike)):
        expect(op, source, TensorDict, of=", a tdc.data.Dataset or the path of a store")
        check_examples(op, source)
    return Dataset(source)


def joined(parts: Any) -> Any:
    """One TensorDict of the rows of several, itself where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
