"""save: a TensorDict as a store, a folder that mirrors its key tree; memmap_empty: one of zeros, to be filled.

    0/weight.memmap  0/bias.memmap  meta.json

Everything that can be found wrong is found before the first byte is written; see `publish` for how a store appears.

Invariant: a leaf that is written is on the host one at a time, so that a model on a GPU needs no second copy there.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from tdc.core.arguments import expect
from tdc.core.errors import UnsupportedError, refuse_wrong
from tdc.core.keys import show
from tdc.core.progress import Progress, check_progress, shown
from tdc.interop.spec import Spec, spec_of, zeros
from tdc.io.filenames import MANIFEST, Part, check_names, file_name
from tdc.io.files import Folders, bytes_of, host, reserve, write
from tdc.io.leaves import described
from tdc.io.load import check_mode, load
from tdc.io.manifest import Node, Table, dump
from tdc.io.publish import path_text, staged
from tdc.tensordict.methods import register
from tdc.tensordict.nodes import Typed
from tdc.tensordict.tensordict import TensorDict

PathLike = str | os.PathLike[str]


def save(
    td: TensorDict, path: PathLike, *, overwrite: bool = False, sync: bool = True, checksums: bool = False,
    progress: Progress = False,
) -> None:  # fmt: skip
    """Write a TensorDict to a folder: a file of raw bytes for each tensor, and `meta.json`, which describes them.

    The folder appears whole or not at all, and replaces a store in one step; who reads the old one goes on reading it.
    Ragged leaves, `Static` and `ObjectArray` of JSON values, tensorclasses by name and tied tensors are kept. Of a
    tensor its view is written, not the storage behind it; whether it requires a gradient, and its device, are not kept.

    Args:
        path: of the folder; the one that it is in exists.
        overwrite: replace a store that is there; never anything else.
        sync: wait until everything is on the disk. Without it a store may be lost, or be incomplete, after a power cut.
        checksums: write a CRC-32 of each tensor, which `load(path, verify=True)` compares.
        progress: True for a bar, or a function of the bytes that are written and of all bytes.

    Raises:
        UnsupportedError: leaves and values that a file cannot hold; all are named.
        FormatError: something is at the path; keys whose files would have one name; more than a manifest can hold.
        OSError: the system refuses, e.g. a full disk. The path is then as it was.

    Compile:
        Eager only.

    Example:
        >>> import tempfile, torch
        >>> td = TensorDict({"x": torch.arange(3), "info": {"y": torch.zeros(3, 2)}}, [3])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(td, f"{folder}/store")
        ...     print(sorted(os.listdir(f"{folder}/store")), load(f"{folder}/store")["x"])
        ['info', 'meta.json', 'x.memmap'] tensor([0, 1, 2])

    Source:
        RFC torch.dict.TensorDict, "Serialization".
    """
    save_as("io.save", td, path, overwrite, sync, checksums, progress)


def save_as(
    op: str, td: Any, path: Any, overwrite: bool, sync: bool, checksums: bool, progress: Progress
) -> None:
    """`save`, as part of another operation."""
    expect(op, td, TensorDict, other=path)
    check_settings(op, path, overwrite, sync, checksums)
    check_progress(op, progress)
    table, tensors = described(op, td)
    check_files(op, table, tensors)
    manifest = dump(op, table)
    total = sum([x.numel() * x.element_size() for x in tensors.values()])
    with staged(op, path, overwrite, sync) as root, shown(progress, total, "save", unit="B") as advance:
        with Folders(root, make=True, sync=sync) as folders:
            for (keys, part), x in tensors.items():
                own = host(x)
                data = bytes_of(own)
                write(folders.at(keys[:-1]), file_name(keys[-1], part), data, sync, advance)
                if checksums:
                    entry: Any = table[keys]
                    entry.parts[part] = entry.parts[part]._replace(crc32=zlib.crc32(data))
        write_manifest(root, dump(op, table) if checksums else manifest, sync)


def write_manifest(root: int, data: bytes, sync: bool) -> None:
    """Write the manifest, with a time that no other version has: the clock of files may stand still for a while."""
    write(root, MANIFEST, memoryview(data), sync)
    now = time.time_ns()
    os.utime(MANIFEST, ns=(now, now), dir_fd=root)


def memmap_empty(
    spec: TensorDict | Spec | Mapping[Any, Any], path: PathLike, batch_size: Any = None, *, overwrite: bool = False,
    sync: bool = True,
) -> TensorDict:  # fmt: skip
    """A store of zeros of the form of a spec, open for writing: `tdc.copy_(store, step, index)` fills it.

    Its room on the disk is taken at once, so that a full disk is an error here and not later.

    Args:
        spec: a Spec, a TensorDict to take the form of, or a nested dict of `(feature shape, dtype)`.
        path, overwrite, sync: as of `save`.
        batch_size: in place of that of the spec; needed where that has None.

    Returns:
        The store, as `load(path, mode="r+")`.

    Raises:
        UnsupportedError: leaves that have no fixed size: ragged ones, objects; all are named.
        ShapeError: a batch size that the spec leaves open.
        FormatError, OSError: as `save`.

    Example:
        >>> import tempfile, torch
        >>> from tdc.ops.tensordict.copy import copy_
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     buffer = memmap_empty({"obs": ((2,), torch.float32)}, f"{folder}/buffer", [1000])
        ...     _ = copy_(buffer, {"obs": torch.ones(2, 2)}, index=slice(7, 9))
        ...     print(load(f"{folder}/buffer")["obs"][6:10, 0])
        tensor([0., 1., 1., 0.])
    """
    op = "io.memmap_empty"
    check_settings(op, path, overwrite, sync)
    form = spec_of(op, spec, batch_size)
    wrong = {show(p): entry.text() for p, entry in form.leaves.items() if entry.kind != "Tensor"}
    hint = "tdc.io.save(td, path) of data that is there; MaskedBatch(data, lengths) as two leaves"
    refuse_wrong(UnsupportedError, op, "tensors of a fixed size", wrong, "others", hint)
    td = zeros(form, device="meta")
    table, tensors = described(op, td, content=False)
    check_files(op, table, tensors)
    manifest = dump(op, table)
    with staged(op, path, overwrite, sync) as root:
        with Folders(root, make=True, sync=sync) as folders:
            for (keys, part), x in tensors.items():
                nbytes = x.numel() * x.element_size()
                reserve(folders.at(keys[:-1]), file_name(keys[-1], part), nbytes, sync)
        write_manifest(root, manifest, sync)
    return load(path, mode="r+", classes=classes_of(td))


def memmap(
    td: TensorDict, path: PathLike, mode: Literal["r", "r+"], overwrite: bool, sync: bool, progress: Progress
) -> TensorDict:
    """`td.memmap(path)`."""
    check_mode("memmap", mode)
    save_as("memmap", td, path, overwrite, sync, False, progress)
    return load(path, mode=mode, classes=classes_of(td))


def check_settings(op: str, path: Any, *settings: Any) -> None:
    """Refuse what is no path, and settings that are no bool: `overwrite="no"` would be true."""
    path_text(op, path)
    for setting in settings:
        expect(op, setting, bool, of=" for overwrite, sync and checksums")


def check_files(op: str, table: Table, tensors: Iterable[Part]) -> None:
    """Refuse keys whose files would have one name."""
    check_names(op, tensors, [keys for keys, item in table.items() if keys and isinstance(item, Node)])


def classes_of(td: TensorDict) -> list[type]:
    """The tensorclasses in a TensorDict, each once."""
    return list(dict.fromkeys([entry.cls for entry in td._nodes.values() if type(entry) is Typed]))


register("memmap", memmap)
