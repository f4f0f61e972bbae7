"""A thousand calls of a package with broken arguments: each is right or refused in words, and the process lives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fuzz_package
import pytest
from versions import OLD

import tdc

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fuzz_package.save(tmp_path_factory.mktemp("package") / "net.pt2")


@pytest.mark.cases(slow=1)
@pytest.mark.skipif(OLD, reason="a failed check of a package ends the process of torch 2.11")
@pytest.mark.parametrize(("threads", "calls", "seed"), [(2, 700, 0), (8, 300, 1)])
def test_no_call_ends_the_process(package: Path, threads: int, calls: int, seed: int):
    command = [sys.executable, str(Path(fuzz_package.__file__)), str(package), str(calls), str(seed)]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "TORCH_SYMBOLIZE_MODE": "dladdr"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    right, refused = [int(word) for word in done.stdout.split() if word.isdigit()]
    assert (right + refused, done.stdout.count("\n")) == (calls, 1)
    assert right > 0.2 * calls
    assert refused > 0.2 * calls


def test_broken_offsets_are_named(package: Path):
    td = fuzz_package.batch([3, 2])
    broken = fuzz_package.with_offsets(td, fuzz_package.beyond, both=False)
    found = r"at td\['weight'\]: offsets: do not end at N, the 5 packed elements of values"
    with pytest.raises(tdc.StructureError, match=rf"expected valid ragged batches, got broken ones\n{found}"):
        tdc.compile.load(package)(broken, fuzz_package.SCALES[0])
