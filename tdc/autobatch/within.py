"""The nodes of the body of a `with`: each block enters it for itself, and so do the values that other nodes need.

with torch.no_grad():           with torch.no_grad():
    y = x * 2                       y = x * 2
    out.append(y + 1)               __v1 = y + 1
    y = y * 3                   append __v1 to out
                                with torch.no_grad():
                                    y = y * 3
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from tdc.autobatch.refused import refusal
from tdc.autobatch.source import Source, located
from tdc.autobatch.syntax import load, store
from tdc.autobatch.tree import INDENT, Append, Assert, Block, Call, If, Node, Value

SEVERAL, OUTSIDE = "a block with several ways through it", "put the control flow outside"


class Entered:
    """Puts nodes into a `with`.

    Args:
        source: of the function.
        stmt: the statement, its items as a block has them.
        head: its first line.
        temporary: makes a name.
    """

    def __init__(self, source: Source, stmt: ast.With, head: str, temporary: Callable[[], str]) -> None:
        self.source, self.stmt, self.head, self.temporary = source, stmt, head, temporary

    def nodes(self, body: list[Node]) -> list[Node]:
        """The nodes of its body as nodes that enter it.

        Raises:
            UnsupportedError: a loop, or a call of another function of `batch`.
        """
        out: list[Node] = []
        inside: list[Block] = []
        for node in body:
            if isinstance(node, Block):
                inside.append(node)
            elif isinstance(node, Append):
                out.append(Append(node.name, self.named(node.value, inside, out), node.line))
            elif isinstance(node, Assert):
                out.append(Assert(self.named(node.test, inside, out), node.text, node.line))
            elif isinstance(node, If):
                test = self.named(node.test, inside, out)
                out.append(If(test, self.nodes(node.then), self.nodes(node.orelse), node.line))
            else:
                text = "a call of a function of tdc.batch" if isinstance(node, Call) else SEVERAL
                raise refusal(self.source, self.stmt, f"{text} in `with`", OUTSIDE)
        self.close(inside, out)
        return out

    def named(self, value: Value, inside: list[Block], out: list[Node]) -> Value:
        """A value that is computed inside, and read behind it."""
        name = self.temporary()
        assign = located(ast.Assign([store(name)], value.expr), value.expr)
        self.close([*inside, Block([assign], value.line, [f"{name} = {value.text}"])], out)
        inside.clear()
        return Value(located(load(name), value.expr), value.line, name)

    def close(self, inside: list[Block], out: list[Node]) -> None:
        """Add blocks as one that enters it."""
        if inside:
            body, text = [s for block in inside for s in block.body], [t for block in inside for t in block.text]
            whole = located(ast.With(self.stmt.items, body), self.stmt)
            out.append(Block([whole], self.stmt.lineno, [self.head, *[INDENT + t for t in text]]))
