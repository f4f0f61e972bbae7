"""Words that docstrings, comments and messages of tdc avoid, and what to write instead.

A docstring begins with an imperative verb or a noun phrase. The words of the field stand in place of private ones.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

from .tree import Module, Tree

OPENINGS = {
    "Whether": "'True if ...' or an imperative verb",
    "What": "a noun phrase or an imperative verb",
}
WORDS = {  # patterns, and what to write instead
    r"(?:that )?nobody|somebody|everybody": "the thing itself: 'unused', 'not read', 'the caller'",
    r"(?:those|they|the first|the one) who": "the examples, tensors or functions meant",
    r"(?:(?:has|have|with|without) )?(?:a|no|its|their) directions?": "a forward-mode tangent",
    r"members? of (?:a|the|all) (?:vmap|batch)": "a vmap entry, an example",
}
FORBIDDEN = re.compile("|".join([rf"\b(?P<w{i}>{word})\b" for i, word in enumerate(WORDS)]), re.IGNORECASE)


def check_language(tree: Tree) -> list[str]:
    """No docstring begins with an avoided word, and no text has one inside."""
    problems = []
    for module in tree.modules.values():
        for line, text, is_docstring in texts(module):
            first = text.split(maxsplit=1)[0] if text.strip() else ""
            if is_docstring and first in OPENINGS:
                problems.append(f"{module.path}:{line}: begins with '{first}': write {OPENINGS[first]}")
            for match in FORBIDDEN.finditer(text):
                instead = [*WORDS.values()][int(str(match.lastgroup)[1:])]
                at = line + text.count("\n", 0, match.start())
                problems.append(f"{module.path}:{at}: '{match.group()}': write {instead}")
    return problems


def texts(module: Module) -> Iterator[tuple[int, str, bool]]:
    """Docstrings, other strings of several words, and comments of a module: line, text, and True for a docstring."""
    docstrings = set[int]()
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr):
                docstrings.add(id(first.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value, id(node) in docstrings
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string, False
