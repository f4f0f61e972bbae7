"""`buckets=` of branches, loops, recurrent layers and other operators that read rows by their lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from filled_batches import compared, poison, ragged
from torch import nn

import tdc
from tdc.compile import Buckets, counted
from tdc.testing import assert_close


@pytest.fixture(autouse=True)
def allowed() -> Iterator[None]:
    """Dynamo refuses recurrent modules unless told otherwise (torch 2.11-2.13)."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


BATCHES = ((3, 17, 2), (9, 4, 19), (5, 2, 21))
GIVEN = Buckets(rows=(4,), totals=(32, 64), lengths=(24,))


def branch(x: Any) -> Any:
    return tdc.cond(x.values.sum() > 0, lambda t: t * 2, lambda t: t - t.mean(0), (x.values,))


def halved(x: Any) -> Any:
    return tdc.while_loop(lambda t: t.abs().sum() > 1.0, lambda t: (t / 2,), (x.values,))


def scanned(x: Any) -> Any:
    end, ys = tdc.scan(lambda c, t: (c * 0.5 + t, c), torch.zeros(4), x.values)
    return end, ys


LSTM, GRU = nn.LSTM(4, 3, batch_first=True, bidirectional=True), nn.GRU(4, 3, num_layers=2, batch_first=True)
FUNCTIONS: dict[str, Any] = {
    "cond": branch, "while_loop": halved, "scan": scanned,
    "lstm": lambda x: LSTM(x)[0], "gru": lambda x: GRU(x)[1], "lstm of padded": lambda x: LSTM(x.to_padded())[0],
}  # fmt: skip


@pytest.mark.cases(2, 4)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_loops(name: str, monkeypatch: pytest.MonkeyPatch):
    poison(monkeypatch)
    run = compared(FUNCTIONS[name], *[ragged(*lengths) for lengths in BATCHES], buckets=GIVEN)
    assert run.counts.compiles == 1


@pytest.mark.cases(1, 1)
@pytest.mark.parametrize("name", ["lstm", "gru", "lstm of padded"])
def test_gradients_of_recurrent_layers(name: str, monkeypatch: pytest.MonkeyPatch):
    poison(monkeypatch)
    weights = [*LSTM.parameters(), *GRU.parameters()]

    def loss(x: Any) -> Any:
        out = FUNCTIONS[name](x)
        return (out if isinstance(out, torch.Tensor) else out.square().sum(1)).square().mean()

    run = counted(loss, backend="aot_eager", buckets=GIVEN)
    for lengths in BATCHES:
        x = ragged(*lengths)
        x.values.requires_grad_()
        want = torch.autograd.grad(loss(x), [x.values, *weights], allow_unused=True, materialize_grads=True)
        got = torch.autograd.grad(run(x), [x.values, *weights], allow_unused=True, materialize_grads=True)
        assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert run.counts.compiles == 1


@pytest.mark.slow  # traces a loss, forward and backward
def test_ctc_loss():
    def loss(given: Any) -> Any:
        logits, targets = given["x"], given["y"]
        return F.ctc_loss(logits.log_softmax(2), targets, None, None)

    run = counted(loss, backend="aot_eager", buckets=GIVEN)
    for lengths in ((9, 17, 12), (9, 14, 19), (11, 12, 21)):
        x = ragged(*lengths, features=6)
        x.values.requires_grad_()
        y = tdc.pack([torch.randint(1, 6, (n // 4,)) for n in lengths])
        given = tdc.TensorDict({"x": x, "y": y}, [3])
        want, got = loss(given), run(given)
        assert_close(got, want, rtol=1e-5, atol=1e-6)
        assert_close(*[torch.autograd.grad(v, x.values)[0] for v in (got, want)], rtol=1e-5, atol=1e-6)
    assert run.counts.compiles == 1
