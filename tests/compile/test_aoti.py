"""AOTInductor packages, from Python and from C++, and the examples that serve them. All of this compiles."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from exports import Model, batch, export_model, meta, the_same

import tdc
from tdc import FormatError, StructureError, UnsupportedError
from tdc.compile import load

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SIZES = [(2, 6, 1, 4), (3,), (1,), (0,), (0, 0), (5, 0, 7)]


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model().requires_grad_(False)


@pytest.fixture(scope="module")
def package(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package without weights; these lie beside it."""
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    return export_model(model).save(path, format="aoti", weights="separate")


def test_package_gives_the_numbers_of_eager(package: Path, model: Model):
    loaded = load(package)
    for lengths in SIZES:
        td, bias = batch(*lengths), torch.randn(2)
        the_same(loaded(td, bias=bias), model(td, bias=bias))
    assert repr(loaded) == repr(export_model(model))
    assert meta(package)["kind"] == "aoti"


@pytest.mark.sweep
def test_package_refuses_before_it_runs(package: Path):
    with pytest.raises(StructureError, match=r"at td\.x: length 8, not 0 to 7 \(L\)"):
        load(package)(batch(8, 2), bias=torch.ones(2))
    with pytest.raises(StructureError, match=r"at bias: Tensor float64\[2\] instead of Tensor float32\[2\]"):
        load(package)(batch(3, 2), bias=torch.ones(2).double())


@pytest.mark.sweep
def test_package_takes_other_weights(package: Path):
    other, td, bias = Model().requires_grad_(False), batch(2, 3), torch.ones(2)
    params = tdc.from_module(other)
    loaded = load(package, weights=params)
    the_same(loaded(td, bias=bias), other(td, bias=bias))
    the_same(loaded.load_weights(params * 0)(td, bias=bias)["mean"], torch.ones(2, 2))
    with pytest.raises(StructureError, match=r"at linear\.bias: missing"):
        loaded.load_weights(params.delete(("linear", "bias")))


@pytest.mark.sweep
def test_package_is_not_saved_again(package: Path):
    with pytest.raises(UnsupportedError, match="expected a program, got a compiled package"):
        load(package).save(package.with_name("again.pt2"))


def test_damaged_package_is_not_run(package: Path, tmp_path: Path):
    damaged = tmp_path / "model.pt2"
    content = bytearray(package.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64 * [7])
    damaged.write_bytes(content)
    with pytest.raises(FormatError, match=r"expected a \.pt2 file, got model\.pt2, which is damaged"):
        load(damaged)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The package of the Python example, and what the example printed."""
    path = tmp_path_factory.mktemp("service") / "model.pt2"
    return path, run([sys.executable, str(EXAMPLES / "aoti_service.py"), str(path)])


def run(command: list[str], text: str = "") -> str:
    """What a command prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), *sys.path])}
    done = subprocess.run(command, capture_output=True, text=True, input=text, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sweep  # as the service in C++
def test_python_service(service: tuple[Path, str]):
    printed = service[1]
    assert printed.startswith("Exported Classifier(tokens)")
    assert "['one text'] -> [" in printed
    assert "at tokens: length 540, not 0 to 512 (L)" in printed


def test_cpp_service(service: tuple[Path, str], tmp_path: Path):
    if shutil.which(os.environ.get("CXX", "g++").split()[0]) is None:
        pytest.skip("no C++ compiler: $CXX or g++")
    program, texts = tmp_path / "serve", ["one text", "another", "a third, which is longer than the others"]
    run([sys.executable, str(EXAMPLES / "cpp" / "build.py"), str(program)])
    printed = run([str(program), str(service[0])], "".join([f"{text}\n" for text in texts]))
    example: dict[str, Any] = runpy.run_path(str(EXAMPLES / "aoti_service.py"))
    got = torch.tensor([[float(x) for x in line.split()] for line in printed.splitlines()])
    torch.testing.assert_close(got, load(service[0])(example["pack"](texts)))


def test_examples_are_short():
    kinds = ("*.py", "decoding/*.py", "cpp/*.cpp", "cpp/*.py")
    files = [path for kind in kinds for path in EXAMPLES.glob(kind)]
    assert len(files) == 15
    assert all([len(path.read_text().splitlines()) < 120 for path in files])


@pytest.mark.sweep
def test_package_cuts_what_empty_examples_lack(tmp_path: Path):
    class Cut(torch.nn.Module):
        def forward(self, x: tdc.NestedTensor) -> tdc.NestedTensor:
            return x[:, 1:]

    x = tdc.pack([torch.arange(3.0), torch.arange(2.0)])
    loaded = load(tdc.compile.export(Cut(), (x,)).save(tmp_path / "cut.pt2", format="aoti"))
    assert loaded(x).tolist() == [[1.0, 2.0], [1.0]]
    assert loaded(tdc.pack([torch.zeros(0), torch.zeros(0)])).tolist() == [[], []]
