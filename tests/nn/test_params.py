"""TensorDictParams: what torch does with a module holds for a TensorDict of parameters."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tdc
from tdc import Static, TensorDict, from_module, functional_call
from tdc.compile import counted
from tdc.nn import TensorDictParams


def make() -> TensorDict:
    torch.manual_seed(1)
    inner = TensorDict({"w": torch.randn(2, 3, 4), "n": torch.arange(2)}, [2])
    return TensorDict({"z": torch.randn(2, 5), "a": {"b": inner, "to": torch.randn(2)}, "name": Static("x")}, [2])


@tdc.tensorclass
class Weights:
    w: torch.Tensor
    b: torch.Tensor


def flat(td: TensorDict) -> dict[str, torch.Tensor]:
    return tdc.interop.to_state_dict(td.exclude("name") if "name" in td else td)


def test_names_follow_paths():
    td = make()
    params = TensorDictParams(td)
    assert [n for n, _ in params.named_parameters()] == ["z", "a.to", "a.b.w"]
    assert [n for n, _ in params.named_buffers()] == ["a.b.n"]
    assert_close(dict(params.state_dict()), flat(td))


def test_td_has_the_parameters_themselves():
    td = make()
    params = TensorDictParams(td)
    named = {**dict(params.named_parameters()), **dict(params.named_buffers())}
    got = params.td
    assert got.keys(True, True) == td.keys(True, True)
    assert got.batch_size == (2,)
    assert got["a", "b"].batch_size == (2,)
    assert got["name"] == "x"
    assert all(x is named[name] for name, x in flat(got).items())
    assert got["z"].data_ptr() == td["z"].data_ptr()
    assert params["a", "to"] is named["a.to"]
    assert params[1]["z"].shape == (5,)
    assert params().keys() == td.keys()
    assert repr(params).startswith("TensorDictParams(TensorDict(")


def test_parameters_stay_and_ties_hold():
    frozen, shared = nn.Parameter(torch.ones(2), requires_grad=False), torch.ones(3)
    params = TensorDictParams(TensorDict({"f": frozen, "a": {"x": shared}, "b": {"x": shared}}))
    assert params["f"] is frozen
    assert params["a", "x"] is params["b", "x"]
    assert len(list(params.parameters())) == 2
    for other in (copy.deepcopy(params), params.half()):
        assert other["a", "x"] is other["b", "x"]
        assert not other["f"].requires_grad


def test_buffers_by_key():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    params = TensorDictParams(from_module(net), buffers=from_module(net, params=False).keys(True, True))
    assert [n for n, _ in params.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert [n for n, _ in params.named_buffers()] == [n for n, _ in net.named_buffers()]
    assert not list(TensorDictParams(make(), buffers=["a", "z"]).parameters())
    assert [n for n, _ in TensorDictParams(make(), buffers="a").named_parameters()] == ["z"]


def test_state_dict_round_trip():
    params, other = TensorDictParams(make()), TensorDictParams(make().apply(torch.zeros_like))
    file = io.BytesIO()
    torch.save(params.state_dict(), file)
    file.seek(0)
    z = other["z"]
    other.load_state_dict(torch.load(file))
    assert_close(flat(other.td), flat(params.td))
    assert other["z"] is z
    with pytest.raises(RuntimeError, match=r'Missing key.*"a.b.w"'):
        other.load_state_dict({"z": z})


def test_conversions():
    params = TensorDictParams(make()).half()
    assert params["a", "b", "w"].dtype == torch.float16
    assert params["a", "b", "n"].dtype == torch.int64
    assert TensorDictParams(make()).to("meta").td["z"].is_meta
    assert params.td.batch_size == (2,)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_copies(again: Any):
    params = TensorDictParams(make())
    other = again(params)
    assert_close(flat(other.td), flat(params.td))
    assert other.td["name"] == "x"
    assert other["z"] is not params["z"]
    assert other["z"].data_ptr() != params["z"].data_ptr()


def test_a_tensorclass_stays_one():
    weights: Any = Weights
    params = TensorDictParams(weights(w=torch.ones(2, 3), b=torch.zeros(2), batch_size=[2]))
    assert isinstance(params.td, Weights)
    assert params.td.w is dict(params.named_parameters())["w"]
    inside = TensorDictParams(TensorDict({"in": Weights(w=torch.ones(3), b=torch.zeros(2))}))
    assert isinstance(inside["in"], Weights)


def test_optimiser_trains_it():
    net, x = nn.Linear(3, 2), torch.randn(5, 3)
    params, theirs = TensorDictParams(from_module(net).apply(torch.clone)), copy.deepcopy(net)
    ours, opt = torch.optim.AdamW(params.parameters()), torch.optim.AdamW(theirs.parameters())
    for _ in range(3):
        for optimiser, loss in ((ours, functional_call(net, params.td, x)), (opt, theirs(x))):
            optimiser.zero_grad()
            loss.square().sum().backward()
            optimiser.step()
    assert_close(dict(params.state_dict()), dict(theirs.state_dict()), rtol=0, atol=0)
    assert params.td.grad["weight"] is params["weight"].grad


def test_inside_a_module_and_as_a_template():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.params = TensorDictParams(TensorDict({"fc": {"weight": torch.ones(2, 3)}}))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.params["fc", "weight"].T

    model = Model()
    assert list(model.state_dict()) == ["params.fc.weight"]
    td: Any = from_module(model)
    assert_close(functional_call(model, td * 2, torch.ones(3)), 2 * model(torch.ones(3)))
    grads = tdc.grad(lambda p: functional_call(model, p, torch.ones(3)).sum())(td)
    assert_close(grads["params", "fc", "weight"], torch.ones(2, 3))


def test_compiles_as_one_graph():
    params, x = TensorDictParams(from_module(nn.Linear(3, 2))), torch.randn(5, 3)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (x @ params.td["weight"].T + params["bias"]).square().sum()

    f = counted(loss, backend="aot_eager")
    f(x).backward()
    got = params.td.grad.apply(torch.clone)
    params.zero_grad()
    loss(x).backward()
    assert_close(got.to_dict(), params.td.grad.to_dict())
    with torch.no_grad():
        params["bias"].add_(1)
    assert_close(f(x), loss(x))
    assert (f.counts.graphs, f.counts.breaks, f.counts.compiles) == (1, 0, 1)


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without torch.distributed")
@pytest.mark.usefixtures("gloo")
def test_distributed_data_parallel():
    params = TensorDictParams(TensorDict({"fc": {"weight": torch.ones(2, 3)}}))
    wrapped = nn.parallel.DistributedDataParallel(params)
    (wrapped()["fc", "weight"] * torch.arange(3)).sum().backward()
    assert_close(params["fc", "weight"].grad, torch.arange(3.0).expand(2, 3))


@pytest.mark.parametrize(
    ("args", "kwargs", "kind", "text"),
    [
        (({"a": torch.ones(1)},), {}, tdc.DtypeError, "expected a TensorDict, got dict\nhint: TensorDictParams("),
        ((TensorDict({"a.b": torch.ones(1)}),), {}, tdc.KeyPathError, "without dots, got 1 others\nat 'a.b'\nhint"),
        ((TensorDict({"x": tdc.pack([torch.ones(1)])}),), {}, tdc.UnsupportedError, "at x: NestedTensor float32"),
        ((make(),), {"buffers": ["zz"]}, tdc.KeyPathError, "got 'zz'\nhint: nearest keys: 'z'"),
    ],
)  # fmt: skip
def test_messages(args: Any, kwargs: Any, kind: type[Exception], text: str):
    with pytest.raises(kind) as caught:
        TensorDictParams(*args, **kwargs)
    assert str(caught.value).startswith("tdc.nn.TensorDictParams: expected ")
    assert text in str(caught.value)
