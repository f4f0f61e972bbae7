"""Samples of recurrent networks: every kind, several layers, both directions, projections, rows without steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from harness import Call, Draw, Layout, Sample, call

from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Dense, Ragged, examples

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
SIZE, HIDDEN = 3, 5
LIGHT = ("eager", "grad", "vmap")


def recurrent(rule: Rule) -> Iterator[Sample]:
    """Outputs with the structure of the input, and the last states of all rows."""
    mode = rule.name

    def draw(
        d: Draw, layers: int = 1, both: bool = False, bias: bool = True, proj: int = 0, first: bool = True
    ) -> Call:
        directions, out, weights = 1 + both, proj or HIDDEN, []
        for i in range(layers):
            width = out * directions if i else SIZE
            for _ in range(directions):
                weights += [d.tensor(GATES[mode] * HIDDEN, width), d.tensor(GATES[mode] * HIDDEN, out)]
                weights += [d.tensor(GATES[mode] * HIDDEN), d.tensor(GATES[mode] * HIDDEN)] if bias else []
                weights += [d.tensor(proj, HIDDEN)] if proj else []
        x = d.ragged(Layout((), (SIZE,)), batch_dim=0 if first else 1)
        h, c = (state(d, layers * directions, n) for n in (out, HIDDEN))
        return call(x, (h, c) if mode == "lstm" else h, weights, bias, layers, 0.0, False, both, first)

    def state(d: Draw, count: int, width: int) -> Dense:
        whole = d.tensor(count, len(d.lengths), width)
        return Dense(whole, [part.unsqueeze(1) for part in whole.unbind(1)], (1,))

    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        results = [one(ref, *a) for a, _ in examples((args, kwargs))]
        outs, *states = zip(*results, strict=True)
        return Ragged(list(outs), args[0].dims, args[0].batch_dim), *[torch.cat(s, 1) for s in states]

    def one(ref: Any, x: torch.Tensor, hx: Any, weights: Any, *rest: Any) -> Any:
        if len(x) == 0:
            states = hx if isinstance(hx, tuple) else (hx,)
            return x.new_zeros(0, states[0].shape[-1] * (1 + rest[-2])), *[s + 0 for s in states]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "LSTM with projections is not supported with oneDNN")
            out, *states = ref(x[None], hx, weights, *rest[:-1], True)
        return out[0], *states

    yield Sample("one layer", draw, want, MODES)
    yield Sample("both directions", lambda d: draw(d, 2, True), want, MODES if mode == "lstm" else LIGHT)
    yield Sample("no bias, batch second", lambda d: draw(d, bias=False, first=False), want, LIGHT)
    if mode == "lstm":
        yield Sample("projections", lambda d: draw(d, 2, True, proj=2), want, LIGHT)


RAGGED = {"rnn": recurrent}
