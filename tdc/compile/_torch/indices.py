"""Indices out of range in Inductor's loops on CPU (torch 2.11-2.15).

Inductor checks an index where it reads by it, and raises there. In a loop of several threads an error ends the process.
Here the check takes a note, and reads at 0 instead; the kernel raises the error behind its loops.

    if (!((0 <= tmp2) & (tmp2 < 50L))) { out_of_range = "..."; tmp0 = decltype(tmp0)(0); }
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tdc.compile._torch.patches import patched
from tdc.core.errors import message
from tdc.core.private import find, optional

INDICES = "indices checked behind loops"
NOTE = "tdc_out_of_range"
HINT = "ids are below the size of their table, labels below the number of classes"
Check = Callable[..., Any]


@optional(INDICES, lost="processes that outlive an index out of range in a graph", instead=nullcontext)
def raised_behind_loops() -> AbstractContextManager[Any]:
    """A context: kernels generated in it raise errors of indices behind their loops."""
    path = "torch._inductor.codegen.cpp:"
    plain, vector, group = [find(f"{path}{name}") for name in ("CppKernel", "CppVecKernel", "KernelGroup")]
    check = find(f"{path}CppKernel.check_bounds", takes=("expr",))
    find("torch._inductor.codegen.common:CSE.scoped_copy")
    write = find(f"{path}KernelGroup.codegen_group")
    asserts = [find(f"{path}{cls}.indirect_assert", takes=("var",)) for cls in ("CppKernel", "CppVecKernel")]
    return patched(
        (plain, "check_bounds", remembering(check)), (group, "codegen_group", raising(write)),
        (plain, "indirect_assert", noting(asserts[0])), (vector, "indirect_assert", noting(asserts[1])),
    )  # fmt: skip


def remembering(check: Check) -> Check:
    """Wrap Inductor's check of an index to know the variables of the index."""

    def run(kernel: Any, expr: Any, *args: Any, **kwargs: Any) -> None:
        kernel.tdc_index = sorted([str(s) for s in expr.free_symbols if str(s).startswith("tmp")])
        check(kernel, expr, *args, **kwargs)

    return run


def zeroed(kernel: Any, checked: str) -> str:
    """C++ that makes the variables of an index 0, the one that is checked among them, and arrays of their vectors."""
    said: list[str] = []
    for name in sorted({*getattr(kernel, "tdc_index", ()), *re.findall(r"^tmp\d+$", checked)}):
        said.append(f"{name} = decltype({name})(0);")
        stored = f"{name}.store(tmpbuf.data(),"
        arrays = [v for key, v in kernel.cse._cache.items() if stored in str(key) and "loadu" not in str(key)]
        said += [f"{array}.fill(0);" for array in arrays]
    return " ".join(said)


def noting(generate: Check) -> Check:
    """Wrap Inductor's text of a check: a note in place of an error, and 0 in place of the index."""

    def text(kernel: Any, var: Any, *args: Any, **kwargs: Any) -> str:
        found: str = generate(kernel, var, *args, **kwargs)
        given = re.fullmatch(r'\w+\((.*), "index out of bounds: (.*)"\)', found, re.DOTALL)
        if given is None:  # one of a scalar in a kernel of vectors has a note already
            return found
        condition, shown = given.groups()
        return f'if (!({condition})) {{ {NOTE} = "{words(shown)}"; {zeroed(kernel, str(var))} }}'

    return text


def words(shown: str) -> str:
    """The error of an index, in one line, from Inductor's text of the range: `0 <= tmp2 < 50L`."""
    known = re.search(r"< (\d+)L?$", shown)
    expected = f"an index from 0 to {int(known[1]) - 1}" if known else "an index below the size of its dim"
    return message("index", expected, "one out of range", hint=HINT).replace("\n", "; ")


def raising(generate: Check) -> Check:
    """Wrap Inductor's text of a kernel: behind the loops an error for a note."""

    def text(group: Any, *args: Any, **kwargs: Any) -> str:
        found: str = generate(group, *args, **kwargs)
        if NOTE not in found:
            return found
        head, function, body = found.partition('extern "C"')
        before, brace, inner = body.partition("{")
        check = "AOTI_TORCH_CHECK" if find("torch._inductor.virtualized:V").graph.aot_mode else "TORCH_CHECK"
        inner, end, rest = inner.rpartition("}")
        begin = f"{brace}\n    std::atomic<const char*> {NOTE}{{nullptr}};"
        behind = f"    {check}({NOTE}.load() == nullptr, {NOTE}.load());\n"
        return f"{head}{function}{before}{begin}{inner}{behind}{end}{rest}"

    return text
