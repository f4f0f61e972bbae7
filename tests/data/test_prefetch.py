"""The background thread of a loader: it is bounded, hands errors on, and is gone whenever nobody reads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tdc import TensorDict
from tdc.data import loader
from tdc.data.loader import Ahead, prefetched


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "tdc.data.loader"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert threads() == []


def batches(**settings: Any) -> Any:
    return loader(TensorDict({"x": torch.arange(100)}, [100]), batch_size=5, prefetch=2, **settings)


def numbers(made: list[int], last: int = 100) -> Any:
    for i in range(last):
        made.append(i)
        yield i


def settled(made: list[int], least: int) -> int:
    """How many were made, a moment after there were so many."""
    until = time.monotonic() + 30
    while len(made) < least and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.05)
    return len(made)


def test_all_items_in_order():
    assert list(prefetched(numbers([]), 3)) == list(range(100))
    assert list(prefetched(numbers([]), 0)) == list(range(100))
    assert list(prefetched(numbers([], 0), 3)) == []


@pytest.mark.parametrize("most", [1, 4])
def test_it_is_bounded(most: int):
    made: list[int] = []
    items = prefetched(numbers(made), most)
    assert next(items) == 0
    assert settled(made, most + 2) == most + 2  # one was taken, and one is in the making
    items.close()
    assert len(made) == most + 2


def test_break_ends_it():
    for _ in batches():
        assert len(threads()) == 1
        break
    assert threads() == []


def test_an_error_in_the_loop_ends_it():
    def loop() -> None:
        for _ in batches():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert threads() == []


def test_an_error_in_the_thread_is_raised_in_the_loop():
    made: list[int] = []

    def items() -> Any:
        yield from numbers(made, 3)
        raise LookupError("of the thread")

    seen: list[int] = []
    with pytest.raises(LookupError, match="of the thread") as caught:
        seen.extend(prefetched(items(), 2))
    assert seen == [0, 1, 2]
    assert "items" in [entry.name for entry in caught.traceback]
    ahead = Ahead(items(), 10)
    assert list(zip(range(3), ahead, strict=False)) == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(LookupError):
        next(ahead)
    with pytest.raises(StopIteration):
        next(ahead)


@pytest.mark.slow
def test_an_iterator_that_is_dropped_ends_it():
    it = iter(batches())
    next(it)
    assert len(threads()) == 1
    del it
    gc.collect()
    assert threads() == []


@pytest.mark.slow
def test_garbage_in_a_cycle_ends_it():
    cycle: list[Any] = [iter(batches())]
    next(cycle[0])
    cycle.append(cycle)
    del cycle
    assert len(threads()) == 1
    gc.collect()
    assert threads() == []


def test_the_state_is_what_was_handed_out():
    made = batches()
    it = iter(made)
    for n in range(1, 4):
        next(it)
        time.sleep(0.02)
        assert made.state_dict()["batch"] == n
    it.close()


def test_two_passes_at_once():
    made = batches()
    pairs = [(a["x"][0].item(), b["x"][0].item()) for a, b in zip(made, made, strict=True)]
    assert pairs == [(5 * i, 5 * i) for i in range(20)]


EXITS = {
    "the end": "", "an error": "raise SystemExit(3)", "an error in the loop": "for b in batches: raise SystemExit(3)",
    "a thread that waits": "import time; time.sleep(0.1)", "two": "other = iter(batches); next(other)",
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("how", [pytest.param(n, marks=[pytest.mark.slow] * (n != "the end")) for n in EXITS])
def test_the_interpreter_exits(how: str):
    code = (
        "import torch, tdc\n"
        "td = tdc.TensorDict({'x': torch.zeros(1000, 1000)}, [1000])\n"
        "batches = tdc.data.loader(td, batch_size=100, prefetch=2)\n"
        f"it = iter(batches); next(it)\n{EXITS[how]}\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (run.returncode, run.stderr) == (3 if "SystemExit" in code else 0, "")
