"""The files of a store: a tensor to a file, a file to a tensor that is mapped into memory, and where that came from.

Everything is opened below a descriptor of the folder that it is in, never by a path, and no link is followed. So what
happens to the path of a store while it is open does not matter, and nothing outside of it is opened. A file is checked
before it is opened (a FIFO would block, opening a device may do something) and once more when it is open, and is mapped
only if it has exactly the size that the manifest says: torch would make a shorter one longer.

Attributes of its storage, which all views share, say which file a mapped tensor is. They are read when a TensorDict is
pickled, go when the last view goes, and no copy has them.

Invariants: a mapped tensor is a plain `torch.Tensor` that holds no descriptor; where an Origin is found, the memory is
that of the file, as the system mapped it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import mmap
import os
import stat
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tdc.io.filenames import MANIFEST, Keys, Part, encoded, file_name, not_a_store, shard_name
from tdc.io.manifest import DTYPES, MOST_BYTES, Stored
from tdc.io.publish import open_folder

PAGES = "/proc/self/pagemap"  # of Linux: 8 bytes for each page of this process
PRESENT, SWAPPED, OF_FILE = 63, 62, 61  # bits of these


class Version(NamedTuple):
    """Identity of a version of a store: its manifest, and the file that holds it."""

    sha256: str
    inode: int
    time: int


class Source(NamedTuple):
    """A store that was opened."""

    path: str
    version: Version
    shared: bool

    def is_there(self) -> bool:
        """True if its path still has this version."""
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
    """True if this process has written to the memory of a tensor that is mapped with mode="r".

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


DESCRIPTORS = "/proc/self/fd"  # of Linux: through it torch maps an open file and keeps no descriptor
HAS_DESCRIPTORS = os.path.isdir(DESCRIPTORS)
CHUNK, BLOCK = 1 << 30, 1 << 20


def flags(*names: str) -> int:
    """Flags of `os.open` by their names, which other systems do not have."""
    return sum([getattr(os, name, 0) for name in names])


NEW = flags("O_WRONLY", "O_CREAT", "O_EXCL", "O_NOFOLLOW", "O_CLOEXEC")
OLD = flags("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC")


class Damaged(Exception):
    """A fault of one file."""


class Folders:
    """Descriptors of the folders of a store on the way to one key path, opened as the way changes."""

    def __init__(self, root: int, make: bool = False, sync: bool = False) -> None:
        self.root, self.make, self.sync = root, make, sync
        self.way: list[tuple[str, int]] = []

    def __enter__(self) -> Folders:
        return self

    def __exit__(self, error: object, *rest: object) -> None:
        try:
            self.sync = self.sync and error is None
            self.leave(0)
        finally:
            self.sync = False
            self.leave(0)

    def at(self, keys: Keys) -> int:
        """The folder of a node."""
        common = 0
        while common < min(len(self.way), len(keys)) and self.way[common][0] == keys[common]:
            common += 1
        self.leave(common)
        for key in keys[common:]:
            above = self.way[-1][1] if self.way else self.root
            if self.make:
                with suppress(FileExistsError):  # the way led here before
                    os.mkdir(encoded(key), dir_fd=above)
            self.way.append((key, opened_folder(encoded(key), above)))
        return self.way[-1][1] if self.way else self.root

    def leave(self, depth: int) -> None:
        """Close what lies deeper."""
        while len(self.way) > depth:
            folder = self.way.pop()[1]
            try:
                if self.sync:
                    os.fsync(folder)
            finally:
                os.close(folder)


def opened_folder(name: str, parent: int) -> int:
    """A descriptor of a folder of a store; Damaged where there is none."""
    try:
        return open_folder(name, parent)
    except FileNotFoundError:
        raise Damaged("its folder is missing") from None
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise Damaged("a file or a link where a folder should be") from None
        raise


# -- writing


def write(
    folder: int, name: str, data: memoryview, sync: bool, advance: Callable[[int], None] = lambda written: None
) -> None:
    """Write a new file; `advance` gets the bytes of each write."""
    file = os.open(name, NEW, 0o666, dir_fd=folder)
    try:
        while data:
            written = os.write(file, data[:CHUNK])
            advance(written)
            data = data[written:]
        if sync:
            os.fsync(file)
    finally:
        os.close(file)


def write_all(folder: int, name: str, pieces: Iterable[bytes | memoryview], sync: bool) -> None:
    """Write a new file of many pieces, small ones together."""
    with os.fdopen(os.open(name, NEW, 0o666, dir_fd=folder), "wb", buffering=BLOCK) as file:
        for piece in pieces:
            file.write(piece)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def reserve(folder: int, name: str, nbytes: int, sync: bool) -> None:
    """Make a new file of zeros, with its room on the disk: through a map, a full disk would end the process."""
    file = os.open(name, NEW, 0o666, dir_fd=folder)
    try:
        try:
            os.posix_fallocate(file, 0, max(nbytes, 1))
        except (AttributeError, OSError) as error:  # macOS has none, nor have some file systems
            if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            while nbytes > (written := os.lseek(file, 0, os.SEEK_CUR)):
                os.write(file, bytes(min(nbytes - written, BLOCK)))
        os.ftruncate(file, nbytes)
        if sync:
            os.fsync(file)
    finally:
        os.close(file)


def host(x: Tensor) -> Tensor:
    """A tensor in the memory of the host, its elements one after another."""
    return x.detach().cpu().resolve_conj().resolve_neg().contiguous()


def bytes_of(x: Tensor) -> memoryview:
    """The memory of such a tensor, which has to outlive it."""
    if not x.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * (x.numel() * x.element_size())).from_address(x.data_ptr())).cast("B")


# -- reading


def read_manifest(op: str, folder: int) -> tuple[bytes, Version]:
    """The bytes of the manifest of a store, and what tells this version of it from others."""
    try:
        file, size = opened(folder, MANIFEST, False)
    except Damaged as fault:
        there = os.listdir(folder)
        hint = "tdc.io.save(td, path) writes one" if MANIFEST not in there else ""
        hint = "tdc.data.Dataset(path) of the shards of a Writer" if shard_name(0) in there else hint
        raise not_a_store(op, f"a folder with a {MANIFEST}", f"one where {fault}", hint=hint) from None
    try:
        if size > MOST_BYTES:
            raise not_a_store(op, f"a manifest of at most {MOST_BYTES} bytes", f"one of {size}")
        data, found = read_up_to(file, size + 1), os.fstat(file)
        return data, Version(hashlib.sha256(data).hexdigest(), found.st_ino, found.st_mtime_ns)
    finally:
        os.close(file)


def read_up_to(file: int, most: int, begin: int = 0) -> bytes:
    """The bytes of an open file from a position on, at most so many."""
    data = b""
    while len(data) < most and (block := os.pread(file, most - len(data), begin + len(data))):
        data += block
    return data


def opened(folder: int, name: str, writable: bool) -> tuple[int, int]:
    """A descriptor of a regular file, and its size; Damaged where there is none."""
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise Damaged("its file is a link, a folder, a pipe or a device")
        file = os.open(name, OLD | (os.O_RDWR if writable else os.O_RDONLY), dir_fd=folder)
    except FileNotFoundError:
        raise Damaged("its file is missing") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):  # it became one since
            raise Damaged("its file is a link, a folder, a pipe or a device") from None
        raise
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise Damaged("its file is a link, a folder, a pipe or a device")
    return file, found.st_size


def mapped(folder: int, key: str, part: str, x: Stored, shared: bool, verify: bool) -> Tensor:
    """The tensor of a file, mapped into memory.

    Args:
        shared: what is written there goes to the file; otherwise it stays in this process.
        verify: compare the checksum, which reads the whole file.

    Raises:
        Damaged: no regular file, another size, or another checksum.
    """
    (file, size), nbytes = opened(folder, file_name(key, part), shared), x.nbytes
    try:
        if size != nbytes:
            raise Damaged(f"its file has {size} bytes instead of {nbytes}")
        out = map_of(file, size, x, shared)
    finally:
        os.close(file)
    if verify and zlib.crc32(bytes_of(out)) != x.crc32:
        raise Damaged("its checksum is wrong, so its bytes changed since they were written")
    return out


def map_of(file: int, size: int, x: Stored, shared: bool) -> Tensor:
    """An open file of the right size as a tensor."""
    dtype = DTYPES[x.dtype]
    if not size:
        return torch.empty(x.shape, dtype=dtype, device="cpu")
    if HAS_DESCRIPTORS:
        count = size // dtype.itemsize
        try:
            out = torch.from_file(f"{DESCRIPTORS}/{file}", shared=shared, size=count, dtype=dtype, device="cpu")
        except RuntimeError as error:  # most often the limit of maps, vm.max_map_count
            raise OSError(errno.ENOMEM, f"cannot map a file into memory: {error}") from None
        return out if len(x.shape) == 1 else out.view(x.shape)
    buffer = mmap.mmap(file, size, access=mmap.ACCESS_WRITE if shared else mmap.ACCESS_COPY)  # keeps a descriptor
    return torch.frombuffer(buffer, dtype=dtype).view(x.shape)
