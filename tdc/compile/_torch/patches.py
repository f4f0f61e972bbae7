"""Changes to Inductor for the time of one compile.

A change is a feature of `core/private.py`. If a graph fails to compile with the changes and compiles without them, the
change that is to blame is switched off: a graph that plain Inductor compiles is never refused for a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

from tdc.core.errors import TdcError
from tdc.core.private import OFF, suspended, switch_off

X = TypeVar("X")


@contextmanager
def patched(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """A context in which attributes are others: `(owner, name, value)`."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            stack.enter_context(patch.object(owner, name, value))
        yield


def with_changes_that_fit(compile: Callable[[], X], changes: Sequence[str]) -> X:
    """Return `compile()`; where it fails with these features and not without them, the one to blame is switched off."""
    try:
        return compile()
    except TdcError:
        raise
    except Exception as error:
        found = [name for name in changes if name not in OFF]
        if says_ours(error) or not found or not compiles(compile, found):
            raise
        blamed = next(([name] for name in found if compiles(compile, [name])), found)
        for name in blamed:
            switch_off(name, next(iter(str(error).splitlines()), type(error).__name__))
        return compile()


def says_ours(error: Exception) -> bool:
    """True if an error, or one behind it, is one of this library."""
    behind: BaseException | None = error
    while behind is not None:
        if isinstance(behind, TdcError):
            return True
        behind = behind.__cause__ or behind.__context__
    return False


def compiles(compile: Callable[[], Any], names: Sequence[str]) -> bool:
    """True if a graph compiles while some features are off."""
    with suspended(names):
        try:
            compile()
        except Exception:
            return False
    return True
