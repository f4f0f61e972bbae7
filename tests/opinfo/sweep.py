"""Every sample of torch's op_db, as batches of three examples, against the loop over examples.

    python tests/opinfo/sweep.py                          counts, eagerly
    python tests/opinfo/sweep.py --ops '^sum$|amax' -v    some operations, with the text of each failure

A call passes, is refused in our words, raises something else, or differs; or it is not mapped, with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from opinfo import compare
from opinfo.mapping import Form, Mapped, NotMapped, forms, map_sample

import tdc
from tdc.core.rules import DISPATCH

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip
POOLED = (  # without a dim these ask for all elements
    "sum", "mean", "prod", "amax", "amin", "all", "any", "nansum", "nanmean", "count_nonzero", "std", "var", "max",
    "min", "argmax", "argmin", "median", "nanmedian", "logsumexp", "aminmax", "norm", "linalg.norm",
    "linalg.vector_norm", "quantile", "nanquantile", "std_mean", "var_mean", "hash_tensor", "unique",
    "unique_consecutive", "dist",
    "allclose", "equal", "histc", "bincount",
)  # fmt: skip
LEVELS = ("values", "grad", "second")
SPELLINGS = ("sample", "by name", "all by name")  # of the arguments; the last one names the first, too
BY_VECTOR = re.compile("triplet|multilabel|multi_margin|cosine_embedding|cross_entropy|nll_loss")
RANDOM = re.compile("dropout|rrelu|bernoulli|multinomial|normal|rand|uniform|exponential|geometric|cauchy|empty|gumbel")


def draws(op: Any, dtype: torch.dtype, limit: int) -> Iterator[list[Any]]:
    """Each sample three times, with other numbers and the same arguments."""
    columns = []
    for seed in range(3):
        torch.manual_seed(seed)
        columns.append(list(op.sample_inputs("cpu", dtype, set_seed=False)))
    for number, column in enumerate(zip(*columns, strict=False)):
        if number == limit:
            return
        yield list(column)


def pooled(op: Any, mapped: Mapped) -> bool:
    """Whether a call asks for all elements of the batch."""
    if "reduction" in mapped.names:
        return mapped.value("reduction", "mean") != "none"
    return op.name in POOLED and mapped.value("dim", None) in (None, (), [])


def pool(op: Any, mapped: Mapped, dim: int) -> list[Any]:
    """What the operation gives of all elements: of the examples flattened and joined, of vectors joined along the
    ragged dim.

    Raises:
        NotMapped: elements of its operands do not belong together one by one.
    """
    flat = [pytree.tree_flatten(call) for call in mapped.examples]
    shape = mapped.examples[0][0][0].shape
    leaves = []
    for column in zip(*[f[0] for f in flat], strict=True):
        if not isinstance(column[0], Tensor):
            leaves.append(column[0])
        elif column[0].shape == shape and column[0] is not column[1]:
            leaves.append(
                torch.cat(column, dim) if BY_VECTOR.search(op.name) else torch.cat([c.flatten() for c in column])
            )
        else:
            raise NotMapped("asks for all elements, which are not one by one")
    args, kwargs = pytree.tree_unflatten(leaves, flat[0][1])
    return [op.op(*args, **kwargs)]


def leaves_of(column: list[Any]) -> list[Tensor]:
    """The tensors of the three draws that have derivatives, as leaves of autograd."""
    found = [x for d in column for x in pytree.tree_leaves((d.input, d.args, d.kwargs)) if isinstance(x, Tensor)]
    return [x.requires_grad_() for x in found if x.is_floating_point() or x.is_complex()]


def outcome(op: Any, column: list[Any], form: Form, kind: str, level: str, spelling: str) -> tuple[str, str]:
    """What becomes of one sample in one form, and the text."""
    order = LEVELS.index(level)
    leaves = leaves_of(column) if order else []
    try:
        mapped = spelled(op, map_sample(op, column, form, kind, "nan"), spelling)
        want = (
            pool(op, mapped, form.ragged)
            if pooled(op, mapped)
            else [op.op(*args, **kwargs) for args, kwargs in mapped.examples]
        )
    except NotMapped as reason:
        return "unmapped", str(reason)
    except Exception:
        return "unmapped", "torch refuses an example"
    if form.others == "batched":
        want = [pytree.tree_map(lambda x: x[0] if isinstance(x, Tensor) else x, w) for w in want]
    try:
        got = op.op(*mapped.args, **mapped.kwargs)
    except tdc.TdcError as error:
        return "refused", first_line(error)
    except Exception as error:
        return "raw", f"{type(error).__name__}: {first_line(error)}"
    try:
        found = list(compare.pairs(op.name, got, want))
        text = compare.gradients(found, leaves, order) if order else compare.values(found)
    except Exception as error:
        return "differs", f"{type(error).__name__}: {first_line(error)}"
    return ("differs", text) if text else ("pass", "")


def spelled(op: Any, mapped: Mapped, spelling: str) -> Mapped:
    """The call of the batch with other arguments by name.

    Raises:
        NotMapped: torch does not tell the names, or the spelling is the sample's own.
    """
    if spelling == "sample":
        return mapped
    names, count = mapped.bound, len(mapped.args)
    first = 0 if spelling == "all by name" else 1
    if len(names) < count or count == first:
        raise NotMapped("no other spelling")
    named = dict(zip(names[first:count], mapped.args[first:], strict=True))
    return replace(mapped, args=mapped.args[:first], kwargs={**named, **mapped.kwargs})


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else ""


def named(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def sweep(given: argparse.Namespace) -> dict[str, Any]:
    """The outcome of every call that is asked for, counted and listed."""
    found: dict[str, Counter[str]] = {kind: Counter() for kind in given.kinds}
    calls: list[tuple[str, ...]] = []
    for op in op_db:
        if not re.search(given.ops, named(op)) or RANDOM.search(op.name):
            continue
        for dtype in given.dtypes:
            smooth = op.supports_autograd and (given.level != "second" or op.supports_gradgrad)
            if dtype not in op.supported_dtypes("cpu") or (given.level != "values" and not smooth):
                continue
            for n, column in enumerate(draws(op, dtype, given.limit)):
                for form, kind in itertools.product(forms(op, column[0]), given.kinds):
                    if op.op in DISPATCH[kind]:
                        result, text = outcome(op, column, form, kind, given.level, given.spelling)
                        found[kind][result] += 1
                        calls.append((kind, named(op), str(dtype)[6:], str(n), str(form), result, text))
                        if given.v and result in ("raw", "differs"):
                            print(*calls[-1], sep=" | ", flush=True)
    return {"counts": {k: dict(c) for k, c in found.items()}, "calls": calls}


def dtypes_of(names: str) -> list[torch.dtype]:
    """Dtypes by name."""
    return [getattr(torch, name) for name in names.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="a pattern of names")
    parser.add_argument("--dtypes", type=dtypes_of, default=DTYPES, help="names, with commas between them")
    parser.add_argument("--limit", type=int, default=30, help="samples of each operation and dtype")
    parser.add_argument("--kinds", type=lambda names: names.split(","), default=["nested", "masked"])
    parser.add_argument("--level", choices=LEVELS, default="values")
    parser.add_argument("--spelling", choices=SPELLINGS, default="sample")
    parser.add_argument("-v", action="store_true", help="print what differs and what raises errors that are not ours")
    parser.add_argument("--json", help="where to write every outcome")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    result = sweep(given)
    for kind, counts in result["counts"].items():
        print(kind, counts)
    if given.json:
        Path(given.json).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
