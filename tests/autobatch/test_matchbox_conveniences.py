"""Matchbox's conveniences under the names that torch has for them, as docs/coming_from/matchbox.md lists them: packed,
padded, dense, and of one example alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.testing import assert_batched_equal

HEADS = 2


def batch_ones_and_zeros(xs: Any) -> Any:
    """`batch_ones`, `batch_zeros`: as long as each example."""
    ones, zeros = xs.new_ones(xs.size(0), 2), xs.new_zeros(xs.size(0), 4)
    empty, twos = xs.new_empty(xs.size(0), 4), xs.new_full((4,), 2.0)
    return torch.cat([xs * ones.sum(1, keepdim=True), zeros], 1), torch.where(xs < 9, xs, empty) + twos


def split_and_join_dims(xs: Any) -> Any:
    """`split_dim` and `join_dims`: heads."""
    heads = xs.unflatten(-1, (HEADS, -1)).transpose(0, 1)
    return heads.transpose(0, 1).flatten(1) + xs.view(xs.size(0), HEADS, 2).reshape(xs.size(0), 4)


def size_as_tensor(xs: Any) -> Any:
    """A number of each example."""
    n = xs.size(0)
    return xs.sum(0) / n if n > 2 else xs.sum(0) * n


def causal_mask(xs: Any) -> Tensor:
    """Attention that sees no later position, in words and by `is_causal`."""
    scores = xs @ xs.transpose(0, 1)
    later = torch.ones_like(scores).triu(1) > 0
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    q = xs.unflatten(-1, (HEADS, -1)).transpose(0, 1)
    return weights @ xs + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(0, 1).flatten(1)


GENERATOR = torch.Generator().manual_seed(0)
LAYOUTS = {"ragged": (2, 3, 1, 4), "dense": (3, 3, 3)}
FUNCTIONS = (batch_ones_and_zeros, split_and_join_dims, size_as_tensor, causal_mask)


def examples(layout: str) -> list[Tensor]:
    return [torch.randn(n, 4, generator=GENERATOR) for n in LAYOUTS[layout]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_eagerly(fn: Any, layout: str):
    assert_batched_equal(fn, examples(layout), backends=())


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_in_one_graph(fn: Any, layout: str):
    assert_batched_equal(fn, examples(layout), backends=("eager",), lowers=("auto",))
