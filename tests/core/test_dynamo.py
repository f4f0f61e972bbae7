"""Canaries: what `core/dynamo.py` and `torch_functions.py` rely on holds in this torch, and a probe can fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tdc.core import dynamo, probes, torch_functions
from tdc.core.probes import FEATURES, PROBES


@pytest.mark.parametrize("holds", [pytest.param(holds, id=name) for name, holds in PROBES])
def test_holds(holds: Callable[[], bool]):
    torch._dynamo.reset()
    assert holds(), holds.__doc__


@pytest.mark.parametrize("has", [pytest.param(has, id=name) for name, has in FEATURES])
def test_feature(has: Callable[[], bool]):
    assert has() is (torch.__version__ >= "2.12")


def nothing(*args: Any, **kwargs: Any) -> None:
    """A mark that marks nothing."""


def as_it_is(x: Tensor, *dims: int) -> Tensor:
    return x


BROKEN: tuple[tuple[str, Any, str, Any], ...] = (  # the probe, and what stops working
    ("sizes marked", probes, "mark_dynamic", as_it_is),
    ("sizes of results marked", probes, "mark_result", as_it_is),
    ("sizes of results marked", probes, "mark_only_result", as_it_is),
    ("another function traced", probes, "trace_as", nothing),
    ("constants of a graph", dynamo, "constant", lambda fn: fn),
    ("transforms and traces told", dynamo, "eager", lambda: True),
    ("transforms and traces told", dynamo, "in_direction", lambda: False),
    ("dispatch modes told", dynamo, "readable", dynamo.eager),
    ("assertions on data", torch_functions, "assert_async", nothing),
    ("checkpoints of containers", torch_functions, "checkpoint_operator", None),
    ("memory and its changes", dynamo, "stamp", id),
)


def fails(holds: Callable[[], bool]) -> bool:
    """Whether a probe says no, or raises."""
    try:
        return not holds()
    except Exception:
        return True


@pytest.mark.parametrize(("name", "module", "attribute", "broken"), BROKEN)
def test_probe_fails_where_torch_changed(
    monkeypatch: pytest.MonkeyPatch, name: str, module: Any, attribute: str, broken: Any
):
    torch._dynamo.reset()
    monkeypatch.setattr(module, attribute, broken)
    assert fails(dict(PROBES)[name]), f"{name} holds without {attribute}"


def test_functions_handed_on_are_missed(monkeypatch: pytest.MonkeyPatch):
    known = torch.overrides.get_overridable_functions()
    for module, ops in torch_functions.LEFT_OUT.items():
        monkeypatch.setitem(known, module, [op for op in known[module] if op not in ops])
    torch._dynamo.variables.torch.get_overridable_functions.cache_clear()
    try:
        assert fails(probes.hands_on)
    finally:
        monkeypatch.undo()
        torch._dynamo.variables.torch.get_overridable_functions.cache_clear()
