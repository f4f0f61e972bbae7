"""Writes docs/support.md: one table for each family of operations, from the rows of `tdc.ops.RULES`.

python docs/make_support.py
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from tdc._rules import CLASS_NAMES, KINDS, MODES
from tdc.ops import RULES, Rule
from tdc.ops.alias import ALIASES

PAGE = Path(__file__).with_name("support.md")
PREFIXES = (
    ("torch.", torch), ("F.", F), ("Tensor.", torch.Tensor), ("torch.linalg.", torch.linalg),
    ("torch.special.", torch.special),
)  # fmt: skip
HEAD = """\
# Support

Each line is one operation, each cell one row of the rule table: an operation and the container it is for. `F` is
`torch.nn.functional`. Every supported row is tested in the modes eager, compile, vmap, grad and export. An empty cell
has no row: the call raises [UnsupportedError](errors.md#unsupportederror). How rows are added: [rules](rules.md).

Reading, indexing, `to`, `unbind` of ragged batches and conversions are methods of the containers and not listed here.
Limits within a row, such as several ragged dims, are on the pages of the containers.

`python docs/make_support.py` generates this page; a test fails when it is out of date.
"""


def title(rule: Rule) -> str:
    """The operation as users write it: `torch.relu`, or `F.relu` where it lies there only."""
    found = [prefix for prefix, module in PREFIXES if getattr(module, rule.name, None) is rule.op]
    return f"`{found[0] if found else ''}{rule.name}`"


def cell(rule: Rule | None) -> str:
    """What one container does with the operation."""
    if rule is None:
        return ""
    if rule.reason:
        return f"no: {rule.reason}"
    lacking = [mode for mode in MODES if mode not in rule.modes]
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


def render() -> str:
    """The whole page."""
    table: dict[str, dict[str, dict[str, Rule]]] = {}
    for rule in RULES:
        table.setdefault(rule.family, {}).setdefault(title(rule), {})[rule.kind] = rule
    lines = [HEAD]
    for family, rows in sorted(table.items()):
        lines += [f"## {family}", "", f"| operation | {' | '.join(CLASS_NAMES[kind] for kind in KINDS)} |"]
        lines += ["|" + " --- |" * (1 + len(KINDS))]
        lines += [f"| {name} | {' | '.join(cell(rows[name].get(kind)) for kind in KINDS)} |" for name in sorted(rows)]
        lines += [""]
    return "\n".join(lines + other_names())


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
