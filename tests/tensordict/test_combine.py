"""merge, cat_keys, stack_keys, partition, ravel, group_by: against the same thing done by hand, and wrong calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from texts import Says, Texts, says
from torch import Tensor

import tdc
from tdc import KeyPathError, ObjectArray, ShapeError, Static, TensorDict


@tdc.tensorclass
class Point:
    xy: Tensor
    w: Tensor
    name: str = "here"


def tree() -> TensorDict:
    n = tdc.pack([torch.ones(2, 4), torch.ones(1, 4)])
    entries = {
        "x": torch.arange(6.0).view(2, 3), "y": torch.ones(2, 1), "n": n, "k": n.with_values(torch.zeros(3, 1)),
        "b": {"z": torch.arange(2)}, "s": Static("q"), "e": {}, "o": ObjectArray(["a", "b"]),
    }  # fmt: skip
    return TensorDict(entries, [2])


def compiled(fn: Any) -> Any:
    return torch.compile(fn, fullgraph=True, backend="eager")


def same(a: TensorDict, b: TensorDict) -> None:
    """Two TensorDicts have the very same leaves, statics and nodes."""
    assert a.batch_size == b.batch_size
    assert a._nodes == b._nodes
    assert set(a._leaves) == set(b._leaves)
    assert all([a._leaves[p] is b._leaves[p] for p in a._leaves])


# -- merge


def test_merge_joins_entries():
    a, b = tree().select("x", "b", "s"), TensorDict({"b": {"c": torch.ones(2)}, "d": torch.ones(2)}, [2])
    out = tdc.merge(a, b)
    assert out.keys(True, True) == ("x", ("b", "z"), ("b", "c"), "d", "s")
    assert out["x"] is a["x"]
    assert out["b", "c"] is b["b", "c"]
    same(tdc.merge(a), a)
    same(tdc.merge(a, a, a), a)  # the same leaves and equal static values are no conflict
    assert tdc.merge(a, TensorDict({}, [2])).keys() == a.keys()
    assert tdc.merge(a, b, TensorDict({"f": torch.zeros(2)}, [2])).keys() == ("x", "b", "d", "f", "s")


def test_merge_takes_the_last():
    a, b = tree().select("x", "b", "s"), TensorDict({"x": torch.zeros(2), "s": Static("r")}, [2])
    out = tdc.merge(a, b, on_conflict="last")
    assert out["x"] is b["x"]
    assert out["s"] == "r"
    for other in ({"b": torch.zeros(2)}, {"x": {"deep": torch.zeros(2)}}, {"s": torch.zeros(2)}, {"x": Static(1)}):
        td = TensorDict(other, [2])
        out = tdc.merge(a, td, on_conflict="last")
        key = next(iter(other))
        assert type(out[key]) is type(td[key])
    assert tdc.merge(a, TensorDict({"b": {"w": torch.ones(2)}}, [2]), on_conflict="last").keys(True, True)[1:3] == (
        ("b", "z"),
        ("b", "w"),
    )


def test_merge_by_a_function():
    a = tree().select("x", "b")
    out = tdc.merge(a, a + 1, TensorDict({"x": torch.zeros(2, 3), "new": torch.ones(2)}, [2]), on_conflict=torch.add)
    assert torch.equal(out["x"], 2 * a["x"] + 1)
    assert torch.equal(out["b", "z"], 2 * a["b", "z"] + 1)
    assert "new" in out
    for other in ({"b": torch.zeros(2)}, {"x": {"y": torch.zeros(2)}}):
        with pytest.raises(KeyPathError, match="an inner node"):
            tdc.merge(a, TensorDict(other, [2]), on_conflict=torch.add)


def test_merge_keeps_tensorclasses_with_their_fields():
    p = Point(torch.zeros(2, 2), torch.ones(2), batch_size=[2])
    assert type(tdc.merge(p, p + 1, on_conflict="last")) is Point
    assert type(tdc.merge(p, TensorDict({"more": torch.ones(2)}, [2]))) is TensorDict
    assert isinstance(tdc.merge(TensorDict({"p": p}, [2]), tree())["p"], Point)


# -- entries of one


def test_cat_keys():
    td = tree()
    out = tdc.cat_keys(td, ["y", "x"], ("b", "xy"))
    assert torch.equal(out["b", "xy"], torch.cat([td["y"], td["x"]], -1))
    assert "x" not in out
    assert out["n"] is td["n"]
    assert torch.equal(tdc.cat_keys(td, ["x", "y"], "x", 1)["x"], torch.cat([td["x"], td["y"]], 1))
    assert tdc.cat_keys(td, ["n", "k"], "nk")["nk"].shape == (2, -1, 5)
    assert tdc.cat_keys(td, ["n", "n"], "n", 1)["n"].lengths.tolist() == [4, 2]
    deep = TensorDict({"a": {"x": torch.zeros(2, 3)}, "b": {"y": torch.ones(2, 1)}}, [2])
    assert tdc.cat_keys(deep, [("a", "x"), ("b", "y")], "xy").keys(True) == ("xy", "a", "b")


def test_stack_keys():
    td = TensorDict({"x": torch.zeros(2, 3), "y": torch.ones(2, 3), "r": torch.ones(2)}, [2])
    assert tdc.stack_keys(td, ["x", "y"], "xy")["xy"].shape == (2, 3, 2)
    assert torch.equal(tdc.stack_keys(td, ["x", "y"], "xy", 1)["xy"], torch.stack([td["x"], td["y"]], 1))
    assert tdc.stack_keys(td, ["r", "r"], "r")["r"].shape == (2, 2)
    p = Point(torch.zeros(2), torch.ones(2), batch_size=[2])
    out = tdc.stack_keys(p, ["xy", "w"], "both")
    assert type(out) is TensorDict
    assert out["name"] == "here"


@pytest.mark.parametrize(
    "where",
    [
        *(["x", "b"], [("b", "z")], "b", [], ["s", "e"]),
        *(lambda key, leaf: key == "x", lambda key, leaf: True, lambda key, leaf: False),
    ],
)
def test_partition_and_merge_are_inverse(where: Any):
    td = tree()
    a, b = tdc.partition(td, where)
    assert not set(a._leaves) & set(b._leaves)
    same(tdc.merge(a, b), td)


def test_a_predicate_sees_what_users_see():
    seen: dict[Any, Any] = {}
    tdc.partition(tree(), lambda key, leaf: bool(seen.setdefault(key, leaf) is None))
    assert set(seen) == {"x", "y", "n", "k", ("b", "z"), "o"}
    assert isinstance(seen["o"], ObjectArray)


# -- ravel


@pytest.mark.parametrize("keep_batch", [True, False])
@pytest.mark.parametrize("size", [(), (2,), (2, 3), (0,)])
def test_ravel_and_unravel_are_inverse(size: tuple[int, ...], keep_batch: bool):
    td = TensorDict({"a": torch.randn(*size, 2, 2), "b": {"c": torch.randn(size)}, "s": Static(1), "e": {}}, size)
    td = td.set("deep", TensorDict({"d": torch.randn(*size, 4)}, [*size, 4]))
    flat, unravel = tdc.ravel(td, keep_batch)
    assert flat.shape == ((*size, 9) if keep_batch else (9 * torch.Size(size).numel(),))
    back = unravel(flat)
    assert back.batch_size == td.batch_size
    assert back["deep"].batch_size == (*size, 4)
    assert back.keys() == td.keys()
    assert all([torch.equal(back[k], td[k]) for k in ("a", ("b", "c"), ("deep", "d"))])
    assert back["s"] == 1


def test_ravel_orders_features_as_keys():
    td = TensorDict({"b": torch.tensor([[1, 2], [4, 5]]), "a": torch.tensor([3, 6])}, [2])
    assert tdc.ravel(td)[0].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert tdc.ravel(td, False)[0].tolist() == [1, 2, 4, 5, 3, 6]


def test_ravel_of_several_dtypes():
    td = TensorDict({"x": torch.ones(2, 3), "id": torch.arange(2), "ok": torch.tensor([True, False])}, [2])
    flat, unravel = tdc.ravel(td, dtype=torch.float64)
    assert flat.dtype == torch.float64
    back = unravel(flat)
    assert [x.dtype for x in back.values()] == [x.dtype for x in td.values()]
    assert torch.equal(back["ok"], td["ok"])


def test_ravel_of_nothing_and_of_a_tensorclass():
    assert tdc.ravel(TensorDict({}, [3]))[0].shape == (3, 0)
    assert tdc.ravel(TensorDict({}, [3]))[1](torch.zeros(3, 0)).batch_size == (3,)
    p = Point(torch.zeros(2, 2), torch.ones(2), batch_size=[2])
    flat, unravel = tdc.ravel(p)
    assert type(unravel(flat)) is Point


def test_unravel_takes_other_batch_sizes():
    td = TensorDict({"x": torch.ones(2, 3), "y": torch.zeros(2)}, [2])
    flat, unravel = tdc.ravel(td)
    assert unravel(torch.zeros(7, 4))["x"].shape == (7, 3)
    assert unravel(flat.double())["x"].dtype == torch.float64
    assert torch.func.vmap(lambda row: unravel(row[None])["x"][0])(flat).shape == (2, 3)


def test_ravel_is_differentiable_and_traceable():
    td = TensorDict({"x": torch.randn(2, 3), "b": {"y": torch.randn(2)}}, [2])

    def loss(td: TensorDict) -> Tensor:
        flat, unravel = tdc.ravel(td)
        return (flat**2).sum() + unravel(flat * 3)["b", "y"].sum()

    want = {"x": 2 * td["x"], "y": 2 * td["b", "y"] + 3}
    for fn in (torch.func.grad(loss), compiled(torch.func.grad(loss))):
        grads = fn(td)
        torch.testing.assert_close(grads["x"], want["x"])
        torch.testing.assert_close(grads["b", "y"], want["y"])
    flat, unravel = compiled(tdc.ravel)(td)
    assert torch.equal(unravel(flat)["x"], td["x"])
    flat, unravel = compiled(lambda td: tdc.ravel(td, False))(td)
    assert torch.equal(unravel(flat)["x"], td["x"])


def test_combinations_compile():
    def fn(td: TensorDict) -> Any:
        a, b = tdc.partition(td, lambda key, leaf: leaf.dtype == torch.int64)
        both = tdc.merge(a, b, td + 1, on_conflict=torch.add)
        one = tdc.stack_keys(tdc.cat_keys(both, ["x", "y"], "xy"), ["xy", "xy"], "two")
        return tdc.merge(one, b, on_conflict="last")

    td = tree().exclude("o", "n", "k")
    assert compiled(fn)(td).keys(True) == fn(td).keys(True)
    assert torch.equal(compiled(fn)(td)["two"], fn(td)["two"])


# -- group_by


def test_a_tuple_is_one_key():
    td = TensorDict({"n": {"x": torch.ones(2), "y": torch.ones(2)}, "x": torch.zeros(2)}, [2])
    there, rest = tdc.partition(td, ("n", "x"))
    assert sorted(there.keys(True, True)) == [("n", "x")]
    assert sorted(map(str, rest.keys(True, True))) == sorted(map(str, [("n", "y"), "x"]))


def test_group_by():
    td = TensorDict({"x": torch.arange(4), "o": ObjectArray(list("abca")), "label": torch.tensor([2, 0, 2, 2])}, [4])
    groups = tdc.data.group_by(td, "label")
    assert list(groups) == [2, 0]
    assert groups[2]["x"].tolist() == [0, 2, 3]
    assert {k: v["x"].tolist() for k, v in tdc.data.group_by(td, "o").items()} == {"a": [0, 3], "b": [1], "c": [2]}
    assert sorted(torch.cat(list(groups.values()))["x"].tolist()) == [0, 1, 2, 3]
    assert tdc.data.group_by(td[:0], "label") == {}
    assert list(tdc.data.group_by(td.set(("m", "flag"), td["x"] > 1), ("m", "flag"))) == [False, True]
    ragged = td.set("n", tdc.pack([torch.ones(i) for i in range(4)]))
    assert tdc.data.group_by(ragged, "label")[2]["n"].lengths.tolist() == [0, 2, 3]


# -- what a newcomer types wrong


SAYS: dict[str, Says] = {
    "merge conflicts": (
        lambda: tdc.merge(tree(), TensorDict({"x": 1, "b": 2, "s": Static(1)}, [])[None].expand(2)), """\
KeyPathError
tdc.merge: expected keys that only one has, got 3 that several have
at x: Tensor float32[2, 3] and Tensor int64[2]
at s: Static('q') and Static(1)
at b: an inner node and Tensor int64[2]
hint: on_conflict='last', or a function of both leaves; a.exclude(key) first"""),
    "merge of a dict": (lambda: tdc.merge(tree(), {"z": torch.zeros(2)}), """\
DtypeError
tdc.merge: expected TensorDicts, got 1 others
at operand 1: dict
hint: TensorDict(mapping, batch_size) makes one"""),
    "merge of a list": (lambda: tdc.merge([tree(), tree()]), """\
DtypeError
tdc.merge: expected TensorDicts, got 1 others
at operand 0: list
hint: tdc.merge(*tds)"""),
    "merge of nothing": (lambda: tdc.merge(), """\
DtypeError
tdc.merge: expected TensorDicts, got none
hint: TensorDict(mapping, batch_size) makes one"""),
    "merge word": (lambda: tdc.merge(tree(), tree(), on_conflict="first"), """\
DtypeError
tdc.merge: expected 'error', 'last' or a function, got 'first'
hint: on_conflict='last', or lambda a, b: a + b"""),
    "merge sizes": (lambda: tdc.merge(tree(), tree()[:1]), """\
ShapeError
tdc.merge: expected TensorDicts of one batch size, got [2] and [1]
hint: index or expand one of them"""),
    "keys not in a list": (lambda: tdc.cat_keys(tree(), "x", "y", "xy"), """\
KeyPathError
tdc.cat_keys: expected a list of keys, got 'x'
hint: tdc.cat_keys(td, ['a', 'b'], 'out')"""),
    "cat unknown key": (lambda: tdc.cat_keys(tree(), ["x", "z"], "xz"), """\
KeyPathError
tdc.cat_keys: expected an existing key, got 'z'
hint: nearest keys: 'b.z'"""),
    "cat inner node": (lambda: tdc.cat_keys(tree(), ["x", "b", "s"], "xb"), """\
KeyPathError
tdc.cat_keys: expected keys of leaves, got 2 others
at b: an inner node
at s: Static('q')
hint: name leaves, e.g. ('node', 'leaf')"""),
    "cat batch dim": (lambda: tdc.cat_keys(tree(), ["x", "y"], "xy", 0), """\
ShapeError
tdc.cat_keys: expected a dim in [1, 1], behind the batch dims, got 0
hint: dims are those of the leaf; torch.cat(tds) joins batch dims"""),
    "cat without features": (lambda: tdc.cat_keys(tree(), [("b", "z")], "z"), """\
ShapeError
tdc.cat_keys: expected leaves with features, got none beyond the batch
hint: stack_keys makes one feature of leaves without features"""),
    "cat other kinds": (lambda: tdc.cat_keys(tree(), ["x", "n", ("b", "z")], "xn"), """\
ShapeError
tdc.cat_keys: expected leaves like Tensor float32[2, 3] but for dim 1, got 2 that differ
at n: NestedTensor float32[2, -1, 4]
at b.z: Tensor int64[2]
hint: reshape or convert them first"""),
    "stack other shapes": (lambda: tdc.stack_keys(tree(), ["x", "y"], "xy"), """\
ShapeError
tdc.stack_keys: expected leaves like Tensor float32[2, 3], got 1 that differ
at y: Tensor float32[2, 1]
hint: reshape or convert them first"""),
    "partition unknown key": (lambda: tdc.partition(tree(), ["x", "zz"]), """\
KeyPathError
tdc.partition: expected an existing key, got 'zz'
hint: nearest keys: 'b', 'b.z', 'e', 'k', 'n'"""),
    "ravel dtypes": (lambda: tdc.ravel(tree().select("x", "b")), """\
DtypeError
tdc.ravel: expected leaves of one dtype, got 2 dtypes
at x: Tensor float32[2, 3]
at b.z: Tensor int64[2]
hint: dtype=torch.float32, or tdc.partition first"""),
    "ravel ragged": (lambda: tdc.ravel(tree()), """\
DtypeError
tdc.ravel: expected leaves that are all tensors, got 3 others
at n: NestedTensor float32[2, -1, 4]
at k: NestedTensor float32[2, -1, 1]
at o: ObjectArray [2]
hint: tdc.partition(td, keys) first, or x.to_padded().data of ragged leaves"""),
    "unravel other size": (lambda: tdc.ravel(tree().select("x", "y"))[1](torch.zeros(2, 5)), """\
ShapeError
tdc.unravel: expected a tensor of shape [..., 4] with 2 dims, got Tensor float32[2, 5]
hint: the tensor of tdc.ravel, or one of its shape"""),
    "partition of none": (lambda: tdc.partition(tree(), None), """\
KeyPathError
tdc.partition: expected a list of keys or a function, got NoneType
hint: tdc.partition(td, ['a', 'b']), or a function of key and leaf"""),
    "ravel to a name": (lambda: tdc.ravel(tree(), dtype="float32"), """\
DtypeError
tdc.ravel: expected a torch.dtype, got 'float32'
hint: dtype=torch.float32"""),
    "group by features": (lambda: tdc.data.group_by(tree(), "x"), """\
ShapeError
tdc.data.group_by: expected a leaf with one value for each example, got Tensor float32[2, 3]
hint: td.flatten() for several batch dims; stack features to one code first"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_group_by_lists(self):
        td = TensorDict({"tags": tdc.ObjectArray([["a"], ("b", [])])}, [2])
        self.says(lambda: tdc.data.group_by(td, "tags"), """\
DtypeError
tdc.data.group_by: expected values that can be keys of a dict, got 2 others
at example 0: list
at example 1: tuple
hint: group by a leaf of codes, or by tuples instead of lists""")  # fmt: skip


def test_errors_of_torch_do_not_pass():
    with pytest.raises(ShapeError, match=r"tdc\.stack_keys"):
        tdc.stack_keys(tree(), ["x", "x"], "xx", 0)
    with pytest.raises(ShapeError, match=r"tdc\.cat_keys"):
        tdc.cat_keys(tree(), ["x", "y"], "xy", 7)


@pytest.mark.parametrize("join", [tdc.cat_keys, tdc.stack_keys])
def test_joined_keys_are_one_graph_for_all_batch_sizes(join: Any):
    tds = [TensorDict({"a": torch.randn(n, 3), "b": torch.randn(n, 3)}, [n]) for n in (4, 5, 6)]
    tdc.testing.assert_one_graph(lambda td: join(td, ["a", "b"], "c", dim=-1), *tds, backend="eager", dynamic=True)
