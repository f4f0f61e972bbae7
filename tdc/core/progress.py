"""Progress of long work: a bar of `tqdm` if it is installed (the `viz` extra), else a line on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from typing import Any, TypeAlias, TypeVar

from tdc.core.errors import DtypeError, UnsupportedError, describe, message
from tdc.core.extras import extra

X = TypeVar("X")
Progress: TypeAlias = bool | Callable[[int, int], Any]
EVERY = 0.1  # seconds between two updates of the line


def check_progress(op: str, progress: Any) -> None:
    """Refuse anything but a bool or a function for `progress`."""
    if not isinstance(progress, bool) and not callable(progress):
        hint = "True, or a function of how many parts are done and how many there are"
        raise DtypeError(message(op, "a bool or a function for progress", describe(progress), hint=hint))


@contextmanager
def shown(
    progress: Progress, total: int, title: str, done: int = 0, unit: str = "it"
) -> Generator[Callable[..., None], None, None]:
    """Show progress in a block, which gets a function `advance(n=1)`.

    Args:
        progress: False for nothing, True for a bar, or a function of `(done, total)`.
        title: shown in front.
        done: number of parts that are done before.
        unit: "it" for parts, "B" for bytes.
    """
    if progress is True:
        with bar_or_line(total, title, done, unit) as tell:
            yield counter(tell, done)
    else:
        yield counter(lambda now: progress(now, total) if progress else None, done)


def each(
    xs: Generator[X, None, None], progress: Progress, total: int, title: str, done: int = 0
) -> Generator[X, None, None]:
    """The items of a generator, with progress as of `shown`; an item is done when the next one is requested."""
    with closing(xs), shown(progress, total, title, done) as advance:
        for x in xs:
            yield x
            advance()


def counter(tell: Callable[[int], Any], done: int) -> Callable[..., None]:
    """A function that adds to what is done and tells the sum."""

    def advance(n: int = 1) -> None:
        nonlocal done
        done += n
        tell(done)

    return advance


@contextmanager
def bar_or_line(total: int, title: str, done: int, unit: str) -> Generator[Callable[[int], Any], None, None]:
    """Yield a function of what is done that updates the bar or the line."""
    try:
        tqdm = extra(title, "tqdm", "torch-tdc[viz]").tqdm
    except UnsupportedError:
        yield line(total, title, unit)
        return
    with tqdm(total=total, initial=done, desc=title, unit=unit, unit_scale=unit == "B") as bar:
        yield lambda now: bar.update(now - bar.n)


def line(total: int, title: str, unit: str) -> Callable[[int], None]:
    """A function that prints what is done over the line before, at most every `EVERY` seconds."""
    by, suffix = (2**20, " MiB") if unit == "B" else (1, "")
    last = 0.0

    def tell(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last >= EVERY:
            last = now
            end = "\n" if done == total else ""
            print(f"\r{title}: {done // by}/{total // by}{suffix}", end=end, file=sys.stderr, flush=True)

    return tell
