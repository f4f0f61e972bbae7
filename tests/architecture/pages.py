"""How long pages of docs/ may be: what is read at once has 900 words at most."""

from __future__ import annotations

import re

from .tree import Tree

MAX_WORDS = 900
GENERATED = tuple(f"docs/{name}.md" for name in ("architecture", "architectures_hf", "migration", "support", "syncs"))
NOT_PROSE = re.compile(r"^```.*?^```$|^ {4}[^\n]*$|^\|[^\n]*$|<!--.*?-->", re.MULTILINE | re.DOTALL)


def check_pages(tree: Tree) -> list[str]:
    """No page that is written by hand has more than 900 words, code and tables left out."""
    problems = []
    for path in sorted((tree.root / "docs").rglob("*.md")):
        name = path.relative_to(tree.root).as_posix()
        words = len(NOT_PROSE.sub("", path.read_text(encoding="utf-8")).split())
        if words > MAX_WORDS and name not in GENERATED and not name.startswith("docs/reference/"):
            problems.append(f"{name}: {words} words, {MAX_WORDS} at most: part it into pages of one audience each")
    return problems
