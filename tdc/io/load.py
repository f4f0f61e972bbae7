"""load: a store as a TensorDict of plain tensors that are mapped into memory.

A store is opened once, as a descriptor of its folder, and read below that. If it is replaced meanwhile, what was opened
is whole or being removed; then the load begins anew.

Invariants: a load changes nothing on disk; either every leaf has exactly the bytes that the manifest says, or there is
one FormatError that names all that have not.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor

from tdc.core.arguments import expect
from tdc.core.errors import DtypeError, FormatError, describe, message
from tdc.core.keys import as_path, missing_key, parts, path_of
from tdc.core.typing import NestedKey
from tdc.io.filenames import Keys, Part, dotted, first, not_a_store, refuse_damage
from tdc.io.files import Damaged, Folders, Source, mapped, mark, read_manifest
from tdc.io.leaves import made
from tdc.io.manifest import Entry, Stored, Table, parse, stored, stored_at
from tdc.io.publish import check_system, open_folder, path_text, same_folder
from tdc.tensordict.nodes import name_of
from tdc.tensordict.tensorclass import TensorClass

OP = "io.load"
ATTEMPTS = 1000  # each of them follows a replacement of the store


def load(
    path: str | os.PathLike[str], keys: NestedKey | Sequence[NestedKey] | None = None, *,
    mode: Literal["r", "r+"] = "r", verify: bool = False, classes: Iterable[type] = (),
) -> Any:  # fmt: skip
    """The TensorDict of a store, its leaves mapped into memory; nothing is read until it is used.

    Args:
        path: of the folder.
        keys: one key for what `td[key]` gives; a list of keys for `td.select(*keys)`; everything by default. Only the
            files of these keys are opened.
        mode: "r" for leaves that are copied where they are written to, so that the store stays as it is; "r+" for
            leaves whose memory is that of the files, for `tdc.copy_`.
        verify: compare the checksums that `save(..., checksums=True)` wrote; reads every byte.
        classes: tensorclasses that inner nodes become again, or the root; others are plain TensorDicts.

    Returns:
        A TensorDict of plain tensors on the host; a leaf or a Python object where `keys` is the key of one. Leaves
        that were one tensor are one again.

    Raises:
        FormatError: no store, another version, or a damaged or forged one; all wrong leaves are named. Nothing on disk
            is changed, and nothing outside of the folder is opened.
        KeyPathError: a key that is not there.
        OSError: what the system refuses, such as permission.

    Compile:
        Leaves are plain tensors, which a compiled function takes as any. If another program makes a file shorter while
        it is mapped, reading it ends the process, as with every memory map.

    Example:
        >>> import tempfile, torch
        >>> from tdc.io.save import save
        >>> from tdc.tensordict.tensordict import TensorDict
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(TensorDict({"x": torch.arange(3), "info": {"y": torch.zeros(3, 2)}}, [3]), f"{folder}/store")
        ...     load(f"{folder}/store", ("info", "y")).shape, load(f"{folder}/store", ["x"]).keys()
        (torch.Size([3, 2]), ('x',))
    """
    text, wanted = path_text(OP, path), wanted_keys(keys)
    check_mode(OP, mode)
    expect(OP, verify, bool, of=" for verify")
    known = names_of(classes)
    for attempt in range(ATTEMPTS):
        folder = open_store(OP, text)
        try:
            return read(folder, text, wanted, isinstance(keys, list), mode == "r+", verify, known)
        except FormatError:
            if same_folder(folder, text) or attempt == ATTEMPTS - 1:
                raise
        finally:
            os.close(folder)


def check_mode(op: str, mode: Any) -> None:
    """Refuse what is none of the two modes."""
    if not isinstance(mode, str) or mode not in ("r", "r+"):
        got = repr(mode) if isinstance(mode, str) else describe(mode)
        raise DtypeError(message(op, "mode='r' or mode='r+'", got, hint="mode='r+' to write into the files"))


def wanted_keys(keys: Any, op: str = OP) -> list[Keys]:
    """Key paths that were asked for; the root where none were."""
    if keys is None:
        return [()]
    if isinstance(keys, list):
        return [parts(as_path(key, op)) for key in keys]
    return [parts(as_path(keys, op))]


def names_of(classes: Any, op: str = OP) -> dict[str, type]:
    """Tensorclasses by the names that they go by in a manifest."""
    given = list(classes) if isinstance(classes, (list, tuple, set, frozenset)) else [classes]
    wrong = [cls for cls in given if not (isinstance(cls, type) and issubclass(cls, TensorClass))]
    if wrong:
        raise DtypeError(message(op, "tensorclasses", describe(wrong[0]), hint="classes=[Batch], of the class itself"))
    return {name_of(cls): cls for cls in given}


def open_store(op: str, path: str) -> int:
    """A descriptor of the folder of a store."""
    check_system(op)
    try:
        return open_folder(path)
    except FileNotFoundError:
        raise not_a_store(op, "a store", f"nothing at {path!r}", hint="tdc.io.save writes one") from None
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        hint = "give the folder itself; os.path.realpath(path) follows a link"
        raise not_a_store(op, "a folder", f"a file or a link at {path!r}", hint=hint) from None


def read(
    folder: int, path: str, wanted: list[Keys], several: bool, shared: bool, verify: bool, classes: Mapping[str, type]
) -> Any:
    """The entries at the wanted keys of an open store."""
    data, version = read_manifest(OP, folder)
    table = parse(OP, data)
    absent = [keys for keys in wanted if keys not in table]
    if absent:
        raise missing_key(OP, path_of(absent[0]), [path_of(keys) for keys in table if keys])
    chosen = within(table, set(wanted))
    needed = stored_of(table, chosen)
    check_checksums(needed, shared, verify)
    tensors = map_all(OP, folder, needed, Source(os.path.abspath(path), version, shared), verify)
    return made(OP, chosen, () if several else wanted[0], tensors, classes, several)


def within(table: Table, wanted: set[Keys]) -> Table:
    """The entries at and below the wanted keys, and the nodes that these lie in."""
    above = {(), *[keys[:n] for keys in wanted for n in range(len(keys))]}
    return {
        keys: item
        for keys, item in table.items()
        if keys in above or any([keys[:n] in wanted for n in range(len(keys) + 1)])
    }


def stored_of(table: Table, chosen: Table) -> dict[Part, Stored]:
    """The tensors of the chosen entries, each once, by where they are stored."""
    needed: dict[Part, Stored] = {}
    for keys, item in chosen.items():
        for part in item.parts if isinstance(item, Entry) else ():
            at = stored_at(table, keys, part)
            needed[at] = stored(table, *at)
    return needed


def map_all(
    op: str, folder: int, needed: Mapping[Part, Stored], source: Source, verify: bool = False
) -> dict[Part, Tensor]:
    """Tensors of an open store, each mapped once. Raises an error that names all that cannot be."""
    tensors: dict[Part, Tensor] = {}
    wrong: list[str] = []
    with Folders(folder) as folders:
        for at, x in needed.items():
            keys, part = at
            try:
                tensors[at] = mapped(folders.at(keys[:-1]), keys[-1], part, x, source.shared, verify)
                mark(tensors[at], source, at)
            except Damaged as fault:
                wrong.append(f"{dotted(keys, part)}: {fault}")
    refuse_damage(op, "every file as the manifest says", wrong, "that are not")
    return tensors


def check_checksums(needed: Mapping[Part, Stored], shared: bool, verify: bool) -> None:
    """Refuse to verify what has no checksum, and to write to what has one, which would be wrong from then on."""
    without = [dotted(*at) for at, x in needed.items() if x.crc32 is None]
    if verify and without:
        hint = "leave verify out; save(td, path, checksums=True) writes checksums"
        raise not_a_store(OP, "a store with checksums", "one without", first(without), hint)
    if shared and len(without) < len(needed):
        hint = "mode='r', or save it again without checksums"
        raise not_a_store(OP, "a store without checksums for mode='r+'", "one with them", hint=hint)
