"""Statements inside of `with`, which mean what they mean outside, and are refused as they are there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tdc
from tdc.testing import assert_batched_equal


def list_kept(x: Tensor, n: Tensor) -> Any:
    out = [x]
    if n > 1:
        x = x * 2
    with torch.no_grad():
        out.append(x)
        k = len(out)
        out.append(x * k)
    if n > 1:
        x = x * 2
    return len(out), out[1] + out[-1] * x


def dict_kept(x: Tensor, n: Tensor) -> Any:
    d, pair = {"a": x}, (x, x)
    if n > 1:
        x = x * 2
    with torch.no_grad(), contextlib.nullcontext(3) as three:
        d["a"] = x * 100
        d["b"] = pair[0] * three if n > 1 else pair[1] - pair[0][n - 1]
    return d["a"] * x + d["b"]


def elements(x: Tensor, n: Tensor) -> Any:
    y = torch.zeros(3)
    with torch.no_grad():
        y[0] += 1
        y[n - 1] = x[0]
        with torch.enable_grad():
            y[:2] *= x[0]
        assert y[0] > -100, "large"
    return y * x


def rows(x: Tensor, n: Tensor) -> Any:
    out, t = [], x[0] * 0
    for v in x:
        with torch.no_grad():
            out.append(v * 2)
            first, *rest = v, v * n
            t = t * v + first + rest[0]
    return len(out), out[-1], t


def gradients(x: Tensor, n: Tensor) -> Any:
    w = x * 2
    with torch.no_grad():
        y = x * (x[n - 1] if n > 1 and x[n - 1] > -1 else x[0])
    return y * w


FUNCTIONS = [list_kept, dict_kept, elements, rows, gradients]


EXAMPLES = [(torch.arange(1.0, 4.0) / n, torch.tensor(n)) for n in (1, 2, 3)]


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_eagerly(fn: Callable[..., Any]):
    """Found by hand: lists, dicts and tensors were changed where they are, and gradients kept."""
    assert_batched_equal(fn, EXAMPLES, backends=())


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("fn", FUNCTIONS)
def test_in_one_graph(fn: Callable[..., Any]):
    assert_batched_equal(fn, EXAMPLES, backends=("eager",), lowers=("auto",))


@tdc.batch
def cell(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


UNUSED = "an expression whose value is not used, 'x + 1',"
SEVERAL = "a block with several ways through it in `with`"
BODIES = {
    "o.h = x": "an attribute that is set, 'o.h',", "o.h += x": "an attribute that is set, 'o.h',", "del x": "`del`",
    "import math": "`import`", "x + 1": UNUSED, "F[0] = x": "an element of 'F', which is not local,",
    "x = [cell(v) for v in x]": SEVERAL, "x = cell(x)": "a call of a function of tdc.batch in `with`",
}  # fmt: skip
TARGETS = {
    "for o.h in x: x = x + o.h": "an attribute that is set, 'o.h',",
    "x = [0 for o.h in x]": "an attribute that is set, 'o.h',",
    "for x[0] in o: x = x * 2": "an element that a `for` sets, 'x[0]',",
    "with torch.no_grad() as o.h: x = x * 2": "an attribute that is set, 'o.h',",
    "with torch.no_grad() as x[0]: x = x * 2": "an element that a `with` sets, 'x[0]',",
}


@pytest.mark.parametrize("line", [*[f"with torch.no_grad(): {body}" for body in BODIES], *TARGETS])
def test_what_is_refused(line: str):
    scope: dict[str, Any] = {"torch": torch, "F": [1], "cell": cell}
    text = f"def f(x, o):\n    {line}\n    return x\n"
    exec(text, scope)
    expected = {**BODIES, **TARGETS}[line.removeprefix("with torch.no_grad(): ")]
    with pytest.raises(tdc.UnsupportedError) as caught:
        tdc.batch(scope["f"], source=text).map(torch.ones(2, 3), torch.ones(2, 3))
    assert f"got {expected} at <tdc.batch f " in str(caught.value)
    assert ":2\nhint: " in str(caught.value)


def test_an_assertion_says_which_example():
    @tdc.batch
    def f(x: Tensor) -> Tensor:
        with torch.no_grad():
            assert x > 0, "positive"
        return x

    with pytest.raises(AssertionError, match=r"positive.*example 1"):
        f.map(torch.tensor([1.0, -1.0]))


def test_the_tree_shows_what_is_inside():
    @tdc.batch
    def f(x: Tensor) -> Any:
        out = []
        with torch.no_grad():
            y = x * 2
            out.append(y + 1)
            y = y * 3
        return y, out

    assert f.tree.splitlines() == [
        "block (x) -> (out, y, __v1)", "    out = []", "    with torch.no_grad():", "        y = x * 2",
        "        __v1 = y + 1", "append __v1 to out", "block (y) -> (y)", "    with torch.no_grad():",
        "        y = y * 3", "return (y, out)",
    ]  # fmt: skip
