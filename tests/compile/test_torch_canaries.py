"""What `tdc/compile/_torch` relies on in torch, and what would degrade without an error if torch changed.

The probes are asked as `python -m tdc doctor` asks them; here they must hold. What only Inductor can answer follows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from tdc.compile import backend, counted, export, load, report
from tdc.compile._torch import probes
from tdc.compile._torch.probes import FEATURES, PROBES


@pytest.fixture(autouse=True)
def new_dynamo():
    torch._dynamo.reset()


@pytest.mark.parametrize("holds", [pytest.param(holds, id=name) for name, holds in PROBES])
def test_torch_does_what_we_rely_on(holds: Callable[[], bool]):
    assert holds()


@pytest.mark.parametrize("has", [pytest.param(has, id=name) for name, has in FEATURES])
def test_feature(has: Callable[[], bool]):
    assert has() or torch.__version__ < "2.13"


def test_probes_can_fail(monkeypatch):
    """Each of these is one change of torch."""
    monkeypatch.setattr(probes, "mark_static", lambda x: x)
    monkeypatch.setattr(probes, "mark_bounds", lambda *args: None)
    monkeypatch.setattr(probes, "at_trace_time", lambda fn: None)
    monkeypatch.setattr(probes, "trace_outside", lambda fn, x: fn(x))
    monkeypatch.setattr(probes, "graph_breaks", lambda: 0)
    monkeypatch.setattr(probes, "memory_budget", lambda budget: nullcontext())
    monkeypatch.setattr(probes, "innermost_transform", lambda: None)
    monkeypatch.setattr(probes, "current_compile", lambda: probes.NO_COMPILE)
    found = {name for name, holds in PROBES if not holds()}
    assert found == {
        "sizes marked static", "sizes marked with bounds", "calls while Dynamo traces",
        "assertions taken out of a graph", "graph breaks counted", "transforms seen", "ids of compiles",
        "budget of activations",
    }  # fmt: skip


def test_kernels_are_counted_and_read():
    """By the counter of Inductor, and by name and user's line from the code it wrote."""
    f = counted(lambda x: (x * 2 + 1).sum(), backend=backend)
    f(torch.ones(8, 9))
    assert f.counts.kernels == 1
    r = report(lambda x: torch.tanh(x) * 3, torch.ones(7), repeats=0)
    assert [k.language for k in r.kernels] == ["C++"]
    assert {"tanh", "mul"} <= set(r.kernels[0].ops)
    assert "test_torch_canaries.py" in r.kernels[0].where[0]
    assert r.bytes_moved == 2 * 7 * 4


@pytest.mark.slow
def test_aoti_takes_our_options(tmp_path):
    """Weights stay out of a package where they are to, and AOTInductor says which it uses."""
    exported = export(torch.nn.Linear(3, 2), torch.ones(4, 3))
    path = exported.save(tmp_path / "linear.pt2", format="aoti", weights="separate")
    loaded = load(path)
    assert sorted(loaded._package.compiled.get_constant_fqns()) == ["bias", "weight"]
    x = torch.randn(5, 3)
    torch.testing.assert_close(loaded(x), exported(x))
