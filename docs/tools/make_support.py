"""Writes docs/support.md: one table for each family of operations, from the rows of `tdc.ops.RULES`.

python docs/tools/make_support.py
"""

from __future__ import annotations

import runpy
from pathlib import Path

import torch
import torch.nn.functional as F

from tdc.core.rules import CLASS_NAMES, KINDS, MODES
from tdc.ops import RULES, Rule
from tdc.ops.install import ALIASES

PAGE = Path(__file__).parents[1] / "support.md"
peers = runpy.run_path(str(Path(__file__).with_name("peers.py")))
PEERS: dict[str, dict[str, str]] = peers["PEERS"]
PREFIXES = (
    ("torch.", torch), ("F.", F), ("Tensor.", torch.Tensor), ("torch.linalg.", torch.linalg),
    ("torch.special.", torch.special),
)  # fmt: skip
NEWEST = {"hash_tensor": MODES}  # rows whose modes follow the torch that is installed; the page is of the newest
HEAD = """\
# Support

Each line is one operation, each cell one row of the rule table: an operation and the container it is for. `F` is
`torch.nn.functional`. Every supported row is tested in the modes eager, compile, vmap, grad and export. An empty cell
has no row: the call raises [UnsupportedError](errors.md#unsupportederror). How rows are added: [rules](rules.md).

Reading, indexing, `to`, `unbind` of ragged batches and conversions are methods of the containers and not listed here.
Limits within a row, such as several ragged dims, are on the pages of the containers.

Beside them are two peers. DanLing (0.4.8, by its own registry): "yes" is safe to compile, "eager only" is not.
torch.nested (jagged layout, torch 2.13, on torch's own samples for it, with gradients): "yes" is right on all, "partly"
is not. Empty: the peer does not list it. [The last table](#names-of-the-peers) has those of their names that are
written otherwise here, and how each counts.

`python docs/tools/make_support.py` generates this page; a test fails when it is out of date.
"""


def title(rule: Rule) -> str:
    """The operation as users write it: `torch.relu`, or `F.relu` where it lies there only."""
    found = [prefix for prefix, module in PREFIXES if getattr(module, rule.name, None) is rule.op]
    return f"`{found[0] if found else ''}{rule.name}`"


def cell(rule: Rule | None) -> str:
    """Answer of one container to the operation."""
    if rule is None:
        return ""
    if rule.reason:
        return f"no: {rule.reason}"
    lacking = [mode for mode in MODES if mode not in NEWEST.get(rule.name, rule.modes)]
    return "yes" + (f", but for {', '.join(lacking)}" if lacking else "")


def called(op: object) -> str:
    """A function as users write it."""
    names = ((prefix, n, value) for prefix, module in PREFIXES for n, value in vars(module).items())
    return next(prefix + n for prefix, n, value in names if value is op and not n.startswith("_"))


def other_names() -> list[str]:
    """A table of names that reach the rows of another."""
    rows = sorted((called(alias), called(op)) for alias, op in ALIASES.items())
    head = ["## Other names", "", "These run the rows of another operation.", ""]
    return [*head, "| name | operation |", "| --- | --- |", *[f"| `{name}` | `{op}` |" for name, op in rows], ""]


def by_name() -> dict[str, dict[str, str]]:
    """What each peer does under our name of an operation; its public names speak before its internal ones."""
    found: dict[str, dict[str, str]] = {}
    for peer, names in PEERS.items():
        for name in sorted(names, key=lambda n: (n.startswith(("aten.", "prims.")), n)):
            found.setdefault(peers["find"](name)[0], {}).setdefault(peer, names[name])
    return found


def beside(names: list[str], found: dict[str, dict[str, str]]) -> str:
    """The cells of the peers in the line of an operation."""
    both: dict[str, str] = {}
    for name in names:
        both = {**found.get(name, {}), **both}
    return " | ".join(both.get(peer, "") for peer in PEERS)


def spellings(rule: Rule) -> list[str]:
    """All that the operation of a row is called."""
    return [prefix + rule.name for prefix, _ in PREFIXES]


def written_otherwise() -> list[str]:
    """A table of the peers' names that are not those of the tables above, one line each."""
    shown = {name for rule in RULES for name in spellings(rule)}
    rows: set[str] = set()
    for peer, names in PEERS.items():
        for name, does in names.items():
            label, ours = peers["find"](name)
            plain = name.replace("torch.nn.functional.", "F.").replace("nn.functional.", "F.").replace("torch.T", "T")
            overload = name.startswith("aten.") and name.split(".")[1] == label.rpartition(".")[2] and label in shown
            if not overload and plain not in shown and f"torch.{plain}" not in shown:
                rows.add(f"| `{name}` | `{label}` | {ours} | {peer}: {does} |")
    head = [
        "## Names of the peers",
        "",
        "Overloads, gradients and parts of an operation count as it; `aten.x` is not listed where x has a line above.",
        "",
    ]
    return [*head, "| name | operation | NestedTensor | peer |", "| --- | --- | --- | --- |", *sorted(rows), ""]


def render() -> str:
    """The whole page."""
    table: dict[str, dict[str, dict[str, Rule]]] = {}
    for rule in RULES:
        table.setdefault(rule.family, {}).setdefault(title(rule), {})[rule.kind] = rule
    found, lines = by_name(), [HEAD]
    for family, rows in sorted(table.items()):
        lines += [f"## {family}", "", f"| operation | {' | '.join([CLASS_NAMES[k] for k in KINDS] + list(PEERS))} |"]
        lines += ["|" + " --- |" * (1 + len(KINDS) + len(PEERS))]
        for name in sorted(rows):
            cells = " | ".join(cell(rows[name].get(kind)) for kind in KINDS)
            own = name.strip("`")
            names = [own, *spellings(next(iter(rows[name].values())))]
            lines += [f"| {name} | {cells} | {beside(names, found)} |"]
        lines += [""]
    return "\n".join(lines + other_names() + written_otherwise())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
