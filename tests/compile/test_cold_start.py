"""Files of what a process compiled: taken over by another, refused where they do not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import tdc
from tdc.compile import TrainStep, train_step
from tdc.compile._torch import caches
from tdc.optim import sgd

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def step() -> TrainStep:
    return train_step(nn.Linear(2, 1), lambda net, x: net(x).square().mean(), sgd(0.1))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: TrainStep) -> Path:
    """A file of made up artifacts, and a folder of caches of its own."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    monkeypatch.setattr(caches, "artifacts", lambda: b"graphs")
    monkeypatch.setattr(caches, "libraries", lambda: {"ab/cabc.main.so": b"kernel"})
    taken: list[bytes] = []
    monkeypatch.setattr(caches, "take_artifacts", lambda data: taken.append(data) or data == b"graphs")
    return step.save_cache(tmp_path / "step.cache")


def changed(file: Path, **entries: Any) -> Path:
    """A file with another meta, or with more entries."""
    with zipfile.ZipFile(file) as given:
        parts = {name: given.read(name) for name in given.namelist()}
    parts["meta.json"] = json.dumps({**json.loads(parts["meta.json"]), **entries.pop("meta", {})}).encode()
    with zipfile.ZipFile(file, "w") as out:
        for name, data in {**parts, **entries}.items():
            out.writestr(name, data)
    return file


def test_libraries_are_put_where_inductor_looks(file: Path, step: TrainStep, tmp_path: Path):
    assert step.load_cache(file) is True
    assert (tmp_path / "caches" / "ab" / "cabc.main.so").read_bytes() == b"kernel"
    assert caches.folder() == tmp_path / "caches"
    (tmp_path / "caches" / "ab" / "cabc.main.so").write_bytes(b"mine")
    step.load_cache(file)
    assert (tmp_path / "caches" / "ab" / "cabc.main.so").read_bytes() == b"mine"


def test_machine_code_of_another_processor_is_not_used(file: Path, step: TrainStep, tmp_path: Path):
    assert step.load_cache(changed(file, meta={"processor": "other"})) is False
    assert not (tmp_path / "caches" / "ab").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"meta": {"torch": "1.0"}}, "torch 1.0"),
        ({"meta": {"format": 99}}, "format 99"),
        ({"artifacts": b"damaged"}, "another in step.cache"),
        ({"libraries/../../escaped.so": b"kernel"}, "another in step.cache"),
    ],
)
def test_files_that_do_not_fit(change: Any, text: str, file: Path, step: TrainStep, tmp_path: Path):
    with pytest.raises(tdc.FormatError, match=text):
        step.load_cache(changed(file, **change))
    assert not (tmp_path / "caches").exists()


def test_no_file(step: TrainStep, tmp_path: Path):
    with pytest.raises(tdc.FormatError, match=r"no file none\.cache"):
        step.load_cache(tmp_path / "none.cache")
    (tmp_path / "empty.cache").write_bytes(b"")
    with pytest.raises(tdc.FormatError, match="BadZipFile"):
        step.load_cache(tmp_path / "empty.cache")
    with pytest.raises(tdc.DtypeError, match="a path"):
        step.load_cache(3)  # type: ignore[arg-type]  # the point


def test_nothing_compiled(step: TrainStep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(caches, "artifacts", lambda: None)
    with pytest.raises(tdc.StructureError, match="take a step first"):
        step.save_cache(tmp_path / "step.cache")
    assert not list(tmp_path.iterdir())


PROGRAM = """
import sys, torch, tdc
from torch import nn
from torch._dynamo.utils import counters
from tdc.compile import train_step
from tdc.optim import sgd
torch.manual_seed(0)
step = train_step(nn.Linear(2, 1), lambda net, x: net(x).sin().square().mean(), sgd(0.1))
if sys.argv[1] == "load":
    assert step.load_cache(sys.argv[2])
state, metrics = step(step.init(), torch.ones(3, 2))
print(counters["aot_autograd"]["autograd_cache_hit"], metrics["loss"].item())
if sys.argv[1] == "save":
    step.save_cache(sys.argv[2])
"""


@pytest.mark.sweep
@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path):
    found = {}
    for action in ("save", "load"):
        folder = tmp_path / action
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-c", PROGRAM, action, str(tmp_path / "step.cache")]
        out = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
        found[action] = out.split()
    assert [hits for hits, _ in found.values()] == ["0", "1"]
    assert found["save"][1] == found["load"][1]
    kernels = {p.relative_to(tmp_path / "save") for p in (tmp_path / "save").glob("*/*.main.so")}
    with zipfile.ZipFile(tmp_path / "step.cache") as given:
        assert {f"libraries/{k.as_posix()}" for k in kernels} <= set(given.namelist())
    assert kernels
