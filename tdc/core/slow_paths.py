"""Slow paths announce themselves, so that a test can forbid them: padding of packed rows, loops over examples, syncs.

    pad_rows, to_padded                                          "padding"
    unbind and iteration of a ragged batch, tdc.unbatched        "loops"
    reads and copies that `tdc.testing.forbid` sees              "syncs"

Inside a block of `tdc.testing.forbid` dispatch runs each row by `watched`, which notes the operation that is under way.

Invariants: nothing is forbidden outside `tdc.testing.forbid`, which sets `FORBIDDEN` for its own thread or task; a
compiled function announces when it is traced, and holds neither a guard nor an instruction of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextvars import ContextVar
from itertools import takewhile
from typing import Any

import torch

from tdc.core.dynamo import constant, program_stack, trace_as
from tdc.core.errors import message, op_name
from tdc.core.rules import IMPLS
from tdc.core.typing import Op

FORBIDDEN: ContextVar[frozenset[str]] = ContextVar("forbidden", default=frozenset())
BLOCKS: list[frozenset[str]] = []  # what the blocks forbid that are open now, in any thread
OPERATION: ContextVar[str] = ContextVar("operation", default="")  # the outermost one under way, inside a block
DONE = ""  # a constant that Dynamo can take for the result
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
DRIVER = "<tdc.batch driver"  # begins the names of files that this library writes
CURES = {
    "padding": "an operation that works on packed rows, or forbid(padding=False)",
    "loops": "an operation on the whole batch, or forbid(loops=False)",
    "syncs": "docs/syncs.md lists what reads a device, or forbid(syncs=False)",
}


@constant
def announce(path: str, op: str) -> str:
    """Take a slow path: "padding", "loops" or "syncs"; an AssertionError that names the user's line where it is
    forbidden.

    Args:
        op: the operation, where none was dispatched, and in a graph. Of a sync, the operation of torch.
    """
    if path in FORBIDDEN.get():
        raise AssertionError(refusal(path, OPERATION.get() or op, op))
    return DONE


def refusal(path: str, op: str, torch_op: str) -> str:
    """The message for a forbidden path: the operation, and the user's line that called this library first."""
    before = takewhile(lambda frame: not frame.filename.startswith(PACKAGE), program_stack())
    at = [line for line in [users_line(before)] if line]
    found = {"padding": "padding", "loops": "a loop over examples", "syncs": f"a read by aten.{torch_op}"}
    got = found[path] if path == "syncs" and op == torch_op else f"{found[path]} in {op!r}"
    return message("testing.forbid", f"no {path}", got, at, CURES[path])


def users_line(frames: Iterable[Any]) -> str:
    """The last of some calls in code of users, neither torch's nor this library's; empty without one."""
    own = [f for f in frames if not f.filename.startswith((PACKAGE, TORCH, DRIVER))][-1:]
    return "".join([f"{os.path.basename(f.filename)}:{f.lineno} in {f.name}: {f.line or ''}" for f in own])


def watched(row: str, op: Op) -> str:
    """Name of a row that runs another and notes that `op` is under way."""
    name = f"{row}_as_{op_name(op)}"
    if name not in IMPLS:
        IMPLS[name] = noting(op_name(op), IMPLS[row])
    return name


def noting(name: str, impl: Op) -> Op:
    """An implementation during which `OPERATION` is `name`, unless another operation runs it."""

    def run(*args: Any, **kwargs: Any) -> Any:
        token = OPERATION.set(OPERATION.get() or name)
        try:
            return impl(*args, **kwargs)
        finally:
            OPERATION.reset(token)

    trace_as(run, lambda *args, **kwargs: impl(*args, **kwargs))
    return run
