"""The graph that Dynamo is tracing: its loops, how it is compiled, what is taken out again (torch 2.11-2.15).

By `comptime`, which calls a function with Dynamo's own objects while Dynamo traces, and leaves nothing in the graph.
Eagerly, and in `torch.export`, it does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch.overrides import TorchFunctionMode

from tdc.compile._torch.autograd import retrace
from tdc.compile._torch.bodies import memory_apart, refuse_reuse
from tdc.compile._torch.dynamo import current_tracer, has_comptime
from tdc.compile._torch.inductor import apart_in_caches
from tdc.compile._torch.remat import drawn_once
from tdc.compile._torch.symbolic import setting
from tdc.core.dynamo import constant, interpreter_stack
from tdc.core.errors import UnsupportedError, message, refusing
from tdc.core.private import find, find_or, optional

X = TypeVar("X")
internals: Any = torch  # parts of torch without types
WHILE_LOOP: Any = find_or(
    None, "torch._higher_order_ops.while_loop:while_loop_op", feature="loops traced fast", lost="time to trace a loop"
)
OUTSIDE = "traced outside of an operator"  # marks nodes
BEGINNINGS: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # by graph: nodes that `trace_outside` began at

WRITERS: WeakKeyDictionary[Any, list[bool]] = WeakKeyDictionary()  # by tracer: what was allowed before
ANSWERS: list[bool] = []  # to the question that `asked` is about to answer


def at_trace_time(fn: Callable[[Any], None], op: str = "") -> None:
    """Call `fn` while Dynamo traces; a no-op otherwise. `name_of` reads the local `op`."""
    if torch.compiler.is_dynamo_compiling() and has_comptime():
        internals._dynamo.comptime.comptime(fn)


def name_of(context: Any) -> str:
    """Operator that `at_trace_time` was called for."""
    return str(context.get_local("op").as_python_constant())


def translator(context: Any) -> Any:
    """Dynamo's instruction translator."""
    return context._i_will_not_complain_if_bc_breaks_InstructionTranslator()


def asked(question: Callable[[list[Any]], bool], tensors: list[Any]) -> bool:
    """Answer a question about tensors while Dynamo traces, without a guard for each. `answer` reads the local names."""
    if not has_comptime():
        return False
    internals._dynamo.comptime.comptime(answer)
    return answered()


def answer(context: Any) -> None:
    """Answer the question for tensors of the graph, which have dtype, device and shape, but no numbers."""
    names = translator(context).symbolic_locals
    tensors = [x.realize().as_proxy().node.meta["example_value"] for x in names["tensors"].items]
    ANSWERS.append(names["question"].get_function()(tensors))


@constant
def answered() -> bool:
    """Pop the answer."""
    return ANSWERS.pop()


def loop_operator(name: str) -> Callable[..., Any]:
    """Look up torch's "while_loop", "scan", "associative_scan" or "map", on tuples of tensors."""
    return getattr(internals._higher_order_ops, name)


def while_operator(condition: Callable[..., Any], step: Callable[..., Any], start: tuple[Any, ...]) -> Any:
    """Run torch's "while_loop" of tensors, without the pytrees around it, which take long to trace (torch 2.13)."""
    if WHILE_LOOP is not None and torch.compiler.is_dynamo_compiling():
        return WHILE_LOOP(condition, step, start, ())
    return loop_operator("while_loop")(condition, step, start)


@constant
@optional("gradients of scans told apart", lost="a copy in gradients of scans", instead=lambda: False)
def scan_copies_gradients() -> bool:
    """True if the backward of "scan" copies gradients that it would return as they came in, as in torch 2.13."""
    return hasattr(find("torch._higher_order_ops.scan:ScanAutogradImpl"), "_break_bw_input_output_aliasing")


def innermost_transform() -> str | None:
    """Name of the innermost transform of `torch.func`, such as "grad"; None without one."""
    stack = interpreter_stack()
    return stack[-1].key().name.lower() if stack else None


def before_operator(op: str) -> None:
    """Prepare the trace of an operator: refuse unsupported uses, and switch donation off."""
    if torch.compiler.is_dynamo_compiling() and not has_comptime():
        got = "a torch whose Dynamo calls nothing while it traces"
        raise UnsupportedError(message(op, "an eager call", got, hint="python -m tdc doctor says what is off"))
    at_trace_time(refuse_transform, op)
    at_trace_time(switch_donation_off)


def refuse_transform(context: Any) -> None:
    """Raise under a transform of `torch.func`, where torch fails or maps wrong dims; retrace a gradient of ours."""
    transform = innermost_transform()
    if transform is not None:
        retrace(context)
        got = f"{transform} in a compiled function"
        hint = "tdc.grad in torch.no_grad(), or loss.backward() outside; vmap inside the body; or do not compile"
        raise UnsupportedError(message(name_of(context), "no transform of torch.func around it", got, hint=hint))


def refuse_in_scan(op: str, ref: Any) -> None:
    """Refuse a loop in the body of a scan where `ref`, a tensor that requires grad, is given: torch has no gradient."""
    if ref is not None:
        at_trace_time(refuse_tracer_of_scan, op)


def refuse_tracer_of_scan(context: Any) -> None:
    """Raise where Dynamo traces the body of a scan, at any depth."""
    if is_scan(translator(context).output.current_tracer):
        hint = "make the outer loop a tdc.while_loop, or write the inner one as a Python for"
        got = "one in the body of a scan, with gradients"
        raise UnsupportedError(message(name_of(context), "a loop outside of scan", got, hint=hint))


def is_scan(tracer: Any) -> bool:
    """True if an operator whose body Dynamo traces, or one around it, is a scan."""
    while tracer is not None:
        if "scan" in str(tracer.source_target):
            return True
        tracer = tracer.parent
    return False


@constant
def in_body_of_scan() -> bool:
    """True in the trace of the body of a scan."""
    return is_scan(current_tracer())


@constant
def in_body() -> bool:
    """True in the trace of a body of an operator, such as a loop."""
    return getattr(current_tracer(), "parent", None) is not None


def compile_through(context: Any, around: Callable[..., Any]) -> None:
    """Compile the graph that is being traced by `around(compiler, graph, *args, **kwargs)`, once."""
    output = translator(context).output
    compiler = output.compiler_fn
    if compiler is None or around in getattr(compiler, "through", ()):
        return

    @functools.wraps(compiler)
    def compile_around(graph: Any, *args: Any, **kwargs: Any) -> Any:
        return around(compiler, graph, *args, **kwargs)

    compile_around.through = (*getattr(compiler, "through", ()), around)  # type: ignore[attr-defined]  # ours
    output.compiler_fn = compile_around


def switch_donation_off(context: Any) -> None:
    """Have the graph that is being traced compiled without donated buffers, and the memory of operands of loops apart.

    Its backward is compiled along with it, under a cache tag of its own: Inductor's cache on disk does not know whether
    buffers were donated, and would hand out the kernels of an equal graph for which they were.
    """
    compile_through(context, without_donation)


def without_donation(compiler: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile a graph without donated buffers, and without what `trace_outside` left."""
    remove_traces(graph)
    refuse_reuse(graph)
    apart = different_zeros() if has_branch_in_scan(graph) else nullcontext()
    with undonated(), apart, memory_apart(), apart_in_caches("undonated"):
        return compiler(graph, *args, **kwargs)


@optional("donated buffers off", lost="gradients of loops in graphs", instead=refusing("gradients of loops in graphs"))
def undonated() -> Any:
    """A context in which torch donates no buffers, and compiles a backward at once."""
    return setting("torch._functorch.config", donated_buffer=False, force_non_lazy_backward_lowering=True)


@optional("zeros of one shape kept apart", lost="gradients of a branch in a scan", instead=nullcontext)
def different_zeros() -> Any:
    """A context in which torch makes no one node of equal ones."""
    return setting("torch._functorch.config", cse=False)


def has_branch_in_scan(graph: Any) -> bool:
    """True if the body of a scan has a `cond`, which refuses the equal zeros that torch merges into one (2.13)."""
    bodies: list[Any] = []
    for part in graph.modules():
        scans = [node for node in nodes_of(part) if node.target is torch.ops.higher_order.scan]
        bodies += [body for scan in scans for body in getattr(part, scan.args[0].target).modules()]
    return any([node.target is torch.ops.higher_order.cond for body in bodies for node in nodes_of(body)])


def nodes_of(part: Any) -> list[Any]:
    """Nodes of a graph module; none of another module."""
    graph = getattr(part, "graph", None)
    return [] if graph is None else list(graph.nodes)


def keep_activations(context: Any) -> None:
    """Have the graph that is being traced compiled without computing checkpointed parts again: of several backward
    passes in one graph torch refuses it."""
    compile_through(context, keeping)


def keeping(compiler: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile a graph in which everything is kept."""
    with not_again(), apart_in_caches("kept"):
        return compiler(graph, *args, **kwargs)


@optional("checkpoints of micro-batches", lost="checkpoints of micro-batches", instead=nullcontext)
def not_again() -> Any:
    """A context in which nothing is computed again."""
    return setting("torch._functorch.config", remat_using_tags_for_fwd_loss_bwd_graph=False)


def keep_under_way(context: Any) -> None:
    """Have the graph that is being traced compiled with exchanges that go on while it computes. Inductor waits for each
    at once where it orders operations for the least memory (torch 2.13)."""
    compile_through(context, in_order)


def in_order(compiler: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile a graph whose operations stay in the order of the least distance."""
    with as_ordered():
        return compiler(graph, *args, **kwargs)


@optional("exchanges behind computation", lost="exchanges while the backward of a step goes on", instead=nullcontext)
def as_ordered() -> Any:
    """A context in which Inductor does not order operations for the least memory."""
    return setting("torch._inductor.config", reorder_for_peak_memory=False)


def mark_backward(context: Any) -> None:
    """Have the derivatives of our own functions in the graph that is being traced known as parts of its backward pass:
    torch finds that in several pieces otherwise, and refuses to compute checkpointed parts again (2.13)."""
    compile_through(context, with_backward_marked)


def with_backward_marked(compiler: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile a graph in which each node of such a derivative is marked as autograd's own are."""
    for part in graph.modules():
        for node in nodes_of(part):
            if node.op == "call_function" and getattr(node.target, "__name__", "") == "autograd_function_apply":
                for inner in getattr(part, node.args[1].target).graph.nodes:
                    inner.meta["autograd_backward"] = True
    with drawn_once():
        return compiler(graph, *args, **kwargs)


def allow_writes(context: Any) -> None:
    """Allow writes into objects outside the body of an operator, up to `refuse_writes`; they must be undone in it."""
    tracer = translator(context).output.current_tracer
    WRITERS.setdefault(tracer, []).append(tracer.unsafe_allow_externally_visible_side_effects)
    tracer.unsafe_allow_externally_visible_side_effects = True


def refuse_writes(context: Any) -> None:
    """Restore what was allowed before `allow_writes`."""
    tracer = translator(context).output.current_tracer
    tracer.unsafe_allow_externally_visible_side_effects = WRITERS[tracer].pop()


def trace_outside(fn: Callable[..., X], *args: Any) -> X:
    """Trace `fn` outside the operator, without its assertions on data, since it may not be meant to run."""
    at_trace_time(note_beginning)
    exports = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    with WithoutAssertions() if exports else nullcontext():
        out = fn(*args)
    at_trace_time(remove_assertions)
    return out


class WithoutAssertions(TorchFunctionMode):
    """Drop assertions on data in `torch.export`, where `comptime` does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """All else as it is."""
        return None if "_assert_async" in str(func) else func(*args, **(kwargs or {}))


def is_assertion(name: str) -> bool:
    """True if an operator of this name is an assertion on data."""
    return "_assert_async" in name or name.startswith("tdc.require")


def note_beginning(context: Any) -> None:
    """Note where a trace outside an operator begins."""
    graph = translator(context).output.graph
    BEGINNINGS.setdefault(graph, []).append(next(iter(reversed(graph.nodes)), None))


def remove_assertions(context: Any) -> None:
    """Erase the assertions since the last `note_beginning`, and mark all other nodes as removable."""
    graph = translator(context).output.graph
    begin = BEGINNINGS[graph].pop()
    for node in reversed(graph.nodes):
        if node is begin:
            break
        if node.op == "call_function" and is_assertion(str(node.target)) and not node.users:
            graph.erase_node(node)
        else:
            node.meta[OUTSIDE] = True


def remove_traces(module: Any) -> None:
    """Erase what `trace_outside` left and nothing uses, for compilers that run a graph as it is."""
    for part in module.modules():
        graph: Any = getattr(part, "graph", None)
        if graph is None:
            continue
        for node in reversed(graph.nodes):
            keeps_order = node.op == "call_function" and "nesting" in getattr(node.target, "__name__", "")
            if OUTSIDE in node.meta and not node.users and not keeps_order and node.op.startswith("call"):
                graph.erase_node(node)
        part.recompile()
