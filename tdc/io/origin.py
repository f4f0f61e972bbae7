"""Where a tensor that is mapped into memory comes from: a note on its storage, which all its views share.

Leaves of a store are plain tensors. What tells them from others are attributes of their storage, written when a file is
mapped and read when a TensorDict is pickled; they go when the last view goes, and no copy has them.

Invariant: an Origin that is found holds: the memory is that of the file, as the system mapped it.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.io.filenames import MANIFEST, Keys, Part

PAGES = "/proc/self/pagemap"  # of Linux: 8 bytes for each page of this process
PRESENT, SWAPPED, OF_FILE = 63, 62, 61  # bits of these
BLOCK = 1 << 20


class Version(NamedTuple):
    """What tells a store from every other one at its path: its manifest, and the file that holds it."""

    sha256: str
    inode: int
    time: int


class Source(NamedTuple):
    """A store that was opened."""

    path: str
    version: Version
    shared: bool

    def is_there(self) -> bool:
        """Whether its path still has this version."""
        try:
            found = os.stat(os.path.join(self.path, MANIFEST), follow_symlinks=False)
        except OSError:
            return False
        return (found.st_ino, found.st_mtime_ns) == self.version[1:]


class Origin(NamedTuple):
    """The file of a mapped tensor."""

    source: Source
    keys: Keys
    part: str


def mark(x: Tensor, source: Source, at: Part) -> None:
    """Note on the storage of a tensor which file it is.

    Attributes in place of one Origin: of thousands of these, the garbage collector would look at each.
    """
    if x.numel():
        storage: Any = x.untyped_storage()
        storage.tdc_source, storage.tdc_place, storage.tdc_address = source, at, storage.data_ptr()


def origin_of(x: Any) -> Origin | None:
    """The file that a tensor is mapped from, in whole or in part; None of a tensor of other memory."""
    if type(x) is not Tensor or x.layout != torch.strided or x.device.type != "cpu":
        return None
    try:
        storage: Any = x.untyped_storage()
        known = hasattr(storage, "tdc_source") and storage.tdc_address == storage.data_ptr()  # not exchanged since
        return Origin(storage.tdc_source, *storage.tdc_place) if known else None
    except (RuntimeError, NotImplementedError):  # of a transform
        return None


def is_written(x: Tensor) -> bool:
    """Whether this process has written to the memory of a tensor that is mapped with mode="r".

    The system then has copied the page. Where it cannot tell, the answer is True.
    """
    if not x.numel():
        return False
    size = (sum([(n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)]) + 1) * x.element_size()
    first, last = x.data_ptr() // mmap.PAGESIZE, -(-(x.data_ptr() + size) // mmap.PAGESIZE)
    try:
        with open(PAGES, "rb", buffering=0) as file:
            file.seek(first * 8)
            while first < last:
                data = bytearray(file.read(min((last - first) * 8, BLOCK)))
                pages = torch.frombuffer(data, dtype=torch.int64)
                if bool(((pages >> PRESENT | pages >> SWAPPED) & ~(pages >> OF_FILE) & 1).any()):
                    return True
                first += len(data) // 8
    except (OSError, ValueError):  # no such file, or nothing read
        return True
    return False
