"""jacrev, jacfwd and hessian of functions of containers, against those of torch.func on the tensors inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import tdc
from tdc import TensorDict, from_module, functional_call, hessian, jacfwd, jacrev
from tdc.compile import counted

BOTH = pytest.mark.parametrize("jac", [jacrev, jacfwd])


def params() -> TensorDict:
    return TensorDict({"b": torch.randn(2), "a": {"w": torch.randn(2, 3)}, "step": torch.tensor(1)})


def predict(p: TensorDict) -> torch.Tensor:
    return torch.tanh(p["a", "w"] @ torch.ones(3)) * p["b"]


def expected(p: TensorDict, fn: Any = predict) -> Any:
    """torch's own, on a plain dict."""
    plain = {"b": p["b"], "w": p["a", "w"]}
    return torch.func.jacrev(lambda d: fn(TensorDict({"b": d["b"], "a": {"w": d["w"]}})))(plain)


@BOTH
def test_tensordict_to_tensor(jac: Any):
    p = params()
    got, want = jac(predict)(p), expected(p)
    assert got.batch_size == (2,)
    assert got.keys(True, True) == ("b", ("a", "w")) or set(got.keys(True, True)) == {"b", ("a", "w")}
    assert_close(got["a", "w"], want["w"])
    assert_close(got["b"], want["b"])


@BOTH
def test_tensordict_to_tensordict(jac: Any):
    p = params()
    got = jac(lambda p: TensorDict({"y": {"u": predict(p)}, "s": p["b"].sum(), "n": torch.tensor(3)}))(p)
    want = expected(p)
    assert_close(got["y", "u", "a", "w"], want["w"])
    assert_close(got["s", "b"], torch.ones(2))
    assert got["s", "a", "w"].tolist() == [[0] * 3] * 2
    assert "n" not in got
    assert got["y", "u"].batch_size == (2,)


@BOTH
def test_batch_dims(jac: Any):
    td, w = TensorDict({"x": torch.randn(4, 3)}, [4]), torch.randn(3)
    got = jac(lambda td: td.set("x", td["x"] * w).rename_keys({"x": "y"}))(td)
    assert got.batch_size == (4,)
    assert got["y"].batch_size == (4, 3, 4)
    assert_close(got["y", "x"], torch.func.jacrev(lambda x: x * w)(td["x"]))


@BOTH
def test_tensor_to_tensordict(jac: Any):
    got = jac(lambda x: TensorDict({"y": x * 2, "z": x.sum(-1)}, [2]))(torch.ones(2, 3))
    assert got.batch_size == (2,)
    assert got["y"].shape == (2, 3, 2, 3)
    assert_close(got["z"], torch.func.jacrev(lambda x: x.sum(-1))(torch.ones(2, 3)))


@BOTH
def test_ragged_arguments(jac: Any):
    x = tdc.pack([torch.randn(n, 2) for n in (2, 0, 3)])
    fn = lambda v: torch.stack([(v**2).sum(), v.prod(-1).sum()])  # noqa: E731
    want = torch.func.jacrev(fn)(x.values)
    got = jac(lambda x: fn(x.values))(x)
    assert got.shape == (2, 3, -1, 2)
    assert_close(got.values, want)
    assert_close(got.unbind()[1].offsets, x.offsets)
    padded = x.to_padded()
    got = jac(lambda x: (x * x).sum((1, 2)))(padded)
    assert got.shape == (3, 3, 3, 2)
    assert_close(got.data[0, 0], 2 * padded.data[0])
    assert got.data[0, 1].count_nonzero() == 0


@BOTH
def test_ragged_results(jac: Any):
    x, w = tdc.pack([torch.randn(n, 2) for n in (2, 0, 3)]), torch.randn(2)
    got = jac(lambda w: x * w)(w)
    assert got.shape == (3, -1, 2, 2)
    assert_close(got.values, torch.func.jacrev(lambda w: x.values * w)(w))
    got = jac(lambda td: x * td["w"])(TensorDict({"w": w}))
    assert got.batch_size == (3,)
    assert_close(got["w"].values, torch.func.jacrev(lambda w: x.values * w)(w))
    with pytest.raises(tdc.UnsupportedError, match="a ragged result or a ragged argument, not both"):
        jac(lambda x: x * w)(x)


@BOTH
def test_arguments_and_aux(jac: Any):
    p, x = params(), torch.randn(3)
    fn = lambda x, p, scale: (x.sum() * predict(p) * scale, {"n": p["step"], "name": "aux"})  # noqa: E731
    (dp, dx), aux = jac(fn, argnums=(1, 0), has_aux=True)(x, p, scale=2.0)
    assert_close(dp["b"], expected(p)["b"] * x.sum() * 2)
    assert_close(dx, (predict(p) * 2)[:, None].expand(2, 3))
    assert (aux["n"].item(), aux["name"]) == (1, "aux")
    both = jac(lambda a, b: TensorDict({"y": a * b}), argnums=(0, 1))(torch.ones(2), torch.full((2,), 3.0))
    assert both[0]["y"].tolist() == [[3, 0], [0, 3]]
    assert both[1]["y"].tolist() == [[1, 0], [0, 1]]
    assert jac(lambda d: (d["x"] * 2, None))({"x": torch.ones(1), "i": 3})[0] == {
        "x": torch.full((1, 1), 2.0),
        "i": None,
    }


def test_chunks():
    p = params()
    assert_close(jacrev(predict, chunk_size=1)(p)["b"], jacrev(predict)(p)["b"])


def test_hessian():
    p = params()
    got = hessian(lambda p: predict(p).square().sum())(p)
    plain = {"b": p["b"], "w": p["a", "w"]}
    want: Any = torch.func.hessian(lambda d: predict(TensorDict({"b": d["b"], "a": {"w": d["w"]}})).square().sum())(
        plain
    )
    assert_close(got["b", "a", "w"], want["b"]["w"])
    assert_close(got["a", "w", "b"], want["w"]["b"])
    assert_close(got["a", "w", "a", "w"], want["w"]["w"])


def test_of_a_module_and_of_each_member():
    nets, x = [nn.Linear(3, 2) for _ in range(4)], torch.randn(5, 3)
    fn = lambda p: functional_call(nets[0], p, x)  # noqa: E731
    one = jacrev(fn)(from_module(nets[1]))
    want = torch.func.jacrev(lambda p: torch.func.functional_call(nets[0], p, x))(dict(nets[1].named_parameters()))
    assert_close(one["weight"], want["weight"])
    many = tdc.vmap(jacrev(fn))(tdc.stack_modules(nets))
    assert many.batch_size == (4, 5, 2)
    assert_close(many["weight"][1], one["weight"])


@pytest.mark.cases(1)
@BOTH
def test_compiles(jac: Any):
    if jac is jacfwd and torch.__version__ < "2.13":
        pytest.skip("torch 2.11 does not trace jacfwd")
    p = params()
    f = counted(jac(predict), backend="aot_eager")
    assert_close(f(p)["a", "w"], expected(p)["w"])
    assert (f.counts.graphs, f.counts.breaks) == (1, 0)


@BOTH
def test_messages(jac: Any):
    name = jac.__name__
    with pytest.raises(
        tdc.DtypeError, match=f"tdc.{name}: expected an argument with floating-point tensors, got Tensor"
    ):
        jac(lambda x: x)(torch.tensor(1))
    with pytest.raises(
        tdc.DtypeError, match=f"tdc.{name}: expected a result with floating-point tensors, got NoneType"
    ):
        jac(lambda x: None)(torch.ones(1))
