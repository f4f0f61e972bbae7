"""Samples of normalisations whose statistics are over positions; channels are dim 1."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from harness import Call, Draw, Layout, Sample, call, rowwise
from torch import Tensor

from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Ragged

LONG = ((3, 2, 5), (4, 4), (2, 7, 3))  # torch refuses a single position
CHANNELS = Layout((4,), ())
WIDE = Layout((4,), (3,))
IMAGE = Layout((4,), (), 2)


def alone(ref: Any, args: Any, kwargs: Any) -> Ragged:
    """Expect each example as a batch of one."""
    x, *rest = args
    return x.with_rows([ref(row.unsqueeze(0), *rest, **kwargs).squeeze(0) for row in x.rows])


def grouped(row: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """One example, by the definition: torch refuses some examples without or with one position."""
    x = row.reshape(groups, -1)
    x = x - x.sum(1, keepdim=True) / max(x.shape[1], 1)
    var = x.square().sum(1, keepdim=True) / max(x.shape[1], 1)
    out = (x * (var + eps).rsqrt()).reshape(row.shape)
    shape = (-1, *[1] * (row.ndim - 1))
    out = out if weight is None else out * weight.view(shape)
    return out if bias is None else out + bias.view(shape)


def by_definition(ref: Any, args: Any, kwargs: Any) -> Ragged:
    x, *rest = args
    return x.with_rows([grouped(row, *rest, **kwargs) for row in x.rows])


def instances(ref: Any, args: Any, kwargs: Any) -> Ragged:
    x, _, _, *rest = args
    return x.with_rows([grouped(row, 4, *rest, **kwargs) for row in x.rows])


def together(ref: Any, args: Any, kwargs: Any) -> Ragged:
    """Expect all positions of the batch as one example."""
    x, *rest = args
    first, count = x.dims[0] - 1, len(x.dims)
    flat = [row.flatten(first, first + count - 1) for row in x.rows]
    rest = [t.clone() if isinstance(t, torch.Tensor) and not t.requires_grad else t for t in rest]
    out = ref(torch.cat(flat, first).unsqueeze(0), *rest, **kwargs).squeeze(0)
    parts = out.split([t.shape[first] for t in flat], first)
    return x.with_rows([p.reshape(row.shape) for p, row in zip(parts, x.rows, strict=True)])


def group_norm(rule: Rule) -> Iterator[Sample]:
    for label, layout in (("channels", CHANNELS), ("wide", WIDE), ("image", IMAGE)):
        draw = lambda d, n=layout: call(d.ragged(n), 2, d.tensor(4), d.tensor(4))  # noqa: E731
        yield Sample(label, draw, by_definition)
    yield Sample("plain", lambda d: call(d.ragged(WIDE), 4, eps=0.1), alone, ("eager", "grad"), batches=LONG)


def instance_norm(rule: Rule) -> Iterator[Sample]:
    affine = lambda d: call(d.ragged(CHANNELS), None, None, d.tensor(4), d.tensor(4))  # noqa: E731
    yield Sample("affine", affine, instances)
    yield Sample("wide", lambda d: call(d.ragged(WIDE)), alone, ("eager", "grad"), batches=LONG)
    fixed = lambda d: call(d.ragged(WIDE), torch.zeros(4), torch.ones(4) * 2, use_input_stats=False)  # noqa: E731
    yield Sample("fixed", fixed, alone, ("eager", "grad"), batches=LONG)


def batch_norm(rule: Rule) -> Iterator[Sample]:
    for label, layout in (("channels", CHANNELS), ("image", IMAGE)):
        draw = lambda d, n=layout: call(d.ragged(n), None, None, d.tensor(4), d.tensor(4), True)  # noqa: E731
        yield Sample(label, draw, together, batches=LONG)
    fixed = lambda d: call(d.ragged(WIDE), torch.zeros(4), torch.ones(4) * 2, d.tensor(4))  # noqa: E731
    yield Sample("fixed", fixed, together, ("eager", "grad"), batches=LONG)


def local_response_norm(rule: Rule) -> Iterator[Sample]:
    for label, layout in (("channels", CHANNELS), ("image", IMAGE)):
        yield Sample(label, lambda d, n=layout: call(d.ragged(n), 3), alone, batches=LONG)


def rms_norm(rule: Rule) -> Iterator[Sample]:
    yield Sample("weight", lambda d: call(d.ragged(), (3,), d.tensor(3)), rowwise)
    yield Sample("two dims", lambda d: call(d.ragged(Layout((), (2, 3))), (2, 3), eps=0.1), rowwise)


def prelu(rule: Rule) -> Iterator[Sample]:
    for label, layout in (("channels", CHANNELS), ("image", IMAGE)):
        yield Sample(label, lambda d, n=layout: call(d.ragged(n), d.tensor(4)), alone)
    for label, size in (("one weight", 1), ("weights", 4)):
        zeros = lambda d, n=size: call(d.ragged(CHANNELS, "whole"), d.tensor(n))  # noqa: E731
        yield Sample(f"{label}, with zeros", zeros, alone, ("eager", "grad"))
    yield Sample("one weight", lambda d: call(d.ragged(), d.tensor(1)), alone)


def embedding_bag(rule: Rule) -> Iterator[Sample]:
    """Each row is a bag; `torch.embedding_bag` wants the weight first, and offsets."""
    if rule.reason:
        yield Sample(
            "offsets",
            lambda d: call(d.tensor(5, 3), d.ragged("flat", "class"), d.tensor(2)),
            lambda ref, args, kwargs: args[1],
        )
        return

    def want(ref: Any, args: Any, kwargs: Any) -> Tensor:
        x, weight = args
        per = kwargs.pop("per_sample_weights", None)
        weights = [None] * len(x.rows) if per is None else per.rows
        bags = zip(x.rows, weights, strict=True)
        return torch.stack([ref(row, weight, torch.tensor([0]), per_sample_weights=w, **kwargs)[0] for row, w in bags])

    for mode in ("sum", "mean", "max"):
        draw = lambda d, m=mode: call(d.ragged("flat", "class"), d.tensor(5, 3), mode=m)  # noqa: E731
        yield Sample(mode, draw, want, MODES if mode == "sum" else ("eager", "grad"))
    padded = lambda d: call(d.ragged("flat", "class"), d.tensor(5, 3), padding_idx=-4)  # noqa: E731
    yield Sample("padding_idx", padded, want, ("eager", "grad"))

    def weighted(d: Draw) -> Call:
        x = d.ragged("flat", "class")
        return call(x, d.tensor(5, 3), mode="sum", per_sample_weights=d.ragged("flat", like=x))

    yield Sample("weights", weighted, want, ("eager", "grad"))


def all_dropped(rule: Rule) -> Iterator[Sample]:
    """The one result that is not random; `test_channel.py` has the others."""
    zeros = lambda ref, args, kwargs: args[0].with_rows([row * 0 for row in args[0].rows])  # noqa: E731
    for label, layout in (("channels", CHANNELS), ("image", IMAGE)):
        yield Sample(label, lambda d, n=layout: call(d.ragged(n), 1.0, training=True), zeros)


def normalize(rule: Rule) -> Iterator[Sample]:
    """One row after another, along the ragged dim and a static one."""

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        x, p, dim = args
        return x.with_rows([ref(row, p, dim - 1) for row in x.rows])

    for p, dim in ((2.0, 2), (2.0, 1), (3.0, 2)):
        modes = MODES if p == 2 else ("eager", "grad")
        yield Sample(f"{p}, {dim}", lambda d, p=p, k=dim: call(d.ragged(), p, k), want, modes)
    yield Sample("one of two", lambda d: call(d.ragged("two"), 2.0, 1), want)
    yield Sample("the other of two", lambda d: call(d.ragged("two"), 2.0, 2), want, ("eager", "grad", "vmap"))


def gumbel_softmax(rule: Rule) -> Iterator[Sample]:
    """What does not hang on the numbers drawn: logits far apart, or so high a temperature that all are alike.

    `test_sampling.py` has the numbers and their distribution.
    """

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        x, tau, hard = args
        dim = kwargs["dim"] % (x.rows[0].ndim + 1) - 1
        return x.with_rows([ref(row, tau, hard, dim=dim) if row.numel() else row for row in x.rows])

    def draw(d: Draw, layout: str, dim: int, tau: float, hard: bool) -> Call:
        x = d.ragged(layout)
        at = dim % (x.rows[0].ndim + 1) - 1
        rows = [row * 0 + row.detach().argsort(at).argsort(at) * 1000 if hard else row for row in x.rows]
        return call(x.with_rows(rows), tau, hard, dim=dim)

    for layout, dim in (("features", 2), ("features", 1), ("second", 1), ("last", -1), ("two", 1), ("two", 3)):
        for tau, hard in ((1.0, True), (1e9, False)):
            modes = MODES if layout == "features" else ("eager", "grad")
            made = lambda d, n=layout, k=dim, t=tau, h=hard: draw(d, n, k, t, h)  # noqa: E731
            yield Sample(f"{layout}, dim {dim}, tau {tau:g}", made, want, modes)


def glu(rule: Rule) -> Iterator[Sample]:
    """Halves of a static dim, wherever it is."""

    def want(ref: Any, args: Any, kwargs: Any) -> Ragged:
        x, dim = args
        return x.with_rows([ref(row, dim if dim < 0 else dim - (dim > x.batch_dim)) for row in x.rows])

    for label, layout, dim, at in (
        ("features", Layout((), (6,)), 2, 0), ("last", Layout((), (6,)), -1, 0), ("channels", CHANNELS, 1, 0),
        ("image", IMAGE, 1, 0), ("batch second", Layout((), (6,)), 2, 1), ("batch behind", CHANNELS, 0, 1),
    ):  # fmt: skip
        made = lambda d, n=layout, k=dim, b=at: call(d.ragged(n, batch_dim=b), k)  # noqa: E731
        yield Sample(label, made, want, MODES if at == 0 else ("eager", "grad", "vmap"))


def refused(rule: Rule) -> Iterator[Sample]:
    yield Sample("any", lambda d: call(d.ragged()), lambda *_: None)


RAGGED = {
    "normalize": normalize, "pdist": refused, "gumbel_softmax": gumbel_softmax, "glu": glu,
    **dict.fromkeys(("dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout"), all_dropped),
    "embedding_bag": embedding_bag,
    "group_norm": group_norm, "instance_norm": instance_norm, "batch_norm": batch_norm, "prelu": prelu,
    "local_response_norm": local_response_norm, "rms_norm": rms_norm,
}  # fmt: skip
