"""Modules as functions: `from_module`, `functional_call`, `stack_modules`, against the module itself and torch.func."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils import _pytree as pytree

import tdc
from tdc import TensorDict, from_module, functional_call, stack_modules
from tdc.compile import counted


class Net(nn.Module):
    """Two tied layers, a batch norm, and a buffer that is None until the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.sum() if self.seen is None else self.seen + x.sum()
        return self.norm(self.second(self.first(x)))


def flat(td: TensorDict) -> dict[str, torch.Tensor]:
    return tdc.interop.to_state_dict(td)


def untouched(module: nn.Module, td: TensorDict) -> Any:
    """What must be the same after a call: objects, contents."""
    state = {k: (id(v), v.clone()) for k, v in [*module.named_parameters(), *module.named_buffers()]}
    return state, {k: (id(v), v.clone()) for k, v in flat(td).items()}


class TestFromModule:
    def test_nested_as_the_module_tree(self):
        net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Sequential(nn.BatchNorm1d(4)))
        td = from_module(net)
        want = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        assert flat(td).keys() == want.keys()
        assert td.keys() == ("0", "2")
        assert td["2"].keys() == ("0",)
        assert td.batch_size == ()
        for key, x in flat(td).items():
            assert x.data_ptr() == want[key].data_ptr()
            assert not x.requires_grad
            assert type(x) is torch.Tensor

    def test_which_kinds(self):
        net = nn.Sequential(nn.BatchNorm1d(4))
        assert from_module(net, buffers=False)["0"].keys() == ("weight", "bias")
        assert from_module(net, params=False)["0"].keys() == ("running_mean", "running_var", "num_batches_tracked")
        assert from_module(net, params=False, buffers=False).keys() == ()
        assert from_module(nn.ReLU()).keys() == ()

    def test_tied_tensors_stay_one_object(self):
        net = Net()
        td = from_module(net)
        assert td["first", "weight"] is td["second", "weight"]
        assert "weight" not in from_module(net, remove_duplicate=True)["second"]
        twice = nn.Linear(2, 2)
        td = from_module(nn.Sequential(twice, twice))
        assert td["0", "bias"] is td["1", "bias"]
        assert from_module(nn.Sequential(twice, twice), remove_duplicate=True).keys() == ("0",)

    def test_equals_a_checked_tensordict(self):
        td = from_module(nn.TransformerEncoderLayer(4, 2, 8))
        again = TensorDict(td.to_dict())
        assert again._nodes == td._nodes
        assert pytree.tree_structure(td) == pytree.tree_structure(again)

    def test_no_module(self):
        with pytest.raises(tdc.DtypeError, match=r"got OrderedDict\nhint: tdc.interop.from_state_dict"):
            from_module(nn.Linear(2, 2).state_dict())  # pyright: ignore[reportArgumentType]  # what is tested

    def test_compiles(self):
        net = Net()
        f = counted(lambda x: from_module(net)["first", "weight"] + x, backend="aot_eager")
        assert_close(f(torch.ones(3)), net.first.weight.detach() + 1)
        assert f.counts.graphs == 1


MODULES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (5, 3)),
    "batch norm": (lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), (5, 3)),
    "tied": (Net, (5, 3)),
    "transformer": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0, batch_first=True), (2, 3, 4)),
    "lstm": (lambda: nn.LSTM(3, 4), (2, 5, 3)),
    "parametrized": (lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), (5, 3)),
    "spectral": (lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), (5, 3)),
}


class TestFunctionalCall:
    @pytest.mark.parametrize("name", MODULES)
    def test_is_the_module_with_these_parameters(self, name: str):
        make, shape = MODULES[name]
        net, other, x = make(), make(), torch.randn(shape)
        td = from_module(other)
        before = untouched(net, td)
        y = functional_call(net, td, (x,))
        assert_close(untouched(net, td), before, rtol=0, atol=0)
        assert_close(y, other(x))

    def test_buffers_come_back(self):
        net = Net()
        td, x = from_module(net), torch.randn(5, 3)
        y, buffers = functional_call(net, td, x, return_buffers=True)
        assert net.seen is None
        assert net.norm.num_batches_tracked == 0
        assert_close(y, net(x))
        assert buffers.keys() == ("seen", "norm")
        assert_close(flat(buffers), dict(net.named_buffers()))
        y, buffers = functional_call(net, td.update(buffers), x, return_buffers=True)
        net(x)
        assert_close(flat(buffers), dict(net.named_buffers()))

    def test_buffers_of_the_module_are_safe_too(self):
        net = Net()
        params = from_module(net, buffers=False)
        before = untouched(net, params)
        functional_call(net, params, torch.randn(5, 3))
        assert_close(untouched(net, params), before, rtol=0, atol=0)

    def test_tied_buffers_stay_one(self):
        net: Any = nn.Module()
        net.register_buffer("a", torch.zeros(1))
        net.register_buffer("b", net.a)
        net.forward = lambda: (net.a.add_(1), net.b.clone())[1]
        for td in (from_module(net), TensorDict()):
            assert functional_call(net, td).item() == 1
            assert net.a.item() == 0

    def test_what_the_module_registers_in_a_call_is_taken_out(self):
        class Caches(nn.Module):
            def forward(self, x: torch.Tensor) -> Any:
                self.register_buffer("cache", x * 2)
                return self.cache

        net = Caches()
        y, buffers = functional_call(net, from_module(net), torch.ones(2), return_buffers=True)
        assert y is buffers["cache"]
        assert not dict(net.named_buffers())

    def test_the_module_is_restored_after_an_error(self):
        net = Net()
        td = from_module(net)
        before = untouched(net, td)
        with pytest.raises(RuntimeError):
            functional_call(net, td, torch.ones(5, 4))
        assert_close(untouched(net, td), before, rtol=0, atol=0)
        assert net.first.weight is net.second.weight

    def test_missing_names_are_the_modules(self):
        net: Any = nn.Sequential(nn.Linear(3, 4))
        x = torch.randn(5, 3)
        weight = torch.zeros(4, 3)
        y = functional_call(net, TensorDict({"0": {"weight": weight}}), x)
        assert_close(y, net[0].bias.expand(5, 4))
        y.sum().backward()
        assert net[0].bias.grad is not None

    def test_tied_weights(self):
        net, x = Net(), torch.randn(5, 3)
        td = from_module(Net(), remove_duplicate=True)
        theirs = copy.deepcopy(net)  # torch leaves `seen` behind in it
        want = torch.func.functional_call(theirs, {k: v.clone() for k, v in flat(td).items()}, x)
        assert_close(functional_call(net, td, x), want)
        assert_close(functional_call(net, td, x, strict=True), want)
        second = td.set(("second", "weight"), td["first", "weight"]).delete(("first", "weight"))
        assert_close(functional_call(net, second, x), want)
        loose = functional_call(net, td, x, tie_weights=False)
        assert_close(loose, torch.func.functional_call(copy.deepcopy(net), flat(td), x, tie_weights=False))
        both = td.set(("second", "weight"), torch.ones(3, 3))
        got = functional_call(net, both, x, tie_weights=False)
        assert_close(got, torch.func.functional_call(copy.deepcopy(net), flat(both), x, tie_weights=False))
        assert net.first.weight is net.second.weight

    def test_arguments(self):
        net = nn.Bilinear(2, 3, 4)
        a, b, td = torch.randn(5, 2), torch.randn(5, 3), from_module(nn.Bilinear(2, 3, 4))
        want = torch.func.functional_call(net, flat(td), (a, b))
        assert_close(functional_call(net, td, (a, b)), want)
        assert_close(functional_call(net, td, (a,), {"input2": b}), want)
        assert_close(functional_call(net, td, None, {"input1": a, "input2": b}), want)

    def test_ragged_input(self):
        net, x = nn.Linear(3, 4), tdc.pack([torch.randn(n, 3) for n in (2, 0, 4)])
        y = functional_call(net, from_module(net), x)
        assert_close(y.values, net(x.values))

    def test_a_module_with_hooks_and_a_copy_after_it(self):
        net, other = nn.LSTM(3, 4), nn.LSTM(3, 4)
        calls: list[int] = []
        net.register_forward_hook(lambda *_: calls.append(1))
        functional_call(net, from_module(other), torch.randn(2, 3))
        assert calls == [1]
        x = torch.randn(2, 3)
        assert_close(copy.deepcopy(net)(x), net(x))


class TestTransforms:
    def test_compiled_with_buffers(self):
        net = Net()
        td, x = from_module(net), torch.randn(5, 3)
        before = untouched(net, td)
        f = counted(lambda td, x: functional_call(net, td, x, return_buffers=True), backend="aot_eager")
        got = f(td, x)
        assert_close(untouched(net, td), before, rtol=0, atol=0)
        assert_close(flat(got[1]), flat(functional_call(net, td, x, return_buffers=True)[1]))
        y, buffers = f(td.update(got[1]), x)
        f(td.update(buffers), x)
        assert_close(y, functional_call(net, td.update(got[1]), x))
        assert (f.counts.graphs, f.counts.breaks) == (1, 0)
        assert f.counts.compiles == 2  # the second has a key more: `seen`, None at first

    @pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_batch_norm_of_each_member(self, compiled: bool):
        nets = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(3)]
        td, x = stack_modules(nets), torch.randn(5, 3)
        f: Any = tdc.vmap(lambda p: functional_call(nets[0], p, x, return_buffers=True))
        y, buffers = (counted(f, backend="aot_eager") if compiled else f)(td)
        assert nets[0][1].num_batches_tracked == 0
        for k, net in enumerate(nets):
            assert_close(y[k], net(x))
            assert_close(flat(buffers[k]), dict(net.named_buffers()))
        assert buffers.batch_size == (3,)

    @pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_gradients_with_buffers_beside(self, compiled: bool):
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        params, buffers, x = from_module(net, buffers=False), from_module(net, params=False), torch.randn(5, 3)

        def loss(params: TensorDict, buffers: TensorDict) -> Any:
            y, buffers = functional_call(net, params.update(buffers), x, return_buffers=True)
            return y.square().mean() + y.sum(), buffers

        f: Any = tdc.value_and_grad(loss, has_aux=True)
        (value, new), grads = (counted(f, backend="aot_eager") if compiled else f)(params, buffers)
        y = net(x)
        want = y.square().mean() + y.sum()
        want.backward()
        assert_close(value, want.detach())
        assert_close(flat(grads), {k: p.grad for k, p in net.named_parameters()})
        assert_close(flat(new), dict(net.named_buffers()))

    def test_a_tied_module_is_trained_by_its_first_names(self):
        net, x = Net().eval(), torch.randn(5, 3)
        params = from_module(net, buffers=False, remove_duplicate=True)
        grads = tdc.grad(lambda p: functional_call(net, p, x).square().sum())(params)
        net(x).square().sum().backward()
        assert_close(grads["first", "weight"], net.first.weight.grad)
        with pytest.raises(tdc.StructureError, match="remove_duplicate=True"):
            tdc.grad(lambda p: functional_call(net, p, x).sum())(from_module(net, buffers=False))


class TestMessages:
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU())

    def raises(self, kind: type[Exception], text: str, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(kind) as caught:
            functional_call(*args, **kwargs)
        assert str(caught.value) == text

    def test_unexpected_names(self):
        td = from_module(self.net).rename_keys({("0", "weight"): ("0", "weigth")})
        self.raises(
            tdc.KeyPathError,
            "tdc.functional_call: expected names that Sequential has, got 1 others\n"
            "at 0.weigth: not in the module; nearest: 0.weight\n"
            "hint: params nested and named as tdc.from_module(module)",
            self.net, td, torch.ones(3),
        )  # fmt: skip

    def test_flat_names(self):
        td = TensorDict(self.net.state_dict())
        self.raises(
            tdc.KeyPathError,
            "tdc.functional_call: expected names that Sequential has, got 2 others\n"
            "at 0.weight: not in the module; nearest: 0.weight\n"
            "at 0.bias: not in the module; nearest: 0.bias\n"
            "hint: params.unflatten_keys('.')",
            self.net, td, torch.ones(3),
        )  # fmt: skip
        assert functional_call(self.net, td.unflatten_keys("."), torch.ones(3)).shape == (4,)

    def test_missing_names(self):
        self.raises(
            tdc.KeyPathError,
            "tdc.functional_call: expected all names of Sequential, got 1 missing\n"
            "at 0.bias: missing; nearest: 0.weight\n"
            "hint: strict=False takes them from the module",
            self.net, TensorDict({"0": {"weight": torch.ones(4, 3)}}), torch.ones(3), strict=True,
        )  # fmt: skip

    def test_shapes(self):
        td = stack_modules([self.net] * 2)
        self.raises(
            tdc.ShapeError,
            "tdc.functional_call: expected the shapes of Sequential, got 2 others\n"
            "at 0.weight: Tensor float32[2, 4, 3], in the module Parameter float32[4, 3]\n"
            "at 0.bias: Tensor float32[2, 4], in the module Parameter float32[4]\n"
            "hint: call members of stacked params with tdc.ensemble(module, params), or one with params[k]",
            self.net, td, torch.ones(3),
        )  # fmt: skip

    def test_ties(self):
        net = Net()
        self.raises(
            tdc.StructureError,
            "tdc.functional_call: expected one value for tied tensors, got several\n"
            "at second.weight: tied to 'first.weight'\n"
            "hint: from_module(module, remove_duplicate=True) has one name for each; or tie_weights=False",
            net, from_module(net).apply(torch.clone), torch.ones(5, 3),
        )  # fmt: skip

    @pytest.mark.parametrize("args", [(net, dict(net.named_parameters())), (from_module(net), net)])
    def test_other_types(self, args: Any):
        with pytest.raises(tdc.DtypeError, match=r"a module and a TensorDict, got (Sequential and dict|Tens)"):
            functional_call(*args)

    def test_compiled_messages_keep_their_text(self):
        f = torch.compile(lambda td: functional_call(self.net, td, torch.ones(3)), backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="expected names that Sequential has, got 1 others"):
            f(TensorDict({"bias": torch.ones(4)}))


class TestStackModules:
    def test_as_torch(self):
        nets = nn.ModuleList([nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(3)])
        td = stack_modules(nets)
        params, buffers = torch.func.stack_module_state(nets)
        assert_close(flat(td), {**{k: p.detach() for k, p in params.items()}, **buffers})
        assert td.batch_size == td["1"].batch_size == (3,)
        assert_close(flat(td[2]), flat(from_module(nets[2])))
        assert td[2]["0", "weight"].data_ptr() == td["0", "weight"][2].data_ptr()
        assert flat(stack_modules(nets, buffers=False)).keys() == params.keys()
        assert flat(stack_modules(nets, params=False)).keys() == buffers.keys()

    def test_gradients_reach_the_members(self):
        net, x = nn.Linear(3, 2), torch.randn(5, 3)
        td = stack_modules([nn.Linear(3, 2) for _ in range(3)])
        call = tdc.vmap(lambda p: functional_call(net, p, x).square().sum())
        grads = tdc.grad(lambda p: call(p).sum())(td)
        leaves = td.apply(lambda p: p.clone().requires_grad_())
        call(leaves).sum().backward()
        assert_close(flat(grads), flat(leaves.grad))

    def test_tied(self):
        nets, x = [Net().eval(), Net().eval()], torch.ones(5, 3)
        td = stack_modules(nets)
        assert td["second"].keys() == ("bias",)
        y = tdc.vmap(lambda p: functional_call(nets[0], p, x))(td)
        assert_close(y, torch.stack([net(x) for net in nets]))

    @pytest.mark.parametrize(
        ("modules", "text"),
        [
            ([], "modules, got no module"),
            ([nn.ReLU(), nn.Linear], r"got 1 that are not\nat module 1: the class Linear"),
            ([nn.ReLU(), nn.ReLU(), nn.Tanh()], r"at module 2, itself: Tanh, in module 0 ReLU"),
            ([nn.Linear(3, 2), nn.Linear(3, 4)], r"at module 1, weight: Tensor float32\[4, 3\], in module 0 Tensor fl"),
            ([nn.Linear(3, 2), nn.Linear(3, 2, bias=False)], r"at module 1, bias: nothing, in module 0 Tensor"),
            ([nn.Sequential(nn.ReLU()), nn.Sequential()], r"at module 1, 0: nothing, in module 0 ReLU"),
            ([nn.Sequential(), nn.Sequential(nn.ReLU())], r"at module 1, 0: ReLU, in module 0 nothing"),
            ([nn.Linear(3, 2), nn.Linear(3, 2).eval()], r"at module 1, itself: evaluating, in module 0 training"),
            ([nn.Linear(3, 2), nn.Linear(3, 2).half()], r"at module 1, weight: Tensor float16\[2, 3\], in module 0"),
        ],
    )
    def test_messages(self, modules: Any, text: str):
        with pytest.raises(tdc.StructureError, match=re.compile(f"tdc.stack_modules: expected .*{text}", re.S)):
            stack_modules(modules)
