"""The tree of a TensorDict as a picture: bytes of its leaves, and which of them share memory."""

from __future__ import annotations

from typing import Any

from tdc.core.dynamo import storage_id
from tdc.core.errors import DtypeError, describe, message
from tdc.core.keys import parts
from tdc.tensordict.display import cells, is_shared, summary
from tdc.tensordict.nbytes import bytes_of, bytes_text, tensors_of
from tdc.tensordict.storage import is_tensordict
from tdc.viz.figure import NOTE, PADDING, REAL, empty


def tree(td: Any) -> Any:
    """Draw the tree of a TensorDict: a bar of bytes for each leaf, and which leaves share memory.

    Shapes:
        any.

    Args:
        td: a TensorDict.

    Returns:
        A `matplotlib.figure.Figure`. Leaves in memory of their own are green. Leaves that share memory with other
        leaves are brown and name the first of them; leaves that other processes can read say "shared".

    Raises:
        DtypeError: not a TensorDict; UnsupportedError: matplotlib is not installed.

    Compile:
        not traceable.

    Example:
        >>> import torch
        >>> from tdc.tensordict.tensordict import TensorDict
        >>> x = torch.zeros(4, 8)
        >>> figure = tree(TensorDict({"x": x, "rest": {"row": x[:, 0]}}, [4]))
        >>> [text.get_text() for text in figure.axes[0].get_yticklabels()]
        ['x', 'rest', '  row']
        >>> figure.axes[0].texts[3].get_text()
        '16 B, in x'
    """
    if not is_tensordict(td):
        hint = "tdc.from_module(module), or tdc.as_tensordict(obj)"
        raise DtypeError(message("viz.tree", "a TensorDict", describe(td), hint=hint))
    rows = summary(td).rows[1:]
    leaves = {path if isinstance(path, tuple) else (path,): leaf for path, leaf in td._leaves.items()}
    title = f"{len(leaves)} leaves, {bytes_text(bytes_of(leaves.values()))}"
    figure, (axes,) = empty("viz.tree", 1, (7.0, 0.8 + 0.24 * max(len(rows), 2)), (title,))
    owners: dict[Any, str] = {}
    for n, row in enumerate(rows):
        leaf = leaves.get(parts(row.path))
        if leaf is None:
            axes.annotate(f"{row.kind} {row.shape}", (0, n), **NOTE)
            continue
        name, size = ".".join(parts(row.path)), row.nbytes or 0
        found = {owners.setdefault(storage_id(x), name) for x in tensors_of(leaf)}
        others = ", ".join(sorted(found - {name}))
        axes.barh(n, size, height=0.7, color=PADDING if others else REAL)
        notes = [bytes_text(size), f"in {others}" if others else "", "shared" if is_shared(leaf) else ""]
        kind, sizes, dtype, _ = cells(leaf)
        axes.annotate(", ".join(filter(None, notes)), (size, n), **NOTE)
        place = {"xycoords": ("axes fraction", "data"), "annotation_clip": False}
        axes.annotate(f"{kind} {sizes} {dtype}", (1, n), **place, **NOTE)
    names = ["  " * (len(parts(row.path)) - 1) + parts(row.path)[-1] for row in rows]
    axes.set_yticks(range(len(rows)), names, fontfamily="monospace", ha="left")
    axes.tick_params(axis="y", pad=7 * max([len(name) for name in names], default=1))
    axes.set_xlim(0, 1.35 * max([row.nbytes or 0 for row in rows], default=1) or 1)
    axes.set_xticks([])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    return figure
