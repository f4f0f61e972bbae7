"""Says what this machine has, what it lacks, and whether `torch.compile` works on it.

`doctor` prints one line per item and, under each one that fails, one line with what to install. An item is a `Finding`;
a check is a function that returns one and changes nothing. Versions come from package metadata, so that no optional
package is imported to be told that it is there.

The private parts of torch that `tdc` relies on are asked one by one (`core/probes.py`, `compile/_torch/probes.py`).

The compile check is real: it compiles two operations with Inductor for a size that no earlier run had, so that no cache
can answer in place of the compiler, and compares with eager.

Invariants:
- A missing optional package is no failure; everything else that fails makes the exit status 1.
- No check raises: an exception is a finding.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TextIO

import torch

from . import __version__
from .compile._torch import probes as compile_probes
from .core import probes as core_probes

EXTRAS = {
    "dask": ("distributed",),
    "hf": ("transformers", "accelerate"),
    "io": ("safetensors",),
    "viz": ("matplotlib", "rich"),
    "bench": ("tensordict", "danling", "matplotlib"),
}
OLDEST = {"torch": (2, 11), "optree": (0, 13)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: ok is None where an optional thing is absent, and hint says what to install."""

    name: str
    ok: bool | None
    text: str
    hint: str = ""


def doctor(stream: TextIO | None = None) -> int:
    """Print what this machine has and lacks for `tdc`, and whether a small `torch.compile` with Inductor works.

    Args:
        stream: where to print, standard output by default.

    Returns:
        0 when nothing fails, else 1. Absent optional packages do not count.

    Compile:
        Not for use in a compiled function. Compiles one function once for each kind of device, a few seconds each.

    Example:
        >>> import io
        >>> report = io.StringIO()
        >>> status = doctor(report)
        >>> "torch" in report.getvalue()
        True
    """
    failed = 0
    for finding in findings():
        failed += finding.ok is False
        mark = {True: "ok", False: "FAIL", None: "-"}[finding.ok]
        print(f"{mark:<5}{finding.name:<13}{finding.text}", file=stream, flush=True)
        if finding.hint:
            print(f"{'':<5}{'':<13}-> {finding.hint}", file=stream, flush=True)
    print(f"{failed} failing" if failed else "all well", file=stream, flush=True)
    return int(failed > 0)


def findings() -> Iterator[Finding]:
    """Every finding, cheapest first."""
    yield Finding("tdc", True, __version__)
    yield Finding("python", True, f"{platform.python_version()} on {platform.platform()}")
    for package in OLDEST:
        yield find_package(package)
    yield find_cxx()
    yield find_headers()
    yield find_devices()
    within, between = torch.get_num_threads(), torch.get_num_interop_threads()
    text = f"{within} within an operation, {between} between them, {os.cpu_count()} cores"
    yield Finding("threads", True, text)
    for extra in EXTRAS:
        yield find_extra(extra)
    for name, holds in (*core_probes.PROBES, *compile_probes.PROBES):
        yield find_probe(name, holds)
    for name, has in (*core_probes.FEATURES, *compile_probes.FEATURES):
        yield Finding("torch may", has() or None, name)
    yield find_compile("cpu")
    if torch.cuda.is_available():
        yield find_compile("cuda")


def find_package(package: str) -> Finding:
    """A required package, and whether it is new enough."""
    found, oldest = installed(package), ".".join(map(str, OLDEST[package]))
    ok = found is not None and tuple(map(int, re.findall(r"\d+", found)[:2])) >= OLDEST[package]
    return Finding(package, ok, found or "not installed", "" if ok else f'pip install "{package}>={oldest}"')


def find_cxx() -> Finding:
    """The C++ compiler that Inductor takes: $CXX, else the platform's default name."""
    default, other = ("clang++", "g++") if sys.platform == "darwin" else ("g++", "clang++")
    command = os.environ.get("CXX") or default
    path = shutil.which(command)
    if path is None:
        install = "run: xcode-select --install" if sys.platform == "darwin" else "install g++ (Debian: apt install g++)"
        hint = f"set CXX={other}, which is there" if shutil.which(other) else install
        return Finding("c++", False, f"no {command}", hint)
    try:
        run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("c++", False, f"{path} does not run: {one_line(error)}", "install a C++ compiler or set CXX")
    return Finding("c++", True, f"{path}: {one_line(run.stdout)}")


def find_headers() -> Finding:
    """Python.h, which the code that Inductor makes includes."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return Finding("headers", True, str(header))
    package = "python{}.{}-dev".format(*sys.version_info)
    return Finding("headers", False, f"no {header}", f"install Python's headers (Debian: apt install {package})")


def find_devices() -> Finding:
    """The CPU's instruction set, and the name of each CUDA device."""
    names = [f"cpu ({torch.backends.cpu.get_cpu_capability()})"]
    names += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return Finding("devices", True, ", ".join(names))


def find_extra(extra: str) -> Finding:
    """The packages of one optional extra."""
    found = {package: installed(package) for package in EXTRAS[extra]}
    text = ", ".join(f"{package} {version or 'not installed'}" for package, version in found.items())
    whole = all(found.values())
    hint = "" if whole else f'optional: pip install "torch-tdc[{extra}]"'
    return Finding(f"extra {extra}", whole or None, text, hint)


def find_probe(name: str, holds: Callable[[], bool]) -> Finding:
    """Whether torch still does something that `tdc` relies on and torch does not promise."""
    torch.compiler.reset()  # probes trace one function again and again, which Dynamo limits
    try:
        ok, text = holds(), name
    except Exception as error:
        ok, text = False, f"{name}: {one_line(error)}"
    hint = "" if ok else f"tdc {__version__} is tested with torch 2.11 to 2.13; install one of these, or a newer tdc"
    return Finding("torch does", ok, text, hint)


def find_compile(device: str) -> Finding:
    """Compile two operations with Inductor and compare with eager."""

    def two_lines(x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(x) * 2
        return y.sum()

    name = f"compile {device}"
    # The size goes into the generated code: a new one each time means that the compiler has to run.
    size = 1_000 + time.time_ns() % 1_000_003
    start = time.perf_counter()
    try:
        x = torch.linspace(0, 1, size, device=device)
        result = torch.compile(two_lines, fullgraph=True, dynamic=False)(x)
        torch.testing.assert_close(result, two_lines(x), rtol=1e-3, atol=0.0)
    except Exception as error:
        return Finding(name, False, one_line(error), compile_hint(torch.__path__[0]))
    return Finding(name, True, f"Inductor works, {time.perf_counter() - start:.1f} s")


def compile_hint(torch_path: str) -> str:
    """What to do when the compile check fails, given where torch is installed."""
    if " " in torch_path:  # torch 2.13 does not quote its include paths
        return "torch is installed in a path with a space, which Inductor cannot use: install it in one without"
    return "see the failing lines above; else run with TORCH_LOGS=+inductor"


def installed(package: str) -> str | None:
    """The version in the package's metadata, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def one_line(error: object) -> str:
    """The first line of a text, or an exception's class with its first line, at most 100 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    text = f"{type(error).__name__}: {first}" if isinstance(error, Exception) else first
    return text if len(text) <= 100 else text[:99] + "…"
