"""A dim may be an argument of a compiled function: it is a constant of the graph, whatever values it took before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

import tdc

OPS: dict[str, Callable[[Any, int], Any]] = {
    "sum": lambda x, d: x.sum(d), "softmax": lambda x, d: x.softmax(d), "std": lambda x, d: x.std(d),
    "cumsum": lambda x, d: x.cumsum(d), "sort": lambda x, d: x.sort(d).values, "topk": lambda x, d: x.topk(1, d).values,
    "argmax": lambda x, d: x.argmax(d), "flip": lambda x, d: x.flip(d), "transpose": lambda x, d: x.transpose(d, 1),
    "movedim": lambda x, d: x.movedim(d, 1), "unsqueeze": lambda x, d: x.unsqueeze(d),
    "unbind": lambda x, d: x.unbind(d)[0], "cat": lambda x, d: torch.cat([x, x], d),
    "normalize": lambda x, d: F.normalize(x, dim=d),
    "vmap": lambda x, d: tdc.vmap(lambda v: v + 1, in_dims=d, out_dims=d)(x),
}  # fmt: skip
KINDS = {
    "nested": (tdc.pack([torch.rand(n, 6, 4) for n in (2, 4, 3)]), (1, 2, 3, -1, -2)),
    "masked": (tdc.pack([torch.rand(n, 6, 4) for n in (2, 4, 3)]).to_padded(), (1, 2, 3, -1, -2)),
    "tensordict": (tdc.TensorDict({"a": torch.rand(3, 4, 5), "b": torch.rand(3, 4)}, [3, 4]), (0, 1, -1, -2)),
}


QUICK = [("nested", "sum"), ("masked", "sum"), ("tensordict", "sum"), ("masked", "transpose"), ("nested", "vmap")]
CASES = [
    pytest.param(kind, name, marks=[] if (kind, name) in QUICK else [pytest.mark.slow])
    for kind in KINDS
    for name in OPS
]


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_dim_that_varies(kind: str, name: str):
    (x, dims), fn = KINDS[kind], OPS[name]
    compiled = torch.compile(lambda x, d: fn(x, d), fullgraph=True, backend="eager")
    ran = 0
    for d in dims:
        try:
            want = fn(x, d)
        except tdc.TdcError:
            continue
        got = compiled(x, d)
        assert type(got) is type(want)
        assert got.shape == want.shape
        for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)
        ran += 1
    assert ran >= 2
