"""What `tdc.batch` says of code and of arguments that have no meaning for a batch, message by message."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tdc
from tdc.autobatch.decorator import BatchFunction


def made(text: str, **options: Any) -> BatchFunction:
    """The function `f` of a text, decorated."""
    scope: dict[str, Any] = {"torch": torch, "F": F}
    exec(text, scope)
    return tdc.batch(scope["f"], source=text, **options)


def changes(code: str) -> str:
    return f"{code!r}, which changes an object,"


def late(code: str) -> tuple[str, str]:
    text = f"'{code}' in an expression that reads 'x' before,"
    return text, "a statement of its own that gives x its value"


NO_WAIT = "return the results, as a tuple or a tensor"
PRINT = ("a call of `print`", "call f on one example to print")
CODE: dict[str, tuple[str, str]] = {  # the second line of a function, what is wrong with it, and what to do
    "y = o.pop()": (changes("o.pop()"), "last, o = o[-1], o[:-1]"),
    "o.pop(0)": (changes("o.pop(0)"), "last, o = o[-1], o[:-1]"),
    "y = o.popitem()": (changes("o.popitem()"), "read o[key], and leave it there"),
    "y = o['a'].setdefault(1, x)": (changes("o['a'].setdefault(1, x)"), "if key not in o['a']: o['a'][key] = value"),
    "o.extend([x])": (changes("o.extend([x])"), "o = [*o, *more]"),
    "y = o.extend([x]) or o": (changes("o.extend([x])"), "o = [*o, *more]"),
    "o.insert(0, x)": (changes("o.insert(0, x)"), "o = [*o[:i], value, *o[i:]]"),
    "o.remove(x)": (changes("o.remove(x)"), "o = [*o[:i], *o[i + 1 :]]"),
    "o.clear()": (changes("o.clear()"), "o = []"),
    "o.sort()": (changes("o.sort()"), "o = sorted(o)"),
    "o.reverse()": (changes("o.reverse()"), "o = o[::-1]"),
    "o.update(a=x)": (changes("o.update(a=x)"), "o = {**o, **more}"),
    "o['a'].append(x)": (changes("o['a'].append(x)"), "o['a'] = [*o['a'], value]"),
    "y = o.rows.pop()": (changes("o.rows.pop()"), "copy it to a local name, and give that a new value"),
    "y = [o.pop() for _ in range(3)]": (changes("o.pop()"), "last, o = o[-1], o[:-1]"),
    "x.mul_(2)": (changes("x.mul_(2)"), "x = x.mul(2)"),
    "y = x.mul_(2) + 1": (changes("x.mul_(2)"), "x = x.mul(2)"),
    "x.add_(1).relu_()": (changes("x.add_(1).relu_()"), "x = x.add(1).relu()"),
    "x[0].copy_(o)": (changes("x[0].copy_(o)"), "x[0] = other"),
    "x.copy_(o)": (changes("x.copy_(o)"), "x = other"),
    "x[0].mul_(2)": (changes("x[0].mul_(2)"), "x[0] = x[0].mul(2)"),
    "y = o.w.mul_(2)": (changes("o.w.mul_(2)"), "o.w.mul(2)"),
    "x.zero_()": (changes("x.zero_()"), "x = torch.zeros_like(x)"),
    "x.requires_grad_()": (changes("x.requires_grad_()"), "call it outside, on the arguments"),
    "F.elu_(x)": (changes("F.elu_(x)"), "F.elu(x)"),
    "yield x": ("`yield`", NO_WAIT),
    "y = yield from o": ("`yield from`", NO_WAIT),
    "print(x)": PRINT,
    "y = [print(x) for x in o]": PRINT,
    "y = x + (x := o)": late("x := o"),
    "y = (x := o) * x - (x := 2)": late("x := 2"),
    "y = x + (o if x > 0 else (x := 2))": late("x := 2"),
    "x += (x := 2)": late("x := 2"),
    "x + 1": ("an expression whose value is not used, 'x + 1',", "assign the result to a name, or leave it out"),
    "o.h = x": ("an attribute that is set, 'o.h',", "keep it in a local name and return it"),
    "F[0] = x": ("an element of 'F', which is not local,", "give it a local name first"),
    "global y": ("`global`", "return the value instead"),
    "raise ValueError": ("`raise`", "`assert test, text` holds for each example"),
    "import math": ("`import`", "at the top of the file"),
    "f = lambda v: v * o; o = f(x)": (
        "a lambda that reads 'o', which gets another value,",
        "keep what it reads under a name of its own: now = o",
    ),
    "g = (v * o for v in x); o = sum(g)": (
        "a generator that reads 'o', which gets another value,",
        "keep what it reads under a name of its own: now = o",
    ),
    "del x": ("`del`", "it is not needed"),
    "try: pass\n    except* ValueError: pass": ("`try`", "errors are for all examples at once"),
}
if sys.version_info >= (3, 12):
    CODE["type K = float"] = ("`type`", "at the top of the file")


@pytest.mark.parametrize("line", CODE)
def test_code_that_is_refused(line: str):
    with pytest.raises(tdc.UnsupportedError) as caught:
        made(f"def f(x, o):\n    {line}\n    return x\n")
    first, hint = str(caught.value).split("\n")
    got, _, where = first.removeprefix("tdc.batch: expected code that can be batched, got ").rpartition(" at ")
    assert (got, hint) == (CODE[line][0], f"hint: {CODE[line][1]}")
    assert where.startswith("<tdc.batch f ")
    assert where.endswith(":2")


ALLOWED = [
    "o.append(x)", "value, o = o.pop('a')", "o = o.update({})", "v, i = x.sort()", "y = torch.sort(x)",
    "y = o.state.update(x)", "x[0] = 1", "x += 1", "y = o.lambda_(x)", "y = torch.relu(x).pop()",
    "y = (x := o) + x", "y = x if o > 0 else (x := o)", "x = x > 0 and (x := o)", "x = (x := x + 1) * 2",
    "x = sorted([x], key=lambda v: x.sum()); x = x[0]", "f = lambda v: v * o; x = f(1)",
]  # fmt: skip


@pytest.mark.parametrize("line", ALLOWED)
def test_what_changes_no_object_is_not_refused(line: str):
    assert made(f"def f(x, o):\n    {line}\n    return x\n").fn is not None


@pytest.mark.parametrize("value", ["lambda v: v + n", "(v + n for v in (1, 2))"])
def test_what_reads_examples_is_not_kept_behind_a_test(value: str):
    """Found by hand: it read those of the statements before, in their order."""
    kind = "lambda" if "lambda" in value else "generator"
    with pytest.raises(tdc.UnsupportedError, match=f"a {kind} that reads 'n' and is kept for other statements, at "):
        made(f"def f(x, n):\n    g = {value}\n    if x > 0:\n        x = x * 2\n    return [x, g]\n")


@pytest.mark.parametrize("value", ["partial(torch.add, n)", "zip([x], [n])", "Holder(n)", "{1: n}.items()"])
def test_objects_with_examples_inside_are_not_kept_behind_a_test(value: str):
    f = made(f"def f(x, n):\n    g = {value}\n    if x > 0:\n        x = x * 2\n    return x, g\n")
    f.fn.__globals__.update(partial=functools.partial, Holder=Holder)
    with pytest.raises(tdc.UnsupportedError, match="that has such a tensor inside, and is needed behind a test"):
        f.map(torch.tensor([1.0, -1.0]), torch.tensor([3.0, 4.0]))


class Holder:
    def __init__(self, x: Any) -> None:
        self.x = x


def test_the_line_is_that_of_the_file():
    def counted(xs: Any, o: Any) -> Any:
        for x in xs:
            o.extend(x)
        return o

    line = counted.__code__.co_firstlineno + 2
    with pytest.raises(tdc.UnsupportedError, match=f"test_messages.py:{line}\n"):
        tdc.batch(counted)


PLUS = made("def f(x, y=2.0):\n    return x + y if x.sum() > 0 else x\n")
ONE = torch.ones
ROWS = tdc.pack([ONE(2, 3), ONE(1, 3)])
SHARED = "None in in_dims for what all examples share"
NOBODY = (
    "expected an argument that is a batch, got only what all examples share\n"
    "hint: tdc.lanes(x) marks a tensor of examples; in_dims=None says that all share an argument"
)
EACH = "hint: in_dims=0, or one entry for each argument: in_dims=(0, None)"
CALLS: dict[str, tuple[Callable[[], Any], type[tdc.TdcError], str]] = {
    "no tensor": (lambda: PLUS.map(3.0), tdc.ShapeError, NOBODY),
    "no dim": (lambda: PLUS.map(ONE(3), in_dims=None), tdc.ShapeError, NOBODY),
    "lanes of a number": (lambda: PLUS(tdc.lanes(3)), tdc.ShapeError, NOBODY),
    "other numbers of examples": (
        lambda: PLUS.map(ONE(3), ONE(4)),
        tdc.ShapeError,
        "expected one number of examples for all arguments, got others\n"
        f"at x: 3 examples\nat y: 4 examples\nhint: {SHARED}",
    ),
    "other numbers in one argument": (
        lambda: PLUS(tdc.lanes({"a": ONE(3), "b": ONE(4)})),
        tdc.ShapeError,
        "expected one number of examples for all arguments, got others\n"
        f"at x, tensor 0: 3 examples\nat x, tensor 1: 4 examples\nhint: {SHARED}",
    ),
    "no examples": (
        lambda: PLUS.map(ONE(0, 2)),
        tdc.ShapeError,
        "expected a batch of at least one example, got an empty one\nat x\nhint: call it only where there are examples",
    ),
    "no dims": (
        lambda: PLUS.map(torch.tensor(1.0)),
        tdc.ShapeError,
        f"expected a tensor with a dim for the examples, got Tensor float32[]\nhint: {SHARED}",
    ),
    "a dim too many": (
        lambda: PLUS.map(ONE(3), in_dims=1),
        tdc.ShapeError,
        "expected a dim in [-1, 0], got 1\nhint: count dims of the logical shape",
    ),
    "a dim of a name": (
        lambda: PLUS.map(ONE(3), in_dims="0"),
        tdc.DtypeError,
        f"expected an int or None in in_dims, got str\n{EACH}",
    ),
    "a dim that is a bool": (
        lambda: PLUS.map(ONE(3), in_dims=True),
        tdc.DtypeError,
        f"expected an int or None in in_dims, got bool\n{EACH}",
    ),
    "dims of parts": (
        lambda: PLUS.map((ONE(3), ONE(3)), in_dims=((0, 0, 0),)),
        tdc.ShapeError,
        "expected one dim for each part of an argument, got 3 for tuple of 2\n"
        "hint: one int, or None, for all of an argument",
    ),
    "dims of arguments": (
        lambda: PLUS.map(ONE(3), ONE(3), in_dims=(0,)),
        tdc.ShapeError,
        "expected one entry of in_dims for each argument, got 1 for 2 arguments\nhint: None for no dim",
    ),
    "a ragged dim": (
        lambda: PLUS.map(ROWS, in_dims=1),
        tdc.ShapeError,
        "expected the dim of a ragged batch that counts its examples, got dim 1 of NestedTensor float32[2, -1, 3]\n"
        "hint: in_dims=0 for it",
    ),
    "an item of floats": (
        lambda: made("def f(x, n):\n    return x * (0.5, 2.0)[n]\n").map(ONE(3), torch.tensor([0, 1, 1])),
        tdc.UnsupportedError,
        "expected tensors of one shape in what a number indexes that differs between examples, got a tuple of others\n"
        "hint: torch.tensor(x)[i] of floats; if i == 0: ... of anything",
    ),
    "no such lowering": (
        lambda: tdc.batch(lower="loop"),
        tdc.StructureError,
        "expected a lowering among auto, while, unroll, got 'loop'\nhint: lower=\"auto\"",
    ),
    "a lowering that is no name": (
        lambda: tdc.batch(lower=None),
        tdc.DtypeError,
        'expected the name of a lowering, got NoneType\nhint: lower="auto"',
    ),
    "no rounds": (
        lambda: tdc.batch(max_iters=0),
        tdc.ShapeError,
        "expected max_iters of at least 1, got 0\nhint: how often a while runs at most, or None",
    ),
    "rounds of a float": (
        lambda: tdc.batch(max_iters=2.5),
        tdc.DtypeError,
        "expected an int or None as max_iters, got float\nhint: how often a while runs at most, or None",
    ),
    "no function": (
        lambda: tdc.batch(3),
        tdc.DtypeError,
        "expected a Python function, got int\nhint: decorate the function or method itself, below other decorators",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_refused(name: str):
    call, error, expected = CALLS[name]
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == f"tdc.batch: {expected}"


def test_a_lambda_is_refused():
    with pytest.raises(tdc.UnsupportedError, match=r"a function that begins with def, got a lambda at .*test_messages"):
        tdc.batch(lambda x: x)


def test_dims_count_from_the_end_and_go_into_tuples():
    x = torch.arange(6.0).reshape(2, 3)
    assert PLUS.map(x, in_dims=-1).tolist() == PLUS.map(x.T).tolist()
    pair = made("def f(p):\n    return p[0] + p[1]\n")
    assert pair.map((x, ONE(2)), in_dims=((1, None),)).tolist() == (x.T + 1).tolist()
    assert pair.map([x, ONE(3)], in_dims=([1, 0],)).tolist() == (x.T + 1).tolist()


NO_NUMBERS = ["xs.sum().item()", "xs[0].tolist()[0]", "float(xs.sum())", "int(xs[0, 0])", "complex(xs.sum())"]


@pytest.mark.cases(3)
@pytest.mark.parametrize("code", NO_NUMBERS)
def test_a_number_of_each_example_is_no_number_of_python(code: str):
    f, rows = made(f"def f(xs):\n    return {code} + 1\n"), tdc.pack([torch.ones(2, 3), torch.ones(1, 3)])
    text = "a number asked of one that differs between examples"
    with pytest.raises(tdc.UnsupportedError, match=text):
        f(rows)
    with pytest.raises(Exception, match=text):
        torch.compile(f, backend="eager", fullgraph=True)(rows)


def test_a_number_that_all_examples_share_may_be_one_of_python():
    f = made("def f(xs, s):\n    return xs.sum() * s.item() + float(s) + len(s[None].tolist())\n")
    rows = tdc.pack([torch.ones(2, 3), torch.ones(1, 3)])
    assert f(rows, torch.tensor(2.0)).tolist() == [15.0, 9.0]


TEXTS = ["str(k)", "f'{k}'", "f'{[xs, 1]!r}'", "'%s' % k", "'{}: {x}'.format(1, x=k)", "repr(xs)", "hash(k)"]
if sys.version_info >= (3, 14):
    TEXTS.append("t'{k}'")


@pytest.mark.parametrize("code", TEXTS)
def test_a_text_of_what_differs_is_refused(code: str):
    """Found by hand: it was torch's of the tensor of all examples."""
    f = made(f"def f(xs, n):\n    k = 1 if n > 1 else 0\n    return {code}, xs.sum() * k\n")
    with pytest.raises(tdc.UnsupportedError, match="texts of what all examples share, got one of a value that differs"):
        f(ROWS, tdc.lanes(torch.tensor([1, 2])))


def test_a_text_of_what_all_share():
    f = made(
        "def f(xs, d, str=len):\n    y = 0\n    for i in range(2):\n"
        "        y = y + xs.sum() * d[f'w{i}'] * d['w%d' % i]\n"
        "    return y + d['{}{n}'.format(*'w', n=0)] + d[format('w0')] * str([1, xs])\n"
    )
    for run in (f, torch.compile(lambda *args: f(*args), backend="eager", fullgraph=True)):
        assert run(ROWS, {"w0": 1.0, "w1": 2.0}).tolist() == [33.0, 18.0]


GREW = "what a list that grew differently can do, got `+` or `*` of lists"
BYTE = "a position of another dtype, got one of uint8, which torch takes for a mask"
WORDS = {
    "[x.sum() for x in xs] + [n]": GREW, "[n] + [x.sum() for x in xs]": GREW, "2 * [x.sum() for x in xs]": GREW,
    "xs[n.byte()]": BYTE, "xs[0][n.byte()]": BYTE, "[xs, xs][n.byte()]": BYTE,
    "[cell][0](n)": "and call it as f(x) or self.f(x), under no other local name",
}  # fmt: skip


@pytest.mark.parametrize("code", WORDS)
def test_what_cannot_be_said(code: str):
    f = made(f"def f(xs, n):\n    return {code}\n")
    f.fn.__globals__["cell"] = made("def f(n):\n    return n if n > 0 else -n\n")
    with pytest.raises(tdc.UnsupportedError, match=re.escape(WORDS[code])):
        f(ROWS, tdc.lanes(torch.tensor([0, 1])))


def test_an_element_at_a_position_of_uint8():
    f = made("def f(x, n):\n    y = x * 1\n    y[n] = 3\n    return y\n")
    with pytest.raises(tdc.UnsupportedError, match=BYTE):
        f.map(ONE(2, 3), torch.tensor([0, 1], dtype=torch.uint8))


LINES: dict[str, tuple[str, str]] = {  # a function, and its line that the note behind the text shows
    "no return": ("def f(x):\n    if x > 1:\n        return x\n", "1 in f: def f(x):"),
    "shapes": (
        "def f(x):\n    if x > 1:\n        y = torch.zeros(2)\n    else:\n        y = torch.zeros(3)\n    return y\n",
        "2 in f: if x > 1:",
    ),
    "float": ("def f(x):\n    y = x + 1\n    return float(y)\n", "3 in f: return float(y)"),
    "int in a block": ("def f(x):\n    y = int(x)\n    return x + y\n", "2 in f: y = int(x)"),
    "in a loop": (
        "def f(x):\n    y = x.new_zeros(1)\n    while x > 1:\n        y, x = torch.cat([y, y]), x - 1\n    return y\n",
        "3 in f: while x > 1:",
    ),
    "range": ("def f(x):\n    for i in range(x):\n        x = x + i\n    return x\n", "2 in f: for i in range(x):"),
}


@pytest.mark.parametrize("name", LINES)
def test_errors_of_a_call_have_the_line(name: str):
    text, line = LINES[name]
    with pytest.raises(tdc.TdcError) as error:
        made(text).map(torch.tensor([1.0, 2.0, 3.0]))
    (note,) = error.value.__notes__
    assert re.fullmatch(rf"at <tdc.batch f \d+>:{re.escape(line)}", note)


def test_a_graph_has_the_line_of_the_program():
    f = made(LINES["shapes"][0])
    with pytest.raises(tdc.ShapeError) as error:
        tdc.compile.counted(lambda x: f.map(x), backend="eager")(torch.tensor([1.0, 2.0, 3.0]))
    assert error.value.__notes__[0].startswith("at test_messages.py:")
