"""Exported programs in torch's own functions: `torch.compile`, `torch.export.save` and `load`, AOTInductor."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from versions import refused

import tdc
from tdc import MethodError, NestedTensor, TensorDict, UnsupportedError
from tdc.testing import assert_close

internals: Any = torch


def rows(*lengths: int) -> NestedTensor:
    return tdc.pack([torch.randn(n, 8) for n in lengths])


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2).requires_grad_(False)

    def forward(self, td: TensorDict) -> TensorDict:
        y = self.linear(td["x"])
        return td.set("sum", y.sum(1)).set("y", y.softmax(1))


@tdc.batch
def halved(x: Any) -> Tensor:
    x = x.abs().sum(0)
    while x.max() > 1:
        x = x / 2
    return x


FUNCTIONS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {  # a function, an example, another batch
    "encoder": lambda: (encoder(), rows(3, 2, 5), rows(4, 1, 1, 7)),
    "tensordict": lambda: (Sums(), *[TensorDict({"x": rows(*n)}, [len(n)]) for n in ((3, 2), (1, 5, 2))]),
    "batch": lambda: (halved, rows(3, 2, 5), rows(2, 6)),
}


def program(name: str) -> tuple[Any, tdc.compile.Exported, Any]:
    """A function, its program, and another batch than it was exported with."""
    fn, example, other = FUNCTIONS[name]()
    return fn, tdc.compile.export(fn, example), other


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_compiles_a_program(name: str):
    fn, exported, x = program(name)
    for run in (exported, exported.module, lambda x: exported(x)):
        torch._dynamo.reset()
        assert_close(internals.compile(run, fullgraph=True, backend="aot_eager")(x), fn(x), rtol=1e-4, atol=1e-5)


@pytest.mark.cases(1, 1)
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11, once in a process
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_saves_and_loads_a_program(name: str, tmp_path: Path):
    fn, exported, x = program(name)
    path = tmp_path / "model.pt2"
    with refused("Serializing .* is not supported", name == "batch"):
        torch.export.save(exported.program, path)
        assert_close(torch.export.load(path).module()(x), fn(x), rtol=1e-4, atol=1e-5)
        exported.save(path)
        assert_close(torch.export.load(path).module()(x), fn(x), rtol=1e-4, atol=1e-5)
        assert_close(exported.program.run_decompositions().module()(x), fn(x), rtol=1e-4, atol=1e-5)


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_torch_packages_a_program(name: str, tmp_path: Path):
    fn, exported, x = program(name)
    path = str(tmp_path / "model.pt2")
    internals._inductor.aoti_compile_and_package(exported.program, package_path=path)
    assert_close(internals._inductor.aoti_load_package(path)(x), fn(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(tdc.FormatError, match=r"torch\.export\.load or torch\._inductor\.aoti_load_package reads it"):
        tdc.compile.load(path)


def test_an_exported_function_is_saved_by_its_own_method():
    exported = program("tensordict")[1]
    for call in (lambda: pickle.dumps(exported), lambda: copy.deepcopy(exported)):
        with pytest.raises(UnsupportedError, match=r"hint: exported\.save\('model\.pt2'\), then tdc\.compile\.load"):
            call()


def test_names_of_torch_say_who_has_them():
    exported: Any = program("tensordict")[1]
    with pytest.raises(MethodError, match=r"got \.eval\nhint: exported\.module, which torch's functions take"):
        exported.eval()
    with pytest.raises(MethodError, match=r"got \.graph_module\nhint: exported\.program,"):
        exported.graph_module()
    with pytest.raises(AttributeError, match="'Exported' object has no attribute 'nothing'"):
        exported.nothing()
