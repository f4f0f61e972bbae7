"""Samples of pointwise operations: layouts and dtypes for one operand, kinds of operands for several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from harness import LAYOUTS, Call, Draw, Layout, Sample, call, rowwise

from tdc.core.rules import MODES, Rule
from tdc.testing.batches import Dense, Ragged, build_masked, loop

LIGHT = ("eager", "grad", "vmap")
TRACED_FORMS = {("features", "rows"), ("features", "full"), ("two", "full")}
THOROUGH = {
    "abs", "neg", "sign", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "square", "reciprocal", "sin", "cos", "tan",
    "tanh", "sigmoid", "floor", "ceil", "isnan", "isfinite", "logical_not", "bitwise_not", "clone", "detach", "relu",
    "gelu", "silu", "zeros_like", "ones_like", "dropout",
}  # fmt: skip
INTEGERS = {"bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor"}
COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor"}
SPECIAL = {"isnan", "isfinite", "nan_to_num", "isinf", "isposinf", "isneginf"}
DOMAIN = {
    **dict.fromkeys(COMPARISONS, "whole"), **dict.fromkeys(INTEGERS, "int"), **dict.fromkeys(SPECIAL, "special"),
    **dict.fromkeys((
        "log", "log1p", "sqrt", "rsqrt", "reciprocal", "div", "remainder", "pow", "log2", "log10", "digamma", "lgamma",
        "entr", "fmod", "xlogy", "xlog1py", "float_power", "addcdiv",
    ), "positive"),
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv", "logit", "ndtri"), "unit"),
    **dict.fromkeys(("acosh", "mvlgamma", "polygamma"), "above one"), "zeta": "large",
    **dict.fromkeys(("bitwise_left_shift", "bitwise_right_shift", "gcd", "lcm", "floor_divide"), "natural"),
    **dict.fromkeys(("imag", "conj_physical", "resolve_conj", "angle"), "complex"),
    **dict.fromkeys((
        "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0", "modified_bessel_i1",
        "modified_bessel_k0", "modified_bessel_k1", "spherical_bessel_j0", "scaled_modified_bessel_k0",
        "scaled_modified_bessel_k1", "airy_ai", "nextafter", "igamma", "igammac", "signbit", "isin", "bucketize",
        "heaviside",
    ), "constant"),
    **dict.fromkeys(("short", "char", "byte", "isclose"), "whole"), "bernoulli": "coin",
}  # fmt: skip
ANY_DTYPE = {
    "abs", "neg", "sign", "square", "floor", "ceil", "isnan", "isfinite", "logical_not", "clone", "detach", "relu",
    "exp", "sqrt", "sigmoid", "zeros_like", "ones_like",
}  # fmt: skip
NO_BOOL = {"neg", "sign", "floor", "ceil", "abs", "square", "relu"}
FULL_PRECISION = {"erfcx", "i1", "i1e", "log_ndtr", "chalf"}  # torch has no kernel for half precision on CPU
NO_NUMBERS = {
    "maximum",
    "minimum",
    "atan2",
    "logical_and",
    "logical_or",
    "hypot",
    "fmax",
    "fmin",
    "nextafter",
    "logaddexp",
    "logaddexp2",
    "heaviside",
    "gcd",
    "lcm",
    "logical_xor",
    "isclose",
    "igamma",
    "igammac",
    "ldexp",
    "complex",
    "polar",
}  # take tensors only


def domain(rule: Rule) -> str:
    """Where an operation is defined, smooth and interesting."""
    return DOMAIN.get(rule.name, "real")


def unary(rule: Rule) -> Iterator[Sample]:
    """One operand in every layout, and other dtypes where they make sense."""
    args, kwargs = EXTRA.get(rule.name, ((), {}))

    def of(label: str, modes: tuple[str, ...] = LIGHT, dom: str = domain(rule), **options: Any) -> Sample:
        return Sample(label, lambda d: call(d.ragged(domain=dom, **options), *args, **kwargs), rowwise, modes)

    for layout in LAYOUTS:
        traced = layout == "features" or (layout == "two" and rule.name in THOROUGH)
        yield of(layout, MODES if traced else LIGHT, layout=layout)
    yield of("batch second", layout="features", batch_dim=1)
    yield of("no extent", layout="features", extent=False)
    if rule.name in ANY_DTYPE:
        yield of("int", dom="natural")
    if rule.name in ANY_DTYPE - NO_BOOL:
        yield of("bool", dom="bool")
    if domain(rule) == "real" and rule.name not in FULL_PRECISION:
        yield of("half", dom="half")
    yield Sample("no elements", of("").draw, rowwise, ("eager", "grad"), ((0, 0, 0),))


EXTRA: dict[str, Call] = {
    "dropout": call(0.5, training=False), "full_like": call(2.5), "fill": call(2.5), "elu": call(0.7),
    "hardtanh": call(-0.5, 0.5),
    "leaky_relu": call(0.2), "softplus": call(beta=2.0), "gelu": call(approximate="tanh"), "mvlgamma": call(2),
    "isin": call(torch.tensor([0.5, 1.0])), "bucketize": call(torch.tensor([0.7, 1.1]), right=True),
    "threshold": call(0.1, 2.5), "rrelu": call(0.1, 0.3, training=False), "celu": call(0.7), "hardshrink": call(0.3),
    "softshrink": call(0.3), "alpha_dropout": call(0.5, training=False), "randint_like": call(3, 4),
    "nan_to_num": call(nan=0.5, posinf=2.0),
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
    yield of("dense, batch last", lambda d: batch_last(d, dom, second))
    yield of("two, dense of one row", lambda d: one_row(d, dom, second))
    if rule.name in ("add", "sub", "eq"):
        yield Sample("pairs", lambda d: pairs(d, dom), of_pairs)
        column = Layout((), (1, 2))
        yield of("a row of pairs", lambda d: call(d.ragged("two", dom), d.ragged(column, dom)))
    if dom not in ("int", "real"):
        yield of("int", lambda d: call(d.ragged(domain="natural"), d.ragged(domain="natural")))
    if rule.name == "pow":
        yield of("number first", lambda d: call(2.5, d.ragged()), MODES)


def one_row(d: Draw, dom: str, second: str) -> Call:
    """A batch of two ragged dims and a dense operand that has size 1 along the first of them."""
    widths = [size[1] for size in d.sizes(LAYOUTS["two"])]
    whole = d.tensor(len(widths), 1, max(widths) + d.slack, 2, domain=second)
    return call(d.ragged("two", dom), Dense(whole, [x[:, :n] for x, n in zip(whole, widths, strict=True)], (0, 2)))


def batch_last(d: Draw, dom: str, second: str) -> Call:
    """A ragged operand and a dense one, with the batch behind all other dims."""
    dense = d.tensor(3, len(d.lengths), domain=second)
    return call(d.ragged(domain=dom, batch_dim=2), Dense(dense, list(dense.unbind(1)), (1,)))


def pairs(d: Draw, dom: str) -> Call:
    """Each place of a row against each of another batch."""
    x, y = d.ragged(domain=dom), d.ragged(domain=dom, lengths=tuple([n % 3 + 1 for n in d.lengths]))
    return call(replace(x, rows=[r[:, None] for r in x.rows]), replace(y, rows=[r[None] for r in y.rows], dims=(2,)))


def of_pairs(ref: Any, args: Any, kwargs: Any) -> Ragged:
    return Ragged(loop(ref, args, kwargs), (1, 2))


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


def second(rule: Rule) -> Iterator[Sample]:
    """Members of the large family of `binary`: one operand of each kind, one of them traced."""
    dom = domain(rule)

    def same(d: Draw, layout: str) -> Call:
        return call(d.ragged(layout, dom), d.ragged(layout, dom))

    yield Sample("features", lambda d: same(d, "features"), rowwise)
    yield Sample("two", lambda d: same(d, "two"), rowwise, LIGHT)
    for form in ("features", "rows", "full"):
        draw = lambda d, f=form: call(d.ragged("second", dom), d.dense("second", f, dom))  # noqa: E731
        yield Sample(f"dense {form}", draw, rowwise, LIGHT)
    yield Sample("dense first", lambda d: call(d.dense("two", "rows", dom), d.ragged("two", dom)), rowwise, LIGHT)
    if rule.name not in NO_NUMBERS:
        number = 2 if dom in ("int", "natural") else 1.5
        yield Sample("number", lambda d: call(d.ragged(domain=dom), number), rowwise, LIGHT)


def ternary(rule: Rule) -> Iterator[Sample]:
    dom = domain(rule)
    yield Sample("ragged", lambda d: call(*[d.ragged(domain=dom) for _ in range(3)], value=0.5), rowwise)
    dense = lambda d: call(d.ragged("two"), d.dense("two", "rows", dom), d.dense("two", "full", dom))  # noqa: E731
    yield Sample("dense", dense, rowwise, LIGHT)


def polygamma(rule: Rule) -> Iterator[Sample]:
    yield Sample("first", lambda d: call(1, d.ragged(domain=domain(rule))), rowwise)


def moved(rule: Rule) -> Iterator[Sample]:
    expect = rowwise if rule.modes else lambda *_: None  # there is no such device
    for layout in ("features", "two"):
        yield Sample(layout, lambda d, n=layout: call(d.ragged(n)), expect, MODES if layout == "two" else LIGHT)


def to(rule: Rule) -> Iterator[Sample]:
    yield Sample("ragged", lambda d: call(d.ragged(), d.ragged(domain="half")), rowwise)
    yield Sample("dense", lambda d: call(d.ragged("two"), torch.tensor(1.0).double()), rowwise, LIGHT)
    as_batch = lambda ref, args, kwargs: args[0].to(torch.bfloat16)  # noqa: E731
    yield Sample("of a tensor", lambda d: call(torch.ones(7), d.ragged(domain="half")), as_batch, ("eager", "grad"))


def shaped(rule: Rule) -> Iterator[Sample]:
    """What holds anything, or random numbers: only shapes and dtypes are compared, of leaves without elements."""
    for layout in (Layout((0,), ()), Layout((), (2, 0), 2)):
        yield Sample(f"{layout}", lambda d, n=layout: call(d.ragged(n)), rowwise)
    yield Sample("dtype", lambda d: call(d.ragged(Layout((0,), ())), dtype=torch.float64), rowwise, LIGHT)


def numel(rule: Rule) -> Iterator[Sample]:
    """Of packed rows the real elements, of padded ones the rectangle."""

    def want(ref: Any, args: Any, kwargs: Any) -> int:
        (x,) = args
        if rule.kind == "nested":
            return sum(row.numel() for row in x.rows)
        return build_masked(x).data.numel()

    yield Sample("rows", lambda d: call(d.ragged("two")), want)


def whole(rule: Rule) -> Iterator[Sample]:
    """One Python bool: the rows have the same lengths and values or not."""
    eager = ("eager", "grad")

    def of(label: str, expected: bool, draw: Any) -> Sample:
        return Sample(label, draw, lambda ref, args, kwargs: expected, MODES if label == "itself" else eager)

    yield of("itself", True, lambda d: call(*[d.ragged("two")] * 2))
    yield of("copy", True, lambda d: call(x := d.ragged(), replace(x, rows=[row.clone() for row in x.rows])))
    yield of("other values", rule.name == "is_same_size", lambda d: call(d.ragged(), d.ragged()))
    yield of("other lengths", False, lambda d: call(d.ragged("flat"), d.ragged("flat", lengths=(*d.lengths[:-1], 9))))
    yield of("other sizes", False, lambda d: call(d.ragged("features"), d.ragged("flat")))
    yield of("a tensor", False, lambda d: call(d.ragged(), d.tensor(3)))


def two_results(rule: Rule) -> Iterator[Sample]:
    """One batch for each result."""

    def want(ref: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
        (x,) = args
        return tuple([x.with_rows([ref(row)[i] for row in x.rows]) for i in range(2)])

    for layout in ("features", "two"):
        yield Sample(layout, lambda d, n=layout: call(d.ragged(n)), want)


POLYNOMIALS = tuple(
    f"{name}_polynomial_{kind}"
    for name, kinds in (
        *(("chebyshev", "tuvw"), ("shifted_chebyshev", "tuvw"), ("laguerre", "l"), ("legendre", "p")),
        ("hermite", ("h", "he")),
    )
    for kind in kinds
)
DOMAIN |= dict.fromkeys(POLYNOMIALS, "constant")
NEW_BINARY = (
    "hypot", "fmod", "fmax", "fmin", "copysign", "nextafter", "ldexp", "logaddexp", "logaddexp2", "heaviside", "xlogy",
    "float_power", "rsub", "gcd", "lcm", "bitwise_left_shift", "bitwise_right_shift", "logical_xor", "isclose",
    "clamp_min", "clamp_max", "igamma", "igammac", "xlog1py", "zeta", "complex", "polar", *POLYNOMIALS,
)  # fmt: skip
BINARY = (
    "add", "sub", "mul", "div", "floor_divide", "remainder", "pow", "maximum", "minimum", "atan2", "eq", "ne", "lt",
    "le", "gt", "ge", "logical_and", "logical_or", "bitwise_and", "bitwise_or", "bitwise_xor",
)  # fmt: skip
RAGGED = {
    "pointwise": unary, "random": unary, "factory": unary, **dict.fromkeys(BINARY, binary), "where": where,
    "clamp": clamp, "lerp": lerp, "masked_fill": masked_fill, **dict.fromkeys(NEW_BINARY, second), "addcmul": ternary,
    "addcdiv": ternary, "frexp": two_results, "polygamma": polygamma, "cpu": moved, "cuda": moved,
    "type_as": to, "to": to, "comparison": whole, "numel": numel,
    **dict.fromkeys(("empty_like", "rand_like", "randn_like"), shaped),
}  # fmt: skip
