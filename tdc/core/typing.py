"""Type aliases.

Shape legend used across the library: B batch, L longest row, N packed total, H heads, D features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

KeyPath: TypeAlias = "str | tuple[str, ...]"
NestedKey: TypeAlias = "str | tuple[NestedKey, ...]"
Op: TypeAlias = Callable[..., Any]
Dims: TypeAlias = "int | tuple[int, ...]"
OpName: TypeAlias = "str | Op"
MISSING: Any = object()  # default of an argument for which None means something
