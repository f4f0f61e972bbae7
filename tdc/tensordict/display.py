"""A TensorDict as text, as HTML and as a table, for people: metadata only, never values.

The text is that of the TensorDict RFC. The HTML is the same tree as collapsible `<details>`, which a keyboard opens and
closes, and which need neither script nor style: a line reads "key kind shape dtype device bytes".

Invariants: reads no tensor data (no sync); everything that comes from a user is escaped in HTML; a Summary holds texts
and numbers, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import torch

from tdc.core.errors import DtypeError, describe, dtype_name, message, show_sizes, sizes_of
from tdc.core.keys import parts
from tdc.core.typing import KeyPath
from tdc.tensordict.leaf import Leaf
from tdc.tensordict.nbytes import bytes_of, bytes_text, nbytes, param_count, tensors_of
from tdc.tensordict.nodes import Nodes, Static, Typed
from tdc.tensordict.paths import depth, join
from tdc.tensordict.storage import Leaves, children, is_tensordict

COLUMNS = ("kind", "shape", "dtype", "device", "bytes")
LONGEST = 80  # characters of a static value
MANY = 20  # leaves of an inner node that is shown closed
STYLE = (
    ".tdc ul{list-style:none;margin:0;padding-left:1.5em}.tdc summary{cursor:pointer}"
    ".tdc span{margin-left:.75em}.tdc span[title=device],.tdc span[title=bytes]{opacity:.7}"
)


def leaf_text(x: Any) -> str:
    """One leaf as the RFC prints it: kind and shape, device, dtype, whether shared. What is no tensor: its kind."""
    if isinstance(x, Leaf):
        shown = x._shown
        own = [f", {name}={value}" for name in ("device", "dtype") if (value := getattr(shown, name)) is not None]
        return f"{x._label}(shape={shown.shape}{''.join(own)})"
    if not hasattr(x, "device"):
        return type(x).__name__
    shared = is_shared(x)
    return f"{type(x).__name__}(shape={sizes_of(x)}, device={x.device}, dtype={x.dtype}, is_shared={shared})"


def is_shared(x: Any) -> bool:
    """True if a leaf is in shared memory; False for what cannot say (a container, a tensor under vmap)."""
    try:
        return bool(x.is_shared())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def shortened(text: str, limit: int = LONGEST) -> str:
    """A text cut to a limit; three dots stand for the rest."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def static_text(value: Any, limit: int = LONGEST) -> str:
    """A static value, its repr shortened."""
    return f"Static({shortened(repr(value), limit)})"


def sizes_text(size: Any) -> str:
    """A batch size as a list; it is unknown where leaves are no tensors."""
    return show_sizes(size) if isinstance(size, torch.Size) else f"{size}"


def cells(x: Any) -> tuple[str, str, str, str]:
    """Kind, shape, dtype and device of a leaf as texts, empty for what it does not have."""
    kind, x = getattr(x, "_label", type(x).__name__), getattr(x, "_shown", x)
    shape, dtype, device = sizes_of(x), getattr(x, "dtype", None), getattr(x, "device", None)
    sizes = "" if shape is None else show_sizes(shape)
    kept = "" if dtype is None else dtype_name(dtype)
    return kind, sizes, kept, "" if device is None else f"{device}"


def row_html(key: str, fields: Iterable[tuple[str, str]]) -> str:
    """A key and named texts, the empty ones left out; all are escaped."""
    spans = [f'<span title="{escape(name)}">{escape(text)}</span>' for name, text in fields if text]
    return " ".join([f"<code>{escape(key)}</code>", *spans])


def leaf_html(key: str, x: Any) -> str:
    """One leaf: key, kind, shape, dtype, device, bytes."""
    size = bytes_text(bytes_of([x])) if tensors_of(x) else ""
    return row_html(key, zip(COLUMNS, (*cells(x), size), strict=True))


def static_html(key: str, entry: Static) -> str:
    """One static value."""
    return row_html(key, [("kind", "Static"), ("value", shortened(repr(entry.value)))])


def node_text(leaves: Leaves, nodes: Nodes, size: torch.Size, device: Any, indent: str = "") -> str:
    """A tree as the RFC prints it, keys in insertion order."""
    pad = indent + "    "
    entries: list[str] = []
    for key, entry, inner in children(leaves, nodes, size):
        if inner is None:
            text = static_text(entry.value) if type(entry) is Static else leaf_text(entry)
        else:
            text = node_text(*inner, device=device, indent=pad + "    ")
        entries.append(f"{pad}    {key}: {text}")
    body = "{\n" + (",\n".join(entries) or pad) + "}"
    shared = bool(leaves) and all([is_shared(x) for x in leaves.values()])
    lines = [f"fields={body}", f"batch_size={size}", f"device={device}", f"is_shared={shared}"]
    return f"{title(nodes)}(\n" + ",\n".join([pad + line for line in lines]) + ")"


def title(nodes: Nodes) -> str:
    """Name of the class of a tree."""
    root = nodes.get(())
    return root.cls.__name__ if type(root) is Typed else "TensorDict"


def node_html(leaves: Leaves, nodes: Nodes, size: torch.Size, name: str | None = None) -> str:
    """A tree as nested `<details>`, keys in insertion order: that of a named inner node, or the page of the root."""
    items: list[str] = []
    for key, entry, inner in children(leaves, nodes, size):
        row = static_html if type(entry) is Static else leaf_html
        items.append(f"<li>{row(key, entry) if inner is None else node_html(*inner, name=key)}</li>")
    sizes, count = f"batch_size={sizes_text(size)}", bytes_text(bytes_of(leaves.values()))
    fields = [("kind", title(nodes) if name is not None else ""), ("shape", sizes), ("bytes", count)]
    head, opened = row_html(title(nodes) if name is None else name, fields), name is None or len(leaves) <= MANY
    tree = f"<details{' open' * opened}><summary>{head}</summary><ul>{''.join(items)}</ul></details>"
    return f'<div class="tdc"><style>{STYLE}</style>{tree}</div>' if name is None else tree


HEAD = ("key", *COLUMNS)


class Row(NamedTuple):
    """One entry of a summary.

    Attributes:
        path: key path, () for the root.
        kind, shape, dtype, device: texts; of a node the class and the batch size.
        nbytes: of the leaf, or of all leaves below the node; None for what has no tensors.
    """

    path: KeyPath
    kind: str
    shape: str
    dtype: str
    device: str
    nbytes: int | None


@dataclass(frozen=True)
class Summary:
    """The result of `summary`: prints as a table, and shows as one in a notebook.

    Attributes:
        rows: one for each inner node, leaf and Static value, nodes before what is in them.
        leaves: how many leaves there are.
        elements: how many elements they have, as `param_count`.
        nbytes: bytes of everything, shared memory counted once, so that rows may sum to more.
    """

    rows: tuple[Row, ...]
    leaves: int
    elements: int
    nbytes: int

    def __str__(self) -> str:
        table = [HEAD, *[texts(row) for row in self.rows]]
        widths = [max([len(line[i]) for line in table]) for i in range(len(HEAD))]
        lines: list[str] = []
        for *line, last in table:
            columns = [text.ljust(width) for text, width in zip(line, widths[:-1], strict=True)]
            lines.append("  ".join([*columns, last.rjust(widths[-1])]).rstrip())
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], "-" * len(lines[0]), self.total])

    __repr__ = __str__

    @property
    def total(self) -> str:
        """The last line: leaves, elements, bytes."""
        s = "s" * (self.leaves != 1)
        return f"{self.leaves} {'leaf' if not s else 'leaves'}, {self.elements:,} elements, {bytes_text(self.nbytes)}"

    def _repr_html_(self) -> str:
        head = "".join([f'<th scope="col" style="text-align:left">{name}</th>' for name in HEAD])
        body = "".join([table_row(row) for row in self.rows])
        foot = f'<tr><td colspan="{len(HEAD)}">{escape(self.total)}</td></tr>'
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table>"


def summary(td: Any) -> Summary:
    """A table of all entries of a TensorDict: key, kind, shape, dtype, device, and bytes of each leaf and subtree.

    Raises:
        DtypeError: no TensorDict.

    Compile:
        fullgraph for one size: texts are constants of a graph. Reads no data.

    Example:
        >>> from tdc.tensordict.tensordict import TensorDict
        >>> print(summary(TensorDict({"x": torch.zeros(3, 4), "meta": {"id": torch.arange(3)}}, [3])))
        key     kind        shape   dtype    device  bytes
        --------------------------------------------------
        (all)   TensorDict  [3]                       72 B
          x     Tensor      [3, 4]  float32  cpu      48 B
          meta  TensorDict  [3]                       24 B
            id  Tensor      [3]     int64    cpu      24 B
        --------------------------------------------------
        2 leaves, 15 elements, 72 B
    """
    if not is_tensordict(td):
        hint = "tdc.as_tensordict(obj), tdc.from_module(module), or repr(x) of one leaf"
        raise DtypeError(message("summary", "a TensorDict", describe(td), hint=hint))
    rows = rows_of((), td._leaves, td._nodes, td.batch_size)
    return Summary(tuple(rows), len(td._leaves), param_count(td), nbytes(td))


# -- helpers


def rows_of(prefix: KeyPath, leaves: Leaves, nodes: Nodes, size: Any) -> list[Row]:
    """Rows of a node and of everything in it, in insertion order."""
    rows = [Row(prefix, title(nodes), sizes_text(size), "", "", bytes_of(leaves.values()))]
    for key, entry, inner in children(leaves, nodes, size):
        path = join(prefix, key)
        if inner is not None:
            rows += rows_of(path, *inner)
        elif type(entry) is Static:
            rows.append(Row(path, static_text(entry.value, 32), "", "", "", None))
        else:
            rows.append(Row(path, *cells(entry), bytes_of([entry]) if tensors_of(entry) else None))
    return rows


def texts(row: Row) -> tuple[str, ...]:
    """A row as the texts of its columns, the key indented."""
    keys = parts(row.path)
    name = keys[-1] if keys else "(all)"
    key = "  " * len(keys) + (name if name.isprintable() else ascii(name))
    return key, row.kind, row.shape, row.dtype, row.device, "" if row.nbytes is None else bytes_text(row.nbytes)


def table_row(row: Row) -> str:
    """A row of the table of a notebook."""
    key, *rest = texts(row)
    head = f'<th scope="row" style="text-align:left;padding-left:{2 * depth(row.path)}ch">{escape(key.strip())}</th>'
    cells = "".join([f'<td style="text-align:left">{escape(text)}</td>' for text in rest])
    return f"<tr>{head}{cells}</tr>"
