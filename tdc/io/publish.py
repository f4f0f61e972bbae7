"""How a store appears at its path: whole, or not at all.

    .tdc-<digest of the name>-<random>     the new store, written beside its path and locked by its writer
    rename                                 to the path, where nothing is, or an empty folder
    exchange                               with the store that is there, in one step of the system; then that is removed

A writer that dies leaves its folder behind, unlocked; the next save to the same path removes it. A system without an
exchange (`renameat2` of Linux, `renameatx_np` of macOS) gets two renames. There a reader may find nothing for a moment,
and a writer that dies in between leaves the old store as `.tdc-<digest>.old-<random>`, which only a later save that
succeeds removes.

A single file is written in such a folder, too, and renamed out of it.

Invariants:
  - what is at the path is never changed, only replaced, and only a store is;
  - what fails before that leaves nothing behind; with `sync`, files are on disk before they can be seen.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tdc.core.errors import DtypeError, FormatError, UnsupportedError, describe, message, missing_folder
from tdc.io.filenames import MANIFEST
from tdc.io.manifest import START

if sys.platform != "win32":  # Windows has none, and `check_system` refuses it
    import fcntl

SWAP = 2  # RENAME_EXCHANGE of Linux, RENAME_SWAP of macOS
OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
NO_LINK = (errno.EPERM, errno.EOPNOTSUPP)  # of file systems that have one name for a file
NO_SWAP = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


@contextmanager
def staged(op: str, path: Any, overwrite: bool, sync: bool, file: str = "") -> Iterator[int]:
    """A descriptor of an empty folder that is at `path` once the block ends, or nowhere if the block fails.

    Args:
        file: not the folder appears at `path`, but this file in it.

    Raises:
        FormatError: something is at the path, and either it is no store (no file) or `overwrite` is False; the folder
            that it is in does not exist.
        OSError: what the system refuses.
    """
    check_system(op)
    head, name = os.path.split(path_text(op, path))
    if name in ("", ".", ".."):
        raise FormatError(message(op, "a path that ends in a name", repr(path), hint="tdc.io.save(td, 'folder/name')"))
    try:
        parent = os.open(head or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        raise missing_folder(op, head) from None
    temporary, folder = "", -1
    try:
        (check_no_file if file else check_free)(op, parent, name, overwrite)
        prefix = f".tdc-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"
        sweep(parent, f"{prefix}-")
        temporary, folder = fresh(parent, f"{prefix}-")
        yield folder
        if sync:
            os.fsync(folder)
        if file:
            publish_file(op, folder, file, parent, name, overwrite)
        else:
            publish(op, parent, temporary, name, overwrite, f"{prefix}.old-")
        if sync:
            os.fsync(parent)
        sweep(parent, f"{prefix}.old-")
    finally:
        if folder >= 0:
            os.close(folder)
            remove(parent, temporary)
        os.close(parent)


def check_system(op: str) -> None:
    """Refuse systems whose files or bytes are others."""
    if sys.platform == "win32" or sys.byteorder != "little":
        got = f"{sys.platform}, {sys.byteorder}-endian"
        raise UnsupportedError(message(op, "a little-endian POSIX system", got, hint="torch.save(td, file)"))


def path_text(op: str, path: Any) -> str:
    """A path as text, without slashes at its end: behind one, a link would be followed."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise DtypeError(message(op, "a path", describe(path), hint="a str or a pathlib.Path"))
    text = os.fsdecode(path)
    try:
        valid = 0 not in os.fsencode(text) and text != ""
    except UnicodeEncodeError:  # a half of a character
        valid = False
    if not valid:
        raise FormatError(message(op, "a path", f"{text[:200]!r}", hint="a str or a pathlib.Path that names a folder"))
    return text.rstrip("/") or "/"


def check_free(op: str, parent: int, name: str, overwrite: bool) -> None:
    """Refuse a path with anything but a store to overwrite or an empty folder."""
    try:
        folder = open_folder(name, parent)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise occupied(op, name, "a file or a link", "choose another path, or remove it yourself") from None
    try:
        if not os.listdir(folder):
            return
        if not is_store(folder):
            raise occupied(op, name, "a folder that is no store", "choose another path, or remove it yourself")
        if not overwrite:
            raise occupied(op, name, "a store", "overwrite=True, or choose another path")
    finally:
        os.close(folder)


def check_no_file(op: str, parent: int, name: str, overwrite: bool) -> None:
    """Refuse a path with anything but a file to overwrite."""
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise occupied(op, name, "a folder, a link or a device", "choose another path, or remove it yourself")
    if not overwrite:
        raise occupied(op, name, "a file", "overwrite=True, or choose another path")


def occupied(op: str, name: str, got: str, hint: str) -> FormatError:
    return FormatError(message(op, "a path where nothing is", f"{got} at {name!r}", hint=hint))


def is_store(folder: int) -> bool:
    """True if a folder has a manifest of this format, of whatever version, damaged behind its beginning or not."""
    try:
        file = os.open(MANIFEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    try:
        return os.read(file, len(START)) == START
    except OSError:
        return False
    finally:
        os.close(file)


def open_folder(name: str, parent: int | None = None) -> int:
    """A descriptor of a folder; a link is none."""
    return os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


def fresh(parent: int, prefix: str) -> tuple[str, int]:
    """A new folder, locked for as long as its descriptor is open."""
    while True:
        name = prefix + os.urandom(8).hex()
        os.mkdir(name, dir_fd=parent)
        try:
            folder = open_folder(name, parent)
        except FileNotFoundError:  # swept before it was locked
            continue
        if lock(folder) is not False and same_folder(folder, name, parent):
            return name, folder
        os.close(folder)


def lock(folder: int) -> bool | None:
    """Lock a folder; False where another process has, None where the file system has no locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def same_folder(folder: int, name: str, parent: int | None = None) -> bool:
    """True if a name still is that of an open folder."""
    try:
        return os.path.samestat(os.fstat(folder), os.stat(name, dir_fd=parent, follow_symlinks=False))
    except FileNotFoundError:
        return False


def sweep(parent: int, prefix: str) -> None:
    """Remove what writers that died have left."""
    for name in [n for n in os.listdir(parent) if n.startswith(prefix)]:
        try:
            folder = open_folder(name, parent)
        except OSError:
            continue
        if lock(folder):
            remove(parent, name)
        os.close(folder)


def remove(parent: int, name: str) -> None:
    """Remove a folder with all that is in it, if it is there."""
    shutil.rmtree(name, ignore_errors=True, dir_fd=parent)


def publish(op: str, parent: int, temporary: str, name: str, overwrite: bool, aside: str) -> None:
    """Give a folder its name; a store that had it gets the temporary one."""
    while True:
        try:
            os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
            return
        except OSError as error:
            if error.errno not in OCCUPIED:
                raise
        check_free(op, parent, name, overwrite)  # another writer may have come first
        try:
            if not exchange(parent, temporary, name):
                by_two_renames(parent, temporary, name, aside + os.urandom(8).hex())
            return
        except FileNotFoundError:  # removed in between
            continue


def publish_file(op: str, folder: int, file: str, parent: int, name: str, overwrite: bool) -> None:
    """Give a file its name, in place of a file that has it."""
    if overwrite:
        os.rename(file, name, src_dir_fd=folder, dst_dir_fd=parent)
        return
    try:
        os.link(file, name, src_dir_fd=folder, dst_dir_fd=parent)  # unlike a rename, it never replaces anything
    except OSError as error:
        check_no_file(op, parent, name, overwrite)
        if error.errno not in NO_LINK:
            raise
        os.rename(file, name, src_dir_fd=folder, dst_dir_fd=parent)


def exchange(parent: int, a: str, b: str) -> bool:
    """Swap two names of a folder in one step; False where the system cannot."""
    system = ctypes.CDLL(None, use_errno=True)
    swap: Any = getattr(system, "renameat2", None) or getattr(system, "renameatx_np", None)
    if swap is None:
        return False
    if swap(parent, os.fsencode(a), parent, os.fsencode(b), SWAP) == 0:
        return True
    code = ctypes.get_errno()
    if code in NO_SWAP:
        return False
    raise OSError(code, os.strerror(code), b)


def by_two_renames(parent: int, temporary: str, name: str, aside: str) -> None:
    """Exchange by two renames; puts the old store back if the second one fails."""
    os.rename(name, aside, src_dir_fd=parent, dst_dir_fd=parent)
    try:
        os.rename(temporary, name, src_dir_fd=parent, dst_dir_fd=parent)
    except OSError:
        os.rename(aside, name, src_dir_fd=parent, dst_dir_fd=parent)
        raise
