"""The notebooks of docs/, run: their cells in turn, in one process and without Jupyter, and what they print.

`EXPECTTEST_ACCEPT=1 pytest tests/docs/test_notebooks.py` writes what the cells print. A cell that ends in a figure has
an alt text in its metadata (`"alt"`); its picture is written, too, and not compared.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import importlib.util
import io
import json
import linecache
import os
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ACCEPT = os.environ.get("EXPECTTEST_ACCEPT") == "1"
LARGEST = 100_000  # bytes of a notebook, pictures included
NO_MATPLOTLIB = importlib.util.find_spec("matplotlib") is None


def run(cell: dict[str, Any], names: dict[str, Any], where: str) -> tuple[str, Any]:
    """Run a code cell: what it prints, and the value of its last line where that is an expression."""
    source = "".join(cell["source"])
    linecache.cache[where] = (len(source), None, source.splitlines(keepends=True), where)  # for inspect
    tree = ast.parse(source, where)
    end = tree.body[-1]
    last = ast.Expression(end.value) if isinstance(end, ast.Expr) else None
    del tree.body[len(tree.body) - (last is not None) :]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, where, "exec", dont_inherit=True), names)
        value = eval(compile(last, where, "eval", dont_inherit=True), names) if last else None
    return out.getvalue(), value


def printed(cell: dict[str, Any]) -> str:
    return "".join(line for out in cell["outputs"] if out["output_type"] == "stream" for line in out["text"])


def outputs(text: str, value: Any, alt: str | None) -> list[dict[str, Any]]:
    """What a cell shows, as a notebook keeps it: text, and a small picture."""
    found: list[dict[str, Any]] = []
    if text:
        found.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if alt is not None:
        file = io.BytesIO()
        value.savefig(file, dpi=80, metadata={"Software": None})
        picture = base64.b64encode(file.getvalue()).decode()
        data = {"image/png": picture, "text/plain": [alt]}
        found.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return found


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.skipif(NO_MATPLOTLIB, reason="matplotlib is not installed")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    book = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    for n, cell in enumerate(book["cells"]):
        if cell["cell_type"] == "code":
            text, value = run(cell, names, f"<{path.name}-{n}>")
            if ACCEPT:
                cell["outputs"] = outputs(text, value, cell["metadata"].get("alt"))
            assert text == printed(cell)
    if ACCEPT:
        path.write_text(json.dumps(book, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_clean(path: Path):
    text = path.read_text(encoding="utf-8")
    book = json.loads(text)
    assert len(text) < LARGEST
    assert set(book["metadata"]) <= {"kernelspec"}
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    for cell in book["cells"]:
        assert cell.get("execution_count") is None
        pictures = [out for out in cell.get("outputs", ()) if "image/png" in out.get("data", {})]
        assert not pictures or "alt" in cell["metadata"]
