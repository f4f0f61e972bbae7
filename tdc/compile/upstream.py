"""What is done around torch's control flow operators so that they give the right answer (torch 2.11-2.13).

Their defects, found by comparing random programs with a Python loop, are silent: a number comes out, and it is wrong.
Each has its remedy here and a test in `tests/test_upstream_loops.py` that fails on the day torch is mended.

    lost gradients        `while_loop` drops the derivative through a carry that starts without one: `anchored`
    a loop not run        its backward runs the body once even so: `ran` gives the start back, gradient and all
    memory reused         Inductor takes arguments of a loop body for buffers of its caller that it may overwrite, since
                          the subgraphs of a backward graph read the list of donated inputs of the whole graph:
                          `undonated` compiles graphs with control flow without donation
    integers that come outtheir gradient is missing, an assertion fails; the same in cond: `Code`
                          passes them as float64
    views come out        of a differentiated loop, at offsets that the next cannot take: `ran` copies

A body is traced once more outside the operator, to learn its form and what needs gradients; `probe` takes back what
that trace would assert at run time, the rest is dead code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tdc.core.errors import UnsupportedError, message

internals: Any = torch  # parts of torch without types
MARKS: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # by graph: the last nodes before probes under way


def traced() -> bool:
    """Whether torch's operators are to stand in a graph; else plain Python runs."""
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


def at_trace_time(fn: Callable[[Any], None], op: str = "") -> None:
    """Call `fn` while Dynamo traces; nothing otherwise, and nothing in the graph. It reads `op` from this frame."""
    if torch.compiler.is_dynamo_compiling():
        internals._dynamo.comptime.comptime(fn)


def entered(op: str) -> None:
    """What every operator does first where it is traced: refuse what torch cannot do, and switch donation off.

    Raises:
        UnsupportedError: under a transform of `torch.func`, which torch's operators do not take.
    """
    at_trace_time(refuse_transform, op)
    at_trace_time(undonated)


def refuse_transform(context: Any) -> None:
    """Raise where a transform of `torch.func` is active: torch fails in cond and scan, or maps the wrong dims."""
    interpreter = internals._C._functorch.peek_interpreter_stack()
    if interpreter is not None:
        got = f"{interpreter.key().name.lower()} in a compiled function"
        hint = "take gradients outside with loss.backward(), vmap inside the body, or do not compile"
        raise UnsupportedError(message(name_of(context), "no transform of torch.func around it", got, hint=hint))


def nested(op: str, ref: Tensor | None) -> None:
    """Refuse a loop in the body of a scan where gradients are needed: torch has no derivative of it.

    Raises:
        UnsupportedError: it is one.
    """
    if ref is not None:
        at_trace_time(refuse_nested, op)


def refuse_nested(context: Any) -> None:
    """Raise inside the body of a scan."""
    tracer = translator(context).output.current_tracer
    while tracer is not None:
        if "scan" in str(tracer.source_target):
            hint = "make the outer loop a tdc.while_loop, or write the inner one as a Python for"
            got = "one in the body of a scan, with gradients"
            raise UnsupportedError(message(name_of(context), "a loop outside of scan", got, hint=hint))
        tracer = tracer.parent


def undonated(context: Any) -> None:
    """Have the graph that is being traced compiled without donated buffers, by any backend.

    Its backward is compiled along with it, under a cache tag of its own: Inductor's cache on disk does not know whether
    buffers were donated, and would hand out the kernels of an equal graph for which they were.
    """
    output = translator(context).output
    compiler = output.compiler_fn
    if compiler is None or hasattr(compiler, "undonated"):
        return

    @functools.wraps(compiler)
    def compile_undonated(*args: Any, **kwargs: Any) -> Any:
        tag = torch.compiler.config.cache_key_tag  # type: ignore[attr-defined]  # made by install_config_module
        functorch = internals._functorch.config
        with (
            functorch.patch(donated_buffer=False, force_non_lazy_backward_lowering=True),
            torch.compiler.config.patch(cache_key_tag=f"{tag}undonated"),  # type: ignore[attr-defined]  # as above
        ):
            return compiler(*args, **kwargs)

    compile_undonated.undonated = True  # type: ignore[attr-defined]  # ours
    output.compiler_fn = compile_undonated


def name_of(context: Any) -> str:
    """The operator that asked."""
    return str(context.get_local("op").as_python_constant())


def translator(context: Any) -> Any:
    """Dynamo's instruction translator."""
    return context._i_will_not_complain_if_bc_breaks_InstructionTranslator()


def probe(fn: Callable[..., Any], *args: Any) -> Any:
    """What `fn` returns, traced outside the operator, without its assertions on data: it may not be meant to run."""
    at_trace_time(mark)
    out = fn(*args)
    at_trace_time(sweep)
    return out


def mark(context: Any) -> None:
    """Note where a probe begins."""
    graph = translator(context).output.graph
    MARKS.setdefault(graph, []).append(next(iter(reversed(graph.nodes)), None))


def sweep(context: Any) -> None:
    """Take the assertions since the last mark out of the graph."""
    graph = translator(context).output.graph
    begin = MARKS[graph].pop()
    for node in reversed(graph.nodes):
        if node is begin:
            break
        if node.op == "call_function" and "_assert_async" in str(node.target) and not node.users:
            graph.erase_node(node)


def needs_grad(*groups: Sequence[Tensor]) -> Tensor | None:
    """A tensor that takes part in autograd, if there is one and autograd is on."""
    if torch.is_grad_enabled():
        for group in groups:
            for x in group:
                if x.requires_grad:
                    return x
    return None


class Anchor(torch.autograd.Function):
    """A copy that takes part in autograd because `ref` does. No gradient goes to `ref`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, ref: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def anchored(x: Tensor, ref: Tensor | None) -> Tensor:
    """The start of a loop: contiguous, its own memory, and in autograd where any part of the loop is."""
    if ref is None or x.requires_grad or not (x.is_floating_point() or x.is_complex()):
        return fresh(x)
    return Anchor.apply(x, ref)  # type: ignore[no-any-return]  # untyped in torch


def fresh(x: Tensor) -> Tensor:
    """A contiguous copy: operators take neither views of their inputs as results, nor one result twice."""
    return x.clone(memory_format=torch.contiguous_format)


def ran(first: Any, end: Tensor, start: Tensor) -> Tensor:
    """The end of a loop if it ran, else its start."""
    return torch.where(first, end, start)


class Code:
    """Integers and bools as float64 on their way through an operator that is to be differentiated; exactly, and back.

    Args:
        ref: None where nothing is differentiated; then tensors pass as they are.
        like: tensors of the dtypes that pass.
    """

    __slots__ = ("dtypes",)

    def __init__(self, ref: Tensor | None, like: Sequence[Tensor]) -> None:
        exact = [ref is not None and not (x.is_floating_point() or x.is_complex()) for x in like]
        self.dtypes = [x.dtype if is_exact else None for x, is_exact in zip(like, exact, strict=True)]

    def encode(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies to pass; int64 as two halves, in front."""
        return [fresh(x) if d is None else halves(x).double() for x, d in zip(tensors, self.dtypes, strict=True)]

    def decode(self, tensors: Sequence[Tensor], dim: int = 0) -> list[Tensor]:
        """What was passed; `dim` is where the halves are now."""
        return [x if d is None else whole(x, d, dim) for x, d in zip(tensors, self.dtypes, strict=True)]


def halves(x: Tensor) -> Tensor:
    """int64 as two numbers that float64 holds exactly; other dtypes as they are."""
    return torch.stack([x >> 32, x & 0xFFFFFFFF]) if x.dtype == torch.int64 else x


def whole(x: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    """The inverse of `halves`, from float64."""
    if dtype != torch.int64:
        return x.detach().to(dtype)
    high, low = x.detach().long().unbind(dim)
    return (high << 32) | low
