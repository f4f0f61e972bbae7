"""Memory of loops, branches and regions in Inductor (torch 2.11-2.15).

Inductor turns `x + 0` into `x`, so a body may return its operand, and the result of a loop is that operand. Inductor
takes it for dead behind the loop and writes other values there: gradients come out wrong, silently. Here memory of
operands and results is freed as before, but not handed on.

Inductor also forgets the memory format of a clone, and a branch may get a transposed operand. Here operands of branches
have the strides that they were traced with.

Invariant: where a name is gone, graphs with loops compile if plain Inductor gives right numbers, else they are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx import GraphModule

from tdc.compile._torch.patches import patched
from tdc.core.errors import UnsupportedError, message
from tdc.core.private import OFF, find, optional

APART: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()  # by graph: names of buffers
BRANCHES = "torch._inductor.ir:Switch", "torch._inductor.ir:Conditional"  # from 2.14, and before
MEMORY, ORDER = "memory of loops kept apart", "operands of branches in order"


@contextmanager
def memory_apart() -> Iterator[None]:
    """A context in which memory of operands and results of bodies is kept, and branches get them in traced order."""
    with unshared(), in_traced_order():
        yield


def refuse_reuse(module: GraphModule) -> None:
    """Refuse a graph with bodies where their memory cannot be kept apart, and plain Inductor gives wrong numbers."""
    if not has_bodies(module):
        return
    with unshared():
        pass
    if MEMORY in OFF and overwrites_operands():
        got = f"one in a graph of torch {torch.__version__}, which overwrites its operands"
        expected, hint = "a loop, branch or region that Inductor runs right", "do not compile this function"
        raise UnsupportedError(message("compile.backend", expected, got, hint=hint))


@optional(MEMORY, lost="loops in graphs, where torch overwrites their operands", instead=nullcontext)
def unshared() -> AbstractContextManager[Any]:
    """A context in which memory of operands and results of bodies is not handed on."""
    code, line = [find(f"torch._inductor.codegen.wrapper:{name}") for name in ("PythonWrapperCodegen", "FreeLine")]
    find("torch._inductor.virtualized:V")
    free = find("torch._inductor.codegen.wrapper:PythonWrapperCodegen.codegen_free")
    marks = [(kind, "codegen", marking(kind.codegen)) for kind in body_nodes()]
    return patched((code, "codegen_free", freeing(free, line)), *marks)


@optional(ORDER, lost="branches whose operands are transposed", instead=nullcontext)
def in_traced_order() -> AbstractContextManager[Any]:
    """A context in which operands of branches lie in memory as they were traced."""
    branch = find(*BRANCHES)
    create = find(*[f"{path}.create" for path in BRANCHES], takes=("operands",))
    for name in ("realize_input", "require_exact_strides"):
        find(f"torch._inductor.ir:ExternKernel.{name}")
    return patched((branch, "create", in_order(create)))


def body_nodes() -> tuple[Any, ...]:
    """Inductor's classes of loops, branches and regions."""
    return find("torch._inductor.ir:WhileLoop"), find(*BRANCHES), find("torch._inductor.ir:InvokeSubgraph")


def has_bodies(module: GraphModule) -> bool:
    """True if a graph has a loop, a branch or a region."""
    ops: Any = torch.ops.higher_order
    bodies = [getattr(ops, name, None) for name in ("while_loop", "scan", "cond", "invoke_subgraph")]
    parts = [part for part in module.modules() if isinstance(part, GraphModule)]
    return any([node.op == "call_function" and node.target in bodies for part in parts for node in part.graph.nodes])


@cache
def overwrites_operands() -> bool:
    """True if plain Inductor writes over the start of a loop that a body returns as it came in; compiles two graphs."""
    loop: Any = find("torch._higher_order_ops:while_loop")

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        def body(i: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return i + 1, y * 0.5, z + torch.zeros_like(z)

        begin = x.sin()
        _, y, z = loop(lambda i, y, z: i < 3, body, (torch.zeros((), dtype=torch.int64), x.cos(), begin))
        return z, begin.exp() @ y

    x = torch.linspace(0, 1, 25).view(5, 5)
    untyped: Any = torch
    found, wanted = untyped.compile(run, fullgraph=True)(x), (x.sin(), x.sin().exp() @ (x.cos() / 8))
    return not all([torch.allclose(a, b) for a, b in zip(found, wanted, strict=True)])


def marking(codegen: Callable[..., None]) -> Callable[..., None]:
    """Wrap Inductor's code of a body to mark its operands and results."""

    def mark(node: Any, *args: Any) -> None:
        graph = find("torch._inductor.virtualized:V").graph
        names = {name for x in [*node.inputs, *(node.outputs or ())] for name in memory_of(graph, x)}
        graph.never_reuse_buffers.update(names)
        APART.setdefault(graph, set()).update(names)
        codegen(node, *args)

    return mark


def memory_of(graph: Any, x: Any) -> Iterator[str]:
    """Names of a buffer and of the buffers that it is a view of."""
    name = x.maybe_get_name()
    while name is not None:
        yield name
        view = getattr(getattr(graph.try_get_buffer(name), "layout", None), "view", None)
        name = None if view is None else view.get_name()


def freeing(codegen: Callable[..., None], line: Any) -> Callable[..., None]:
    """Wrap Inductor's code that frees a buffer; a marked buffer is freed, but not handed on."""

    def free(wrapper: Any, buffer: Any) -> None:
        graph, name = find("torch._inductor.virtualized:V").graph, buffer.get_name()
        if name not in APART.get(graph, ()) or name in graph.graph_inputs:
            codegen(wrapper, buffer)
        elif name not in wrapper.freed and name not in graph.removed_buffers:
            wrapper.freed.add(name)
            wrapper.writeline(line(wrapper, buffer))

    return free


def in_order(create: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Inductor's branches: operands get the strides that they were traced with."""

    @wraps(create)  # one context may be within another: the form stays as it was
    def branches(*args: Any, **kwargs: Any) -> Any:
        given = signature(create).bind(*args, **kwargs)
        choice = next(iter(given.arguments))  # the predicate, or the index of a branch
        traced = find("torch._inductor.virtualized:V").graph.current_node.args[-1]
        realize = find("torch._inductor.ir:ExternKernel.realize_input")
        given.arguments[choice] = realize(given.arguments[choice])  # first, as Inductor does
        operands = zip(given.arguments["operands"], traced, strict=True)
        given.arguments["operands"] = [laid_out(x, node) for x, node in operands]
        return create(*given.args, **given.kwargs)

    return branches


def laid_out(x: Any, node: Any) -> Any:
    """An operand with the strides of the node that it stands for; numbers as they are."""
    ir, traced = find("torch._inductor.ir"), getattr(node, "meta", {}).get("val")
    if not isinstance(traced, torch.Tensor):
        return x
    found = ir.ExternKernel.realize_input(x)
    box = found if isinstance(found, ir.TensorBox) else ir.TensorBox(found)
    return ir.ExternKernel.require_exact_strides(box, traced.stride())
