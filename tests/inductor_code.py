"""The code that Inductor writes for a function."""

from __future__ import annotations

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any


def code_of(run: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """What a compiled function gives, and the code that Inductor writes for it."""
    with resolve_name("torch._inductor.config").patch(fx_graph_cache=False):
        found, codes = resolve_name("torch._inductor.utils").run_and_get_code(run, *args)
    return found, "\n".join(codes)
