"""tdc.vmap, tdc.grad and tdc.value_and_grad: dims counted on containers, and what has a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import tdc
from tdc import KeyPathError, ShapeError, Static, TensorDict


def tree() -> TensorDict:
    return TensorDict({"a": torch.rand(3, 4, 5), "b": {"c": torch.rand(3, 4)}}, [3, 4])


def ragged() -> tdc.NestedTensor:
    return tdc.pack([torch.rand(n, 6) for n in (2, 0, 3)])


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, fullgraph=True, backend="eager")


class TestVmap:
    @pytest.mark.parametrize("dim", [0, 1, -1, -2])
    def test_in_dims_count_batch_dims(self, dim: int):
        td = tree()
        out = tdc.vmap(lambda x: x * 2, in_dims=dim, out_dims=dim)(td)
        assert out.batch_size == td.batch_size
        assert torch.equal(out["a"], td["a"] * 2)

    def test_the_spelling_of_the_rfc(self):
        td, one = tree(), torch.ones(4, 5)
        fn = lambda td, one: td.set("a", td["a"] + one)  # noqa: E731  # as it stands there
        out = tdc.vmap(fn, in_dims=(0, None), out_dims=(1,))(td, one)
        assert out.batch_size == (4, 3)
        assert torch.equal(out["a"], (td["a"] + one).transpose(0, 1))

    def test_a_dim_for_each_key(self):
        td = tree()
        out = tdc.vmap(lambda x: x["a"].sum() + x["b", "c"].sum(), in_dims=({"a": 1, "b": None},))(td)
        want = torch.stack([td["a"][:, i].sum() + td["b", "c"].sum() for i in range(4)])
        torch.testing.assert_close(out, want)
        with pytest.raises(KeyPathError, match="nearest keys"):
            tdc.vmap(lambda x: x, in_dims=({"aa": 0},))(td)

    def test_inside_lists_and_dicts(self):
        td = TensorDict({"a": torch.rand(3, 2)}, [3])
        for dims in (-1, ([-1],)):
            assert tdc.vmap(lambda xs: xs[0]["a"], in_dims=dims)([td]).shape == (3, 2)
        assert tdc.vmap(lambda d: d["t"]["a"], in_dims=({"t": 0},))({"t": td}).shape == (3, 2)
        assert tdc.vmap(lambda x, *, y: x["a"] + y)(td, y=torch.ones(3)).shape == (3, 2)

    def test_results_that_are_not_mapped(self):
        td, y = TensorDict({"a": torch.rand(3, 2)}, [3]), torch.ones(2)
        assert torch.equal(tdc.vmap(lambda t, y: y, in_dims=(0, None), out_dims=None)(td, y), y)
        a, b = tdc.vmap(lambda t, y: (t["a"], y), in_dims=(0, None), out_dims=(1, None))(td, y)
        assert (a.shape, b.shape) == ((2, 3), (2,))

    def test_static_dims_of_ragged_batches(self):
        x = ragged()
        out = tdc.vmap(lambda v: v * 2, in_dims=2, out_dims=2)(x)
        assert out.structure.offsets is not None
        assert torch.equal(out.values, x.values * 2)
        assert tdc.vmap(lambda v: v * 2, in_dims=-1)(x).shape == (6, 3, -1)
        torch.testing.assert_close(tdc.vmap(lambda v: v.sum(1), in_dims=2)(x), x.sum(1).T)
        padded = x.to_padded()
        assert tdc.vmap(lambda v: v * 2, in_dims=2, out_dims=2)(padded).shape == padded.shape

    def test_weights_of_many_over_one_ragged_batch(self):
        x, w = ragged(), torch.rand(5, 4, 6)
        out = tdc.vmap(lambda w, x: nn.functional.linear(x, w), in_dims=(0, None), out_dims=1)(w, x)
        assert out.shape == (3, 5, -1, 4)
        torch.testing.assert_close(out.values, torch.einsum("koi,ni->kno", w, x.values))

    def test_compiles(self):
        td, x = tree(), ragged()
        assert torch.equal(compiled(tdc.vmap(lambda t: t * 2))(td)["a"], td["a"] * 2)
        torch.testing.assert_close(compiled(tdc.vmap(lambda v: v.sum(1), in_dims=2))(x), x.sum(1).T)
        named = td.set("s", Static("q"))
        assert compiled(lambda t: torch.vmap(lambda u: u * 2)(t))(named)["s"] == "q"

    @pytest.mark.parametrize(("call", "text"), [
        (lambda: tdc.vmap(lambda v: v, in_dims=1)(ragged()), "which is ragged"),
        (lambda: tdc.vmap(lambda v: v, in_dims=0, out_dims=1)(ragged()), "the examples of ragged rows at dim 0"),
        (lambda: tdc.vmap(lambda v: v, in_dims=(0, 0))(tree()), "2 for 1 arguments"),
        (lambda: tdc.vmap(lambda v: (v, v), out_dims=(0, 1, 1))(tree()), "3 for 2 results"),
        (lambda: tdc.vmap(lambda v: v, in_dims=2)(tree()), "a dim in"),
    ])  # fmt: skip
    def test_what_it_cannot_map(self, call: Callable[[], Any], text: str):
        with pytest.raises(ShapeError, match=text):
            call()


class TestGrad:
    def test_a_tensordict_of_gradients(self):
        params = TensorDict({"w": torch.tensor([1.0, 2.0]), "n": {"b": torch.tensor(3.0)}, "step": torch.tensor(1)})
        value, grads = tdc.value_and_grad(lambda p: (p["w"] ** 2).sum() * p["n", "b"])(params)
        assert value == 15
        assert set(grads.keys(True, True)) == {"w", ("n", "b")}
        assert torch.equal(grads["w"], torch.tensor([6.0, 12.0]))

    def test_ragged_arguments_keep_their_structure(self):
        x = ragged()
        g = tdc.grad(lambda x: (x**2).sum())(x)
        assert g.structure is x.structure
        torch.testing.assert_close(g.values, 2 * x.values)
        g = tdc.grad(lambda x: (x**2).sum())(x.to_padded())
        assert isinstance(g, tdc.MaskedBatch)

    def test_several_arguments_and_trees(self):
        a, b = tdc.grad(lambda a, b: (a * b["q"]).sum(), argnums=(0, 1))(torch.ones(2), {"q": torch.full((2,), 3.0)})
        assert a.tolist() == [3, 3]
        assert b["q"].tolist() == [1, 1]
        inside = TensorDict({"w": torch.ones(2), "i": torch.arange(2)}, [2])
        assert tdc.grad(lambda d: d["p"]["w"].sum())({"p": inside})["p"].keys() == ("w",)

    @pytest.mark.parametrize(
        "run", [lambda fn: fn, pytest.param(compiled, marks=pytest.mark.slow)], ids=["eager", "graph"]
    )
    def test_aux_of_anything(self, run: Any):
        x = torch.tensor([1.0, 2.0])
        aux = {"n": None, "text": "a", "count": 3, "y": x * 2}
        (value, found), grads = run(tdc.value_and_grad(lambda x: ((x * x).sum(), {**aux, "y": x * 2}), has_aux=True))(x)
        assert (value, grads.tolist(), found["y"].tolist()) == (5, [2, 4], [2, 4])
        assert {key: found[key] for key in ("n", "text", "count")} == {"n": None, "text": "a", "count": 3}
        value, found = run(lambda x: tdc.jvp(lambda x: (x * x, None), (x,), (x,)))(x)
        assert (value[1], found[0].tolist(), found[1]) == (None, [2, 8], None)
        assert run(lambda x: tdc.vjp(lambda x: (x * x, (None, "a")), x, has_aux=True)[2])(x) == (None, "a")
        once: Any = tdc.vmap(tdc.grad(lambda x: (x * x, None), has_aux=True))
        assert run(once)(x)[1] is None

    def test_aux(self):
        g, aux = tdc.grad(lambda x: (x.sum(), x * 2), has_aux=True)(torch.ones(2))
        assert (g.tolist(), aux.tolist()) == ([1, 1], [2, 2])

    def test_compiles(self):
        params = TensorDict({"w": torch.ones(2), "step": torch.tensor(1)})
        out = compiled(lambda p: tdc.grad(lambda q: (q["w"] ** 2).sum())(p))(params)
        assert out["w"].tolist() == [2, 2]

    def test_nothing_to_differentiate(self):
        with pytest.raises(tdc.DtypeError, match="floating-point"):
            tdc.grad(lambda x: x)(torch.tensor(1))


NEW = torch.__version__ >= "2.13"  # torch 2.11 lets only tensors out of a compiled checkpoint


class TestCheckpoint:
    @pytest.mark.parametrize("wrap", [lambda f: f, compiled], ids=["eager", "compiled"])
    def test_containers_go_in(self, wrap: Callable[..., Any]):
        td, x = TensorDict({"x": torch.rand(3, requires_grad=True)}, [3]), ragged()
        out = wrap(lambda t: checkpoint(lambda u, *, k: (u * k)["x"].sin(), t, k=3.0, use_reentrant=False))(td)
        out.sum().backward()
        torch.testing.assert_close(td["x"].grad, 3 * (3 * td["x"].detach()).cos())
        out = wrap(lambda x: checkpoint(lambda x: x.sin().sum(1), x, use_reentrant=False))(x)
        torch.testing.assert_close(out, x.sin().sum(1))

    @pytest.mark.parametrize("wrap", [lambda f: f, *[compiled] * NEW], ids=["eager", *["compiled"] * NEW])
    def test_containers_come_out(self, wrap: Callable[..., Any]):
        td = TensorDict({"x": torch.rand(3, requires_grad=True)}, [3])
        out, sines = wrap(lambda t: checkpoint(lambda u: (u * 3, u["x"].sin()), t, use_reentrant=False))(td)
        assert out.batch_size == (3,)
        (out["x"].sum() + sines.sum()).backward()
        torch.testing.assert_close(td["x"].grad, 3 + td["x"].detach().cos())


def test_in_dims_as_a_tensordict():
    td: Any = TensorDict({"a": torch.rand(3, 4), "b": {"c": torch.rand(3, 4)}}, [3, 4])
    dims = TensorDict({"a": 1, "b": {"c": -1}})
    fn = lambda td: td["a"].sum() + td["b", "c"].sum()  # noqa: E731
    want = td["a"].sum(0) + td["b", "c"].sum(0)
    assert torch.equal(tdc.vmap(fn, in_dims=(dims,))(td), want)
    assert torch.equal(tdc.vmap(fn, in_dims=(TensorDict({"a": 1}),))(td), td["a"].sum(0) + td["b", "c"].sum())
    run = torch.compile(lambda td: tdc.vmap(fn, in_dims=(dims,))(td), backend="eager", fullgraph=True)
    assert torch.equal(run(td), want)
    with pytest.raises(tdc.KeyPathError, match=r"tdc\.vmap: expected an existing key, got 'q'"):
        tdc.vmap(fn, in_dims=(TensorDict({"q": 1}),))(td)
