"""A function as a program that can be run on a batch: its control tree with code for each piece.

Which calls are calls of functions of `batch` is known when the program is run: of `self.cell` when `self` is. There is
one program for each answer.
"""

from __future__ import annotations

import ast
import linecache
import pickle
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tdc.autobatch import ahead, flow, in_block, lists, loops, lowered, rounds, values
from tdc.autobatch.build import Builder
from tdc.autobatch.driver import Pieces, write
from tdc.autobatch.refused import refuse_kept
from tdc.autobatch.source import NUMBERS, Source, definition, every_argument, functions, local_names
from tdc.autobatch.syntax import dotted, load
from tdc.autobatch.tree import Append, Block, Node, Value, show

Answers = frozenset[str]
LAYER = "()"  # behind the name of a linear layer
ALONG = "_along"  # behind the name of a block, with the expression behind it


@dataclass(frozen=True)
class Program:
    """A control tree that can be run.

    Attributes:
        source: of the function.
        tree: its nodes.
    """

    source: Source
    tree: list[Node]

    @cached_property
    def nodes(self) -> list[Node]:
        """The tree with code for each piece, made when it is first run: many a function is only decorated."""
        compile_pieces(self.source, self.tree)
        return self.tree

    def __str__(self) -> str:
        return "\n".join(show(self.tree))


def candidates(source: Source) -> tuple[str, ...]:
    """The functions that are called, by name or as attributes of a name, such as `self.cell`."""
    calls = [node.func for node in source.code if isinstance(node, ast.Call)]
    return tuple(dict.fromkeys(name for f in calls if (name := dotted(f))))


def resolved(name: str, values: Mapping[str, Any]) -> Any:
    """What a dotted name stands for; None where nothing does."""
    first, *rest = name.split(".")
    found = values.get(first)
    for part in rest:
        found = getattr(found, part, None)
    return found


def free(source: Source, names: Iterable[str]) -> dict[str, Any]:
    """What the globals and the closure of a function have for the beginnings of dotted names."""
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

    def site(call: ast.Call) -> bool:
        return dotted(call.func) in called

    def product(call: ast.Call) -> bool:
        return dotted(call.func) + LAYER in called

    nodes = Builder(source, names, site, product).nodes(copied(source).body)
    flow.fill(nodes, names)
    given = frozenset(arg.arg for arg in every_argument(source.tree.args))
    tainted = flow.tainted_names(source, nodes, names)
    kinds = {type(n) for n in source.code}
    if kinds & {ast.ListComp, ast.GeneratorExp}:
        nodes = Builder(source, names, site, product, tainted).nodes(copied(source).body)
        flow.fill(nodes, names)
        tainted = flow.tainted_names(source, nodes, names)
    flow.Assigned(source, tainted).check(nodes, given, {"return": [], "break": [], "continue": []})
    if kinds & {ast.Lambda, ast.GeneratorExp}:
        refuse_kept(source, [b for n in flow.every(nodes) for b in flow.blocks_of(n)], tainted)
    return Program(source, nodes)


def copied(source: Source) -> ast.FunctionDef:
    """The syntax tree of a function, to be rewritten."""
    tree: ast.FunctionDef = pickle.loads(pickle.dumps(source.tree))  # a third of the time of a deepcopy
    return tree


def compile_pieces(source: Source, nodes: list[Node]) -> None:
    """Give each block and each expression its code."""
    pieces: dict[str, Block | Value] = {}
    made: list[ast.FunctionDef] = []
    for node in flow.every(nodes):
        for block in flow.blocks_of(node):
            name = f"block_{len(pieces)}"
            outs: list[ast.expr] = [load(name) for name in block.wanted]
            body = [*block.body, ast.Return(ast.Tuple(outs, ast.Load()))]
            pieces[name] = block
            made.append(definition(name, block.reads, body, block.line))
            if block.along is not None:
                outs = [*outs, block.along.expr]
                both = [*block.body, ast.Return(ast.Tuple(outs, ast.Load()))]
                made.append(definition(name + ALONG, block.reads_along, both, block.line))
        for value in flow.values_of(node):
            if value.name is None:
                name = f"value_{len(pieces)}"
                pieces[name] = value
                result = ast.Return(ast.Tuple([value.expr], ast.Load()))
                made.append(definition(name, value.reads, [result], value.line))
    code: dict[str, Callable[..., Any]] = dict(functions(source, made, in_block))
    for name, piece in pieces.items():
        piece.fn = code[name]
        if isinstance(piece, Block):
            piece.fn_along = code.get(name + ALONG)


def driver_text(program: Program) -> tuple[str, Pieces]:
    """The source of the driver of a program, and the pieces that it calls."""
    arguments = [arg.arg for arg in every_argument(program.source.tree.args)]
    names = {name for node in flow.every(program.nodes) for name in names_of(node)}
    return write(program.nodes, arguments, names)


def driver(program: Program) -> Callable[..., Any]:
    """The driver of a program, a closure over what it calls.

    As its globals, Dynamo would name them anew in each of its attempts, and take an attempt for each captured number.
    """
    text, pieces = driver_text(program)
    called: dict[str, Any] = {**RUNTIME, **pieces}
    text = f"def make({', '.join(called)}):\n{textwrap.indent(text, '    ')}\n    return driver\n"
    filename = f"<tdc.batch driver of {program.source.fn.__name__} {next(NUMBERS)}>"
    linecache.cache[filename] = len(text), None, text.splitlines(True), filename
    scope: dict[str, Any] = {}
    exec(compile(text, filename, "exec"), scope)  # text of ours
    made: Callable[..., Any] = scope["make"](**called)
    return made


def names_of(node: Node) -> list[str]:
    """The names that one node reads or writes."""
    blocks = [name for block in flow.blocks_of(node) for name in (*block.reads, *block.writes)]
    target = getattr(node, "target", None) or (node.name if isinstance(node, Append) else None)
    return [*blocks, *[name for value in flow.values_of(node) for name in value.reads], *([target] if target else [])]


CALLED = (
    ahead.made, lists.appended, loops.Loop, loops.ahead, loops.along, loops.along_inner, loops.begun, loops.begun_again,
    loops.repeat, loops.resume, loops.waiting_in, lowered.block, lowered.check, lowered.count, lowered.decide,
    lowered.either, lowered.enter, lowered.finished, lowered.guarded, lowered.joined, lowered.meet, lowered.read,
    lowered.split, lowered.union, rounds.finish,
)  # fmt: skip
RUNTIME: dict[str, Any] = {"UNDEFINED": values.UNDEFINED, **{fn.__name__: fn for fn in CALLED}}
