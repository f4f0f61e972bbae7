"""The table of what tests cost: `tests/durations.md`, from what pytest prints of two runs.

    make test ARGS="--durations=0 -vv" > fast.log
    make test-slow ARGS="--durations=0 -vv" > slow.log
    python tests/durations.py fast.log slow.log

A row for each file: its tests and their seconds in both levels, the longest fast one, and what the file is for.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "tests" / "durations.md"
LINE = re.compile(r"^([\d.]+)s (?:call|setup|teardown) +(\S+?\.py)(::\S.*)$")
HEAD = """# What tests cost

`python tests/durations.py` writes this page from a run of `make test` and one of `make test-slow`; CONTRIBUTING says
what belongs into which. Seconds are those of one core.

| file | fast tests | seconds | longest | slow tests | seconds | for |
| --- | --- | --- | --- | --- | --- | --- |
"""


def seconds(log: str) -> dict[str, dict[str, float]]:
    """By file and test, what a run printed."""
    found: dict[str, dict[str, float]] = {}
    for line in log.splitlines():
        if match := LINE.match(line):
            tests = found.setdefault(match[2], {})
            tests[match[3]] = tests.get(match[3], 0.0) + float(match[1])
    return found


def purpose(path: str) -> str:
    """The first sentence of a file of tests."""
    text = ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).partition(". ")[0].rstrip(".:").replace("|", "\\|")


def render(fast: str, slow: str) -> str:
    levels = seconds(fast), seconds(slow)
    rows: list[tuple[float, str]] = []
    for path in {**levels[0], **levels[1]}:
        first, rest = [level.get(path, {}) for level in levels]
        longest = max(first.values(), default=0.0)
        cells = [
            path.removeprefix("tests/"), len(first), f"{sum(first.values()):.1f}", f"{longest:.1f}",
            len(rest), f"{sum(rest.values()):.1f}", purpose(path),
        ]  # fmt: skip
        rows.append((-sum(first.values()), "| " + " | ".join(map(str, cells)) + " |"))
    return HEAD + "\n".join([row for _, row in sorted(rows)]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(*[Path(name).read_text(encoding="utf-8") for name in sys.argv[1:3]]), encoding="utf-8")
