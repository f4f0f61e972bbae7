"""Writes docs/reference: one page for each namespace, with the docstrings of its public names.

python docs/tools/make_reference.py
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_origin

import tdc

FOLDER = Path(__file__).parents[1] / "reference"
SPACES = (
    "compile", "data", "dist", "einops", "hf", "interop", "io", "nn", "ops", "optim", "ragged", "testing", "viz",
)  # fmt: skip
HEAD = """\
# {name}

{text}

`python docs/tools/make_reference.py` generates this page from the docstrings; a test fails when it is out of date.
"""
NAMES = "Shapes|Dtypes|Args|Attributes|Returns|Yields|Raises|Warns|Compile|Example|Source"
SECTION = re.compile(f"^({NAMES}):$", re.M)
BLANK = "\n\n"
LISTED = ("Args", "Attributes", "Raises", "Warns")


def signature(x: Any, bound: bool = False) -> str:
    """The call signature without annotations, of a method without the object; empty where there is none."""
    try:
        found = inspect.signature(x)
    except (TypeError, ValueError):
        return ""
    empty = inspect.Parameter.empty
    bare = [p.replace(annotation=empty) for p in found.parameters.values()][bound:]
    text = str(found.replace(parameters=bare, return_annotation=empty))
    text = re.sub(r"<object object at 0x\w+>", "...", text)
    return re.sub(r"<(?:function|class) '?([\w.]+)'?(?: at 0x\w+)?>", r"\1", text)


def public(module: types.ModuleType) -> dict[str, Any]:
    """The names of a namespace, which are written `from x import name as name`, without other namespaces."""
    names = re.findall(r" as (\w+)$", inspect.getsource(module), re.MULTILINE)
    found = {name: getattr(module, name) for name in names}
    return {name: x for name, x in sorted(found.items()) if not isinstance(x, types.ModuleType)}


def sections(doc: str) -> Iterator[str]:
    """A docstring as Markdown."""
    parts = SECTION.split(inspect.cleandoc(doc))
    yield parts[0].strip()
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        text = textwrap.dedent(text.strip("\n")).rstrip()
        if name == "Example":
            yield f"```pycon\n{text}\n```"
        elif name in LISTED and re.match(r"[\w*][\w*, ]*: ", text):
            yield f"**{name}**\n\n{listed(text)}"
        else:
            yield f"**{name}** {text}" if text[:1] != "|" else f"**{name}**\n\n{text}"


def listed(text: str) -> str:
    """`name: text` with indented lines below it, as a list."""
    entries: list[str] = []
    for line in text.splitlines():
        if line.startswith(" ") or not re.match(r"[\w*][\w*., ]*:( |$)", line):
            entries[-1] += f" {line.strip()}"
        else:
            name, _, rest = line.partition(":")
            entries.append(f"- `{name}`:{rest}")
    return "\n".join(entries)


def methods(x: type) -> Iterator[str]:
    """One line for each public method and property with a docstring, but for operations of torch, and for what every
    TensorDict has."""
    base = tdc.TensorDict if issubclass(x, tdc.TensorDict) and x is not tdc.TensorDict else object
    for name, member in inspect.getmembers_static(x):
        inner = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        ours = str(getattr(inner, "__module__", "") or getattr(getattr(inner, "fget", None), "__module__", ""))
        doc = getattr(inner, "__doc__", None)
        if name.startswith("_") or not doc or not ours.startswith("tdc") or doc == type(inner).__doc__:
            continue
        if hasattr(base, name) or doc.startswith("`torch."):  # operations of torch are in the support table
            continue
        call = signature(inner, not isinstance(member, staticmethod)) if callable(inner) else ""
        yield f"- `{name}{call}`: {' '.join(inspect.cleandoc(doc).partition(BLANK)[0].split())}"


def entry(space: str, name: str, x: Any) -> str:
    """One name."""
    called = callable(x) and get_origin(x) is None  # an alias can be called, too; from Python 3.14 on with a signature
    doc = getattr(x, "__doc__", None) if called else None
    kind = "class " if isinstance(x, type) else ""
    call = signature(x) if called and not (isinstance(x, type) and issubclass(x, BaseException)) else ""
    lines = [f"## {name}", f"```python\n{kind}{space}.{name}{call}\n```", *sections(doc or "")]
    found = list(methods(x)) if isinstance(x, type) and not issubclass(x, BaseException) else []
    return "\n\n".join([part for part in (*lines, "\n".join(found)) if part])


def page(space: str) -> str:
    """The page of a namespace."""
    module = importlib.import_module(space)
    text = inspect.cleandoc(module.__doc__ or "").partition("\n\n")[0]
    entries = [entry(space, name, x) for name, x in public(module).items()]
    return "\n\n".join([HEAD.format(name=space, text=text).rstrip(), *entries])


def render() -> dict[Path, str]:
    """The pages by file."""
    return {FOLDER / f"{s}.md": page(s) + "\n" for s in ("tdc", *[f"tdc.{room}" for room in SPACES])}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in render().items():
        path.write_text(text, encoding="utf-8")
