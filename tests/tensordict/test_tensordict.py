"""TensorDict: construction, keys, updates, shapes and arithmetic, each against the same thing done by hand."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tdc import KeyPathError, ShapeError, Static, StructureError, TensorDict


def tree() -> TensorDict:
    """Batch (3, 4), with features, several dtypes and two levels."""
    return TensorDict(
        {
            "a": torch.arange(24.0).view(3, 4, 2),
            "b": {"c": torch.arange(12).view(3, 4), "d": {"e": torch.arange(72.0).view(3, 4, 2, 3) / 7}},
        },
        [3, 4],
    )


def check(td: TensorDict, want: dict[Any, Tensor], size: Any) -> None:
    """`td` holds exactly these leaves, bit for bit, and has this batch size."""
    assert td.batch_size == torch.Size(size)
    assert set(td.keys(True, True)) == set(want)
    for key, leaf in want.items():
        assert td[key].dtype == leaf.dtype
        assert torch.equal(td[key], leaf), key


def each(td: TensorDict, fn: Callable[[Tensor], Tensor]) -> dict[Any, Tensor]:
    """`fn` of every leaf, by key."""
    return {key: fn(td[key]) for key in td.keys(True, True)}


# -- construction


def test_converts_what_the_rfc_converts():
    td = TensorDict(
        {
            "tensor": torch.zeros(3), "from_np": np.zeros((3,)), "from_int": 1, "from_float": 2.5, "from_bool": True,
            "from_list": [[1, 2, 3]], "from_dict": {"a": 1},
        },
        batch_size=[],
    )  # fmt: skip
    dtypes = {key: td[key].dtype for key in td.keys(True, True)}
    assert dtypes == {
        "tensor": torch.float32, "from_np": torch.float64, "from_int": torch.int64, "from_float": torch.float32,
        "from_bool": torch.bool, "from_list": torch.int64, ("from_dict", "a"): torch.int64,
    }  # fmt: skip
    assert td["from_list"].shape == (1, 3)
    assert isinstance(td["from_dict"], TensorDict)


def test_tensors_are_stored_as_they_are():
    x = torch.nn.Parameter(torch.zeros(2))
    assert TensorDict({"x": x}, [2])["x"] is x


@pytest.mark.parametrize("key", ["a", ("a",), (("a",),), ((("a",),),)])
def test_nested_keys_mean_their_path(key: Any):
    td = TensorDict({key: torch.ones(2)}, [2])
    assert td.keys() == ("a",)
    assert td[key] is td["a"] is td.get(key)
    assert key in td


def test_tuple_keys_make_inner_nodes():
    td = TensorDict({("a", ("b", "c")): torch.ones(2), ("a", "d"): torch.zeros(2)}, 2)
    assert td.batch_size == (2,)
    assert td.keys(True) == ("a", ("a", "b"), ("a", "b", "c"), ("a", "d"))
    assert td["a"]["b"]["c"] is td["a", "b", "c"] is td[("a", "b"), "c"]


def test_inner_nodes_may_have_more_batch_dims():
    inner = TensorDict({"x": torch.zeros(3, 4, 5), "deep": TensorDict({"y": torch.zeros(3, 4, 2)}, [3, 4, 2])}, [3, 4])
    td = TensorDict({"inner": inner, "z": torch.zeros(3)}, [3])
    assert td["inner"].batch_size == (3, 4)
    assert td["inner", "deep"].batch_size == (3, 4, 2)
    assert td[0]["inner"].batch_size == (4,)
    assert td[None, 1:]["inner", "deep"].batch_size == (1, 2, 4, 2)
    assert td[torch.tensor([True, False, True])]["inner"].batch_size == (2, 4)
    assert td.set("w", torch.zeros(3))["inner"].batch_size == (3, 4)
    for wrong in (torch.zeros(3), torch.zeros(3, 7)):
        with pytest.raises(ShapeError, match="share 2 batch dims below 'inner'"):
            td.set(("inner", "w"), wrong)


def test_device_moves_every_leaf():
    td = TensorDict({"a": torch.zeros(2), "b": {"c": np.zeros(2)}}, [2], device="meta")
    assert td.device == torch.device("meta")
    assert [leaf.device.type for leaf in td.values(True, True)] == ["meta", "meta"]
    assert td.set("new", torch.ones(2))["new"].is_meta


def test_an_empty_one_keeps_its_sizes():
    td = TensorDict(batch_size=[3, 2])
    assert td.keys() == ()
    assert td[0].batch_size == (2,)
    assert td[None].batch_size == (1, 3, 2)
    assert TensorDict({"a": {}}, [2]).keys(True) == ("a",)
    assert TensorDict({"a": {}}, [2])["a"].batch_size == (2,)


# -- keys, values, items


def test_keys_values_items():
    td = tree()
    assert td.keys() == ("a", "b")
    assert td.keys(leaves_only=True) == ("a",)
    assert td.keys(include_nested=True) == ("a", "b", ("b", "c"), ("b", "d"), ("b", "d", "e"))
    assert td.keys(True, True) == ("a", ("b", "c"), ("b", "d", "e"))
    for flags in [(False, False), (True, False), (False, True), (True, True)]:
        assert tuple(k for k, _ in td.items(*flags)) == td.keys(*flags)
        assert all(isinstance(v, (Tensor, TensorDict)) for v in td.values(*flags))
    assert [v is td[k] for k, v in td.items(True, True)] == [True] * 3


def test_insertion_order_is_kept():
    td = TensorDict({"z": 1, "a": 2, "m": {"z": 1, "a": 2}})
    assert td.keys(True, True) == ("z", "a", ("m", "z"), ("m", "a"))
    assert td.set("a", torch.tensor(5)).keys(True, True) == td.keys(True, True)


def test_to_dict_is_the_inverse_of_construction():
    td = TensorDict({"a": 1, "b": {"c": 2, "empty": {}}})
    plain = td.to_dict()
    assert plain == {"a": td["a"], "b": {"c": td["b", "c"], "empty": {}}}
    assert TensorDict(plain).keys(True) == td.keys(True)


def test_contains_get_and_default():
    td = tree()
    assert "a" in td
    assert ("b", "d") in td
    assert ("b", ("d", "e")) in td
    assert "c" not in td
    assert td.get("c", None) is None
    assert td.get(("a", "x"), 3) == 3
    assert td.get("a", None) is td["a"]
    with pytest.raises(KeyError, match=r"tdc\.get: expected an existing key, got 'c'"):
        td.get("c")


# -- updates


def test_set_shares_leaves_and_leaves_the_source_alone():
    td = tree()
    before = td.items(True, True)
    new = td.set("a", torch.zeros(3, 4)).set(("b", "new", "deep"), torch.ones(3, 4, 1))
    assert new["b", "c"] is td["b", "c"]
    assert new["a"].shape == (3, 4)
    assert new.keys(True, True) == ("a", ("b", "c"), ("b", "d", "e"), ("b", "new", "deep"))
    assert [k for k, _ in before] == list(td.keys(True, True))
    assert all(v is td[k] for k, v in before)


def test_set_replaces_a_node_by_a_leaf_and_back():
    td = tree().set("b", torch.zeros(3, 4))
    assert td.keys(True) == ("a", "b")
    with pytest.raises(KeyPathError, match="delete 'b' first"):
        td.set(("b", "c"), torch.zeros(3, 4))
    assert td.delete("b").set(("b", "c"), torch.zeros(3, 4)).keys(True) == ("a", "b", ("b", "c"))


def test_set_replaces_a_whole_node():
    value = {"x": torch.zeros(3, 4)}
    for node in (value, TensorDict(value, [3, 4])):
        assert tree().set("b", node).keys(True) == ("a", "b", ("b", "x"))


def test_update_merges_and_replace_takes_keywords():
    td = tree()
    other = torch.ones(3, 4)
    for new in (td.update({"b": {"c": other}}), td.update(TensorDict({"b": {"c": other}}, [3, 4]))):
        assert new["b", "c"] is other
        assert new["b", "d", "e"] is td["b", "d", "e"]
    assert td.update({("b", "x"): other})["b", "x"] is other
    assert td.replace(a=other)["a"] is other
    assert td.update({}).keys(True) == td.keys(True)
    with pytest.raises(ShapeError, match=r"at a: .*\n.*at b\.x"):
        td.update({"a": torch.zeros(2), "b": {"x": torch.zeros(3)}})


def test_update_puts_a_node_in_place_of_a_leaf():
    x = torch.ones(3, 4)
    td = TensorDict({"a": x, "b": {"c": x}, "s": Static("text")}, [3, 4])
    for key in ("a", ("b", "c"), "s"):
        for value in ({"x": {"y": x}}, TensorDict({"x": {"y": x}}, [3, 4]), {"x": TensorDict({"y": x}, [3, 4])}):
            new = td.update({key: value})
            assert new[key].keys(True, True) == (("x", "y"),)
            assert set(new.keys()) == {"a", "b", "s"}
            assert td.update(TensorDict({key: value}, [3, 4])).keys(True) == new.keys(True)
    assert td.update({"a": {}})["a"].keys() == ()
    with pytest.raises(KeyPathError, match="got a leaf at 'a'"):
        td.update({("a", "x"): x})  # which goes through the leaf, as with set


def test_delete_pop_select_exclude():
    td = tree()
    assert td.delete("a", ("b", "d")).keys(True) == ("b", ("b", "c"))
    value, rest = td.pop("a")
    assert value is td["a"]
    assert rest.keys() == ("b",)
    assert td.pop("zz", 7) == (7, td)
    assert td.select(("b", "c")).keys(True) == ("b", ("b", "c"))
    assert td.select("b").keys(True) == ("b", ("b", "c"), ("b", "d"), ("b", "d", "e"))
    assert td.select("a", "zz", strict=False).keys() == ("a",)
    assert td.exclude("b", "zz").keys(True) == ("a",)
    for wrong in (td.delete, td.select, td.pop):
        with pytest.raises(KeyPathError, match="nearest keys: "):
            wrong("zz")


def test_flatten_and_unflatten_keys():
    td = tree()
    flat = td.flatten_keys("/")
    assert flat.keys(True) == ("a", "b/c", "b/d/e")
    assert flat["b/d/e"] is td["b", "d", "e"]
    assert flat.unflatten_keys("/").keys(True) == td.keys(True)
    linear = torch.nn.Sequential(torch.nn.Linear(2, 3)).state_dict()
    assert TensorDict(linear).unflatten_keys().keys(True) == ("0", ("0", "weight"), ("0", "bias"))


@pytest.mark.parametrize("source", [{"a.b": 1, "a": {"c": 2}}, {"a": {"c": 2}, "a.b": 1}])
def test_unflatten_keys_merges(source: dict[str, Any]):
    assert set(TensorDict(source).unflatten_keys().keys(True, True)) == {("a", "b"), ("a", "c")}


@pytest.mark.parametrize("source", [{"a.b": 1, "a": 2}, {"a": 2, "a.b": 1}])
def test_unflatten_keys_loses_nothing(source: dict[str, Any]):
    with pytest.raises(KeyPathError):
        TensorDict(source).unflatten_keys()


@pytest.mark.parametrize(
    ("key", "inner", "separator", "comes_back"),
    [("a_", "b", "__", False), ("xa", "b", "aa", False), ("a", "_b", "__", True), ("a", ".b", "..", True)],
)
def test_keys_that_hold_a_part_of_the_separator(key: str, inner: str, separator: str, comes_back: bool):
    """Joined, 'a_' and 'b' are 'a___b', which splits into 'a' and '_b'."""
    td = TensorDict({key: {inner: torch.ones(2)}}, [2])
    if comes_back:
        assert td.flatten_keys(separator).unflatten_keys(separator).keys(True, True) == ((key, inner),)
    else:
        with pytest.raises(KeyPathError, match="choose another separator"):
            td.flatten_keys(separator)
    beside = td.set(f"x{separator}y", torch.ones(2)).unflatten_keys(separator)
    assert set(beside.keys(True, True)) == {(key, inner), ("x", "y")}


# -- immutability


def test_inplace_operators_rebind():
    td = tree()
    other = td
    other += 1
    assert other is not td
    check(other, each(tree(), lambda x: x + 1), [3, 4])
    check(td, each(tree(), lambda x: x), [3, 4])


# -- apply and to


def test_apply():
    td = tree()
    check(td.apply(lambda x: x * 2), each(td, lambda x: x * 2), [3, 4])
    check(td.apply(lambda x, y, z: x + y - z, td, td + 1), each(td, lambda x: x + x - (x + 1)), [3, 4])
    check(td.apply(torch.sum, batch_size=[]), each(td, torch.sum), [])
    check(td.apply(lambda x: x[0], batch_size=[4]), each(td, lambda x: x[0]), [4])
    assert td.apply(lambda x: x if x.is_floating_point() else None).keys(True, True) == ("a", ("b", "d", "e"))
    with pytest.raises(ShapeError, match="pass batch_size= where fn changes it"):
        td.apply(torch.sum)
    with pytest.raises(StructureError, match=r"at a: only in operand 0"):
        td.apply(torch.add, td.delete("a"))


def test_apply_meets_equal_keys_in_any_order():
    a = TensorDict({"x": torch.zeros(2), "y": torch.ones(2)}, [2])
    b = TensorDict({"y": torch.full([2], 10.0), "x": torch.full([2], 5.0)}, [2])
    check(a.apply(torch.add, b), {"x": torch.full([2], 5.0), "y": torch.full([2], 11.0)}, [2])
    check(a + b, {"x": torch.full([2], 5.0), "y": torch.full([2], 11.0)}, [2])


def test_to():
    td = tree()
    check(td.to(torch.float64), each(td, lambda x: x.double()), [3, 4])
    assert td.to(torch.float64).device is None
    assert td.to("meta").device == torch.device("meta")
    assert td.to(device="meta")["b", "c"].is_meta
    assert td.to(TensorDict(device="meta"))["a"].is_meta
    assert td.to(torch.zeros(1, dtype=torch.int8))["a"].dtype == torch.int8
    assert td.to("cpu").to(torch.float16).device == torch.device("cpu")


# -- shapes, joining, splitting


def test_joining_needs_equal_keys_and_sizes():
    td = tree()
    with pytest.raises(StructureError, match="only in operand 1"):
        torch.stack([td.delete("a"), td])
    with pytest.raises(ShapeError, match=r"\[3, 4\] and \[2, 4\]"):
        torch.stack([td, td[:2]])
    with pytest.raises(ShapeError, match=r"operand 1: \[3, 3\]"):
        torch.cat([td, td[:, :3]])
    assert torch.cat([td, td[:2]]).batch_size == (5, 4)


# -- arithmetic


@pytest.mark.parametrize("shape", [(), (4,), (1,), (3, 1), (1, 4), (3, 4)])
def test_a_tensor_broadcasts_over_batch_dims_only(shape: tuple[int, ...]):
    td, x = tree(), torch.randn(shape)
    right = {k: td[k] * x.expand(3, 4).reshape(3, 4, *[1] * (td[k].ndim - 2)) for k in td.keys(True, True)}
    check(td * x, right, [3, 4])
    check(x * td, right, [3, 4])


@pytest.mark.parametrize("shape", [(3,), (2,), (3, 4, 2), (2, 3, 4), (4, 3)])
def test_a_tensor_over_features_is_an_error(shape: tuple[int, ...]):
    with pytest.raises(ShapeError, match=r"broadcasts against batch_size \[3, 4\]"):
        tree() + torch.ones(shape)


# -- copies and lifetime


def test_pickle_copy_deepcopy():
    td = tree().to("cpu")
    for other in (pickle.loads(pickle.dumps(td)), copy.deepcopy(td)):
        check(other, each(td, lambda x: x), [3, 4])
        assert other.device == td.device
        assert other["a"] is not td["a"]
    assert copy.copy(td) is td


def test_torch_save_and_safe_load(tmp_path: Any):
    torch.save(tree(), tmp_path / "td.pt")
    check(torch.load(tmp_path / "td.pt", weights_only=True), each(tree(), lambda x: x), [3, 4])


def test_rows_are_counted_and_walked():
    td = tree()
    assert len(td) == 3
    assert [row.batch_size for row in td] == [torch.Size([4])] * 3
