"""Transforms of `torch.func` around a call (torch 2.11-2.13)."""

from __future__ import annotations

from typing import Any

import torch

functorch: Any = torch._C._functorch  # type: ignore[attr-defined]  # built into torch, without type stubs


def innermost_transform() -> str | None:
    """The name of the transform that is active, such as "grad"; None where there is none."""
    interpreter = functorch.peek_interpreter_stack()
    return None if interpreter is None else interpreter.key().name.lower()


def is_batched(x: Any) -> bool:
    """Whether a tensor stands for one example of a vmap. Can be traced."""
    return functorch.is_batchedtensor(x)
