"""What the nodes of a control tree read and write, as `driver` and its loops have to know."""

from __future__ import annotations

from collections.abc import Iterable

from tdc.autobatch.flow import blocks_of, every, reads
from tdc.autobatch.tree import ITEM, Append, Block, Call, Exit, For, Node, While
from tdc.autobatch.tree import Names as NameSet


def variables(names: Iterable[str]) -> str:
    """A tuple of variables, as a value or as a target."""
    return "(" + "".join([f"v_{name}, " for name in names]).rstrip() + ")"


def some(names: Iterable[str], wanted: NameSet) -> str:
    """A tuple of variables, without value where nobody wants it."""
    return "(" + "".join([f"v_{name}, " if name in wanted else "UNDEFINED, " for name in names]).rstrip() + ")"


def written(nodes: list[Node]) -> set[str]:
    """The names that nodes give values."""
    out: set[str] = set()
    for node in every(nodes):
        if isinstance(node, Block):
            out |= {*node.writes}
        elif isinstance(node, For):
            out |= {*node.assign.writes}
        elif isinstance(node, (Call, Append)):
            out.add(node.target if isinstance(node, Call) else node.name)
    return out


def read_in(nodes: list[Node]) -> NameSet:
    """The names that nodes read."""
    inside = [*nodes, *[n for node in nodes if isinstance(node, While) for n in node.pre]]
    blocks = frozenset(name for n in every(inside) for block in blocks_of(n) for name in block.reads)
    appended = frozenset(n.name for n in every(inside) if isinstance(n, Append))
    return blocks.union(appended, *[reads(n) for n in every(inside)]) - {ITEM}


def loops_in(node: While | For) -> list[While | For]:
    """The loops in the body of a loop."""
    inside = [*node.body, *(node.pre if isinstance(node, While) else [])]
    return [n for n in every(inside) if isinstance(n, (While, For))]


def needed(node: While | For) -> NameSet:
    """The names that somebody reads who is in a loop, or behind it."""
    found = frozenset().union(*[n.live_head | n.live | n.live_else | reads_of(n) for n in (node, *loops_in(node))])
    return found - {ITEM}


def reads_of(node: While | For) -> NameSet:
    """The names that a test reads, and so must be there at the end of a round."""
    return frozenset(node.test.reads) if isinstance(node, While) else frozenset()


def simple(node: For) -> bool:
    """Whether all who have an item run the body to its end, with no loops inside but walks without loops of their own:
    then `scan` can run it, unless examples wait in a walk."""
    inner = loops_in(node)
    exits = [n for n in every(node.body) if isinstance(n, Exit)]
    return all(n.kind == "continue" for n in exits) and all(
        isinstance(n, For) and not loops_in(n) and not n.orelse for n in inner
    )


def even_lists(node: While | For) -> tuple[str, ...]:
    """The names of lists to which each round of a `for` appends as many items for all."""
    inside = list(every(node.body))
    if isinstance(node, While) or any(isinstance(n, Exit) for n in inside):
        return ()
    always = [n.name for n in node.body if isinstance(n, Append)]
    blocks = {name for n in inside for block in blocks_of(n) for name in block.writes} | {*node.assign.writes}
    called = {n.target for n in inside if isinstance(n, Call)}
    some = {n.name for n in inside if isinstance(n, Append) and n not in node.body}
    return tuple([name for name in dict.fromkeys(always) if name not in blocks | called | some])
