"""Results of control flow are in new memory: a write into one changes no operand, in eager calls as in graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tdc
from tdc import TensorDict

OFFSETS = torch.tensor([0, 1, 3])


def doubled(n: Tensor, x: Any, y: Any) -> Any:
    return tdc.while_loop(lambda n, a, b: n < 2, lambda n, a, b: (n + 1, b, a), (n, x, y))


CASES: dict[str, Callable[[Tensor], Any]] = {
    "cond": lambda v: tdc.cond(v.sum() > 0, lambda v: v, lambda v: v * 1, (v,)),
    "cond, both branches": lambda v: tdc.cond(v.sum() > 0, lambda v: v, lambda v: v, (v,)),
    "cond, a view": lambda v: tdc.cond(v.sum() > 0, lambda v: v.view(-1, 3), lambda v: v[None] * 1, (v,)),
    "cond, a view of a row": lambda v: tdc.cond(v.sum() > 0, lambda v: v[:], lambda v: v * 1, (v[0:],)),
    "cond, a TensorDict": lambda v: tdc.cond(v.sum() > 0, lambda t: t, lambda t: t * 1, (TensorDict({"x": v}, [3]),)),
    "cond, a batch": lambda v: tdc.cond(
        v.sum() > 0, lambda x: x, lambda x: x.with_values(x.values * 1), (tdc.NestedTensor(v, OFFSETS),)
    ),
    "while_loop, back again": lambda v: doubled(torch.tensor(0), v, v + 1)[1],
    "while_loop, unchanged": lambda v: tdc.while_loop(lambda n, a: n < 2, lambda n, a: (n + 1, a), (v[0] * 0, v))[1],
    "while_loop, no rounds": lambda v: tdc.while_loop(lambda n, a: n < 0, lambda n, a: (n + 1, a), (v[0] * 0, v))[1],
    "while_loop, a batch": lambda v: tdc.while_loop(
        lambda n, a: n < 2, lambda n, a: (n + 1, a), (v[0] * 0, tdc.NestedTensor(v, OFFSETS))
    )[1],
    "scan, the carry": lambda v: tdc.scan(lambda c, x: (c, x), v, v)[0],
    "scan, a step": lambda v: tdc.scan(lambda c, x: (x, c), v, v.view(1, 3))[0],
    "scan, the results": lambda v: tdc.scan(lambda c, x: (c, x), v, v)[1],
    "associative_scan": lambda v: tdc.associative_scan(lambda a, b: b, v, 0, combine_mode="generic"),
    "scan_map": lambda v: tdc.scan_map(lambda x: x, v),
}


@pytest.mark.cases(4, 3)
@pytest.mark.parametrize("name", CASES)
def test_a_write_into_a_result_changes_no_operand(name: str):
    def run(a: Tensor) -> tuple[Tensor, Tensor]:
        v = torch.sin(a)
        out = CASES[name](v)
        values = out["x"] if isinstance(out, TensorDict) else out.values if isinstance(out, tdc.NestedTensor) else out
        return values.neg_().view(3), v * 1

    x = torch.tensor([1.0, 2.0, 3.0])
    for fn in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        torch.testing.assert_close(fn(x), (-x.sin(), x.sin()))


def test_offsets_are_shared():
    """Operands with the results of control flow need no comparison of structures."""
    x = tdc.pack([torch.ones(1), torch.ones(2)])
    y = tdc.cond(torch.tensor(True), lambda x: x, lambda x: x * 1, (x,))
    assert y.offsets is x.offsets
    z = tdc.while_loop(lambda n, x: n < 0, lambda n, x: (n + 1, x), (torch.tensor(0), x))[1]
    assert z.offsets is x.offsets


def test_gradients_pass():
    w = torch.ones(3, requires_grad=True)
    for name in ("cond", "while_loop, unchanged", "scan, the carry"):
        (grad,) = torch.autograd.grad(CASES[name](w).sum(), w)
        torch.testing.assert_close(grad, torch.ones(3))
    torch.testing.assert_close(torch.func.grad(lambda v: CASES["cond"](v).sum())(w), torch.ones(3))
