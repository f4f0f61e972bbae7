"""Derivatives of every row beyond its gradient: tangents, tangents of gradients, and gradients of gradients.

The samples of the matrix, eagerly, against the loop over examples. Where torch's derivative or the result is NaN, any
number will do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from catalogue import samples, title
from harness import Draw, Sample, spelled
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from tdc.core.rules import Rule
from tdc.ops import RULES
from tdc.testing.batches import build, tensors, unbuild

CLOSE = {"rtol": 1e-3, "atol": 1e-3, "equal_nan": True}
COARSE = "half"  # a dtype of too few digits
AT_ZERO = {"prelu": "with zeros"}  # where torch's tangent (2.13) is none of its gradient
FIRST = 2  # samples of a row in the fast run
FAMILIES: dict[str, list[Rule]] = {}
for rule in RULES:
    if "grad" in rule.modes and not rule.reason:
        FAMILIES.setdefault(f"{rule.family}-{rule.kind}", []).append(rule)


class Moving(Draw):
    """Draws whose leaves have tangents."""

    def tensor(self, *shape: int, domain: str = "real") -> Tensor:
        x = super().tensor(*shape, domain=domain)
        if not x.requires_grad:
            return x
        self.leaves[-1] = forward_ad.make_dual(x, torch.randn(x.shape, generator=self.generator).to(x))
        return self.leaves[-1]


def gradients(outputs: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Gradients under random cotangents, which have derivatives themselves."""
    generator = torch.Generator().manual_seed(1)
    seeds = [torch.randn(t.shape, generator=generator).to(t) for t in outputs]
    some = [i for i, t in enumerate(outputs) if t.requires_grad]
    if not some or not leaves:
        return [torch.zeros_like(x) for x in leaves]
    outs, cotangents = [[side[i] for i in some] for side in (outputs, seeds)]
    found = torch.autograd.grad(outs, leaves, cotangents, create_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def numbers(results: Any) -> list[Tensor]:
    """The tensors of results that may have derivatives."""
    return [t for t in tensors(results) if t.is_floating_point() or t.is_complex()]


def tangents(some: list[Tensor]) -> list[Tensor]:
    """Tangents, none being zeros."""
    pairs = [(t, forward_ad.unpack_dual(t).tangent) for t in some]
    return [torch.zeros_like(t) if moved is None else moved for t, moved in pairs]


def forward(results: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Tangents of results and of gradients."""
    return tangents([*results, *gradients(results, leaves)])


def twice(results: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of gradients."""
    return gradients(gradients(results, leaves), leaves)


Order = Callable[[list[Tensor], list[Tensor]], list[Tensor]]
NEITHER = (
    "cdist",
    "ctc_loss",
    "embedding_bag",
    "grid_sample",
    "hardsigmoid",
    "multi_margin_loss",
    "multilabel_margin_loss",
)
LACKING: dict[Order, tuple[str, ...]] = {  # what torch has no such derivatives of
    forward: (*NEITHER, "huber_loss", "index_reduce", "lstm", "ormqr", "soft_margin_loss"),
    twice: NEITHER,
}


def wrong(rule: Rule, sample: Sample, order: Order, lengths: tuple[int, ...]) -> list[str] | None:
    """Differences of the derivatives of one sample from those of the loop; None where torch has none."""
    draw = (Moving if order is forward else Draw)(rule.kind, lengths, 0, True)
    args, kwargs = sample.draw(draw)
    try:
        expected = sample.expect(rule.ref, args, dict(kwargs))
        want = order(numbers(expected), draw.leaves)
    except (RuntimeError, IndexError):
        return None
    args, kwargs = build((args, kwargs), rule.kind, lambda x: x)
    got = order(numbers(unbuild(spelled(rule)(*args, **kwargs))), draw.leaves)
    hidden = [b.isnan() for b in want]
    for mask, value in zip(hidden, numbers(expected) if order is forward else (), strict=False):
        mask |= value.isnan()
    sides = [[t.detach().masked_fill(h, 0) for t, h in zip(side, hidden, strict=True)] for side in (got, want)]
    unlike = [list(b.shape) for a, b in zip(*sides, strict=True) if not torch.allclose(a.to(b), b, **CLOSE)]
    return [f"{title(rule)}-{rule.kind}, {sample.label}: {unlike}"] if unlike else []


def compare(rule: Rule, some: list[Sample], order: Order) -> list[str]:
    """Differences in the first batch of each sample of which torch has such derivatives."""
    found = []
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):  # the other kernels have one derivative
        for sample in some:
            tried = [lines for n in sample.batches[:2] if (lines := wrong(rule, sample, order, n)) is not None]
            found += tried[0] if tried else [] if rule.name in LACKING[order] else [f"{title(rule)}: none in torch"]
    return found


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["first", "more"])
@pytest.mark.parametrize("order", [forward, twice])
@pytest.mark.parametrize("family", FAMILIES)
def test_derivatives(family: str, order: Order, more: bool):
    differences = []
    for rule in FAMILIES[family]:
        some = [s for s in samples(rule) if "grad" in s.modes and COARSE not in s.label]
        some = [s for s in some if AT_ZERO.get(rule.name, s.label + ".") not in s.label]
        differences += compare(rule, some[FIRST:] if more else some[:FIRST], order)
    assert not differences


@pytest.mark.parametrize("order", [forward, twice])
def test_a_gradient_without_a_derivative_is_found(order: Order):
    rule = next(rule for rule in FAMILIES["pointwise-nested"] if rule.op is torch.exp)

    def exp(x: Any) -> Any:
        return x.exp().detach() * (1 + x - x.detach())

    assert not compare(rule, samples(rule)[:1], order)
    assert compare(replace(rule, op=exp), samples(rule)[:1], order)
