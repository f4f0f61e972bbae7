"""show: what a store or a safetensors file holds, for `python -m tdc show PATH`.

Invariant: everything that `load` checks is checked, so what is shown can be loaded.
"""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

from tdc.core.errors import TdcError
from tdc.io.filenames import dotted, not_a_store
from tdc.io.files import read_manifest
from tdc.io.load import OP, load, open_store
from tdc.io.manifest import FORMAT, VERSION, Entry, Node, Stored, Table, Tie, parse
from tdc.io.packed import from_safetensors
from tdc.io.publish import path_text
from tdc.tensordict.nbytes import bytes_text


def show(path: Any, *, verify: bool = False, out: TextIO | None = None) -> int:
    """Print the tree of a store or of a safetensors file, or what is wrong with it.

    Args:
        verify: compare the checksums, too, which reads every byte.

    Returns:
        The exit status: 0 where the store can be loaded.
    """
    stream = sys.stdout if out is None else out
    try:
        lines = lines_of_file(path, verify) if os.path.isfile(path) else lines_of_store(path, verify)
    except (TdcError, OSError) as error:
        print(error, file=stream)
        return 1
    print("\n".join(lines), file=stream)
    return 0


def lines_of_file(path: Any, verify: bool) -> list[str]:
    """A safetensors file as lines."""
    if verify:
        hint = "leave --verify out; tdc.io.save(td, path, checksums=True) writes checksums"
        raise not_a_store("io.show", "a store with checksums", "a file, which has none", hint=hint)
    return ["safetensors", "", str(from_safetensors(path).summary())]


def lines_of_store(path: Any, verify: bool) -> list[str]:
    """A store as lines."""
    td = load(path, verify=verify)
    folder = open_store(OP, path_text(OP, path))
    try:
        table = parse(OP, read_manifest(OP, folder)[0])
    finally:
        os.close(folder)
    return [head(table, verify), *notes(table), "", str(td.summary())]


def head(table: Table, verified: bool) -> str:
    """One line: format, files, bytes on disk, checksums."""
    parts = [x for item in table.values() if isinstance(item, Entry) for x in item.parts.values()]
    files = [x for x in parts if isinstance(x, Stored)]
    summed = any([x.crc32 is not None for x in files])
    checksums = "checksums right" if verified else "with checksums" if summed else "no checksums"
    size = bytes_text(sum([x.nbytes for x in files]))
    return f"{FORMAT} version {VERSION}, {len(files)} file{'s' * (len(files) != 1)}, {size}, {checksums}"


def notes(table: Table) -> list[str]:
    """Lines for what a TensorDict does not show: classes of nodes, and tied tensors."""
    lines: list[str] = []
    for keys, item in table.items():
        if isinstance(item, Node):
            lines += [f"class  {dotted(keys)}: {ascii(item.cls)[1:-1]}"] * bool(item.cls)
        else:
            ties = {part: x for part, x in item.parts.items() if isinstance(x, Tie)}
            lines += [f"tie    {dotted(keys, part)}: {dotted(x.keys, x.part)}" for part, x in ties.items()]
    return lines
