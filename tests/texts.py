"""What the tests of error texts share: two batches, and a test case that pins class and text of what a call raises."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import TestCase

import tdc
from tdc import NestedTensor, TdcError, TensorDict

T = torch.tensor


def tree() -> TensorDict:
    return TensorDict({"tokens": torch.zeros(3, 4, 2), "meta": {"label": torch.zeros(3, 4).long()}}, [3, 4])


def ragged(*lengths: int) -> NestedTensor:
    return tdc.pack([torch.zeros(n, 4) for n in lengths or (2, 0, 3)])


class Texts(TestCase):
    """One helper: run it, and compare class and text of what it raises."""

    def says(self, fn: Callable[[], Any], expected: str) -> None:
        with pytest.raises(TdcError) as caught:
            fn()
        text = str(caught.value)
        assert re.fullmatch(r"tdc\.[\w.]+: expected .*, got .*(\nat .*)*\nhint: .+", text)
        self.assertExpectedInline(f"{type(caught.value).__name__}\n{text}", expected, skip=1)
