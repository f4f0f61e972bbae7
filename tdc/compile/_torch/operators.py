"""Loops as one operation of a graph, on tuples of tensors (torch 2.11-2.13). `torch.cond` alone is public."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Fn = Callable[..., Any]
internals: Any = torch  # parts of torch without types


def while_loop_operator(cond_fn: Fn, body_fn: Fn, carry: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The carry after the loop."""
    return internals._higher_order_ops.while_loop(cond_fn, body_fn, carry)


def scan_operator(step: Fn, start: list[Tensor], xs: list[Tensor], reverse: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The last carry, and the results of all steps."""
    return internals._higher_order_ops.scan(step, start, xs, dim=0, reverse=reverse)


def associative_scan_operator(combine: Fn, xs: list[Tensor], reverse: bool, combine_mode: str) -> list[Tensor]:
    """The partial results of all steps."""
    return internals._higher_order_ops.associative_scan(combine, xs, 0, reverse=reverse, combine_mode=combine_mode)


def map_operator(step: Fn, xs: Sequence[Tensor]) -> list[Tensor]:
    """The results of all steps."""
    return internals._higher_order_ops.map(step, xs)
