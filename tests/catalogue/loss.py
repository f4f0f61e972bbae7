"""Samples of losses of ragged batches: a mean over real elements, vectors or rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from harness import Call, Draw, Layout, Sample, call
from torch import Tensor

from tdc.core.rules import MODES, Rule

LIGHT = ("eager", "grad", "vmap")
INPUT = {"binary_cross_entropy": "unit", "kl_div": "real", "poisson_nll_loss": "unit"}
TARGET = {"binary_cross_entropy": "unit", "binary_cross_entropy_with_logits": "unit", "kl_div": "positive"}
SIGNS = {"soft_margin_loss", "hinge_embedding_loss"}


def joined(ref: Any, args: Any, kwargs: Any) -> Any:
    """Expect the loss of all rows one after another, and each row's own where nothing is reduced."""
    first, ragged = args[0], [isinstance(a, type(args[0])) for a in args]
    if kwargs.get("reduction") == "none":
        parts = [[a.rows[i] if r else a for a, r in zip(args, ragged, strict=True)] for i in range(len(first.rows))]
        losses = [ref(*part, **kwargs) for part in parts]
        return first.with_rows(losses)
    whole = [torch.cat([row.flatten() for row in a.rows]) if r else a for a, r in zip(args, ragged, strict=True)]
    return ref(*whole, **kwargs)


def sign(d: Draw, layout: str | Layout) -> Any:
    x = d.ragged(layout, "bit")
    return replace(x, rows=[row * 2.0 - 1 for row in x.rows])


def elementwise(rule: Rule) -> Iterator[Sample]:
    def draw(d: Draw, layout: str, **options: Any) -> Call:
        x = d.ragged(layout, INPUT.get(rule.name, "real"))
        target = sign(d, layout) if rule.name in SIGNS else d.ragged(layout, TARGET.get(rule.name, "real"))
        if rule.name == "margin_ranking_loss":
            return call(x, target, sign(d, layout), **options)
        if rule.name == "gaussian_nll_loss":
            return call(x, target, d.ragged(layout, "positive"), **options)
        return call(x, target, **options)

    yield Sample("mean", lambda d: draw(d, "features"), joined)
    yield Sample("sum", lambda d: draw(d, "two", reduction="sum"), joined, ("eager", "grad"))
    yield Sample("none", lambda d: draw(d, "second", reduction="none"), joined, LIGHT)


def kl_div(rule: Rule) -> Iterator[Sample]:
    """torch warns of its "mean", which divides by elements."""
    yield from [sample for sample in elementwise(rule) if sample.label != "mean"]

    def want(ref: Any, args: Any, kwargs: Any) -> Tensor:
        return joined(ref, args, {"reduction": "sum"}) / len(args[0].rows)

    draw = lambda d: call(d.ragged(), d.ragged(domain="positive"), reduction="batchmean")  # noqa: E731
    yield Sample("batchmean", draw, want)


def by_vector(rule: Rule) -> Iterator[Sample]:
    """Vectors of four numbers, at each position of the ragged dim."""
    flat = Layout((), ())

    def draw(d: Draw, **options: Any) -> Call:
        x = d.ragged(Layout((), (4,)))
        if rule.name == "multi_margin_loss":
            return call(x, d.ragged(flat, "class"), **options)
        if rule.name == "multilabel_margin_loss":
            return call(x, d.ragged(Layout((), (4,)), "class"), **options)
        if rule.name == "multilabel_soft_margin_loss":
            return call(x, d.ragged(Layout((), (4,)), "coin"), **options)
        other = d.ragged(Layout((), (4,)))
        if rule.name == "cosine_embedding_loss":
            return call(x, other, sign(d, flat), **options)
        return call(x, other, d.ragged(Layout((), (4,))), **options)

    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        whole = [torch.cat(a.rows) for a in args]
        loss = ref(*whole, **kwargs)
        if kwargs.get("reduction") != "none":
            return loss
        return args[0].with_rows(list(loss.split([len(row) for row in args[0].rows])))

    yield Sample("mean", lambda d: draw(d), want)
    yield Sample("none", lambda d: draw(d, reduction="none"), want, MODES if rule.kind == "nested" else LIGHT)


def nll_loss(rule: Rule) -> Iterator[Sample]:
    def want(ref: Any, args: Any, kwargs: Any) -> Any:
        x, target = args
        loss = ref(torch.cat(x.rows), torch.cat(target.rows), **kwargs)
        if kwargs.get("reduction") != "none":
            return loss
        return target.with_rows(list(loss.split([len(row) for row in x.rows])))

    draw: Callable[..., Call] = lambda d, **k: call(d.ragged(Layout((), (4,))), d.ragged("flat", "class"), **k)  # noqa: E731
    yield Sample("mean", draw, want)
    yield Sample("none", lambda d: draw(d, reduction="none"), want, LIGHT)
    yield Sample("ignored class", lambda d: draw(d, ignore_index=2), want, LIGHT)


def ctc_loss(rule: Rule) -> Iterator[Sample]:
    """Rows of more frames than targets; with `zero_infinity` of too few, where targets repeat."""

    def draw(d: Draw, reduction: str, **options: Any) -> Call:
        few = "zero_infinity" in options
        frames = d.ragged(Layout((), (6,)), lengths=tuple([n + 1 if few else 2 * n + 3 for n in d.lengths]))
        return call(frames, d.ragged("flat", "natural"), None, None, reduction=reduction, **options)

    def want(ref: Any, args: Any, kwargs: Any) -> Tensor:
        x, target, _, _ = args
        pairs = zip(x.rows, target.rows, strict=True)
        options = {**kwargs, "reduction": "none"}
        losses = [ref(a, b, torch.tensor(len(a)), torch.tensor(len(b)), **options) for a, b in pairs]
        if kwargs["reduction"] != "mean":
            return torch.stack(losses) if kwargs["reduction"] == "none" else torch.stack(losses).sum()
        counts = [max(len(row), 1) for row in target.rows]
        return torch.stack([loss / n for loss, n in zip(losses, counts, strict=True)]).mean()

    for reduction in ("mean", "none"):
        yield Sample(reduction, lambda d, r=reduction: draw(d, r), want, MODES if reduction == "mean" else LIGHT)
    yield Sample("another blank", lambda d: draw(d, "sum", blank=5), want, LIGHT)
    for reduction in ("mean", "sum"):
        infinite = lambda d, r=reduction: draw(d, r, zero_infinity=True)  # noqa: E731
        yield Sample(f"{reduction}, zero_infinity", infinite, want, (*LIGHT, "compile"))


ELEMENTWISE = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
    "poisson_nll_loss", "gaussian_nll_loss", "soft_margin_loss", "hinge_embedding_loss", "margin_ranking_loss",
)  # fmt: skip
BY_VECTOR = (
    "multi_margin_loss", "multilabel_margin_loss", "multilabel_soft_margin_loss", "cosine_embedding_loss",
    "triplet_margin_loss", "triplet_margin_with_distance_loss",
)  # fmt: skip
RAGGED = {
    **dict.fromkeys(ELEMENTWISE, elementwise), **dict.fromkeys(BY_VECTOR, by_vector), "kl_div": kl_div,
    "nll_loss": nll_loss, "ctc_loss": ctc_loss,
}  # fmt: skip
