"""What README.md and the pages of docs/ show, run: every python block, the text it prints, every internal link.

A ```python block runs in the namespace of the blocks before it on its page. A ```text block right behind it is what it
prints; a `TdcError` that ends the block is printed as `Class: message`.
`EXPECTTEST_ACCEPT=1 pytest tests/docs/test_readme.py` writes new texts. `<!-- slow -->` before a block marks it slow;
the blocks behind it do without it. `<!-- slow page -->` marks all blocks of a page, which need each other. Such blocks
of pages that are not in LANDING run with all tests only; that of README is in `.ci/smoke.txt`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from versions import of_the_pinned_torch

import tdc
from tdc.core import errors

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("docs", "docs/start", "docs/coming_from")
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(p for f in FOLDERS for p in sorted((ROOT / f).glob("*.md")))]
SUPPORT, MIGRATION = ROOT / "docs" / "support.md", ROOT / "docs" / "migration.md"  # generated, of any length
GROWING = (SUPPORT, MIGRATION, ROOT / "CHANGELOG.md")  # records, with more in each run
LONGEST = 165
LANDING = ("batch", "export", "first_training", "testing", "train", "two_levels")  # slow blocks run to land
CLIENTS = {  # pages that `make test-clients` runs, and what their blocks need
    "huggingface": ("transformers",), "encoder_decoder": ("transformers",), "einops": ("einops",),
    "vision": ("torchvision",), "frameworks": ("lightning", "accelerate", "torchmetrics"),
    "jaxtyping": ("jaxtyping", "beartype"), "torchrl": ("torchrl", "gymnasium"),
}  # fmt: skip
OPTIONAL: dict[str, tuple[str, ...]] = {"arrow": ("pyarrow",), "viz": ("matplotlib",), **CLIENTS}
ACCEPT = os.environ.get("EXPECTTEST_ACCEPT") == "1"
BLOCK = re.compile(
    r"^(?P<slow><!-- slow -->\n+)?```python\n(?P<code>.*?)^```\n(?:\n*```text\n(?P<text>.*?)^```\n)?", re.M | re.S
)
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass
class Page:
    """The blocks of one page and the namespace that they share, in order."""

    path: Path
    blocks: list[re.Match[str]] = field(default_factory=list)
    slow: bool = False
    names: dict[str, Any] = field(default_factory=dict)
    done: int = 0

    def run(self, n: int) -> str:
        """Run block n, and those before it that have not run yet and are not slow; what block n prints."""
        if n < self.done:
            self.names, self.done = {}, 0
        printed = ""
        for i, block in enumerate(self.blocks[self.done : n + 1], self.done):
            if i == n or self.slow or not block["slow"]:
                printed = run(block, self.path, self.names)
        self.done = n + 1
        return printed


def run(block: re.Match[str], path: Path, names: dict[str, Any]) -> str:
    """What a block prints; an error of the library counts where the page shows it."""
    line = block.string[: block.start("code")].count("\n")
    code = compile("\n" * line + block["code"], str(path), "exec", dont_inherit=True)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(code, names)
        except tdc.TdcError as error:
            if block["text"] is None:
                raise
            print(f"{type(error).__name__}: {error}")
    return out.getvalue()


def page(path: Path) -> Page:
    text = path.read_text(encoding="utf-8")
    return Page(path, list(BLOCK.finditer(text)), "<!-- slow page -->" in text)


BOOK = {path: page(path) for path in PAGES}


def blocks() -> Iterator[Any]:
    for path, found in BOOK.items():
        without = [name for name in OPTIONAL.get(path.stem, ()) if importlib.util.find_spec(name) is None]
        skip = [pytest.mark.skip(reason=f"{', '.join(without)} is not installed")] if without else []
        for n, block in enumerate(found.blocks):
            late = pytest.mark.slow if path.stem in LANDING else pytest.mark.sweep
            marks = [late] if found.slow or block["slow"] else []
            marks += [pytest.mark.clients] if path.stem in CLIENTS else []
            marks += [pytest.mark.filterwarnings("ignore")] if path.stem == "torchrl" else []  # it warns of itself
            yield pytest.param(path, n, id=f"{path.stem}-{n + 1}", marks=[*marks, *skip])


@pytest.mark.parametrize(("path", "n"), list(blocks()))
def test_block(path: Path, n: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    printed, shown = BOOK[path].run(n), BOOK[path].blocks[n]["text"]
    if ACCEPT and shown is not None and printed != shown:
        text = path.read_text(encoding="utf-8")
        begin, end = list(BLOCK.finditer(text))[n].span("text")
        path.write_text(text[:begin] + printed + text[end:], encoding="utf-8")
        return
    assert printed == (shown or "")


def slug(heading: str) -> str:
    """The anchor GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(text: str) -> set[str]:
    return {slug(h) for h in re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M)}


def broken(path: Path, text: str) -> list[str]:
    """Internal links of a page that lead nowhere."""
    wrong = []
    for target in LINK.findall(FENCE.sub("", text)):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        target_path = (path.parent / name).resolve() if name else path
        if not target_path.exists() or (anchor and anchor not in anchors(target_path.read_text(encoding="utf-8"))):
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path):
    assert broken(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", [p for p in PAGES if p not in GROWING], ids=lambda path: path.stem)
def test_page_is_short(path: Path):
    assert path.read_text(encoding="utf-8").count("\n") < LONGEST


def test_every_error_has_its_anchor():
    names = [n for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, tdc.TdcError)]
    missing = {n.lower() for n in names} - anchors((ROOT / "docs" / "errors.md").read_text(encoding="utf-8"))
    assert not missing


@of_the_pinned_torch
def test_support_table_is_up_to_date():
    want = runpy.run_path(str(ROOT / "docs" / "tools" / "make_support.py"))["render"]()
    assert SUPPORT.read_text(encoding="utf-8") == want, "run python docs/tools/make_support.py"


@of_the_pinned_torch
def test_page_of_syncs_is_up_to_date():
    want = runpy.run_path(str(ROOT / "docs" / "tools" / "make_syncs.py"))["render"]()
    assert (ROOT / "docs" / "syncs.md").read_text(encoding="utf-8") == want, "run python docs/tools/make_syncs.py"


@pytest.mark.slow
def test_architecture_page_is_up_to_date():
    tool = ROOT / "docs" / "tools" / "make_architecture.py"
    want = runpy.run_path(str(tool))["render"]()
    assert (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8") == want, f"run python {tool.name}"


def test_reference_is_up_to_date():
    tool = runpy.run_path(str(ROOT / "docs" / "tools" / "make_reference.py"))
    pages = tool["render"]()
    assert {*tool["FOLDER"].glob("*")} == {*pages}
    for path, want in pages.items():
        assert path.read_text(encoding="utf-8") == want, "run python docs/tools/make_reference.py"


# The checks themselves: what is wrong must be found.


def test_broken_links_are_found(tmp_path: Path):
    here, other = tmp_path / "here.md", tmp_path / "other.md"
    fenced = "\n```\n[7](no)\n```\n"
    text = (
        "# A `b`: c\n[1](#a-b-c) [2](#no) [3](other.md#x) [4](other.md#y) [5](no.md) [6](https://example.org/x)"
        + fenced
    )
    here.write_text(text, encoding="utf-8")
    other.write_text("## X\n```\n# y\n```\n", encoding="utf-8")
    assert broken(here, text) == ["#no", "other.md#y", "no.md"]


def test_blocks_share_names_and_show_errors(tmp_path: Path):
    path = tmp_path / "page.md"
    codes = "a = 1\n", "a = 2\n", "import tdc\nprint(a)\ntdc.pack([])\n"
    first, slow, last = [f"```python\n{code}```\n\n" for code in codes]
    text = f"{first}<!-- slow -->\n{slow}{last}```text\n```\n"
    path.write_text(text, encoding="utf-8")
    found = page(path)
    assert [b["text"] for b in found.blocks] == [None, None, ""]
    assert found.run(2).startswith("1\nStructureError: tdc.pack: expected")
    assert found.run(1) == ""
    assert found.names["a"] == 2
