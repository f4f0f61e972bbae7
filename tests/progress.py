"""Progress of a run in several processes, by folder: a line for each when its last test is done, and no dots.

tests/interop       412 passed, 3 skipped       9 s    31 %
"""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath
from typing import Any


class Progress:
    """A plugin of pytest for the process that reports; with `-v` each test has a line, as without this."""

    def __init__(self, reporter: Any) -> None:
        self.reporter = reporter
        self.left: Counter[str] = Counter()  # tests still to run, by folder
        self.outcomes: dict[str, Counter[str]] = {}
        self.seconds: Counter[str] = Counter()
        self.total = self.done = 0

    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """What is to run; each process has found the same."""
        self.left, self.total = Counter(folder_of(name) for name in ids), len(ids)

    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """No letter for what is as it should be."""
        outcome = outcome_of(report)
        quiet = outcome != "failed" and (report.when == "call" or outcome != "passed")
        return (outcome, "", outcome.upper()) if quiet else None

    def pytest_runtest_logreport(self, report: Any) -> None:
        folder = folder_of(report.nodeid)
        self.seconds[folder] += report.duration
        if report.when == "call" or report.outcome != "passed":
            self.outcomes.setdefault(folder, Counter())[outcome_of(report)] += 1
        if report.when == "teardown":
            self.done += 1
            self.left[folder] -= 1
            if self.left[folder] == 0:
                self.write(folder)

    def write(self, folder: str) -> None:
        outcomes = ", ".join(f"{n} {name}" for name, n in sorted(self.outcomes.get(folder, {}).items()))
        self.reporter.ensure_newline()
        share = 100 * self.done // self.total
        self.reporter.write_line(f"{folder:34}{outcomes:36}{self.seconds[folder]:6.0f} s{share:6} %")


def folder_of(name: str) -> str:
    return "/".join(PurePosixPath(name.partition("::")[0]).parts[:2])


def outcome_of(report: Any) -> str:
    return "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
