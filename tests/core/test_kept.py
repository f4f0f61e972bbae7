"""Results that are kept for ints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tdc
from tdc.core import kept
from tdc.core.kept import kept_for_ints


def test_ints_are_computed_once(monkeypatch: pytest.MonkeyPatch):
    """Lists and tuples of them are alike; others are computed at each call, also where they are equal."""
    calls: list[Any] = []
    monkeypatch.setattr(kept, "MOST", 3)
    fn = kept_for_ints(lambda *args: calls.append(args) or args)
    for args in ((1, (2, 3)), (1, [2, 3]), (1, torch.Size((2, 3))), (1, "same")):
        assert fn(*args)[0] == 1
    assert calls == [(1, (2, 3)), (1, "same")]
    others: list[Any] = [(True,), (1.0,), ((1.0, 1),), ((True, 1),), (None,)]
    for args in [*others, *others]:
        assert fn(*args) == args
    assert calls[2:] == [*others, *others]
    for n in range(5):
        fn(n)
        assert fn(n) == (n,)
    assert calls[12:] == [(n,) for n in range(5)]


@pytest.mark.parametrize("wrong", [1.0, True, (1.0, 1), [1, True], "1", None])
def test_what_is_equal_to_an_int_is_refused_as_before(wrong: Any):
    x, weight = tdc.pack([torch.randn(2, 5, 4), torch.randn(2, 3, 6)], ragged_dim=(2, 3)), torch.randn(3, 2, 1, 1)
    for _ in range(2):
        F.conv2d(x, weight, stride=1)
        F.conv2d(x, weight, stride=[1, 1])
        with pytest.raises(TypeError):  # of torch, before it hands on, or a DtypeError
            F.conv2d(x, weight, stride=wrong)


def test_planes_with_a_dim_of_one_size_at_either_end():
    """Structures that share what is kept, since only their axes differ, have other planes."""
    rows, weight = [torch.randn(2, 5, 4, 6), torch.randn(2, 5, 6, 3)], torch.randn(3, 2, 2, 2, 2)
    x = tdc.pack(rows, ragged_dim=(3, 4))
    y = x.movedim(2, 4)
    for _ in range(2):
        for batch, order in ((x, (0, 1, 2, 3)), (y, (0, 2, 3, 1))):
            for found, row in zip(F.conv3d(batch, weight).unbind(), rows, strict=True):
                assert torch.allclose(found, F.conv3d(row.permute(order), weight), atol=1e-5)
