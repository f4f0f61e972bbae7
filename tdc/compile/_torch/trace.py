"""Messages of torch.compile: graph breaks, causes of recompiles, guards, generated code.

Read from torch's structured trace, the stream that `TORCH_TRACE` writes to a file (torch 2.11-2.15).

    with listening() as events:
        torch.compile(fn)(x)
    [e.text for e in events if e.name == "recompile_reasons"]
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from tdc.compile._torch.dynamo import CompileId
from tdc.compile._torch.symbolic import setting
from tdc.core.private import optional


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
