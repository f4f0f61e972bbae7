"""Rows of functions of torch's layers, which tell a batch from an example by the number of dims.

    example (C, T)       unbatched: the batch is (B, C, -1)
    example (1, C, T)    a batch of one: the dim of size 1 is removed and comes back
    example (T, C, L)    a batch of rows: the rows of all examples are one batch (N, C, L)

Statistics of a batch have no meaning for an example, and are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tdc.autobatch.per_example.index import picked
from tdc.autobatch.per_example.operands import together
from tdc.autobatch.per_example.table import (
    NESTED,
    TABLE,
    all_dims,
    each,
    first_is_ragged,
    flattened,
    of_rank,
    only_shared,
    put,
    ragged,
    rank,
    refuse,
)
from tdc.autobatch.values import Lane
from tdc.core.rules import RULES, name_of
from tdc.core.typing import Op
from tdc.ragged.nested import NestedTensor, build_nested
from tdc.ragged.storage import map_results


def of_batch(op: Any, x: NestedTensor, run: Callable[[Any], Any]) -> Any:
    """A function of a batch (N, C, ...) for examples that are batches."""
    if x.shape[1] == 1:
        return map_results_of(run(x.squeeze(1)), lambda t: t.unsqueeze(1))
    if not first_is_ragged(x):
        refuse(f"torch.{name_of(op)} of batches whose first dim is not ragged", "call it for one example: x[0]")
    return map_results_of(run(x.values), lambda t: build_nested(x.structure, t))


def map_results_of(found: Any, fn: Callable[[Any], Any]) -> Any:
    """`fn` of a result, ragged or dense, or of each of several."""
    return fn(found) if isinstance(found, NestedTensor) else map_results(found, fn)


def spatial(op: Any, n: int, apart: bool = False) -> Op:
    """A row for a function of (C, ...) or (N, C, ...), with `n` dims after the channels; `apart` if channels do not
    mix."""

    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        x = ragged(input, op)
        only_shared(op, *args, *kwargs.values())
        if rank(x) == n + 1:
            if not apart or not first_is_ragged(x):
                return op(x, *args, **kwargs)
            return map_results_of(op(x.values, *args, **kwargs), lambda t: build_nested(x.structure, t))
        if rank(x) != n + 2:
            refuse(f"{rank(x)} dims in torch.{name_of(op)}", f"examples of {n + 1} dims, channels first")
        return of_batch(op, x, lambda t: op(t, *args, **kwargs))

    return run


def batched(op: Any) -> Op:
    """A row for a function of a batch (N, C, ...) only."""

    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        x = ragged(input, op)
        only_shared(op, *args, *kwargs.values())
        if rank(x) < 2:
            refuse(f"{rank(x)} dims in torch.{name_of(op)}", "examples (N, C, ...)")
        return of_batch(op, x, lambda t: op(t, *args, **kwargs))

    return run


def prelu(input: Any, weight: Any) -> Any:
    """`prelu`, with channels in dim 1 of an example."""
    x = ragged(input, F.prelu)
    only_shared(F.prelu, weight)
    if weight.numel() == 1:
        return torch.where(x > 0, x, x * weight.reshape(()))
    if rank(x) < 2:
        refuse("a slope for each channel of examples of one dim", "one slope")
    y, w = together(F.prelu, [x, weight.reshape(-1, *[1] * (rank(x) - 2))])
    return torch.where(y > 0, y, y * w)


def bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    only_shared(F.bilinear, weight, bias)
    x, y = together(F.bilinear, [input1, input2])
    return F.bilinear(x, y, weight, bias)


def recurrent(op: Any) -> Op:
    """A row for the functions of `nn.LSTM` and the like, which make a batch of one of an example (T, D)."""

    def run(input: Any, hx: Any, weights: Any, *options: Any) -> Any:
        x, first = ragged(input, op), options[-1]
        at = 1 if first else 2  # of the dim of size 1, in the batch
        if rank(x) != 3 or x.shape[at] != 1 or not isinstance(weights, (tuple, list)):
            refuse(f"torch.{name_of(op)} of a batch", "call it for one example: (T, D)")
        states = [state(h, x.structure.batch_size) for h in (hx if isinstance(hx, (tuple, list)) else [hx])]
        given = tuple(states) if isinstance(hx, (tuple, list)) else states[0]
        out, *last = op(x.squeeze(at), given, weights, *options[:-1], True)
        return out.unsqueeze(at), *[h.movedim(1, 0).unsqueeze(2) for h in last]

    return run


def state(h: Any, count: Any) -> Tensor:
    """An initial state (layers, 1, H) of each example as (layers, B, H)."""
    if type(h) is Lane:
        return h.data.squeeze(2).movedim(0, 1).contiguous()
    return h.expand(-1, count, -1).contiguous()


def one_hot(input: Any, num_classes: int = -1) -> Any:
    if num_classes == -1:
        refuse("torch.nn.functional.one_hot without num_classes", "num_classes=n, the same for all examples")
    return F.one_hot(ragged(input, F.one_hot), num_classes)


def take(input: Any, index: Any) -> Any:
    """Elements of the flattened example."""
    return picked(flattened(ragged(input, torch.take)), [index])


def masked_select(input: Any, mask: Any) -> Any:
    """Elements of the flattened example where its mask is true."""
    if not isinstance(mask, NestedTensor) or not isinstance(input, NestedTensor) or rank(input) != rank(mask):
        refuse("torch.masked_select of a tensor and a mask that are not both ragged", "x.expand_as(mask)")
    return picked(flattened(input), [flattened(mask.expand_as(input))])


def dist(input: Any, other: Any, p: float = 2) -> Any:
    x, y = together(torch.dist, [input, other])
    z = x - y
    return torch.linalg.vector_norm(z, p, all_dims(z))


def pairs(op: Any) -> Op:
    """A row for two operands of matrices, or vectors, of one example."""

    def run(a: Any, b: Any, *args: Any, **kwargs: Any) -> Any:
        only_shared(op, *args, *kwargs.values())
        n = max(rank(a), rank(b))
        return op(of_rank(a, n), of_rank(b, n), *args, **kwargs)

    return run


def refused(op: Any, hint: str) -> Op:
    """A row that raises, and names what to write instead."""

    def run(*args: Any, **kwargs: Any) -> Any:
        refuse(f"torch.{name_of(op)}", hint)

    return run


STATISTICS = "layer_norm or group_norm, which look at one example; or normalise outside of the function"
OWN: dict[Any, Op] = {
    F.prelu: prelu, F.bilinear: bilinear, F.one_hot: one_hot, torch.take: take, torch.dist: dist,
    torch.masked_select: masked_select, **{op: recurrent(op) for op in each(torch, "lstm gru rnn_tanh rnn_relu")},
    F.interpolate: batched(F.interpolate), F.unfold: spatial(F.unfold, 2),
    F.group_norm: batched(F.group_norm), F.local_response_norm: batched(F.local_response_norm),
    F.channel_shuffle: batched(F.channel_shuffle),
    F.dropout1d: spatial(F.dropout1d, 1), F.dropout3d: spatial(F.dropout3d, 3),
    F.batch_norm: refused(F.batch_norm, STATISTICS), F.instance_norm: refused(F.instance_norm, STATISTICS),
    torch.equal: refused(torch.equal, "(x == y).all()"), torch.allclose: refused(torch.allclose, "x.isclose(y).all()"),
    F.pairwise_distance: pairs(F.pairwise_distance), torch.cdist: pairs(torch.cdist),
}  # fmt: skip

for _op, _row in OWN.items():
    put(_op, _row)
for _rule in RULES:
    if _rule.kind == "nested" and _rule.family in ("conv", "pool") and NESTED[_rule.op] not in TABLE:
        _n = re.search(r"([123])d", _rule.name)
        if _n is not None and not _rule.reason:
            put(_rule.op, spatial(_rule.op, int(_n.group(1)), _rule.family == "pool"))
