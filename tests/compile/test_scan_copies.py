"""Loops by Inductor turn nothing round and hold no second set of weights; results are those of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from inductor_code import code_of
from torch import Tensor, nn
from versions import refused

import tdc
from tdc import TensorDict
from tdc.compile import backend, dynamic, peak_bytes, scan_blocks, train_step
from tdc.optim import sgd

ROWS, WIDTH = 3, 8


def recurrent(x: Tensor, w: Tensor, reverse: bool = False) -> Tensor:
    """A loop over rows of x, and of w if it has some; each result of each step has a share of its own in the number."""

    def step(h: Tensor, row: Any) -> tuple[Tensor, Tensor]:
        h = torch.tanh(F.linear(h, row.get("w", w)) + row["x"])
        return h, h.sum(-1)

    rows = {"x": x, "w": w} if w.ndim == 3 else {"x": x}
    h, ys = tdc.scan(step, x.new_zeros(x.shape[1:]), rows, dim=0, reverse=reverse)
    shares = torch.arange(1.0, ROWS + 1) * (torch.arange(len(x)) + 1)[:, None]
    return (h * torch.arange(1.0, h.numel() + 1).view(h.shape)).sum() + (ys * shares).sum()


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend=backend, fullgraph=True)


def gradients(fn: Callable[..., Any], *args: Tensor) -> list[Tensor]:
    """A value and its gradients."""
    value = fn(*args)
    return [value.detach(), *torch.autograd.grad(value, args)]


@pytest.mark.sweep
@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "reverse"])
@pytest.mark.parametrize("layers", [False, True], ids=["time", "layers"])
def test_a_step_of_training_runs_its_loop_backwards_over_what_was_kept(reverse: bool, layers: bool) -> None:
    """The loss and its gradient in one graph; over time for all lengths."""

    def loss(params: TensorDict, batch: TensorDict) -> Tensor:
        return recurrent(batch["x"] * params["scale"], params["w"], reverse)

    step = train_step(loss, sgd(0.5))
    w = torch.randn((4, WIDTH, WIDTH) if layers else (WIDTH, WIDTH)) / 3
    state = step.init(TensorDict({"scale": torch.randn(WIDTH), "w": w}))
    with refused("tdc.scan: expected no transform of torch.func around it"):
        for length in (4,) if layers else (4, 9, 2):
            x = torch.randn(length, ROWS, WIDTH)
            batch = TensorDict({"x": x if layers else dynamic(x, dims=0)})
            (after, metrics), code = code_of(step, state, batch) if length == 4 else (step(state, batch), "")
            want_after, want = step.update(state, batch)
            torch.testing.assert_close(metrics["loss"], want["loss"], rtol=1e-5, atol=1e-5)
            for key in ("scale", "w"):
                torch.testing.assert_close(after["params", key], want_after["params", key])
            if length == 4:
                assert code.count("while should_loop") == 2
                assert "flip" not in code
        assert step.counts.compiles == 1


@pytest.mark.sweep
@pytest.mark.slow
def test_a_gradient_outside_of_the_graph_is_that_of_python() -> None:
    run = compiled(recurrent)
    for steps in (4, 2, 7):
        x = dynamic(torch.randn(steps, ROWS, WIDTH), dims=0).requires_grad_()
        w = torch.randn(WIDTH, WIDTH, requires_grad=True)
        torch.testing.assert_close(gradients(run, x, w), gradients(recurrent, x, w))


@pytest.mark.sweep
@pytest.mark.slow
def test_a_flip_that_somebody_asks_for_stays() -> None:
    """Results of a loop in the order of its steps, and the other way round."""

    def fn(x: Tensor) -> tuple[Tensor, ...]:
        h, ys = tdc.scan(lambda h, row: (h + row, h * row), x.new_zeros(WIDTH), x.flip(0), dim=0)
        return h, ys, ys.flip(0), x.flip(0), ys.flip(1)

    x = torch.randn(5, WIDTH)
    torch.testing.assert_close(compiled(fn)(x), fn(x))


@pytest.mark.slow
def test_a_loop_over_flips_and_others_is_left_as_it_is() -> None:
    def fn(x: Tensor, y: Tensor) -> Any:
        rows = {"x": x.flip(0), "y": y}
        return tdc.scan(lambda h, row: (h + row["x"] * row["y"], h.exp()), x.new_zeros(WIDTH), rows, dim=0)

    x, y = torch.randn(5, WIDTH), torch.randn(5, WIDTH)
    torch.testing.assert_close(compiled(fn)(x, y), fn(x, y))


@pytest.mark.cases(0, 1)
@pytest.mark.parametrize("end", [5, 3])
@pytest.mark.parametrize("form", ["row", "power", "counter", "rows"])
def test_a_loop_that_is_no_scan_of_flips_is_left_as_it_is(form: str, end: int) -> None:
    """Rows of a flip, by a loop of somebody's own: of some of them, with the counter as a number, or given out."""

    def fn(x: Tensor) -> Any:
        turned = x.flip(0)

        def body(i: Tensor, h: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            at = i.item()
            torch._check(at >= 0)
            torch._check(at < len(x))
            row = rows[at] * 2.0**i if form == "power" else rows[at]
            return i + 1, h * 0.5 + row, rows + 1 if form == "rows" else rows.clone()

        start = torch.zeros((), dtype=torch.int64), x.new_zeros(WIDTH), turned
        i, h, rows = tdc.while_loop(lambda i, h, rows: i < end, body, start)
        return (h, i, rows) if form in ("counter", "rows") else h

    x = torch.randn(5, WIDTH)
    torch.testing.assert_close(compiled(fn)(x), fn(x))


@pytest.mark.slow
def test_what_a_step_gives_out_as_it_got_it_is_a_copy() -> None:
    """Also what another loop reads, and a flip of a flip: who writes into a result writes nowhere else."""

    def fn(x: Tensor, w: Tensor) -> Any:
        def step(h: Tensor, row: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            return h + row, (row, row.mT, row.mT.mT, w, w.transpose(0, 1).transpose(0, 1))

        h, ys = tdc.scan(step, x.new_zeros(4, 4), x, dim=0)
        end, again = tdc.scan(lambda h, row: (h * row, (h, row)), h, ys[4], dim=0)
        return [h, *ys, x.flip(0).flip(0), end, *again, again[1].flip(0), again[1].flip(0)]

    x, w = torch.randn(5, 4, 4), torch.randn(4, 4)
    given, run = (x.clone(), w.clone()), compiled(fn)
    found, want = run(*given), fn(x, w)
    torch.testing.assert_close(found, want)
    for i, result in enumerate(found):
        result.fill_(i)
    assert [float(result.mean()) for result in found] == list(range(len(found)))
    assert torch.equal(given[0], x)
    assert torch.equal(given[1], w)


@pytest.mark.sweep
def test_a_loop_over_layers_keeps_no_second_set_of_their_weights() -> None:
    """The layers are much larger than what they pass on: what a step holds beyond the state are gradients."""
    torch.manual_seed(0)
    net, x, losses = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), torch.randn(2, 64), []
    with refused("call_id"):
        for form in (net, scan_blocks(net, nn.Linear)):
            step = train_step(form, lambda net, x: net(x).square().mean(), sgd(0.1), donate=True)
            state, metrics = step(step.init(), x)
            losses.append(float(metrics["loss"]))
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        weights = 8 * 64 * 65 * 4
        assert peak_bytes(lambda: step(state, x)) < 1.7 * weights  # 3.2 with the copies
