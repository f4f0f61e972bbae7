"""Pytrees and state dicts, also those that fit in part, as TensorDicts and back, and what a newcomer types wrong."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from texts import Says, Texts, says
from torch import Tensor, nn
from torch.testing import assert_close

import tdc
from tdc import DtypeError, KeyPathError, ObjectArray, Static, StructureError, TensorDict, from_module
from tdc.interop import load_into


class Point(NamedTuple):
    xy: Tensor
    name: str = "here"


@tdc.tensorclass
class Frame:
    image: Tensor
    name: str = "frame"


def compiled(fn: Any) -> Any:
    return torch.compile(fn, fullgraph=True, backend="eager")


TREES = [
    [torch.zeros(2), {"a": (torch.ones(2), "name")}], (torch.zeros(2), None, 3, []), {"b": torch.zeros(2), "a": {}},
    OrderedDict(z=torch.zeros(2), a=[torch.ones(2)]), defaultdict(list, {"k": [torch.zeros(2)]}),
    Point(torch.zeros(2), "p"), deque([torch.zeros(2), torch.ones(2)]), {0: torch.zeros(2), (1, 2): torch.ones(2)},
    torch.zeros(2), [],
    [tdc.pack([torch.zeros(1), torch.zeros(2)]), TensorDict({"x": {"y": torch.zeros(2)}, "s": Static(1)}, [2])],
    [Frame(torch.zeros(2, 3), batch_size=[2])], [ObjectArray(["a", "b"])], [[[[torch.zeros(2)]]]],
]  # fmt: skip


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_pytrees_go_there_and_back(tree: Any):
    td, spec = tdc.interop.from_pytree(tree, [2])
    assert td.batch_size == (2,)
    back = tdc.interop.to_pytree(td, spec)
    assert type(back) is type(tree)
    here, there = [torch.utils._pytree.tree_flatten(x) for x in (tree, back)]
    assert here[1] == there[1]
    assert all([x is y or x == y for x, y in zip(here[0], there[0], strict=True)])
    assert hash(spec) == hash(tdc.interop.from_pytree(tree, [2])[1])


def test_a_pytree_spec_serves_other_leaves():
    td, spec = tdc.interop.from_pytree([torch.zeros(2, 3), {"n": "s"}], [2])
    back = tdc.interop.to_pytree(td[0] + 1, spec)
    assert back[0].tolist() == [1.0, 1.0, 1.0]
    assert back[1] == {"n": "s"}


def test_pytrees_compile():
    def there_and_back(x: Tensor) -> Any:
        td, spec = tdc.interop.from_pytree({"a": [x, (x + 1,)], "n": "s"}, [2])
        return tdc.interop.to_pytree(td * 2, spec), td, spec

    back, td, spec = compiled(there_and_back)(torch.ones(2))
    assert back["a"][1][0].tolist() == [4.0, 4.0]
    assert back["n"] == "s"
    assert tdc.interop.to_pytree(td, spec)["a"][0].tolist() == [1.0, 1.0]


# -- state dicts


def test_state_dicts_go_there_and_back():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 1, bias=False)))
    state = net.state_dict()
    td = tdc.interop.from_state_dict(state)
    assert td["2", "0", "weight"] is state["2.0.weight"]
    back = tdc.interop.to_state_dict(td)
    assert list(back) == list(state)
    assert all([back[k] is state[k] for k in state])
    net.load_state_dict(tdc.interop.to_state_dict(td * 2))
    assert tdc.interop.from_state_dict({"a.b": torch.zeros(4, 2), "extra": "x", "n": None}, [4])["extra"] == "x"
    assert tdc.interop.to_state_dict(TensorDict()) == {}


def test_state_dicts_compile():
    fn = compiled(lambda sd: tdc.interop.to_state_dict(tdc.interop.from_state_dict(sd) + 1))
    assert list(fn({"b.c": torch.zeros(1), "a": torch.zeros(1)})) == ["b.c", "a"]


# -- what a newcomer types wrong


SAYS: dict[str, Says] = {
    "keys of a pytree that meet": (lambda: tdc.interop.from_pytree({1: torch.zeros(1), "1": torch.zeros(1)}), """\
KeyPathError
tdc.interop.from_pytree: expected dict keys that differ as strings, got 1 that are not
at 1
hint: rename one of them: keys become strings"""),
    "a treespec is no spec": (lambda: tdc.interop.to_pytree(TensorDict(), None), """\
DtypeError
tdc.interop.to_pytree: expected the spec of from_pytree, got NoneType
hint: td, spec = tdc.interop.from_pytree(tree)"""),
    "a module is no state dict": (lambda: tdc.interop.from_state_dict(nn.Linear(1, 1)), """\
DtypeError
tdc.interop.from_state_dict: expected a dict, got Linear
hint: tdc.interop.from_state_dict(module.state_dict())"""),
}  # fmt: skip
test_says = says(SAYS)


class TestTexts(Texts):
    def test_a_pytree_of_other_paths(self):
        td, spec = tdc.interop.from_pytree([torch.zeros(1), torch.zeros(1)])
        self.says(lambda: tdc.interop.to_pytree(td.rename_keys({"1": "2"}), spec), """\
StructureError
tdc.interop.to_pytree: expected the paths of the spec, got 2 that differ
at 1: missing
at 2: not in the spec
hint: take the TensorDict and the spec from one call of from_pytree""")  # fmt: skip


def test_wrong_leaves_are_named():
    with pytest.raises(DtypeError, match=r"at 0: set"):
        tdc.interop.from_pytree([{1, 2}])
    with pytest.raises(KeyPathError):
        tdc.interop.from_state_dict({"a": torch.zeros(1), "a.b": torch.zeros(1)})
    with pytest.raises(KeyPathError, match="choose another separator"):
        tdc.interop.to_state_dict(TensorDict({"a": {"b": 1}, "a.b": 2}))
    with pytest.raises(StructureError, match=r"at 0: missing"):
        tdc.interop.to_pytree(TensorDict(), tdc.interop.from_pytree([torch.zeros(1)])[1])


# -- state dicts that fit in part


def nets() -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5), nn.Linear(5, 5, bias=False)
    )


def test_what_fits_is_loaded_and_the_rest_reported():
    new, old = nets()
    params = from_module(new)
    found, report = load_into(params, old.state_dict())
    assert report.loaded == (
        "0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked",
    )  # fmt: skip
    assert (report.missing, report.unexpected) == ((), ("3.weight",))
    assert list(report.mismatched) == ["2.weight", "2.bias"]
    assert not report.complete
    assert (
        str(report)
        == """\
7 loaded
unexpected: 3.weight
mismatched: 2.weight: Tensor float32[5, 4], wanted Tensor float32[2, 4]
mismatched: 2.bias: Tensor float32[5], wanted Tensor float32[2]"""
    )
    assert found.keys(True, True) == params.keys(True, True)
    assert_close(found["0", "weight"], old[0].weight.detach())
    assert found["2", "weight"] is params["2", "weight"]
    assert not found["0", "weight"].requires_grad


def test_all_of_it():
    new, _ = nets()
    params = from_module(new)
    wrapped = {f"module.{k}": v for k, v in nets()[0].state_dict().items()}
    found, report = load_into(params, wrapped, strict=True, prefix="module.")
    assert report.complete
    assert str(report) == "9 loaded"
    again, _ = load_into(params, found, strict=True)
    assert_close(again.to_dict(), found.to_dict(), rtol=0, atol=0)
    half, _ = load_into(params.bfloat16(), found.double())
    assert half["0", "weight"].dtype == torch.bfloat16
    _, report = load_into(params, {"0.weight": "text"})
    assert report.mismatched == {"0.weight": "str, wanted Tensor float32[4, 3]"}
    assert len(report.missing) == 8


def test_strict_names_everything():
    new, old = nets()
    saved = old.state_dict()
    del saved["0.bias"]
    with pytest.raises(
        tdc.StructureError, match=r"(?s)got 4 that differ.*at 0.bias: missing.*at 3.weight: unexpected.*at 2"
    ):
        load_into(from_module(new), saved, strict=True)
    with pytest.raises(tdc.DtypeError, match="expected a state dict, got list"):
        load_into(from_module(new), [1])
