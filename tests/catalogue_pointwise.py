"""Samples of pointwise operations: layouts and dtypes for one operand, kinds of operands for several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from batches import LAYOUTS, Draw
from harness import Call, Sample, call, rowwise

from tdc._rules import MODES, Rule

LIGHT = ("eager", "grad", "vmap")
TRACED_FORMS = {("features", "rows"), ("features", "full"), ("two", "full")}
POSITIVE = {"log", "log1p", "sqrt", "rsqrt", "reciprocal", "div", "remainder", "pow"}
INTEGERS = {"bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"}
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"}
SPECIAL = {"isnan", "isfinite", "nan_to_num"}
ANY_DTYPE = {
    "abs", "neg", "sign", "square", "floor", "ceil", "isnan", "isfinite", "logical_not", "clone", "detach", "relu",
    "exp", "sqrt", "sigmoid", "zeros_like", "ones_like",
}  # fmt: skip
NO_BOOL = {"neg", "sign", "floor", "ceil", "abs", "square", "relu"}
NO_NUMBERS = {"maximum", "minimum", "atan2", "logical_and", "logical_or"}  # take tensors only


def domain(rule: Rule) -> str:
    """Where an operation is defined, smooth and interesting."""
    if rule.name in POSITIVE:
        return "positive"
    if rule.name == "floor_divide":
        return "natural"  # torch has no derivative for it, not even zero
    if rule.name in SPECIAL:
        return "special"
    return "int" if rule.name in INTEGERS else "whole" if rule.name in COMPARISONS else "real"


def unary(rule: Rule) -> Iterator[Sample]:
    """One operand in every layout, and other dtypes where they make sense."""
    args, kwargs = EXTRA.get(rule.name, ((), {}))

    def of(label: str, modes: tuple[str, ...] = LIGHT, dom: str = domain(rule), **options: Any) -> Sample:
        return Sample(label, lambda d: call(d.ragged(domain=dom, **options), *args, **kwargs), rowwise, modes)

    for layout in LAYOUTS:
        yield of(layout, MODES if layout in ("features", "two") else LIGHT, layout=layout)
    yield of("batch second", layout="features", batch_dim=1)
    yield of("no extent", layout="features", extent=False)
    if rule.name in ANY_DTYPE:
        yield of("int", dom="natural")
    if rule.name in ANY_DTYPE - NO_BOOL:
        yield of("bool", dom="bool")
    if rule.name not in INTEGERS:
        yield of("half", dom="half" if domain(rule) == "real" else domain(rule))
    yield Sample("no elements", of("").draw, rowwise, ("eager", "grad"), ((0, 0, 0),))


EXTRA: dict[str, Call] = {
    "dropout": call(0.5, training=False), "full_like": call(2.5), "elu": call(0.7), "hardtanh": call(-0.5, 0.5),
    "leaky_relu": call(0.2), "softplus": call(beta=2.0), "gelu": call(approximate="tanh"),
}  # fmt: skip


def binary(rule: Rule) -> Iterator[Sample]:
    """A ragged operand with every kind of second one, on both sides."""
    dom = domain(rule)
    second = {"pow": "real"}.get(rule.name, dom)

    def of(label: str, draw: Any, modes: tuple[str, ...] = LIGHT) -> Sample:
        return Sample(label, draw, rowwise, modes)

    def same(d: Draw, layout: str, shared: bool) -> Call:
        x = d.ragged(layout, dom)
        return call(x, d.ragged(layout, second, like=x if shared else None))

    for layout in LAYOUTS:
        modes = MODES if layout in ("features", "two") else LIGHT
        yield of(f"{layout}, by identity", lambda d, n=layout: same(d, n, True), modes)
        yield of(f"{layout}, by value", lambda d, n=layout: same(d, n, False), MODES if layout == "features" else LIGHT)
        for form in ("scalar", "features", "rows", "full"):
            draw = lambda d, n=layout, f=form: call(d.ragged(n, dom), d.dense(n, f, second))  # noqa: E731
            yield of(f"{layout}, dense {form}", draw, MODES if (layout, form) in TRACED_FORMS else LIGHT)
    if rule.name not in NO_NUMBERS:
        number = 2 if rule.name in INTEGERS else 1.0 if rule.name in COMPARISONS else 2.5
        yield of("number", lambda d: call(d.ragged(domain=dom), number), MODES)
    yield of("dense first", lambda d: call(d.dense("features", "rows", dom), d.ragged(domain=second)), MODES)
    yield of("itself", lambda d: call(*[d.ragged(domain=dom)] * 2))
    if dom not in ("int", "real"):
        yield of("int", lambda d: call(d.ragged(domain="natural"), d.ragged(domain="natural")))
    if rule.name == "pow":
        yield of("number first", lambda d: call(2.5, d.ragged()), MODES)


def where(rule: Rule) -> Iterator[Sample]:
    def of(d: Draw, layout: str, mask: str, other: Any = None) -> Call:
        condition = d.ragged(layout, "bool") if mask == "ragged" else d.dense(layout, mask, "bool")
        return call(condition, d.ragged(layout), d.dense(layout, "rows") if other is None else other)

    yield Sample("dense else", lambda d: of(d, "features", "ragged"), rowwise)
    yield Sample("number else", lambda d: of(d, "two", "ragged", 0.5), rowwise)
    yield Sample("dense mask", lambda d: of(d, "second", "full"), rowwise)
    yield Sample("row mask", lambda d: of(d, "features", "rows"), rowwise)


def clamp(rule: Rule) -> Iterator[Sample]:
    yield Sample("numbers", lambda d: call(d.ragged(), -0.5, 0.5), rowwise)
    yield Sample("keyword", lambda d: call(d.ragged("two"), max=0.5), rowwise)
    yield Sample("dense", lambda d: call(d.ragged(), min=d.dense("features", "rows")), rowwise)
    yield Sample("ragged", lambda d: call(d.ragged("last"), d.ragged("last"), d.dense("last", "full")), rowwise)


def lerp(rule: Rule) -> Iterator[Sample]:
    yield Sample("number", lambda d: call(d.ragged(), d.ragged(), 0.3), rowwise)
    yield Sample("dense", lambda d: call(d.ragged("two"), d.dense("two", "full"), d.dense("two", "rows")), rowwise)


def masked_fill(rule: Rule) -> Iterator[Sample]:
    yield Sample("ragged", lambda d: call(d.ragged(), d.ragged(domain="bool"), 0.5), rowwise)
    yield Sample("dense", lambda d: call(d.ragged("two"), d.dense("two", "full", "bool"), -1.0), rowwise)
    tensor = lambda d: call(d.ragged(), d.ragged(domain="bool"), d.tensor())  # noqa: E731
    yield Sample("tensor", tensor, rowwise, ("eager", "grad", "compile", "export"))  # torch has no batching rule


BINARY = (
    "add", "sub", "mul", "div", "floor_divide", "remainder", "pow", "maximum", "minimum", "atan2", "eq", "ne", "lt",
    "le", "gt", "ge", "logical_and", "logical_or", "bitwise_and", "bitwise_or", "bitwise_xor",
)  # fmt: skip
RAGGED = {
    "pointwise": unary, "random": unary, "factory": unary, **dict.fromkeys(BINARY, binary), "where": where,
    "clamp": clamp, "lerp": lerp, "masked_fill": masked_fill,
}  # fmt: skip
