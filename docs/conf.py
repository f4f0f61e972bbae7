"""The site of these pages: `make docs`, which needs no network. The pages are Markdown and read as well without it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.addnodes import pending_xref

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "tdc" / "__init__.py").read_text(encoding="utf-8"))

project, author, copyright = "tdc", "the tdc authors", "the tdc authors"
release = version = VERSION[1] if VERSION else ""
extensions = ["myst_parser", "sphinx.ext.intersphinx"]
intersphinx_mapping = {  # read from files that docs/tools/make_inventory.py writes: no network is needed
    "torch": ("https://docs.pytorch.org/docs/stable", "_static/torch.inv"),
    "python": ("https://docs.python.org/3", "_static/python.inv"),
}
exclude_patterns, templates_path = ["tools", "_templates"], ["_templates"]
html_theme = "furo"
html_title = f"tdc {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {"source_repository": REPOSITORY, "source_branch": "main", "source_directory": "docs/"}
myst_heading_anchors = 4
suppress_warnings = ["misc.highlighting_failure"]  # of the drawing in the architecture page, which is shown as text


class Notebook(MystParser):
    """Reads notebooks, which `readable` makes Markdown of."""

    supported = ("notebook",)


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


ELSEWHERE = re.compile(r"([A-Za-z]+(?:\.\w+)+)(?:\(.*)?")
IN_FULL = {"nn": "torch.nn", "F": "torch.nn.functional"}


def link_names(app: Any, tree: nodes.document) -> None:
    """Names of torch and Python in code lead to their documentation, as far as the inventories have them."""
    for literal in list(tree.findall(nodes.literal)):
        found = ELSEWHERE.fullmatch(literal.astext())
        if found is None or isinstance(literal.parent, (nodes.title, nodes.reference, pending_xref)):
            continue
        room, _, rest = found[1].partition(".")
        target = f"{IN_FULL.get(room, room)}.{rest}"
        where = {"refdomain": "py", "reftype": "obj", "reftarget": target, "refdoc": app.env.docname}
        link = pending_xref("", refexplicit=True, **where)
        literal.replace_self(link)
        link += literal


def as_markdown(text: str, name: str) -> str:
    """A notebook as a page: its cells, and what they printed and drew when it was last run."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for out in cell.get("outputs", ()):
            if "text" in out:
                parts.append(f"```text\n{''.join(out['text'])}```")
            elif "image/png" in out["data"]:
                parts.append(f"![{cell['metadata']['alt']}](data:image/png;base64,{out['data']['image/png']})")
    parts.insert(1, f"{{download}}`The notebook <{name}.ipynb>`, to run it yourself.")
    return "\n\n".join(parts) + "\n"


def readable(app: Any, page: str, source: list[str]) -> None:
    if Path(app.env.doc2path(page, base=False)).suffix == ".ipynb":
        source[0] = as_markdown(source[0], Path(page).name)


def setup(app: Any) -> None:
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(Notebook)
    app.connect("source-read", readable)
    app.connect("source-read", absolute)
    app.connect("doctree-read", link_names)
