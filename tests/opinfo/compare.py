"""The result of a batch beside the results of its examples: values, dtypes, gradients, second derivatives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

import tdc

TOLERANCE = {
    torch.float32: 1e-4, torch.float64: 1e-8, torch.bfloat16: 3e-2, torch.float16: 1e-2, torch.complex64: 1e-4,
    torch.complex128: 1e-8,
}  # fmt: skip
LOOSE = ("nn.functional.grid_sample",)  # adds products of numbers that half precision has rounded
TIES = ("sort", "argsort", "mode", "median", "nanmedian", "topk", "kthvalue")  # may pick any of equal elements
SPLITS = re.compile("chunk|split")  # an example that has fewer parts than another has empty ones behind them


class Unlike(Exception):
    """Results that cannot be put beside each other; the text says why."""


class NoDerivative(Exception):
    """torch does not differentiate the loop over examples."""


def is_batch(x: Any) -> bool:
    """Whether a leaf of a result is a ragged batch."""
    return isinstance(x, (tdc.NestedTensor, tdc.MaskedBatch, tdc.TensorDict))


def parts(x: Any, count: int) -> list[Any]:
    """What each example has of one leaf of a result; `count` is 1 where all examples have one result together."""
    if count == 1:
        return [x]
    if isinstance(x, tdc.TensorDict):
        return list(x.values(True, True))
    if is_batch(x):
        return list(x.unbind())
    if isinstance(x, Tensor) and x.ndim and x.shape[0] == count:
        return list(x.unbind(0))
    return [x] * count


def pairs(name: str, got: Any, want: list[Any]) -> Iterator[tuple[str, Any, Any]]:
    """Leaves of the results beside each other, with where they are.

    Raises:
        Unlike: one has more leaves than the other.
    """
    ours = pytree.tree_leaves(got, is_leaf=is_batch)
    theirs = [pytree.tree_leaves(w) for w in want]
    if SPLITS.search(name):
        theirs = [[*t, *[None] * (len(ours) - len(t))] for t in theirs]
    if any(len(t) != len(ours) for t in theirs):
        raise Unlike(f"{len(ours)} results instead of {len(theirs[0])}")
    for k, x in enumerate(ours):
        column = [t[k] for t in theirs]
        if isinstance(x, bool) or isinstance(column[0], bool):
            yield f"result {k}", bool(x), all(bool(c) for c in column)
            continue
        for i, (a, b) in enumerate(zip(parts(x, len(want)), column, strict=True)):
            if b is not None or not isinstance(a, Tensor) or a.numel():
                yield f"result {k}, example {i}", a, b


def by_value(found: list[tuple[str, Any, Any]], inputs: list[Tensor], dim: int) -> list[tuple[str, Any, Any]]:
    """Positions, which are the last result, as the elements that are there."""
    last = f"result {len(found) // len(inputs) - 1}"

    def picked(x: Tensor, index: Tensor) -> Tensor:
        return x.take_along_dim(index if index.ndim == x.ndim else index.unsqueeze(dim), dim)

    return [
        (where, picked(x, a), picked(x, b)) if where.startswith(last) else (where, a, b)
        for (where, a, b), x in zip(found, inputs * 2, strict=False)
    ]


def differ(a: Any, b: Any, loose: bool = False) -> str:
    """How one value differs from the one that it should be; empty where it does not. Half precision may be loose."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return "" if type(a) is type(b) and a == b else f"{a} instead of {b}"
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)} instead of {tuple(b.shape)}"
    if a.dtype != b.dtype:
        return f"{a.dtype} instead of {b.dtype}"
    tol = TOLERANCE.get(b.dtype, 0)
    tol *= 4 if loose and tol > 1e-3 else 1
    scale = float(b.nan_to_num(0, 0, 0).abs().max()) if tol > 1e-3 and b.numel() else 1.0  # half precision adds up
    if not torch.allclose(a, b, rtol=tol, atol=tol * max(scale, 1.0), equal_nan=True):
        return f"values {a.flatten()[:4].tolist()} instead of {b.flatten()[:4].tolist()}"
    return ""


def values(found: list[tuple[str, Any, Any]], leaves: list[Tensor], loose: bool = False) -> str:
    """The first difference of values."""
    return next((f"{where}: {text}" for where, a, b in found if (text := differ(a, b, loose))), "")


def gradients(found: list[tuple[str, Any, Any]], leaves: list[Tensor], order: int) -> str:
    """The first difference of gradients of all leaves along a random cotangent, or for order 2 of their gradients."""
    smooth = [(a, b) for _, a, b in found if isinstance(b, Tensor) and b.requires_grad]
    if not smooth or not leaves:
        return ""
    if any(not a.requires_grad for a, _ in smooth):
        return "no gradient"
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(b.shape, dtype=b.dtype, generator=generator) for _, b in smooth]
    try:
        theirs = derivatives([b for _, b in smooth], leaves, cotangents, order)
    except (RuntimeError, NotImplementedError) as error:
        raise NoDerivative(str(error)) from None
    ours = derivatives([a for a, _ in smooth], leaves, cotangents, order)
    both = [known(a, b) for a, b in zip(ours, theirs, strict=True)]
    return next((f"gradient {i}: {text}" for i, pair in enumerate(both) if (text := differ(*pair))), "")


def derivatives(outputs: list[Tensor], leaves: list[Tensor], cotangents: list[Tensor], order: int) -> list[Tensor]:
    """Gradients of the leaves along cotangents, or the gradients of those along random ones."""
    grads = torch.autograd.grad(outputs, leaves, cotangents, create_graph=order > 1, materialize_grads=True)
    if order == 1:
        return list(grads)
    generator = torch.Generator().manual_seed(8)
    again = [torch.randn(g.shape, dtype=g.dtype, generator=generator) for g in grads]
    kept = [(g, c) for g, c in zip(grads, again, strict=True) if g.requires_grad]
    if not kept:
        return [torch.zeros_like(x) for x in leaves]
    return list(torch.autograd.grad([g for g, _ in kept], leaves, [c for _, c in kept], materialize_grads=True))


def tangents(found: list[tuple[str, Any, Any]], leaves: list[Tensor]) -> str:
    """The first difference of values and of derivatives along the directions of the inputs."""
    smooth = [(where, a, b) for where, a, b in found if isinstance(a, Tensor) and isinstance(b, Tensor)]
    moved = [(f"{where}, tangent", *known(tangent(a), tangent(b))) for where, a, b in smooth]
    return values(found, leaves) or values(moved, leaves)


def known(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives beside each other where torch knows them: its NaN tells nothing."""
    return torch.where(b.isnan(), b, a) if a.shape == b.shape else a, b


def tangent(x: Tensor) -> Tensor:
    """The derivative of a value; zeros where it has none."""
    found = forward_ad.unpack_dual(x).tangent
    return torch.zeros_like(x) if found is None else found


CHECKS: dict[str, Callable[..., str]] = {
    "values": values, "grad": partial(gradients, order=1), "second": partial(gradients, order=2), "forward": tangents,
}  # fmt: skip
