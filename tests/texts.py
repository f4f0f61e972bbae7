"""What the tests of error texts share: two batches, and a check of class and text of what a call raises.

`EXPECTTEST_ACCEPT=1` writes the texts of a table anew.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import TestCase

import tdc
from tdc import NestedTensor, TdcError, TensorDict

T = torch.tensor
Says = tuple[Callable[[], Any], str]  # a call, and the class and text of its error
FORM = re.compile(r"tdc\.[\w.]+: expected .*, got .*(\nat .*)*\nhint: .+")


def tree() -> TensorDict:
    return TensorDict({"tokens": torch.zeros(3, 4, 2), "meta": {"label": torch.zeros(3, 4).long()}}, [3, 4])


def ragged(*lengths: int) -> NestedTensor:
    return tdc.pack([torch.zeros(n, 4) for n in lengths or (2, 0, 3)])


def check_text(fn: Callable[[], Any], expected: str) -> None:
    """Run it, and compare class and text of what it raises."""
    with pytest.raises(TdcError) as caught:
        fn()
    found = f"{type(caught.value).__name__}\n{caught.value}"
    assert FORM.fullmatch(str(caught.value))
    if os.environ.get("EXPECTTEST_ACCEPT") == "1":
        path = Path(fn.__code__.co_filename)
        path.write_text(path.read_text(encoding="utf-8").replace(expected, found), encoding="utf-8")
        return
    assert found == expected


def says(table: dict[str, Says]) -> Callable[[str], None]:
    """A test of each entry of a table."""

    @pytest.mark.parametrize("name", table)
    def test_says(name: str) -> None:
        check_text(*table[name])

    return test_says


def said(error: type[Exception], fn: Callable[[], Any]) -> str:
    """The text of the error that a call raises."""
    with pytest.raises(error) as caught:
        fn()
    return str(caught.value)


def refused(call: Callable[[], Any], error: type[TdcError], hint: str) -> None:
    """It raises this class, in our three parts, and the spelling is in the last."""
    with pytest.raises(TdcError) as caught:
        call()
    text = str(caught.value)
    assert isinstance(caught.value, error), text
    assert FORM.fullmatch(text), text
    assert hint in text, text


class Texts(TestCase):
    """The same as a method, for tests that prepare what they call."""

    def says(self, fn: Callable[[], Any], expected: str) -> None:
        check_text(fn, expected)
