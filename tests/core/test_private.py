"""A private name of torch that is gone costs a feature, with one warning, and never right numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tdc
from tdc.compile import backend, counted
from tdc.compile._torch import bodies, kernels
from tdc.compile._torch.bodies import BRANCHES, MEMORY, ORDER
from tdc.compile._torch.kernels import KERNELS
from tdc.core import private
from tdc.core.errors import UnsupportedError, refusing
from tdc.core.private import OFF, FeatureWarning, Gone, find, find_or, optional, suspended

SCRIPT = Path(__file__).parents[1] / "hide_names.py"
FEW = (  # one of each kind; `python tests/hide_names.py` tries all of them
    "torch:_C._are_functorch_transforms_active",
    "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
    "torch._dynamo.comptime:comptime",
    "torch._functorch.config:donated_buffer",
    "torch._inductor.compile_fx:compile_fx_inner",
    "torch._inductor.ir:WhileLoop",
)


@pytest.fixture(autouse=True)
def features() -> Iterator[None]:
    """All features as they were, and no graph of a cache."""
    before = dict(OFF)
    with (
        find("torch._functorch.config:patch")(enable_autograd_cache=False),
        find("torch._inductor.config:patch")(fx_graph_cache=False),
    ):
        yield
    OFF.clear()
    OFF.update(before)


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Hides names from the library."""

    def hidden(*names: str) -> None:
        resolve = private.resolve_name

        def resolved(path: str) -> Any:
            if path in names:
                raise AttributeError(path)
            return resolve(path)

        monkeypatch.setattr(private, "resolve_name", resolved)

    return hidden


def test_find():
    assert find("torch.nn:Linear") is torch.nn.Linear
    assert find("torch.nn:Lineer", "torch.nn:Linear") is torch.nn.Linear
    assert find("torch:add_", "torch:add", takes=()) is torch.add
    with pytest.raises(Gone, match=r"torch\.nn:Lineer is gone"):
        find("torch.nn:Lineer", "torch.not_there:Linear")
    with pytest.raises(Gone, match=r"torch\.nn:Linear takes no bios"):
        find("torch.nn:Linear", takes=("in_features", "bios"))


def test_what_is_gone_is_said_once():
    with pytest.warns(FeatureWarning, match=r"tdc: speed is off on torch .*: torch:_gone is gone; lost: some"):
        assert find_or(3, "torch:_gone", feature="speed", lost="some") == 3
    assert find_or(3, "torch:_gone", feature="speed", lost="some") == 3
    assert OFF["speed"] == "torch:_gone is gone; lost: some"


def test_a_function_without_its_names():
    calls: list[str] = []

    @optional("seconds", lost="time", instead=lambda x: -x)
    def second(x: int) -> int:
        calls.append("tried")
        return x + find("torch:_gone")

    with pytest.warns(FeatureWarning, match="seconds is off"):
        assert second(2) == -2
    assert second(3) == -3
    assert calls == ["tried"]


def test_errors_of_its_own_are_no_lack():
    @optional("thirds", lost="time", instead=lambda: 0)
    def third() -> int:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        third()
    assert "thirds" not in OFF


def test_suspended():
    with suspended(["a", "b"]):
        assert {"a", "b"} <= OFF.keys()
    assert not {"a", "b"} & OFF.keys()


def test_refusing_says_what_is_off():
    with pytest.raises(UnsupportedError, match=r"got sums\nhint: python -m tdc doctor"):
        refusing("sums")(1, x=2)


def two_lines(x: Tensor) -> Tensor:
    return (x.sin() * 2 + 1).sum(0)


@pytest.mark.slow
def test_a_name_that_is_gone_costs_a_feature(hide: Any):
    hide("torch._inductor.memory:reorder_for_peak_memory")
    with pytest.warns(FeatureWarning, match="loops gathered into fewer kernels is off"):
        got = counted(two_lines)(torch.ones(3, 5))
    torch.testing.assert_close(got, two_lines(torch.ones(3, 5)))
    assert [*OFF] == [KERNELS]


@pytest.mark.sweep
@pytest.mark.slow
def test_a_form_that_changed_costs_a_feature(monkeypatch: pytest.MonkeyPatch):
    """What fails while a graph is compiled, and is not in the way when it is off."""

    def broken(nodes: Any) -> Any:
        raise TypeError("reorder() got an unexpected keyword argument")

    monkeypatch.setattr(kernels, "is_loop", broken)
    with pytest.warns(FeatureWarning, match=r"fewer kernels is off .*TypeError: reorder\(\) got .*; lost: some speed"):
        got = counted(two_lines)(torch.ones(3, 6))
    torch.testing.assert_close(got, two_lines(torch.ones(3, 6)))
    assert [*OFF] == [KERNELS]


def test_an_error_of_the_graph_stays(monkeypatch: pytest.MonkeyPatch):
    """With and without our changes."""
    monkeypatch.setattr("torch._inductor.graph.GraphLowering.run", refuse)
    with pytest.raises(Exception, match="no such lowering"):
        counted(two_lines)(torch.ones(3, 7))
    assert not OFF


def refuse(*args: Any) -> None:
    raise TypeError("no such lowering")


def unchanged(x: Tensor) -> Any:
    """A round adds nothing to one carry, whose memory Inductor takes for what follows."""
    start = torch.zeros((), dtype=torch.int64), x.cos(), x.sin()
    _, y, z = tdc.while_loop(lambda i, y, z: i < 3, lambda i, y, z: (i + 1, y * 0.5, z + torch.zeros_like(z)), start)
    return z, x.sin().exp() @ y


@pytest.mark.slow
def test_loops_are_refused_where_torch_is_wrong_and_cannot_be_mended(hide: Any):
    """A probe asks by numbers."""
    hide("torch._inductor.ir:WhileLoop")
    wrong = bodies.overwrites_operands()
    text = "a loop, branch or region that Inductor runs right"
    said = pytest.raises(Exception, match=text) if wrong else nullcontext()
    x = torch.randn(5, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FeatureWarning)
        with said:
            for got, wanted in zip(counted(unchanged)(x), unchanged(x), strict=True):
                torch.testing.assert_close(got, wanted)
    assert MEMORY in OFF


RAW: Any = find("torch._higher_order_ops:while_loop")
OF_LOOP = lambda i, y, z: i < 3, lambda i, y, z: (i + 1, y * 0.5, z + torch.zeros_like(z))


def carry_of(x: Tensor) -> tuple[Tensor, ...]:
    return torch.zeros((), dtype=torch.int64), x.cos(), x.sin()


@pytest.mark.sweep
@pytest.mark.slow
def test_loops_are_refused_where_the_form_changed(monkeypatch: pytest.MonkeyPatch):
    """The change that keeps their memory apart fails while they are compiled, and is switched off."""
    monkeypatch.setattr(bodies, "memory_of", refuse)
    x = torch.randn(5, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FeatureWarning)
        with pytest.raises(Exception, match="a loop, branch or region that Inductor runs right"):
            torch.compile(lambda x: RAW(*OF_LOOP, carry_of(x)), backend=backend, fullgraph=True)(x)


@pytest.mark.sweep
@pytest.mark.slow
def test_branches_without_their_order(hide: Any):
    hide(*[f"{path}.create" for path in BRANCHES])

    def either(x: Tensor, take: Tensor) -> Any:
        return tdc.cond(take, lambda x: x.sin(), lambda x: x + 1, (x,))

    x, take = torch.ones(3), torch.tensor(True)
    with pytest.warns(FeatureWarning, match="operands of branches in order is off"):
        torch.testing.assert_close(counted(either)(x, take), x.sin())
    assert ORDER in OFF


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", FEW)
def test_programs_without_a_name(name: str):
    """In a process that imports the library without it."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, str(SCRIPT), name], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "off: nothing" not in found.stdout, "the programs do not ask for the name"


@pytest.mark.sweep
def test_programs_without_any_name():
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
