"""How far a piece of work is: a bar of `rich` where it is installed (the `viz` extra), else a line of numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tdc.core.errors import DtypeError, describe, message

Tell = Callable[[int], Any]


def check_progress(op: str, progress: Any) -> None:
    """Refuse what is neither a bool nor a function."""
    if not isinstance(progress, bool) and not callable(progress):
        hint = "True, or a function of how many parts are done and how many there are"
        raise DtypeError(message(op, "a bool or a function for progress", describe(progress), hint=hint))


@contextmanager
def shown(progress: Any, total: int) -> Iterator[Tell]:
    """Yields a function that takes how many parts are done.

    Args:
        progress: False for nothing, True for a bar, or a function of `(done, total)`.
    """
    if progress is not True:
        yield (lambda done: progress(done, total)) if progress else lambda done: None
        return
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
    except ImportError:
        yield lambda done: line(done, total)
        return
    with Progress(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("map", total=total)
        yield lambda done: bar.update(task, completed=done)


def line(done: int, total: int) -> None:
    """Without `rich`: one line, written over."""
    print(f"\r{done}/{total}", end="\n" if done == total else "", file=sys.stderr, flush=True)
