"""Samples of operations on a TensorDict: leaf by leaf on batch dims, features stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Call, Draw, Sample, call, leafwise
from torch import Tensor

from catalogue.pointwise import COMPARISONS, EXTRA, NO_NUMBERS, domain
from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Dict

LIGHT = ("eager", "grad", "vmap")  # for variants, and where the batch size is the number of results
Map = Callable[[Tensor], Any]


def drawn(d: Draw, dom: str = "real", size: tuple[int, ...] | None = None) -> Dict:
    """Two leaves of other ranks, one of them below an inner node."""
    size = (len(d.lengths), 2) if size is None else size
    return Dict({"a": d.tensor(*size, 3, domain=dom), ("b", "c"): d.tensor(*size, domain=dom)}, size)


def unary(rule: Rule) -> Iterator[Sample]:
    args, kwargs = EXTRA.get(rule.name, ((), {}))
    dom = domain(rule)
    yield Sample("two leaves", lambda d: call(drawn(d, dom), *args, **kwargs), leafwise)
    yield Sample("no batch", lambda d: call(drawn(d, dom, ()), *args, **kwargs), leafwise, LIGHT)
    yield Sample("no leaves", lambda d: call(Dict({}, (2,)), *args, **kwargs), leafwise, ("eager",))


def looked_up(rule: Rule) -> Iterator[Sample]:
    """A second operand, where there is one, is a table and no part of the batch."""

    def want(ref: Any, args: Any, kwargs: Any) -> Dict:
        x, *rest = args
        return Dict({k: ref(leaf, *rest, **kwargs) for k, leaf in x.leaves.items()}, x.size)

    args, kwargs = EXTRA.get(rule.name, ((), {}))
    yield Sample("two leaves", lambda d: call(drawn(d, domain(rule)), *args, **kwargs), want)


def moved(rule: Rule) -> Iterator[Sample]:
    expect = leafwise if rule.modes else lambda *_: None  # there is no such device
    yield Sample("two leaves", lambda d: call(drawn(d)), expect)


def binary(rule: Rule) -> Iterator[Sample]:
    dom = domain(rule)
    yield Sample("two", lambda d: call(drawn(d, dom), drawn(d, dom)), leafwise)
    yield Sample("dense", lambda d: call(drawn(d, dom), d.tensor(2, domain=dom)), leafwise)
    yield Sample("dense rows", lambda d: call(drawn(d, dom), d.tensor(len(d.lengths), 1, domain=dom)), leafwise, LIGHT)
    yield Sample("dense first", lambda d: call(d.tensor(2, domain=dom), drawn(d, dom)), leafwise, LIGHT)
    if rule.name in ("add", "sub", "mul", "div"):
        yield Sample("by name", lambda d: call(d.tensor(2, domain=dom), other=drawn(d, dom)), leafwise, LIGHT)
    yield Sample("scalar tensor", lambda d: call(drawn(d, dom), d.tensor(domain=dom)), leafwise, LIGHT)
    if rule.name not in NO_NUMBERS:
        number = 2 if dom in ("int", "natural") else 1.0 if rule.name in COMPARISONS else 2.5
        yield Sample("number", lambda d: call(drawn(d, dom), number), leafwise, LIGHT)


def where(rule: Rule) -> Iterator[Sample]:
    yield Sample("leaves", lambda d: call(drawn(d, "bool"), drawn(d), drawn(d)), leafwise)
    yield Sample("dense mask", lambda d: call(d.tensor(2, domain="bool"), drawn(d), 0.5), leafwise)


def clamp(rule: Rule) -> Iterator[Sample]:
    yield Sample("numbers", lambda d: call(drawn(d), -0.5, max=0.5), leafwise)
    yield Sample("leaves", lambda d: call(drawn(d), drawn(d), d.tensor(2)), leafwise)


def lerp(rule: Rule) -> Iterator[Sample]:
    yield Sample("number", lambda d: call(drawn(d), drawn(d), 0.3), leafwise)
    yield Sample("dense", lambda d: call(drawn(d), drawn(d), d.tensor(2)), leafwise)


def masked_fill(rule: Rule) -> Iterator[Sample]:
    yield Sample("leaves", lambda d: call(drawn(d), drawn(d, "bool"), 0.5), leafwise)
    yield Sample("dense", lambda d: call(drawn(d), d.tensor(2, domain="bool"), 0.5), leafwise)


def reshaped(label: str, args: Any, fn: Map, modes: tuple[str, ...] = MODES) -> Sample:
    """A call `op(td, *args(batch))`; `fn` makes the batch dims of the result out of an index of all examples."""

    def want(ref: Any, given: Any, kwargs: Any) -> Dict:
        x = given[0]
        index = fn(torch.arange(torch.Size(x.size).numel()).view(x.size))
        leaves = {key: leaf.flatten(0, 1)[index] for key, leaf in x.leaves.items()}
        return Dict(leaves, tuple(index.shape))

    return Sample(label, lambda d: call(drawn(d), *args(len(d.lengths))), want, modes)


def shape(rule: Rule) -> Iterator[Sample]:
    """Regrouped examples: the same operation on an index of them says where each one goes."""
    arguments: dict[str, dict[str, Any]] = {
        "permute": {"(1, 0)": lambda b: [(1, 0)], "(-1, 0)": lambda b: [(-1, 0)]},
        "transpose": {"0, 1": lambda b: [0, 1], "-1, 0": lambda b: [-1, 0]},
        "reshape": {"-1": lambda b: [(-1,)], "-1, 2, 1": lambda b: [(-1, 2, 1)]},
        "view": {"-1": lambda b: [-1], "1, -1, 2": lambda b: [(1, -1, 2)]},
        "flatten": {"all": lambda b: [], "0, 1": lambda b: [0, 1]}, "unflatten": {"1": lambda b: [1, (2, 1)]},
        "unsqueeze": {"0": lambda b: [0], "1": lambda b: [1], "-1": lambda b: [-1]},
        "squeeze": {"none to drop": lambda b: [], "1": lambda b: [1]},
        "expand": {"in front": lambda b: [3, -1, -1]},
    }  # fmt: skip
    for label, args in arguments[rule.name].items():
        modes = LIGHT if rule.name == "squeeze" else MODES  # there is nothing to compile
        yield reshaped(label, args, lambda index, a=args: rule.ref(index, *a(0)), modes)


def flatten(rule: Rule) -> Iterator[Sample]:
    yield from shape(rule)

    def want(ref: Any, args: Any, kwargs: Any) -> Dict:
        return Dict({key: leaf[None] for key, leaf in args[0].leaves.items()}, (1,))

    yield Sample("no batch", lambda d: call(drawn(d, size=())), want, ("eager", "grad"))


def squeeze(rule: Rule) -> Iterator[Sample]:
    yield from shape(rule)

    def draw(d: Draw, *args: Any) -> Call:
        return call(drawn(d, size=(len(d.lengths), 1)), *args)

    def want(ref: Any, args: Any, kwargs: Any) -> Dict:
        return Dict({key: leaf.squeeze(1) for key, leaf in args[0].leaves.items()}, args[0].size[:1])

    yield Sample("all of size 1", draw, want)
    yield Sample("dim 1", lambda d: draw(d, 1), want)
    yield Sample("dims", lambda d: draw(d, (0, 1)), want, LIGHT)


def expand(rule: Rule) -> Iterator[Sample]:
    yield from shape(rule)

    def want(ref: Any, args: Any, kwargs: Any) -> Dict:
        size = (args[0].size[0], 4)
        return Dict({key: leaf.expand(*size, *leaf.shape[2:]) for key, leaf in args[0].leaves.items()}, size)

    yield Sample("size 1", lambda d: call(drawn(d, size=(len(d.lengths), 1)), -1, 4), want)


def parts(rule: Rule) -> Iterator[Sample]:
    """unbind, split, chunk: one TensorDict for each part of the batch."""
    options: dict[str, dict[str, tuple[Any, ...]]] = {
        "unbind": {"dim 1": (1,), "batch": (0,)}, "split": {"by one": (1, 1), "sizes": ([1, 1], -1), "batch": (2,)},
        "chunk": {"dim 1": (2, 1), "batch": (2,)}, "split_with_sizes": {"dim 1": ([1, 1], 1), "last": ([2], -1)},
    }  # fmt: skip

    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        x, *rest = args
        pieces = ref(torch.arange(torch.Size(x.size).numel()).view(x.size), *rest)
        flat = {key: leaf.flatten(0, 1) for key, leaf in x.leaves.items()}
        return tuple(Dict({key: leaf[i] for key, leaf in flat.items()}, tuple(i.shape)) for i in pieces)

    for label, args in options[rule.name].items():
        yield Sample(label, lambda d, a=args: call(drawn(d), *a), want, LIGHT if label == "batch" else MODES)


def join(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Dict:
        xs, dim = args
        ndim = 2 + (rule.name == "stack")
        d = dim % ndim
        leaves = {key: ref([x.leaves[key] for x in xs], d) for key in xs[0].leaves}
        return Dict(leaves, tuple(leaves["a"].shape[:ndim]))

    for dim in (0, 1, -1):
        yield Sample(f"dim {dim}", lambda d, k=dim: call([drawn(d), drawn(d)], k), want)
    if rule.name == "cat":
        longer = lambda d: call([drawn(d), drawn(d, size=(len(d.lengths) + 3, 2))], 0)  # noqa: E731
        yield Sample("other sizes", longer, want)


def index_select(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Dict:
        x, dim, index = args
        leaves = {key: ref(leaf, dim % 2, index) for key, leaf in x.leaves.items()}
        return Dict(leaves, tuple(leaves["a"].shape[:2]))

    index = torch.tensor([1, 0, 1])
    for dim in (0, 1, -1):
        yield Sample(f"dim {dim}", lambda d, k=dim: call(drawn(d), k, index), want)


def ternary(rule: Rule) -> Iterator[Sample]:
    dom = domain(rule)
    yield Sample("leaves", lambda d: call(*[drawn(d, dom) for _ in range(3)]), leafwise)
    yield Sample("dense", lambda d: call(drawn(d), d.tensor(2, domain=dom), drawn(d, dom), value=0.5), leafwise, LIGHT)


def polygamma(rule: Rule) -> Iterator[Sample]:
    yield Sample("first", lambda d: call(1, drawn(d, domain(rule))), leafwise)


def type_as(rule: Rule) -> Iterator[Sample]:
    yield Sample("leaves", lambda d: call(drawn(d), drawn(d, "half")), leafwise)
    yield Sample("dense", lambda d: call(drawn(d), torch.tensor(1.0).double()), leafwise, LIGHT)


def shaped(rule: Rule) -> Iterator[Sample]:
    """What holds anything, or random numbers: only shapes and dtypes are compared."""
    yield Sample("no elements", lambda d: call(drawn(d, size=(len(d.lengths), 0))), leafwise)
    yield Sample("dtype", lambda d: call(drawn(d, size=(0,)), dtype=torch.float64), leafwise, LIGHT)


def loss(rule: Rule) -> Iterator[Sample]:
    """One number for each element, or one for each leaf."""
    dom = "unit" if "binary" in rule.name else "real"

    def mean(ref: Any, args: Any, kwargs: Any) -> Dict:
        return Dict(leafwise(ref, args, kwargs).leaves, ())

    def spread(ref: Any, args: Any, kwargs: Any) -> Dict:
        x, target = args
        wide = {k: target.view(2, *[1] * (v.ndim - 2)).expand(v.shape) for k, v in x.leaves.items()}
        return leafwise(ref, (x, Dict(wide, x.size)), kwargs)

    yield Sample("mean", lambda d: call(drawn(d, dom), drawn(d, dom)), mean)
    yield Sample("sum", lambda d: call(drawn(d, dom), drawn(d, dom), reduction="sum"), mean, LIGHT)
    yield Sample("none", lambda d: call(drawn(d, dom), drawn(d, dom), reduction="none"), leafwise, LIGHT)
    dense = lambda d: call(drawn(d, dom), d.tensor(2, domain=dom), reduction="none")  # noqa: E731
    yield Sample("dense target", dense, spread, LIGHT)


def told(rule: Rule) -> Iterator[Sample]:
    """One answer for all leaves; the number of examples."""

    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        (x,) = args
        return ref(torch.empty(x.size)) if rule.name == "numel" else all([ref(leaf) for leaf in x.leaves.values()])

    yield Sample("two leaves", lambda d: call(drawn(d)), want)
    mixed = lambda d: Dict({"a": d.tensor(2), "b": d.tensor(2).to(torch.uint8)}, (2,))  # noqa: E731
    yield Sample("two dtypes", lambda d: call(mixed(d)), want, LIGHT)


def whole(rule: Rule) -> Iterator[Sample]:
    """One Python bool: the same keys, sizes and values or not."""

    def of(label: str, expected: bool, draw: Any) -> Sample:
        return Sample(label, draw, lambda ref, args, kwargs: expected, MODES if label == "copy" else ("eager", "grad"))

    def copy(d: Draw, *keys: Any) -> Call:
        x = drawn(d)
        return call(x, Dict({k: v.clone() for k, v in x.leaves.items() if not keys or k in keys}, x.size))

    yield of("copy", True, copy)
    yield of("other values", rule.name == "is_same_size", lambda d: call(drawn(d), drawn(d)))
    yield of("other sizes", False, lambda d: call(drawn(d), drawn(d, size=(1, 2))))
    yield of("other keys", False, lambda d: copy(d, "a"))
    yield of("a tensor", False, lambda d: call(drawn(d), d.tensor(2)))


def two_results(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> tuple[Dict, ...]:
        (x,) = args
        return tuple([Dict({k: ref(leaf)[i] for k, leaf in x.leaves.items()}, x.size) for i in range(2)])

    yield Sample("two leaves", lambda d: call(drawn(d)), want)


def refused(rule: Rule) -> Iterator[Sample]:
    """How a row without an implementation is called."""
    args = (torch.zeros(2),) if rule.name == "searchsorted" else ()
    yield Sample("", lambda d: call(drawn(d), *args), lambda ref, args, kwargs: None)


DICTS = {
    "pointwise": unary, "random": unary, "factory": unary, "where": where, "clamp": clamp, "lerp": lerp,
    "flatten": flatten,
    "masked_fill": masked_fill, "shape": shape, "squeeze": squeeze, "expand": expand, "unbind": parts, "split": parts,
    "chunk": parts, "split_with_sizes": parts, "join": join, "index_select": index_select,
    "addcmul": ternary, "addcdiv": ternary, "polygamma": polygamma, "isin": looked_up, "bucketize": looked_up,
    "bernoulli": looked_up, "frexp": two_results,
    "cpu": moved, "cuda": moved, "type_as": type_as, "loss": loss, "comparison": whole,
    "numel": told, **dict.fromkeys(("is_floating_point", "is_complex", "is_signed"), told),
    **dict.fromkeys(("empty_like", "rand_like", "randn_like"), shaped),
    **dict.fromkeys(("unique", "unique_consecutive", "searchsorted", "nonzero", "argwhere"), refused),
}  # fmt: skip
