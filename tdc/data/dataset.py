"""Dataset: a TensorDict, or a store by its path, as a map-style dataset of torch.

A dataset that was made from a path is pickled as the path, and opened again where it arrives, when it is first asked
for examples: a worker process maps the files, nothing is copied, and a store that is gone is an error of a batch, which
a DataLoader hands on, not one of the start of a worker.

Invariant: a batch is one gather, whatever the number of its examples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import data as torch_data

from tdc.core.arguments import expect, keys_of
from tdc.core.errors import FormatError, ShapeError, describe, message, show_sizes
from tdc.core.typing import NestedKey
from tdc.io.by_path import source_of
from tdc.io.load import load
from tdc.io.save import PathLike
from tdc.ragged.storage import BATCHES
from tdc.tensordict.tensordict import TensorDict

OP = "data.Dataset"


class Dataset(torch_data.Dataset[TensorDict]):
    """A map-style dataset over the examples of a TensorDict or of a store.

    Give `collate_fn=tdc.data.collate` to the DataLoader: it leaves a batch that was fetched whole as it is.

    Args:
        source: a TensorDict with a batch dim, whose first dim counts examples; or the path of a store, which is opened
            for reading. Worker processes get the path, and open it themselves.
        keys: only these keys; of a store, only their files are opened.

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
        self._td: Any = self._opened() if self._path is not None else chosen(source, self._keys)
        check_examples(OP, self._td)

    def _opened(self) -> Any:
        return load(str(self._path), self._keys)

    @property
    def td(self) -> TensorDict:
        """All examples."""
        if self._state:
            self._td = self._opened_again()
        return self._td

    def __len__(self) -> int:
        return len(self.td)

    def __getitem__(self, index: int) -> TensorDict:
        """One example."""
        return self.td[index]

    def __getitems__(self, indices: Sequence[int]) -> TensorDict:
        """A batch of examples, which a DataLoader fetches at once."""
        td = self.td
        return td[torch.as_tensor(indices, dtype=torch.int64, device=index_device(td))]

    def __repr__(self) -> str:
        where = "" if self._path is None else f" of {self._path!r}"
        return f"Dataset({len(self)} examples{where})"

    def __getstate__(self) -> dict[str, Any]:
        if self._state:
            return self._state
        return {"td": self._td} if self._path is None else self._described(self._td)

    def _described(self, td: TensorDict) -> dict[str, Any]:
        """The state of a dataset of a path, where the store has these examples."""
        source = source_of(td)
        version = None if source is None else tuple(source.version)
        return {"path": self._path, "keys": self._keys, "size": tuple(td.batch_size), "version": version}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._path, self._keys, self._td = state.get("path"), state.get("keys"), state.get("td")
        self._state = {} if self._path is None else state

    def _opened_again(self) -> TensorDict:
        """The store that a pickle was made of."""
        td = self._opened()
        if self._described(td) != self._state:
            expected = f"the store that the dataset was made from, of batch size {show_sizes(self._state['size'])}"
            hint = "make the dataset again; save new data to another path"
            got = f"another one at {self._path!r}, of {show_sizes(td.batch_size)}"
            raise FormatError(message(OP, expected, got, hint=hint))
        self._state = {}
        return td


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
    """Where positions of examples are looked up at once: the one device of all leaves, or the host, which suits all."""
    devices = {x.device for x in td._leaves.values() if isinstance(x, (Tensor, *BATCHES))}
    return devices.pop() if len(devices) == 1 else torch.device("cpu")


def examples_of(op: str, source: Any) -> TensorDict:
    """The examples of a TensorDict, of a Dataset, or of a store by its path."""
    if isinstance(source, Dataset):
        return source.td
    td = load(source) if isinstance(source, (str, os.PathLike)) else source
    expect(op, td, TensorDict, of=", a tdc.data.Dataset or the path of a store")
    check_examples(op, td)
    return td
