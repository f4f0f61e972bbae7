"""The table of docs/migration.md: every spelling in it runs, what is left out says why, and the page is up to date."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = runpy.run_path(str(DOCS / "tools" / "make_migration.py"))
ROWS = [row for rows in PAGE["ROWS"].values() for row in rows]


@pytest.mark.parametrize("row", [row for row in ROWS if row.code], ids=lambda row: row.code)
def test_row_runs(row: Any):
    exec(row.code, PAGE["sample"]())


def test_what_is_left_out_says_why():
    assert [row.theirs for row in ROWS if not (row.code or row.note)] == []


def test_page_is_up_to_date():
    text = (DOCS / "migration.md").read_text(encoding="utf-8")
    assert text == PAGE["render"](), "run python docs/tools/make_migration.py"
