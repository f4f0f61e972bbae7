"""Every row of the rule table under `torch.autocast`: dtypes and values of the loop over examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from catalogue import samples, title
from harness import Draw, Sample, spelled

import tdc
from tdc.core.rules import Rule
from tdc.ops import RULES
from tdc.testing.batches import build, matched, unbuild

FIRST = 2  # samples of a row in the fast run
CLOSE = {"rtol": 0.1, "atol": 0.1, "equal_nan": True}
FAMILIES: dict[str, list[Rule]] = {}
for rule in RULES:
    if "grad" in rule.modes and not rule.reason:
        FAMILIES.setdefault(rule.family, []).append(rule)


def wrong(rule: Rule, sample: Sample) -> list[str]:
    """Differences from the loop over examples, each of which has elements."""
    draw = Draw(rule.kind, sample.batches[1 % len(sample.batches)], 0, True)
    with torch.autocast("cpu", torch.bfloat16):
        args, kwargs = sample.draw(draw)
        try:
            expected = sample.expect(rule.ref, args, dict(kwargs))
        except RuntimeError as error:
            if "primitive descriptor" in f"{error}":
                return []  # a processor for which oneDNN has no LSTM in bfloat16, such as one with AVX2 alone
            raise
        args, kwargs = build((args, kwargs), rule.kind, lambda x: x)
        lines, pairs = matched(unbuild(spelled(rule)(*args, **kwargs)), expected, rule.kind)
    lines += [f"{at}values" for at, a, b in pairs if not torch.allclose(a.to(b), b, **CLOSE)]
    return [f"{title(rule)}-{rule.kind}, {sample.label}: {line}" for line in lines]


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["first", "more"])
@pytest.mark.parametrize("family", FAMILIES)
def test_autocast(family: str, more: bool):
    differences = []
    for rule in FAMILIES[family]:
        some = [s for s in samples(rule) if "grad" in s.modes]
        for sample in some[FIRST:] if more else some[:FIRST]:
            differences += wrong(rule, sample)
    assert not differences


def test_products_in_a_graph():
    x, w, v = tdc.pack([torch.randn(n, 3) for n in (2, 4)]), torch.randn(3, 3), torch.randn(3)

    def run(x: Any) -> list[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            return [torch.mv(x, v), torch.addmm(v, x, w), F.prelu(x, v[:1]), torch.einsum("bld,bld->b", x, x)]

    found, want = torch.compile(run, backend="eager", fullgraph=True)(x), run(x)
    assert [y.dtype for y in found] == [torch.float32, *[torch.bfloat16] * 3]
    for a, b in zip(found, want, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a.unbind(), b.unbind(), rtol=1e-2, atol=1e-2)
