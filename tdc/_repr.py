"""Text and HTML views of containers: what people read. Metadata only, never values.

`tree_text` prints as the TensorDict RFC does; `tree_html` is the same tree as collapsible `<details>`, which needs no
script.

Invariants: reads no tensor data (no sync); everything that came from a user is escaped in HTML.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from tdc._errors import describe

Fields = Iterable[tuple[str, Any]]


def leaf_text(x: Any) -> str:
    """One leaf as the RFC prints it: kind and shape, device, dtype, whether shared. What is no tensor: its kind."""
    if not hasattr(x, "device"):
        return type(x).__name__
    shared = is_shared(x)
    return f"{type(x).__name__}(shape={x.shape}, device={x.device}, dtype={x.dtype}, is_shared={shared})"


def is_shared(x: Any) -> bool:
    """Whether a leaf lies in shared memory; False for what cannot say (a container, a tensor under vmap)."""
    try:
        return bool(x.is_shared())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def tree_text(name: str, fields: Fields, batch_size: Any, device: Any, shared: bool, indent: str = "") -> str:
    """A TensorDict as text; `fields` holds leaves as they are and inner nodes as ready text."""
    inner = indent + "    "
    rows = [f"{inner}    {key}: {value if isinstance(value, str) else leaf_text(value)}" for key, value in fields]
    body = "{\n" + ",\n".join(rows) + "}" if rows else "{\n" + inner + "}"
    lines = [f"fields={body}", f"batch_size={batch_size}", f"device={device}", f"is_shared={shared}"]
    return f"{name}(\n" + ",\n".join(inner + line for line in lines) + ")"


def leaf_html(key: str, x: Any) -> str:
    """One leaf as a list item."""
    place = escape(str(getattr(x, "device", "")))
    return f"<li><code>{escape(key)}</code> {escape(describe(x))} <small>{place}</small></li>"


def tree_html(name: str, items: Iterable[str], title: str) -> str:
    """A node as an open `<details>` with its items, which are ready HTML."""
    head = f"<summary><code>{escape(name)}</code> {escape(title)}</summary>"
    return f"<details open>{head}<ul>{''.join(items)}</ul></details>"
