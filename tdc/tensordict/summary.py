"""summary: a table of all entries of a TensorDict and their sizes, to print.

Invariant: reads no tensor data (no sync); a Summary holds texts and numbers, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from tdc.core.errors import DtypeError, describe, message
from tdc.core.keys import parts
from tdc.core.typing import KeyPath
from tdc.tensordict.display import cells, sizes_text, static_text, title
from tdc.tensordict.methods import register
from tdc.tensordict.nbytes import bytes_of, bytes_text, nbytes, param_count, tensors_of
from tdc.tensordict.nodes import Nodes, Static
from tdc.tensordict.paths import depth, join
from tdc.tensordict.storage import Leaves, children, is_tensordict
from tdc.tensordict.tensordict import TensorDict

HEAD = ("key", "kind", "shape", "dtype", "device", "bytes")


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
    """What `summary` returns: prints as a table, and shows as one in a notebook.

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
        body = "".join([row_html(row) for row in self.rows])
        foot = f'<tr><td colspan="{len(HEAD)}">{escape(self.total)}</td></tr>'
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody><tfoot>{foot}</tfoot></table>"


def summary(td: TensorDict) -> Summary:
    """A table of all entries: key, kind, shape, dtype, device, and bytes of each leaf and subtree.

    Raises:
        DtypeError: no TensorDict.

    Compile:
        fullgraph for one size: texts are constants of a graph. Reads no data.

    Example:
        >>> import torch
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


def row_html(row: Row) -> str:
    """A row of the table of a notebook."""
    key, *rest = texts(row)
    head = f'<th scope="row" style="text-align:left;padding-left:{2 * depth(row.path)}ch">{escape(key.strip())}</th>'
    cells = "".join([f'<td style="text-align:left">{escape(text)}</td>' for text in rest])
    return f"<tr>{head}{cells}</tr>"


register("summary", summary)
