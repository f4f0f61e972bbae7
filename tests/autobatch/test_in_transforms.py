"""Functions of `tdc.batch` inside others: compiled, differentiated, trained, exported, and members of an ensemble."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import tdc
from tdc.compile import counted, export, load, train_step
from tdc.optim import sgd


class Recurrent(nn.Module):
    """Stops where its state grows, so that a graph holds it as a `while_loop`."""

    def __init__(self, features: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(3 + features, features)
        self.features = features

    @tdc.batch
    def forward(self, xs: Tensor, most: float = 0.8) -> Tensor:
        h = xs.new_zeros(self.features)
        for x in xs:
            h = torch.tanh(self.linear(torch.cat([x, h])))
            if h.sum() > most:
                break
        return h


def net(seed: int = 0) -> Recurrent:
    torch.manual_seed(seed)
    return Recurrent()


def rows(*lengths: int) -> Any:
    generator = torch.Generator().manual_seed(sum(lengths))
    return tdc.pack([torch.randn(n, 3, generator=generator) for n in lengths])


def alone(net: nn.Module, xs: Any) -> Tensor:
    return torch.stack([net(x) for x in xs.unbind()])


@pytest.mark.sweep
@pytest.mark.slow
def test_called_by_a_compiled_function():
    """Found by hand: only the module itself could be compiled, not a function that calls it."""
    model = net()
    fn = counted(lambda xs: model(xs).square().sum(1), backend="eager")
    for xs in (rows(2, 5, 3), rows(4, 2)):
        assert_close(fn(xs), alone(model, xs).square().sum(1))
    assert (fn.counts.graphs, fn.counts.compiles) == (1, 1)


def test_its_signature_is_that_of_a_method():
    assert str(inspect.signature(net().forward)) == "(xs: 'Tensor', most: 'float' = 0.8) -> 'Tensor'"


def loss_of_batch(params: Any, batch: Any) -> Tensor:
    return (tdc.functional_call(net(), params, (batch["x"],)) - batch["y"]).square().mean()


def loss_of_examples(params: Any, batch: Any) -> Tensor:
    ones = [tdc.functional_call(net(), params, (x,)) for x in batch["x"].unbind()]
    return (torch.stack(ones) - batch["y"]).square().mean()


def batch_of(*lengths: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(len(lengths), 4, generator=generator)
    return tdc.TensorDict({"x": rows(*lengths), "y": y}, len(lengths))


def test_gradients_of_functions():
    params, batch = tdc.from_module(net()).detach(), batch_of(2, 5, 3)
    want = tdc.grad(loss_of_examples)(params, batch).to_dict()
    assert_close(tdc.grad(loss_of_batch)(params, batch).to_dict(), want)


@pytest.mark.slow
def test_gradients_of_functions_in_a_graph():
    params, batch = tdc.from_module(net()).detach(), batch_of(2, 5, 3)
    model = net()

    def of_batch(params: Any, batch: Any) -> Tensor:
        return (tdc.functional_call(model, params, (batch["x"],)) - batch["y"]).square().mean()

    want = tdc.grad(loss_of_examples)(params, batch).to_dict()
    fn = torch.compile(tdc.grad(of_batch), fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(fn(params, batch).to_dict(), want)


@pytest.mark.cases(slow=0)
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_steps(compile: bool):
    model = net()

    def of_batch(params: Any, batch: Any) -> Tensor:
        return (tdc.functional_call(model, params, (batch["x"],)) - batch["y"]).square().mean()

    step = train_step(of_batch, sgd(0.5), compile=compile, backend="aot_eager")
    plain = train_step(loss_of_examples, sgd(0.5), compile=False)
    state, want = step.init(model), plain.init(model)
    for batch in (batch_of(2, 5, 3), batch_of(4, 2), batch_of(6, 2, 2, 3)):
        (state, metrics), (want, wanted) = step(state, batch), plain(want, batch)
        assert_close(metrics["loss"], wanted["loss"])
    assert_close(state["params"].to_dict(), want["params"].to_dict())
    if compile:
        assert (step.counts.graphs, step.counts.compiles) == (1, 1)


@pytest.mark.sweep
@pytest.mark.slow
def test_exported(tmp_path: Path):
    """Found by hand: the program had the number of examples, and lost the beginning of a vmap in the loop."""
    model = net().eval()
    program = export(model, rows(2, 5, 3))
    for xs in (rows(2, 5, 3), rows(1, 7, 4, 2, 6)):
        assert_close(program(xs), alone(model, xs))
    program.save(tmp_path / "model.pt2")
    assert_close(load(tmp_path / "model.pt2")(xs), alone(model, xs))


@tdc.batch
def behind_tests(x: Tensor, w: Tensor) -> Tensor:
    y = x * 1
    if x > 0:
        y = w[0] / x + y
    if x > 1:
        y = y * 3 + w.sum()
    return y


def test_exported_code_behind_tests():
    """Found on reading: `torch.export` runs Python, where no tracer of Dynamo says what the code is made of."""
    w = torch.tensor([0.5, 2.0])
    program = export(lambda x: behind_tests.map(x, w, in_dims=(0, None)), torch.tensor([-1.0, 0.0, 2.0, 3.0]))
    for xs in (torch.tensor([-1.0, 0.0, 2.0, 3.0]), torch.tensor([-1.0, 0.0, -2.0])):
        assert_close(program(xs), torch.stack([behind_tests(x, w) for x in xs]))


def test_ensembles():
    members, xs = [net(k) for k in range(3)], rows(2, 5, 3)
    call = tdc.ensemble(members[0], tdc.stack_modules(members))
    want = torch.stack([alone(member, xs) for member in members])
    assert_close(call(xs), want)
    own = torch.randn(6, 3, 3)  # of each member
    want = torch.stack([member(own[:, k]) for k, member in enumerate(members)])
    assert_close(tdc.ensemble(members[0], tdc.stack_modules(members), in_dims=1)(own), want)


def test_a_vmap_around_a_batch_is_refused():
    model, xs = net(), torch.randn(2, 5, 4, 3)
    with pytest.raises(tdc.UnsupportedError, match="a vmap around a batch"):
        torch.vmap(lambda x: model.forward.map(x))(xs)
