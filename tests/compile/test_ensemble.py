"""Ensembles: each member as if it were alone; training, dropout, ragged data, stopping, in one graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import tdc
from tdc import NestedTensor, TensorDict, ensemble, functional_call, stack_modules
from tdc.compile import counted
from tdc.optim import adamw

K = 4


def nets(make: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))) -> Any:
    return [make() for _ in range(K)]


def rows(*lengths: int) -> NestedTensor:
    return tdc.pack([torch.randn(n, 3) for n in lengths])


class TestCall:
    def test_shared_data(self):
        members, x = nets(), torch.randn(6, 3)
        y = ensemble(members[0], stack_modules(members))(x)
        assert_close(y, torch.stack([net(x) for net in members]))

    def test_data_for_each_member(self):
        members, x = nets(), torch.randn(6, K, 3)
        params = stack_modules(members)
        want = torch.stack([net(x[:, k]) for k, net in enumerate(members)])
        assert_close(ensemble(members[0], params, in_dims=1)(x), want)
        assert_close(ensemble(members[0], params, in_dims=(0,))(x.movedim(1, 0)), want)

    def test_several_and_keyword_arguments(self):
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(3, 2)

            def forward(self, a: torch.Tensor, input2: torch.Tensor) -> torch.Tensor:
                return self.fc(a) * input2

        members = nets(Model)
        params, a, b = stack_modules(members), torch.randn(K, 6, 3), torch.randn(6, 2)
        want = torch.stack([net(a[k], b) for k, net in enumerate(members)])
        assert_close(ensemble(members[0], params, in_dims=(0, None))(a, b), want)
        assert_close(ensemble(members[0], params, in_dims=0)(a, input2=b), want)

    @pytest.mark.sweep
    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's, without a rule for this attention
    def test_results_that_are_none(self):
        members, x = nets(lambda: nn.MultiheadAttention(4, 2, batch_first=True)), torch.randn(3, 5, 4)
        call = ensemble(members[0], stack_modules(members))
        want = torch.stack([net(x, x, x, need_weights=False)[0] for net in members])
        for run in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
            y, weights = run(x, x, x, need_weights=False)
            assert weights is None
            assert_close(y, want)
        assert_close(call(x, x, x)[1], torch.stack([net(x, x, x)[1] for net in members]))
        ragged = rows(2, 0, 3)
        net = nn.MultiheadAttention(3, 1, batch_first=True)
        y, weights = ensemble(net, stack_modules([net] * K))(ragged, ragged, ragged, need_weights=False)
        assert (y.shape, weights) == ((K, 3, -1, 3), None)

    @pytest.mark.parametrize("in_dims", [None, 0])
    def test_modules_without_parameters(self, in_dims: int | None):
        members, x = [nn.Tanh(), nn.Tanh()], torch.randn(2, 3)
        call = ensemble(members[0], stack_modules(members), in_dims)
        for run in (call, torch.compile(call, fullgraph=True, backend="eager")):
            assert_close(run(x), x.tanh() if in_dims == 0 else torch.stack([x.tanh()] * 2))
        ragged = rows(2, 0, 3)
        if in_dims is None:
            assert ensemble(members[0], stack_modules(members))(ragged).shape == (2, 3, -1, 3)
        drop = [nn.Dropout(0.5), nn.Dropout(0.5)]
        y = ensemble(drop[0], stack_modules(drop), in_dims, "different")(torch.ones(2, 64))
        assert not torch.equal(y[0], y[1])

    def test_containers_in_and_out(self):
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.fc = nn.Linear(3, 2)

            def forward(self, td: TensorDict) -> TensorDict:
                return td.set("y", self.fc(td["x"])).delete("x")

        members, td = nets(Model), TensorDict({"x": torch.randn(6, 3)}, [6])
        out = ensemble(members[0], stack_modules(members))(td)
        assert out.batch_size == (K, 6)
        assert_close(out["y"], torch.stack([net(td)["y"] for net in members]))

    def test_ragged_data(self):
        members, x = nets(), rows(2, 0, 3)
        y = ensemble(members[0], stack_modules(members))(x)
        assert y.shape == (K, 3, -1, 2)
        for one, net in zip(y.unbind(), members, strict=True):
            assert_close(one.values, net(x.values))
            assert_close(one.offsets, x.offsets)
        assert_close(ensemble(members[0], stack_modules(members))(x.to_padded()).to_packed().values, y.values)

    def test_dropout(self):
        members = nets(lambda: nn.Sequential(nn.Linear(3, 50), nn.Dropout(0.5)))
        params = stack_modules([members[0]] * K)
        different = ensemble(members[0], params, randomness="different")(torch.ones(3))
        assert len({tuple(y.tolist()) for y in different}) == K
        same = ensemble(members[0], params, randomness="same")(torch.ones(3))
        assert_close(same, same[:1].expand(K, 50))
        with pytest.raises(RuntimeError, match="randomness"):
            ensemble(members[0], params)(torch.ones(3))

    def test_batch_norm_and_chunks(self):
        members, x = nets(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))), torch.randn(6, 3)
        params = stack_modules(members)
        y, buffers = ensemble(members[0], params, return_buffers=True, chunk_size=2)(x)
        assert_close(y, torch.stack([net(x) for net in members]))
        assert_close(buffers[2].to_dict(), tdc.from_module(members[2], params=False).to_dict())

    def test_members_are_views(self):
        members = nets()
        params = stack_modules(members)
        assert params[1]["0", "weight"].data_ptr() == params["0", "weight"][1].data_ptr()
        for one, net in zip(params.unbind(), members, strict=True):
            assert_close(functional_call(members[0], one, torch.ones(3)), net(torch.ones(3)))
        some = params[torch.tensor([2, 0])]
        assert_close(ensemble(members[0], some)(torch.ones(3))[0], members[2](torch.ones(3)))

    def test_parameters_as_a_module(self):
        members, x = nets(), torch.randn(6, 3)
        params = tdc.nn.TensorDictParams(stack_modules(members))
        ensemble(members[0], params.td)(x).square().sum().backward()
        for net in members:
            net(x).square().sum().backward()
        assert_close(params["2", "weight"].grad, torch.stack([net[2].weight.grad for net in members]))

    @pytest.mark.cases(1)
    @pytest.mark.parametrize("dims", [None, 0])
    def test_one_graph_for_all_members_and_lengths(self, dims: Any):
        members = nets(lambda: nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 2)))
        params = stack_modules(members)

        def predict(params: TensorDict, x: Any) -> Any:
            return ensemble(members[0], params, dims, randomness="different")(x).values

        f = counted(predict, backend="aot_eager")
        for lengths in ((2, 0, 3), (4, 1), (5, 2, 2, 7)):
            x = rows(*lengths)
            if dims == 0:
                x = torch.stack([x] * K)
            assert f(params, x).shape[0] == K
        assert (f.counts.graphs, f.counts.breaks, f.counts.compiles) == (1, 0, 1)


def regression(net: nn.Module, opt: Any) -> Callable[..., Any]:
    """The training step of one model."""

    def step(params: TensorDict, state: TensorDict, x: torch.Tensor, y: torch.Tensor) -> Any:
        value, grads = tdc.value_and_grad(lambda p: F.mse_loss(functional_call(net, p, (x,)), y))(params)
        params, state = opt.update(grads, state, params)
        return params, state, value

    return step


class TestTraining:
    @pytest.mark.slow
    def test_members_are_stopped_by_a_mask(self):
        members, opt = nets(), adamw(lr=1e-2)
        params = stack_modules(members)
        state = opt.init(params)
        one = regression(members[0], opt)

        def masked(alive: Any, params: Any, state: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            new, after, losses = one(params, state, x, y)
            return torch.where(alive, new, params), torch.where(alive, after, state), losses

        step = counted(tdc.vmap(masked, in_dims=(0, 0, 0, None, None)), backend="aot_eager")
        alive, stopped = torch.ones(K, dtype=torch.bool), params[1].apply(torch.clone)
        alone, alone_state = params[2], opt.init(params[2])
        for n in range(4):
            x, y = torch.randn(8, 3), torch.randn(8, 2)
            alive = alive & torch.tensor([n < 1, False, True, n < 3])
            params, state, _ = step(alive, params, state, x, y)
            alone, alone_state, _ = one(alone, alone_state, x, y)
        assert state["step"].tolist() == [1, 0, 4, 3]
        assert_close(params[1].to_dict(), stopped.to_dict(), rtol=0, atol=0)
        assert_close(params[2].to_dict(), alone.to_dict())
        assert (step.counts.graphs, step.counts.compiles) == (1, 1)

    @pytest.mark.sweep
    @pytest.mark.slow
    def test_the_same_numbers_from_inductor(self):
        members, opt = nets(), adamw(lr=1e-2)
        params = stack_modules(members)
        many = tdc.vmap(regression(members[0], opt), in_dims=(0, 0, None, None))
        args = params, opt.init(params), torch.randn(8, 3), torch.randn(8, 2)
        step = counted(many)
        for got, want in zip(step(*args), many(*args), strict=True):
            assert_close(
                got if torch.is_tensor(got) else got.to_dict(), want if torch.is_tensor(want) else want.to_dict()
            )
        assert step.counts.graphs == 1


@pytest.mark.parametrize(
    ("params", "in_dims", "kind", "text"),
    [
        ({"weight": torch.ones(2, 2, 3)}, None, tdc.DtypeError, "a TensorDict, got dict\nhint: tdc.ensemble("),
        (tdc.from_module(nn.Linear(3, 2)), None, tdc.ShapeError, "a batch dim of members, got batch_size=[]\nhint"),
        (stack_modules([nn.Linear(3, 2)]), (None, 0), tdc.ShapeError, "for each argument, got 2 for 1"),
    ],
)  # fmt: skip
def test_messages(params: Any, in_dims: Any, kind: type[Exception], text: str):
    with pytest.raises(kind) as caught:
        ensemble(nn.Linear(3, 2), params, in_dims)(torch.ones(3))
    assert str(caught.value).startswith("tdc.ensemble: expected ")
    assert text in str(caught.value)
