"""torch's own samples as code for one ragged example: `tdc.batch` beside the loop over examples.

    python tests/autobatch/ragged_samples.py                      counts of values and gradients, eagerly
    python tests/autobatch/ragged_samples.py --ops '^sum$' -v     some operations, with the text of each failure
    python tests/autobatch/ragged_samples.py --mode aot_eager     in graphs

One sample, drawn three times and cut to three lengths along a dim, is three examples. A function of `tdc.batch` calls
the operation with the arguments of one example; tensors that have the dim are ragged arguments, others one for each
example, or shared by all. A call passes, is refused in our words, raises something else, or differs; or it is not
mapped, where torch refuses an example alone.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import MethodDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from opinfo import compare
from opinfo.calls import method
from opinfo.mapping import (
    PARAMETERS,
    VECTORS,
    Form,
    NotMapped,
    cropped,
    lengths_of,
    names_of,
    parameters,
    refuse_unwritten,
)
from opinfo.sweep import RANDOM, UNMAPPED, draws, first_line, leaves_of, named

import tdc
from tdc.core.rules import DISPATCH
from tdc.ragged.nested import build_nested

BAD = ("raw", "differs")
COUNT = 3


class Sample:
    """A sample as examples and as arguments of a function of `batch`.

    Attributes:
        examples: the arguments of each call.
        batch: the tensors among them, as batches; shared ones as they are.
    """

    def __init__(self, op: Any, column: list[Any], form: Form) -> None:
        flat = [pytree.tree_flatten(((d.input, *d.args), d.kwargs)) for d in column]
        leaves, self.spec = [f[0] for f in flat], flat[0][1]
        if any(f[1] != self.spec for f in flat):
            raise NotMapped("draws differ in their arguments")
        try:
            known = parameters(op, (column[0].input, *column[0].args), column[0].kwargs)
        except NotMapped:
            known = ()
        self.first = first = next(t for t in leaves[0] if isinstance(t, Tensor))
        rank, size = first.ndim, first.shape[form.ragged]
        lengths = lengths_of(size, form)
        columns: list[list[Any]] = []
        self.batch: list[Any] = []
        self.fixed: dict[int, Any] = {}
        shared: dict[str, Any] = {}
        for i, (name, *drawn) in enumerate(zip(names_of(known, column[0]), *leaves, strict=True)):
            t = drawn[0]
            one = not isinstance(t, Tensor)
            if one and any(type(c) is not type(t) for c in drawn):
                raise NotMapped("draws differ in their arguments")
            if not one and any(c.shape != t.shape or c.dtype != t.dtype for c in drawn):
                raise NotMapped("draws differ in their shapes")
            alone = one or name in PARAMETERS or (name == "index" and op.name in VECTORS)
            parts = [None] if alone else [cropped(c, form, rank, size, n) for c, n in zip(drawn, lengths, strict=True)]
            if alone or (any(p is None for p in parts) and form.others == "shared"):
                columns.append([t] * COUNT)
                self.fixed[i] = t
            elif any(p is None for p in parts):
                columns.append(drawn)
                self.batch.append(tdc.lanes(torch.stack(drawn)))
            else:
                columns.append(parts)
                self.batch.append(packed(parts, form.ragged - rank + t.ndim + 1, shared))
        self.examples = [pytree.tree_unflatten(list(c), self.spec) for c in zip(*columns, strict=True)]


def packed(parts: list[Any], dim: int, shared: dict[str, Any]) -> Any:
    """Examples as a batch, in the structure of the one before."""
    x = tdc.pack(parts, ragged_dim=dim)
    known = shared.setdefault("structure", x.structure)
    return build_nested(known.moved(dim - 1, 0), x.values)


def forms(sample: Any) -> Iterator[Form]:
    """The forms that are tried on a sample."""
    x = sample.input
    x = x[0] if isinstance(x, (list, tuple)) and x else x
    if not isinstance(x, Tensor) or x.ndim == 0 or x.is_sparse or x.layout != torch.strided:
        return
    others = [t for t in pytree.tree_leaves((sample.args, sample.kwargs)) if isinstance(t, Tensor)]
    for d in sorted({0, x.ndim // 2, x.ndim - 1}):
        yield Form(d)
        yield Form(d, empty=True)
        if others:
            yield Form(d, "shared")


def function(op: Any, sample: Sample) -> Any:
    """The call of one example as a function of `batch`."""

    def call(*tensors: Any) -> Any:
        rest = iter(tensors)
        count = len(tensors) + len(sample.fixed)
        leaves = [sample.fixed[i] if i in sample.fixed else next(rest) for i in range(count)]
        args, kwargs = pytree.tree_unflatten(leaves, sample.spec)
        return call_of(op)(*args, **kwargs)

    names = ", ".join([f"x{i}" for i in range(len(sample.batch))])
    text = f"def f({names}):\n    return call({names})\n"
    scope = {"call": call}
    exec(text, scope)
    return tdc.batch(scope["f"], source=text)


def call_of(op: Any) -> Any:
    """What a sample calls: a method by its name."""
    return method(op.op.__name__) if isinstance(op.op, MethodDescriptorType) else op.op


def outcome(op: Any, column: list[Any], form: Form, mode: str = "eager") -> tuple[str, str]:
    """What becomes of one sample in one form, and the text."""
    leaves = leaves_of(column) if op.supports_autograd else []
    try:
        refuse_unwritten(op, column[0])
        sample = Sample(op, column, form)
        want = [op.op(*args, **kwargs) for args, kwargs in sample.examples]
    except NotMapped as reason:
        return "unmapped", str(reason)
    except Exception:
        return "unmapped", "torch refuses an example"
    f = function(op, sample)
    if mode != "eager":
        torch.compiler.reset()
    run = f if mode == "eager" else torch.compile(lambda *args: f(*args), backend=mode, fullgraph=True)
    try:
        got = run(*sample.batch)
    except tdc.TdcError as error:
        return "refused", first_line(error)
    except Exception as error:
        refused = re.search(r"tdc\.[\w.]+: expected .*", str(error)) if mode != "eager" else None
        if refused:
            return "refused", refused.group()
        return "raw", f"{type(error).__name__}: {first_line(error)}"
    try:
        return compared(op, got, want, sample, form, leaves)
    except compare.NoDerivative as reason:
        return "pass", first_line(reason)
    except Exception as error:
        return "differs", f"{type(error).__name__}: {first_line(error)}"


def compared(op: Any, got: Any, want: list[Any], sample: Sample, form: Form, leaves: list[Tensor]) -> tuple[str, str]:
    """The outcome of a call beside that of the loop."""
    found = list(compare.pairs(op.name, got, want))
    if form.empty:  # torch gives some empty examples another dtype
        found = [(at, a, b.to(a.dtype)) if at.endswith("example 1") else (at, a, b) for at, a, b in found]
    if op.name in compare.TIES and len(found) == (1 if op.name == "argsort" else 2) * len(want) > 1:
        inputs = [args[0] for args, _ in sample.examples]
        args, kwargs = sample.examples[0]
        after = 2 if op.name in ("topk", "kthvalue") else 1  # the position of the dim
        dim = next((a for a in (kwargs.get("dim"), *args[after:]) if type(a) is int), -1)
        found = compare.by_value(found, inputs, dim)
    text = compare.values(found, leaves, op.name in compare.LOOSE)
    if not text and op.name.startswith("nn.functional.max_pool") and any(b.isinf().any() for _, _, b in found):
        return "pass", ""  # a window of padding alone: torch gives its gradient to some number
    text = text or compare.gradients(found, leaves, 1)
    return ("differs", text) if text else ("pass", "")


def outcomes(
    op: Any, dtype: torch.dtype, limit: int = 10**6, mode: str = "eager", most: int = 10**6
) -> Iterator[tuple[str, str, str, str]]:
    """(sample, form, outcome, text) of each call of an operation, up to `most` of them that pass or fail."""
    if dtype not in op.supported_dtypes("cpu") or named(op) in UNMAPPED:
        return
    for n, column in enumerate(draws(op, dtype, limit)):
        for form in forms(column[0]):
            if most <= 0:
                return
            result, text = outcome(op, column, form, mode)
            most -= result in ("pass", *BAD)
            yield str(n), str(form), result, text


def operations(pattern: str = "") -> list[Any]:
    """The operations of op_db that ragged batches have."""
    return [
        op for op in op_db
        if re.search(pattern, named(op)) and not RANDOM.search(op.name) and op.op in DISPATCH["nested"]
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="a pattern of names")
    parser.add_argument("--limit", type=int, default=10**6, help="samples of each operation")
    parser.add_argument("--mode", default="eager", help="eager, or a backend")
    parser.add_argument("--most", type=int, default=10**6, help="calls of each operation that pass or fail")
    parser.add_argument("--dtypes", default="float64,int64,bool")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th operation from the k-th on")
    parser.add_argument("-v", action="store_true", help="print what is bad, and what is refused")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts, texts = Counter[str](), Counter[tuple[str, str, str]]()
    k, n = [int(part) for part in given.part.split("/")]
    dtypes = [getattr(torch, name) for name in given.dtypes.split(",")]
    for op, dtype in itertools.product(operations(given.ops)[k::n], dtypes):
        for number, form, result, text in outcomes(op, dtype, given.limit, given.mode, given.most):
            counts[result] += 1
            if result in (*BAD, "refused"):
                texts[named(op), result, text[:150]] += 1
            if given.v and result in BAD:
                print(named(op), str(dtype)[6:], number, form, result, text[:300], sep=" | ", flush=True)
    for (name, result, text), many in sorted(texts.items()):
        print(many, name, result, text, sep=" | ")
    print(dict(counts))


if __name__ == "__main__":
    main()
