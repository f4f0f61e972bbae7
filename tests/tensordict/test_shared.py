"""Shared: `fn(td)` is `fn` of the rows of td alone, with the Shared put back.

The law is asked of every row of the rule table and of every method and function that takes a TensorDict.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import catalogue
import optree
import pytest
import torch
import torch.nn.functional as F
from harness import Draw
from shared_graphs import EDGES, WEIGHT, graph, rows, with_shared
from torch import Tensor
from torch.utils import _pytree as pytree

import tdc
from tdc import Shared, TensorDict
from tdc.core.container import Absent
from tdc.core.errors import DtypeError, ShapeError, StructureError, TdcError
from tdc.core.rules import DISPATCH, RULES, Rule
from tdc.dist.form import described
from tdc.dist.in_graphs import on_numbers
from tdc.tensordict.leaf import CASTS
from tdc.testing.batches import build

KEYS = ("edges", ("sub", "w"))
FAMILIES = sorted({rule.family for rule in RULES if rule.kind == "tensordict" and not rule.reason})


def without(td: TensorDict) -> TensorDict:
    """The rows alone, after a check of the Shared."""
    for key in KEYS:
        leaf = td._leaves[key]
        assert type(leaf) is Shared, (key, leaf)
        assert leaf.shape == (*td.batch_size, 0), (key, leaf.shape, td.batch_size)
    assert torch.equal(td["edges"], EDGES)
    assert torch.equal(td["sub", "w"], WEIGHT)
    return td.exclude(*KEYS)


def same(a: Any, b: Any) -> None:
    """Check that a result with Shared is `b` without them."""
    if isinstance(b, TensorDict):
        a = without(a)
        assert a.batch_size == b.batch_size
        assert a.keys(True, True) == b.keys(True, True)
        for key, x in b.items(True, True):
            tdc.testing.assert_close(a[key], x, equal_nan=True)
    elif isinstance(b, (tuple, list)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(b, Tensor):
        torch.testing.assert_close(a, b, equal_nan=True)
    else:
        assert type(a) is type(b)
        assert a == b or repr(a) == repr(b)


def law(fn: Callable[[TensorDict], Any], n: int = 3) -> None:
    torch.manual_seed(0)
    want = fn(rows(n))
    torch.manual_seed(0)
    same(fn(graph(n)), want)


# -- the rule table


def filled_in(tree: Any, change: Callable[[TensorDict], TensorDict]) -> Any:
    one = lambda x: change(x) if isinstance(x, TensorDict) else x  # noqa: E731
    return pytree.tree_map(one, tree, is_leaf=lambda x: isinstance(x, TensorDict))


def called(rule: Rule, x: Any, *args: Any, **kwargs: Any) -> Any:
    of_tensor = getattr(Tensor, rule.name, None) is rule.op
    return getattr(x, rule.name)(*args, **kwargs) if of_tensor else rule.op(x, *args, **kwargs)


def check_rule(rule: Rule) -> None:
    for sample in catalogue.samples(rule):
        draw = Draw("tensordict", (3, 1, 2, 5))
        args, kwargs = build(sample.draw(draw), "tensordict", lambda x: x)
        torch.manual_seed(0)
        want = called(rule, *args, **kwargs)
        args, kwargs = filled_in((args, kwargs), with_shared)
        torch.manual_seed(0)
        got = called(rule, *args, **kwargs)
        if isinstance(want, torch.dtype | bool | int):
            assert got == want
        else:
            same_shapes(got, want) if "empty" in rule.name else same(got, want)


def same_shapes(a: Any, b: Any) -> None:
    assert without(a).batch_size == b.batch_size


@pytest.mark.parametrize("family", FAMILIES)
def test_every_row_of_the_table(family: str):
    wrong = {}
    own = [rule for rule in RULES if rule.kind == "tensordict" and rule.family == family and not rule.reason]
    for rule in own:
        if rule.name not in {"cuda", *CASTS}:
            try:
                check_rule(rule)
            except (AssertionError, RuntimeError, TypeError, TdcError) as error:
                wrong[rule.name] = f"{type(error).__name__}: {error}"
    assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


# -- methods and functions

MASK, INDEX = torch.tensor([True, False, True]), torch.tensor([2, 0])
MOVES: dict[str, Callable[[TensorDict], Any]] = {
    "int": lambda td: td[1],
    "slice": lambda td: td[1:],
    "step": lambda td: td[::2],
    "mask": lambda td: td[MASK],
    "vector": lambda td: td[INDEX],
    "list": lambda td: td[[0, -1]],
    "None": lambda td: td[None],
    "tuple": lambda td: td[..., None],
    "number": lambda td: td[torch.tensor(1)],
    "many dims": lambda td: td.unsqueeze(0)[0, INDEX],
    "no rows": lambda td: td[:0],
    "iter": list,
    "at.set": lambda td: td.at[0].set(1),
    "at.add": lambda td: td.at[INDEX].add(td[INDEX]),
    "at.get": lambda td: td.at[1].get(),
    "at.apply": lambda td: td.at[0].set(td.at[0].get() * 2),
    "at.drop": lambda td: td.at[torch.tensor([5])].set(0, mode="drop"),
    "apply": lambda td: td.apply(lambda x: x),
    "apply_with_path": lambda td: td.apply_with_path(lambda key, x: x),
    "apply of two": lambda td: td.apply(lambda x, y: x, td),
    "apply of another size": lambda td: td.apply(torch.Tensor.view_as, td, batch_size=[]),
    "apply default": lambda td: td.apply(lambda x, y: x, td, default=None),
    "to": lambda td: td.to("cpu"),
    "to where": lambda td: td.to(torch.float64, where=lambda x: x.ndim == 99),
    "with_device": lambda td: td.with_device("cpu"),
    "with_batch_size": lambda td: td.with_batch_size([]),
    "with_batch_size back": lambda td: td.with_batch_size([]).with_batch_size([3]),
    "clone": lambda td: td.clone(),
    "cpu": lambda td: td.cpu(),
    "mutate": lambda td: td.mutate().finish(),
    "select": lambda td: td.select(*td.keys()),
    "exclude": lambda td: td.exclude("id"),
    "delete": lambda td: td.delete(("sub", "y")),
    "pop": lambda td: td.pop("x")[1],
    "setdefault": lambda td: td.setdefault("z", torch.zeros(len(td))),
    "set": lambda td: td.set("z", torch.zeros(len(td))),
    "update": lambda td: td.update({"x": torch.zeros(len(td))}),
    "update td": lambda td: td.update(td),
    "replace": lambda td: td.replace(x=torch.zeros(len(td))),
    "filter": lambda td: td.filter(lambda key, x: True),
    "split_keys": lambda td: td.split_keys(["id"])[1],
    "rename_keys": lambda td: td.rename_keys({"x": "z"}),
    "flatten_keys": lambda td: td.flatten_keys().unflatten_keys(),
    "share_memory": lambda td: td.share_memory(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda td: pickle.loads(pickle.dumps(td)),
    "map": lambda td: td.map(lambda part: part * 2, chunksize=2),
    "map one": lambda td: tdc.map(lambda part: part * 2, td, chunksize=0),
    "map_iter": lambda td: list(td.map_iter(lambda part: part + 1, chunksize=2)),
    "split": lambda td: td.split(2),
    "numel": lambda td: td.numel(),
    "len": len,
    "is_empty": lambda td: td.is_empty(),
    "is_cpu": lambda td: td.is_cpu,
    "all": lambda td: (td == td).all(),
    "any": lambda td: (td != td).any(),
    "real": lambda td: td.real,
    "@": lambda td: td - td,
    "flat": lambda td: td.unsqueeze(1).expand(-1, 2).flatten(),
    "merge": lambda td: tdc.merge(td.exclude("x"), td.select("x")),
    "partition": lambda td: tdc.merge(*tdc.partition(td, ["x"])),
    "cat_keys": lambda td: tdc.cat_keys(td, ["x", ("sub", "y")], "xy"),
    "stack_keys": lambda td: tdc.stack_keys(td.set("z", td["x"]), ["x", "z"], "xz"),
    "copy_": lambda td: tdc.copy_(td.clone(), td[:2], slice(0, 2)),
    "copy_ of a number": lambda td: tdc.copy_(td.clone(), 3),
    "as_tensordict": lambda td: tdc.as_tensordict(td),
    "stack": lambda td: torch.stack([td, td.clone()]),
    "cat": lambda td: torch.cat([td, td[:1]]),
    "vmap": lambda td: tdc.vmap(lambda row: row * 2)(td),
    "vmap at 1": lambda td: tdc.vmap(lambda row: row + 1, in_dims=1, out_dims=1)(td.unsqueeze(0)),
    "vmap in chunks": lambda td: tdc.vmap(lambda row: row + 1, chunk_size=2)(td),
    "vmap of no rows": lambda td: tdc.vmap(lambda row: row * 2)(td.exclude("id")[:0]),
    "vmap of several": lambda td: tdc.vmap(lambda row: {"b": row, "a": (row["x"], row * 2)})(td)["a"],
    "vmap without a dim": lambda td: tdc.vmap(lambda one, row: (one, row), (None, 0), (None, 0))(td, td),
    "vmap of two": lambda td: tdc.vmap(lambda a, b: a + b)(td, td),
    "vmap in vmap": lambda td: tdc.vmap(tdc.vmap(lambda row: row + 1))(td.unsqueeze(1)),
    "batch": lambda td: chosen(td),
    "collate": lambda td: tdc.data.collate([td[0], td[1], td[2]]),
    "pad_sequence": lambda td: tdc.data.pad_sequence([td[:2], td]).exclude("id"),
    "ragged_stack": lambda td: tdc.data.ragged_stack([td[:2], td]),
    "unpad_sequence": lambda td: tdc.data.unpad_sequence(tdc.data.ragged_stack([td[:2], td])),
    "group_by": lambda td: list(tdc.data.group_by(td, "id").values()),
    "loader": lambda td: list(tdc.data.loader(td, batch_size=2)),
    "Dataset": lambda td: tdc.data.Dataset(td).__getitems__([0, 2]),
    "DataLoader": lambda td: list(torch.utils.data.DataLoader(td, batch_size=2, collate_fn=lambda x: x)),
    "to_buffer": lambda td: tdc.io.from_buffer(*tdc.io.to_buffer(td)),
    "from_pytree": lambda td: tdc.interop.to_pytree(*tdc.interop.from_pytree({"td": td}))["td"],
    "zeros": lambda td: with_zeros(tdc.interop.zeros(td)),
    "check": lambda td: tdc.interop.check(td, tdc.interop.spec(td)),
    "to_bucket": lambda td: tdc.compile.to_bucket(td, rows=(8,))[0],
    "unbucket": lambda td: tdc.compile.unbucket(*tdc.compile.to_bucket(td, rows=(8,))),
    "cond": lambda td: tdc.cond(torch.tensor(True), lambda td: td + 1, lambda td: td, (td,)),
    "while_loop": lambda td: tdc.while_loop(lambda td: (td["id"] < 9).all(), lambda td: (td + 1,), (td,))[0],
    "rnn": lambda td: F.dropout(td.exclude("id"), 0.5),
}  # fmt: skip


@tdc.batch
def chosen(row: TensorDict) -> Any:
    if row["id"] > 0:
        row = row * 2
    return row


@tdc.batch
def different(row: TensorDict) -> Any:
    return row.set("edges", Shared(row["x"]))


def with_zeros(td: TensorDict) -> TensorDict:
    """The zeros of a spec, with the Shared that the law asks for."""
    return with_shared(td) if "edges" in td and not td["edges"].any() else td


@pytest.mark.filterwarnings(r"ignore:tdc.compile.(to_bucket|unbucket) is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", MOVES)
def test_rows_are_as_without_it(name: str):
    law(MOVES[name])


READ = {  # what answers about keys and sizes, shows a TensorDict, or is asked below
    "at", "batch_dims", "batch_size", "depth", "device", "dim", "dtype", "empty", "get", "grad", "is_cuda", "is_meta",
    "items", "keys", "memmap", "ndim", "ndimension", "pin_memory", "requires_grad", "shape", "size", "summary",
    "to_dict", "to_numpy", "unflatten_keys", "values", "with_device", "imag",
}  # fmt: skip


def test_every_method_is_asked():
    given = {name for base in TensorDict.__mro__ for name, x in vars(base).items() if not isinstance(x, Absent)}
    ops = [*DISPATCH["tensordict"]]
    rows_of_table = {name for name in given for x in (torch, Tensor) if getattr(x, name, None) in ops}
    asked = {name for fn in MOVES.values() if hasattr(fn, "__code__") for name in fn.__code__.co_names}
    public = {name for name in given if not name.startswith("_")}
    assert public - rows_of_table - asked - READ == set()


ON_TENSORS: dict[str, tuple[Callable[[TensorDict], Any], Callable[[Tensor], Tensor]]] = {
    "double": (lambda td: td.double(), lambda x: x.double()),
    "to": (lambda td: td.to(torch.float16), lambda x: x.to(torch.float16)),
    "to where": (lambda td: td.to(torch.int32, where=lambda x: x is EDGES), lambda x: x.int() if x is EDGES else x),
    "meta": (lambda td: td.to("meta"), lambda x: x.to("meta")),
    "type_as": (lambda td: td.type_as(torch.zeros(1, dtype=torch.float64)), lambda x: x.double()),
    "apply": (lambda td: td.apply(lambda x: x + 1), lambda x: x + 1),
    "tree_map": (lambda td: pytree.tree_map(lambda x: x * 2, td), lambda x: x * 2),
    "optree": (lambda td: optree.tree_map(lambda x: x * 2, td), lambda x: x * 2),
    "apply of two": (lambda td: td.apply(torch.add, td), lambda x: x + x),
    "zeros": (lambda td: tdc.interop.zeros(td), torch.zeros_like),
}


@pytest.mark.parametrize("name", ON_TENSORS)
def test_what_acts_on_the_tensor(name: str):
    on_td, on_tensor = ON_TENSORS[name]
    out = on_td(graph())
    for key, x in zip(KEYS, (EDGES, WEIGHT), strict=True):
        assert type(out._leaves[key]) is Shared
        want = on_tensor(x)
        assert (out[key].dtype, out[key].device, out[key].shape) == (want.dtype, want.device, want.shape)
        assert want.is_meta or torch.equal(out[key], want)


def test_it_is_read_and_written_as_any_key():
    td = graph()
    assert td["edges"] is EDGES
    assert td["sub"]["w"] is WEIGHT
    assert td.get("edges") is EDGES
    assert dict(td.items(True, True))["edges"] is EDGES
    assert td.to_dict()["sub"]["w"] is WEIGHT
    assert td.mutate()["edges"] is EDGES
    assert "edges" in td
    assert td.to_numpy()["sub"]["w"].tolist() == WEIGHT.tolist()
    assert Shared(EDGES).value is EDGES
    assert td.set("edges", torch.zeros(3)).batch_size == (3,)
    with pytest.raises(ShapeError, match=r"edges: Tensor int64\[2, 3\]"):
        td.set("edges", EDGES)
    m = td.mutate()
    m["edges"] = Shared(WEIGHT)
    assert m.finish()[1:]["edges"] is WEIGHT
    assert td.replace(edges=Shared(WEIGHT))["edges"] is WEIGHT
    assert TensorDict(x=torch.zeros(2), edges=Shared(EDGES), batch_size=[2])["edges"] is EDGES
    params = TensorDict({"w": WEIGHT, "b": {"c": WEIGHT}}).apply(Shared)
    assert td.set("params", params)[0]["params", "b", "c"] is WEIGHT
    assert tdc.as_tensordict({"x": torch.zeros(3, 2), "edges": Shared(EDGES)}, batch_dims=1)[:2]["edges"] is EDGES


def test_it_is_shown_and_counted():
    assert graph().select("x", "edges").dtype is torch.float32
    assert graph().select("x", "edges").is_floating_point()
    td = TensorDict({"x": torch.zeros(3), "edges": Shared(EDGES)}, [3])
    assert "edges: Shared(shape=torch.Size([2, 3]), device=cpu, dtype=torch.int64)" in repr(td)
    assert '<span title="kind">Shared</span> <span title="shape">[2, 3]</span>' in td._repr_html_()
    assert "Shared      [2, 3]" in repr(td.summary())
    assert repr(Shared(EDGES)) == "Shared int64[2, 3]"
    assert tdc.nbytes(td) == tdc.nbytes(td.exclude("edges")) + 48
    assert tdc.param_count(td) == 3 + 6


def test_nodes_with_more_batch_dims():
    td = TensorDict({"x": torch.zeros(3), "in": graph(3).unsqueeze(1)}, [3])
    back = pytree.tree_map(torch.clone, td)
    for found in (td, back, td[:2], td.unsqueeze(0)[0], torch.stack([td, td])[0], pickle.loads(pickle.dumps(td))):
        inner = found["in"]
        assert inner.batch_size == (len(found), 1)
        without(inner)
    td = TensorDict({"in": TensorDict({"edges": Shared(EDGES)}, [3, 2])}, [3])
    assert pytree.tree_map(torch.clone, td)["in"].batch_size == (3, 2)


def test_without_rows_the_batch_size_stays():
    td = TensorDict({"edges": Shared(EDGES)}, [3])
    for found in (td[1:], td + td, pytree.tree_map(torch.clone, td)[:2], torch.cat([td, td])[:2], td.to("cpu")[1:]):
        assert found.batch_size == (2,) or found is td + td or found.batch_size == (3,)
    assert td[1:].batch_size == (2,)
    assert torch.stack([td, td]).batch_size == (2, 3)
    assert td.sum(0).batch_size == ()


def test_nan_is_equal_to_nan():
    td = with_shared(rows(), EDGES, WEIGHT.log())
    assert torch.cat([td, td.clone()])["sub", "w"] is td["sub", "w"]


def test_sparse_ones_are_compared():
    adjacency = torch.eye(3).to_sparse()
    td = TensorDict({"x": torch.ones(3, 1), "adjacency": Shared(adjacency)}, [3])
    assert torch.cat([td, td.clone()])["adjacency"] is adjacency
    with pytest.raises(StructureError, match="one Shared tensor for all"):
        torch.cat([td, td.set("adjacency", Shared(adjacency * 2))])


MEETING: dict[str, Callable[[TensorDict, TensorDict], Any]] = {
    "add": torch.add,
    "stack": lambda a, b: torch.stack([a, b]),
    "cat": lambda a, b: torch.cat([a, b]),
    "where": lambda a, b: torch.where(MASK, a, b),
    "at": lambda a, b: a.at[0].set(b[0]),
    "copy_": lambda a, b: tdc.copy_(a.clone(), b),
    "collate": lambda a, b: tdc.data.collate([a, b]),
    "scatter": lambda a, b: a.scatter(0, INDEX, b),
}


@pytest.mark.parametrize("name", MEETING)
def test_different_ones_do_not_meet(name: str):
    MEETING[name](graph(), with_shared(rows(), EDGES.clone()))
    with pytest.raises(StructureError, match=r"one Shared tensor for all TensorDicts, got Shared int64\[2, 3\] beside"):
        MEETING[name](graph(), with_shared(rows(), EDGES + 1))
    plain = rows().set(("sub", "w"), Shared(WEIGHT)).set("edges", torch.zeros(3, 2, dtype=torch.int64))
    for pair in ((graph(), plain), (plain, graph())) if name != "scatter" else ():
        with pytest.raises(TdcError):
            MEETING[name](*pair)


def test_a_tensor_is_asked_for():
    with pytest.raises(DtypeError, match="expected a tensor, got list"):
        Shared([1, 2])
    with pytest.raises(DtypeError, match=r"td.apply\(Shared\)"):
        Shared(rows())


REFUSED: dict[str, Callable[[TensorDict], Any]] = {
    "ravel": tdc.ravel,
    "cat_keys": lambda td: tdc.cat_keys(td, ["x", ("sub", "w")], "z"),
    "group_by": lambda td: tdc.data.group_by(td, "edges"),
    "to_struct_array": tdc.interop.to_struct_array,
    "optim": lambda td: tdc.optim.adamw().init(td),
    "global_norm": lambda td: tdc.optim.clip_by_global_norm(1.0).update(td, TensorDict({}, td.batch_size), td),
    "ema": lambda td: tdc.optim.ema(0.9).update(td, tdc.optim.ema(0.9).init(td), td),
    "at": lambda td: td.at[0].set({"edges": EDGES}),
    "dist": lambda td: described("dist.all_gather", td),
    "dist in graphs": lambda td: on_numbers("dist.broadcast", td, list),
    "scan": lambda td: tdc.scan(lambda total, row: (total + row["x"], row), torch.zeros(4), td),
    "torch.vmap": lambda td: torch.func.vmap(lambda row: row["x"])(td.select("x").set("w", Shared(EDGES.t()))),
    "vmap of different ones": lambda td: tdc.vmap(lambda row: row.set("edges", Shared(row["x"])))(td),
    "batch of different ones": lambda td: different(td),
    "map out": lambda td: tdc.map(lambda part: part, td, chunksize=1, out=td.clone()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str):
    with pytest.raises(TdcError, match="Shared"):
        REFUSED[name](graph())
