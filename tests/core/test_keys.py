"""Key paths: one form for each, the empty str among them, and what graphs know of them."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import pytest
import torch

from tdc import KeyPathError, Static, StructureError, TensorDict
from tdc.core.keys import parts, path_of, unravel_key
from tdc.optim import adamw, sgd
from tdc.tensordict.paths import (
    ancestors,
    below,
    gathered,
    join,
    replaced,
    run_position,
    span,
    subtable,
    subtable_traced,
    top_keys,
    within,
)

TABLE = {"a": 1, ("b", "c"): 2, ("b", "d", "e"): 3, "": 4, ("", "x"): 5, "b2": 6}


@pytest.mark.parametrize("key", ["a", "", ("a",), ("a", "b"), (("a", "b"), "c"), ((("a",),),), ("", "")])
def test_each_key_has_one_form(key: Any):
    path = unravel_key(key)
    assert unravel_key(path) == path == path_of(parts(path))
    assert isinstance(path, str) or len(path) > 1
    assert all(within(path, head) and not within(head, path) for head in ancestors(path))
    assert within(path, ())
    assert join((), path) == join(path, ()) == path


@pytest.mark.parametrize("node", ["b", "", ("b", "d"), "a", ()])
def test_what_is_below_a_node(node: Any):
    wanted = {p: x for p, x in TABLE.items() if p != node and parts(p)[: len(parts(node))] == parts(node)}
    assert below(TABLE, node) == wanted
    if node != ():
        assert (
            subtable(TABLE, node)
            == subtable_traced(TABLE, node)
            == {path_of(parts(p)[len(parts(node)) :]): x for p, x in wanted.items()}
        )


def test_entries_that_follow_one_another_are_taken_at_once():
    paths = list(TABLE)
    assert span(paths, "b") == (1, 2, False)
    assert span(["a", ("b", "c"), ("b", "d")], "b") == (1, 2, True)
    assert span(["a", "b"], ()) == (0, 2, False)  # a str is no tuple of its letters
    assert span([*paths, ("b", "z")], "b") == (-1, 0, False)
    assert run_position(paths, ["c", ("d", "e")], "b") == 1
    assert run_position(paths, ["d", "c"], "b") == -1
    assert gathered(TABLE, ["c", ("d", "e")], "b") == [2, 3]
    assert gathered(TABLE, ["b2", "a"]) == [6, 1]
    assert gathered(TABLE, []) == []
    assert list(replaced(TABLE, ["a", "b2"], [7, 8]).items()) == [*{**TABLE, "a": 7, "b2": 8}.items()]
    assert replaced(TABLE, ["c", ("d", "e")], [7, 8], "b") == {**TABLE, ("b", "c"): 7, ("b", "d", "e"): 8}
    assert top_keys([*TABLE, ()]) == ("a", "b", "", "b2")


def test_the_empty_str_is_a_key():
    td = TensorDict({"": torch.ones(2), "n": {"": torch.zeros(2), "x": {"": torch.ones(2)}}}, [2])
    assert td[""].sum() == 2
    assert td["n", ""].sum() == 0
    assert td["n"]["x"][""].sum() == 2
    assert td.keys() == ("", "n")
    assert td["n"].keys() == ("", "x")
    assert td.delete("").set(("", ""), torch.ones(2)).keys(True, True) == (("n", ""), ("n", "x", ""), ("", ""))
    assert TensorDict({"": {"": torch.ones(2)}}, [2]).to_dict().keys() == {""}
    assert td.select("").keys() == ("",)
    assert td.exclude("n").keys() == ("",)


def test_keys_may_be_a_kind_of_str():
    class Name(StrEnum):
        X = "x"
        Y = "y"

    td = TensorDict({Name.X: torch.ones(2), (Name.Y, Name.X): torch.zeros(2)}, [2])
    assert td["x"].sum() == 2
    assert td["y", "x"].sum() == 0
    assert td[Name.Y][Name.X].sum() == 0
    assert td.keys() == ("x", "y")


def test_a_named_tuple_is_a_tuple():
    key = namedtuple("Key", "x y")("b", "c")
    td = TensorDict({key: torch.ones(2), "b": {"d": torch.zeros(2)}}, [2])
    assert [type(k) for k in td.keys(True, True)] == [tuple, tuple]
    assert td.set(key._replace(y="z"), torch.ones(2))["b"].keys() == ("c", "d", "z")
    assert td.select(key)["b"].keys() == ("c",)


@pytest.mark.parametrize("order", [["p.a", "p.b.c", "q", "p.b.d"], ["q", "p.a", "p.b.c", "p.b.d"]])
def test_inner_nodes_in_a_graph(order: list[str]):
    td = TensorDict({tuple(k.split(".")): torch.full((2,), float(i)) for i, k in enumerate(order)}, [2])

    def fn(td: TensorDict) -> dict[Any, torch.Tensor]:
        inner = td["p"]
        out = {k: inner[k] + 1 for k in tuple(inner.keys()) if type(k) is str and k != "b"}
        return out | {("b", k): x * 2 for k, x in td["p", "b"].items()}

    got = torch.compile(fn, fullgraph=True, backend="eager")(td)
    want = fn(td)
    assert got.keys() == want.keys()
    assert all([torch.equal(got[k], x) for k, x in want.items()])


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("how", ["one dtype", "two dtypes", "another order", "some gradients"])
def test_a_step_of_an_optimiser_is_the_same_in_a_graph(how: str):
    dtypes = [torch.float32, torch.float64 if how == "two dtypes" else torch.float32] * 2
    params = TensorDict({("m", f"w{i}"): torch.randn(3, dtype=d) for i, d in enumerate(dtypes)} | {"b": torch.randn(2)})
    grads = params.apply(torch.cos)
    if how == "another order":
        grads = grads.select("b", ("m", "w3"), ("m", "w0"), ("m", "w2"), ("m", "w1"))
    if how == "some gradients":
        grads = grads.exclude("b")
    for opt in (adamw(0.1), sgd(0.1, momentum=0.9)):
        state = opt.init(params if how != "some gradients" else params.exclude("b"))
        step = torch.compile(opt.update, fullgraph=True, backend="aot_eager")
        eager, graph = opt.update(grads, state, params), step(grads, state, params)
        for x, y in zip(eager, graph, strict=True):
            assert x.keys(True) == y.keys(True)
            torch.testing.assert_close(x.to_dict(), y.to_dict())
        assert eager[0].keys(True) == params.keys(True)


def test_a_state_without_a_step_is_named():
    params = TensorDict({"w": torch.ones(2)})
    with pytest.raises(StructureError, match="a state with keys mean, square, step"):
        adamw().update(params, params, params)


ENTRIES: dict[str, Any] = {
    "leaf": torch.zeros(3), "static": Static(1), "node": {"t": torch.ones(3)}, "node of a static": {"t": Static(2)},
    "other node": {"u": torch.ones(3)},
}  # fmt: skip


@pytest.mark.parametrize("first", ENTRIES)
@pytest.mark.parametrize("second", ENTRIES)
def test_a_tensordict_given_twice_is_refused_as_the_mapping_of_its_entries(first: str, second: str):
    def outcome(make: Callable[[Any], Any]) -> Any:
        try:
            found = TensorDict({"n": {"s": ENTRIES[first]}, ("n",): make({"s": ENTRIES[second]})}, [3])
        except KeyPathError as error:
            return str(error)
        return repr(found)

    plain = outcome(lambda entries: entries)
    assert outcome(lambda entries: TensorDict(entries, [3])) == plain
    merges = "node" in first and "node" in second and (first == "other node") != (second == "other node")
    assert plain.startswith("TensorDict(" if merges else "tdc.")
