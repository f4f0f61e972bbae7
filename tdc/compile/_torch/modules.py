"""Modules of torch by their names, loaded when they are needed."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any


def load(name: str) -> Any:
    """A module, or a name in it after a colon. The first call may take seconds."""
    return resolve_name(name)
