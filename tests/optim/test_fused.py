"""Adam and SGD on many leaves as one operator: the numbers of torch.optim for every layout, eagerly and in graphs, and
where it does not serve."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import tdc
from tdc import TensorDict
from tdc.compile import counted, report, train_step
from tdc.optim import Optimizer, adam, adamw, chain, clip_by_global_norm, ema, foreach, inject, lookahead, sgd

SETTINGS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adam": (adam, torch.optim.Adam, {"weight_decay": 0.1}),
    "adamw": (adamw, torch.optim.AdamW, {"weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-6}),
    "amsgrad": (adamw, torch.optim.AdamW, {"amsgrad": True, "betas": (0.5, 0.6)}),
    "sgd": (sgd, torch.optim.SGD, {"momentum": 0.8, "weight_decay": 0.1}),
    "nesterov": (sgd, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "dampening": (sgd, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
}
FEW, MANY = 7, 10  # leaves of one node; leaves


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few leaves are many: graphs of 64 take long to make."""
    monkeypatch.setattr(foreach, "FEW", FEW)
    monkeypatch.setattr(foreach, "AT_ONCE", FEW)


def leaf(i: int, seed: int = 0) -> Tensor:
    """A tensor of one of several shapes and orders in memory."""
    torch.manual_seed(100 * seed + i)
    kinds = [
        torch.randn(3, 4), torch.randn(4, 3).t(), torch.randn(()), torch.randn(0, 2), torch.randn(5),
        torch.randn(6, 8)[:, ::2], torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ]  # fmt: skip
    return kinds[i % len(kinds)]


def many(seed: int = 0, shift: int = 0) -> TensorDict:
    """Leaves of shapes that the seed does not change; those of another shift lie in other orders in memory."""
    own = [leaf(i, seed) for i in range(MANY)]
    return TensorDict({f"p{i}": x.contiguous() if shift and i % 2 else x for i, x in enumerate(own)})


def by_torch(cls: Any, settings: dict[str, Any], params: TensorDict, grads: list[TensorDict]) -> TensorDict:
    """What an optimiser of torch makes of parameters."""
    own = params.apply(lambda x: nn.Parameter(x.clone()))
    optimizer = cls(list(own.values()), lr=0.01, **settings)
    for given in grads:
        for p, g in zip(own.values(), given.values(), strict=True):
            p.grad = g.clone()
        optimizer.step()
    return own.apply(lambda x: x.detach())


def stepped(optimizer: Optimizer, params: TensorDict, grads: list[TensorDict], update: Any = None) -> Any:
    """Parameters and state after steps."""
    state = optimizer.init(params)
    for given in grads:
        params, state = (update or optimizer.update)(given, state, params)
    return params, state


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("backend", [None, "aot_eager", tdc.compile.backend])
@pytest.mark.parametrize("name", SETTINGS)
def test_numbers_are_those_of_torch(name: str, backend: Any) -> None:
    make, cls, settings = SETTINGS[name]
    optimizer, params, before = make(0.01, **settings), many(), many()
    grads = [many(seed, shift=seed % 2) for seed in (1, 2, 3)]
    update = counted(optimizer.update, backend=backend) if backend else None
    found, state = stepped(optimizer, params, grads, update)
    assert_close(found.to_dict(), by_torch(cls, settings, params, grads).to_dict())
    assert_close(params.to_dict(), before.to_dict(), rtol=0, atol=0)
    assert int(state["step"]) == 3


def test_a_moment_may_lie_in_another_order() -> None:
    optimizer, params = adamw(0.1), many()
    wanted, expected = stepped(optimizer, params, [many(1), many(2)])
    once, state = stepped(optimizer, params, [many(1)])
    other = state.apply(lambda x: x.contiguous() if x.ndim else x)
    found, after = optimizer.update(many(2), other, once)
    assert_close(found.to_dict(), wanted.to_dict(), rtol=0, atol=0)
    assert_close(after.to_dict(), expected.to_dict(), rtol=0, atol=0)


class Deep(nn.Module):
    """More parameters than stay arithmetic."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(3, 3) for _ in range(MANY // 2)])
        if tied:
            self.layers[1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def loss(net: Any, x: Tensor) -> Tensor:
    return net(x).square().mean()


def after_steps(net: nn.Module, optimizer: Any, **settings: Any) -> TensorDict:
    """The state after four steps."""
    step = train_step(net, loss, optimizer, **settings)
    state = step.init()
    for i in range(4):
        torch.manual_seed(i)
        state, _ = step(state, torch.randn(2, 3))
    return state


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(
    "make",
    [
        adamw, lambda: chain(clip_by_global_norm(0.1), adam(0.01)), lambda: chain(adamw(0.01), lookahead(k=2)),
        lambda: inject(adamw, lr=0.01), lambda: sgd(0.01, 0.9),
    ],
    ids=["adamw", "chain", "lookahead", "inject", "sgd"],
)  # fmt: skip
@pytest.mark.parametrize(
    "settings", [{}, {"skip_nonfinite": True}, {"average": ema(0.9)}], ids=["plain", "skips", "average"]
)
def test_a_donated_step_is_the_step(make: Any, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = Deep()
    expected = after_steps(net, make(), compile=False, **settings)
    found = after_steps(net, make(), donate=True, backend="aot_eager", **settings)
    assert_close(found.to_dict(), expected.to_dict())


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize(("make", "tied"), [(adamw, False), (adamw, True), (partial(sgd, momentum=0.9), False)])
def test_a_donated_step_writes_in_place(make: Any, tied: bool) -> None:
    torch.manual_seed(0)
    net = Deep(tied)
    expected = after_steps(net, make(0.01), compile=False)
    step = train_step(net, loss, make(0.01), donate=True)
    state = step.init()
    addresses = {p: x.data_ptr() for p, x in state._leaves.items()}
    for i in range(4):
        torch.manual_seed(i)
        state, _ = step(state, torch.randn(2, 3))
    assert_close(state.to_dict(), expected.to_dict())
    assert {p: x.data_ptr() for p, x in state._leaves.items()} == addresses


@pytest.mark.parametrize(("make", "name"), [(adamw, "adam"), (partial(sgd, momentum=0.9), "sgd")])
def test_one_node_for_many_leaves(make: Any, name: str) -> None:
    optimizer, seen = make(0.01), list[str]()

    def backend(graph: Any, inputs: Any) -> Any:
        seen.extend([str(node.target) for node in graph.graph.nodes])
        return graph

    torch.compile(optimizer.update, backend=backend, fullgraph=True)(many(1), optimizer.init(many()), many())
    assert seen.count(f"tdc.{name}_.default") == 2
    assert not [target for target in seen if "lerp" in target or "mul" in target]


@pytest.mark.sweep
@pytest.mark.slow
def test_two_parameters_may_change_places() -> None:
    def update(grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        return TensorDict({"a": params["b"], "b": params["a"] + 0, "c": params["a"].view(3)}), state

    optimizer = Optimizer(lambda params: TensorDict({}), update)
    start = TensorDict({"a": torch.ones(3), "b": torch.full((3,), 2.0), "c": torch.full((3,), 3.0)})
    step = train_step(lambda params, x: (params["a"] * params["b"] * params["c"]).sum() * x, optimizer, donate=True)
    state, _ = step(step.init(start), torch.tensor(1.0))
    assert state["params"].apply(lambda x: x[0]).to_dict() == {"a": 2.0, "b": 1.0, "c": 1.0}


# -- where the operator does not serve


def columns_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error where the operator runs."""

    def refuse(*args: Any) -> Any:
        raise AssertionError("the operator ran")

    monkeypatch.setattr(foreach.Fused, "run", refuse)


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [adamw, partial(sgd, momentum=0.9)])
def test_an_update_can_be_differentiated(make: Any, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    columns_only(monkeypatch)
    optimizer, params = make(0.1), many()
    grads = many(1).apply(lambda x: x.requires_grad_())
    update = counted(optimizer.update, backend="aot_eager") if compiled else optimizer.update
    found = update(grads, optimizer.init(params), params)[0]
    found["p0"].sum().backward()
    assert grads["p0"].grad.abs().sum() > 0


@pytest.mark.parametrize("compiled", [False, True])
def test_members_of_an_ensemble_have_their_own_numbers(compiled: bool) -> None:
    rates, members = torch.tensor([0.1, 0.01]), [many(), many(1)]
    grads = [many(2), many(3)]
    optimizer = adamw(0.1)
    stacked, given = [torch.stack(xs) for xs in (members, grads)]
    state = optimizer.init(stacked)
    update = counted(adamw(rates).update, backend="eager") if compiled else adamw(rates).update
    found = update(given, state, stacked)[0]
    for i in range(2):
        expected = stepped(adamw(float(rates[i])), members[i], [grads[i]])[0]
        assert_close(found[i].to_dict(), expected.to_dict())


def test_mapped_members(monkeypatch: pytest.MonkeyPatch) -> None:
    columns_only(monkeypatch)
    optimizer, members, grads = adam(0.1), [many(), many(1)], [many(2), many(3)]
    stacked, given = [torch.stack(xs) for xs in (members, grads)]
    states = torch.stack([optimizer.init(x) for x in members])
    found = tdc.vmap(optimizer.update)(given, states, stacked)[0]
    monkeypatch.undo()
    expected = torch.stack([stepped(optimizer, p, [g])[0] for p, g in zip(members, grads, strict=True)])
    assert_close(found.to_dict(), expected.to_dict())


@pytest.mark.cases(1, 0)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("make", [adamw, partial(sgd, momentum=0.9)])
def test_other_dtypes(dtype: torch.dtype, make: Any) -> None:
    optimizer, params, grads = make(0.1), many().to(dtype), many(1).to(dtype)
    eager = stepped(optimizer, params, [grads, grads])
    traced = stepped(optimizer, params, [grads, grads], counted(optimizer.update, backend="aot_eager"))
    for x, y in zip(eager, traced, strict=True):
        assert_close(x.to_dict(), y.to_dict())


@pytest.mark.cases(1, 0)
@pytest.mark.parametrize("make", [adamw, partial(sgd, momentum=0.9)])
def test_an_exported_update_holds_no_operator_of_ours(make: Any) -> None:
    optimizer, params = make(0.1), many()
    exported = tdc.compile.export(optimizer.update, (many(1), optimizer.init(params), params))
    assert "tdc." not in str(exported.program.graph)


@pytest.mark.sweep
@pytest.mark.slow
def test_steps_in_a_loop() -> None:
    optimizer, params, grads = adamw(0.1), many(), many(1)
    state = optimizer.init(params)

    def three(grads: TensorDict, state: TensorDict, params: TensorDict) -> Any:
        def body(carry: Any, _: Tensor) -> Any:
            return optimizer.update(grads, carry[1], carry[0]), torch.zeros(())

        return tdc.scan(body, (params, state), torch.arange(3))[0]

    expected = stepped(optimizer, params, [grads] * 3)
    found = counted(three, backend=tdc.compile.backend)(grads, state, params)
    for x, y in zip(found, expected, strict=True):
        assert_close(x.to_dict(), y.to_dict())


# -- edges that were wrong


def with_update(base: Optimizer, change: Any) -> Optimizer:
    """An optimiser whose parameters are another function of those of a base."""

    def update(grads: TensorDict, state: TensorDict, params: TensorDict) -> tuple[TensorDict, TensorDict]:
        found, after = base.update(grads, state["inner"], params)
        return change(base, grads, state, params, found, after)

    return Optimizer(lambda params: TensorDict({"inner": base.init(params), "before": params}), update)


def rotated(base: Any, grads: Any, state: Any, params: Any, found: TensorDict, after: Any) -> Any:
    keys = list(found.keys())
    new = {a: found[b] for a, b in zip(keys, keys[1:] + keys[:1], strict=True)}
    return TensorDict(new), TensorDict({"inner": after, "before": params})


def twice(base: Any, grads: Any, state: Any, params: Any, found: TensorDict, after: Any) -> Any:
    again = base.update(found, state["inner"], params)[0]
    return found, TensorDict({"inner": after, "before": again})


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("change", [rotated, twice])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor", tdc.compile.backend])
def test_results_may_be_written_elsewhere(change: Any, backend: Any) -> None:
    torch.manual_seed(0)
    start = TensorDict({f"p{i}": torch.randn(2, 2) for i in range(FEW)})

    def loss(params: TensorDict, x: Tensor) -> Tensor:
        return sum([(p @ x).sin().sum() * i for i, p in enumerate(params.values())], torch.zeros(()))

    found: list[TensorDict] = []
    for settings in ({"compile": False}, {"donate": True, "backend": backend}):
        step = train_step(loss, with_update(adamw(0.1), change), **settings)
        state = step.init(start.clone())
        for i in range(3):
            state, _ = step(state, torch.full((2, 3), 1.0 + i))
        found.append(state)
    assert_close(found[1].to_dict(), found[0].to_dict())


@pytest.mark.parametrize("make", [adamw, partial(sgd, momentum=0.9)])
def test_moments_of_other_shapes_are_refused(make: Any) -> None:
    optimizer, params = make(0.1), many()
    state = optimizer.init(params.apply(lambda x: torch.zeros(1)))
    with pytest.raises(Exception, match=r"expected gradients and moments"):
        torch.compile(optimizer.update, backend="eager", fullgraph=True)(many(1), state, params)


def test_a_rate_has_a_gradient() -> None:
    rate, params = torch.tensor(0.1, requires_grad=True), many()
    optimizer = adamw(rate)
    optimizer.update(many(1), optimizer.init(params), params)[0]["p0"].sum().backward()
    assert rate.grad is not None
    assert rate.grad != 0


def test_a_moment_has_a_gradient_in_a_graph() -> None:
    optimizer, params = adamw(0.1), many()
    state = optimizer.init(params).apply(lambda x: x.requires_grad_() if x.is_floating_point() else x)
    found = counted(optimizer.update, backend="aot_eager")(many(1), state, params)[0]
    found["p0"].sum().backward()
    assert state["mean", "p0"].grad.abs().sum() > 0


def test_a_graph_asks_little_of_each_leaf() -> None:
    optimizer, params = adamw(0.1), many()
    found = report(optimizer.update, (many(1), optimizer.init(params), params), backend="eager", repeats=0)
    of_leaf = [guard for guard in found.guards if "['p4']" in guard and "hasattr" not in guard]
    assert len(of_leaf) == 3, of_leaf  # what its parameter and its gradient are, and that no two leaves are one


def test_zeros_without_memory_are_gradients() -> None:
    optimizer, params = adamw(0.1), TensorDict({"w": torch.ones(3)})
    zeros = TensorDict({"w": torch._efficientzerotensor(3)})
    found = optimizer.update(zeros, optimizer.init(params), params)[0]
    assert_close(found["w"], torch.full((3,), 0.999))
