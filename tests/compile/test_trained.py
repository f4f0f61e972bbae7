"""Trained weights back in modules and in exported files: parameters, buffers, ties, frozen parts, averages, members."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from texts import Texts
from torch import Tensor, nn
from torch.testing import assert_close

import tdc
from tdc import TensorDict, from_module, stack_modules
from tdc.compile import TrainStep, export, load, train_step
from tdc.optim import adamw, chain, ema, schedule_free_adamw, sgd


class Tied(nn.Module):
    """An embedding whose weights are those of the head, too; BatchNorm between; a part that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.frozen(self.embed(ids))))


def loss(net: nn.Module, ids: Any) -> Tensor:
    return F.cross_entropy(net(ids), ids)


def trained(net: nn.Module, optimizer: Any = None, **options: Any) -> tuple[TrainStep, Any]:
    step = train_step(net, loss, optimizer or adamw(0.1), compile=False, **options)
    state = step.init()
    for _ in range(3):
        state, _ = step(state, torch.randint(7, (12,)))
    return step, state


def scores(step: TrainStep, state: TensorDict, ids: Tensor, **how: Any) -> Tensor:
    return step.eval(lambda net, ids: {"out": net(ids)}, **how)(state, ids)["out"]


IDS = torch.arange(7)


class TestModules:
    @pytest.mark.parametrize("donate", [False, True])
    def test_the_net_and_others_compute_what_eval_does(self, donate: bool):
        net = Tied()
        step, state = trained(net, donate=donate)
        first, want = scores(step, step.init(), IDS), scores(step, state, IDS)
        assert not torch.allclose(first, want)
        before = net.embed.weight
        for target in (net, Tied(), Tied().double()):  # the second has another frozen part and other statistics
            assert step.load_into(target, state) is target
            assert target.head.weight is target.embed.weight
            assert_close(target.eval()(IDS).float(), want)
        assert net.embed.weight is before
        assert net.norm.num_batches_tracked == 3

    def test_memory_is_not_shared(self):
        net = Tied()
        step, state = trained(net)
        want = state["params", "embed", "weight"].clone()
        step.load_into(net, state)
        with torch.no_grad():
            net.embed.weight.zero_()
        assert torch.equal(state["params", "embed", "weight"], want)

    @pytest.mark.parametrize(
        "given",
        [{"average": ema(0.5)}, {"optimizer": chain(adamw(0.1), ema(0.5))}, {"optimizer": schedule_free_adamw(0.1)}],
        ids=["of the step", "of a chain", "of the optimiser"],
    )
    def test_averages(self, given: Any):
        step, state = trained(Tied(), **given)
        target = step.load_into(Tied(), state, averaged=True).eval()
        assert_close(target(IDS), scores(step, state, IDS, averaged=True))
        assert not torch.equal(target.head.bias, state["params", "head", "bias"])

    def test_losses_of_parameters(self):
        net: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        net[0].requires_grad_(False)

        def fn(params: Any, buffers: Any, x: Tensor) -> Any:
            out, buffers = tdc.functional_call(net, params.update(buffers), (x,), return_buffers=True)
            return out.square().mean(), buffers

        step = train_step(fn, sgd(0.1), buffers=True, compile=False)
        state, _ = step(step.init(net), torch.randn(5, 3))
        frozen = net[0].weight.clone()
        step.load_into(net, state)
        assert torch.equal(net[2].weight, state["params", "2", "weight"])
        assert torch.equal(net[1].running_mean, state["buffers", "1", "running_mean"])
        assert torch.equal(net[0].weight, frozen)

    def test_parameters_of_a_tensordict(self):
        params = tdc.nn.TensorDictParams(TensorDict({"a": {"w": torch.ones(3)}}))
        step = train_step(lambda p, x: (p["a", "w"] * x).sum(), sgd(0.1), compile=False)
        state, _ = step(step.init(params), torch.ones(3))
        assert_close(step.load_into(params, state).td["a", "w"].detach(), torch.full((3,), 0.9))


class TestEnsembles:
    def make(self) -> tuple[list[Any], TrainStep, Any]:
        nets = [Tied() for _ in range(3)]
        for net in nets[1:]:
            net.frozen = nets[0].frozen  # the step's net has the part that does not learn
        one = train_step(nets[0], loss, adamw(0.1), compile=False)
        state = torch.stack([one.init(net) for net in nets])
        step = one.vmap()
        for _ in range(3):
            state, _ = step(state, torch.randint(7, (12,)))
        return nets, step, state

    def test_a_list_of_modules(self):
        nets, step, state = self.make()
        fresh = [Tied() for _ in nets]
        assert step.load_into(fresh, state) is fresh
        for k, net in enumerate(fresh):
            assert_close(net.eval()(IDS), scores(step, state[k], IDS))
            assert torch.equal(net.norm.running_mean, state["buffers", "norm", "running_mean"][k])
        assert torch.equal(step.load_into(nets[0], state[1]).head.weight, fresh[1].head.weight)

    def test_stacked_parameters(self):
        nets, step, state = self.make()
        members = step.load_into(stack_modules(nets), state)
        net = Tied().eval()
        want = torch.stack([step.load_into(Tied(), state[k]).eval()(IDS) for k in range(3)])
        assert_close(tdc.ensemble(net, members)(IDS), want)
        assert step.load_into(from_module(Tied()), state[0]).keys() == from_module(net).keys()


class TestFiles:
    @pytest.mark.parametrize("learns", [False, True])
    def test_weights_of_a_state(self, tmp_path: Path, learns: bool):
        net = Tied()
        net.frozen.requires_grad_(learns)
        step, state = trained(net)
        path = export(Tied().eval(), IDS).save(tmp_path / "net.pt2", weights="separate")
        if learns:
            assert_close(load(path, weights=state)(IDS), scores(step, state, IDS))
        else:
            with pytest.raises(tdc.StructureError, match=r"at frozen.weight: missing"):
                load(path, weights=state)
        assert_close(load(path, weights=from_module(step.load_into(Tied(), state)))(IDS), scores(step, state, IDS))


class TestTexts(Texts):
    def test_another_architecture(self):
        step, state = trained(Tied())
        target = nn.Sequential(nn.Embedding(7, 4))
        before = target[0].weight.clone()
        with pytest.raises(tdc.StructureError, match=r"at 0\.weight: not in the state") as caught:
            step.load_into(target, state)
        assert "at embed.weight: not in the module" in str(caught.value)
        assert torch.equal(target[0].weight, before)
        wide = Tied()
        wide.norm = nn.BatchNorm1d(5)
        with pytest.raises(tdc.StructureError, match=r"at norm.weight: .* in the state Tensor float32\[4\]"):
            step.load_into(wide, state)

    def test_ties(self):
        net = Tied()
        net.head.weight = nn.Parameter(net.head.weight.detach().clone())
        step, state = trained(net)
        with pytest.raises(tdc.StructureError, match=r"at embed.weight: tied to head.weight"):
            step.load_into(Tied(), state)
        tied, state = trained(Tied())
        assert torch.equal(tied.load_into(net, state).head.weight, net.embed.weight)

    def test_other_numbers_of_modules(self):
        step, state = trained(Tied())
        self.says(lambda: step.load_into([Tied()], state), """\
ShapeError
tdc.compile.train_step.load_into: expected modules for a state of batch_size [], got 1 modules
hint: a list of as many modules as members; step.load_into(net, state[k]) for one of them""")  # fmt: skip

    def test_other_arguments(self):
        step, state = trained(Tied())
        self.says(lambda: step.load_into("net", state), """\
DtypeError
tdc.compile.train_step.load_into: expected a module, a list of modules or stacked parameters, got 1 others
at 0: str
hint: step.load_into(net, state); of an ensemble a list of modules, or stack_modules(nets)""")  # fmt: skip
        self.says(lambda: step.load_into(state, Tied()), """\
StructureError
tdc.compile.train_step.load_into: expected the state of a training step, got Tied
hint: step.load_into(net, state), with what step.init() or step(state, batch) returned""")  # fmt: skip
        with pytest.raises(tdc.UnsupportedError, match="to_empty"):
            step.load_into(Tied().to("meta"), state)
        with pytest.raises(tdc.StructureError, match=r"load_into: expected a state with an average"):
            step.load_into(Tied(), state, averaged=True)
