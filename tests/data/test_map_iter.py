"""tdc.data.map_iter: order, shuffled parts, how far it is ahead, and what happens when it is dropped."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import map_functions as fns
import pytest
import torch
from map_functions import data

import tdc
from tdc import ChunkError, DtypeError, ShapeError
from tdc.data import parts

lib: Any = tdc


def firsts(results: Any) -> list[int]:
    return [int(part["in", "id"][0]) for part in results]


@pytest.mark.parametrize("threaded", [False, True])
def test_in_order(threaded: bool):
    with ThreadPoolExecutor(2) as threads:
        pool: Executor | None = threads if threaded else None
        assert firsts(tdc.data.map_iter(fns.slow_first, data(), chunksize=3, executor=pool)) == [0, 3, 6, 9]
        assert list(tdc.data.map_iter(fns.a_number, data(), num_chunks=2, executor=pool)) == [45, 145]
        assert [x.tolist() for x in data(2).map_iter(fns.first_column, chunksize=1, executor=pool)] == [[0], [2]]
        assert firsts(tdc.data.map_iter(fns.doubled, data(), executor=pool))[0] == 0


def test_shuffled():
    def order(**how: Any) -> list[int]:
        return firsts(tdc.data.map_iter(fns.doubled, data(100), chunksize=5, shuffle=True, **how))

    once = order(seed=3)
    assert once == order(seed=3)
    assert once != order(seed=4)
    assert sorted(once) == list(range(0, 100, 5)) != once
    with ThreadPoolExecutor(2) as pool:
        assert order(seed=3, executor=pool) == once
    state = torch.get_rng_state()
    order(seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(0)
    mine = order()
    torch.manual_seed(0)
    assert order() == mine


def test_parts_are_done_when_they_are_asked_for():
    seen: list[int] = []
    results = tdc.data.map_iter(lambda part: seen.append(len(part)), data(), chunksize=4)
    assert seen == []
    next(results)
    assert seen == [4]


def test_how_far_it_is_ahead(monkeypatch: pytest.MonkeyPatch):
    manual = fns.Manual()
    monkeypatch.setattr(parts, "wait", lambda *args, **kwargs: manual.run_last())
    results = tdc.data.map_iter(fns.doubled, data(), chunksize=1, executor=manual, prefetch=3)
    assert manual.submitted == 0
    assert int(next(results)["in", "id"]) == 0
    assert manual.submitted == 3  # all of them were run, the last first
    assert firsts([next(results), next(results), next(results)]) == [1, 2, 3]
    assert manual.submitted == 6
    assert manual.most == 3


def test_one_that_is_dropped(monkeypatch: pytest.MonkeyPatch):
    manual = fns.Manual()

    def run_first(*args: Any, **kwargs: Any) -> None:
        manual.calls.reverse()
        manual.run_last()
        manual.calls.reverse()

    monkeypatch.setattr(parts, "wait", run_first)
    results = tdc.data.map_iter(fns.doubled, data(), chunksize=1, executor=manual, prefetch=5)
    next(results)
    del results
    assert [future.cancelled() for future, _ in manual.calls] == [True] * 4
    assert manual.submitted == 5


def test_errors():
    results = tdc.data.map_iter(fns.fails, data(), chunksize=2)
    next(results)
    with pytest.raises(ZeroDivisionError):
        next(results)
    with ThreadPoolExecutor(1) as pool:
        results = tdc.data.map_iter(fns.fails, data(), chunksize=2, executor=pool, prefetch=1)
        next(results)
        with pytest.raises(ChunkError, match=r"^tdc.data.map_iter: expected .* ZeroDivisionError in chunk 1"):
            next(results)
        assert list(results) == []
    for call, error, text in (
        (lambda: lib.data.map_iter(fns.doubled, [1]), DtypeError, "a function and a TensorDict, got list"),
        (lambda: lib.data.map_iter(3, data()), DtypeError, "a function, got int"),
        (
            lambda: lib.data.map_iter(fns.doubled, data(), executor=3),
            DtypeError,
            "a concurrent.futures.Executor, got int",
        ),
        (lambda: lib.data.map_iter(fns.doubled, data(), shuffle="yes"), DtypeError, "a bool for shuffle, got str"),
        (lambda: lib.data.map_iter(fns.doubled, data(), prefetch=0), ShapeError, "prefetch of 1 or more, got 0"),
        (lambda: lib.data.map_iter(fns.doubled, data(), seed="a"), DtypeError, "an int, got str"),
        (lambda: lib.data.map_iter(fns.doubled, data(), seed=2**70), ShapeError, r"a seed below 2\*\*62, got 11805"),
        (lambda: lib.data.map_iter(fns.doubled, data()[0]), ShapeError, r"a TensorDict with a batch dim, got Tens"),
    ):
        with pytest.raises(error, match=rf"tdc\.data\.map_iter: expected {text}"):
            call()
