"""The containers as pytrees, for torch and for optree: what vmap, export and tree_map build on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import tdc
from tdc import MaskedBatch, NestedTensor, TensorDict

EXAMPLES: dict[str, Callable[[int], Any]] = {
    "td": lambda n: TensorDict({"a": torch.randn(n, 2), "b": {"c": torch.arange(n), "d": {}}}, [n]),
    "td, device": lambda n: TensorDict({"a": torch.randn(n, 2)}, [n], device="cpu"),
    "td, extra dims": lambda n: TensorDict({"p": TensorDict({"q": torch.randn(n, 4, 2)}, [n, 4])}, [n]),
    "td, ragged": lambda n: TensorDict({"x": EXAMPLES["nested"](n), "m": EXAMPLES["masked"](n)}, [n]),
    "nested": lambda n: tdc.pack([torch.randn(i, 3) for i in range(n)]),
    "nested, no extent": lambda n: tdc.NestedTensor(torch.randn(n * (n - 1) // 2, 3), tdc.offsets_of(torch.arange(n))),
    "nested, last": lambda n: tdc.pack([torch.randn(3, i) for i in range(n)], ragged_dim=2).transpose(0, 1),
    "nested, two": lambda n: tdc.pack([torch.randn(i, 4 - i % 3) for i in range(n)], ragged_dim=(1, 2)),
    "masked": lambda n: MaskedBatch(torch.randn(n, n + 1, 2), torch.arange(n)),
    "masked, two": lambda n: MaskedBatch(torch.randn(n, 3, 4), torch.ones(n, 2, dtype=torch.int64), ragged_dims=(1, 2)),
}
every = pytest.mark.parametrize("make", EXAMPLES.values(), ids=EXAMPLES.keys())


def the_same(a: Any, b: Any) -> None:
    """Two containers of one class, batch size, structure and values."""
    assert type(a) is type(b)
    assert a.shape == b.shape
    assert a.batch_size == b.batch_size
    assert pytree.tree_structure(a) == pytree.tree_structure(b)
    pairs = list(zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True))
    assert pairs
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)


# -- flatten and unflatten


@every
def test_identity(make: Callable[[int], Any]):
    x = make(3)
    the_same(pytree.tree_map(lambda leaf: leaf, x), x)
    the_same(optree.tree_map(lambda leaf: leaf, x), x)
    leaves, spec = pytree.tree_flatten(x)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    the_same(pytree.tree_unflatten(leaves, spec), x)
    ours, ospec = optree.tree_flatten(x)
    assert all(a is b for a, b in zip(ours, leaves, strict=True))
    the_same(optree.tree_unflatten(ospec, ours), x)


@every
def test_contexts_hold_no_sizes(make: Callable[[int], Any]):
    a, b = make(3), make(5)
    assert pytree.tree_structure(a) == pytree.tree_structure(b)
    assert hash(pytree.tree_structure(a)) == hash(pytree.tree_structure(b))
    assert optree.tree_structure(a) == optree.tree_structure(b)


@every
def test_specs_survive_json(make: Callable[[int], Any]):
    spec = pytree.tree_structure(make(3))
    text = pytree.treespec_dumps(spec)
    assert f'"tdc.{type(make(3)).__name__}"' in json.dumps(json.loads(text))
    assert pytree.treespec_loads(text) == spec
    assert hash(pytree.treespec_loads(text)) == hash(spec)


def test_treedefs_do_not_depend_on_the_order_of_keys():
    x, y = torch.zeros(2), torch.ones(2)
    a = TensorDict({"x": x, "n": {"y": y, "z": x}, "m": {}}, [2])
    b = TensorDict({"m": {}, "n": {"z": x, "y": y}, "x": x}, [2])
    assert pytree.tree_structure(a) == pytree.tree_structure(b)
    assert optree.tree_structure(a) == optree.tree_structure(b)
    for flatten in (pytree.tree_leaves, optree.tree_leaves):
        assert all(p is q for p, q in zip(flatten(a), flatten(b), strict=True))
    the_same(pytree.tree_map(torch.add, a, b), TensorDict({"x": x + x, "n": {"y": y + y, "z": x + x}, "m": {}}, [2]))
    assert a.keys() == ("x", "n", "m")


def test_different_layouts_have_different_treedefs():
    specs = [pytree.tree_structure(make(3)) for make in EXAMPLES.values()]
    assert all(a != b for i, a in enumerate(specs) for b in specs[:i])


def test_without_leaves_sizes_stay():
    td = TensorDict({"a": {}}, [3, 2])
    assert pytree.tree_map(lambda x: x, td).batch_size == (3, 2)
    spec = pytree.tree_structure(td)
    assert pytree.treespec_loads(pytree.treespec_dumps(spec)) == spec


@every
@pytest.mark.parametrize("child", [0, None, "spec", object()], ids=["int", "None", "str", "object"])
def test_anything_may_be_a_child(make: Callable[[int], Any], child: Any):
    x = make(3)
    filled = pytree.tree_map(lambda _: child, x)
    assert type(filled) is type(x)
    assert pytree.tree_leaves(filled) == ([child] * len(pytree.tree_leaves(x)))
    assert pytree.tree_structure(filled) == pytree.tree_structure(x)
    the_same(pytree.tree_map(lambda _, leaf: leaf, filled, x), x)
    assert type(x).__name__ in repr(filled)


# -- leaves of ragged batches that are changed one by one

RAGGED: dict[str, Any] = {
    "nested": tdc.pack([torch.ones(n, 5) for n in (2, 3, 1)]),
    "nested, last": tdc.pack([torch.ones(5, n) for n in (2, 3, 1)], ragged_dim=2),
    "nested, two": tdc.pack([torch.ones(n, 4 - n) for n in (2, 3, 1)], ragged_dim=(1, 2)),
    "masked": tdc.pack([torch.ones(n, 5) for n in (2, 3, 1, 2)]).to_padded(),
    "two levels": tdc.pack([tdc.pack([torch.ones(n, 5) for n in (2, 3)]), tdc.pack([torch.ones(4, 5)])]),
    "td": TensorDict({"x": tdc.pack([torch.ones(n, 5) for n in (2, 3, 1)])}, [3]),
}
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "double": lambda t: t.double(), "half": lambda t: t.half(), "int32": lambda t: t.int(), "==": lambda t: t == 1,
    "+": lambda t: t + 1, "*": lambda t: t * 2, "sum": lambda t: t.sum(), "flatten": lambda t: t.flatten(),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
@pytest.mark.parametrize("x", RAGGED.values(), ids=RAGGED.keys())
@pytest.mark.parametrize("tree_map", [pytree.tree_map, optree.tree_map], ids=["torch", "optree"])
def test_structure_is_not_changed_with_values(tree_map: Any, x: Any, change: Any):
    with pytest.raises((tdc.DtypeError, tdc.StructureError), match=r"from a pytree, got .*\nhint: x.with_"):
        tree_map(change, x)


@pytest.mark.parametrize("change", [lambda t: t[1:], lambda t: torch.cat([t, t[:1]])], ids=["slice", "cat"])
def test_rows_of_values_are_no_rows_of_offsets(change: Any):
    for name, x in RAGGED.items():
        if name == "masked":  # whose first dim is the batch in both
            assert pytree.tree_map(change, x).data.shape[0] == change(x.data).shape[0]
        else:
            with pytest.raises(tdc.StructureError, match="offsets from 0 to the size of the values"):
                pytree.tree_map(change, x)


def test_values_alone_change():
    x = RAGGED["nested"]
    the_same(pytree.tree_map(lambda t: t.abs(), x), x.abs())
    the_same(pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, x), x.double())
    stacked = pytree.tree_map(lambda *ts: torch.stack(ts), x, x)
    the_same(pytree.tree_map(lambda t: t[0], stacked), x)
    y = tdc.pack([torch.ones(n) for n in (2, 3, 1)])  # the first rows and the first numbers: it fits by chance
    assert pytree.tree_map(lambda t: t[:2], y).values.shape == (2,)
    with pytest.raises(tdc.StructureError, match="offsets from 0 to the size of the values"):
        pytree.tree_map(lambda t: t[:3], y)


@pytest.mark.parametrize("x", [RAGGED["nested"], RAGGED["masked"]], ids=["nested", "masked"])
def test_stacked_values_of_one_structure(x: Any):
    """As `torch.vmap` takes them with in_dims of 0 for the data and None for the rest: as many members as rows."""
    (data, *rest), spec = pytree.tree_flatten(x)
    stacked = pytree.tree_unflatten([torch.stack([data * (k + 1) for k in range(len(x))]), *rest], spec)
    in_dims = pytree.tree_unflatten([0, *[None] * len(rest)], spec)
    assert torch.vmap(lambda x: x.sum(1), (in_dims,))(stacked)[2].equal(x.sum(1) * 3)


def test_structure_in_a_graph():
    x = RAGGED["nested"]
    kept = torch.compile(lambda x: pytree.tree_map(lambda t: t.abs(), x), fullgraph=True, backend="eager")
    the_same(kept(x), x)
    with pytest.raises(Exception, match="expected int64 offsets from a pytree"):
        torch.compile(lambda x: pytree.tree_map(lambda t: t.double(), x), fullgraph=True, backend="eager")(x)


def test_key_paths():
    def torch_paths(x: Any) -> list[str]:
        return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(x)[0]]

    td = EXAMPLES["td, ragged"](3)
    assert torch_paths(td) == ["['m'].data", "['m'].lengths", "['x'].values", "['x'].offsets", "['x'].extent"]
    assert torch_paths(EXAMPLES["td"](3)) == ["['a']", "[('b', 'c')]"]
    assert torch_paths(EXAMPLES["nested, two"](3)) == [".values", ".offsets", ".shapes", ".extent"]
    assert optree.tree_paths(EXAMPLES["td"](3)) == [("a",), (("b", "c"),)]
    assert optree.tree_paths(EXAMPLES["masked"](3)) == [("data",), ("lengths",)]


# -- the batch size


def test_the_rfc_example():
    td = TensorDict(
        {
            "a": TensorDict({"b": TensorDict({"c": torch.ones(2, 3, 4)}, [2, 3]), "d": torch.ones(2)}, [2]),
            "e": 1,
        },
        [],
    )
    for tree_map in (pytree.tree_map, optree.tree_map):
        out = tree_map(lambda x: x + 1, td)
        assert all(leaf.eq(2).all() for leaf in pytree.tree_leaves(out))
        assert out.shape == torch.Size([])
        assert out["a"].shape == torch.Size([2])
        assert out["a", "b"].shape == torch.Size([2, 3])
        assert out["a", "b", "c"].shape == torch.Size([2, 3, 4])


@pytest.mark.parametrize(
    ("fn", "size"),
    [
        (lambda x: x[0], (4,)), (lambda x: x.unsqueeze(0), (1, 3, 4)), (lambda x: x.sum(), ()),
        (lambda x: x.flatten(0, 1), (12,)), (lambda x: x[:2], (2, 4)),
    ],
)  # fmt: skip
def test_a_change_of_rank_never_promotes_a_feature_dim(fn: Callable[[Tensor], Tensor], size: tuple[int, ...]):
    td = TensorDict({"a": torch.zeros(3, 4, 5), "b": torch.zeros(3, 4, 5, 5)}, [3, 4])
    out = pytree.tree_map(fn, td)
    assert out.batch_size == size
    assert all(out[k].shape[: len(size)] == size for k in ("a", "b"))


def test_leaves_that_part_keep_what_they_share():
    td = TensorDict({"a": torch.zeros(3, 4, 5), "b": torch.zeros(3, 4)}, [3, 4])
    out = pytree.tree_map(lambda x: x[:, :2] if x.ndim == 2 else x, td)
    assert out.batch_size == (3,)


# -- vmap and grad


def test_vmap_as_in_the_rfc():
    td = TensorDict({"a": torch.randn(3, 4, 5)}, batch_size=[3, 4])
    ones = torch.ones(4, 5)
    out = torch.vmap(lambda td, one: td.set("a", td.get("a") + one), in_dims=(0, None), out_dims=1)(td, ones)
    assert out.shape == torch.Size([4, 3])
    assert torch.equal(out["a"], (td["a"] + 1).transpose(0, 1))


def test_torch_vmap_takes_no_tuple_for_one_output():
    """The RFC writes `out_dims=(1,)`; torch.vmap takes that for a tensor only. It fails here once torch takes more."""
    td = TensorDict({"a": torch.randn(3, 4)}, [3, 4])
    with pytest.raises(ValueError, match="out_dims is not compatible with the structure of `outputs`"):
        torch.vmap(lambda x: x + 1, out_dims=(1,))(td)


@pytest.mark.parametrize("in_dim", [0, 1, -2])
@pytest.mark.parametrize("out_dim", [0, 1])
def test_vmap_sees_one_example(in_dim: int, out_dim: int):
    td = TensorDict({"a": torch.randn(3, 4), "b": {"c": torch.randn(3, 4)}}, [3, 4])
    seen = []

    def fn(x: TensorDict) -> TensorDict:
        seen.append((x.batch_size, x["b"].batch_size))
        return x * 2

    out = torch.vmap(fn, in_dim, out_dim)(td)
    d = in_dim % 2
    assert seen == [(torch.Size([[3, 4][1 - d]]),) * 2]
    want = pytree.tree_map(lambda x: (x * 2).movedim(d, out_dim), td)
    the_same(out, want)


def test_vmap_with_in_dims_and_out_dims_built_by_tree_map():
    td = TensorDict({"a": torch.randn(3, 4, 2), "b": {"c": torch.randn(3, 4)}}, [3, 4])
    dims = pytree.tree_map(lambda _: 1, td)
    assert torch.equal(torch.vmap(lambda x: x["a"].sum(), (dims,))(td), td["a"].sum((0, 2)))
    mixed = pytree.tree_map(lambda x: 1 if x.ndim == 3 else None, td)
    out = torch.vmap(lambda x: x["a"] + x["b", "c"].sum(), (mixed,))(td)
    assert torch.equal(out, (td["a"] + td["b", "c"].sum()).movedim(1, 0))
    moved = torch.vmap(lambda x: x * 2, 0, pytree.tree_map(lambda _: 1, td))(td)
    the_same(moved, pytree.tree_map(lambda x: (x * 2).transpose(0, 1), td))


def test_vmap_and_indexing_keep_extra_batch_dims():
    td = EXAMPLES["td, extra dims"](3)
    sizes = []

    def fn(x: TensorDict) -> TensorDict:
        sizes.append((x.batch_size, x["p"].batch_size))
        return x + 1

    out = torch.vmap(fn)(td)
    assert sizes == [(torch.Size([]), torch.Size([4]))]
    the_same(out, td + 1)
    assert out["p"].batch_size == (3, 4)
    assert torch.vmap(lambda x: x["p"], out_dims=1)(td).batch_size == (4, 3)
    assert torch.vmap(torch.vmap(lambda x: x * 2))(td["p"]).batch_size == (3, 4)


def test_grad_takes_containers():
    td = EXAMPLES["td, extra dims"](3)
    the_same(torch.func.grad(lambda td: (td["p", "q"] ** 2).sum())(td), td * 2)


# -- export


class Model(torch.nn.Module):
    def forward(self, td: TensorDict, x: NestedTensor) -> tuple[TensorDict, NestedTensor]:
        return td.set("twice", td["a"] * 2), x.relu() + 1


def test_export_save_and_load(tmp_path: Any):
    args = (TensorDict({"a": torch.randn(2, 3)}, [2]), tdc.pack([torch.randn(n, 3) for n in (2, 4)]))
    program = torch.export.export(Model(), args)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    td, x = loaded(*args)
    want_td, want_x = Model()(*args)
    the_same(td, want_td)
    the_same(x, want_x)
