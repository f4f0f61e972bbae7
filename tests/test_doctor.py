"""The doctor's report: a line for each thing on this machine, and a hint for each thing that another one may lack."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tomllib
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tdc import __version__, doctor
from tdc.__main__ import main
from tdc.core import private
from tdc.doctor import PROBES, TESTED, Finding

ROOT = Path(__file__).resolve().parents[1]


def report(monkeypatch: pytest.MonkeyPatch, *found: Finding, verbose: bool = False) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "findings", lambda: iter(found))
    stream = io.StringIO()
    return doctor.doctor(stream, verbose=verbose), stream.getvalue()


def pinned(file: str) -> str:
    """The version of torch that a file of requirements pins."""
    return re.findall(r"^torch==(\d+\.\d+)", (ROOT / file).read_text(encoding="utf-8"), re.M)[0]


@pytest.mark.sweep
@pytest.mark.slow
def test_this_machine_passes():
    stream = io.StringIO()
    status = doctor.doctor(stream)
    text = stream.getvalue()
    assert status == 0, text
    assert text.endswith("all well\n")
    assert len(text.splitlines()) <= 20
    names = ["tdc", "python", "torch", "optree", "numpy", "c++", "devices", "extras", *doctor.PROGRAMS, "internals"]
    for name in names:
        assert re.search(rf"^(ok|-) +{re.escape(name)} +\S", text, re.MULTILINE), f"no line for {name}:\n{text}"
    assert __version__ in text
    assert metadata.version("torch") in text
    assert re.search(r"^ok   counted      one graph for two batches, as eager: cpu \d+\.\d s", text, re.MULTILINE)
    assert f"internals    {len(PROBES)} of {len(PROBES)} as expected" in text


def test_verbose_lists_everything(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "PROGRAMS", {})
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["doctor", "--verbose"]) == 0
    text = stream.getvalue()
    for name, _ in PROBES:
        assert f"ok   torch does   {name}\n" in text
    for name in ["headers +/", "threads +1", "extra +io: safetensors", "extra +hf: "]:
        assert re.search(rf"^(ok|-) +{name}", text, re.MULTILINE), f"no line for {name}:\n{text}"


def test_report_reads_well(monkeypatch: pytest.MonkeyPatch):
    found = [
        Finding("torch", True, "2.13.0"),
        Finding("extra", None, "io: safetensors not installed", detail=True),
        Finding("torch does", False, "marks", detail=True),
        Finding("c++", False, "no g++", "install g++"),
        Finding("counted", False, "cpu: KeyError: 'x'", "report it", trace="Traceback: of KeyError"),
    ]
    status, text = report(monkeypatch, *found)
    assert status == 1
    assert text.splitlines() == [
        "ok   torch        2.13.0", "FAIL c++          no g++", "                  -> install g++",
        "FAIL counted      cpu: KeyError: 'x'", "                  -> report it", "2 failing",
    ]  # fmt: skip
    status, text = report(monkeypatch, *found, verbose=True)
    assert status == 1
    assert text.splitlines() == [
        "ok   torch        2.13.0", "-    extra        io: safetensors not installed", "FAIL torch does   marks",
        "FAIL c++          no g++", "                  -> install g++", "FAIL counted      cpu: KeyError: 'x'",
        "                  -> report it", "Traceback: of KeyError", "2 failing",
    ]  # fmt: skip


def test_extras_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = doctor.requirements()
    assert extras.pop("") == {"torch": "2.11", "optree": "0.13"}
    assert {extra: sorted(packages) for extra, packages in extras.items()} == {
        extra: sorted([re.split(r"[\[<>=]", line)[0] for line in lines])
        for extra, lines in project["optional-dependencies"].items()
    }
    assert extras["hf"]["transformers"] == "5"


def test_absent_optional_package_is_no_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "installed", lambda package: "4.57.1" if package in ("rich", "transformers") else None)
    extras = {"viz": {"matplotlib": "", "rich": ""}, "hf": {"transformers": "5"}, "rich": {"rich": ""}}
    found = list(doctor.find_extras(extras))
    assert found == [
        Finding("extra", None, "viz: matplotlib not installed, rich 4.57.1", detail=True),
        Finding("extra", None, "hf: transformers 4.57.1, older than 5", detail=True),
        Finding("extra", True, "rich: rich 4.57.1", detail=True),
        Finding("extras", True, "rich"),
        Finding("extras", None, "not installed: viz, hf", 'optional: pip install "torch-tdc[NAME]"'),
    ]
    assert doctor.find_numpy().ok is None
    assert report(monkeypatch, *found, doctor.find_numpy())[0] == 0


def test_without_metadata_extras_are_unknown(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "DISTRIBUTION", "no-such-distribution")
    assert doctor.requirements() == {"": {"torch": "", "optree": ""}}
    [finding] = doctor.find_extras({})
    assert (finding.ok, finding.text) == (None, "unknown: no-such-distribution is not installed")


@pytest.mark.parametrize(
    ("version", "ok"),
    [("2.13.0+cpu", True), ("2.11.0", True), ("3.0", True), ("2.11.0a0+git1", True), ("2.10.9", False), (None, False)],
)
def test_version_of_torch(monkeypatch: pytest.MonkeyPatch, version: str | None, ok: bool):
    monkeypatch.setattr(doctor, "installed", lambda package: version)
    finding = doctor.find_package("torch", "2.11")
    assert finding.ok is ok
    assert bool(finding.hint) is not ok
    if not ok:
        assert finding.hint == 'pip install "torch>=2.11"'
    tested = "while tdc is tested with 2.11, and 2.13 to 2.15"
    assert (tested in finding.text) is (version == "3.0")


def test_pinned_versions_are_those_tested():
    assert {pinned("constraints.txt"), pinned("requirements-newest.txt")} <= {*TESTED}
    assert pinned("requirements-newest.txt") == TESTED[-1]


def fake_compiler(folder: Path, name: str, body: str = "echo fake 1.0") -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.fixture
def empty_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A PATH on which there is nothing yet, as Linux would look through it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def test_no_compiler(empty_path: Path):
    assert doctor.find_cxx() == Finding("c++", False, "no g++", "install g++ (Debian: apt install g++)")


def test_compiler_by_default_name(empty_path: Path):
    fake_compiler(empty_path, "g++")
    assert doctor.find_cxx() == Finding("c++", True, f"{empty_path / 'g++'}: fake 1.0")


def test_other_compiler_is_named(empty_path: Path):
    fake_compiler(empty_path, "clang++")
    assert doctor.find_cxx() == Finding("c++", False, "no g++", "set CXX=clang++, which is there")


def test_compiler_from_environment(empty_path: Path, monkeypatch: pytest.MonkeyPatch):
    fake_compiler(empty_path, "clang++")
    monkeypatch.setenv("CXX", "clang++")
    assert doctor.find_cxx().ok


def test_compiler_that_does_not_run(empty_path: Path):
    fake_compiler(empty_path, "g++", "exit 3")
    finding = doctor.find_cxx()
    assert finding.ok is False
    assert "does not run: CalledProcessError" in finding.text


def test_no_headers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda name: str(tmp_path))
    finding = doctor.find_headers()
    assert finding.ok is False
    assert re.search(r"apt install python3\.\d+-dev", finding.hint)


def test_a_probe_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(private, "OFF", {})
    assert doctor.find_probe("marks", lambda: True) == Finding("torch does", True, "marks", detail=True)
    assert doctor.find_probe("marks", lambda: False) == Finding("torch does", False, "marks", detail=True)
    finding = doctor.find_probe("marks", lambda: [][0])
    assert (finding.ok, finding.text) == (False, "marks: IndexError: list index out of range")
    monkeypatch.setattr(doctor, "PROBES", (("marks", lambda: False), ("counts", lambda: True)))
    summary = list(doctor.find_internals())[-1]
    assert (summary.name, summary.ok, summary.detail) == ("internals", False, False)
    assert summary.text == "1 of 2 as expected, not these: marks"
    assert "torch 2.11, and 2.13 to 2.15" in summary.hint


def test_a_feature_that_is_off_is_no_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(private, "OFF", {})
    monkeypatch.setitem(private.LOST, "counters", "kernel counts")
    monkeypatch.setattr(doctor, "FEATURES", (("ours", lambda: True), ("of newer ones", lambda: False)))

    def probe() -> bool:
        private.switch_off("counters", "torch.x is gone")  # which warns, and warnings are errors here
        return False

    monkeypatch.setattr(doctor, "PROBES", (("counts", probe),))
    found = [*doctor.find_internals(), *doctor.find_off()]
    assert found[1:] == [
        Finding("internals", None, "0 of 1 as expected, not these: counts"),
        Finding("off", None, "counters: torch.x is gone; lost: kernel counts"),
        Finding("off", None, "a newer torch has: of newer ones"),
    ]
    assert report(monkeypatch, *found)[0] == 0


def test_many_features_that_are_off_take_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(private, "OFF", dict.fromkeys("abcde", "gone"))
    monkeypatch.setattr(doctor, "FEATURES", ())
    found = list(doctor.find_off())
    assert [finding.text for finding in found if not finding.detail] == ["a; b; c; d; e"]
    assert [finding.text for finding in found if finding.detail] == [f"{name}: gone" for name in "abcde"]


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("\n\nno kernel\nand a long trace")


def test_programs_that_raise_are_findings(monkeypatch: pytest.MonkeyPatch):
    for name, (program, text) in doctor.PROGRAMS.items():
        monkeypatch.setattr(doctor, name, broken)
        finding = doctor.find_program(name, program, text)
        assert (finding.name, finding.ok) == (name, False)
        assert finding.text == "cpu: RuntimeError: no kernel"
        assert "and a long trace" in finding.trace


def test_programs_with_wrong_numbers_are_findings(monkeypatch: pytest.MonkeyPatch):
    class counted:
        counts: Any = None

        def __init__(self, net: Any) -> None:
            self.net = net

        def __call__(self, batch: Any) -> Any:
            return self.net(batch) * 1.01

    def train_step(net: Any, loss: Any, optimizer: Any, *, compile: bool) -> Any:
        rate = 1e-2 if compile else 1.1e-2
        return doctor_train_step(net, loss, doctor.adamw(rate, eps=1e-3), compile=False)

    doctor_train_step = doctor.train_step
    monkeypatch.setattr(doctor, "counted", counted)
    monkeypatch.setattr(doctor, "train_step", train_step)
    monkeypatch.setattr(doctor, "load", lambda path: lambda batch: torch.zeros(4, 3))
    found = [doctor.find_program(name, program, text).text for name, (program, text) in doctor.PROGRAMS.items()]
    assert found == [f"cpu: AssertionError: {what} differ from eager" for what in ("results", "losses", "results")]


def test_programs_that_compile_again_are_findings(monkeypatch: pytest.MonkeyPatch):
    counted = doctor.counted
    monkeypatch.setattr(doctor, "counted", lambda net: counted(net, backend="eager", dynamic=False))
    monkeypatch.setattr(doctor, "pack", lambda rows: torch.stack([row[:2] for row in rows]))  # of sizes nobody marked
    finding = doctor.find_program("counted", doctor.run_counted, "")
    assert finding.text == "cpu: AssertionError: 2 compiles for batches of other lengths, expected 1"


def test_warnings_of_a_program_are_hidden(monkeypatch: pytest.MonkeyPatch):
    finding = doctor.find_program("counted", lambda device: warnings.warn("of a feature", stacklevel=1), "done")
    assert finding.ok
    assert finding.text.startswith("done: cpu ")


def test_programs_change_no_random_numbers():
    before = torch.get_rng_state()
    doctor.scorer("cpu")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.sweep
@pytest.mark.slow
def test_compile_without_a_compiler_fails_in_spite_of_caches():
    """In a process of its own, since Inductor looks for the compiler once."""
    code = "from tdc.doctor import *; f = find_program('counted', run_counted, ''); print(f.ok, f.text, f.hint)"
    environment = os.environ | {"CXX": "no-such-compiler"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("False cpu: InvalidCxxCompiler")
    assert "see the failing lines above" in run.stdout


def test_hints_of_programs(monkeypatch: pytest.MonkeyPatch):
    assert "a path with a space" in doctor.program_hint("/a b/torch")
    assert doctor.program_hint("/ab/torch").startswith("please report it with the output of")
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert doctor.program_hint("/ab/torch").startswith(f"tdc {__version__} is tested with torch 2.11, and 2.13 to 2.15")
    monkeypatch.setattr(doctor, "find_headers", lambda: Finding("headers", False, "no Python.h"))
    assert doctor.program_hint("/ab/torch") == "see the failing lines above"


def test_one_line_is_short():
    assert doctor.one_line("\n a \n b") == "a"
    assert doctor.one_line("") == ""
    assert doctor.one_line("x" * 101) == "x" * 99 + "…"


def test_one_line_is_of_the_exception_that_dynamo_wrapped():
    class BackendCompilerFailed(RuntimeError):
        inner_exception = KeyError("x")

    assert doctor.one_line(BackendCompilerFailed("backend='_note' raised:")) == "KeyError: 'x'"
