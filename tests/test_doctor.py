"""The doctor's report: a line for each thing on this machine, and a hint for each thing that another one may lack."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from tdc import __version__, doctor
from tdc.compile._torch.probes import PROBES as COMPILE_PROBES
from tdc.core.probes import PROBES as CORE_PROBES
from tdc.doctor import EXTRAS, Finding


def report(monkeypatch: pytest.MonkeyPatch, *found: Finding) -> tuple[int, str]:
    monkeypatch.setattr(doctor, "findings", lambda: iter(found))
    stream = io.StringIO()
    return doctor.doctor(stream), stream.getvalue()


def test_this_machine_passes():
    stream = io.StringIO()
    status = doctor.doctor(stream)
    text = stream.getvalue()
    assert status == 0, text
    assert text.endswith("all well\n")
    names = ["tdc", "python", "torch", "optree", "c++", "headers", "devices", "threads", "compile cpu"]
    for name in [*names, *(f"extra {extra}" for extra in EXTRAS)]:
        assert re.search(rf"^(ok|-) +{re.escape(name)} +\S", text, re.MULTILINE), f"no line for {name}:\n{text}"
    assert __version__ in text
    assert metadata.version("torch") in text
    assert re.search(r"Inductor works, \d+\.\d s", text)
    for probe, _ in (*CORE_PROBES, *COMPILE_PROBES):
        assert f"ok   torch does   {probe}\n" in text


def test_report_reads_well(monkeypatch: pytest.MonkeyPatch):
    status, text = report(
        monkeypatch,
        Finding("torch", True, "2.13.0"),
        Finding("extra io", None, "safetensors not installed", "optional: pip install it"),
        Finding("c++", False, "no g++", "install g++"),
    )
    assert status == 1
    assert text.splitlines() == [
        "ok   torch        2.13.0",
        "-    extra io     safetensors not installed",
        "                  -> optional: pip install it",
        "FAIL c++          no g++",
        "                  -> install g++",
        "1 failing",
    ]


def test_absent_optional_package_is_no_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "installed", lambda package: None)
    finding = doctor.find_extra("viz")
    assert finding.ok is None
    assert finding.text == "matplotlib not installed, rich not installed"
    assert 'pip install "torch-tdc[viz]"' in finding.hint
    assert report(monkeypatch, finding)[0] == 0


@pytest.mark.parametrize(
    ("version", "ok"),
    [("2.13.0+cpu", True), ("2.11.0", True), ("3.0", True), ("2.11.0a0+git1", True), ("2.10.9", False), (None, False)],
)
def test_version_of_torch(monkeypatch: pytest.MonkeyPatch, version: str | None, ok: bool):
    monkeypatch.setattr(doctor, "installed", lambda package: version)
    finding = doctor.find_package("torch")
    assert finding.ok is ok
    assert bool(finding.hint) is not ok
    if not ok:
        assert finding.hint == 'pip install "torch>=2.11"'


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


def test_a_probe_that_fails_is_a_finding():
    assert doctor.find_probe("marks", lambda: True) == Finding("torch does", True, "marks")
    finding = doctor.find_probe("marks", lambda: False)
    assert (finding.ok, finding.text) == (False, "marks")
    assert "torch 2.11 to 2.13" in finding.hint
    finding = doctor.find_probe("marks", lambda: [][0])
    assert (finding.ok, finding.text) == (False, "marks: IndexError: list index out of range")


def test_compile_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    def broken(*args, **kwargs):
        raise RuntimeError("\n\nno kernel\nand a long trace")

    monkeypatch.setattr(torch, "compile", broken)
    finding = doctor.find_compile("cpu")
    assert finding.ok is False
    assert finding.text == "RuntimeError: no kernel"


def test_compile_with_a_wrong_result_is_a_finding(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "compile", lambda fn, **kwargs: lambda x: fn(x) * 2)
    finding = doctor.find_compile("cpu")
    assert finding.ok is False
    assert finding.text.startswith("AssertionError")


@pytest.mark.slow
def test_compile_without_a_compiler_fails_in_spite_of_caches():
    """In a process of its own, since Inductor looks for the compiler once."""
    code = "from tdc.doctor import find_compile; f = find_compile('cpu'); print(f.ok, f.text)"
    environment = os.environ | {"CXX": "no-such-compiler"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("False InductorError: InvalidCxxCompiler")


def test_hint_names_a_space_in_the_path():
    assert "a path with a space" in doctor.compile_hint("/a b/torch")
    assert "a path with a space" not in doctor.compile_hint("/ab/torch")


def test_one_line_is_short():
    assert doctor.one_line("\n a \n b") == "a"
    assert doctor.one_line("") == ""
    assert doctor.one_line("x" * 101) == "x" * 99 + "…"
