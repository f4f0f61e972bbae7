"""tdc.map where a worker is killed: an error or the right answer within seconds, with each kind of executor."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import map_functions as fns
import pytest
import torch
from map_functions import data

import tdc
from tdc import ChunkError, TensorDict

LIMIT = 10.0  # seconds, beside those in which workers start
Engine = tuple[str, Executor, float]  # the last: how long its workers took to start
pytestmark = pytest.mark.slow


def of_processes(stack: ExitStack) -> Executor:
    pool = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,))
    return stack.enter_context(pool)


def of_loky(stack: ExitStack) -> Executor:
    # No worker leaves for idleness: loky warns where one does so as work arrives, and a warning is an error here.
    return pytest.importorskip("loky").get_reusable_executor(2, timeout=600)


def of_dask(stack: ExitStack) -> Executor:
    distributed = pytest.importorskip("distributed")
    settings = {"n_workers": 2, "threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50}
    cluster = stack.enter_context(distributed.LocalCluster(**settings))
    return stack.enter_context(distributed.Client(cluster)).get_executor()


ENGINES: dict[str, Callable[[ExitStack], Executor]] = {"processes": of_processes, "loky": of_loky, "dask": of_dask}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with ExitStack() as stack:
        begin = time.monotonic()
        pool = ENGINES[request.param](stack)
        tdc.map(fns.doubled, data(), executor=pool)  # so that workers are there
        yield request.param, pool, time.monotonic() - begin


@contextmanager
def within(what: str, seconds: float) -> Iterator[None]:
    """Fails where the block takes longer, and says how long it took."""
    begin = time.monotonic()
    yield
    took = time.monotonic() - begin
    print(f"{what}: {took:.1f} s, limit {seconds:.0f} s")
    assert took < seconds


def stores(folder: Path) -> tuple[TensorDict, TensorDict]:
    """One to read from and one to write into."""
    td = data().memmap(folder / "in", sync=False)
    return td, tdc.io.memmap_empty({"y": ((2,), torch.float32)}, folder / "out", [10], sync=False)


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
def test_killed_once(engine: Engine, tmp_path: Path):
    name, pool, start = engine
    td, out = stores(tmp_path)
    fn = partial(fns.killed_once, str(tmp_path / "flag"))
    if name == "dask":  # it tries again, with a new worker
        with within(f"{name}, killed once", LIMIT + start):
            tdc.map(fn, td, chunksize=2, executor=pool, out=out)
    else:
        match = r"expected workers that live, got .* in chunk"
        with within(f"{name}, killed once", LIMIT), pytest.raises(ChunkError, match=match) as caught:
            tdc.map(fn, td, chunksize=2, executor=pool, out=out)
        assert isinstance(caught.value.__cause__, BrokenExecutor)
        with ExitStack() as stack:  # the same again, with other workers
            tdc.map(fn, td, chunksize=2, executor=ENGINES[name](stack), out=out)
    assert torch.equal(tdc.io.load(tmp_path / "out")["y"], data()["x"] * 2)


@pytest.mark.cases(0, 1)
def test_killed_always(engine: Engine, tmp_path: Path):
    name, pool, start = engine
    td, out = stores(tmp_path)
    limit = LIMIT + 4 * start if name == "dask" else LIMIT  # it tries four workers
    match = r"tdc.map: expected workers that live, got \w+ in chunk"
    if name == "dask":  # which reads a status twice: a part that is done as its worker dies fails in dask itself
        match += r"|got TypeError in chunk"
    with within(f"{name}, killed always", limit), pytest.raises(ChunkError, match=match):
        tdc.map(fns.killed, td, chunksize=2, executor=pool, out=out)
    if name == "dask":  # which has started others
        tdc.map(fns.only_y, td, chunksize=2, executor=pool, out=out)
        assert torch.equal(tdc.io.load(tmp_path / "out")["y"], data()["x"] * 2)


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
def test_what_else_an_engine_does(engine: Engine, tmp_path: Path):
    name, pool, _ = engine
    td, out = stores(tmp_path)
    for part in (td, data()):
        assert torch.equal(tdc.map(fns.doubled, part, chunksize=3, executor=pool)["y"], data()["x"] * 2)
        assert tdc.map(fns.texts, part, chunksize=3, executor=pool).tolist() == (data()["text"] + 1).tolist()
    assert tdc.map(fns.only_y, td, chunksize=3, executor=pool, out=out) is out
    assert torch.equal(tdc.io.load(tmp_path / "out")["y"], data()["x"] * 2)
    assert len(list(tdc.data.map_iter(fns.a_number, td, chunksize=3, executor=pool, prefetch=2))) == 4
    with pytest.raises(ChunkError, match="ZeroDivisionError in chunk 1"):
        tdc.map(fns.fails, td, chunksize=2, executor=pool)
    if name != "processes":  # they send code where there is no name
        assert tdc.map(lambda part: part + 1, td.select("x"), executor=pool)["x"][0].tolist() == [1, 2]


SCRIPT = """
import torch, tdc
from concurrent.futures import ProcessPoolExecutor
import map_functions as fns
torch.set_num_threads(2)
x = torch.rand(1000, 1000)
(x @ x).sum()  # starts the threads of OpenMP, which a fork has not
td = tdc.TensorDict({"x": torch.rand(1_000_000, 2)}, [1_000_000])
with ProcessPoolExecutor(2) as pool:
    print(tdc.map(fns.doubled, td, num_chunks=4, executor=pool).batch_size)
"""


@pytest.mark.skipif(
    sys.version_info >= (3, 14) or sys.platform != "linux", reason="processes are not forked by default"
)
def test_forked_processes_do_not_wait_for_ever():
    path: Any = [str(Path(__file__).parent), *sys.path]
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"import sys; sys.path[:] = {path!r}\n{SCRIPT}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.stdout == "torch.Size([1000000])\n", ran.stderr
