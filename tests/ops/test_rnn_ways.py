"""The ways in which an LSTM runs on CPU: step by step, stretch by stretch, padded to the longest row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from harness import Counter
from test_nn import KINDS, SIZE, compiled, plain, rows
from torch import Tensor, nn

import tdc
from tdc.ops.recurrent import operator, rectangle, stretches
from tdc.ops.recurrent.order import order_of
from tdc.testing.batches import build

LENGTHS = (3, 0, 5, 1, 5, 5, 9)
WAYS = ["steps", "rectangle"]


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    """Dynamo refuses recurrent modules unless told otherwise (2.11-2.13)."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def by(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let LSTMs run in one way, and in no other."""
    monkeypatch.setattr(stretches, "pays", lambda *args: way == "stretches")
    monkeypatch.setattr(rectangle, "pays", lambda *args: way == "rectangle")
    for name in {"steps", "stretches", "rectangle"} - {way}:
        monkeypatch.setattr(operator, name.upper(), None)


def lstm(bias: bool = True) -> nn.Module:
    return nn.LSTM(SIZE, 5, 2, bias=bias, bidirectional=True, batch_first=True)


def of_each(module: nn.Module, x: Any, given: tuple[Tensor, Tensor]) -> list[list[Tensor]]:
    """Outputs, h and c of one row after another."""
    found = []
    for i, row in enumerate(x.unbind()):
        h, c = given[0][:, i], given[1][:, i]
        out, (h, c) = module(row, (h, c)) if len(row) else (row.new_zeros(0, 10), (h, c))
        found.append([out, h, c])
    return found


def loss_of(found: list[list[Tensor]]) -> Tensor:
    return torch.stack([(k + 1) * t.sin().sum() for one in found for k, t in enumerate(one)]).sum()


def results(run: Callable[..., Any], module: nn.Module, x: Any, given: tuple[Tensor, Tensor]) -> list[list[Tensor]]:
    out, (h, c) = run(module, x, given)
    return [list(parts) for parts in zip(out.unbind(), h.unbind(1), c.unbind(1), strict=True)]


def close(found: Any, want: Any) -> None:
    torch.testing.assert_close(found, want, rtol=2e-5, atol=2e-6)


@pytest.mark.cases(1, 3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients(way: str, bias: bool, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Eagerly, and in one graph for all lengths."""
    module = lstm(bias)
    counter = Counter()
    run = compiled(plain, counter)
    for lengths in (LENGTHS, (2, 4, 0, 1, 1, 2, 3), (5, 5, 5, 5, 5, 5, 2), (3,) * 7):
        x = build(rows(lengths), kind, Tensor.detach)
        given = tuple([torch.randn(4, len(lengths), 5, requires_grad=True) for _ in range(2)])
        leaves = [*module.parameters(), *given]
        want = of_each(module, x, given)
        gradients = torch.autograd.grad(loss_of(want), leaves)
        with monkeypatch.context() as patch:
            by(way, patch)
            for fn in (plain, run):
                found = results(fn, module, x, given)
                close(found, want)
                close(torch.autograd.grad(loss_of(found), leaves), gradients)
    assert counter.graphs == 1


def padded(t: Tensor) -> Tensor:
    """The same numbers within a larger storage."""
    return t.new_zeros(t.numel() + 8)[: t.numel()].view(t.shape).copy_(t)


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("copy", [Tensor.clone, padded])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_where_saved_tensors_are_copied(compiled: bool, copy: Any, monkeypatch: pytest.MonkeyPatch):
    """What a graph keeps of a rectangle is lost, and made again."""
    module, x = lstm(), tdc.pack([torch.randn(n, SIZE) for n in (4, 1, 3)])
    given = torch.randn(4, 3, 5), torch.randn(4, 3, 5)
    want = torch.autograd.grad(loss_of(of_each(module, x, given)), list(module.parameters()))
    by("rectangle", monkeypatch)
    run = torch.compile(plain, fullgraph=True, backend="aot_eager") if compiled else plain
    results(run, module, x, given)
    calls: list[int] = []
    forward = rectangle.RECTANGLE.run
    again = rectangle.RECTANGLE._replace(run=lambda *args: calls.append(1) or forward(*args))
    monkeypatch.setattr(operator, "RECTANGLE", again)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: copy(t.detach()), lambda t: t):
        loss = loss_of(results(run, module, x, given))
    close(torch.autograd.grad(loss, list(module.parameters())), want)
    assert len(calls) == (8 if compiled else 4)


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_graph_hands_on_what_a_rectangle_kept(backend: str, monkeypatch: pytest.MonkeyPatch):
    by("rectangle", monkeypatch)
    calls: list[int] = []
    forward = rectangle.RECTANGLE.run
    again = rectangle.RECTANGLE._replace(run=lambda *args: calls.append(1) or forward(*args))
    monkeypatch.setattr(operator, "RECTANGLE", again)
    module, x = lstm(), tdc.pack([torch.randn(n, SIZE) for n in (4, 1, 3)])
    torch.compile(lambda: module(x)[0].values.square().sum(), fullgraph=True, backend=backend)().backward()
    assert len(calls) == 4


@pytest.mark.cases(1)
@pytest.mark.parametrize("way", [*WAYS, "stretches"])
def test_where_gates_are_far_open(way: str, monkeypatch: pytest.MonkeyPatch):
    """Cells of hundreds: no padding moves them."""
    module, x = nn.LSTM(SIZE, 5, batch_first=True), tdc.pack([300 * torch.randn(n, SIZE) for n in (60, 1, 7)])
    given = torch.zeros(1, 3, 5), 500 * torch.randn(1, 3, 5)
    with torch.no_grad():
        want = of_each(module, x, given)
        by(way, monkeypatch)
        close(results(plain, module, x, given), want)


@pytest.mark.parametrize("way", [*WAYS, "stretches"])
def test_weights_of_another_order_in_memory(way: str, monkeypatch: pytest.MonkeyPatch):
    """As parametrizations make them, where nobody differentiates, too."""
    module, x = lstm(), tdc.pack([torch.randn(n, SIZE) for n in (4, 1, 3)])
    given = torch.randn(4, 3, 5), torch.randn(4, 3, 5)
    with torch.no_grad():
        want = of_each(module, x, given)
        by(way, monkeypatch)
        params = {k: p.t().contiguous().t() for k, p in module.named_parameters()}
        found = torch.func.functional_call(module, params, (x, given))
        close(results(lambda *args: found, module, x, given), want)


@pytest.mark.parametrize("way", [*WAYS, "stretches"])
def test_states_that_rows_share(way: str, monkeypatch: pytest.MonkeyPatch):
    """As learned first states are, expanded to all rows."""
    module, x = lstm(), tdc.pack([torch.randn(n, SIZE) for n in (4, 1, 3)])
    first = [torch.randn(4, 1, 5, requires_grad=way != "stretches") for _ in range(2)]
    given = first[0].expand(4, 3, 5), first[1].expand(4, 3, 5)
    want = of_each(module, x, given)
    by(way, monkeypatch)
    with torch.set_grad_enabled(way != "stretches"):
        found = results(plain, module, x, given)
    close(found, want)
    if way != "stretches":
        close(torch.autograd.grad(loss_of(found), first), torch.autograd.grad(loss_of(want), first))


def test_a_row_that_is_not_finite_stays_alone(monkeypatch: pytest.MonkeyPatch):
    module, bad = nn.LSTM(SIZE, 5, batch_first=True), torch.full((2, SIZE), float("nan"))
    x = tdc.pack([torch.randn(6, SIZE), bad, torch.randn(4, SIZE)])
    given = torch.zeros(1, 3, 5), torch.zeros(1, 3, 5)
    want = of_each(module, x, given)
    by("rectangle", monkeypatch)
    found = results(plain, module, x, given)
    close([found[0], found[2]], [want[0], want[2]])
    assert found[1][2].isnan().all()


def test_other_dtypes_and_a_processor_without_onednn_go_by_steps(monkeypatch: pytest.MonkeyPatch):
    by("rectangle", monkeypatch)
    x = [torch.randn(n, SIZE) for n in (4, 1, 3)]
    with pytest.raises(AttributeError, match="NoneType"):
        lstm().double()(tdc.pack([row.double() for row in x]))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(AttributeError, match="NoneType"):
        lstm()(tdc.pack(x))


def test_padding_pays_where_it_is_little():
    """Of small nets, and of large ones whose rows are nearly as long as the longest."""

    def pays(lengths: list[int], size: int, keep: bool = True) -> bool:
        rows = torch.tensor(lengths)
        weights = [torch.empty(4 * size, size)] * 2
        return rectangle.pays(order_of(rows.cumsum(0) - rows, rows), keep, max(lengths), weights)

    assert pays([10, 4, 7, 9, 3], 32)
    assert pays([30] * 31 + [29], 512)
    assert not pays([30] * 16 + [3] * 16, 512)
    assert pays([40, 30] * 16, 128)
    assert not pays([40, 10] * 16, 128)
    assert pays([40, 10] * 16, 128, keep=False)
