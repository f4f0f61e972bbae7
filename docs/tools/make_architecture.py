"""Writes docs/architecture.md: the rooms of `tdc/`, the imports between them, the files that a few calls run through.

python docs/tools/make_architecture.py
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tdc
from tdc.compile import train_step
from tdc.optim import sgd

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
FLOORS = (
    ("data",),
    ("optim", "io", "dist", "viz", "testing", "hf", "einops"),
    ("autobatch",),
    ("compile",),
    ("interop", "ops", "nn"),
    ("ragged", "tensordict"),
    ("kernels",),
    ("layout",),
    ("core",),
)
HEAD = """\
# Architecture

`tdc/` is a house of rooms, one folder each. A room imports from itself and from the rooms below it, never upwards and
never sideways; `tests/architecture/` enforces it. `python docs/tools/make_architecture.py` generates this page
from the code, and a test fails when it is out of date.

## Rooms

An arrow is drawn where no other path of arrows says the same.
"""
TAIL = """\
## How to add

- **An operation**: one row in the file of its family in `tdc/ops/`, and samples in `tests/catalogue/`:
  [rules](rules.md). For an operation of your own, outside the library: [extending](extending.md).
- **A method of a container**: if torch.Tensor has it, a row gives the method. If not, a function whose first argument
  is the container, and one entry in the table of `tdc/ragged/methods.py`, or a method of `tdc/tensordict/methods.py`;
  `python docs/tools/make_stubs.py` tells type checkers.
- **An optimiser**: a file in `tdc/optim/` with a function that returns an `Optimizer`, written with the operations of
  `tdc/optim/foreach.py`, and its pair in `torch.optim` in `tests/optim/test_optim.py`: [optim](optim.md).
- **A storage format**: a file in `tdc/io/`, above `compile`. A package that reads and writes it is an extra, imported
  in the function that needs it. A TensorDict gives its leaves by key path
  (`td.items(True, True)`), and `tdc.interop.spec(td)` says what it is made of, without data: [interop](interop.md).
"""


def rooms() -> dict[str, list[Path]]:
    """The files of each room."""
    return {
        folder.name: sorted(folder.rglob("*.py"))
        for floor in FLOORS
        for folder in [ROOT / "tdc" / name for name in floor]
        if folder.is_dir()
    }


def summary(folder: str) -> str:
    """The first line of a room's docstring."""
    doc = ast.get_docstring(ast.parse((ROOT / "tdc" / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    return doc.partition("\n")[0]


def imports(path: Path) -> set[str]:
    """The modules of tdc that a file imports when it runs."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tdc."):
            found.add(node.module)
        typing_only = isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        nodes += node.orelse if isinstance(node, ast.If) and typing_only else ast.iter_child_nodes(node)
    return found


def drawing() -> str:
    """The rooms floor by floor, and an arrow for each pair of rooms."""
    files = rooms()
    below = {
        room: {module.split(".")[1] for path in paths for module in imports(path)} - {room}
        for room, paths in files.items()
    }
    drawn = [(a, b) for a in files for b in below[a] if not any(b in below[c] for c in below[a] - {b})]
    lines = ["```mermaid", "flowchart TB"]
    for number, floor in enumerate(FLOORS):
        lines += [f"  subgraph floor{number}[ ]"]
        lines += [f'    {room}["{room}: {len(files[room])} files"]' for room in floor if room in files]
        lines += ["  end"]
    lines += [f"  {a} --> {b}" for a, b in sorted(drawn)]
    return "\n".join([*lines, "```"])


def table() -> str:
    """Purpose of each room, and its imports."""
    lines = ["| room | what | files |", "| --- | --- | --- |"]
    for room, paths in rooms().items():
        names = [str(p.relative_to(ROOT / "tdc" / room).with_suffix("")) for p in paths if p.name != "__init__.py"]
        lines.append(f"| `{room}` | {summary(room)} | {', '.join(names)} |")
    return "\n".join(lines)


def files_of(call: Callable[[], Any]) -> list[tuple[str, str]]:
    """The files of tdc that a call runs through, in order of their first function, which is named."""
    found: dict[str, str] = {}
    here = str(ROOT / "tdc") + "/"

    def seen(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        aside = code.co_name.startswith("<") or code.co_name == "__annotate__"  # which gives annotations in Python 3.14
        if event == "call" and code.co_filename.startswith(here) and not aside:
            found.setdefault(code.co_filename.removeprefix(here), code.co_name)

    call()  # what is looked up once is known then, as it is after other tests
    sys.setprofile(seen)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found.items())


def walks() -> dict[str, Callable[[], Any]]:
    """Calls that a reader may want to follow."""
    nt = tdc.pack([torch.ones(2, 4), torch.ones(3, 4)])
    td = tdc.TensorDict({"x": torch.ones(2, 4), "rows": nt}, [2])
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    params, batch = tdc.TensorDict({"w": torch.ones(4, 1)}), tdc.TensorDict({"x": torch.ones(2, 4)}, [2])
    step = train_step(lambda p, b: (b["x"] @ p["w"]).square().mean(), sgd(0.1), compile=False)
    state = step.init(params)
    return {
        "torch.relu(nt)": lambda: torch.relu(nt),
        "nt.sum(1)": lambda: nt.sum(1),
        "nt[:, 1:]": lambda: nt[:, 1:],
        "td[mask]": lambda: td.select("x")[torch.tensor([True, False])],
        "td + td": lambda: td + td,
        "nn.TransformerEncoderLayer(...)(nt)": lambda: layer(nt),
        "train_step(loss, sgd())(state, batch)": lambda: step(state, batch),
    }


def render() -> str:
    """The page."""
    lines = ["## Walks\n", "The files that a call runs through, with the first function of each.\n"]
    for title, call in walks().items():
        lines.append(f"- `{title}`: " + ", ".join([f"`{file}` ({name})" for file, name in files_of(call)]))
    return "\n".join([HEAD, drawing(), "", table(), "", *lines, "", TAIL])


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
