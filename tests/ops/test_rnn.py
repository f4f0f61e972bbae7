"""Stock recurrent modules on ragged batches, against a loop over examples: outputs, last states, gradients, graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from fakes import fakes_agree
from harness import Counter
from test_nn import KINDS, LENGTHS, OTHERS, SIZE, compiled, plain, rows, weighted
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.utils import _pytree as pytree

import tdc
from tdc.kernels.recurrent import operator
from tdc.testing.batches import Cut, Ragged, build, differences, is_close, unbuild

RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: nn.RNN(SIZE, 4, 2, batch_first=True),
    "relu": lambda: nn.RNN(SIZE, 4, nonlinearity="relu", bidirectional=True, bias=False, batch_first=True),
    "lstm": lambda: nn.LSTM(SIZE, 4, 2, bidirectional=True, batch_first=True),
    "lstm_projected": lambda: nn.LSTM(SIZE, 5, proj_size=3, bidirectional=True, batch_first=True),
    "gru": lambda: nn.GRU(SIZE, 4, 2, dropout=0.5, bidirectional=True, batch_first=True).eval(),
}


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    """Dynamo refuses recurrent modules unless told otherwise (2.11-2.13); torch warns of projections without oneDNN."""
    with torch._dynamo.config.patch(allow_rnn=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
        yield


def states_of(last: Any) -> tuple[Tensor, ...]:
    """(h,) or (h, c)."""
    return last if isinstance(last, tuple) else (last,)


def one(module: nn.Module, x: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """A row on its own; one without steps keeps its states, which are zeros where none are given."""
    if len(x):
        out, last = module(x, *given)
        return out, *states_of(last)
    out, last = module(torch.zeros(1, SIZE), *given)
    last = [torch.zeros_like(s) for s in states_of(last)] if not given else states_of(given[0])
    return out[:0], *last


def assert_recurrent(module: nn.Module, kind: str, x: Ragged, run: Callable[..., Any], given: Any = None) -> None:
    """Outputs, last states and gradients of a recurrent module."""
    some = [] if given is None else [given]
    each = [[pytree.tree_map(lambda s, i=i: s[:, i], own) for own in some] for i in range(len(x.rows))]
    outs, *states = zip(*[one(module, row, *own) for row, own in zip(x.rows, each, strict=True)], strict=True)
    want = x.with_rows(list(outs)), [torch.stack(parts, 1) for parts in states]
    cut = Cut()
    out, last = run(module, *build([x], kind, cut), *some)
    got = unbuild(out), list(states_of(last))
    assert differences(got, want, kind) == []
    params = list(module.parameters())
    found = weighted([*got[0].rows, *got[1]], [*params, *cut.inner])
    ours = [*found[: len(params)], *cut.back(found[len(params) :], x.rows)]
    theirs = weighted([*want[0].rows, *want[1]], [*params, *x.rows])
    assert all(is_close(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent(name: str, kind: str):
    assert_recurrent(RECURRENT[name](), kind, rows(), plain)


SLOW = [pytest.param(name, kind, marks=pytest.mark.slow) for name, kind in (("tanh", "nested"), ("gru", "masked"))]


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("lstm", "nested"), *SLOW])
def test_recurrent_compiled(name: str, kind: str):
    module, counter = RECURRENT[name](), Counter()
    run = compiled(plain, counter)
    for lengths in (LENGTHS, *OTHERS):
        assert_recurrent(module, kind, rows(lengths), run)
    assert counter.graphs == 1


@pytest.mark.sweep
@pytest.mark.slow
def test_recurrent_compiled_without_gradients():
    module, x = nn.LSTM(SIZE, 4, batch_first=True).requires_grad_(False), build(rows(), "nested", Tensor.detach)
    want, _ = module(x)
    got, _ = torch.compile(plain, fullgraph=True, backend="aot_eager")(module, x)
    assert torch.allclose(got.values, want.values)
    module.requires_grad_()
    with torch.no_grad():
        got, _ = torch.compile(plain, fullgraph=True, backend="aot_eager")(module, x)
    assert torch.allclose(got.values, want.values)


@pytest.mark.slow
def test_recurrent_with_inductor():
    module = RECURRENT["lstm"]()
    assert_recurrent(module, "nested", rows(), torch.compile(plain, fullgraph=True))


def test_recurrent_rows_without_steps():
    module = nn.LSTM(SIZE, 4, batch_first=True)
    x = tdc.pack([torch.zeros(0, SIZE)] * 2)
    h = torch.randn(1, 2, 4)
    out, (last, cell) = module(x, (h, 2 * h))
    assert out.values.shape == (0, 4)
    assert torch.equal(last, h)
    assert torch.equal(cell, 2 * h)


@pytest.mark.parametrize("name", RECURRENT)
def test_gradients_of_rows_without_steps(name: str):
    """Those of states pass through, whether or not weights learn."""
    module, x = RECURRENT[name](), tdc.pack([torch.zeros(0, SIZE)] * 2)
    sizes = (3, 5) if name == "lstm_projected" else (4, 4)
    runs = module.num_layers * (1 + module.bidirectional)
    states = [torch.randn(runs, 2, n, requires_grad=True) for n in sizes[: 1 + name.startswith("lstm")]]
    last = states_of(module(x, tuple(states) if len(states) == 2 else states[0])[1])
    cubes = sum([s.pow(3).sum() for s in last])
    found = torch.autograd.grad(cubes, [*states, *module.parameters()], retain_graph=True, materialize_grads=True)
    for grad, s in zip(found, states, strict=False):
        torch.testing.assert_close(grad, 3 * s.square())
    assert not any([g.any() for g in found[len(states) :]])
    first = torch.autograd.grad(cubes, states, create_graph=True)
    for grad, s in zip(torch.autograd.grad(sum([g.sum() for g in first]), states), states, strict=True):
        torch.testing.assert_close(grad, 6 * s)


@pytest.mark.parametrize("run", [plain, pytest.param(None, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_recurrent_dropout_between_layers(run: Any):
    """The second layer sees the first one's outputs with some of them 0 and the others doubled."""
    module = nn.RNN(SIZE, 50, 2, dropout=0.5, batch_first=True, nonlinearity="relu")
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.zero_()
            if name == "bias_ih_l0":
                p.fill_(1)
            if name == "weight_ih_l1":
                p.copy_(torch.eye(50))
    run = run or torch.compile(plain, fullgraph=True, backend="aot_eager")
    out, last = run(module, build(rows(), "nested", Tensor.detach))
    assert set(out.values.unique().tolist()) == {0.0, 2.0}
    assert last[0, [0, 2, 3]].unique().tolist() == [1.0]
    assert last[:, 1].unique().tolist() == [0.0]


def test_recurrent_module_over_members():
    """An ensemble: parameters mapped, the batch common."""
    members = [nn.GRU(SIZE, 4, batch_first=True) for _ in range(3)]
    params, _ = torch.func.stack_module_state(members)
    x = build(rows(), "nested", Tensor.detach)

    def loss(p: Any) -> Tensor:
        return torch.func.functional_call(members[0], p, (x,))[0].values.square().sum()

    grads, values = torch.vmap(torch.func.grad_and_value(loss))({k: p.detach() for k, p in params.items()})
    for i, member in enumerate(members):
        want = member(x)[0].values.square().sum()
        assert torch.allclose(values[i], want)
        found = torch.autograd.grad(want, list(member.parameters()))
        assert all(is_close(grads[k][i], g) for (k, _), g in zip(member.named_parameters(), found, strict=True))


def sum_of(module: nn.Module, params: Any, x: Any) -> Tensor:
    out, last = tdc.functional_call(module, params, (x,))
    real = out.filled(0) if isinstance(out, tdc.MaskedBatch) else out.values
    return real.square().sum() + sum([s.sum() for s in states_of(last)])


def over(loss: Callable[..., Tensor]) -> Callable[..., Any]:
    return torch.vmap(loss, in_dims=(0, None))


TRANSFORMS: dict[str, Callable[[Callable[..., Tensor]], Callable[..., Any]]] = {
    "grad": lambda loss: lambda p, x: tdc.grad(loss)(p[0], x),
    "vmap": over,
    "vmap of grad": lambda loss: over(tdc.grad(loss)),
    "grad of vmap": lambda loss: tdc.grad(lambda p, x: over(loss)(p, x).sum()),
}


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("name", RECURRENT)
def test_transforms_of_parameters_in_graphs(name: str, transform: str, kind: str):
    """An ensemble of functional calls and its gradients, each net for itself; a call leaves the module as it was."""
    module = RECURRENT[name]()
    params = torch.stack([tdc.from_module(module) * k for k in (1.0, 0.5)])
    x, run = build(rows(), kind, Tensor.detach), TRANSFORMS[transform](partial(sum_of, module))
    each = [tdc.grad(partial(sum_of, module)) if "grad" in transform else partial(sum_of, module)] * len(params)
    want = [fn(p, x) for fn, p in zip(each, params, strict=True)]
    want = want[0] if transform == "grad" else torch.stack(want)
    own = [id(w) for w in module._flat_weights]
    for fn in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        for a, b in zip(pytree.tree_leaves(fn(params, x)), pytree.tree_leaves(want), strict=True):
            torch.testing.assert_close(a, b)
    assert [id(w) for w in module._flat_weights] == own


def two_layers(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Callable[[Tensor], Any], Tensor]:
    """A network, one result of it as a function of packed values, and values."""
    module = nn.GRU(2, 3, 2, bidirectional=True, batch_first=True).to(dtype)
    offsets = torch.tensor([0, 2, 2, 5])

    def run(values: Tensor) -> Any:
        out, last = module(tdc.NestedTensor(values, offsets, max_length=3))
        return out.values, last

    return module, run, torch.randn(5, 2, dtype=dtype, requires_grad=True)


def test_recurrent_backward_runs_twice():
    module, run, values = two_layers()
    loss = run(values)[0].square().sum()
    leaves = [values, *module.parameters()]
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_recurrent_half(dtype: torch.dtype):
    module, run, values = two_layers(dtype)
    found = torch.autograd.grad(run(values)[0].float().square().sum(), [values, *module.parameters()])
    outs = torch.cat([module(row[None])[0][0] for row in values.split([2, 3])])
    want = torch.autograd.grad(outs.float().square().sum(), [values, *module.parameters()])
    assert all(torch.allclose(a, b, rtol=0.05, atol=0.02) for a, b in zip(found, want, strict=True))


@pytest.mark.cases(1, 2)
@pytest.mark.parametrize("lengths", [(2, 3), (0, 0)])
@pytest.mark.parametrize("name", ["tanh", "relu", "lstm", "lstm_projected", "gru"])
def test_recurrent_under_autocast(name: str, lengths: tuple[int, ...]):
    """The dtypes of a row by itself, eagerly and in a graph."""
    module, x = RECURRENT[name](), build(rows(lengths), "nested", Tensor.detach)
    with torch.autocast("cpu", torch.bfloat16):
        row, want = module(torch.ones(2, SIZE))
    for fn in (plain, torch.compile(plain, fullgraph=True, backend="aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            out, last = fn(module, x)
        assert out.dtype == row.dtype
        assert [s.dtype for s in states_of(last)] == [s.dtype for s in states_of(want)]
        if any(lengths):
            loss = out.values.square().sum() + sum(s.sum() for s in states_of(last))
            assert all(g.isfinite().all() for g in torch.autograd.grad(loss, list(module.parameters())))


def test_recurrent_layout_message():
    x: Any = tdc.pack([torch.ones(4, 2), torch.ones(4, 3)], ragged_dim=2)
    hx, weights = torch.zeros(1, 2, 4), [torch.zeros(12, 4), torch.zeros(12, 4)]
    with pytest.raises(tdc.StructureError) as caught:
        torch.gru(x, hx, weights, False, 1, 0.0, False, False, True)
    assert str(caught.value).splitlines() == [
        "tdc.gru: expected (B, -1, D) and batch_first=True, or (-1, B, D) without, for a NestedTensor, "
        "got NestedTensor float32[2, 4, -1] and batch_first=True",
        "hint: build the module with batch_first=True",
    ]


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", ["tanh", "lstm", "gru"])
def test_a_graph_trains_with_steps_that_keep_their_gates(name: str, monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any) -> Any:
        raise AssertionError("torch's kernels ran, whose backward adds to the gradients of weights at each step")

    monkeypatch.setattr(operator, "run_rows", refuse)
    module = RECURRENT[name]()
    x = tdc.pack([torch.randn(n, SIZE) for n in (3, 1, 4)])
    run = torch.compile(lambda x: module(x)[0].values.square().sum(), backend="aot_eager", fullgraph=True)
    run(x).backward()
    found = [p.grad for p in module.parameters()]
    want = torch.autograd.grad(module(x)[0].values.square().sum(), list(module.parameters()))
    torch.testing.assert_close(found, list(want))


@pytest.mark.parametrize("name", ["lstm", "lstm_projected"])
def test_states_of_another_order_in_memory(name: str):
    """Their results lie as the graph was told."""
    module, x = RECURRENT[name](), tdc.pack([torch.randn(n, SIZE) for n in (3, 1, 4)])
    shapes = [(3, 4 if name == "lstm" else 2, n) for n in ((4, 4) if name == "lstm" else (3, 5))]
    states = tuple([torch.randn(b, s, n).transpose(0, 1) for b, s, n in shapes])
    with fakes_agree(), torch.no_grad():
        module(x, states)


def gradients_of(found: Any, leaves: Any) -> list[Tensor]:
    """Gradients of outputs and last states, each weighted on its own."""
    out, last = found
    parts = [out.values, *states_of(last)]
    return list(torch.autograd.grad(sum([(k + 1) * t.sin().sum() for k, t in enumerate(parts)]), leaves))


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_weights_of_another_order_in_memory(name: str):
    """As parametrizations make them."""
    module, x = RECURRENT[name](), tdc.pack([torch.randn(n, SIZE) for n in (4, 1, 3)])
    params = list(module.parameters())
    turned = {k: p.t().contiguous().t() for k, p in module.named_parameters()}
    ours, want = torch.func.functional_call(module, turned, (x,)), module(x)
    torch.testing.assert_close(ours[0].values, want[0].values)
    torch.testing.assert_close(gradients_of(ours, params), gradients_of(want, params))
    with torch.no_grad():
        torch.testing.assert_close(torch.func.functional_call(module, turned, (x,))[0].values, want[0].values)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_states_that_rows_share(name: str):
    """As learned first states are, expanded to all rows."""
    module, x = RECURRENT[name](), tdc.pack([torch.randn(n, SIZE) for n in (4, 1, 3)])
    first = [torch.randn(4, 1, 4, requires_grad=True) for _ in range(1 + (name == "lstm"))]
    shared, own = [s.expand(4, 3, 4) for s in first], [s.repeat(1, 3, 1) for s in first]
    found, want = [module(x, tuple(s) if name == "lstm" else s[0]) for s in (shared, own)]
    torch.testing.assert_close(found[0].values, want[0].values)
    torch.testing.assert_close(gradients_of(found, first), gradients_of(want, first))


@pytest.mark.parametrize("learns", [False, True])
def test_a_row_that_is_not_finite_stays_alone(learns: bool):
    module, rows = RECURRENT["lstm"]().requires_grad_(learns), [torch.randn(n, SIZE) for n in (6, 2, 4)]
    rows[1].fill_(float("nan"))
    out, (h, c) = module(tdc.pack(rows))
    assert [part.isfinite().all().item() for part in out.unbind()] == [True, False, True]
    assert [part.isfinite().all().item() for part in (*h.unbind(1), *c.unbind(1))] == [True, False, True] * 2


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_forward_mode_of_gradients_and_under_vmap(name: str):
    module, offsets = RECURRENT[name]().double(), torch.tensor([0, 2, 2, 5])
    x, t, u = torch.randn(3, 5, SIZE, dtype=torch.float64).unbind()

    def run(values: Tensor) -> Tensor:
        return module(tdc.NestedTensor(values, offsets, max_length=3))[0].values

    out, pullback = torch.func.vjp(run, x)
    tangent = torch.randn_like(out)
    found = torch.func.jvp(lambda g: pullback(g)[0], (out,), (tangent,))[1]
    torch.testing.assert_close(found, pullback(tangent)[0])
    each = [torch.func.jvp(run, (a,), (b,))[1] for a, b in ((x, t), (t, u))]
    with torch.autograd.forward_ad.dual_level():
        both = torch.autograd.forward_ad.make_dual(torch.stack([x, t]), torch.stack([t, u]))
        found = torch.autograd.forward_ad.unpack_dual(torch.vmap(run)(both)).tangent
    torch.testing.assert_close(found, torch.stack(each))


def test_a_direction_in_a_graph_is_refused():
    module, x = nn.LSTM(SIZE, 4, batch_first=True), tdc.pack([torch.randn(n, SIZE) for n in (3, 1, 4)])

    def along(values: Tensor) -> Any:
        return torch.func.jvp(lambda v: module(x.with_values(v))[0].values, (values,), (values,))

    along(x.values)
    with pytest.raises(Unsupported) as caught:
        torch.compile(along, fullgraph=True, backend="eager")(x.values)
    assert "UnsupportedError" in str(caught.value.__cause__)  # with its text from torch 2.13


WRONG: list[tuple[str, int, tuple[int, ...], str]] = [
    ("lstm", 2, (16, 7), "expected (16, 8) for weight 0, got Tensor float32[16, 7]"),
    ("lstm", 3, (16, 3), "expected (16, 4) for weight 1, got Tensor float32[16, 3]"),
    ("lstm", 4, (15,), "expected (16,) for weight 2, got Tensor float32[15]"),
    ("lstm", 2, (12, 8), "expected (16, 8) for weight 0, got Tensor float32[12, 8]"),
    ("lstm", 1, (1, 2, 4), "expected states (1, 3, 4), got Tensor float32[1, 2, 4]"),
    ("lstm", 0, (2, 3, 4), "expected states (1, 3, 4), got Tensor float32[2, 3, 4]"),
    ("gru", 1, (12, 7), "expected (12, 8) for weight 0, got Tensor float32[12, 7]"),
    ("gru", 0, (1, 5, 4), "expected states (1, 3, 4), got Tensor float32[1, 5, 4]"),
]


@pytest.mark.parametrize(("name", "at", "shape", "text"), WRONG)
def test_states_and_weights_of_other_sizes(name: str, at: int, shape: tuple[int, ...], text: str):
    """Kernels would read what lies behind them."""
    module: Any = {"lstm": nn.LSTM, "gru": nn.GRU}[name](8, 4, batch_first=True)
    states = [torch.zeros(1, 3, 4)] * (2 if name == "lstm" else 1)
    operands = [*states, *module._flat_weights]
    operands[at] = torch.zeros(shape)
    hx, weights = operands[: len(states)], operands[len(states) :]
    x: Any = tdc.pack([torch.randn(n, 8) for n in (3, 5, 2)])
    with pytest.raises(tdc.ShapeError) as caught:
        getattr(torch, name)(x, hx if name == "lstm" else hx[0], weights, True, 1, 0.0, False, False, True)
    assert text in str(caught.value)
