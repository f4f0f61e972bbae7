"""tdc.map by executors: order, errors that name the part, stores by path, `out=`, progress."""

from __future__ import annotations

import multiprocessing
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import map_functions as fns
import pytest
import torch
from map_functions import data

import tdc
from tdc import ChunkError, DtypeError, ShapeError, StructureError, TensorDict, UnsupportedError
from tdc.core import progress
from tdc.data import parts

lib: Any = tdc


@pytest.fixture(scope="module")
def processes() -> Iterator[Executor]:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield pool


@pytest.fixture(scope="module")
def threads() -> Iterator[Executor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture(params=["threads", "processes"])
def pool(request: pytest.FixtureRequest) -> Executor:
    return request.getfixturevalue(request.param)


@pytest.fixture(params=["memory", "store"])
def td(request: pytest.FixtureRequest, tmp_path: Path) -> TensorDict:
    return data() if request.param == "memory" else data().memmap(tmp_path / "store", sync=False)


def room(path: Path, n: int = 10, **keys: Any) -> TensorDict:
    """A store that is open for writing."""
    return tdc.io.memmap_empty(keys or {"y": ((2,), torch.float32)}, path, [n], sync=False)


HOW: list[dict[str, int]] = [{}, {"chunksize": 3}, {"chunksize": 99}, {"num_chunks": 4}, {"num_chunks": 99}]


@pytest.mark.cases(5)
@pytest.mark.parametrize("how", HOW, ids=str)
def test_results_are_joined_in_order(pool: Executor, td: TensorDict, how: dict[str, int]):
    out = tdc.map(fns.slow_first, td, executor=pool, **how)
    assert torch.equal(out["y"], data()["x"] * 2)
    assert out["text"].tolist() == data()["text"].tolist()
    assert torch.equal(out["in", "id"], torch.arange(10))
    assert (out["split"], out.batch_size) == ("train", (10,))


def test_tensors_ragged_batches_and_none(pool: Executor, td: TensorDict):
    assert torch.equal(tdc.map(fns.first_column, td, chunksize=3, executor=pool), data()["x"][:, 0])
    assert tdc.map(fns.texts, td, chunksize=3, executor=pool).tolist() == (data()["text"] + 1).tolist()
    assert tdc.map(fns.nothing, td, chunksize=3, executor=pool) is None


def test_single_examples_and_another_dim(pool: Executor, tmp_path: Path):
    td = TensorDict({"x": torch.arange(12.0).view(3, 4)}, [3, 4]).memmap(tmp_path / "store")
    rows = tdc.map(fns.doubled, td, chunksize=0, executor=pool)
    assert torch.equal(rows["y"], td["x"] * 2)
    turned = tdc.map(fns.doubled, td, -1, chunksize=3, executor=pool)
    assert torch.equal(turned["y"], td["x"] * 2)
    out = room(tmp_path / "out", 3, y=((4,), torch.float32)).with_batch_size([3, 4])
    assert tdc.map(fns.only_y, td, 1, chunksize=3, executor=pool, out=out) is out
    assert torch.equal(tdc.io.load(tmp_path / "out")["y"], td["x"] * 2)


def test_of_no_examples(pool: Executor, td: TensorDict):
    assert tdc.map(fns.doubled, td[:0], chunksize=3, executor=pool).batch_size == (0,)
    assert tdc.map(fns.doubled, td[:0], executor=pool)["y"].shape == (0, 2)
    texts = TensorDict({"text": tdc.pack([torch.ones(2)])}, [1])
    assert tdc.map(fns.same, texts[:0], num_chunks=3).batch_size == (0,)
    with pytest.raises(StructureError, match="expected examples to stack the results of"):
        tdc.map(fns.doubled, td[:0], chunksize=0, executor=pool)


@pytest.mark.parametrize("where", ["store", "memory"])
@pytest.mark.parametrize("how", [None, "threads", "processes"])
def test_out(request: pytest.FixtureRequest, td: TensorDict, tmp_path: Path, how: str | None, where: str):
    out = room(tmp_path / "out")
    out = out if where == "store" else tdc.interop.zeros(out)
    pool = how and request.getfixturevalue(how)
    assert tdc.map(fns.only_y, td, chunksize=3, executor=pool, out=out) is out
    assert torch.equal(out["y"], data()["x"] * 2)
    if where == "store":
        assert torch.equal(tdc.io.load(tmp_path / "out")["y"], data()["x"] * 2)


@pytest.mark.parametrize("how", [None, "threads", "processes"])
def test_a_store_that_is_only_read_is_no_out(request: pytest.FixtureRequest, tmp_path: Path, how: str | None):
    td = tdc.TensorDict({"x": torch.zeros(10, 2), "in": {"m": data()["text"].to_padded()}}, [10])
    out = td.memmap(tmp_path / "out", sync=False)
    pool = how and request.getfixturevalue(how)
    match = r"expected out open for writing, got 2 leaves of a store of mode 'r'\nat x\nat in\.m\nhint: .* mode='r\+'"
    with pytest.raises(StructureError, match=match):
        tdc.map(fns.plus_one, td, chunksize=4, executor=pool, out=out)
    with pytest.raises(StructureError, match="got 1 leaves"):  # of which one would be lost
        tdc.map(fns.plus_one, td, chunksize=4, executor=pool, out=out.set("x", torch.zeros(10, 2)))
    out = tdc.map(fns.plus_one, td, chunksize=4, executor=pool, out=out.clone())
    assert out["x"].eq(1).all()


@pytest.mark.parametrize("how", [None, "threads"])
def test_results_are_appended(request: pytest.FixtureRequest, td: TensorDict, tmp_path: Path, how: str | None):
    pool: Any = how and request.getfixturevalue(how)
    with tdc.io.writer(tmp_path / "set", rows=4) as out:
        assert tdc.map(fns.slow_first, td, chunksize=3, executor=pool, out=out) is out
    want = tdc.map(fns.slow_first, td, chunksize=3)
    found = tdc.data.Dataset(tmp_path / "set")
    assert [len(part) for part in found.parts] == [6, 4]
    assert found.td["text"].tolist() == want["text"].tolist()
    assert torch.equal(found.td["x"], want["x"])
    out = tdc.io.writer(tmp_path / "other")
    rows = td.select("x").with_batch_size([10, 2])
    other_dim, no_rows = partial(tdc.map, dim=1), partial(tdc.map, chunksize=0)
    for wrong in (other_dim, no_rows):
        with pytest.raises(ShapeError, match="rows for a writer"):
            wrong(fns.doubled, rows, out=out)
    with pytest.raises(DtypeError):
        tdc.map(fns.first_column, td, chunksize=3, out=out)


def test_workers_write_into_stores_themselves(processes: Executor, td: TensorDict, tmp_path: Path):
    class Recorded(Executor):
        def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
            futures.append(processes.submit(*args, **kwargs))
            return futures[-1]

    futures: list[Future[Any]] = []
    tdc.map(fns.only_y, td, chunksize=3, executor=Recorded(), out=room(tmp_path / "out"))
    assert [future.result() for future in futures] == [None] * 4


def test_a_part_that_is_written_to(pool: Executor, tmp_path: Path):
    td = data().memmap(tmp_path / "store", sync=False)
    assert torch.equal(tdc.map(fns.in_place, td, chunksize=3, executor=pool)["x"], data()["x"] * 2)
    assert torch.equal(tdc.io.load(tmp_path / "store")["x"], data()["x"])


def test_an_error_names_the_part(pool: Executor, td: TensorDict):
    text = r"""tdc.map: expected a result of every part, got ZeroDivisionError in chunk 1, examples \[2:4\]
hint: the error above says why; fn\(td\[2:4\]\) shows it in this process"""
    with pytest.raises(ChunkError, match=text) as caught:
        tdc.map(fns.fails, td, chunksize=2, executor=pool)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(ChunkError, match=r"in example 3\nhint: .*fn\(td\[3\]\)"):
        tdc.map(fns.fails, td, chunksize=0, executor=pool)


DIFFER = {
    fns.another_dtype: r"1 difference in chunk 1, .*\nat y: float64\[2\] instead of float32\[2\]",
    fns.another_key: r"2 differences in chunk 1, .*\nat x: missing instead of float32\[2\]\nat z: not in the spec",
    fns.another_shape: r"1 difference in chunk 1, .*\nat x: float32\[1\] instead of float32\[2\]",
    fns.no_dims: r"1 difference in chunk 1, .*\nat batch dims: 0 instead of 1",
    fns.some: r"results of all parts, or none, got None for some",
}


@pytest.mark.parametrize("how", [None, "threads", "processes"])
@pytest.mark.parametrize("fn", DIFFER, ids=lambda fn: fn.__name__)
def test_results_that_differ(request: pytest.FixtureRequest, how: str | None, fn: Any):
    with pytest.raises(StructureError, match=rf"tdc\.map: .*{DIFFER[fn]}(.*\n)*hint: "):
        tdc.map(fn, data(), chunksize=2, executor=how and request.getfixturevalue(how))


@pytest.mark.parametrize("how", [None, "threads", "processes"])
@pytest.mark.parametrize("where", ["store", "memory"])
def test_results_that_do_not_fit_out(request: pytest.FixtureRequest, how: str | None, where: str, tmp_path: Path):
    pool: Any = how and request.getfixturevalue(how)
    out = room(tmp_path / "out", x=((2,), torch.float32), z=((), torch.int64))
    out = out if where == "store" else tdc.interop.zeros(out)
    with pytest.raises(
        StructureError, match=r"3 differences in chunk \d, .*\nat z: missing .*\nat text: not in the spec\n"
    ):
        tdc.map(fns.doubled, data().exclude("in", "split"), chunksize=2, executor=pool, out=out)
    with pytest.raises(
        DtypeError, match=r"expected a TensorDict to write into out, got Tensor float32\[2\] of chunk \d"
    ):
        tdc.map(fns.first_column, data(), chunksize=2, executor=pool, out=out)
    with pytest.raises(DtypeError, match=r"a tensor or a ragged batch, got float of chunk \d"):
        tdc.map(fns.a_number, data(), chunksize=2, executor=pool)


def test_a_function_that_cannot_be_sent(processes: Executor, threads: Executor):
    assert tdc.map(lambda part: part, data(), executor=threads).batch_size == (10,)
    text = "expected a function that can be pickled, got function\nhint: a function of a module"
    with pytest.raises(UnsupportedError, match=text) as caught:
        tdc.map(lambda part: part, data(), executor=processes)
    assert re.search("pickle|get local object", str(caught.value.__cause__))  # the latter on Python 3.13


@pytest.mark.parametrize("fn", [fns.with_graph, fns.with_lambdas], ids=lambda fn: fn.__name__)
def test_results_that_cannot_be_sent(processes: Executor, threads: Executor, fn: Any):
    td = TensorDict({"x": torch.ones(4)}, [4])
    hint = r"\nhint: parts and results are pickled: td\.detach\(\) where they have a graph, no lambdas"
    with pytest.raises(ChunkError, match=r"got \w+ in chunk \d, examples \[\d:\d\]" + hint):
        tdc.map(fn, td, chunksize=2, executor=processes)
    out = tdc.map(fn, td, chunksize=2, executor=threads)
    assert out["x"].requires_grad == (fn is fns.with_graph)
    with pytest.raises(ChunkError, match=hint):  # parts that cannot
        tdc.map(fns.same, out, chunksize=2, executor=processes)
    assert tdc.map(fns.same, td, executor=processes)["x"].sum() == 4  # the pool lives


def test_a_store_that_goes_while_parts_wait(processes: Executor, tmp_path: Path):
    manual = fns.Manual()
    td = data().memmap(tmp_path / "store")
    results = tdc.data.map_iter(fns.doubled, td, chunksize=5, executor=processes, prefetch=1)
    assert next(results).batch_size == (5,)
    del manual
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    assert next(results)["x"].tolist() == data()["x"][5:].tolist()  # as data, from what is still mapped
    out = room(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "away")
    with pytest.raises(ChunkError, match="got FormatError in chunk 0") as caught:
        tdc.map(fns.only_y, td, chunksize=10, executor=processes, out=out)
    assert "expected a store, got nothing at" in str(caught.value.__cause__)


def test_the_first_error_ends_all():
    ran: list[int] = []
    raised = threading.Event()

    def fn(part: Any) -> Any:
        ran.append(int(part["in", "id"][0]))
        if ran[-1] == 5:
            raise ValueError("five")
        if ran[-1] > 5:
            raised.wait(30)
        return part

    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(ChunkError, match=r"ValueError in chunk 5"):
            tdc.map(fn, data(100), chunksize=1, executor=pool)
        raised.set()
    assert ran[:6] == [0, 1, 2, 3, 4, 5]
    assert len(ran) <= 7


def test_an_error_is_raised_before_parts_that_take_long():
    release = threading.Event()

    def fn(part: Any) -> Any:
        if part["in", "id"][0] == 0:
            release.wait(30)
        return fns.fails(part)

    with ThreadPoolExecutor(2) as pool:
        begin = time.monotonic()
        with pytest.raises(ChunkError, match="in chunk 3"):
            tdc.map(fn, data(), chunksize=1, executor=pool)
        assert time.monotonic() - begin < 10
        release.set()


def test_a_bounded_number_is_in_flight(monkeypatch: pytest.MonkeyPatch):
    manual = fns.Manual()

    def wait(running: Any, **kwargs: Any) -> None:
        manual.run_last()

    monkeypatch.setattr(parts, "wait", wait)
    out = tdc.map(fns.doubled, data(1000), chunksize=1, executor=manual)
    assert torch.equal(out["x"], data(1000)["x"])
    assert (manual.most, manual.submitted) == (parts.MOST, 1000)


@pytest.mark.parametrize("fn", [fns.fails_with_two, fns.fails_with_a_lambda], ids=lambda fn: fn.__name__)
def test_an_error_that_cannot_be_sent(processes: Executor, fn: Any):
    with pytest.raises(ChunkError, match=r"got Two in chunk 1, examples \[5:10\]\nhint: the error above") as caught:
        tdc.map(fn, data(), chunksize=5, executor=processes)
    assert "fails_with_two" in str(caught.value.__cause__)
    assert "a and b" in str(caught.value.__cause__)
    assert tdc.map(fns.doubled, data(), executor=processes)["y"].shape == (10, 2)


def test_an_executor_that_is_shut_down(threads: Executor):
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    with pytest.raises(ChunkError, match=r"got chunk 0, examples .*by an executor that was shut down\nhint: keep"):
        tdc.map(fns.doubled, data(), executor=pool)


def test_progress(threads: Executor, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    for pool in (None, threads):
        told = MagicMock()
        out = tdc.map(fns.doubled, data(), chunksize=3, executor=pool, progress=told)
        assert told.call_args_list == [call(i + 1, 4) for i in range(4)]
        assert out["y"].shape == (10, 2)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(progress, "EVERY", 0)
    tdc.map(fns.doubled, data(), chunksize=3, progress=True)
    assert capsys.readouterr().err == "\rmap: 1/4\rmap: 2/4\rmap: 3/4\rmap: 4/4\n"


@pytest.mark.slow
def test_num_workers():
    td = data()
    assert torch.equal(td.map(fns.doubled, num_workers=1)["y"], td["x"] * 2)


WRONG = {
    "no executor": (lambda: lib.map(fns.doubled, data(), executor=2), DtypeError, "a concurrent.futures.*, got int"),
    "a client": (  # of dask: its futures are others
        lambda: lib.map(fns.doubled, data(), executor=object()), DtypeError,
        "a concurrent.futures.Executor, got object\nhint: .*client.get_executor",
    ),
    "both": (
        lambda: tdc.map(fns.doubled, data(), num_workers=2, executor=ThreadPoolExecutor(1)), ShapeError, "got both",
    ),
    "out of a path": (lambda: lib.map(fns.doubled, data(), out="here"), DtypeError, "a TensorDict for out, got str"),
    "out of another size": (
        lambda: tdc.map(fns.doubled, data(), out=data(9)), ShapeError, r"out with 10 examples along dim 0, got .*\[9\]",
    ),
    "ragged out": (
        lambda: tdc.map(fns.doubled, data(), out=data()), DtypeError, r"got 1 others\nat text: NestedTensor",
    ),
    "progress": (lambda: lib.map(fns.doubled, data(), progress="bar"), DtypeError, "a bool or a function for progress"),
    "num_chunks": (lambda: tdc.map(fns.doubled, data(), num_chunks=0), ShapeError, "num_chunks of 1 or more, got 0"),
    "dim": (lambda: tdc.map(fns.doubled, data(), 3, chunksize=2), ShapeError, "tdc.map: expected "),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str):
    wrong, error, text = WRONG[name]
    with pytest.raises(error, match=rf"tdc\.map: expected (.*\n)*.*{text}|{text}"):
        wrong()


def test_tensors_of_a_store_in_a_dict(pool: Executor, tmp_path: Path):
    td = data().memmap(tmp_path / "in")
    found = list(tdc.data.map_iter(fns.in_a_dict, td, chunksize=4, executor=pool))
    assert torch.equal(torch.cat([result["x"] for result in found]), td["x"])
    assert [result["pair"][1].batch_size[0] for result in found] == [4, 4, 2]
    assert torch.equal(found[2]["pair"][0], td["x"][8])
    assert [x.tolist() for x in found[1]["text"]] == [td["text"][4:8].tolist(), (td["text"][4:8] * 2).tolist()]


def test_settings_of_a_function(processes: Executor):
    out = tdc.map(partial(fns.killed_once, __file__), data(), chunksize=3, executor=processes)  # that file is there
    assert out.keys() == ("y",)


def test_a_tensorclass_stays_one(processes: Executor, tmp_path: Path):
    points: Any = fns.Point(torch.arange(12.0).view(6, 2), "there", batch_size=[6])
    for given in (points, points.memmap(tmp_path / "points", sync=False)):
        out = tdc.map(fns.moved, given, chunksize=4, executor=processes)
        assert type(out) is fns.Point
        assert (out.name, out.xy[5].tolist()) == ("there", [11, 12])


def test_padded_leaves_of_out(pool: Executor, tmp_path: Path):
    td = TensorDict({"text": data()["text"].to_padded()}, [10])
    out = (td * 0).memmap(tmp_path / "out", mode="r+", sync=False)
    tdc.map(fns.plus_one, td.memmap(tmp_path / "in", sync=False), chunksize=4, executor=pool, out=out)
    assert tdc.io.load(tmp_path / "out")["text"].tolist() == (td["text"] + 1).tolist()


def test_a_store_that_is_its_own_out(pool: Executor, tmp_path: Path):
    td = TensorDict({"x": torch.arange(6.0)}, [6]).memmap(tmp_path / "store", mode="r+", sync=False)
    assert tdc.map(fns.plus_one, td, chunksize=4, executor=pool, out=td) is td
    assert tdc.io.load(tmp_path / "store")["x"].tolist() == [1, 2, 3, 4, 5, 6]


def test_every_kind_goes_there_and_back(processes: Executor):
    dtypes = (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.uint16)
    td = TensorDict({str(dtype): torch.ones(3).to(dtype) for dtype in dtypes}, [3])
    td = td.set("objects", tdc.ObjectArray(["a", None, {"b": 1}])).set("none", torch.ones(3, 0))
    out = tdc.map(fns.same, td, num_chunks=1, executor=processes)
    assert tdc.interop.spec(out) == tdc.interop.spec(td)
    assert out["objects"].tolist() == ["a", None, {"b": 1}]
    assert all(torch.equal(out[str(dtype)], td[str(dtype)]) for dtype in dtypes if dtype != torch.float8_e4m3fn)
