"""The check of the built site: links that lead nowhere are found, with a browser or without."""

from __future__ import annotations

import runpy
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "docs" / "tools" / "check_site.py"


def test_broken_links_of_a_site_are_found(tmp_path: Path):
    (tmp_path / "a.html").write_text('<p id="x"><a href="b.html#y">1</a><a href="b.html">2</a><a href="#x">3</a>')
    (tmp_path / "b.html").write_text('<a href="c.html">1</a><a href="https://example.org/x">2</a><img src="a.html">')
    found = runpy.run_path(str(TOOL))["broken_links"](tmp_path)
    assert found == ["a.html: b.html#y leads nowhere", "b.html: c.html leads nowhere"]
