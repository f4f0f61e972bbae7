"""A TensorDict as text and as HTML, for people: metadata only, never values.

The text is that of the TensorDict RFC. The HTML is the same tree as collapsible `<details>`, which a keyboard opens and
closes, and which need neither script nor style: a line reads "key kind shape dtype device bytes".

Invariants: reads no tensor data (no sync); everything that comes from a user is escaped in HTML.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

import torch

from tdc.core.errors import dtype_name, show_sizes, sizes_of
from tdc.tensordict.leaf import Leaf
from tdc.tensordict.nbytes import bytes_of, bytes_text, tensors_of
from tdc.tensordict.nodes import Nodes, Static, Typed
from tdc.tensordict.storage import Leaves, children

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
        own = [f", {name}={value}" for name in ("device", "dtype") if (value := getattr(x, name)) is not None]
        return f"{x._label}(shape={x.shape}{''.join(own)})"
    if not hasattr(x, "device"):
        return type(x).__name__
    shared = is_shared(x)
    return f"{type(x).__name__}(shape={sizes_of(x)}, device={x.device}, dtype={x.dtype}, is_shared={shared})"


def is_shared(x: Any) -> bool:
    """Whether a leaf lies in shared memory; False for what cannot say (a container, a tensor under vmap)."""
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
    shape, dtype, device = sizes_of(x), getattr(x, "dtype", None), getattr(x, "device", None)
    kind = getattr(x, "_label", type(x).__name__)
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
