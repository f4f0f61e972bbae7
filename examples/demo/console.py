"""What the demo prints: a section line, and a progress bar of loss, accuracy and real tokens per second.

`rich` draws the bar where it is installed (the `viz` extra); otherwise a line is printed now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from examples.demo.records import StepRecord

EVERY = 50


def section(title: str) -> None:
    """Announce a part of the demo."""
    print(f"\n── {title}", flush=True)


def table(rows: list[tuple[str, str]]) -> None:
    """Print names and values in two columns."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def status(record: StepRecord) -> str:
    """One step in words; the first one compiles, so its rate says nothing."""
    rate = "compiled" if record.step == 1 else f"{record.tokens / record.seconds:,.0f} tokens/s"
    return f"loss {record.loss:5.3f}  accuracy {record.accuracy:4.0%}  {rate}"


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[StepRecord], None]]:
    """A progress bar over `total` steps; call what it yields with each step's record."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda record: print_now_and_then(title, record, total)
        return
    columns = (
        TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[status]}"),
    )  # fmt: skip
    with Progress(*columns) as bar:
        task = bar.add_task(title, total=total, status="compiling the training step …")
        yield lambda record: bar.update(task, completed=record.step, status=status(record))
        if not bar.console.is_terminal:
            bar.stop()


def print_now_and_then(title: str, record: StepRecord, total: int) -> None:
    """The progress without `rich`."""
    if record.step in (1, total) or record.step % EVERY == 0:
        print(f"  {title} {record.step}/{total}  {status(record)}", flush=True)
