"""Slow paths announce themselves, so that a test can forbid them: padding of packed rows, and loops over examples.

    pad_rows, to_padded                        "padding"
    unbind and iteration of a ragged batch     "loops"
    tdc.unbatched                              "loops"

Invariants:
  - nothing is forbidden outside `tdc.testing.forbid`, which sets `FORBIDDEN` for its own thread or task;
  - a compiled function announces when it is traced, and holds neither a guard nor an instruction of it.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextvars import ContextVar
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch

from tdc.core.dynamo import constant
from tdc.core.errors import message, op_name

FORBIDDEN: ContextVar[frozenset[str]] = ContextVar("forbidden", default=frozenset())
DONE = ""  # a constant that Dynamo can take for the result
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
RULES_FILE, ENTRIES = (
    os.path.join(PACKAGE, "core", "container.py"),
    ("__torch_function__", "method"),
)  # where rows are looked up
CURES = {
    "padding": "an operation that works on packed rows, or forbid(padding=False)",
    "loops": "an operation on the whole batch, or forbid(loops=False)",
}


class Place(NamedTuple):
    """One entry of a call stack, outermost first."""

    file: str
    line: int | None
    function: str
    text: str
    op: str


@constant
def announce(path: str, op: str) -> str:
    """Say that a slow path is taken.

    Args:
        path: "padding" or "loops".
        op: what takes it, where no operation was dispatched.

    Raises:
        AssertionError: it is forbidden; names the operation and the user's line.
    """
    if path in FORBIDDEN.get():
        raise AssertionError(refusal(path, op))
    return DONE


def refusal(path: str, op: str) -> str:
    """The message for a forbidden path: the operation, and the line that called it."""
    places = stack()
    inside = [i for i, p in enumerate(places) if p.file.startswith(PACKAGE)]
    entry = inside[0] if inside else len(places)
    named = [p.op for p in places[entry:] if p.op]
    users = [p for p in places[:entry] if not p.file.startswith(TORCH)]
    at = [f"{os.path.basename(p.file)}:{p.line} in {p.function}: {p.text}" for p in users[-1:]]
    got = f"{'padding' if path == 'padding' else 'a loop over examples'} in {named[0] if named else op!r}"
    return message("testing.forbid", f"no {path}", got, at, CURES[path])


def stack() -> list[Place]:
    """The calls that led here: those of the traced program where there is one, else those of Python."""
    guards: Any = resolve_name("torch._guards")
    context = guards.TracingContext
    traced = list(context.extract_stack()) if context.try_get() is not None else []
    if traced:
        entries = [False, *(f.filename == RULES_FILE and f.name in ENTRIES for f in traced)]
        ops = [f.name.rpartition("_")[0] if entry else "" for f, entry in zip(traced, entries, strict=False)]
        return [Place(f.filename, f.lineno, f.name, f.line or "", op) for f, op in zip(traced, ops, strict=True)]
    found, frame = [], sys._getframe(1)
    while frame is not None:
        name, local = frame.f_code.co_name, frame.f_locals
        entry = frame.f_code.co_filename == RULES_FILE and name in ENTRIES
        op = local.get("func" if name == "__torch_function__" else "op") if entry else None
        (summary,) = traceback.StackSummary.extract([(frame, frame.f_lineno)], limit=1)
        place = Place(frame.f_code.co_filename, frame.f_lineno, name, summary.line or "", op_name(op) if op else "")
        found.append(place)
        frame = frame.f_back
    return found[::-1]
