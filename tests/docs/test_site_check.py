"""The check of the built site, and what its links to other sites rest on."""

from __future__ import annotations

import runpy
import zlib
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "docs" / "tools" / "check_site.py"


def test_broken_links_of_a_site_are_found(tmp_path: Path):
    (tmp_path / "a.html").write_text('<p id="x"><a href="b.html#y">1</a><a href="b.html">2</a><a href="#x">3</a>')
    (tmp_path / "b.html").write_text('<a href="c.html">1</a><a href="https://example.org/x">2</a><img src="a.html">')
    found = runpy.run_path(str(TOOL))["broken_links"](tmp_path)
    assert found == ["a.html: b.html#y leads nowhere", "b.html: c.html leads nowhere"]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # which torch.distributed.optim uses, torch 2.13
@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_names_that_lead_to_the_documentation_of_torch_and_python_are_there():
    tool = runpy.run_path(str(TOOL.with_name("make_inventory.py")))
    for project, known in (("torch", "torch.nn.Linear"), ("python", "dataclasses.replace")):
        data = (TOOL.parents[1] / "_static" / f"{project}.inv").read_bytes()
        lines = zlib.decompress(data.split(b"zlib.\n")[1]).decode().splitlines()
        names = [line.partition(" ")[0] for line in lines]
        assert known in names
        assert [name for name in names if tool["resolved"](name) is None] == []
