"""Writes docs/_static/torch.inv and python.inv, with the names of torch and Python that our pages mention.

python docs/tools/make_inventory.py

`make docs` links such names to the documentation of torch and Python, without network. Addresses follow the layout of
those sites. A site's own `objects.inv` in place of its file links all of its names.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1]
ROOMS = "torch|nn|F|collections|concurrent|dataclasses|functools|pickle|typing"
NAME = re.compile(rf"`((?:{ROOMS})(?:\.[A-Za-z_]\w*)+)[`(]")
ALIASES = {"nn.": "torch.nn.", "F.": "torch.nn.functional."}  # which pages write, as programs do
EXPORT = "user_guide/torch_compiler/export/api_reference"
PAGES = {  # of torch's documentation, for names without a page of their own
    "torch.Size": "size", "torch.SymInt": "torch", "torch.amp": "amp", "torch.autocast": "amp",
    "torch.autograd.Function": "autograd", "torch.distributed": "distributed",
    "torch.distributed.checkpoint": "distributed.checkpoint", "torch.distributed.optim": "distributed.optim",
    "torch.distributed.fsdp.fully_shard": "distributed.fsdp.fully_shard",
    "torch.distributed.tensor": "distributed.tensor",
    "torch.export": EXPORT, "torch.library": "library", "torch.nested": "nested", "torch.overrides": "torch.overrides",
    "torch.nn.attention.flex_attention": "nn.attention.flex_attention", "torch.testing": "testing",
    "torch.nn.Module": "generated/torch.nn.Module", "torch.utils.checkpoint": "checkpoint", "torch.utils.data": "data",
    "torch.special": "special",
}  # fmt: skip
LEFT_OUT = (  # not documented, or not by every release
    "torch.cholesky", "torch.distributed.nn", "torch.distributed.group", "torch.jit", "torch.ops",
    "torch.optim.swa_utils", "torch.qr", "torch.while_loop",
)  # fmt: skip


def mentioned() -> list[str]:
    """Names in code on our pages, in full; tables of all operations are left out."""
    found: set[str] = set()
    for path in FOLDER.rglob("*.md"):
        if path.name not in ("support.md", "migration.md"):
            found.update(NAME.findall(path.read_text(encoding="utf-8")))
    return sorted({full(name) for name in found})


def full(name: str) -> str:
    return next((path + name.removeprefix(short) for short, path in ALIASES.items() if name.startswith(short)), name)


def resolved(name: str) -> Any:
    """The object of a public, documented name; None of others."""
    if "._" in name or name.startswith(LEFT_OUT):
        return None
    try:
        found = pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return None
    return found if callable(found) and inspect.getdoc(found) else None


def place(name: str) -> str:
    """The address of a class or function on its site."""
    page = f"library/{name.rpartition('.')[0]}"
    if name.startswith("torch."):
        page = next((PAGES[p] for p in prefixes(name) if p in PAGES), f"generated/{name}")
    return f"{page}.html#{name}"


def prefixes(name: str) -> Iterator[str]:
    """A name, and the names of what it is in, the innermost first."""
    parts = name.split(".")
    return (".".join(parts[:n]) for n in range(len(parts), 0, -1))


def inventory(project: str, names: list[str]) -> bytes:
    """The names of a project in the format of Sphinx."""
    lines = []
    for name in names:
        found = resolved(name)
        if found is not None and name.startswith("torch.") == (project == "torch"):
            kind = "class" if inspect.isclass(found) else "function"
            lines.append(f"{name} py:{kind} 1 {place(name)} -\n")
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n# The rest is compressed with zlib.\n"
    return head.encode() + zlib.compress("".join(lines).encode(), 9)


def main() -> None:
    names = mentioned()
    for project in ("torch", "python"):
        (FOLDER / "_static" / f"{project}.inv").write_bytes(inventory(project, names))


if __name__ == "__main__":
    main()
