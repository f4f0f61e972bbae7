"""Packages that tdc works with but does not depend on: the extras of pyproject.toml."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tdc.core.errors import UnsupportedError, message


def extra(op: str, module: str, requirement: str) -> Any:
    """Import an optional package for `op`.

    Args:
        requirement: what to install, in the words of pip.

    Raises:
        UnsupportedError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        got, hint = f"no module {error.name!r}", f"pip install '{requirement}'"
        raise UnsupportedError(message(op, module.partition(".")[0], got, hint=hint)) from error
