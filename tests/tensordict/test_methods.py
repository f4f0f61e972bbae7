"""What a TensorDict tells of its leaves, arguments of `keys`, `apply` and `to`, keys that are nearly arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from texts import Says, T, Texts, ragged, says
from torch import Tensor

import tdc
from tdc import ObjectArray, Static, TensorDict


class Step(tdc.TensorClass):
    obs: Tensor
    depth: Tensor


def tree() -> Any:
    step = Step(torch.ones(3), torch.zeros(3), batch_size=[3])
    source = {"z": torch.ones(3), "b": {"c": torch.ones(3, 2), "e": {}}, "s": step, "k": Static("q")}
    return TensorDict(source, [3])


def compiled(fn: Any) -> Any:
    return torch.compile(fn, backend="eager", fullgraph=True)


def test_facts():
    td = tree()
    assert (td.batch_dims, td.dtype, td.depth, td.is_empty()) == (1, torch.float32, 1, False)
    assert (td.is_cpu, td.is_cuda, td.is_meta) == (True, False, False)
    assert td.to("meta").is_meta
    assert td.set("i", torch.ones(3).int()).dtype is None
    assert td["s"].depth.tolist() == [0, 0, 0]  # a field hides the name


def test_facts_without_leaves():
    empty: Any = TensorDict({"a": {"b": {}}}, [2])
    placed: Any = TensorDict({}, device="cpu")
    assert (empty.is_empty(), empty.depth, empty.dtype) == (True, 1, None)
    assert (empty.is_cpu, placed.is_cpu, placed.depth) == (False, True, 0)


def test_facts_of_ragged_leaves_and_objects():
    td: Any = TensorDict({"x": ragged(), "n": ObjectArray(["a", "b", "c"])}, [3])
    assert td.is_cpu
    assert td.select("x").dtype == torch.float32
    assert [torch.is_floating_point(part) for part in (td.select("x"), td)] == [True, False]


def test_questions_of_torch():
    td: Any = tree()
    x: Any = ragged()
    assert torch.is_floating_point(td) is td.is_floating_point() is True
    assert not torch.is_floating_point(td.set("i", torch.ones(3).int()))
    assert (torch.numel(td), torch.numel(x), torch.numel(x.to_padded()), x.to_padded().numel()) == (3, 20, 36, 36)
    assert torch.is_same_size(x, x + 1)
    other: Any = ragged(3, 2, 0)
    assert not torch.is_same_size(x, other)


def test_keys_in_order():
    td = tree()
    assert td.keys(sort=True) == ("b", "k", "s", "z")
    assert td.keys(True, True, sort=True) == (("b", "c"), "k", ("s", "depth"), ("s", "obs"), "z")
    assert [k for k, _ in td.items(sort=True)] == list(td.keys(sort=True))
    assert compiled(lambda td: td.keys(True, True, sort=True))(td) == td.keys(True, True, sort=True)


def test_keys_of_chosen_leaves():
    td = tree()
    assert td.keys(True, True, is_leaf=lambda cls: cls is Step) == ("s",)
    assert td.keys(True, True, is_leaf=lambda cls: cls is not TensorDict) == ("z", ("b", "c"), "s", "k")
    assert td.keys(True, is_leaf=lambda cls: cls is Step) == ("z", "b", ("b", "c"), "s", ("b", "e"), "k")
    assert td.keys(False, True, is_leaf=lambda cls: issubclass(cls, Tensor)) == ("z",)
    assert td.keys(True, True, is_leaf=lambda cls: cls is Static) == ("k",)
    values = td.values(True, True, is_leaf=lambda cls: cls is Step)
    assert [type(v) for v in values] == [Step]


def test_apply_takes_nodes_whole():
    td = tree()
    out = td.apply(lambda x: x.obs if isinstance(x, Step) else x * 2, is_leaf=lambda cls: cls is Step)
    assert isinstance(out["s"], Tensor)
    assert torch.equal(out["z"], td["z"] * 2)
    assert out["k"] == "q"
    assert out["b"].keys() == ("c", "e")
    gone = td.apply(lambda x: None if isinstance(x, TensorDict) else x, is_leaf=lambda cls: True)
    assert gone.keys() == ("z", "k")
    same = td.apply(lambda x: x, is_leaf=lambda cls: cls is Step)
    assert isinstance(same["s"], Step)
    assert set(same.keys(True)) == set(td.keys(True))
    first = td.apply(lambda x: x[0], is_leaf=lambda cls: cls is Step, batch_size=[])
    assert (first.batch_size, first["s"].batch_size) == ((), ())


def test_apply_may_make_nodes_of_leaves():
    td: Any = TensorDict({"a": torch.ones(3), "n": {"b": torch.ones(3), "e": {}}, "s": Static("q")}, [3])
    out = td.apply(lambda x: TensorDict({"x": x, "y": x + 1}, [3]))
    assert out.keys(True, True) == (("a", "x"), ("a", "y"), ("n", "b", "x"), ("n", "b", "y"), "s")
    assert isinstance(out["a"], TensorDict)
    assert out["n", "e"].is_empty()
    assert td.apply_with_path(lambda path, x: None if path == "a" else x).keys(True) == (
        "n", ("n", "b"), ("n", "e"), "s",
    )  # fmt: skip


def test_apply_with_a_default():
    td, other = tree(), TensorDict({"z": torch.ones(3), "q": torch.ones(3)}, [3])
    add = lambda x, y: x if y is None else x + y  # noqa: E731
    for run in (add, compiled(add)):
        out = td.apply(run, other, default=None)
        assert (out["z"].tolist(), out["b", "c"].tolist()) == ([2.0] * 3, td["b", "c"].tolist())
        assert "q" not in out
    whole = compiled(lambda td, other: td.apply(torch.add, other, default=1.0))(td, other)
    assert torch.equal(whole["s"].obs, td["s"].obs + 1)
    paths = td.apply_with_path(lambda path, x, y: x * len(path) if y is None else y, other, default=None)
    assert paths["b", "c"].tolist() == [[2.0, 2.0]] * 3


def test_to_where():
    td: Any = TensorDict({"x": torch.ones(3), "n": {"i": torch.arange(3)}}, [3])
    half = td.to(torch.float16, where=torch.is_floating_point)
    assert (half["x"].dtype, half["n", "i"].dtype) == (torch.float16, torch.int64)
    moved = td.to("meta", where=lambda leaf: leaf.dtype == torch.int64)
    assert (moved["x"].is_meta, moved["n", "i"].is_meta, moved.device) == (False, True, None)
    assert compiled(lambda td: td.to(torch.float16, where=torch.is_floating_point))(td)["x"].dtype == torch.float16


def test_flatten_keys_and_the_separator():
    flat = TensorDict({"a.b": torch.ones(1), "s": Static(1)})
    assert flat.flatten_keys(".") is flat or flat.flatten_keys(".").keys() == flat.keys()
    nested = TensorDict({"a.b": torch.ones(1), "n": {"c": torch.ones(1)}})
    back = nested.flatten_keys("/").unflatten_keys("/")
    assert back.keys(True, True) == nested.keys(True, True)


def test_keywords_are_keys():
    assert TensorDict(a=torch.ones(3), batch_size=[3]).keys() == ("a",)
    assert TensorDict(batch=[1, 2], size=3, batch_mean=[0.5]).keys() == ("batch", "size", "batch_mean")
    assert TensorDict(batchsize=torch.ones(3)).keys() == ("batchsize",)


SAYS: dict[str, Says] = {
    "a keyword that is nearly an argument": (lambda: TensorDict({"x": torch.ones(3)}, batchsize=[3]), """\
KeyPathError
tdc.TensorDict: expected batch_size, device, or tensors by key, got batchsize=
hint: batch_size=..., or TensorDict({'batchsize': ...}) for a key of this name"""),
    "a keyword that is nearly an argument, 2": (lambda: TensorDict({"x": torch.ones(3)}, [3], devices="cpu"), """\
KeyPathError
tdc.TensorDict: expected batch_size, device, or tensors by key, got devices=
hint: device=..., or TensorDict({'devices': ...}) for a key of this name"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_keys_that_hold_the_separator(self):
        td = TensorDict({"a.b": T(1), "n": {"c": T(1), "d.e": T(2)}})
        self.says(lambda: td.flatten_keys(), """\
KeyPathError
tdc.flatten_keys: expected keys that split at '.' as they are joined, got 2 others
at 'a.b'
at 'n.d.e'
hint: choose another separator, or td.rename_keys({old: new}) first""")  # fmt: skip

    def test_a_keyword_that_is_a_setting(self):
        self.says(lambda: TensorDict({"x": torch.ones(3)}, lock=True), """\
KeyPathError
tdc.TensorDict: expected batch_size, device, or tensors by key, got lock=
hint: TensorDict({'lock': ...}) for a key of this name""")  # fmt: skip
        for value in (None, False, "wrap"):
            with pytest.raises(tdc.KeyPathError, match="by key, got names="):
                TensorDict({"x": torch.ones(3)}, names=value)

    def test_another_without_a_key(self):
        td = TensorDict({"x": T(1), "n": {"c": T(1)}})
        self.says(lambda: td.apply(torch.add, td.exclude("x"), is_leaf=lambda cls: False), """\
KeyPathError
tdc.apply: expected an existing key, got 'x'
hint: nearest keys: 'n', 'n.c'""")  # fmt: skip


@pytest.mark.parametrize("name", ["batchsize", "batch_sizes", "batch_shape", "batch_dims"])
def test_near_misses(name: str):
    with pytest.raises(tdc.KeyPathError, match=f"got {name}="):
        TensorDict({"x": torch.ones(3)}, **{name: [3]})
