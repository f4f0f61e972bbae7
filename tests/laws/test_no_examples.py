"""Every row of the rule table on a batch of no examples: the class, the dtype and the sizes that others give."""

from __future__ import annotations

from typing import Any

import pytest
from catalogue import samples, title
from harness import Call, Draw, Sample, spelled
from torch import Tensor

from tdc import MaskedBatch, NestedTensor
from tdc.core import pytree
from tdc.core.rules import Rule
from tdc.ops import RULES
from tdc.testing.batches import Dense, Ragged, build

TWO, THREE = (3, 4), (3, 4, 2)
FIRST = 2  # samples of a row: others reduce the batch, or name rows
OTHERWISE = {  # what a batch of none does not take
    "index_select", "index_put", "narrow", "reshape", "view", "expand", "broadcast_to",  # which name rows
    "new_empty", "new_full", "new_ones", "new_zeros", "ctc_loss", "bincount",
    "avg_pool3d", "lp_pool3d",  # torch's kernel in three dims wants planes as large as windows
}  # fmt: skip
FAMILIES: dict[str, list[Rule]] = {}
for rule in RULES:
    runs = "grad" in rule.modes and not rule.reason and rule.kind != "tensordict"
    if runs and rule.name not in OTHERWISE and rule.family != "split":
        FAMILIES.setdefault(rule.family, []).append(rule)


def is_batch(x: Any) -> bool:
    return isinstance(x, (NestedTensor, MaskedBatch))


def facts(rule: Rule, arguments: Call) -> list[tuple[Any, ...]]:
    """Class, dtype and sizes of each result; what a rectangle pads to is none of them."""
    args, kwargs = arguments
    results = pytree.tree_leaves(spelled(rule)(*args, **kwargs), is_leaf=is_batch)
    padded = [x.ragged_dims if isinstance(x, MaskedBatch) else () for x in results]
    pairs = [(x, dims) for x, dims in zip(results, padded, strict=True) if is_batch(x) or isinstance(x, Tensor)]
    return [(type(x), x.dtype, [-1 if d in dims else n for d, n in enumerate(x.shape)]) for x, dims in pairs]


def emptied(given: Call, built: Call) -> Call:
    """Arguments without their examples; what was one object stays one."""
    done: dict[int, Any] = {}

    def none(x: Any, y: Any) -> Any:
        if isinstance(x, Dense):
            return y.narrow(x.follows[0], 0, 0)
        return y.transpose(0, x.batch_dim)[:0].transpose(0, x.batch_dim) if isinstance(x, Ragged) else y

    def kept(x: Any, y: Any) -> Any:
        if id(y) not in done:
            done[id(y)] = none(x, y)
        return done[id(y)]

    return pytree.tree_map(kept, given, built)  # type: ignore[no-any-return]  # as many as were given


def wrong(rule: Rule, sample: Sample) -> list[str]:
    drawn = [sample.draw(Draw(rule.kind, lengths)) for lengths in (TWO, THREE)]
    built = [build(given, rule.kind, lambda x: x) for given in drawn]
    two, three = [facts(rule, given) for given in built]
    none = facts(rule, emptied(drawn[0], built[0]))
    expected = []
    for (kind, dtype, size), (*_, other) in zip(two, three, strict=True):
        expected.append((kind, dtype, [n if n == m else 0 for n, m in zip(size, other, strict=True)]))
    return [] if none == expected else [f"{title(rule)}-{rule.kind}, {sample.label}: {none}, expected {expected}"]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_examples(family: str):
    differences = []
    for rule in FAMILIES[family]:
        for sample in [s for s in samples(rule) if "grad" in s.modes][:FIRST]:
            differences += wrong(rule, sample)
    assert not differences
