"""Compiled functions of batches of other sizes and layouts, and of numbers that vary, in turn.

A batch of another size does not compile anew. A plain tensor compiles twice: torch makes a size dynamic when it
changes. Where batches are ragged it is marked before. Under `dynamic=True` all numbers vary; which dims are ragged must
stay a constant: of a symbol Dynamo answered `1 in x.ragged_dims` with False, and a graph computed other numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import tdc
from tdc import TensorDict
from tdc.compile import counted
from tdc.testing import assert_close

SIZES = (5, 7, 9)
INDICES = {"int": lambda n: 1, "slice": lambda n: slice(1, 3), "tail": lambda n: slice(1, None),
           "mask": lambda n: torch.arange(n) % 2 == 0, "rows": lambda n: torch.tensor([0, 2])}  # fmt: skip
WRITES: dict[str, Callable[[Any], Any]] = {
    "set": lambda at: at.set(1.0), "add": lambda at: at.add(1.0), "mul": lambda at: at.mul(2.0),
    "max": lambda at: at.max(0.5), "apply": lambda at: at.apply(torch.sin), "mapping": lambda at: at.set({"a": 2.0}),
}  # fmt: skip


def dense(n: int) -> TensorDict:
    g = torch.Generator().manual_seed(n)
    return TensorDict({"a": torch.randn(n, 2, generator=g), "in": {"b": torch.randn(n, generator=g)}}, [n])


def ragged(n: int) -> TensorDict:
    return dense(n).set("rows", tdc.pack([torch.ones(i % 3 + 1) for i in range(n)]))


def compiles(fn: Callable[..., Any], make: Callable[[int], tuple[Any, ...]]) -> int:
    """How often a function compiles for batches of all sizes; its results are those of the eager call."""
    torch._dynamo.reset()
    f = counted(fn, backend="eager")
    for n in SIZES:
        got, want = pytree.tree_leaves(f(*make(n))), pytree.tree_leaves(fn(*make(n)))
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    return f.counts.compiles


def pairs() -> list[object]:
    """Every write with every index; fast are those of `set`, and those at rows."""
    slow = {(w, i): w != "set" and i != "rows" for w in WRITES for i in INDICES}
    return [pytest.param(*pair, marks=[pytest.mark.slow] if off else []) for pair, off in slow.items()]


@pytest.mark.cases(2, 3)
@pytest.mark.parametrize(("write", "index"), pairs())
def test_writes_at_an_index(write: str, index: str):
    if index in ("int", "slice", "tail"):
        fixed = INDICES[index](0)
        assert compiles(lambda td: WRITES[write](td.at[fixed]), lambda n: (dense(n),)) == 2
    else:
        assert compiles(lambda td, i: WRITES[write](td.at[i]), lambda n: (dense(n), INDICES[index](n))) == 2


@pytest.mark.cases(1, 0)
@pytest.mark.parametrize("write", ["set", "add", "mul"])
def test_writes_beside_ragged_leaves(write: str):
    def fn(td: TensorDict, i: torch.Tensor) -> TensorDict:
        at = td.at[i]
        return at.set({"a": 1.0}) if write == "set" else at.add({"a": 1.0}) if write == "add" else at.mul({"a": 2.0})

    assert compiles(fn, lambda n: (ragged(n), torch.tensor([0, 2]))) == 2


PARTS: dict[str, tuple[Callable[..., Any], Callable[[int], Any], int]] = {
    "chunk": (lambda td: td.chunk(2), dense, 2),
    "chunk, beside ragged leaves": (lambda td: td.chunk(2)[0], ragged, 2),
    "chunk, packed": (lambda x: x.chunk(2)[0], lambda n: ragged(n)["rows"], 1),
    "chunk, padded": (lambda x: x.chunk(2)[1], lambda n: ragged(n)["rows"].to_padded(), 1),
    "split, half": (lambda td: td.split((len(td) + 1) // 2), dense, 2),
    "tensor_split": (lambda td: torch.tensor_split(td, 2), dense, 2),
    "tensor_split, packed": (lambda x: torch.tensor_split(x, 2)[0], lambda n: ragged(n)["rows"], 1),
    "tensor_split, padded": (lambda x: torch.tensor_split(x, 2)[1], lambda n: ragged(n)["rows"].to_padded(), 1),
}


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize("name", PARTS)
def test_parts(name: str):
    fn, make, count = PARTS[name]
    assert compiles(fn, lambda n: (make(n),)) == count


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[int], Any]]] = {
    "nbytes": (lambda td: td["a"] * tdc.nbytes(td), dense),
    "nbytes, ragged": (lambda td: td["a"] * tdc.nbytes(td), ragged),
    "param_count": (lambda td: td["a"] * tdc.param_count(td), dense),
    "unflatten_keys": (lambda td: (td * 2).flatten_keys(".").unflatten_keys("."), dense),
    "merge": (lambda td: tdc.merge(td.select("a"), (td * 2).select("in")), dense),
    "stack_keys": (lambda td: tdc.stack_keys(td.set("c", td["a"] * 2), ["a", "c"], "x"), dense),
    "cat_keys": (lambda td: tdc.cat_keys(td.set("c", td["a"] * 2), ["a", "c"], "x"), dense),
    "ravel": (lambda td: tdc.ravel(td)[0] * 2, dense),
    "pad_sequence": (lambda td: tdc.data.pad_sequence([td, td * 2]), dense),
    "ragged_stack": (lambda td: tdc.data.ragged_stack([td, td * 2])["a"], dense),
    "collate": (lambda td: tdc.data.collate([td, td * 2]), dense),
    "copy_": (lambda td: tdc.copy_(td.clone(), td[:2] * 2, slice(1, 3)), dense),
    "to_padded": (lambda td: td["rows"].to_padded(), ragged),
    "index": (lambda td: td[1:], ragged),
}


@pytest.mark.cases(0, 4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str):
    fn, make = FUNCTIONS[name]
    assert compiles(fn, lambda n: (make(n),)) <= 2


def test_bytes_in_a_graph():
    """One tensor twice and expanded dims count once, as in eager; views of one buffer count one by one."""
    x = torch.ones(4, 8)
    td = TensorDict({"x": x, "again": x, "row": torch.ones(8).expand(4, 8)}, [4])
    f = counted(lambda td: td["x"] * tdc.nbytes(td), backend="eager")
    assert f(td)[0, 0] == tdc.nbytes(td) == 160
    views = TensorDict({"x": x, "half": x[:, :4]}, [4])
    assert (tdc.nbytes(views), int(f(views)[0, 0])) == (128, 192)


def test_summary_in_a_graph():
    seen: list[str] = []

    def fn(td: TensorDict) -> torch.Tensor:
        seen.append(td.summary().total)
        return td["a"] * 2

    counted(fn, backend="eager")(dense(5))
    assert seen == [dense(5).summary().total]


@pytest.mark.parametrize("op", [torch.equal, torch.allclose])
def test_a_number_of_python_is_not_in_a_graph(op: Any):
    """torch's own functions end a graph, too; outside of fullgraph they still run."""
    with pytest.raises(Exception, match=rf"tdc\.{op.__name__}: expected values that can be read, got traced"):
        counted(lambda td: op(td, td), backend="eager")(dense(5))
    assert torch.compile(lambda td: op(td, td), backend="eager")(ragged(5)) is True


# -- other layouts in each call


Make = Callable[[int], Any]
SMALL = torch.Generator().manual_seed(0)


def rows(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, generator=SMALL) for shape in shapes]


LAYOUTS: dict[str, Make] = {
    "sequences": lambda k: tdc.pack(rows((3 + k, 4), (2, 4))),
    "channels first": lambda k: tdc.pack(rows((4, 3 + k), (4, 2)), ragged_dim=2),
    "images": lambda k: tdc.pack(rows((4, 5 + k, 3), (4, 3, 5)), ragged_dim=(2, 3)),
    "batch second": lambda k: tdc.pack(rows((3 + k, 4), (2, 4))).transpose(0, 1),
}
PADDED = pytest.mark.parametrize("padded", [False, True], ids=["packed", "padded"])


def made(layout: str, padded: bool, k: int = 0) -> Any:
    x = LAYOUTS[layout](k)
    return x.to_padded() if padded else x


def mixed(x: Any) -> Any:
    """An operation of each sort: along ragged dims, along features, a view, over everything."""
    first = x.ragged_dims[0]
    features = x.ndim - 1 if x.ndim - 1 not in x.ragged_dims else 1
    return x.softmax(first) * 2, x.sum(x.ragged_dims), x.amax(features), x.unsqueeze(0).relu(), x.mean()


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("dynamic", [None, True])
@PADDED
def test_batches_of_other_layouts_in_turn(padded: bool, dynamic: bool | None):
    f = counted(mixed, backend="eager", dynamic=dynamic)
    for k in range(3):
        for layout in LAYOUTS:
            x = made(layout, padded, k)
            assert_close(f(x), mixed(x))
    assert f.counts.compiles == len(LAYOUTS)


MODULES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "encoder": ("sequences", lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)),
    "norms": ("channels first", lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.BatchNorm1d(4))),
    "convnet": (
        "images",
        lambda: nn.Sequential(nn.Conv2d(4, 4, 2), nn.BatchNorm2d(4), nn.MaxPool2d(2, 1), nn.Upsample(None, 2)),
    ),
}


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("name", MODULES)
@PADDED
def test_modules_where_all_sizes_vary(name: str, padded: bool):
    """Numbers of modules and of default arguments are symbols, too: `eps` in a derivative, what fills padding."""
    layout, make = MODULES[name]
    torch.manual_seed(0)
    net = make()
    f = counted(net, backend="eager", dynamic=True)
    for k in range(3):
        x = made(layout, padded, k)
        found, wanted = f(x), net(x)
        assert_close(found, wanted)
        weights = list(net.parameters())
        assert_close(*[torch.autograd.grad(y.square().sum(), weights) for y in (found, wanted)], rtol=1e-4, atol=1e-4)
    assert f.counts.compiles == 1


NUMBERS: dict[str, tuple[str, Callable[[Any, int], Any]]] = {
    "topk": ("sequences", lambda x, n: x.topk(n, 1)[0]), "kthvalue": ("sequences", lambda x, n: x.kthvalue(n, 1)[0]),
    "repeat_interleave": ("sequences", lambda x, n: x.repeat_interleave(n, -1)),
    "unfold": ("channels first", lambda x, n: x.unfold(2, n, 1)),
    "norm": ("sequences", lambda x, n: x.norm(n + 0.5, 1)),
    "normalize": ("sequences", lambda x, n: F.normalize(x, n + 0.5, 1)), "max_pool1d": ("channels first", F.max_pool1d),
    "avg_pool2d": ("images", F.avg_pool2d), "lp_pool1d": ("channels first", lambda x, n: F.lp_pool1d(x, 2.0, n)),
    "sum": ("sequences", lambda x, n: x.sum(n)), "stack": ("sequences", lambda x, n: torch.stack([x, x], n)),
    "pad": ("sequences", lambda x, n: F.pad(x, (0, 0, n, 0))), "slice": ("sequences", lambda x, n: x[:, n:]),
}  # fmt: skip


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("name", NUMBERS)
@PADDED
def test_numbers_that_vary(name: str, padded: bool):
    layout, fn = NUMBERS[name]
    x = made(layout, padded)
    f = torch.compile(fn, backend="eager", fullgraph=True)
    numbers = (1, 2, 1) if "norm" not in name else (1.0, 2.0, math.inf, 1.0, -math.inf)
    for n in numbers:
        assert_close(f(x, n), fn(x, n))


@pytest.mark.cases(0, 1)
@PADDED
def test_images_scaled_where_all_sizes_vary(padded: bool):
    x = made("images", padded)
    f = torch.compile(lambda x: F.interpolate(x, scale_factor=1.5), backend="eager", fullgraph=True, dynamic=True)
    assert_close(f(x), F.interpolate(x, scale_factor=1.5))


def test_numbers_of_a_tensordict_where_all_vary():
    td = tdc.TensorDict({"x": torch.arange(3.0)}, [3])
    f = torch.compile(lambda td, low, high: td.clamp(low, high), backend="eager", fullgraph=True, dynamic=True)
    for high in (1.0, 1.5):
        assert_close(f(td, 0.5, high), td.clamp(0.5, high))


@pytest.mark.sweep
@pytest.mark.slow
def test_a_graph_takes_no_bound_that_varies_for_another():
    """A short row is refused where the bound is an argument of the graph."""
    f = torch.compile(lambda x, k: x.topk(k, 1)[0], backend="eager", fullgraph=True)
    x = LAYOUTS["sequences"](0)
    for k in (1, 2):
        f(x, k)
    with pytest.raises((tdc.ShapeError, RuntimeError), match="at least n elements in each row"):
        f(x, 3)
