"""Every sample of torch's op_db, as batches of three examples, against the loop over examples.

    python tests/opinfo/sweep.py                          counts of values, eagerly
    python tests/opinfo/sweep.py --ops '^sum$|amax' -v    some operations, with the text of each failure
    python tests/opinfo/sweep.py --all                    every pass of `PASSES`, as a table
    python tests/opinfo/sweep.py --all --resume           what a run that was stopped has left

A call passes, is refused in our words, raises something else, or differs; or it is not mapped, with the reason. Of
what torch refuses ("errors") a call is refused in our words or in torch's, raises something else, or is accepted.
With `--all` each operation goes to a process of its own making; one that dies has crashed, and another takes the
next. `--out` has a file for each pass with a line for each operation, the last of which counts: operations that run
again (`--passes grad --ops '^sum$'`) are counted anew among the others.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import itertools
import json
import re
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from opinfo import compare
from opinfo.calls import MODES, SPELLINGS, call, spelled
from opinfo.mapping import Form, Mapped, NotMapped, forms, map_leaves, map_sample
from torch_samples import forget_callers

import tdc
from tdc.core.rules import DISPATCH, KINDS
from tdc.ragged.storage import data_of

forget_callers()

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip
POOLED = (  # without a dim these ask for all elements
    "sum", "mean", "prod", "amax", "amin", "all", "any", "nansum", "nanmean", "count_nonzero", "std", "var", "max",
    "min", "argmax", "argmin", "median", "nanmedian", "logsumexp", "aminmax", "norm", "linalg.norm",
    "linalg.vector_norm", "quantile", "nanquantile", "std_mean", "var_mean", "hash_tensor", "unique",
    "unique_consecutive", "dist",
    "allclose", "equal", "histc", "masked.mean", "masked.var", "masked.std", "masked.sum", "masked.prod",
    "masked.amax", "masked.amin", "masked.norm", "masked.logsumexp", "masked.argmax", "masked.argmin",
)  # fmt: skip
POSITIONS = ("argmax", "argmin", "masked.argmax", "masked.argmin")  # of all elements: where in the storage of a batch
LEVELS = ("values", "grad", "second", "forward", "errors")
PASSES: dict[str, dict[str, Any]] = {  # the whole of it
    "values": {},
    "padding 0": {"fill": 0, "kinds": ["masked"], "limit": 8},
    "padding -1": {"fill": -1, "kinds": ["masked"], "limit": 8},
    "padding max": {"fill": "max", "kinds": ["masked"], "limit": 8},
    **{name: {"spelling": name, "dtypes": (torch.float32,), "limit": 10} for name in SPELLINGS[1:]},
    **{level: {"level": level, "dtypes": (torch.float64, torch.complex64), "limit": 10} for level in LEVELS[1:4]},
    "errors": {"level": "errors", "dtypes": (torch.float32,)},
    "aot_eager": {"mode": "aot_eager", "dtypes": (torch.float32,), "most": 3},
    "inductor": {"mode": "inductor", "dtypes": (torch.float32,), "most": 1},
}
BY_VECTOR = re.compile("triplet|multilabel|multi_margin|cosine_embedding|cross_entropy|nll_loss")
BAD = ("raw", "differs", "accepted", "crashed")
UNMAPPED = {"lu_unpack": "pivots of a larger matrix than the example that was cut from it: torch writes beyond it"}
MEANT = {  # what torch refuses of an example, and a batch takes
    "movedim|narrow": "Dimension out of range", "linalg.cross": "same number of dimensions",
    "reshape": "cannot reshape tensor of 0 elements", "amax|amin|aminmax": "up to 64 dims",
}  # fmt: skip
OWN = threading.local()
RANDOM = re.compile("dropout|rrelu|bernoulli|multinomial|normal|rand|uniform|exponential|geometric|cauchy|empty|gumbel")


def draws(op: Any, dtype: torch.dtype, limit: int) -> Iterator[list[Any]]:
    """Each sample three times, with other numbers and the same arguments."""
    columns = []
    for seed in range(3):
        torch.manual_seed(seed)
        columns.append(list(itertools.islice(op.sample_inputs("cpu", dtype, set_seed=False), limit)))
    yield from (list(column) for column in zip(*columns, strict=False))


def pooled(op: Any, mapped: Mapped) -> bool:
    """Whether a call asks for all elements of the batch."""
    if "reduction" in mapped.names:
        return mapped.value("reduction", "mean") != "none"
    return op.name in POOLED and op.variant_test_name != "binary" and mapped.value("dim", None) in (None, (), [])


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
    out = op.op(*args, **kwargs)
    if mapped.value("reduction", "") == "batchmean":  # by the examples, not by all elements
        out = out * len(leaves[0]) / len(flat)
    if op.name in POSITIONS:
        out = leaves[0][out.long()]
    ones = [1] * (len(shape) + 1)
    return [pytree.tree_map(lambda t: t.view(ones), out) if mapped.value("keepdim", False) is True else out]


def leaves_of(column: list[Any]) -> list[Tensor]:
    """The tensors of the three draws that have derivatives, as leaves of autograd."""
    found = [x for d in column for x in pytree.tree_leaves((d.input, d.args, d.kwargs)) if isinstance(x, Tensor)]
    return [x.requires_grad_() for x in found if x.is_floating_point() or x.is_complex()]


def outcome(op: Any, column: list[Any], form: Form, kind: str, given: argparse.Namespace) -> tuple[str, str]:
    """What becomes of one sample in one form, and the text."""
    leaves = leaves_of(column) if given.level in ("grad", "second") else []
    try:
        mapped = (map_leaves if kind == "tensordict" else partial(map_sample, kind=kind, fill=given.fill))(
            op, column, form
        )
        if kind == "tensordict" and op.name in ("all", "any") and pooled(op, mapped):
            raise NotMapped("asks for one answer of all leaves")
        fn, mapped = spelled(op, mapped, given.spelling)
        want = (
            pool(op, mapped, form.ragged)
            if pooled(op, mapped) and kind != "tensordict"
            else [op.op(*args, **kwargs) for args, kwargs in mapped.examples]
        )
    except NotMapped as reason:
        return "unmapped", str(reason)
    except Exception:
        return "unmapped", "torch refuses an example"
    if form.others == "batched":
        want = [pytree.tree_map(lambda x: x[0] if isinstance(x, Tensor) and x.ndim else x, w) for w in want]
    try:
        got = call(fn, mapped, given.mode, given.spelling)
    except tdc.TdcError as error:
        return "refused", first_line(error)
    except AssertionError as error:
        return "differs", first_line(error)
    except Exception as error:
        refused = re.search(r"tdc\.[\w.]+: expected .*", str(error)) if given.mode != "eager" else None
        if refused or (given.mode != "eager" and refuses_an_example(fn, mapped)):
            return "refused", refused.group() if refused else "torch does not trace an example"
        return "raw", f"{type(error).__name__}: {first_line(error)}"
    if op.name in POSITIONS and pooled(op, mapped) and kind != "tensordict":
        got = data_of(next(iter((*mapped.args, *mapped.kwargs.values())))).flatten()[got.long()]
    if op.name == "bincount" and kind != "tensordict":  # counts of all rows are as wide as those of the widest
        want = [F.pad(n, (0, got.shape[1] - len(n))) for n in want]
    try:
        found = list(compare.pairs(op.name, got, want))
        if form.empty:  # torch gives some empty examples another dtype
            found = [(at, a, b.to(a.dtype)) if at.endswith("example 1") else (at, a, b) for at, a, b in found]
        if op.name in compare.TIES and len(found) == (1 if op.name == "argsort" else 2) * len(want) > 1:
            found = compare.by_value(found, [args[0] for args, _ in mapped.examples], mapped.value("dim", -1))
        loose = {"loose": True} if given.level == "values" and op.name in compare.LOOSE else {}
        text = compare.CHECKS[given.level](found, leaves, **loose)
    except compare.NoDerivative as reason:
        return "unmapped", first_line(reason)
    except Exception as error:
        return "differs", f"{type(error).__name__}: {first_line(error)}"
    return ("differs", text) if text else ("pass", "")


def refuses_an_example(fn: Any, mapped: Mapped) -> bool:
    """Whether torch does not trace the call of an example alone."""
    torch.compiler.reset()
    args, kwargs = mapped.examples[0]
    try:
        torch.compile(lambda args, kwargs: fn(*args, **kwargs), backend="eager", fullgraph=True)(args, kwargs)
    except Exception:
        return True
    return False


def refusal(op: Any, error: Any, form: Form, kind: str, given: argparse.Namespace) -> tuple[str, str]:
    """What becomes of a call that torch refuses, and the text."""
    column = [copy.deepcopy(error.sample_input) for _ in range(3)]
    try:
        mapped = (map_leaves if kind == "tensordict" else partial(map_sample, kind=kind, fill=given.fill))(
            op, column, form
        )
    except Exception as reason:
        return "unmapped", first_line(reason)
    kinds: list[type[Exception]] = []
    for args, kwargs in mapped.examples:
        try:
            op.op(*args, **kwargs)
            return "unmapped", "torch takes an example"
        except Exception as theirs:
            kinds.append(type(theirs))
    try:
        op.op(*mapped.args, **mapped.kwargs)
    except tdc.TdcError as ours:
        return "refused", first_line(ours)
    except Exception as raised:
        own = isinstance(raised, (*kinds, RuntimeError, IndexError)) and not isinstance(raised, AttributeError)
        return "pass" if own else "raw", f"{type(raised).__name__}: {first_line(raised)}"
    if any(re.search(names, op.name) and text in error.error_regex for names, text in MEANT.items()):
        return "unmapped", "means another thing of a batch"
    return "accepted", str(error.error_regex)


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else ""


def named(op: Any) -> str:
    return op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")


def calls_of(op: Any, given: argparse.Namespace) -> Iterator[tuple[str, str, str, str, str, str]]:
    """The outcome of every call of an operation: its kind, dtype, sample, form, outcome, and the text."""
    for dtype in given.dtypes:
        if dtype not in op.supported_dtypes("cpu") or not smooth(op, given.level, dtype):
            continue
        if given.level == "errors":
            samples = (
                [[e] for e in itertools.islice(op.error_inputs("cpu"), given.limit)] if op.error_inputs_func else []
            )
        else:
            samples = list(draws(op, dtype, given.limit))
        made = Counter[str]()
        for (n, column), kind in itertools.product(enumerate(samples), list[str](given.kinds)):
            sample = column[0].sample_input if given.level == "errors" else column[0]
            for form in forms(op, sample, kind) if op.op in DISPATCH[kind] else ():
                if made[kind] >= given.most:
                    break
                result, text = called(op, column, form, kind, given)
                made[kind] += result != "unmapped"
                yield kind, str(dtype)[6:], str(n), str(form), result, text


def called(op: Any, column: list[Any], form: Form, kind: str, given: argparse.Namespace) -> tuple[str, str]:
    """The outcome of one call at the level that is asked for, and the text."""
    if named(op) in UNMAPPED:
        return "unmapped", UNMAPPED[named(op)]
    if op.name == "logsumexp" and given.level == "second" and column[0].input.abs().max() > 1e3:
        return "unmapped", "rounding is all that torch's second derivative of such numbers is"
    if given.level == "errors":
        return refusal(op, column[0], form, kind, given)
    if given.level != "forward":
        return outcome(op, column, form, kind, given)
    with forward_ad.dual_level():
        return outcome(op, [d.transform(as_dual) for d in column], form, kind, given)


def smooth(op: Any, level: str, dtype: torch.dtype) -> bool:
    """Whether torch has the derivatives that a level asks for."""
    if level in ("values", "errors"):
        return True
    known = {"grad": op.supports_autograd, "second": op.supports_gradgrad, "forward": op.supports_forward_ad}[level]
    return known and op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)


def as_dual(x: Any) -> Any:
    """A tensor with a tangent."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        return x
    generator = torch.Generator().manual_seed(x.numel())
    return forward_ad.make_dual(x.detach(), torch.randn(x.shape, dtype=x.dtype, generator=generator))


def sweep(given: argparse.Namespace) -> tuple[dict[str, Counter[str]], list[tuple[str, ...]]]:
    """The outcomes of all calls that are asked for, counted for each kind and listed."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in given.kinds}
    calls: list[tuple[str, ...]] = []
    for op in op_db[given.part :: given.parts]:
        if re.search(given.ops, named(op)) and not RANDOM.search(op.name):
            for kind, *where, result, text in calls_of(op, given):
                counts[kind][result] += 1
                calls.append((kind, named(op), *where, result, text))
                if given.v and result in BAD:
                    print(*calls[-1], sep=" | ", flush=True)
    return counts, calls


def sweep_all(given: argparse.Namespace) -> None:
    """Every pass as a row of a table; what is bad goes to stderr, and all to the files of `given.out`."""
    columns = ("pass", "refused", *BAD, "unmapped")
    print("| pass | kind | " + " | ".join(columns) + " |\n" + "| --- " * (len(columns) + 2) + "|", flush=True)
    with ThreadPoolExecutor(given.jobs, initializer=start) as threads:
        for name in given.passes:
            most = min(given.limit, PASSES[name].get("limit", given.limit))
            asked = argparse.Namespace(**{**vars(given), **PASSES[name], "limit": most, "parts": len(op_db)})
            done = sweep_pass(name, asked, threads)
            for kind in asked.kinds:
                total = sum([Counter(counts.get(kind)) for counts, _ in done], Counter[str]())
                print(f"| {name} | {kind} | " + " | ".join([f"{total[c]:,}" for c in columns]) + " |", flush=True)
            for found in [call for _, calls in done for call in calls]:
                print(name, *found, sep=" | ", file=sys.stderr, flush=True)


def sweep_pass(name: str, asked: argparse.Namespace, threads: ThreadPoolExecutor) -> list[Any]:
    """Counts and bad calls of each operation of a pass, those of earlier runs among them."""
    asked.out.mkdir(parents=True, exist_ok=True)
    with (asked.out / f"{name.replace(' ', '_')}.jsonl").open("a+", encoding="utf-8") as file:
        file.seek(0)
        done = {line[0]: line[1:] for line in map(json.loads, file)}
        names = [named(op) for op in op_db]
        left = [n for n, op in enumerate(names) if re.search(asked.ops, op) and not (asked.resume and op in done)]
        parts = [argparse.Namespace(**{**vars(asked), "part": n}) for n in left]
        for n, found in zip(left, threads.map(in_a_process, parts), strict=True):
            done[names[n]] = found
            file.write(json.dumps([names[n], *found]) + "\n")
            file.flush()
    return list(done.values())


def in_a_process(asked: argparse.Namespace) -> Any:
    """Counts and bad calls of the operation that is asked for, from the process of this thread."""
    try:
        counts, calls = OWN.process.submit(sweep, asked).result()
    except BrokenProcessPool:
        start()
        calls = [(kind, named(op_db[asked.part]), "", "", "", "crashed", "") for kind in asked.kinds]
        counts = {kind: {"crashed": 1} for kind in asked.kinds}
    return counts, [call for call in calls if call[-2] in BAD]


def start() -> None:
    """A process for this thread."""
    OWN.process = ProcessPoolExecutor(1, get_context("spawn"), set_up)


def set_up() -> None:
    """One thread for each process, and none of torch's warnings."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    faulthandler.enable()


def dtypes_of(names: str) -> list[torch.dtype]:
    """Dtypes by name."""
    return [getattr(torch, name) for name in names.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="a pattern of names")
    parser.add_argument("--dtypes", type=dtypes_of, default=DTYPES, help="names, with commas between them")
    parser.add_argument("--limit", type=int, default=30, help="samples of each operation and dtype")
    parser.add_argument("--most", type=int, default=10**6, help="calls of each operation, kind and dtype")
    parser.add_argument("--kinds", type=lambda names: names.split(","), default=list(KINDS))
    parser.add_argument("--level", choices=LEVELS, default="values")
    parser.add_argument("--spelling", choices=SPELLINGS, default="sample")
    parser.add_argument("--mode", choices=MODES, default="eager")
    parser.add_argument("--fill", default="nan", help="padding: nan (the worst of a dtype), max, or a number")
    parser.add_argument("--part", type=int, default=0, help="of --parts, which takes every so manieth operation")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="every pass")
    parser.add_argument("--passes", type=lambda names: names.split(","), default=list(PASSES), help="of --all")
    parser.add_argument("--resume", action="store_true", help="leave out operations of which --out has a pass")
    parser.add_argument("--out", type=Path, default=Path("build/sweep"), help="where --all writes what it finds")
    parser.add_argument("--jobs", type=int, default=2, help="processes of --all")
    parser.add_argument("-v", action="store_true", help="print what differs and what raises errors that are not ours")
    parser.add_argument("--json", help="where to write every outcome")
    given = parser.parse_args()
    given.fill = given.fill if given.fill in ("nan", "max") else int(given.fill)
    set_up()
    if given.all:
        return sweep_all(given)
    counts, calls = sweep(given)
    for kind, of_kind in counts.items():
        print(kind, dict(of_kind))
    if given.json:
        Path(given.json).write_text(json.dumps(calls), encoding="utf-8")


if __name__ == "__main__":
    main()
