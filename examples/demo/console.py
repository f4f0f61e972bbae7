"""Output of the demo: a line for each section, and a progress bar with loss, accuracy and real tokens per second.

On a terminal `tqdm` draws the bar if it is installed (the `viz` extra); otherwise a line is printed now and then.
"""

from __future__ import annotations

import sys
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
    """One step in words; the rate of one that compiled says nothing."""
    rate = "compiled" if record.compiled else f"{record.tokens / record.seconds:,.0f} tokens/s"
    return f"loss {record.loss:5.3f}  accuracy {record.accuracy:4.0%}  {rate}"


@contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[StepRecord], None]]:
    """A progress bar over `total` steps; call what it yields with each step's record."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is None or not sys.stderr.isatty():
        yield lambda record: print_now_and_then(title, record, total)
        return
    with tqdm(total=total, desc=f"  {title}", unit=" steps") as bar:

        def show(record: StepRecord) -> None:
            bar.set_postfix_str(status(record), refresh=False)
            bar.update(record.step - bar.n)

        yield show


def print_now_and_then(title: str, record: StepRecord, total: int) -> None:
    """Print a line at the first and the last step, and every fiftieth."""
    if record.step in (1, total) or record.step % EVERY == 0:
        print(f"  {title} {record.step}/{total}  {status(record)}", flush=True)
