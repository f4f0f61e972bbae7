"""tdc.testing.assert_close: what is close passes, and every difference is named, of every container."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from expecttest import TestCase
from texts import T, ragged
from torch import Tensor

import tdc
from tdc import ObjectArray, Static, TensorDict
from tdc.testing import assert_close


class Step(tdc.TensorClass):
    obs: Tensor


def tree(**changes: Any) -> TensorDict:
    source = {
        "x": torch.ones(3, 2), "i": torch.arange(3), "s": Static("a"), "o": ObjectArray(["a", "b", "c"]),
        "n": {"r": ragged(), "p": ragged().to_padded(), "e": {}}, "step": Step(torch.ones(3), batch_size=[3]),
    }  # fmt: skip
    return TensorDict(source, [3]).update(changes)


def test_what_is_close_passes():
    x: Any = tree()["x"]
    assert_close(tree(x=x + 1e-7), tree())
    assert_close(tree(x=x + 0.1), tree(), rtol=0, atol=0.2)
    assert_close([tree(), {"a": (1.0, None, "b")}], [tree(), {"a": (1.0, None, "b")}])
    assert_close(tree(x=x * torch.nan), tree(x=x * torch.nan), equal_nan=True)
    assert_close(tree(x=x.double()), tree(), check_dtype=False)
    assert_close(TensorDict({"a": x, "b": x}), TensorDict({"b": x, "a": x}))


def test_padding_does_not_count():
    p = ragged().to_padded()
    assert_close(p.with_data(p.data.masked_fill(~p.mask.view(3, 3, 1), torch.nan)), p)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (tree(), tree(x=torch.zeros(3, 2))), (tree(), tree(i=torch.zeros(3))), (tree(), tree(s=Static("b"))),
        (tree(), tree(o=ObjectArray(["a", "b", "d"]))), (tree(), tree().exclude("x")), (tree(), tree()[:2]),
        (tree(), tree(n={"r": ragged(0, 2, 3)})), (tree(), tree(n={"r": ragged().to_padded()})),
        (tree(), tree().delete(("n", "e"))), (tree(), tree().set("step", {"obs": torch.ones(3)})),
        (ragged(), ragged(2, 0, 2)), (ragged(), ragged().to_padded()), ([1.0], [1.0, 2.0]), ({"a": 1.0}, {"a": 1.1}),
        (torch.ones(2), torch.ones(3)), ("a", "b"), (None, 1),
    ],
)  # fmt: skip
def test_what_differs_raises(actual: Any, expected: Any):
    for a, b in ((actual, expected), (expected, actual)):
        with pytest.raises(AssertionError, match=r"tdc\.testing\.assert_close: expected one form"):
            assert_close(a, b)


class TestText(TestCase):
    def test_all_at_once(self):
        other = TensorDict(
            {"x": torch.zeros(3, 2), "i": T([0.0, 1.0, 2.0]), "s": Static("b"), "n": {"r": ragged(0, 2, 3)}}, [3],
            q=torch.ones(3),
        )  # fmt: skip
        with pytest.raises(AssertionError) as caught:
            assert_close(tree(), other)
        self.assertExpectedInline(str(caught.value), """\
tdc.testing.assert_close: expected one form and close values, got 10 differences
at i: The values for attribute 'dtype' do not match: torch.int64 != torch.float32.
at n.p: not expected
at n.r: other lengths in 2 of 3 examples, the first is example 0
at o: not expected
at q: missing
at s: Static('a'), expected Static('b')
at step.obs: not expected
at x: Mismatched elements: 6 / 6 (100.0%), Greatest absolute difference: 1.0 at index (0, 0)
at n.e: not expected
at step: not expected
hint: rtol= and atol= say how close values are to be""")  # fmt: skip
