"""Where `tdc.batch` finds the source of a function: files, notebooks, the interpreter, text; and what points there."""

from __future__ import annotations

import functools
import io
import linecache
import os
import pdb
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tdc
from tdc.autobatch.decorator import BatchFunction

X = torch.tensor([1.0, -1.0, 3.0])
THIS = Path(__file__)


# -- notebooks


class Notebook:
    """Cells that share a namespace, each in a file of its own in `linecache`, as IPython and Python 3.13 keep them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scope: dict[str, Any] = {"__name__": "__main__", "torch": torch, "tdc": tdc, "nn": nn}
        self.cells = 0

    def run(self, text: str) -> str:
        """Run a cell. Returns the name of its file."""
        self.cells += 1
        filename = self.name.format(self.cells)
        linecache.cache[filename] = len(text), None, text.splitlines(True), filename
        exec(compile(text, filename, "exec"), self.scope)
        return filename


CELLS = ("<ipython-input-{}-0a1b>", "ipykernel_1/{}.py", "<python-input-{}>")


@pytest.mark.parametrize("name", CELLS)
def test_cells(name: str):
    """Functions defined, defined anew, of a closure, and of a class."""
    book = Notebook(name)
    book.run("@tdc.batch\ndef f(x):\n    return x if x > 0 else -x\n")
    first = book.scope["f"]
    book.run("k = 1\n\n@tdc.batch\ndef f(x):\n    while x > 2:\n        x = x - k\n    return x\n")
    assert book.scope["f"].map(X).tolist() == [1, -1, 2]
    assert first.map(X).tolist() == [1, 1, 3]
    book.run(
        "def make(k):\n    @tdc.batch\n    def f(x):\n        return x * k if x > 0 else x\n    return f\nf = make(3)\n"
    )
    assert book.scope["f"].map(X).tolist() == [3, -1, 9]
    book.run(
        "class Net(nn.Module):\n    @tdc.batch\n    def forward(self, xs):\n        h = torch.zeros(())\n"
        "        for x in xs:\n            h = h + x\n        return h\n"
    )
    assert book.scope["Net"]()(tdc.pack([torch.ones(2), torch.ones(3)])).tolist() == [2, 3]
    compiled = torch.compile(book.scope["f"].map, backend="eager", fullgraph=True)
    assert compiled(X).tolist() == [3, -1, 9]


INDENTED = """\
if True:
    @tdc.batch
    def f(x):
        \'\'\'
Text in the first column.
\'\'\'
# A comment, too.
        return x * 2 if x > 0 else x
"""


def test_lines_that_are_indented_less():
    """`textwrap.dedent` fails on both."""
    book = Notebook(CELLS[0])
    book.run(INDENTED)
    assert book.scope["f"].map(X).tolist() == [2, -1, 6]


@pytest.mark.parametrize("name", CELLS)
def test_errors_in_cells_show_the_line(name: str):
    book = Notebook(name)
    filename = book.run("@tdc.batch\ndef f(x):\n    if x.sum() > 0:\n        x = x @ torch.ones(7)\n    return x\n")
    assert line_of(lambda: book.scope["f"].map(torch.ones(2, 3))) == (filename, 4, "x = x @ torch.ones(7)")
    with pytest.raises(tdc.UnsupportedError) as caught:
        book.run("@tdc.batch\ndef f(x):\n    x = x\n    print(x)\n    return x\n")
    assert f"at {name.format(2)}:4\n" in str(caught.value)


def line_of(call: Callable[[], Any]) -> tuple[str, int | None, str | None]:
    """The innermost line of the user in the traceback of an error."""
    try:
        call()
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}tdc{os.sep}" not in f.filename]
        return frames[-1].filename, frames[-1].lineno, frames[-1].line
    raise AssertionError("no error")


# -- the interpreter


def typed(text: str) -> str:
    """What the interpreter shows of a session."""
    path = os.pathsep.join([str(THIS.parents[2]), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-q", "-i"]
    run = subprocess.run(command, input=text, env=environment, capture_output=True, text=True, check=False, timeout=300)
    return run.stdout + run.stderr


SESSION = """\
import torch, tdc
@tdc.batch
def f(x):
    return x if x > 0 else -x

text = "def g(x):\\n    return x if x > 0 else -x\\n"
exec(text)
g = tdc.batch(g, source=text)
g.map(torch.tensor([1.0, -2.0]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="from 3.13 on the interpreter keeps what was typed")
def test_the_interpreter_asks_for_the_text():
    shown = typed(SESSION)
    assert "expected a function with its source, got 'f', whose source cannot be read" in shown
    assert "hint: tdc.batch(fn, source=text)" in shown
    assert "tensor([1., 2.])" in shown


# -- text


def from_text(text: str, name: str, **scope: Any) -> BatchFunction:
    exec(text, scope)
    found: Any = scope
    for part in name.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    return tdc.batch(found, source=text)


TWO = "class A:\n    def f(self, x):\n        return x + 1\n\nclass B:\n    def f(self, x):\n        return x + 2\n"


def test_text_with_several_functions_of_one_name():
    assert from_text(TWO, "A.f").map(None, X).tolist() == [2, 0, 4]
    assert from_text(TWO, "B.f").map(None, X).tolist() == [3, 1, 5]
    again = "def f(x):\n    return x\n\ndef f(x):\n    return x + 1\n"
    assert from_text(again, "f").map(X).tolist() == [2, 0, 4]


@pytest.mark.parametrize("text", ["\n\ndef f(x):\n    return x + 1\n", "\n    def f(x):\n        return x + 1\n    "])
def test_text_that_is_indented_or_begins_with_empty_lines(text: str):
    def f(x: Tensor) -> Tensor:
        return x + 1

    assert tdc.batch(f, source=text).map(X).tolist() == [2, 0, 4]


def test_errors_in_text_show_the_line():
    f = from_text("def f(x):\n    x = x * 2\n    return x @ torch.ones(7)\n", "f", torch=torch)
    filename, line, text = line_of(lambda: f.map(torch.ones(2, 3)))
    assert filename.startswith("<tdc.batch f ")
    assert (line, text) == (3, "return x @ torch.ones(7)")


def plus(x: Tensor, /, y: Any = 1, *more: Any, z: Any = 2, **named: Any) -> Tensor:
    return x + y


async def waits(x: Tensor) -> Tensor:
    return x


@functools.wraps(plus)
def wrapper(*args: Any, **kwargs: Any) -> Any:
    return plus(*args, **kwargs)


SOURCE = "expected a function with its source, got 'plus', whose source "
WRONG: dict[str, tuple[Callable[[], Any], type[tdc.TdcError], str]] = {
    "other arguments": (
        lambda: tdc.batch(plus, source="def plus(x):\n    return x\n"), tdc.UnsupportedError,
        f"{SOURCE}has other arguments\nhint: tdc.batch(fn, source=text)",
    ),
    "another function": (
        lambda: tdc.batch(plus, source="def f(x):\n    return x\n"), tdc.UnsupportedError,
        f"{SOURCE}holds something else\nhint: tdc.batch(fn, source=text)",
    ),
    "no Python": (
        lambda: tdc.batch(plus, source="def plus(:\n"), tdc.UnsupportedError,
        f"{SOURCE}is not Python\nhint: tdc.batch(fn, source=text)",
    ),
    "no text": (
        lambda: tdc.batch(source=3)(plus), tdc.DtypeError,  # type: ignore[arg-type]  # what is tested
        "expected the source as text, got int\nhint: tdc.batch(fn, source=text)",
    ),
    "another decorator below": (
        lambda: tdc.batch(wrapper), tdc.UnsupportedError,
        "expected a function as it was defined, got 'plus', which another decorator has wrapped\n"
        "hint: tdc.batch below other decorators",
    ),
    "asynchronous": (
        lambda: tdc.batch(waits), tdc.UnsupportedError,
        "expected a function that begins with def, got an asynchronous one\nhint: write def f(x): return ...",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str):
    call, error, text = WRONG[name]
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == f"tdc.batch: {text}"


def test_every_kind_of_argument():
    assert tdc.batch(plus).map(X, 2, in_dims=(0, None)).tolist() == [3, 1, 5]


# -- classes


class Base(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class Derived(Base):
    __by = 2

    @tdc.batch
    def forward(self, x: Tensor, __more: int = 3) -> Tensor:
        __twice = x * self.__by * dict(__n=1)["__n"]  # noqa: C408  # names of keywords are as they are written
        if __twice > 0:
            __twice = super().forward(__twice) + __more
        return __twice

    def made(self) -> BatchFunction:
        @tdc.batch
        def inner(x: Tensor) -> Tensor:
            return x * self.__by if x > 0 else x

        return inner


def test_what_python_takes_from_the_class():
    """Private names, and `super` without arguments."""
    module = Derived()
    run = module.forward.map
    for f in (run, torch.compile(run, backend="eager", fullgraph=True)):
        assert f(X).tolist() == [module(x) for x in X] == [6, -2, 10]
    assert module.made().map(X).tolist() == [2, -1, 6]


# -- debuggers


@tdc.batch
def stopped(x: Tensor) -> Tensor:
    if x > 0:
        y = x * 2
        x = y + 1
    return x


def debugged(call: Callable[[], Any], line: int, commands: str) -> str:
    """What pdb shows that stops in this file at a line."""
    out = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO(f"{commands}\n"), stdout=out, nosigint=True, readrc=False)
    debugger.use_rawinput = False
    before = sys.gettrace()
    try:
        debugger.set_break(str(THIS), line)
        debugger.runcall(call)
    finally:
        debugger.clear_all_breaks()
        sys.settrace(before)
    return out.getvalue()


@pytest.mark.parametrize("batch", [False, True])
def test_a_breakpoint_stops_at_the_line(batch: bool):
    line = stopped.fn.__code__.co_firstlineno + 4
    call = (lambda: stopped.map(X)) if batch else (lambda: stopped(X[0]))
    shown = debugged(call, line, "continue\nprint('y is', y)\nwhere\ncontinue")
    assert f"{THIS}({line})" in shown
    assert "-> x = y + 1" in shown
    assert "y is" in shown
    assert "NameError" not in shown
