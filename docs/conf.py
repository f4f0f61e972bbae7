"""The site of these pages: `make docs`, which needs no network. The pages are Markdown and read as well without it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "tdc" / "__init__.py").read_text(encoding="utf-8"))

project, author, copyright = "tdc", "the tdc authors", "the tdc authors"
release = version = VERSION[1] if VERSION else ""
extensions = ["myst_parser"]
exclude_patterns = ["tools"]
html_theme = "furo"
html_title = f"tdc {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # of the drawing in the architecture page, which is shown as text

OUTSIDE = re.compile(r"\]\(((?:\.\./)+)([\w./-]+)(#[\w-]*)?\)")


def absolute(app: Any, page: str, source: list[str]) -> None:
    """Links to files outside of docs/ lead into the repository."""
    here = (Path(app.srcdir) / page).parent

    def linked(link: re.Match[str]) -> str:
        target = (here / link[1] / link[2]).resolve()
        if target.is_relative_to(app.srcdir) or not target.exists():
            return link[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{target.relative_to(ROOT)}{link[3] or ''})"

    source[0] = OUTSIDE.sub(linked, source[0])


def setup(app: Any) -> None:
    app.connect("source-read", absolute)
