"""A function as a program that can run on a batch: its control tree with code for each piece.

Which calls are calls of functions of `batch` is known when the program runs: of `self.cell` when `self` is. There is
one program for each answer.
"""

from __future__ import annotations

import ast
import linecache
import pickle
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tdc.autobatch import flow, in_block, lists, loops, lowered, values, walks
from tdc.autobatch.build import Builder
from tdc.autobatch.driver import Pieces, write
from tdc.autobatch.refused import refuse_kept
from tdc.autobatch.source import NUMBERS, Source, definition, every_argument, functions, local_names
from tdc.autobatch.syntax import dotted, load
from tdc.autobatch.tree import Block, Node, Value, blocks_of, every, given_by, show, values_of

Answers = frozenset[str]
LAYER = "()"  # after the name of a linear layer
ALONG = "_along"  # behind the name of a block, with the expression behind it


@dataclass(frozen=True)
class Program:
    """The control tree of a function."""

    source: Source
    tree: list[Node]

    @cached_property
    def nodes(self) -> list[Node]:
        """The tree with code for each piece, made when it first runs."""
        compile_pieces(self.source, self.tree)
        return self.tree

    def __str__(self) -> str:
        return "\n".join(show(self.tree))


def candidates(source: Source) -> tuple[str, ...]:
    """The names of called functions, such as `self.cell`."""
    calls = [node.func for node in source.code if isinstance(node, ast.Call)]
    return tuple(dict.fromkeys(name for f in calls if (name := dotted(f))))


def resolved(name: str, values: Mapping[str, Any]) -> Any:
    """The value of a dotted name; None of an unknown one."""
    first, *rest = name.split(".")
    found = values.get(first)
    for part in rest:
        found = getattr(found, part, None)
    return found


def free(source: Source, names: Iterable[str]) -> dict[str, Any]:
    """The globals and closure variables of a function that dotted names begin with."""
    fn = source.fn
    roots = {name.partition(".")[0] for name in names}
    out = {root: fn.__globals__[root] for root in roots if root in fn.__globals__}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        if name in roots:
            try:
                out[name] = cell.cell_contents
            except ValueError:
                continue  # not yet assigned
    return out


def build(source: Source, called: Answers) -> Program:
    """The program of a function; `called` are the names of functions of `batch` that it calls, and of linear layers."""
    names = local_names(source)
    kinds = {type(n) for n in source.code}

    def site(call: ast.Call) -> bool:
        return dotted(call.func) in called

    def product(call: ast.Call) -> bool:
        return dotted(call.func) + LAYER in called

    def filled(differing: frozenset[str]) -> tuple[list[Node], frozenset[str]]:
        tree: ast.FunctionDef = pickle.loads(pickle.dumps(source.tree))  # faster than a deepcopy
        nodes = Builder(source, names, site, product, differing).nodes(tree.body)
        flow.fill(nodes, names)
        return nodes, flow.tainted_names(source, nodes, names)

    nodes, tainted = filled(frozenset())
    if kinds & {ast.ListComp, ast.GeneratorExp}:
        nodes, tainted = filled(tainted)
    given = frozenset(arg.arg for arg in every_argument(source.tree.args))
    flow.Assigned(source, tainted).check(nodes, given, {"return": [], "break": [], "continue": []})
    if kinds & {ast.Lambda, ast.GeneratorExp}:
        refuse_kept(source, [b for n in every(nodes) for b in blocks_of(n)], tainted)
    return Program(source, nodes)


def compile_pieces(source: Source, nodes: list[Node]) -> None:
    """Give each block and each expression its code."""
    pieces: dict[str, Block | Value] = {}
    made: list[ast.FunctionDef] = []

    def define(name: str, piece: Block | Value, reads: Sequence[str], body: list[Any], out: list[ast.expr]) -> None:
        pieces[name] = piece
        made.append(definition(name, reads, [*body, ast.Return(ast.Tuple(out, ast.Load()))], piece.line))

    for node in every(nodes):
        for block in blocks_of(node):
            name = f"block_{len(pieces)}"
            outs: list[ast.expr] = [load(name) for name in block.wanted]
            define(name, block, block.reads, block.body, outs)
            if block.along is not None:
                define(name + ALONG, block, block.reads_along, block.body, [*outs, block.along.expr])
        for value in values_of(node):
            if value.name is None:
                define(f"value_{len(pieces)}", value, value.reads, [], [value.expr])
    code: dict[str, Callable[..., Any]] = dict(functions(source, made, in_block))
    for name, piece in pieces.items():
        if isinstance(piece, Block) and name.endswith(ALONG):
            piece.fn_along = code[name]
        else:
            piece.fn = code[name]


def driver_text(program: Program) -> tuple[str, Pieces]:
    """The source of the driver of a program, and the pieces that it calls."""
    nodes = [*every(program.nodes)]
    names = {name for node in nodes for name in given_by(node)}
    names |= {name for node in nodes for piece in (*blocks_of(node), *values_of(node)) for name in piece.reads}
    return write(program.nodes, [arg.arg for arg in every_argument(program.source.tree.args)], names)


def driver(program: Program) -> Callable[..., Any]:
    """The driver of a program, a closure over what it calls: Dynamo would rename globals in each of its attempts, and
    make an attempt for each captured number."""
    text, pieces = driver_text(program)
    called: dict[str, Any] = {**RUNTIME, **pieces}
    text = f"def make({', '.join(called)}):\n{textwrap.indent(text, '    ')}\n    return driver\n"
    filename = f"<tdc.batch driver of {program.source.fn.__name__} {next(NUMBERS)}>"
    linecache.cache[filename] = len(text), None, text.splitlines(True), filename
    scope: dict[str, Any] = {}
    exec(compile(text, filename, "exec"), scope)  # our own text
    made: Callable[..., Any] = scope["make"](**called)
    return made


CALLED = (
    lists.appended, loops.Rounds, loops.ahead, loops.along, loops.along_inner, loops.begun, loops.begun_again,
    loops.repeat, loops.resume, loops.waiting_in, lowered.block, lowered.check, lowered.count, lowered.decide,
    lowered.either, lowered.enter, lowered.finish, lowered.finished, lowered.guarded, lowered.joined, lowered.meet,
    lowered.read, lowered.split, lowered.union, walks.made,
)  # fmt: skip
RUNTIME: dict[str, Any] = {"UNDEFINED": values.UNDEFINED, **{fn.__name__: fn for fn in CALLED}}
