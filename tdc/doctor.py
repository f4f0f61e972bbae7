"""Check this machine, its packages, and the library on it.

    python -m tdc doctor              versions, compiler, devices, extras, three programs, features that are off
    python -m tdc doctor --verbose    the same with each probe of torch's internals and the trace of each failure

A check is a function that returns a `Finding`, a line of the report. Versions come from package metadata: no optional
package is imported. The programs compare the library's backend with eager. Their width is new in each run, so that no
cache on disk stands in for the compiler. Features that are off (`core/private.py`) come last, since first uses switch
them off.

Invariants:
- Missing optional packages and features that are off are not failures. All other failures make the exit status 1.
- No check raises: an exception is a finding.
- Without failures the report has at most 20 lines, unless it is verbose.
"""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.nn.functional as F
from torch import nn

from . import __version__
from .compile._torch import probes as compile_probes
from .compile.counts import counted
from .compile.export import export, load
from .compile.train_step import train_step
from .core import private
from .core import probes as core_probes
from .optim import adamw
from .ragged.pack import pack
from .tensordict.tensordict import TensorDict

DISTRIBUTION = "torch-tdc"
TESTED = ("2.11", "2.13", "2.14", "2.15")  # versions of torch: the oldest, and the newest in a row
TESTED_TEXT = f"{TESTED[0]}, and {TESTED[1]} to {TESTED[-1]}"
LENGTHS = (3, 2, 5), (4, 7, 2, 2)
MOST_OFF = 4  # features that are off with a line each, unless verbose

PROBES = (*core_probes.PROBES, *compile_probes.PROBES)
FEATURES = (*core_probes.FEATURES, *compile_probes.FEATURES)


@dataclass(frozen=True, slots=True)
class Finding:
    """One item of the report.

    Args:
        name, text: subject and result.
        ok: None if something optional is absent.
        hint: how to fix it.
        detail: for verbose reports only, and not counted; another finding sums it up.
        trace: the traceback of a failure, for verbose reports.
    """

    name: str
    ok: bool | None
    text: str
    hint: str = ""
    detail: bool = False
    trace: str = ""


def doctor(stream: TextIO | None = None, *, verbose: bool = False) -> int:
    """Print a report on this machine, its packages, and the library on it.

    Args:
        stream: standard output by default.
        verbose: print each probe of torch's internals, too, and the tracebacks of failures.

    Returns:
        0 if nothing fails, else 1. Absent optional packages and features that are off do not count.

    Compile:
        Not for compiled functions. Compiles two programs for each kind of device, some ten seconds each.

    Example:
        >>> import io
        >>> report = io.StringIO()
        >>> status = doctor(report)
        >>> "torch" in report.getvalue()
        True
    """
    failed = 0
    for finding in findings():
        if finding.detail and not verbose:
            continue
        failed += finding.ok is False and not finding.detail
        mark = {True: "ok", False: "FAIL", None: "-"}[finding.ok]
        lines = [f"{mark:<5}{finding.name:<13}{finding.text}"]
        lines += [f"{'':<18}-> {finding.hint}"] if finding.hint else []
        lines += [finding.trace] if finding.trace and verbose else []
        print(*lines, sep="\n", file=stream, flush=True)
    print(f"{failed} failing" if failed else "all well", file=stream, flush=True)
    return int(failed > 0)


def findings() -> Iterator[Finding]:
    """Yield all findings, cheapest first, features that are off last."""
    yield Finding("tdc", True, __version__)
    yield Finding("python", True, f"{platform.python_version()} on {platform.platform()}")
    extras = requirements()
    for package, oldest in extras.pop("").items():
        yield find_package(package, oldest)
    yield find_numpy()
    yield find_cxx()
    yield find_headers()
    yield find_devices()
    within, between = torch.get_num_threads(), torch.get_num_interop_threads()
    text = f"{within} within an operation, {between} between them, {os.cpu_count()} cores"
    yield Finding("threads", True, text, detail=True)
    yield from find_extras(extras)
    for name, (program, text) in PROGRAMS.items():
        yield find_program(name, program, text)
    yield from find_internals()
    yield from find_off()


def requirements() -> dict[str, dict[str, str]]:
    """Return the packages of each extra with their oldest versions, from metadata; "" has those always needed."""
    found: dict[str, dict[str, str]] = {"": {"torch": "", "optree": ""}}
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        wanted, _, marker = line.partition(";")
        package, oldest = re.match(r"[\w.-]+", wanted), re.search(r">=\s*([\d.]+)", wanted)
        extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)", marker)
        if package:
            found.setdefault(extra[1] if extra else "", {})[package[0]] = oldest[1] if oldest else ""
    return found


def find_package(package: str, oldest: str) -> Finding:
    """Check a required package."""
    found = installed(package)
    if not is_enough(found, oldest):
        hint = f'pip install "{package}>={oldest}"' if oldest else f"pip install {package}"
        return Finding(package, False, found or "not installed", hint)
    untested = package == "torch" and not is_tested(str(found))
    return Finding(package, True, f"{found}, while tdc is tested with {TESTED_TEXT}" if untested else str(found))


def find_numpy() -> Finding:
    """Check numpy, which is optional."""
    found = installed("numpy")
    return Finding("numpy", found is not None or None, found or "not installed; needed only to convert to it and back")


def find_extras(extras: dict[str, dict[str, str]]) -> Iterator[Finding]:
    """Yield a detail for each extra, a line of installed ones, and a line of missing ones."""
    details = {extra: find_extra(extra, packages) for extra, packages in extras.items()}
    yield from details.values()
    whole = [extra for extra, finding in details.items() if finding.ok]
    lacking = [extra for extra, finding in details.items() if not finding.ok]
    if not extras:
        yield Finding("extras", None, f"unknown: {DISTRIBUTION} is not installed", 'pip install -e "."')
    if whole:
        yield Finding("extras", True, ", ".join(whole))
    if lacking:
        hint = f'optional: pip install "{DISTRIBUTION}[NAME]"'
        yield Finding("extras", None, f"not installed: {', '.join(lacking)}", hint)


def find_extra(extra: str, packages: dict[str, str]) -> Finding:
    """Check the packages of one extra."""
    texts, whole = [], True
    for package, oldest in packages.items():
        found = installed(package)
        enough = is_enough(found, oldest)
        whole = whole and enough
        texts.append(f"{package} {found or 'not installed'}" + f", older than {oldest}" * bool(found and not enough))
    return Finding("extra", whole or None, f"{extra}: {', '.join(texts)}", detail=True)


def find_cxx() -> Finding:
    """Check the C++ compiler of Inductor: $CXX, else the platform's default name."""
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
    """Check Python.h, which code of Inductor includes."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.exists():
        return Finding("headers", True, str(header), detail=True)
    package = "python{}.{}-dev".format(*sys.version_info)
    return Finding("headers", False, f"no {header}", f"install Python's headers (Debian: apt install {package})")


def find_devices() -> Finding:
    """List the CPU's instruction set and the accelerators."""
    names = [f"cpu ({torch.backends.cpu.get_cpu_capability()})"]
    names += [f"cuda:{i} ({torch.cuda.get_device_name(i)})" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    return Finding("devices", True, ", ".join(names))


class Scorer(nn.Module):
    """A small encoder of ragged rows: `x (B, -1, width, 8) -> (B, 3)`, for any width."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 16)
        self.encode = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, batch: TensorDict) -> Any:
        rows: Any = torch.sin(batch["x"]).mean(2)
        return self.head(self.encode(self.project(rows)).mean(1))


def scorer(device: str) -> tuple[Scorer, list[TensorDict]]:
    """Return a network and two batches of a new width."""
    width = 1_000 + time.time_ns() % 10_007  # a constant of the code that Inductor writes
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        net = Scorer().to(device)
    batches = []
    for lengths in LENGTHS:
        rows = [torch.linspace(-1, n, n * width * 8, device=device).reshape(n, width, 8) for n in lengths]
        label = torch.arange(len(lengths), device=device) % 3
        batches.append(TensorDict({"x": pack(rows), "label": label}, batch_size=[len(lengths)]))
    return net, batches


def run_counted(device: str) -> None:
    """Call a compiled network with two batches of other lengths."""
    net, batches = scorer(device)
    net.eval().requires_grad_(False)
    call = counted(net)
    for batch in batches:
        expect_close("results", call(batch), net(batch))
    if call.counts.compiles != 1:
        raise AssertionError(f"{call.counts.compiles} compiles for batches of other lengths, expected 1")


def run_train_step(device: str) -> None:
    """Take two training steps as one graph, and the same steps eagerly."""
    net, batches = scorer(device)

    def loss(net: Any, batch: TensorDict) -> Any:
        return F.cross_entropy(net(batch), batch["label"])

    found = []
    for compile in (True, False):
        step = train_step(net, loss, adamw(1e-2, eps=1e-3), compile=compile)  # eps: small gradients are mostly rounding
        state, losses = step.init(), []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        found.append((torch.stack(losses), state["params"].to_dict()))
    (losses, params), (eager_losses, eager_params) = found
    expect_close("losses", losses, eager_losses)
    expect_close("parameters", params, eager_params)


def run_export(device: str) -> None:
    """Export a network, save and load it, and call it with a batch of other lengths."""
    net, (example, other) = scorer(device)
    net.eval().requires_grad_(False)
    with tempfile.TemporaryDirectory() as folder:
        path = export(net, example).save(Path(folder) / "scorer.pt2")
        expect_close("results", load(path)(other), net(other))


PROGRAMS: dict[str, tuple[Callable[[str], None], str]] = {
    "counted": (run_counted, "one graph for two batches, as eager"),
    "train_step": (run_train_step, "two steps, as eager"),
    "export": (run_export, "saved, loaded and called with another batch, as eager"),
}


def find_program(name: str, program: Callable[[str], None], text: str) -> Finding:
    """Run a program on each kind of device."""
    took = []
    for device in ["cpu", *["cuda"] * torch.cuda.is_available()]:
        start = time.perf_counter()
        try:
            with quiet():
                program(device)
        except Exception as error:
            hint, trace = program_hint(torch.__path__[0]), traceback.format_exc()
            return Finding(name, False, f"{device}: {one_line(error)}", hint, trace=trace)
        took.append(f"{device} {time.perf_counter() - start:.1f} s")
    return Finding(name, True, f"{text}: {', '.join(took)}")


def program_hint(torch_path: str) -> str:
    """Return the hint for a program that fails, given the path of torch."""
    if " " in torch_path:  # torch 2.13 does not quote its include paths
        return "torch is installed in a path with a space, which Inductor cannot use: install it in one without"
    if not (find_cxx().ok and find_headers().ok):
        return "see the failing lines above"
    if not is_tested(torch.__version__):
        return tested_hint()
    return "please report it with the output of: python -m tdc doctor --verbose"


def find_internals() -> Iterator[Finding]:
    """Yield a detail for each probe of torch's internals, and one line for all of them."""
    wrong: dict[str, Finding] = {}
    for name, holds in PROBES:
        finding = find_probe(name, holds)
        yield finding
        if not finding.ok:
            wrong[name] = finding
    text = f"{len(PROBES) - len(wrong)} of {len(PROBES)} as expected"
    text += f", not these: {', '.join(wrong)}" if wrong else ""
    failing = any([finding.ok is False for finding in wrong.values()])
    ok = False if failing else None if wrong else True
    yield Finding("internals", ok, text, tested_hint() if failing else "")


def find_probe(name: str, holds: Callable[[], bool]) -> Finding:
    """Check one behaviour of torch that it does not promise; it may be missing while a feature is off."""
    torch.compiler.reset()  # probes trace one function again and again, which Dynamo limits
    text = name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ok = holds()
    except Exception as error:
        ok, text = False, f"{name}: {one_line(error)}"
    return Finding("torch does", True if ok else None if private.OFF else False, text, detail=True)


def find_off() -> Iterator[Finding]:
    """Yield the features that are off on this torch, and those that only a newer torch has."""
    few = len(private.OFF) <= MOST_OFF
    for feature, why in private.OFF.items():
        yield Finding("off", None, f"{feature}: {why}", detail=not few)
    if not few:
        yield Finding("off", None, "; ".join(private.OFF), "what is lost: python -m tdc doctor --verbose")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lacking = [name for name, has in FEATURES if not has()]
    if lacking:
        yield Finding("off", None, f"a newer torch has: {', '.join(lacking)}")


def is_enough(found: str | None, oldest: str) -> bool:
    """True if a package is installed and not older than `oldest`."""
    return found is not None and release(found) >= release(oldest)


def is_tested(found: str) -> bool:
    """True if the library is tested with a version of torch."""
    return release(found) in [release(version) for version in TESTED]


def release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version, none of an empty one."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def tested_hint() -> str:
    """Return the hint to install a tested version of torch."""
    return f"tdc {__version__} is tested with torch {TESTED_TEXT}; install one of these, or a newer tdc"


def installed(package: str) -> str | None:
    """Return the version of a package, None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def quiet() -> Iterator[None]:
    """Hide warnings and the log, unless TORCH_LOGS asks for it."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "TORCH_LOGS" not in os.environ:
            logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def expect_close(what: str, found: Any, expected: Any) -> None:
    """Raise an AssertionError whose first line says what differs."""
    text = f"{what} differ from eager\n"
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, msg=lambda more: text + more)


def one_line(error: object) -> str:
    """Return the first line of a text or exception, at most 100 characters; wrapped exceptions are unwrapped."""
    while isinstance(inner := getattr(error, "inner_exception", None), Exception):
        error = inner
    first = str(error).strip().partition("\n")[0].strip()
    text = f"{type(error).__name__}: {first}" if isinstance(error, Exception) else first
    return text if len(text) <= 100 else text[:99] + "…"
