"""Build the package, and try it in an empty environment: `make dist`.

Builds the source distribution and the wheel twice, which must be equal byte for byte; checks what PyPI would show;
installs the wheel into an empty environment and runs the program of the README there; and collects the tests of the
source distribution and runs some of them.

`--quick`, as .ci/run has it: the empty environment takes torch and optree from the one that runs this, a small
program runs in place of that of the README, and of the tests of the source distribution those of one file run.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
ONLY = re.compile(r"tdc/|torch_tdc-[^/]+\.dist-info/")  # what a wheel holds
QUICK = "import torch, tdc; assert tdc.pack([torch.ones(2), torch.ones(1)]).sum(1).tolist() == [2, 1]"
SAMPLE = ["tests/layout", "tests/docs/test_readme.py::test_links_lead_somewhere", "tests/core/test_keys.py"]


def run(*command: object, cwd: Path = ROOT, **environment: str) -> str:
    """Run a command and return what it prints; where it fails, print that and end this program."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**os.environ, **environment}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{done.stdout}\n{' '.join(map(str, command))}: exit status {done.returncode}")
    return done.stdout


def build(folder: Path) -> list[Path]:
    """The two files of one build, whose times are that of the last commit."""
    commit = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=False)
    epoch = commit.stdout.strip() or os.environ.get("SOURCE_DATE_EPOCH", "1577836800")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, SOURCE_DATE_EPOCH=epoch)
    return sorted(folder.iterdir())


def digest(files: list[Path]) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def check_wheel(wheel: Path, work: Path, quick: bool) -> None:
    """Install a wheel where nothing else is, and run the program of the README."""
    with zipfile.ZipFile(wheel) as archive:
        other = [name for name in archive.namelist() if not ONLY.match(name)]
    if other:
        sys.exit(f"{wheel.name} holds files that are not of the package: {other[:5]}")
    venv.create(work / "empty", with_pip=False)
    python = work / "empty" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "-q"]
    if quick:
        run(*pip, "--no-deps", wheel)
        for site in (work / "empty").glob("lib/python*/site-packages"):  # brings packages, no editable ones
            (site / "here.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    else:
        run(*pip, "-c", ROOT / "constraints.txt", wheel)
    quiet = {"PYTHONWARNINGS": "ignore"}  # torch warns of a missing numpy
    print(run(work / "empty" / "bin" / "tdc", "--version", cwd=work, **quiet).strip())
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = re.search(r"```python\n(.*?)```", readme, re.S)
    assert program is not None
    if quick:
        place = run(python, "-c", f"{QUICK}\nprint(tdc.__file__)", cwd=work, **quiet).strip()
        if not Path(place).is_relative_to(work):
            sys.exit(f"the environment takes tdc from {place}, not from the wheel")
        return
    print(run(python, "-c", program[1], cwd=work, **quiet).strip())


def check_source(source: Path, work: Path, quick: bool) -> None:
    """Collect all tests of a source distribution, and run some."""
    shutil.unpack_archive(source, work)
    root = work / source.name.removesuffix(".tar.gz")
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not sweep"]
    if quick:
        print(run(*pytest, SAMPLE[-1], cwd=root, PYTHONPATH=str(root)).splitlines()[-1])
        return
    for line in run(*pytest, "--collect-only", cwd=root, PYTHONPATH=str(root)).splitlines()[-1:]:
        print(line)
    print(run(*pytest, *SAMPLE, cwd=root, PYTHONPATH=str(root)).splitlines()[-1])


def main() -> None:
    quick = "--quick" in sys.argv[1:]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        files, again = build(work / "first"), build(work / "second")
        if digest(files) != digest(again):
            sys.exit(f"two builds differ: {digest(files)} and {digest(again)}")
        print(run(sys.executable, "-m", "twine", "check", "--strict", *files).strip())
        wheel, source = files
        check_wheel(wheel, work, quick)
        check_source(source, work, quick)
        DIST.mkdir(exist_ok=True)
        for file in files:
            shutil.copy(file, DIST)
            print(f"{digest([file])[file.name]}  dist/{file.name}")


if __name__ == "__main__":
    main()
