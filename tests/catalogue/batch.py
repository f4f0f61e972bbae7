"""Samples of operations along the batch dims of a TensorDict.

What such an operation means is what torch does to a tensor of the batch shape, for each feature by itself. So one
expectation serves them all: `columnwise` takes features one after another and hands torch the arguments as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from harness import Call, Draw, Sample, call
from torch import Tensor
from torch.utils import _pytree as pytree

from catalogue.tensordict import drawn
from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Dict

LIGHT = ("eager", "grad", "vmap")
COUNTED = ("eager", "grad")  # the number of results is data
PLACES = torch.tensor([1, 0, 1])
ROWS = torch.tensor([[1, 0], [0, 1], [1, 1]])
MASK = torch.tensor([True, False])


def columnwise(ref: Any, args: Any, kwargs: Any) -> Any:
    """Expect the operation on each feature of each leaf; operands that are tensors have batch dims."""
    is_dict = lambda x: isinstance(x, Dict)  # noqa: E731
    first = next(x for x in pytree.tree_leaves((args, kwargs), is_leaf=is_dict) if is_dict(x))

    def column(x: Any, key: Any, i: int) -> Any:
        return x.leaves[key].reshape(*x.size, -1)[..., i] if is_dict(x) else x

    def at(key: Any) -> Any:
        features = first.leaves[key].shape[len(first.size) :]
        given = [
            pytree.tree_map(lambda x, i=i: column(x, key, i), (args, kwargs), is_leaf=is_dict)
            for i in range(features.numel())
        ]
        return joined([ref(*a, **k) for a, k in given], features)

    return gathered({key: at(key) for key in first.leaves})


def joined(results: list[Any], features: torch.Size) -> Any:
    """Results of all features as one leaf and its batch size, or as a tuple of such pairs."""
    if isinstance(results[0], (tuple, list)):
        return [joined(list(each), features) for each in zip(*results, strict=True)]
    return torch.stack(results, -1).reshape([*results[0].shape, *features]), tuple(results[0].shape)


def gathered(leaves: dict[Any, Any]) -> Any:
    """One `Dict`, or one for each result."""
    first = next(iter(leaves.values()))
    if isinstance(first, list):
        return tuple(gathered({key: parts[i] for key, parts in leaves.items()}) for i in range(len(first)))
    return Dict({key: leaf for key, (leaf, _) in leaves.items()}, first[1])


def of(label: str, *args: Any, modes: tuple[str, ...] = MODES, dom: str = "real", **kwargs: Any) -> Sample:
    """A call `op(td, *args, **kwargs)`; a function among the arguments draws an operand."""

    def draw(d: Draw) -> Call:
        x = drawn(d, dom)
        drawn_args = [a(d) if callable(a) else a for a in args]
        return call(x, *drawn_args, **{k: a(d) if callable(a) else a for k, a in kwargs.items()})

    return Sample(label, draw, columnwise, modes)


def rows(*sizes: int, dom: str = "real") -> Callable[[Draw], Tensor]:
    """A dense operand with batch dims; -1 is the number of rows."""
    return lambda d: d.tensor(*[len(d.lengths) if n == -1 else n for n in sizes], domain=dom)


def tree(*sizes: int, dom: str = "real") -> Callable[[Draw], Dict]:
    """A TensorDict as a second operand; -1 is the number of rows."""
    return lambda d: drawn(d, dom, tuple(len(d.lengths) if n == -1 else n for n in sizes))


def reduced(rule: Rule) -> Iterator[Sample]:
    """Over one batch dim, over all, and where torch takes them over several."""
    dom = DOMAIN.get(rule.name, "real")
    yield of("dim 0", dim=0, dom=dom)
    yield of("dim -1", dim=-1, modes=LIGHT, dom=dom)
    if rule.name not in NO_KEEPDIM:
        yield of("keepdim", dim=1, keepdim=True, modes=LIGHT, dom=dom)
    if rule.name in WHOLE:
        yield of("all", modes=LIGHT, dom=dom)
    if rule.name in SEVERAL:
        yield of("dims", dim=(0, 1), modes=LIGHT, dom=dom)


def grown(*sizes: int, modes: tuple[str, ...] = MODES) -> Sample:
    """A call `op(td)` for a batch of the given sizes."""
    return Sample(f"batch {list(sizes)}", lambda d: call(tree(*sizes)(d)), columnwise, modes)


def alone(*args: Any, dom: str = "real") -> Sample:
    """A call `op(td, *args)` without a dim, for a single batch dim, which is the last one."""
    return Sample("one batch dim", lambda d: call(tree(-1, dom=dom)(d), *args), columnwise, LIGHT)


DOMAIN = {"count_nonzero": "whole", "aminmax": "constant"}  # torch 2.11 has no derivative of aminmax
NO_KEEPDIM = {"count_nonzero", "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"}
SEVERAL = {
    "nansum", "nanmean", "logsumexp", "std", "var", "std_mean", "var_mean", "count_nonzero", "norm", "vector_norm",
}  # fmt: skip
WHOLE = SEVERAL - {"logsumexp"} | {"argmax", "argmin", "aminmax", "median", "nanmedian", "max", "min"}


def extreme(rule: Rule) -> Iterator[Sample]:
    yield from reduced(rule)
    yield of("other", tree(-1, 2), modes=LIGHT)
    yield of("dense other", rows(2), modes=LIGHT)


def quantile(rule: Rule) -> Iterator[Sample]:
    yield of("number", 0.3, 0, modes=MODES if torch.__version__ >= "2.12" else LIGHT)  # torch 2.11 cannot trace it
    yield of("several", torch.tensor([0.2, 0.7]), 1, modes=LIGHT)
    yield of("all", 0.5, modes=LIGHT)
    yield of("keepdim", 0.5, -1, keepdim=True, interpolation="lower", modes=LIGHT)


def table(**samples: list[Sample]) -> dict[str, Callable[[Rule], Iterator[Sample]]]:
    """Makers of samples that do not depend on the row."""
    return {name: lambda rule, s=found: iter(s) for name, found in samples.items()}


SORT = table(
    sort=[of("last"), of("dim 0", 0, True, modes=LIGHT), of("stable", dim=1, stable=True, modes=LIGHT), alone()],
    argsort=[of("dim 0", 0), of("last", descending=True, modes=LIGHT), alone()],
    topk=[of("dim 0", 2, 0), of("last", 1, largest=False, modes=LIGHT), alone(1)],
    kthvalue=[of("dim 0", 2, 0), of("keepdim", 1, keepdim=True, modes=LIGHT), alone(1)], msort=[of("dim 0")],
    mode=[of("last", dom="whole"), of("dim 0", 0, True, dom="whole", modes=LIGHT), alone(dom="whole")],
)  # fmt: skip
SCAN = table(diff=[
    of("last"), of("dim 0, twice", 2, 0, modes=LIGHT), of("prepend", prepend=tree(-1, 1), modes=LIGHT),
    of("dense append", dim=0, append=rows(3, 2), modes=LIGHT), alone(),
])  # fmt: skip
NORM = table(
    softmax=[of("dim 0", 0), of("dtype", -1, dtype=torch.float64, modes=LIGHT)],
    log_softmax=[of("dim 0", 0), of("dim -1", dim=-1, modes=LIGHT)], softmin=[of("dim 1", 1)],
    normalize=[of("dim 1"), of("dims", 1.0, (0, 1), modes=LIGHT)],
    cosine_similarity=[of("dim 1", tree(-1, 2)), of("dim 0", tree(-1, 2), 0, modes=LIGHT)],
)  # fmt: skip
GATE = table(
    glu=[of("last"), of("both", 1, modes=LIGHT), Sample("dim 0", lambda d: call(tree(4, 2)(d), 0), columnwise)]
)
RANDOM = table(gumbel_softmax=[of("numbers that weigh nothing", 1e9, dim=0), of("last", 1e9, modes=LIGHT), alone(1e9)])
LOOKUP = table(
    select=[of("dim 0", 0, 1), of("dim -1", -1, 0, modes=LIGHT)],
    narrow=[of("dim 0", 0, 1, 1), of("dim -1", -1, 0, 2, modes=LIGHT)],
    gather=[of("dense", 0, ROWS), of("leaves", 1, tree(1, 2, dom="bit"), modes=LIGHT)],
    take_along_dim=[of("dense", ROWS, 0), of("all", PLACES, modes=LIGHT), of("wide", ROWS[:1], -2, modes=LIGHT)],
    scatter=[
        of("number", 0, ROWS[:2], 0.5), of("dense", 0, ROWS[:1], rows(1, 2), modes=LIGHT),
        of("leaves", 0, ROWS[:1], tree(1, 2), modes=LIGHT),
    ],
    scatter_add=[of("dense", 0, ROWS, rows(3, 2)), of("leaves", 0, ROWS, tree(3, 2), modes=LIGHT)],
    scatter_reduce=[of("dense", 0, ROWS, rows(3, 2), "mean"), of("leaves", 0, ROWS, tree(3, 2), "amax", modes=LIGHT)],
    index_add=[of("dense", 0, PLACES, rows(3, 2)), of("leaves", 1, PLACES, tree(-1, 3), alpha=0.5, modes=LIGHT)],
    index_copy=[of("dense", 0, PLACES[:2], rows(2, 2)), of("leaves", 1, PLACES[:2], tree(-1, 2), modes=LIGHT)],
    index_fill=[of("dim 0", 0, PLACES, 0.5), of("dim -1", -1, PLACES[:1], 2.0, modes=LIGHT)],
    masked_select=[of("rows", MASK), of("one", torch.tensor([[True]]), modes=LIGHT)],
    diagonal=[of("main"), of("offset", 1, 1, 0, modes=LIGHT)],
    unfold=[of("dim 0", 0, 2, 1), of("dim -1", -1, 1, 1, modes=LIGHT)],
)  # fmt: skip
SHAPE = table(
    movedim=[of("one", 0, -1), of("two", (0, 1), (1, 0), modes=LIGHT)], t=[of("two dims")],
    flip=[of("dim 0", (0,)), of("both", (0, -1), modes=LIGHT)], fliplr=[of("")], flipud=[of("")],
    roll=[of("dim 0", 1, 0), of("all", 3, modes=LIGHT), of("two", (1, -1), (0, -1), modes=LIGHT)],
    rot90=[of("once"), of("back", -1, (1, 0), modes=LIGHT)], ravel=[of("")],
    repeat=[of("in place", 2, 1), of("in front", 2, 1, 3, modes=LIGHT)],
    tile=[of("last", (2,)), of("in front", (2, 1, 1), modes=LIGHT)],
    repeat_interleave=[of("dim 0", 2, 0), of("tensor", torch.tensor([2, 3]), 1, modes=COUNTED), of("all", 2)],
    broadcast_to=[of("in front", (3, -1, 2))], expand_as=[of("itself", tree(-1, 2)), of("dense", rows(3, -1, 2))],
    view_as=[of("itself", tree(-1, 2)), of("dense", rows(2, -1), modes=LIGHT)],
    reshape_as=[of("itself", tree(-1, 2)), of("dense", rows(2, -1), modes=LIGHT)],
    atleast_1d=[grown(), of("enough", modes=LIGHT)], atleast_3d=[grown(-1), grown(-1, 2, modes=LIGHT)],
    atleast_2d=[grown(-1), grown(modes=LIGHT), of("enough", modes=LIGHT)],
    pad=[of("last", (1, 0)), of("both", (1, -1, 0, 2), value=0.5, modes=LIGHT)],
)  # fmt: skip


def lists(label: str, *sizes: tuple[int, ...], modes: tuple[str, ...] = MODES) -> Sample:
    """A call `op([td, td])` for batches of the given sizes."""
    return Sample(label, lambda d: call([tree(*size)(d) for size in sizes]), columnwise, modes)


JOIN = table(
    hstack=[
        lists("two dims", (-1, 2), (-1, 1)), lists("one dim", (-1,), (3,), modes=LIGHT),
        lists("no dim", (), (), modes=LIGHT),
    ],
    vstack=[lists("two dims", (-1, 2), (3, 2)), lists("one dim", (2,), (2,), modes=LIGHT)],
    dstack=[lists("two dims", (-1, 2), (-1, 2)), lists("three", (-1, 2, 1), (-1, 2, 3), modes=LIGHT)],
    column_stack=[lists("two dims", (-1, 2), (-1, 1)), lists("one dim", (-1,), (-1,), modes=LIGHT)],
    tensor_split=[of("parts", 2, 1), of("indices", [1, 2], modes=LIGHT)],
    hsplit=[of("parts", 2), of("at", [1], modes=LIGHT)], vsplit=[of("at", [1])],
    dsplit=[Sample("three dims", lambda d: call(tree(-1, 1, 2)(d), 2), columnwise)],
)  # fmt: skip


def fresh(rule: Rule) -> Iterator[Sample]:
    """New leaves of other batch sizes."""
    fill = (0.5,) if rule.name == "new_full" else ()
    if rule.name == "new_empty":
        yield of("no elements", (3, 0))
    else:
        yield of("sizes", (3,), *fill)
        yield of("dtype", (2, 4), *fill, dtype=torch.float64, modes=LIGHT)


DICTS: dict[str, Callable[[Rule], Iterator[Sample]]] = {
    **dict.fromkeys((*WHOLE, *SEVERAL, "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"), reduced),
    "max": extreme, "min": extreme, "quantile": quantile, "nanquantile": quantile,
    **dict.fromkeys(("new_zeros", "new_ones", "new_full", "new_empty"), fresh),
    **SORT, **SCAN, **NORM, **RANDOM, **GATE, **LOOKUP, **SHAPE, **JOIN,
}  # fmt: skip
