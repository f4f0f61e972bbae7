"""Functions compiled with buckets beside eager calls; NaN in the filling shows a result that reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tdc
from tdc.compile import counted
from tdc.compile.filling.program import Program
from tdc.testing import assert_close


def ragged(*lengths: int, features: int = 4) -> tdc.NestedTensor:
    return tdc.pack([torch.randn(n, features) for n in lengths])


def compared(fn: Any, *batches: Any, atol: float = 1e-6, **options: Any) -> counted:
    """A function compiled with buckets, whose results are those of eager calls."""
    run = counted(fn, backend="eager", **{"buckets": "auto", **options})
    for batch in batches:
        assert_close(run(batch), fn(batch), rtol=1e-5, atol=atol)
    return run


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill with NaN instead of last entries."""
    fill = Program.filled

    def poisoned(self: Program, x: Any, val: Any, sizes: Any) -> Any:
        found = fill(self, x, val, sizes)
        if found is None or found is x or not found.is_floating_point():
            return found
        out = torch.full_like(found, float("nan"))
        out[tuple([slice(n) for n in x.shape])] = x
        return out

    monkeypatch.setattr(Program, "filled", poisoned)
