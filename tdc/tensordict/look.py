"""How a TensorDict looks: the tree as text and as HTML, a node at a time."""

from __future__ import annotations

from typing import Any

import torch

from tdc.core.keys import children
from tdc.tensordict.display import (
    MANY,
    is_shared,
    leaf_html,
    page_html,
    sizes_text,
    static_html,
    static_text,
    tree_html,
    tree_text,
)
from tdc.tensordict.nbytes import bytes_of, bytes_text
from tdc.tensordict.nodes import Nodes, Static, Typed
from tdc.tensordict.storage import Leaves, node_size, subtree


def node_text(leaves: Leaves, nodes: Nodes, size: torch.Size, device: Any, indent: str = "") -> str:
    """A tree as the RFC prints it, keys sorted."""
    fields = []
    for key in sorted(children([*leaves, *nodes])):
        if key in leaves:
            fields.append((key, leaves[key]))
            continue
        if type(nodes[key]) is Static:
            fields.append((key, static_text(nodes[key].value)))
            continue
        found, inner, extra = subtree(leaves, nodes, key)
        fields.append((key, node_text(found, inner, node_size(found, size, extra), device, indent + " " * 8)))
    shared = bool(leaves) and all([is_shared(x) for x in leaves.values()])
    return tree_text(title(nodes), fields, size, device, shared, indent)


def title(nodes: Nodes) -> str:
    """Name of the class of a tree."""
    root = nodes.get(())
    return root.cls.__name__ if type(root) is Typed else "TensorDict"


def node_html(leaves: Leaves, nodes: Nodes, size: torch.Size, name: str | None = None) -> str:
    """A tree as nested `<details>`, keys in insertion order. The whole of it where no name says which node it is."""
    items = []
    for key in children([*leaves, *nodes]):
        if key in leaves:
            items.append(leaf_html(key, leaves[key]))
            continue
        if type(nodes[key]) is Static:
            items.append(static_html(key, nodes[key].value))
            continue
        found, inner, extra = subtree(leaves, nodes, key)
        items.append(f"<li>{node_html(found, inner, node_size(found, size, extra), key)}</li>")
    sizes, count = f"batch_size={sizes_text(size)}", bytes_text(bytes_of(leaves.values()))
    fields = [("kind", title(nodes) if name is not None else ""), ("shape", sizes), ("bytes", count)]
    tree = tree_html(title(nodes) if name is None else name, fields, items, name is None or len(leaves) <= MANY)
    return page_html(tree) if name is None else tree
