"""torch's own samples for nested tensors, run on `tdc.NestedTensor` and scored against a loop over examples.

    python tests/njt_op_db.py                         every op, forward and gradients, eagerly
    python tests/njt_op_db.py --compile aot_eager     one graph for each sample
    python tests/njt_op_db.py --ops 'sum|mean' -v     some ops, with the text of each failure
    python tests/njt_op_db.py --peer torch --ops '^(?!split_with)'    the same for torch.nested, which crashes there

Each sample is taken apart into dense leaves and put together twice. The reference calls the op on one example after
another (for the batch dim: on lists of examples); the candidate calls it once on the batch. Values, dtypes and, under
one random cotangent, the gradients of all leaves must agree. Rows with holes give their gaps a gradient of zero.

A sample is not scored where the reference has no answer: unsqueeze or unflatten of the batch dim, and functions that
torch has on a GPU only.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import ReductionOpInfo
from torch.testing._internal.opinfo.definitions.nested import njt_op_db
from torch.utils import _pytree as pytree
from torch_samples import forget_callers

import tdc

forget_callers()

Components = list[Any]
REDUCTIONS = ("count_nonzero", "max.reduction_with_dim", "min.reduction_with_dim")
INDEX = "index_put"


@dataclass
class Leaf:
    """A tensor of a sample: dense, or packed with offsets; `lengths` where rows have holes behind them."""

    base: Tensor
    offsets: Tensor | None = None
    lengths: Tensor | None = None
    ragged: int = 0
    batch_dim: int | None = None

    @property
    def packed(self) -> bool:
        """Whether it is a batch of rows."""
        return self.offsets is not None

    def fresh(self) -> Leaf:
        """The same with a leaf of autograd of its own."""
        base = torch.empty_like(self.base).copy_(self.base.detach()).requires_grad_(self.base.requires_grad)
        return Leaf(base, self.offsets, self.lengths, self.ragged, self.batch_dim)

    def rows(self) -> list[Tensor]:
        """One tensor for each example, views of the leaf."""
        assert self.offsets is not None
        lengths = self.offsets.diff() if self.lengths is None else self.lengths
        spans = zip(self.offsets.tolist(), lengths.tolist(), strict=False)
        return [self.base.narrow(self.ragged - 1, a, n) for a, n in spans]


@dataclass
class Score:
    """How the samples of one op fared."""

    name: str
    passed: int = 0
    unscored: int = 0
    wrong: list[str] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)
    backward: int = 0

    @property
    def clean(self) -> bool:
        """Whether every sample that can be scored is right."""
        return not self.wrong and not self.raised


class Unscored(Exception):
    """A sample without a reference."""


# -- candidates


def ours(leaf: Leaf) -> Any:
    """A leaf as `tdc.NestedTensor`, through torch's layout, as a user would bring it."""
    return tdc.from_torch(theirs(leaf))


def theirs(leaf: Leaf) -> Any:
    """A leaf as torch's nested tensor."""
    return torch.nested.nested_tensor_from_jagged(leaf.base, leaf.offsets, lengths=leaf.lengths, jagged_dim=leaf.ragged)


PEERS: dict[str, tuple[Callable[[Leaf], Any], Callable[[Any], bool]]] = {
    "tdc": (ours, lambda x: isinstance(x, (tdc.NestedTensor, tdc.MaskedBatch))),
    "torch": (theirs, lambda x: isinstance(x, Tensor) and x.is_nested),
}


def candidate(op: Any, args: Any, kwargs: Any) -> Any:
    """The op on containers; what torch spells as a method of Tensor is called as a method."""
    owner = getattr(op.op, "__objclass__", None)
    if owner is not None and not isinstance(args[0], Tensor):
        return getattr(args[0], op.op.__name__)(*args[1:], **kwargs)
    return op.op(*args, **kwargs)


# -- the reference


def reference(op: Any, args: Any, kwargs: dict[str, Any], count: int, ndim: int, ragged: int) -> Any:
    """The op on one example after another: a list of results, or one tensor where the batch is reduced."""
    names = {n.replace("...", "") for group in op._extra_op_data.dim_args or () for n in group}
    dims = {n: canonical(kwargs[n], ndim) for n in names if kwargs.get(n) is not None}
    flat = [d for v in dims.values() for d in (v if isinstance(v, (list, tuple)) else [v])]
    if isinstance(op, ReductionOpInfo) or op.full_name in REDUCTIONS:
        if 0 in flat or not flat:
            return over_batch(op, args, kwargs, dims, count, ragged)
    elif 0 in flat:
        return on_batch(op, args[0].rows(), kwargs)
    run: Any = torch.matmul if op.full_name == "bmm" else op.op
    inner = {n: [d - 1 for d in v] if isinstance(v, (list, tuple)) else v - 1 for n, v in dims.items()}
    out = []
    for i in range(count):
        a, k = pytree.tree_map(lambda x, i=i: example(x, i), (args, {**kwargs, **inner}))
        if op.full_name == "bmm":
            out.append(run(a[0], k["mat2"]))
        elif op.full_name == "nn.functional.embedding_bag":
            out.append(run(*a, **k, offsets=torch.tensor([0]))[0])
        elif op.full_name == "nn.functional.prelu":  # channels are dim 1 of a batch of one
            out.append(run(a[0].unsqueeze(0), **k)[0])
        elif op.full_name == INDEX:
            out.append(put_one(run, a[0], k["indices"], k["values"], i))
        else:
            out.append(run(*a, **k))
    if op.full_name in ("chunk", "split") and ragged in flat:
        return alike(out, kwargs.get("chunks"), dims["dim"] - 1)
    return out


def alike(rows: list[Any], count: int | None, dim: int) -> list[Any]:
    """Parts of each row; a row that has fewer than another has empty ones behind them."""
    count = max([len(parts) for parts in rows]) if count is None else count
    return [(*parts, *[parts[0].narrow(dim, 0, 0)] * (count - len(parts))) for parts in rows]


def canonical(dim: Any, ndim: int) -> Any:
    """Dims counted from the front."""
    return [d % ndim for d in dim] if isinstance(dim, (list, tuple)) else dim % ndim


def example(x: Any, i: int) -> Any:
    """An argument of example `i`."""
    if not isinstance(x, Leaf):
        return x
    if x.packed:
        return x.rows()[i]
    if x.batch_dim is None:
        return x.base
    return x.base.select(x.batch_dim, 0 if x.base.shape[x.batch_dim] == 1 else i)


def over_batch(op: Any, args: Any, kwargs: Any, dims: Any, count: int, ragged: int) -> Any:
    """A reduction that takes in the batch: over the rows as one, joined along the ragged dim."""
    whole = torch.cat(args[0].rows(), ragged - 1)
    inner = {n: [d - 1 for d in v if d] for n, v in dims.items()}
    rest = {k: v for k, v in kwargs.items() if k not in inner}
    out = op.op(whole, *args[1:], **rest, **inner)
    return pytree.tree_map(lambda t: t.unsqueeze(0), out) if kwargs.get("keepdim") and inner else out


def on_batch(op: Any, rows: Components, kwargs: Any) -> Any:
    """An op that cuts the batch: on the list of rows. Each part is a list of its own.

    Raises:
        Unscored: it has no meaning there.
    """
    name = op.full_name
    if name == "chunk":
        size = -(-len(rows) // kwargs["chunks"])
        return [Rows(rows[i : i + size]) for i in range(0, len(rows), size)]
    if name == "split":
        size = kwargs["split_size_or_sections"]
        return [Rows(rows[i : i + size]) for i in range(0, len(rows), size)]
    if name == "split_with_sizes":
        ends = torch.tensor(kwargs["split_sizes"]).cumsum(0).tolist()
        return [Rows(rows[b - n : b]) for b, n in zip(ends, kwargs["split_sizes"], strict=True)]
    if name == "narrow":
        return rows[kwargs["start"] : kwargs["start"] + kwargs["length"]]
    if name == "select":
        return Whole(rows[kwargs["index"]])
    raise Unscored(name)


class Rows(list[Any]):
    """Rows of one part, where an op gives several batches."""


@dataclass
class Whole:
    """A result that is one tensor, though the op is no reduction."""

    value: Any


def put_one(run: Any, row: Tensor, indices: list[Tensor], values: Tensor, i: int) -> Tensor:
    """`index_put` of one row: the first index says which rows are meant, the others where in them."""
    batch = indices[0]
    chosen = (batch == i).nonzero()[:, 0]
    if not len(chosen):
        return row.clone()
    if len(indices) == 1:
        return row * 0 + values
    return run(row, indices=[t[chosen] for t in indices[1:]], values=values)


# -- comparison


def pairs(got: Any, want: Any, own: Callable[[Any], bool]) -> Iterator[tuple[Any, Any]]:
    """Tensors of the candidate beside those of the reference.

    Raises:
        AssertionError: the shapes of the two results do not match.
    """
    if isinstance(want, Whole):
        want = want.value
    if isinstance(want, list) and want and isinstance(want[0], Rows):
        assert len(got) == len(want), f"{len(got)} parts, expected {len(want)}"
        for part, rows in zip(got, want, strict=True):
            yield from pairs(part, list(rows), own)
    elif isinstance(want, list) and want and isinstance(want[0], (tuple, list)):
        assert len(got) == len(want[0]), f"{len(got)} results, expected {len(want[0])}"
        for n, part in enumerate(got):
            yield from pairs(part, [row[n] for row in want], own)
    elif isinstance(want, tuple):
        for part, expected in zip(got, want, strict=True):
            yield from pairs(part, expected, own)
    elif isinstance(want, list) and own(got):
        rows = got.unbind()
        assert len(rows) == len(want), f"{len(rows)} rows, expected {len(want)}"
        yield from zip(rows, want, strict=True)
    elif isinstance(want, list):
        yield got, torch.stack([torch.as_tensor(t) for t in want])
    else:
        assert not own(got), f"a batch, expected one tensor of shape {list(want.shape)}"
        yield got, want


def differences(got: list[Tensor], want: list[Tensor], what: str) -> str:
    """The first difference, or nothing."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        try:
            torch.testing.assert_close(a, b, equal_nan=True, rtol=2e-4, atol=2e-5, check_layout=False)
        except AssertionError as error:
            return f"{what} {i}: {str(error).splitlines()[0]} {list(a.shape)} vs {list(b.shape)}"
    return ""


def gradients(outs: list[Tensor], cotangents: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Gradients of all leaves, zeros where none arrives."""
    reached = [(t, c) for t, c in zip(outs, cotangents, strict=True) if t.requires_grad]
    if reached:
        torch.autograd.backward([t for t, _ in reached], [c for _, c in reached])
    return [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


# -- samples


def samples(op: Any) -> Iterator[Any]:
    """What torch tests an op on; it makes them in float32 only."""
    torch.manual_seed(0)
    grad = op.supports_autograd and torch.float32 in op.dtypes
    yield from op.sample_inputs(device="cpu", dtype=torch.float32, requires_grad=grad)


def taken_apart(x: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """A tensor of a sample as a leaf, in a dtype that the op takes."""
    if not isinstance(x, Tensor):
        return x
    inner: Any = x
    base = (inner._values if x.is_nested else x).detach()
    base = convert(base) if base.is_floating_point() else base
    base.requires_grad_(x.requires_grad)
    if not x.is_nested:
        return Leaf(base, batch_dim=getattr(x, "_batch_dim", None))
    return Leaf(base, inner._offsets, inner._lengths, inner._ragged_idx)


def conversion(op: Any) -> Callable[[Tensor], Tensor]:
    """float32 to what an op takes: complex numbers, or small whole ones."""
    if torch.float32 in op.dtypes:
        return lambda x: x
    if torch.int64 in op.dtypes:
        return lambda x: (x * 4).abs().to(torch.int64)
    return lambda x: torch.complex(x, x.flip(-1))


def run_sample(op: Any, sample: Any, peer: str, backend: str | None) -> tuple[str, bool]:
    """One sample: the difference found, if any, and whether gradients were compared.

    Raises:
        Unscored: it has no reference.
    """
    build, own = PEERS[peer]
    given: Any = ([sample.input, *sample.args], dict(sample.kwargs))
    tree = pytree.tree_map(lambda x: taken_apart(x, conversion(op)), given)
    if op.full_name == "where" and not sample.input.is_nested:
        tree[1]["condition"].batch_dim = tree[0][0].batch_dim
    (args, kwargs), expected_leaves = copied(tree)
    main = next(x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Leaf) and x.packed)
    ndim = getattr(sample.input, "_ndim", main.base.ndim + 1)
    try:
        want = reference(op, args, kwargs, len(main.rows()), ndim, main.ragged)
    except AssertionError as error:  # "Jiterator is only supported on CUDA and ROCm GPUs"
        raise Unscored(str(error)) from error
    except RuntimeError as error:
        if "exceeds dimension size" not in str(error):  # narrow, where a row is too short
            raise
        raise Unscored(str(error)) from error
    again, leaves = copied(tree)
    args, kwargs = pytree.tree_map(lambda x: x if not isinstance(x, Leaf) else build(x) if x.packed else x.base, again)
    call = candidate
    if backend:
        torch._dynamo.reset()
        call = torch.compile(candidate, backend=backend, fullgraph=True)
    found = list(pairs(call(op, args, kwargs), want, own))
    got, expected = [torch.as_tensor(x) for x, _ in found], [torch.as_tensor(y) for _, y in found]
    text = differences(got, expected, "row")
    if text or not any([t.requires_grad for t in expected]):
        return text, False
    cotangents = [torch.randn_like(t) if t.requires_grad else t for t in expected]
    mine, theirs = gradients(got, cotangents, leaves), gradients(expected, cotangents, expected_leaves)
    return differences(mine, theirs, "gradient"), True


def copied(tree: Any) -> tuple[Any, list[Tensor]]:
    """Arguments with leaves of their own, and these leaves."""
    fresh = pytree.tree_map(lambda x: x.fresh() if isinstance(x, Leaf) else x, tree)
    return fresh, [x.base for x in pytree.tree_leaves(fresh) if isinstance(x, Leaf)]


def score(op: Any, peer: str = "tdc", backend: str | None = None, most: int | None = None) -> Score:
    """Every sample of one op, or the first `most`."""
    out = Score(op.full_name)
    for i, sample in enumerate(samples(op)):
        if most is not None and out.passed + len(out.wrong) + len(out.raised) >= most:
            break
        label = f"{op.full_name}[{i}] {sample.name}"
        try:
            text, backward = run_sample(op, sample, peer, backend)
        except Unscored:
            out.unscored += 1
            continue
        except Exception as error:  # whatever a candidate raises is its score
            out.raised.append(f"{label}: {type(error).__name__}: {str(error).strip()[:600]}")
            continue
        out.backward += backward
        if text:
            out.wrong.append(f"{label}: {text}")
        else:
            out.passed += 1
    return out


def supported() -> list[Any]:
    """The ops that torch has jagged samples for."""
    return [op for op in njt_op_db if op.supports_njt]


def main(argv: list[str] | None = None) -> int:
    """Print the score; the exit status is the number of ops that are not clean, 1 at most."""
    parser = argparse.ArgumentParser(description="Score tdc on torch's samples for nested tensors.")
    parser.add_argument("--ops", default="", help="regular expression for the full names of ops")
    parser.add_argument("--peer", default="tdc", choices=PEERS)
    parser.add_argument("--compile", dest="backend", help="a backend of torch.compile")
    parser.add_argument("--max-samples", type=int, help="samples of each op")
    parser.add_argument("-v", "--verbose", action="store_true", help="the text of every failure")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    scores = []
    for op in supported():
        if re.search(options.ops, op.full_name):
            one = score(op, options.peer, options.backend, options.max_samples)
            scores.append(one)
            failures = one.wrong + one.raised
            for line in failures if options.verbose else failures[:1]:
                print("WRONG " if line in one.wrong else "RAISES", line.replace("\n", " | "), flush=True)
    clean, wrong = [s for s in scores if s.clean], [s.name for s in scores if not s.clean]
    total: Counter[str] = Counter()
    for s in scores:
        total.update(right=s.passed, gradients=s.backward, wrong=len(s.wrong), raised=len(s.raised), none=s.unscored)
    print(f"{len(clean)} of {len(scores)} ops clean; not clean: {', '.join(wrong) or 'none'}")
    print(
        f"samples: {total['right']} right, {total['gradients']} of them with gradients; {total['wrong']} wrong, ",
        end="",
    )
    print(f"{total['raised']} raise, {total['none']} without a reference")
    return int(len(clean) < len(scores))


if __name__ == "__main__":
    sys.exit(main())
