"""What every test starts from: one seed, one thread, and a compiler that has seen nothing."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator
from traceback import FrameSummary, StackSummary, walk_stack
from typing import Any

import pytest
import torch
import versions
from progress import Progress
from torch._dynamo import exc, guards

torch.set_num_threads(1)
torch.backends.cudnn.allow_tf32 = False  # before a test imports torch.testing, which locks it: the digits of a CPU


def callers() -> StackSummary:
    """Lines without columns, for which torch reads the positions of all the code of each of pytest's fifty frames."""
    frames = list(walk_stack(sys._getframe(1)))[::-1]
    return StackSummary(FrameSummary(f.f_code.co_filename, n, f.f_code.co_name, lookup_line=False) for f, n in frames)


# What torch 2.13 does in each compile to report on it is much of the time of small graphs: it empties the cache of the
# processor to time the guards, and asks who called.
guards.profile_guard_manager = lambda *args: 0.0  # pyright: ignore[reportPrivateImportUsage]  # replaced where it is read
exc._extract_stack_with_positions = callers

# Without a GPU `torch.manual_seed` keeps the stack of its caller for the first use of one: a millisecond of each test.
seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if config.pluginmanager.hasplugin("dsession") and config.get_verbosity() < 1:  # the process that reports
        config.pluginmanager.register(Progress(reporter), "progress")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test with the mark `cases` some cases are fast, some more are slow, and the rest is for the sweep.

    `cases(2, 5)` leaves two and five, `cases(2)` two and the rest, `cases(slow=5)` those that are not marked and five.

    Which ones is drawn by the name of the test, so that all parameters are among them.
    """
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("cases"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, cases in tests.items():
        random.Random(name).shuffle(cases)
        mark: Any = cases[0].get_closest_marker("cases")
        fast, slow, *_ = [*mark.args, len(cases), len(cases)]
        slow = mark.kwargs.get("slow", slow)
        late = [case for case in cases if case.get_closest_marker("slow") or case.get_closest_marker("sweep")]
        late += [case for case in cases if case not in late][fast:]
        for n, case in enumerate(late):
            case.add_marker("slow" if n < slow else "sweep")


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """No search for garbage while tests are collected."""
    gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Thousands of tests are no garbage, for which torch searches the memory about once a compile."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _start_over() -> Iterator[None]:
    """The same random numbers in every test, and no graph left of the one before."""
    seed(0)
    yield
    torch._dynamo.reset()
    if versions.OLD:
        versions.clean_up()
