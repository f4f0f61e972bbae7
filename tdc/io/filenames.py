"""The file names of a store: a function of the key alone, so that a manifest never holds a path.

    "weight"      weight            what is no letter, digit, "_", "-" or inner "." is percent-encoded
    ".."          %2E.              a name never begins with a dot, so it is no path and not hidden
    ""            %                 which no other key gives
    300 letters   150 of them, "~", and 32 digits of the SHA-256 of the key

Invariant: two keys of one folder never share a name, not even on a file system that ignores case: `check_names` refuses
keys that would.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from urllib.parse import quote_from_bytes

from tdc.core.errors import FormatError, message, refuse_wrong

Keys = tuple[str, ...]  # a key path, outermost first; () is the root
Part = tuple[Keys, str]  # a key path, and a part of the leaf there
LONGEST, KEPT, DIGITS = 200, 150, 32
SUFFIX = ".memmap"
PLAIN = re.compile(rf"[A-Za-z0-9_-][A-Za-z0-9_.-]{{0,{LONGEST - 1}}}", re.ASCII).fullmatch
MANIFEST = "meta.json"
SHARD_DIGITS = 8


def shard_name(number: int) -> str:
    """The folder of a shard of a data set that grows."""
    return f"{number:0{SHARD_DIGITS}}"


def encoded(key: str) -> str:
    """The name of a key, without a suffix.

    Example:
        >>> encoded("a b"), encoded("../x"), encoded("Größe"), encoded("")
        ('a%20b', '%2E.%2Fx', 'Gr%C3%B6%C3%9Fe', '%')
    """
    if PLAIN(key):
        return key
    raw = key.encode("utf-8", "surrogatepass")
    name = quote_from_bytes(raw, safe="").replace("~", "%7E") or "%"
    if name[0] == ".":
        name = "%2E" + name[1:]
    return name if len(name) <= LONGEST else f"{name[:KEPT]}~{hashlib.sha256(raw).hexdigest()[:DIGITS]}"


def file_name(key: str, part: str = "") -> str:
    """The file of a tensor: that of a leaf, or of one part of it.

    Example:
        >>> file_name("obs"), file_name("text", "offsets")
        ('obs.memmap', 'text.offsets.memmap')
    """
    return f"{encoded(key)}{'.' * bool(part)}{part}{SUFFIX}"


def check_names(op: str, files: Iterable[Part], folders: Iterable[Keys]) -> None:
    """Refuse keys whose files would have one name, on this system or on one that ignores case.

    Args:
        files: the key path of each tensor, and its part.
        folders: the key path of each inner node.

    Raises:
        FormatError: there are such keys; all are named.
    """
    taken: dict[tuple[Keys, str], Keys] = {((), MANIFEST): ()}
    wrong: list[str] = []
    names = [(keys, encoded(keys[-1])) for keys in folders]
    names += [(keys, file_name(keys[-1], part)) for keys, part in files]
    for keys, name in names:
        other = taken.setdefault((keys[:-1], name.lower()), keys)
        if other != keys or not other:
            wrong.append(f"{dotted(keys)}: {name}, as {dotted(other) if other else 'the manifest'}")
    expected, hint = "keys whose files differ in more than capitals", "td.rename_keys({'A': 'a_upper'}) of one of them"
    refuse_wrong(FormatError, op, expected, wrong, "that do not", hint)


def dotted(keys: Keys, part: str = "") -> str:
    """A key path in messages: joined by dots, on one line and not endless, whatever the keys hold."""
    text = ".".join(keys) or ("the root" if not keys else "''")
    text = text if text.isprintable() else ascii(text)
    return (text if len(text) <= LONGEST else f"{text[:LONGEST]}…") + (f" ({part})" if part else "")


def not_a_store(op: str, expected: str, got: str, at: Iterable[str] = (), hint: str = "") -> FormatError:
    """The error for what cannot be read as a store."""
    return FormatError(message(op, expected, got, at, hint or "save it again with tdc.io.save"))


def refuse_damage(op: str, expected: str, wrong: list[str], which: str, hint: str = "") -> None:
    """Raise an error that names all that was found wrong in a store, if anything was."""
    if wrong:
        raise not_a_store(op, expected, f"{len(wrong)} {which}", first(wrong), hint)


def first(lines: list[str], most: int = 50) -> list[str]:
    """Lines of a message; of very many the first."""
    return lines if len(lines) <= most else [*lines[:most], f"{len(lines) - most} more"]
