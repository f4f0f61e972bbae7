"""What torch's vmap has no rule for (2.11-2.15): it fails, or runs one example after the other.

    lstm_cell, gru_cell ...     by what they are made of
    lstm, gru ...               once, for the sequences of all examples
    attention on CPU            once, for the heads of all examples

A rule runs where its level is being taken away: what it calls with tensors of all examples goes on below it, autograd
included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.compile._torch.levels import current_level, level_of, mapped, physical
from tdc.core.dynamo import has_kernel
from tdc.core.errors import UnsupportedError, message
from tdc.core.torch_functions import fused_cpu_forward

KEY = "FuncTorchBatchedDecomposition"  # where vmap looks for what an operation is made of
RULES: list[Any] = []  # the registrations, which end where nobody holds them


def lstm_cell(
    input: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h, c = hx
    i, f, g, o = (F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh)).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    of_input, of_state = F.linear(input, w_ih, b_ih).chunk(3, -1), F.linear(hx, w_hh, b_hh).chunk(3, -1)
    r, z = [(a + b).sigmoid() for a, b in zip(of_input[:2], of_state[:2], strict=True)]
    n = (of_input[2] + r * of_state[2]).tanh()
    return n + z * (hx - n)


def plain_cell(act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(
        input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
    ) -> Tensor:
        return act(F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh))

    return cell


def folded(x: Tensor, level: int, count: int, dim: int) -> Tensor:
    """The tensor of all examples, which come in front of a dim of one example's and are one with it."""
    whole = physical(x, level) if level_of(x) == level else x.expand(count, *x.shape)
    return whole.movedim(0, dim).flatten(dim, dim + 1)


def layers(op: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The rule of recurrent layers: examples are more sequences."""

    def rule(input: Tensor, hx: Any, params: list[Tensor], *settings: Any) -> tuple[Tensor, ...]:
        level, dim = current_level(), 0 if settings[-1] else 1
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        if any(level_of(x) == level for x in params):
            got, hint = "other weights for each example", f"nn.{name.upper()}Cell in a loop, or tdc.stack_modules"
            raise UnsupportedError(message("batch", "layers whose weights all examples share", got, hint=hint))
        count = next(physical(x, level).shape[0] for x in (input, *states) if level_of(x) == level)
        x, states = folded(input, level, count, dim), [folded(h, level, count, 1) for h in states]
        out, *ends = op(x, states[0] if isinstance(hx, Tensor) else states, params, *settings)
        found = [(out, dim), *[(end, 1) for end in ends]]
        return tuple([mapped(x.unflatten(d, (count, -1)).movedim(d, 0), level) for x, d in found])

    return rule


def attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Tensor | None = None, scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The rule of attention on CPU, of (N, H, T, D): examples are more of N."""
    level = current_level()
    given = [x for x in (query, key, value, attn_mask) if x is not None]
    count = next(physical(x, level).shape[0] for x in given if level_of(x) == level)
    q, k, v = [folded(x, level, count, 0) for x in (query, key, value)]
    mask = attn_mask
    if mask is not None and (mask.ndim > 2 or level_of(mask) == level):
        mask = mask if mask.ndim > 2 else mask[None, None]
        mask = folded(mask.expand(query.shape[0], *mask.shape[1:]), level, count, 0)
    found = fused_cpu_forward(q, k, v, dropout_p, is_causal, attn_mask=mask, scale=scale)
    out, weights = [mapped(x.unflatten(0, (count, -1)), level) for x in found]
    return out, weights


RULES_OF: dict[str, Callable[..., Any]] = {
    "lstm_cell": lstm_cell,
    "gru_cell": gru_cell,
    "rnn_tanh_cell": plain_cell(torch.tanh),
    "rnn_relu_cell": plain_cell(torch.relu),
    "lstm.input": layers(torch.ops.aten.lstm.input, "lstm"),
    "gru.input": layers(torch.ops.aten.gru.input, "gru"),
    "rnn_tanh.input": layers(torch.ops.aten.rnn_tanh.input, "rnn"),
    "rnn_relu.input": layers(torch.ops.aten.rnn_relu.input, "rnn"),
    "_scaled_dot_product_flash_attention_for_cpu": attention,
}


def register_rules() -> None:
    """Tell vmap of what it lacks."""
    known = [name for name in RULES_OF if fused_cpu_forward is not None or RULES_OF[name] is not attention]
    missing = [name for name in known if not any(has_kernel(name, key) for key in (KEY, "FuncTorchBatched"))]
    if missing:
        rules = torch.library.Library("aten", "IMPL", KEY)
        for name in missing:
            rules.impl(name, RULES_OF[name])
        RULES.append(rules)
