"""The builder, and copy_ into memory that is already there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tdc
from tdc import TensorDict


def buffer() -> TensorDict:
    return TensorDict({"a": torch.zeros(3, 2), "b": {"c": torch.zeros(3)}}, [3])


class TestCopy:
    @pytest.mark.parametrize("index", [0, -1, slice(1, 3), [2, 0], torch.tensor([True, False, True]), None, ..., (1,)])
    def test_is_what_at_set_gives(self, index: Any):
        td = buffer()
        src = (td if index is None else td[index]) + 5
        want = src if index is None else td.at[index].set(src)
        places = [x.data_ptr() for x in td.values(True, True)]
        assert tdc.copy_(td, src, index) is td
        assert torch.equal(td, want)
        assert [x.data_ptr() for x in td.values(True, True)] == places

    @pytest.mark.parametrize("index", [0, slice(1, 3), [2, 0], torch.tensor([2, 0]), torch.tensor([True, False, True])])
    def test_numbers_of_another_dtype(self, index: Any):
        td = buffer()
        tdc.copy_(td, (td[index] + 5).to(torch.float64), index)
        assert torch.equal(td, buffer().at[index].set(5.0))

    def test_an_ellipsis_stands_for_batch_dims(self):
        td = TensorDict({"x": torch.zeros(2, 3, 3)}, [2, 3])
        tdc.copy_(td, 1.0, (..., 0))
        assert td["x"].sum((0, 2)).tolist() == [6, 0, 0]

    def test_some_keys_and_a_number(self):
        td = buffer()
        tdc.copy_(td, {"b": {"c": torch.tensor(2.0)}}, 1)
        assert td["b", "c"].tolist() == [0, 2, 0]
        tdc.copy_(td, 7)
        assert td["a"].unique().tolist() == [7]

    def test_padded_leaves_are_a_cache(self):
        rows = tdc.pack([torch.ones(2), torch.ones(1)]).to_padded()
        td = TensorDict({"x": rows}, [2])
        tdc.copy_(td, TensorDict({"x": rows * 3}, [2]))
        assert td["x"].data[0].tolist() == [3, 3]

    def test_compiles(self):
        td = buffer()
        fn = torch.compile(lambda b, s: tdc.copy_(b, s, 1)["a"] + 1, fullgraph=True, backend="aot_eager")
        out = fn(td, td[0] + 5)
        assert out.tolist() == [[1, 1], [6, 6], [1, 1]]
        assert td["a"][1].tolist() == [5, 5]

    @pytest.mark.parametrize(("src", "index", "error", "text"), [
        (buffer(), 0, tdc.ShapeError, "expected batch size [], got [3]"),
        ({"z": torch.zeros(3)}, None, tdc.StructureError, "z: not in the destination"),
        ({"a": torch.zeros(3, 5)}, None, tdc.ShapeError, "at a: Tensor float32[3, 5] into Tensor float32[3, 2]"),
        (torch.zeros(3), None, tdc.DtypeError, "a TensorDict, a mapping or a number"),
        ({"a": torch.zeros(2)}, 7, tdc.IndexingError, "td[7]"),
    ])  # fmt: skip
    def test_what_does_not_fit(self, src: Any, index: Any, error: type[Exception], text: str):
        td = buffer()
        with pytest.raises(error) as caught:
            tdc.copy_(td, src, index)
        assert text in str(caught.value)
        assert not td["a"].any()

    def test_packed_leaves_have_no_room(self):
        td = TensorDict({"x": tdc.pack([torch.ones(2), torch.ones(1)])}, [2])
        with pytest.raises(tdc.UnsupportedError, match="tensors or padded batches"):
            tdc.copy_(td, td)


class TestBuilder:
    def test_sets_deletes_and_reads(self):
        td = buffer()
        m = td.mutate()
        m["q", "r"] = m["a"] + 1
        m["b"] = {"z": torch.ones(3)}
        m["s"] = tdc.Static("name")
        m.update({"k": torch.ones(3)})
        del m["a"]
        assert "a" not in m
        assert "k" in m
        assert m["s"] == "name"
        assert m["b"].keys() == ("z",)
        out = m.finish()
        assert set(out.keys(True, True)) == {("q", "r"), ("b", "z"), "k", "s"}
        assert set(td.keys(True, True)) == {"a", ("b", "c")}

    def test_a_tensorclass_stays_one(self):
        class Point(tdc.TensorClass):
            x: torch.Tensor
            name: str = "p"

        m = Point(torch.ones(2), batch_size=[2]).mutate()
        m["name"] = "q"
        m["x"] = torch.zeros(2)
        out = m.finish()
        assert isinstance(out, Point)
        assert out.name == "q"

    def test_compiles(self):
        def build(td: TensorDict) -> TensorDict:
            m = td.mutate()
            for i in range(3):
                m[f"k{i}"] = td["a"] + i
            return m.finish()

        out = torch.compile(build, fullgraph=True, backend="eager")(buffer())
        assert out["k2"].unique().tolist() == [2]

    def test_a_leaf_takes_the_place_of_a_node(self):
        td = tdc.TensorDict({"a": {"b": torch.zeros(3), "c": torch.zeros(3)}, "d": torch.zeros(3)}, [3])
        m = td.mutate()
        m["a"] = torch.ones(3)
        for out in (m.finish(), td.set("a", torch.ones(3)), td.update({"a": torch.ones(3)})):
            assert sorted(out.keys(True)) == ["a", "d"]
            assert out["a"].tolist() == [1, 1, 1]

    @pytest.mark.parametrize(("change", "error", "text"), [
        (lambda m: m.__setitem__("x", torch.ones(2)), tdc.ShapeError, "x: Tensor float32[2]"),
        (lambda m: m.__delitem__("z"), tdc.KeyPathError, "nearest keys"),
        (lambda m: m["z"], tdc.KeyPathError, "'z'"),
        (lambda m: m.__setitem__(("a", "b"), torch.ones(3)), tdc.KeyPathError, "a leaf at 'a'"),
        (lambda m: m.finish(), tdc.ImmutableError, "not finished"),
    ])  # fmt: skip
    def test_what_it_refuses(self, change: Callable[[Any], Any], error: type[Exception], text: str):
        m = buffer().mutate()

        def attempt() -> None:
            change(m)
            m.finish()

        with pytest.raises(error) as caught:
            attempt()
        assert text in str(caught.value)
