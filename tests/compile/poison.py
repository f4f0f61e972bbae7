"""NaN in the filling of floating point inputs, so that a result that reads it shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tdc.compile.filling.program import Program


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
