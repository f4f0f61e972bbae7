"""Dynamo: backends by name, counts, marks of sizes, and what torch.compile says of itself (torch 2.11-2.15).

Graph breaks, causes of recompiles, guards and generated code are read from torch's structured trace, the stream that
`TORCH_TRACE` writes to a file.

    with listening() as events:
        torch.compile(fn)(x)
    [e.text for e in events if e.name == "recompile_reasons"]
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from tdc.compile._torch.symbolic import setting
from tdc.core import errors
from tdc.core.dynamo import constant
from tdc.core.private import find, nothing, optional

COMPTIME = "calls while Dynamo traces"
WITHOUT = "tdc.cond, loops and tdc.batch in graphs; memory of checkpoints in steps"
RAISED = re.compile(r"""raised exception (\w+)\(.*?((['"])tdc\..*\3)""")  # by a trace, with a text of ours
BUILTINS = "G['__builtins_dict__"  # how Dynamo names them,
OWN = re.compile(r"G\['__import_tdc_dot_|(dict\()?type\(")  # globals of a module of tdc, and attributes of a class
CompileId = tuple[int, int]  # which frame, and which compile of that frame
NO_COMPILE: CompileId = (-1, 0)


def named_backend(name: Any) -> Callable[..., Any] | None:
    """A backend of `torch.compile` by its name; None where there is none."""
    if name not in torch.compiler.list_backends(exclude_tags=()):
        return None
    look_up = find("torch._dynamo:lookup_backend", "torch._dynamo.backends.registry:lookup_backend")
    found: Callable[..., Any] = look_up(name)
    return found


@optional("graph breaks counted", lost="counts.breaks", instead=lambda: 0)
def graph_breaks() -> int:
    """Graph breaks in this process so far."""
    return sum(find("torch._dynamo.utils:counters")["graph_break"].values())


@optional("compiles told apart", lost="counts of recompiles", instead=lambda: NO_COMPILE)
def current_compile() -> CompileId:
    """The compile that is under way, asked by a backend."""
    found = find("torch._guards:CompileContext.current_compile_id")()
    return NO_COMPILE if found is None or found.frame_id is None else (found.frame_id, found.frame_compile_id)


@optional("limit of graphs of one function", lost="a warning before it", instead=lambda: 0)
def most_compiles() -> int:
    """Number of graphs that torch.compile keeps for one code object."""
    found: int = find("torch._dynamo.config:recompile_limit")
    return found


def raised_by_trace(error: Exception) -> errors.TdcError | None:
    """Error of this library that stopped a trace, of which torch keeps name and text; None for another."""
    found = RAISED.search(str(error))
    kind = getattr(errors, found[1], None) if found else None
    return kind(ast.literal_eval(found[2])) if found and kind else None


def that_may_change(entries: Sequence[Any]) -> list[bool]:
    """Guards to keep, as `guard_filter_fn` of `torch.compile`: all but those on the code of this library and of Python.

    Dynamo guards on the code of each function that it traces. Builtins, modules of tdc, and their functions and
    classes, stay what they are; values among their globals, and what these modules have of torch, are checked, as is
    the class of each object. So is a function that is handed over, be it one of this library.
    """
    return [not (entry.name.startswith(BUILTINS) or named_by_code(entry)) for entry in entries]


def named_by_code(entry: Any) -> bool:
    """True for code of this library, or the default of an argument, that a module of it or a class names."""
    return OWN.match(entry.name) is not None and ("defaults__" in entry.name or is_own_code(entry.value))


def is_own_code(x: Any) -> bool:
    """True for a module, a function or a class of this library."""
    name = x.__name__ if isinstance(x, ModuleType) else x.__module__ if isinstance(x, (FunctionType, type)) else ""
    return (name or "").partition(".")[0] == "tdc"  # a function made by exec has no module


@constant
@optional(COMPTIME, lost=WITHOUT, instead=lambda: False)
def has_comptime() -> bool:
    """True if a function can be called while Dynamo traces."""
    find("torch._dynamo.comptime:ComptimeContext._i_will_not_complain_if_bc_breaks_InstructionTranslator")
    return bool(find("torch._dynamo.comptime:comptime"))


@optional(COMPTIME, lost=WITHOUT, instead=nothing)
def current_tracer() -> Any:
    """Dynamo's tracer of the operator whose body is traced; None where there is none."""
    return find("torch._dynamo.symbolic_convert:InstructionTranslator.current_tx")().output.current_tracer


def mark_bounds(x: Tensor, dim: int, low: int, high: int) -> None:
    """Tell torch.compile that a size varies between two bounds; a function that specialises it is an error."""
    find("torch._dynamo:mark_dynamic")(x, dim, min=low, max=high)


def mark_static(x: Tensor) -> Tensor:
    """Mark the sizes of a tensor as static, one graph for each; return the tensor.

    The mark of `torch._dynamo.mark_static`, without importing Dynamo, in place of `mark_dynamic`.
    """
    marks: Any = x
    marks._dynamo_weak_dynamic_indices = set()
    marks._dynamo_static_indices = set(range(x.ndim))
    return x


# -- messages


@dataclass(frozen=True, slots=True)
class Event:
    """One message of the trace: what it is, the compile it belongs to, and its text."""

    name: str
    id: CompileId
    text: str


class Listener(logging.Handler):
    """Keeps the messages of the trace that belong to a compile."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message."""
        metadata: dict[str, Any] = getattr(record, "metadata", {})
        payload = getattr(record, "payload", None)
        if metadata.get("frame_id") is None:
            return
        name = metadata["artifact"]["name"] if "artifact" in metadata else next(iter(metadata))
        self.events.append(Event(name, (metadata["frame_id"], metadata["frame_compile_id"]), str(payload or "")))


@contextmanager
def listening() -> Iterator[list[Event]]:
    """A context with the events of compiles, all past the caches."""
    listener = Listener()
    with ExitStack() as stack:
        stack.enter_context(uncached())
        stack.enter_context(handled(logging.getLogger("torch.__trace"), listener, logging.DEBUG))
        # Inductor counts the bytes that kernels touch only for a log with a handler
        metrics = logging.getLogger("torch._inductor.compile_fx.__inductor_metrics")
        stack.enter_context(handled(metrics, logging.NullHandler(), logging.INFO))
        yield listener.events


@optional("caches off for a report", lost="reports of graphs that a cache holds", instead=nullcontext)
def uncached() -> ExitStack:
    """A context in which everything is compiled anew, and kernels say of which lines they are."""
    with ExitStack() as stack:
        stack.enter_context(setting("torch._inductor.config", **{"fx_graph_cache": False}))
        stack.enter_context(setting("torch._inductor.config", **{"trace.provenance_tracking_level": 1}))
        stack.enter_context(setting("torch._functorch.config", enable_autograd_cache=False))
        return stack.pop_all()


@contextmanager
def handled(logger: logging.Logger, handler: logging.Handler, level: int) -> Iterator[None]:
    """A logger with one more handler, at a level, and kept from the handlers above it; afterwards as before."""
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
